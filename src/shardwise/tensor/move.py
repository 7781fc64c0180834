"""Moving what a ShardedTensor holds: to another layout, whole to every rank, whole to one rank.

Functions here take anything with a layout, local tensors and a comm, and return new local tensors: the source stays
as it is. All ranks first agree on the request, in one small exchange, so that a mismatch is an error on every rank
and not a hang. Where the comm can, the data are on their way meanwhile; they are used only if all ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise._torch import is_dispatch_mode_on, is_dual_level
from shardwise.comm import Comm, advise_ranks, agree, name_ranks, start_agreeing
from shardwise.comm.agree import agree_and_run, write_request
from shardwise.comm.protocol import find_offering
from shardwise.geometry import (
    Box,
    EnumerableSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Piece,
    Replicate,
    ShardingSpec,
    format_layout,
    parse_placements,
)
from shardwise.geometry.notation.by_axis import read_spec
from shardwise.geometry.torch_words import is_device_mesh, to_mesh
from shardwise.tensor.caches import cache_by_identity, cache_plans
from shardwise.tensor.copied_views import CopiedView
from shardwise.tensor.moving.autograd import (
    LayoutMove,
    StartedMove,
    dual_layout,
    move_locals,
    move_on_tape,
    tape_inputs,
)
from shardwise.tensor.moving.execute import RunningMoves, RunningTransfers, TransferJob, resolve_lazy, start_transfers
from shardwise.tensor.moving.parts import find_whole_collective, notify_watchers, plan_for_rank
from shardwise.tensor.moving.reductions import check_reducible
from shardwise.tensor.moving.shared_moves import SharedMove, find_shared_move
from shardwise.tensor.recorder import profiled_move, recorded_wait, recorders
from shardwise.transfer import Transfer

DEFAULT_BUFFER_BYTES = 1 << 30


class MovableTensor(Protocol):
    """What a ShardedTensor holds on this rank."""

    sharding: Layout
    local_parts: tuple[Tensor, ...]
    comm: Comm
    _anchor: Tensor | None
    _copied_from: CopiedView | None

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def target_layout(layout: Layout, target: Any, placements: Any = None) -> Layout:
    """The layout that a user requested: a spec, a Layout, or placements on the same mesh or on one that is passed.

    Placements may be in notation; a mesh and placements may be torch's.
    """
    if type(target) is Layout and placements is None and target.shape == layout.shape:
        return target
    if isinstance(target, Mesh) or is_device_mesh(target):
        return mesh_spec_of(target, placements).layout(layout.shape)
    if placements is not None:
        if target is not None:
            raise LayoutError(f"placements go with a mesh, and {target!r} is not one; pass one of the two")
        target = placements
    if isinstance(target, ShardingSpec):
        return target.layout(layout.shape)
    if isinstance(target, Layout):
        if target.shape != layout.shape:
            raise LayoutError(f"a tensor of shape {layout.shape} cannot take a layout of shape {target.shape}")
        return target
    own = layout.spec.mesh if isinstance(layout.spec, MeshSpec) else None
    if isinstance(target, str) and (":" in target or target.split()[:1] == ["as"]):
        return read_spec(target, own, layout.ranks).layout(layout.shape)
    listed = parse_placements(target) if isinstance(target, str) else target
    if not isinstance(layout.spec, MeshSpec):
        raise LayoutError(
            f"placements need a mesh, and this tensor is laid out by {layout.spec!r}; pass a MeshSpec(mesh, placements)"
        )
    if target is None or isinstance(target, dict | int | float | torch.device | Tensor):
        raise LayoutError(
            "redistribute takes a spec, a Layout, placements such as (Shard(0),), or a mesh and placements; got "
            f"{type(target).__name__}: {_brief(target)}"
        )
    return MeshSpec(layout.spec.mesh, listed).layout(layout.shape)


def _brief(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def mesh_spec_of(mesh: Any, placements: Any) -> MeshSpec:
    """The spec of a mesh and placements, each ours or torch's; placements may be in notation."""
    if placements is None:
        raise LayoutError(
            f"the mesh {to_mesh(mesh)} needs placements, one for each axis, such as (Shard(0), Replicate())"
        )
    return MeshSpec(mesh, parse_placements(placements) if isinstance(placements, str) else placements)


@lru_cache(maxsize=1024)
def replicated_layout(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Layout:
    """The layout in which each of these ranks holds the whole tensor."""
    return MeshSpec(Mesh(("all",), ranks), (Replicate(),)).layout(shape)


@lru_cache(maxsize=1024)
def single_rank_layout(shape: tuple[int, ...], rank: int) -> Layout:
    """The layout in which one rank holds the whole tensor."""
    return EnumerableSpec([Piece(Box.whole(shape), rank)]).layout(shape)


@cache_by_identity
def format_layout_text(layout: Layout) -> str:
    """A layout for messages and for comparison between ranks, without a dtype; written once, since every move asks."""
    if len(layout.table) > 64:
        return f"{layout!r} {layout._layout_digest.hex()}"
    return format_layout(layout, None)


def describe_tensor(dtype: torch.dtype, layout: Layout) -> str:
    """A tensor for messages: its dtype, shape and layout.

    >>> describe_tensor(torch.float64, replicated_layout((4, 2), (0, 1)))
    'torch.float64[4,2] on all=2: R'
    """
    return f"{dtype}{format_layout_text(layout)}"


def buffer_limit(src: Layout, dst: Layout, itemsize: int, wanted: int | None) -> int | None:
    """The limit to plan with: none where everything a rank sends and receives fits in it anyway."""
    limit = DEFAULT_BUFFER_BYTES if wanted is None else wanted
    return None if max_elements_in_flight(src, dst) * itemsize <= limit else limit


@cache_plans
def max_elements_in_flight(src: Layout, dst: Layout) -> int:
    """An upper bound of the elements that a rank sends and receives in one step, however it is planned.

    A rank sends what it holds (or has reduced) once to each copy in the destination; it receives what it needs (or
    reduces) once for each addend in the source.
    """
    held = max(src.elements_per_rank().values(), default=0)
    needed = max(dst.elements_per_rank().values(), default=0)
    addends = int(src.table.addends.max(initial=0)) + 1
    copies = int(np.bincount(dst.table.cells).max(initial=1))
    return held * copies + (max(held, needed) if addends > 1 else needed) * addends


def check_move(
    held: MovableTensor, dst: Layout, label: str, fields: dict[str, Any] | None = None, problem: str | None = None
) -> None:
    """Raise on every rank unless all request the same move and it is possible."""
    asked, problem = _describe_request(held, dst, fields or {}, problem)
    with recorded_wait(held.comm, f"{label}: agree") if recorders else nullcontext():
        agree(held.comm, asked, label=label, problem=problem)


def check_and_move(
    held: MovableTensor, dst: Layout, label: str, fields: dict[str, Any], problem: str | None = None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Check a move as `check_move` does, and make it.

    Where ranks are threads, one of them makes it for all; where the comm can, the data travel while the ranks agree.
    """
    limit = fields.get("max_buffer_bytes")
    if problem is None and (asking := _find_request(held, dst, fields, limit)) is not None:
        moved = _move_together(held, asking, label)
        if moved is not None and not is_move_recorded(held):
            return moved, None
        return move_to(held, dst, label, limit, MadeMove(moved))
    if problem is not None or not (travels_early(held, dst) or _reduces_early(held, dst, limit)):
        check_move(held, dst, label, fields, problem)
        return move_to(held, dst, label, limit)
    asked, problem = _describe_request(held, dst, fields, problem)
    if problem is not None:
        agree(held.comm, asked, label=label, problem=problem)
    with profiled_move(label, held.sharding, dst):
        return start_while_agreeing([held], [dst], asked, label, limit).wait()[0], None


@dataclass(slots=True)
class MadeMove:
    """A move that was made while the ranks agreed on it, if it was."""

    results: tuple[Tensor, ...] | None

    def take(self) -> tuple[Tensor, ...] | None:
        """Its result, the first time; None later."""
        results, self.results = self.results, None
        return results


@dataclass(frozen=True, eq=False, slots=True)
class MoveRequest:
    """A move between two layouts, which keep their ids: how one rank makes it for all, and what the ranks compare."""

    src: Layout
    dst: Layout
    shared: SharedMove
    written: tuple[bytes, bytes]


_requests: dict[tuple[Any, ...], MoveRequest] = {}
_KEPT_REQUESTS = 1024


def _find_request(held: MovableTensor, dst: Layout, fields: dict[str, Any], limit: Any) -> MoveRequest | None:
    """The request of a move that one rank can make for all; None if there is no such, or something is wrong with it."""
    src, comm = held.sharding, held.comm
    if find_offering(comm) is None or recorders or held._copied_from is not None:
        return None
    if is_dispatch_mode_on() or is_dual_level() or src is dst:
        return None
    key = (id(src), id(dst), held.dtype, comm.ranks, repr(fields))
    known = _requests.get(key)
    if known is None and not (src.depends_on_data or dst.depends_on_data or src == dst):
        known = _make_request(held, dst, fields, limit)
        if known is not None:
            if len(_requests) >= _KEPT_REQUESTS:
                _requests.clear()
            _requests[key] = known
    return known


def _make_request(held: MovableTensor, dst: Layout, fields: dict[str, Any], limit: Any) -> MoveRequest | None:
    asked, problem = _describe_request(held, dst, fields, None)
    if problem is not None:
        return None
    plan = _plan_if_possible(held, dst, limit)
    shared = None if plan is None else find_shared_move(plan, held.comm.ranks, held.dtype)
    return None if shared is None else MoveRequest(held.sharding, dst, shared, write_request(asked))


def _plan_if_possible(held: MovableTensor, dst: Layout, limit: Any) -> Transfer | None:
    """This rank's plan of a move; None if the limit is too small, which is raised once the ranks have agreed on it."""
    src, itemsize = held.sharding, held.dtype.itemsize
    try:
        return plan_for_rank(src, dst, itemsize, buffer_limit(src, dst, itemsize, limit), held.comm)
    except ValueError:
        return None


def _move_together(held: MovableTensor, asking: MoveRequest, label: str) -> tuple[Tensor, ...] | None:
    """Agree on a move that one rank makes for all, and return its results; None if some rank does not take part."""
    comm, shared = find_offering(held.comm), asking.shared
    assert comm is not None
    with profiled_move(label, held.sharding, asking.dst):
        offer = shared.make_offer(comm.rank, held.local_parts, held.device)
        if not agree_and_run(comm, asking.written, offer, shared.plan_jobs, shared.nbytes, label=label):
            return None
        notify_watchers(shared.transfer, label, held.sharding, asking.dst)
        return shared.finish(offer.targets)


def start_while_agreeing(
    held: Sequence[MovableTensor], dsts: Sequence[Layout], asked: dict[str, Any], label: str, limit: int | None
) -> RunningTransfers:
    """Start moves that travel early before all ranks have agreed on them; raises if they do not."""
    comm = held[0].comm
    with recorded_wait(comm, f"{label}: agree") if recorders else nullcontext():
        finish_agreeing = start_agreeing(comm, asked, label=label)
    try:
        return RunningTransfers(_make_batches(held, dsts, label, limit), comm, label)
    finally:
        with recorded_wait(comm, f"{label}: agree") if recorders else nullcontext():
            finish_agreeing()


def travels_early(held: MovableTensor, dst: Layout) -> bool:
    """Whether a move is nothing but an exchange that can be started and taken back: no tape, trace or reduction."""
    return held.sharding.pending is None and dst.pending is None and _can_be_taken_back(held, dst)


def _can_be_taken_back(held: MovableTensor, dst: Layout) -> bool:
    src = held.sharding
    plain = held._copied_from is None and not is_move_recorded(held) and not is_dispatch_mode_on()
    settled = not (src.depends_on_data or dst.depends_on_data)
    return plain and settled and not is_dual_level() and src != dst


def _reduces_early(held: MovableTensor, dst: Layout, limit: int | None) -> bool:
    """Whether a move is a reduction that is one call of the comm, which can be started and taken back."""
    if not getattr(held.comm, "reduces_in_one_call", False) or not _can_be_taken_back(held, dst):
        return False
    if _limit_problem(limit) is not None or move_problem(held, dst) is not None:
        return False
    plan = _plan_if_possible(held, dst, limit)
    return plan is not None and find_whole_collective(plan, held.comm.ranks, held.dtype) is not None


def _describe_request(
    held: MovableTensor, dst: Layout, fields: dict[str, Any], problem: str | None
) -> tuple[dict[str, Any], str | None]:
    """What the ranks compare before a move, and what is wrong with it on this rank."""
    problem = problem or _limit_problem(fields.get("max_buffer_bytes")) or move_problem(held, dst)
    asked = {"from": format_layout_text(held.sharding), "to": format_layout_text(dst), "dtype": held.dtype, **fields}
    return asked, problem


def _limit_problem(limit: object) -> str | None:
    if limit is None or (isinstance(limit, int) and limit > 0):
        return None
    return f"max_buffer_bytes is a positive number of bytes or None, got {limit!r}"


def move_problem(held: MovableTensor, dst: Layout) -> str | None:
    """Why a tensor cannot be moved to a layout, or None."""
    outside = sorted(set(dst.ranks) - set(held.comm.ranks))
    if outside:
        inside = name_ranks(held.comm.ranks)
        return f"the layout names {name_ranks(outside)}, not in the comm ({inside}); {advise_ranks(held.comm)}"
    return _reduction_problem(held.sharding, dst, held.dtype)


def _reduction_problem(src: Layout, dst: Layout, dtype: torch.dtype) -> str | None:
    for layout in (src, dst):
        try:
            if layout.pending is not None and src != dst:
                check_reducible(layout.pending.op, layout.pending.divisor, dtype)
        except ValueError as error:
            return str(error)
    return None


def is_move_recorded(held: MovableTensor) -> bool:
    """Whether a move of this tensor goes on the tape."""
    inputs = (*held.local_parts, *([held._anchor] if held._anchor is not None else []))
    return torch.is_grad_enabled() and any(t.requires_grad for t in inputs)


def move_to(
    held: MovableTensor,
    dst: Layout,
    label: str,
    max_buffer_bytes: int | None = None,
    started: StartedMove | None = None,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The local tensors and the anchor of the same values in another layout; differentiable.

    `started`: the same move, started before; it is waited for.
    """
    if held._copied_from is not None:
        held._copied_from.check()
    if held.sharding == dst:
        return held.local_parts, held._anchor
    limit = buffer_limit(held.sharding, dst, held.dtype.itemsize, max_buffer_bytes)
    link = LayoutMove(held.sharding, dst, held.comm, held.dtype, label, limit, started=started)
    if not is_move_recorded(held):
        return move_locals(link, held.local_parts, held.device), None
    dual_layout(dst), dual_layout(held.sharding)
    outputs = move_on_tape(link, tape_inputs(held.local_parts, held._anchor, held.dtype, held.device))
    return (outputs, None) if dst.local_shapes(held.comm.rank) else ((), outputs[0])


def start_moves(
    held: Sequence[MovableTensor], dsts: Sequence[Layout], label: str, max_buffer_bytes: int | None = None
) -> RunningMoves:
    """Start moving several tensors without a tape, as many in shared exchanges as the buffer limit allows."""
    if is_dual_level():
        raise NotImplementedError(f"'{label}': tangents of forward mode do not travel with async_op=True; leave it out")
    return start_transfers(_make_batches(held, dsts, label, max_buffer_bytes), held[0].comm, label)


def _make_batches(
    held: Sequence[MovableTensor], dsts: Sequence[Layout], label: str, max_buffer_bytes: int | None
) -> list[list[TransferJob]]:
    room = 0
    batches: list[list[TransferJob]] = []
    for one, dst in zip(held, dsts, strict=True):
        limit = buffer_limit(one.sharding, dst, one.dtype.itemsize, max_buffer_bytes)
        plan = plan_for_rank(one.sharding, dst, one.dtype.itemsize, limit, one.comm)
        notify_watchers(plan, label, one.sharding, dst)
        job = TransferJob(plan, resolve_lazy([t.detach() for t in one.local_parts]), one.dtype, one.device)
        size = max_elements_in_flight(one.sharding, dst) * one.dtype.itemsize
        if not batches or size > room:
            batches.append([])
            room = DEFAULT_BUFFER_BYTES if max_buffer_bytes is None else max_buffer_bytes
        batches[-1].append(job)
        room -= size
    return batches
