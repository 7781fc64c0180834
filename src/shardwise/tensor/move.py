"""One move of a tensor between two layouts: how it is agreed on, carried out, recorded, and written into graphs.

A `Move` is a value: two layouts, a comm, a dtype. It is kept on its comm, together with what follows from it: the plan,
what this rank does, the request that ranks compare, the move of its gradients. What runs it is in `execute.py`.

1. Ranks agree on what users ask for in one small exchange (`check_and_move`), so that a mismatch is an error on every
   rank and not a hang. Where ranks are threads, the last one that asks makes the move for all of them. Where the comm
   can, the data travel while the ranks agree; they are used only if all do. Operators move without a question
   (`move_to`): their layouts are the same on all ranks.
2. Gradients follow by duality: the backward of A -> B is dual(B) -> dual(A). Local tensors are on the tape, not the
   ShardedTensor. A move is one node over this rank's local tensors. A rank that holds nothing takes part through an
   anchor, a tensor without elements, so that every rank's backward pass meets the same moves in the same order.
3. In forward mode the local tensors have tangents. A move is linear, so tangents make the same move. While dual numbers
   are in use, ranks first agree on whether there are any.
4. Where a program is traced, a move is a call of `shardwise::move` on this rank's local tensors. Which move it is, is a
   constant: a digest, so that code that was compiled and cached means the same move in another process. A move has its
   number as long as its comm lives. A graph may start a group of moves early and wait for them late
   (`shardwise::start_moves`, `wait_moves`); a slot says which start a wait is for. Both return a token, which orders
   them before what follows. A wait takes the local tensors again: they stay alive until then. On tensors without data
   (fake tensors) the results are empty tensors of the destination's shapes.

The source stays as it is in all of this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from shardwise._cache import Cache, cache_by_identity, cache_plans
from shardwise._torch import define_operator, foreach_copy, forward_ad, is_dispatch_mode_on, is_dual_level
from shardwise.comm import Comm, ReduceOp, advise_ranks, agree, any_rank, name_ranks
from shardwise.comm.agree import agree_and_run, agree_on_request, make_request
from shardwise.comm.local import RendezvousJob, plan_reduction
from shardwise.comm.protocol import Request
from shardwise.comm.stand_in import real_comm, untraced_comm
from shardwise.comm.transports.kernels import copy_boxes
from shardwise.geometry import (
    Box,
    EnumerableSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Replicate,
    ShardingSpec,
    format_layout,
    parse_placements,
)
from shardwise.geometry.mesh import is_device_mesh, to_mesh
from shardwise.geometry.notation import read_spec
from shardwise.tensor.execute import (
    Allocate,
    Running,
    allocate_result,
    check_reducible,
    exchange_rows,
    finish_locally,
    rescale,
    resolve_lazy,
    run_moves,
    start_moves,
)
from shardwise.tensor.parts import (
    RowPart,
    TensorBox,
    accumulation_dtype,
    find_local_kind,
    find_whole_collective,
    list_copies_of_all,
    plan_for_rank,
    plan_rows,
)
from shardwise.tensor.recorder import (
    find_recorder,
    notify_watchers,
    profiled_move,
    recorded_wait,
    recorders,
    remember_debug_modes,
    user_line,
)
from shardwise.transfer import Collective, Transfer, plan_transfer

if TYPE_CHECKING:
    from shardwise.tensor.autograd_mixin import CopiedView

DEFAULT_BUFFER_BYTES = 1 << 30
AGAIN = ", again in backward"  # ends the label of a move whose result is not kept for the backward pass

Tensors: TypeAlias = tuple[Tensor, ...]
Started: TypeAlias = Callable[[], Tensors | None]
"""A move that was started before it is needed: its result the first time, None later."""
Offer: TypeAlias = tuple[Tensors, Tensors]
"""What a rank brings to a move that one rank makes for all: the tensors that are moved, and memory for the result."""


def target_layout(layout: Layout, target: Any, placements: Any = None, dtype: torch.dtype | None = None) -> Layout:
    """The layout that a user requested: a spec, a Layout, or placements on the same mesh or on one that is passed.

    Placements may be in notation, and so may a whole tensor, whose shape and dtype have to be those of this one; a mesh
    and placements may be torch's.
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
    if isinstance(target, str) and (own is not None or ":" in target or target.lstrip().startswith(("as ", "@", "["))):
        return _read_layout(layout, target, dtype)
    listed = parse_placements(target) if isinstance(target, str) else target
    if target is None or isinstance(target, dict | int | float | torch.device | Tensor):
        raise TypeError(
            "redistribute takes a spec, a Layout, placements such as (Shard(0),), or a mesh and placements; got "
            f"{type(target).__name__}: {f'shape {tuple(target.shape)}' if isinstance(target, Tensor) else repr(target)}"
        )
    if not isinstance(layout.spec, MeshSpec):
        raise LayoutError(
            f"placements need a mesh, and this tensor is laid out by {layout.spec!r}; pass a MeshSpec(mesh, placements)"
        )
    return MeshSpec(layout.spec.mesh, listed).layout(layout.shape)


@cache_by_identity
def _read_layout(layout: Layout, text: str, dtype: torch.dtype | None) -> Layout:
    """What a text means for a tensor of a layout; read once, since loops pass the same one every time."""
    own = layout.spec.mesh if isinstance(layout.spec, MeshSpec) else None
    found = read_spec(text, own, layout.ranks, None if dtype is None else str(dtype), layout.shape)
    return found if isinstance(found, Layout) else found.layout(layout.shape)


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


def has_copies(layout: Layout) -> bool:
    """Whether parts of a tensor are on several ranks of an axis that splits it, or their addends are."""
    return isinstance(layout.spec, MeshSpec) and layout.spec.has_copies


@cache_by_identity
def dual_layout(layout: Layout) -> Layout:
    """The layout of a gradient: that of Shard and Replicate is the same, of Partial Replicate; copies have addends."""
    spec, op = layout.spec, None if layout.pending is None else layout.pending.op
    if op is None and not has_copies(layout):
        return layout
    if not isinstance(spec, MeshSpec) or op not in (None, "sum"):
        raise ValueError(
            f"no gradient passes through a pending {op}; redistribute to Shard or Replicate under "
            "torch.no_grad(), or use a pending sum or avg"
        )
    placements = [p.dual for p in spec.placements]
    return MeshSpec(spec.mesh, placements, spec.order).layout(layout.shape)


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


@dataclass(frozen=True)
class Move:
    """One move between two layouts, as this rank takes part in it; `Move.of` makes one or finds it.

    `limit` is how many bytes of buffers a rank may use, None if all that it sends and receives fits anyway. `scale` is
    an extra factor for the values. The results have `out_dtype`, if it is another one: sums of low precision need not
    be rounded. `device` is that of the tensor, on a rank without any part of it, if it is not the comm's. `strided`
    says that local tensors may have other strides than contiguous ones, so that all boxes pass through buffers.
    """

    src: Layout
    dst: Layout
    comm: Comm
    dtype: torch.dtype
    label: str
    limit: int | None = None
    scale: tuple[int, int] = (1, 1)
    out_dtype: torch.dtype | None = None
    device: torch.device | None = None
    strided: bool = False

    @staticmethod
    def of(
        src: Layout,
        dst: Layout,
        comm: Comm,
        dtype: torch.dtype,
        label: str,
        *,
        limit: int | None = DEFAULT_BUFFER_BYTES,
        scale: tuple[int, int] = (1, 1),
        out_dtype: torch.dtype | None = None,
        strided: bool = False,
    ) -> Move:
        """The move between these layout objects: the same object every time, unless they depend on data."""
        moves: Cache[Any, Move] | None = comm.__dict__.get("moves")
        if moves is None:
            moves = comm.__dict__.setdefault("moves", Cache())
        key = (id(src), id(dst), dtype, label, limit, scale, out_dtype, strided)
        known = moves.get(key)
        if known is None:
            fits = limit is not None and max_elements_in_flight(src, dst) * dtype.itemsize <= limit
            limit = None if fits else limit
            known = Move(src, dst, comm, dtype, label, limit, scale, out_dtype, strided=strided and limit is not None)
            if not known.depends_on_data:
                moves.put(key, known)  # which keeps the layouts, so that their ids stay their own
        return known

    def beside(self, device: torch.device) -> Move:
        """The same move of a tensor on this device, for a rank without any part of it."""
        return self if device == (self.device or self.comm.device) else replace(self, device=device)

    def device_of(self, locals_: Sequence[Tensor]) -> torch.device:
        """Where the results are: with this rank's local tensors, and without those where the tensor is."""
        return locals_[0].device if locals_ else self.device or self.comm.device

    # What follows from it

    @cached_property
    def depends_on_data(self) -> bool:
        """Whether values decided one of the layouts, so that the next step has another one."""
        return self.src.depends_on_data or self.dst.depends_on_data

    @cached_property
    def changes_nothing(self) -> bool:
        """Whether every rank ends with what it began with."""
        return self.src == self.dst and self.scale == (1, 1) and self.out_dtype in (None, self.dtype)

    @cached_property
    def only_copies(self) -> bool:
        """Whether it is an exchange without a reduction, between layouts that no values decided."""
        pending = self.src.pending is not None or self.dst.pending is not None
        return not pending and not self.depends_on_data and self.src != self.dst

    @cached_property
    def in_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of this rank's local tensors before the move."""
        return self.src.local_shapes(self.comm.rank)

    @cached_property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of this rank's local tensors after the move."""
        return self.dst.local_shapes(self.comm.rank)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.src.numel * self.dtype.itemsize

    @property
    def bytes_in_flight(self) -> int:
        """An upper bound of what a rank sends and receives in one step."""
        return max_elements_in_flight(self.src, self.dst) * self.dtype.itemsize

    @cached_property
    def transfer(self) -> Transfer:
        """How the bytes travel; equal layouts share plans."""
        return plan_for_rank(self.src, self.dst, self.dtype.itemsize, self.limit, self.comm, not self.strided)

    @cached_property
    def rows(self) -> RowPart | None:
        """The move as one of rows that values gave to ranks, where all ranks of the comm have some."""
        if not self.depends_on_data or len(self.src.ranks) != self.comm.world_size:
            return None
        if has_copies(self.src) or has_copies(self.dst):  # of which one is the value, and not all
            return None
        return plan_rows(self.src, self.dst, self.comm.rank)

    @cached_property
    def collective(self) -> Collective | None:
        """The collective of the comm that makes all of it, all_reduce or reduce_scatter, in groups of ranks."""
        transfer = self.transfer  # made first: it connects the comm
        return find_whole_collective(transfer, self.comm.ranks, self.dtype, self.comm.capabilities.reduction_elements)

    @property
    def reducing_comm(self) -> Comm:
        """The comm of the ranks with which this one reduces, where the move is a collective."""
        assert self.collective is not None
        group = next(ranks for ranks in self.collective.groups if self.comm.rank in ranks)
        return self.comm if len(self.collective.groups) == 1 else self.comm.subset(group)

    @cached_property
    def local_kind(self) -> Literal["copy", "fill"] | None:
        """What this rank does with its only tensor if nothing is sent."""
        if self.out_dtype not in (None, self.dtype):
            return None
        return find_local_kind(self.transfer, self.comm.rank, self.dtype.itemsize)

    @property
    def moved_bytes(self) -> int:
        """The bytes that all ranks send together."""
        if self.rows is None:
            return self.transfer.moved_bytes
        if self.rows.is_local:
            return 0
        return plan_transfer(self.src, self.dst, itemsize=self.dtype.itemsize).moved_bytes

    @property
    def bytes_between_hosts(self) -> int | None:
        """The part of them that passes between hosts, where ranks are on several."""
        return self.transfer.bytes_between_hosts if self.rows is None else None

    @cached_property
    def dual(self) -> Move:
        """The move that the gradients make; the gradients of gradients make the first one again, as it is linear.

        The gradient of a pending sum is equal on all ranks, but each rank uses it by itself: what comes back to it are
        addends.
        """
        over = self.dst.pending.divisor if self.dst.pending else 1
        under = self.src.pending.divisor if self.src.pending else 1
        label, scale = f"{self.label} (backward)", (self.scale[0] * over, self.scale[1] * under)
        src, dst = dual_layout(self.dst), dual_layout(self.src)
        strided = self.limit is not None  # gradients may have any strides
        made = Move(src, dst, self.comm, self.dtype, label, self.limit, scale, strided=strided)
        made.__dict__["dual"] = self
        return made

    @cached_property
    def problem(self) -> str | None:
        """Why it is not possible, or None."""
        outside = sorted(set(self.dst.ranks) - set(self.comm.ranks))
        if outside:
            inside = name_ranks(self.comm.ranks)
            return f"the layout names {name_ranks(outside)}, not in the comm ({inside}); {advise_ranks(self.comm)}"
        for layout in (self.src, self.dst):
            try:
                if layout.pending is not None and self.src != self.dst:
                    check_reducible(layout.pending.op, layout.pending.divisor, self.dtype)
            except ValueError as error:
                return str(error)
        return None

    # Carrying it out

    def run(self, locals_: Sequence[Tensor], started: Started | None = None) -> Tensors:
        """This rank's tensors after the move, without a tape; where a program is traced, by an operator."""
        if is_dual_level():
            return _move_duals(self, self._run_values, tuple(locals_))
        return self._run_values(locals_, started)

    def _run_values(self, locals_: Sequence[Tensor], started: Started | None = None) -> Tensors:
        if started is not None and (moved := started()) is not None:
            return moved
        if not is_dispatch_mode_on():
            return self.execute(locals_)
        given = [t.detach() for t in locals_]
        if not given:  # a graph takes results as its own where a tensor goes in
            given = [torch.empty(0, dtype=self.dtype, device=self.device_of(()))]
        with remember_debug_modes():
            return tuple(torch.ops.shardwise.move(given, self.number))

    def execute(self, locals_: Sequence[Tensor], allocate: Allocate | None = None) -> Tensors:
        """The same here and now; `allocate`: where the results get their memory."""
        notify_watchers(self)
        if self.rows is not None:
            moved = exchange_rows(self.rows, locals_[0].detach(), self.comm, self.label)
            rescale(moved, self.scale)
            return (moved,)
        with profiled_move(self.label, self.src, self.dst):
            if self.local_kind is not None:
                return (finish_locally(self, resolve_lazy(locals_)[0]),)
            into = () if allocate is None else [allocate_result(self, locals_, allocate)]
            return run_moves([self], [locals_], into=into).wait()[0]

    def record(self, inputs: Tensors, started: Started | None = None) -> Tensors:
        """The same with its backward recorded; `inputs` as `tape_inputs` gives them, and so are the results."""
        if is_dual_level():
            return _move_duals(self, self._record_values, inputs)
        return self._record_values(inputs, started)

    def _record_values(self, inputs: Tensors, started: Started | None = None) -> Tensors:
        outputs: Tensors = _MoveFunction.apply(self, started, *inputs)  # type: ignore[no-untyped-call]  # untyped in torch
        if recorders and (recorder := find_recorder(self.comm)) is not None:
            recorder.watch_backward(outputs, inputs, user_line())
        return outputs

    def _run_anchored(self, inputs: Tensors, started: Started | None = None) -> Tensors:
        """From what represents this rank on the tape to what does so after the move."""
        device = inputs[0].device
        moved = self._run_values(inputs, started) if self.in_shapes else self.beside(device)._run_values((), started)
        return moved or (torch.empty(0, dtype=self.out_dtype or self.dtype, device=device),)

    def run_gradients(self, grads: Tensors) -> Tensors:
        """Run the move in a backward pass; it is recorded only where second derivatives are needed."""
        if torch.is_grad_enabled():
            return self.record(grads)
        if self.changes_nothing:
            return grads
        return _move_duals(self, self._run_anchored, grads) if is_dual_level() else self._run_anchored(grads)

    # Making it for all ranks, where they are threads

    @cached_property
    def _copies_of_all(self) -> Sequence[Sequence[tuple[TensorBox, TensorBox]]] | None:
        return list_copies_of_all(self.transfer, self.comm.ranks, self.dtype.itemsize)

    @cached_property
    def is_made_for_all(self) -> bool:
        """Whether the last rank that asks for it makes it for all, where ranks are threads."""
        if not self.comm.capabilities.fuses_moves or self.depends_on_data:
            return False
        if self.src == self.dst or self.problem is not None:
            return False
        try:
            return self.collective is not None or self._copies_of_all is not None
        except ValueError:  # the limit is too small, which is raised once the ranks have agreed on it
            return False

    def run_for_all(self, locals_: Sequence[Tensor], fields: Mapping[str, Any]) -> Tensors | None:
        """Agree on the move, have it made by one rank, and return this rank's results; None if a rank has no offer."""
        with profiled_move(self.label, self.src, self.dst):
            sources, device = resolve_lazy(locals_), self.device_of(locals_)
            dtype = self.dtype
            if self.collective is not None:
                dtype = accumulation_dtype(dtype)
                sources = tuple(t.to(dtype).contiguous() for t in sources)
            targets = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in self.out_shapes)
            request, offer = self._write_request(fields), (sources, targets)
            if not agree_and_run(self.comm, request, offer, self._plan_jobs, self.nbytes, label=self.label):
                return None
            notify_watchers(self)
            for step in self.transfer.steps:
                for target in targets:
                    rescale(target, step.scale)
            return tuple(target.to(self.dtype) for target in targets)

    def _plan_jobs(self, offers: Sequence[Offer]) -> list[RendezvousJob]:
        """What is to be done with the offers of all ranks."""
        if self.collective is not None:
            made_by, jobs = dict(zip(self.comm.ranks, offers, strict=True)), []
            single = len(self.collective.groups) == 1
            for group in [self.comm.ranks] if single else self.collective.groups:
                wholes, outs = ([made_by[rank][side][0].view(-1) for rank in group] for side in (0, 1))
                runs = [outs] if self.collective.kind == "all_reduce" else [[out] for out in outs]
                jobs += plan_reduction(runs, wholes, cast(ReduceOp, self.transfer.steps[0].op))
            return jobs
        assert self._copies_of_all is not None
        if any(t.device.type != "cpu" for _, targets in offers for t in targets[:1]):
            return [partial(_copy_between, list(chain.from_iterable(self._copies_of_all)), offers, on_host=False)]
        return [partial(_copy_between, copies, offers) for copies in self._copies_of_all if copies]

    @cached_property
    def _requests(self) -> dict[str, Request]:
        """By the fields besides layouts and dtype: few, since they are the options of one method."""
        return {}

    def _write_request(self, fields: Mapping[str, Any]) -> Request:
        key = repr(fields)
        known = self._requests.get(key)
        if known is None:
            known = self._requests[key] = make_request(self.describe_request(fields))
        return known

    def describe_request(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What the ranks compare before the move."""
        return {
            "from": format_layout_text(self.src),
            "to": format_layout_text(self.dst),
            "dtype": self.dtype,
            **fields,
        }

    # In graphs

    def text(self) -> str:
        """The move in words that are the same on every rank."""
        between = f"{format_layout_text(self.src)} -> {format_layout_text(self.dst)}"
        out, how = self.out_dtype or self.dtype, ", strided" if self.strided else ""
        return f"{self.label}: {self.dtype} {between} x {self.scale} in {self.limit} as {out}{how}"

    @cached_property
    def number(self) -> int:
        """The number of the move in graphs; the same one for the same move, in every process."""
        comm = untraced_comm(self.comm)
        move = self if comm is self.comm else replace(self, comm=comm)
        text = f"{self.text()} on rank {comm.rank} of {comm.ranks}"
        again = 0
        while True:  # comms of the same ranks have numbers of their own: `run_local` makes new ones
            digest = hashlib.blake2b(f"{text} {again}".encode(), digest_size=8).digest()
            number = int.from_bytes(digest, "little") >> 1
            with _numbers_lock:
                known = _numbered.setdefault(number, move)
                if known is move:
                    comm.__dict__.setdefault("numbered_moves", []).append(move)
            if known.comm is comm and known == move:
                return number
            again += 1


def _copy_between(copies: Sequence[tuple[TensorBox, TensorBox]], offers: Sequence[Offer], on_host: bool = True) -> None:
    targets, sources = ([_find_box(pair[i], offers, 1 - i) for pair in copies] for i in (0, 1))
    if on_host:
        foreach_copy(targets, sources)
    else:
        copy_boxes(list(zip(targets, sources, strict=True)))


def _find_box(box: TensorBox, offers: Sequence[Offer], side: int) -> Tensor:
    index, slot, at = box
    tensor = offers[index][side][slot]
    return tensor if at is None else tensor[at]


class MovableTensor(Protocol):
    """What a ShardedTensor holds on this rank."""

    sharding: Layout
    local_parts: Tensors
    comm: Comm
    _anchor: Tensor | None
    _dense_strides: tuple[int, ...] | None
    _copied_from: CopiedView | None

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def find_move(held: MovableTensor, dst: Layout, label: str, max_buffer_bytes: int | None = None) -> Move:
    """The move of a tensor to a layout."""
    limit = DEFAULT_BUFFER_BYTES if max_buffer_bytes is None else max_buffer_bytes
    strided = held._dense_strides is not None
    move = Move.of(held.sharding, dst, held.comm, held.dtype, label, limit=limit, strided=strided)
    return move if held.local_parts else move.beside(held.device)


def check_move(
    held: MovableTensor,
    dst: Layout,
    label: str,
    fields: Mapping[str, Any] | None = None,
    problem: str | Exception | None = None,
) -> None:
    """Raise on every rank unless all request the same move and it is possible."""
    fields = fields or {}
    move = Move.of(held.sharding, dst, held.comm, held.dtype, label)
    if problem is None and (found := _limit_problem(fields.get("max_buffer_bytes")) or move.problem) is not None:
        problem = LayoutError(found)
    with recorded_wait(held.comm, f"{label}: agree") if recorders else nullcontext():
        agree(held.comm, move.describe_request(fields), label=label, problem=problem)


def check_and_move(
    held: MovableTensor, dst: Layout, label: str, fields: Mapping[str, Any], problem: str | Exception | None = None
) -> tuple[Tensors, Tensor | None]:
    """Check a move as `check_move` does, and make it: the local tensors and the anchor; differentiable."""
    limit = fields.get("max_buffer_bytes")
    if problem is not None or _limit_problem(limit) is not None:
        check_move(held, dst, label, fields, problem)
    move = find_move(held, dst, label, limit)
    if move.is_made_for_all and not recorders and _is_plain(held):
        moved = move.run_for_all(held.local_parts, fields)
        if moved is not None and not is_move_recorded(held):
            return moved, None
        return move_to(held, dst, label, limit, lambda: moved)
    if move.problem is not None or recorders or not can_start_early(held, move):
        check_move(held, dst, label, fields)
        return move_to(held, dst, label, limit)
    with profiled_move(label, held.sharding, dst):
        return start_on_request([held], [move], move._write_request(fields), label, limit).wait()[0], None


def _limit_problem(limit: object) -> str | None:
    if limit is None or (isinstance(limit, int) and limit > 0):
        return None
    return f"max_buffer_bytes is a positive number of bytes or None, got {limit!r}"


def _is_plain(held: MovableTensor) -> bool:
    """Whether a tensor has no copy to be checked, trace or tangents."""
    return held._copied_from is None and not is_dispatch_mode_on() and not is_dual_level()


def can_start_early(held: MovableTensor, move: Move) -> bool:
    """Whether a move is nothing but an exchange that can be started and taken back: no tape, trace or reduction."""
    return move.only_copies and _is_plain(held) and not is_move_recorded(held)


def start_on_request(
    held: Sequence[MovableTensor], moves: Sequence[Move], request: Request, label: str, limit: int | None
) -> Running:
    """Start moves whose first exchange carries the request; `wait` raises on every rank unless all agree on it."""
    try:
        for move in moves:
            _ = move.transfer
    except ValueError:  # of this limit: ranks that agree on it raise the same
        agree_on_request(held[0].comm, request, label=label)
        raise
    return _start_many(partial(run_moves, request=request), held, moves, limit)


def start_moving(
    held: Sequence[MovableTensor], dsts: Sequence[Layout], label: str, max_buffer_bytes: int | None = None
) -> Running:
    """Start moving several tensors without a tape, as many in shared exchanges as the buffer limit allows."""
    if is_dual_level():
        raise NotImplementedError(f"'{label}': tangents of forward mode do not travel with async_op=True; leave it out")
    moves = [find_move(one, dst, label, max_buffer_bytes) for one, dst in zip(held, dsts, strict=True)]
    return _start_many(start_moves, held, moves, max_buffer_bytes)


def _start_many(
    start: Callable[..., Running], held: Sequence[MovableTensor], moves: Sequence[Move], limit: int | None
) -> Running:
    for move in moves:
        _ = move.transfer  # a limit that is too small is an error before anyone hears of the move
        notify_watchers(move)
    buffer_bytes = DEFAULT_BUFFER_BYTES if limit is None else limit
    return start(moves, [one.local_parts for one in held], limit=buffer_bytes)


def is_move_recorded(held: MovableTensor) -> bool:
    """Whether a move of this tensor goes on the tape."""
    inputs = (*held.local_parts, *([held._anchor] if held._anchor is not None else []))
    return torch.is_grad_enabled() and any(t.requires_grad for t in inputs)


def move_to(
    held: MovableTensor,
    dst: Layout,
    label: str,
    max_buffer_bytes: int | None = None,
    started: Started | None = None,
) -> tuple[Tensors, Tensor | None]:
    """The local tensors and the anchor of the same values in another layout; differentiable.

    `started`: the same move, started before; it is waited for.
    """
    if held._copied_from is not None:
        held._copied_from.check()
    if held.sharding.is_used_as(dst):
        return held.local_parts, held._anchor
    move = find_move(held, dst, label, max_buffer_bytes)
    if not is_move_recorded(held):
        return move.run(held.local_parts, started), None
    _ = move.dual  # which raises where no gradient passes
    outputs = move.record(tape_inputs(held.local_parts, held._anchor, held.dtype, held.device), started)
    return (outputs, None) if move.out_shapes else ((), outputs[0])


def tape_inputs(locals_: Sequence[Tensor], anchor: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensors:
    """The tensors that represent this rank on the tape: its local tensors, or its anchor."""
    if locals_:
        return tuple(locals_)
    return (anchor if anchor is not None else torch.empty(0, dtype=dtype, device=device),)


class _MoveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, move: Move, started: Started | None, *inputs: Tensor) -> Tensors:
        ctx.move = move
        given = {t.untyped_storage()._cdata for t in inputs}
        moved = move._run_anchored(inputs, started)
        # A view of memory that nothing else has is a tensor of its own, which programs may write to (`x += y`).
        return tuple(t.detach() if t._is_view() and t.untyped_storage()._cdata not in given else t for t in moved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.move.dual.run_gradients(grads)


class _MovedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, move: Move, tensor: Tensor) -> Tensor:
        ctx.move = move
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.move.run_gradients((grads[0].contiguous(),))


def with_moved_gradient(move: Move, tensor: Tensor) -> Tensor:
    """The same local tensor; the gradients that reach the result make a move before they reach the tensor."""
    return on_duals(lambda t: _MovedGradient.apply(move, t), tensor)  # type: ignore[no-untyped-call]  # untyped in torch


def gradient_of_whole(layout: Layout, grads: Tensors, comm: Comm) -> Tensors:
    """The gradients of a rank's local tensors as those of the whole tensor in its dual layout, for further derivatives.

    Of a pending sum all ranks have the same gradient, each for its own addend. Taken as one replicated tensor, what
    comes back to it is one gradient and not one for each rank.
    """
    if layout.pending is None or not any(g.requires_grad for g in grads):
        return grads
    return _sum_move(dual_layout(layout), _with_plain_sums(layout), comm, grads).dual.record(grads)


def gradient_of_addends(layout: Layout, grads: Tensors, comm: Comm) -> Tensors:
    """The reverse: the gradient of a whole tensor as that of each rank's addend."""
    if layout.pending is None or not any(g.requires_grad for g in grads):
        return grads
    return _sum_move(_with_plain_sums(layout), dual_layout(layout), comm, grads).dual.record(grads)


def _sum_move(src: Layout, dst: Layout, comm: Comm, grads: Tensors) -> Move:
    return Move.of(src, dst, comm, grads[0].dtype, "gradient of a pending sum", limit=None)


@cache_by_identity
def _with_plain_sums(layout: Layout) -> Layout:
    """The layout with plain sums for its pending reductions."""
    spec = layout.spec
    assert isinstance(spec, MeshSpec)
    placements = [Partial("sum") if isinstance(p, Partial) else p for p in spec.placements]
    return MeshSpec(spec.mesh, placements, spec.order).layout(layout.shape)


NO_TANGENT = "_no_tangent"  # in the attributes of a ShardedTensor that was detached while dual numbers are in use


def is_differentiated(tensor: Tensor) -> bool:
    """Whether what is computed from a tensor is recorded, or has a tangent."""
    if is_dual_level() and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return NO_TANGENT not in tensor.__dict__
    return torch.is_grad_enabled() and tensor.requires_grad


def split_dual(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The value of a tensor and its tangent, zeros if it has none; both are recorded, or none of them."""
    primal, tangent = forward_ad.unpack_dual(tensor)
    if tangent is None:
        tangent = torch.zeros_like(primal)
    if torch.is_grad_enabled() and primal.requires_grad and not tangent.requires_grad:
        never = torch.zeros((), dtype=torch.bool, device=primal.device)
        tangent = torch.where(never, primal, tangent)  # every rank's backward pass then meets the same moves
    return primal, tangent


def any_rank_has_tangents(tensors: Sequence[Tensor], comm: Comm, label: str) -> bool:
    """Whether some local tensor of some rank has a tangent; every rank asks."""
    known = any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    return any_rank(real_comm(comm), known, label=f"{label} (tangents)")  # of a rank that takes part without data too


def on_duals(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply a linear function to the value and to the tangent of a tensor, if there are tangents."""
    if not is_dual_level() or forward_ad.unpack_dual(tensor).tangent is None:
        return function(tensor)
    primal, tangent = split_dual(tensor)
    made: Tensor = forward_ad.make_dual(function(primal), function(tangent))
    return made


def _move_duals(move: Move, run: Callable[[Tensors], Tensors], inputs: Tensors) -> Tensors:
    """Carry out a move of values and tangents."""
    if not (move.dtype.is_floating_point or move.dtype.is_complex):
        return run(inputs)
    if not any_rank_has_tangents(inputs, move.comm, move.label):
        return run(inputs)
    _ = move.dual  # a pending maximum is not linear
    pairs = [split_dual(t) for t in inputs]
    values, tangents = (run(tuple(pair[i] for pair in pairs)) for i in (0, 1))
    return tuple(map(forward_ad.make_dual, values, tangents))


_numbered: WeakValueDictionary[int, Move] = WeakValueDictionary()
_numbers_lock = Lock()
_running: dict[tuple[int, ...], Running] = {}


def find_numbered(number: int) -> Move:
    """The move that has a number."""
    return _numbered[number]


def _run_move(locals_: list[Tensor], transfer: int) -> list[Tensor]:
    move = _numbered[transfer]
    return list(move.execute(locals_[: len(move.in_shapes)]))


def _split_locals(locals_: Sequence[Tensor], moves: Sequence[Move]) -> list[Sequence[Tensor]]:
    """The local tensors of each move of a group."""
    found, position = [], 0
    for move in moves:
        found.append(locals_[position : position + len(move.in_shapes)])
        position += len(move.in_shapes)
    return found


def _start_moves(locals_: list[Tensor], after: list[Tensor], transfers: list[int], slot: int) -> Tensor:
    moves = [_numbered[number] for number in transfers]
    for move in moves:
        notify_watchers(move)
    _running[slot, *transfers] = start_moves(moves, _split_locals(locals_, moves))
    return _make_token()


def _wait_moves(locals_: list[Tensor], after: list[Tensor], transfers: list[int], slot: int) -> list[Tensor]:
    """The destination tensors of all moves of a group, and a token."""
    running = _running.pop((slot, *transfers))
    with profiled_move(f"{_numbered[transfers[0]].label}: wait"):
        return [*chain.from_iterable(running.wait()), _make_token()]


def _make_token() -> Tensor:
    return torch.empty(0, dtype=torch.float32, device="cpu")


def _fake_results(locals_: Sequence[Tensor], transfers: Sequence[int]) -> list[Tensor]:
    moves = [_numbered[number] for number in transfers]
    outputs = []
    for move, parts in zip(moves, _split_locals(locals_, moves), strict=True):
        dtype, device = move.out_dtype or move.dtype, move.device_of(parts)
        outputs += [torch.empty(shape, dtype=dtype, device=device) for shape in move.out_shapes]
    return outputs


define_operator(
    "move(Tensor[] locals, int transfer) -> Tensor[]",
    _run_move,
    lambda locals_, transfer: _fake_results(locals_, [transfer]),
)
define_operator(
    "start_moves(Tensor[] locals, Tensor[] after, int[] transfers, int slot) -> Tensor",
    _start_moves,
    lambda locals_, after, transfers, slot: _make_token(),
)
define_operator(
    "wait_moves(Tensor[] locals, Tensor[] after, int[] transfers, int slot) -> Tensor[]",
    _wait_moves,
    lambda locals_, after, transfers, slot: [*_fake_results(locals_, transfers), _make_token()],
)
