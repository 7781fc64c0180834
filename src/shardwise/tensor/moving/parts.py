"""What does one rank do in one step of a transfer? Worked out once and kept, since plans are used again and again.

`watch_moves` is for whoever wants to know of every move before it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol, TypeAlias

import torch

from shardwise.comm import Comm
from shardwise.geometry import Box, Layout
from shardwise.tensor.caches import cache_plans
from shardwise.transfer import Copy, Move, Step, Topology, Transfer, plan_transfer
from shardwise.transfer.device_cost import DeviceTraffic, count_traffic


class PlannedMove(Protocol):
    """What a watcher sees of a move."""

    @property
    def src(self) -> Layout: ...
    @property
    def dst(self) -> Layout: ...
    @property
    def moved_bytes(self) -> int: ...


_move_watchers: list[Callable[[PlannedMove, str, Layout, Layout], None]] = []


def watch_moves(watcher: Callable[[PlannedMove, str, Layout, Layout], None]) -> None:
    """Have `watcher(plan, label, src, dst)` called before each move; it may raise to forbid it."""
    _move_watchers.append(watcher)


def notify_watchers(plan: PlannedMove, label: str, src: Layout | None = None, dst: Layout | None = None) -> None:
    """Say that a move is about to be made between these layouts.

    A plan is shared by equal layouts: its own may be those of a mesh with other names.
    """
    for watcher in _move_watchers:
        watcher(plan, label, src or plan.src, dst or plan.dst)


REDUCED_BY_COMM = (torch.float32, torch.float64, torch.int32, torch.int64)
COMM_WORKSPACE_BYTES = 8 << 20  # what a comm's reduction may use for each rank
SMALL_MESSAGE_BYTES = 64 * 1024
WHOLE_PLAN_RANKS = 256

Message: TypeAlias = tuple[Move, ...]
MessagesByRound: TypeAlias = Mapping[int, Mapping[int, Sequence[Message]]]


@dataclass(frozen=True, eq=False, slots=True)
class RankPart:
    """A rank's messages by round and peer, its local copies and fills, and the shapes of its destination tensors."""

    sends: MessagesByRound
    receives: MessagesByRound
    copies: Sequence[Copy]
    fills: Sequence[tuple[int, Box]]
    shapes: Sequence[tuple[int, ...]]
    reducing: bool


def plan_for_rank(src: Layout, dst: Layout, itemsize: int, max_buffer_bytes: int | None, comm: Comm) -> Transfer:
    """The plan from which a rank works, for the hosts of its comm: whole in small worlds, else this rank's part."""
    small = len(src.ranks) + len(dst.ranks) <= 2 * WHOLE_PLAN_RANKS or max_buffer_bytes is not None
    return _plan_cached(src, dst, itemsize, max_buffer_bytes, None if small else comm.rank, comm.find_topology())


def find_moved_bytes(src: Layout, dst: Layout, itemsize: int) -> int:
    """The bytes that all ranks send together in a move."""
    return plan_transfer(src, dst, itemsize=itemsize).moved_bytes


@cache_plans
def _plan_cached(
    src: Layout,
    dst: Layout,
    itemsize: int,
    max_buffer_bytes: int | None,
    rank: int | None,
    topology: Topology | None = None,
) -> Transfer:
    return plan_transfer(src, dst, itemsize=itemsize, topology=topology, max_buffer_bytes=max_buffer_bytes, rank=rank)


@cache_plans
def work_out_rank_part(step: Step, rank: int, itemsize: int) -> RankPart:
    """What a rank does in a step."""
    receives, copies = step.receives_of(rank), step.copies_of(rank)
    shapes = step.dst.local_shapes(rank)
    reached = sum(m.box.numel for m in receives) + sum(c.dst_box.numel for c in copies)
    reducing = step.op is not None and reached > sum(Box.whole(s).numel for s in shapes)
    return RankPart(
        _group_by_round_and_peer(step.sends_of(rank), itemsize),
        _group_by_round_and_peer(receives, itemsize),
        copies,
        step.fills_of(rank),
        shapes,
        reducing,
    )


def _group_by_round_and_peer(moves: Sequence[Move], itemsize: int) -> MessagesByRound:
    grouped: dict[int, dict[int, list[Move]]] = {}
    for (number, peer), group in groupby(moves, key=lambda m: (m.round, m.peer)):
        grouped.setdefault(number, {}).setdefault(peer, []).extend(group)
    return {n: {peer: cut_messages(moves, itemsize) for peer, moves in edges.items()} for n, edges in grouped.items()}


def cut_messages(moves: Iterable[Move], itemsize: int) -> list[Message]:
    """Cut an edge's moves into messages: large boxes alone, runs of small ones together."""
    cut: list[list[Move]] = []
    room = 0
    for move in moves:
        size = move.box.numel * itemsize
        if size >= SMALL_MESSAGE_BYTES or size > room:
            cut.append([])
            room = 0 if size >= SMALL_MESSAGE_BYTES else SMALL_MESSAGE_BYTES
        cut[-1].append(move)
        room -= size
    return [tuple(message) for message in cut]


@cache_plans
def local_only_kind(transfer: Transfer, rank: int, itemsize: int) -> Literal["copy", "fill"] | None:
    """What a rank does if nothing is sent at all and it has one tensor before and after: copy it whole, or fill it.

    >>> from shardwise.geometry import Mesh, MeshSpec, Partial, Replicate
    >>> whole, terms = (MeshSpec(Mesh.of(x=2), (kind,)).layout((8, 8)) for kind in (Replicate(), Partial("sum")))
    >>> [local_only_kind(plan_transfer(whole, terms, itemsize=4), rank, 4) for rank in (0, 1)]
    ['copy', 'fill']
    """
    if transfer.rank is not None or len(transfer.steps) != 1 or transfer.steps[0].rounds:
        return None
    step = transfer.steps[0]
    part = work_out_rank_part(step, rank, itemsize)
    if len(part.shapes) != 1 or step.src.local_shapes(rank) != part.shapes or part.reducing:
        return None
    whole = Box.whole(part.shapes[0])
    if not part.fills and len(part.copies) == 1:
        return "copy" if part.copies[0].src_box == part.copies[0].dst_box == whole else None
    return "fill" if not part.copies and [box for _, box in part.fills] == [whole] else None


@cache_plans
def find_traffic(transfer: Transfer, itemsize: int) -> DeviceTraffic | None:
    """What a transfer asks of its busiest rank, the same on every rank; None if the plan is that of one rank alone."""
    return count_traffic(transfer)


@cache_plans
def find_whole_collective(transfer: Transfer, ranks: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """The collective by which all of these ranks can run the transfer at once: all_reduce or reduce_scatter.

    None where it is another transfer, where low precision asks for wider sums, or where a buffer limit is too tight.

    >>> from shardwise.geometry import Mesh, MeshSpec, Partial, Shard
    >>> kinds = (Partial("sum"), Shard(0), Shard(1))
    >>> terms, rows, columns = (MeshSpec(Mesh.of(x=2), (kind,)).layout((8, 8)) for kind in kinds)
    >>> find_whole_collective(plan_transfer(terms, rows, itemsize=4), (0, 1), torch.float32)
    'reduce_scatter'
    >>> find_whole_collective(plan_transfer(terms, columns, itemsize=4), (0, 1), torch.float32) is None
    True
    """
    limit = transfer.max_buffer_bytes
    if dtype not in REDUCED_BY_COMM or transfer.src.pending is None or transfer.dst.pending is not None:
        return None
    if limit is not None and limit < len(ranks) * COMM_WORKSPACE_BYTES:
        return None
    found = transfer.collective
    if found is None or found.groups != (tuple(sorted(ranks)),):
        return None
    if found.kind == "all_reduce":
        return found.kind
    return found.kind if found.kind == "reduce_scatter" and _ends_in_equal_runs(transfer, ranks) else None


def _ends_in_equal_runs(transfer: Transfer, ranks: tuple[int, ...]) -> bool:
    """Whether the i-th rank ends with the i-th of equally many rows of the box that all of them start from."""
    starts = {transfer.src.pieces_of(rank)[0].box for rank in ranks if len(transfer.src.pieces_of(rank)) == 1}
    ends = [transfer.dst.pieces_of(rank) for rank in ranks]
    if len(starts) != 1 or any(len(pieces) != 1 for pieces in ends):
        return False
    whole = starts.pop()
    if whole.ndim == 0 or whole.sizes[0] % len(ranks):
        return False
    rows = whole.sizes[0] // len(ranks)
    return all(
        pieces[0].box.offsets == (whole.offsets[0] + i * rows, *whole.offsets[1:])
        and pieces[0].box.sizes == (rows, *whole.sizes[1:])
        for i, pieces in enumerate(ends)
    )
