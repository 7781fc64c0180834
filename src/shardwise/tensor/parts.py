"""What does each rank do in a move? Worked out from the plan alone, and kept: plans are used again and again.

- `RankPart`: the boxes that a rank sends, receives, copies and fills in one step of a transfer, by round and peer.
- `list_copies_of_all`: the same for all ranks at once, where they are threads and the last one that asks for a move
  makes it for all of them.
- `find_whole_collective`: a reduction of whole tensors in equal runs, which a comm does by itself, in groups of ranks.
- `RowPart`: rows that have owners. Values decided who has which row (tokens that go to experts, say), so that a plan
  box by box would be as long as the tensor and of use only once. Here every rank works out with arrays:

  1. which axes change: along those, rows are sharded in one layout or in both, and nothing else changes;
  2. for each rank that it sends to, which of its local rows that rank wants, in the order in which it wants them;
  3. for each rank that it receives from, where these rows go.

  Senders and receivers work from the same two layouts, so no sizes are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, combinations, groupby
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from shardwise._cache import cache_by_identity, cache_plans
from shardwise.comm import Comm
from shardwise.comm.protocol import LEAST_RUN_BYTES
from shardwise.geometry import Box, Layout, MeshSpec, Replicate, Shard
from shardwise.geometry.mesh import IntArray
from shardwise.transfer import BoxMessage, Collective, Copy, Step, Topology, Transfer, plan_transfer

REDUCED_BY_COMM = (torch.float32, torch.float64, torch.int32, torch.int64)
LOW_PRECISION_BYTES = 2
SMALL_MESSAGE_BYTES = 64 * 1024
WHOLE_PLAN_RANKS = 256
_MOST_COMPARED = 64

Message: TypeAlias = tuple[BoxMessage, ...]
MessagesByRound: TypeAlias = Mapping[int, Mapping[int, Sequence[Message]]]
BoxSlices: TypeAlias = tuple[int, tuple[slice, ...], int]
"""A box of a local tensor: which tensor, where in it, and which term of a reduction."""


class BoxPlace(NamedTuple):
    """A box of a local tensor, and where it is in its message; `at` is None where it is the whole tensor."""

    slot: int
    at: tuple[slice, ...] | None
    run: slice
    sizes: tuple[int, ...]
    term: int


PlacesByRound: TypeAlias = Mapping[int, Mapping[int, Sequence[Sequence[BoxPlace]]]]
TensorBox: TypeAlias = tuple[int, int, tuple[slice, ...] | None]
"""A box of a rank's local tensor: the rank's index, which tensor, where in it; None is the whole."""


@dataclass(frozen=True, eq=False)
class RankPart:
    """A rank's messages by round and peer, its local copies and fills, and the shapes of its tensors."""

    sends: MessagesByRound
    receives: MessagesByRound
    copies: Sequence[Copy]
    fills: Sequence[tuple[int, Box]]
    src_shapes: Sequence[tuple[int, ...]]
    shapes: Sequence[tuple[int, ...]]
    reducing: bool

    @cached_property
    def sent_slices(self) -> Mapping[int, Mapping[int, Sequence[BoxSlices]]]:
        """The boxes that are sent, by round and peer."""
        return _list_slices(self.sends)

    @cached_property
    def received_slices(self) -> Mapping[int, Mapping[int, Sequence[BoxSlices]]]:
        """The boxes that are received, by round and peer."""
        return _list_slices(self.receives)

    @cached_property
    def sent_places(self) -> PlacesByRound:
        """The messages that are sent, by round and peer, as places in local tensors and in the message."""
        return _list_places(self.sends, self.src_shapes)

    @cached_property
    def received_places(self) -> PlacesByRound:
        """The messages that are received."""
        return _list_places(self.receives, self.shapes)

    @cached_property
    def copied_places(self) -> Sequence[tuple[int, tuple[slice, ...] | None, int, tuple[slice, ...] | None]]:
        """The copies within the rank: a destination tensor and where in it, a source and where in it."""
        return [
            (
                c.dst_slot,
                _cut_out(c.dst_box, self.shapes[c.dst_slot]),
                c.src_slot,
                _cut_out(c.src_box, self.src_shapes[c.src_slot]),
            )
            for c in self.copies
        ]

    @cached_property
    def is_filled_by_copies(self) -> bool:
        """Whether the copies within the rank reach as many elements as its destination tensors have."""
        return sum(c.dst_box.numel for c in self.copies) == sum(Box.whole(shape).numel for shape in self.shapes)

    @cached_property
    def separate_rounds(self) -> frozenset[int]:
        """The rounds in which each two boxes received are the same or have nothing in common, and are not too many."""
        found = set()
        for number, edges in self.receives.items():
            boxes = {(m.slot, m.box) for cut in edges.values() for message in cut for m in message}
            few = len(boxes) <= _MOST_COMPARED
            if few and not any(a[0] == b[0] and a[1].intersect(b[1]) for a, b in combinations(boxes, 2)):
                found.add(number)
        return frozenset(found)


def _list_slices(messages: MessagesByRound) -> Mapping[int, Mapping[int, Sequence[BoxSlices]]]:
    return {
        number: {
            peer: [(m.slot, m.box.slices, m.term) for message in cut for m in message] for peer, cut in edges.items()
        }
        for number, edges in messages.items()
    }


def _list_places(messages: MessagesByRound, shapes: Sequence[tuple[int, ...]]) -> PlacesByRound:
    return {
        number: {peer: [_place_boxes(message, shapes) for message in cut] for peer, cut in edges.items()}
        for number, edges in messages.items()
    }


def _place_boxes(message: Message, shapes: Sequence[tuple[int, ...]]) -> list[BoxPlace]:
    ends = [*accumulate(m.box.numel for m in message)]
    runs = [slice(end - m.box.numel, end) for m, end in zip(message, ends, strict=True)]
    return [
        BoxPlace(m.slot, _cut_out(m.box, shapes[m.slot]), run, m.box.sizes, m.term)
        for m, run in zip(message, runs, strict=True)
    ]


def _cut_out(box: Box, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """Where a box is in a tensor; None if it is the whole of it."""
    return None if box.sizes == shape else box.slices


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms are combined: float32 for floats of 2 bytes and less.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.int64)
    (torch.float32, torch.int64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize <= LOW_PRECISION_BYTES else dtype


def plan_for_rank(
    src: Layout, dst: Layout, itemsize: int, max_buffer_bytes: int | None, comm: Comm, contiguous: bool = False
) -> Transfer:
    """The plan from which a rank works, for the hosts of its comm: whole in small worlds, else this rank's part."""
    small = len(src.ranks) + len(dst.ranks) <= 2 * WHOLE_PLAN_RANKS or max_buffer_bytes is not None
    contiguous = contiguous and max_buffer_bytes is not None
    rank, topology = None if small else comm.rank, comm.find_topology()  # which connects the comm
    least_run = LEAST_RUN_BYTES if contiguous and comm.capabilities.takes_strides else 0
    return _plan_cached(src, dst, itemsize, max_buffer_bytes, contiguous, least_run, rank, topology)


@cache_plans
def _plan_cached(
    src: Layout,
    dst: Layout,
    itemsize: int,
    max_buffer_bytes: int | None,
    contiguous: bool,
    least_run: int,
    rank: int | None,
    topology: Topology | None = None,
) -> Transfer:
    return plan_transfer(
        src,
        dst,
        itemsize=itemsize,
        topology=topology,
        max_buffer_bytes=max_buffer_bytes,
        contiguous=contiguous,
        least_run=least_run,
        rank=rank,
    )


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
        step.src.local_shapes(rank),
        shapes,
        reducing,
    )


def _group_by_round_and_peer(moves: Sequence[BoxMessage], itemsize: int) -> MessagesByRound:
    grouped: dict[int, dict[int, list[BoxMessage]]] = {}
    for (number, peer), group in groupby(moves, key=lambda m: (m.round, m.peer)):
        grouped.setdefault(number, {}).setdefault(peer, []).extend(group)
    return {n: {peer: cut_messages(moves, itemsize) for peer, moves in edges.items()} for n, edges in grouped.items()}


def cut_messages(moves: Iterable[BoxMessage], itemsize: int) -> list[Message]:
    """Cut an edge's moves into messages: large boxes alone, runs of small ones together."""
    cut: list[list[BoxMessage]] = []
    bytes_left = 0
    for move in moves:
        size = move.box.numel * itemsize
        if size >= SMALL_MESSAGE_BYTES or size > bytes_left:
            cut.append([])
            bytes_left = 0 if size >= SMALL_MESSAGE_BYTES else SMALL_MESSAGE_BYTES
        cut[-1].append(move)
        bytes_left -= size
    return [tuple(message) for message in cut]


def find_local_kind(transfer: Transfer, rank: int, itemsize: int) -> Literal["copy", "fill"] | None:
    """What a rank does if nothing is sent at all and it has one tensor before and after: copy it whole, or fill it.

    >>> from shardwise.geometry import Mesh, MeshSpec, Partial, Replicate
    >>> whole, terms = (MeshSpec(Mesh.of(x=2), (kind,)).layout((8, 8)) for kind in (Replicate(), Partial("sum")))
    >>> [find_local_kind(plan_transfer(whole, terms, itemsize=4), rank, 4) for rank in (0, 1)]
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


def comm_width(dtype: torch.dtype) -> int:
    """How many times wider than a dtype the elements are in which a comm reduces it by itself; 0 where it does not.

    >>> comm_width(torch.float32), comm_width(torch.bfloat16), comm_width(torch.bool)
    (1, 2, 0)
    """
    if dtype in REDUCED_BY_COMM:
        return 1
    return accumulation_dtype(dtype).itemsize // dtype.itemsize if accumulation_dtype(dtype) != dtype else 0


def find_whole_collective(
    transfer: Transfer, ranks: tuple[int, ...], dtype: torch.dtype, elements: int = 0
) -> Collective | None:
    """The collective by which a comm of these ranks runs the transfer, in one group or several: see the transfer's own.

    None where it is another transfer, where wider sums of low precision take longer, or where a buffer limit is tight;
    the comm's buffers have so many `elements`, if that is known.

    >>> from shardwise.geometry import Mesh, MeshSpec, Partial, Shard
    >>> kinds = (Partial("sum"), Shard(0), Shard(1))
    >>> terms, rows, columns = (MeshSpec(Mesh.of(x=2), (kind,)).layout((8, 8)) for kind in kinds)
    >>> str(find_whole_collective(plan_transfer(terms, rows, itemsize=4), (0, 1), torch.float32))
    'reduce_scatter of 2 ranks'
    >>> find_whole_collective(plan_transfer(terms, columns, itemsize=4), (0, 1), torch.float32) is None
    True
    """
    width = comm_width(dtype)
    if not width or transfer.src.pending is None or transfer.dst.pending is not None:
        return None
    workspace = elements * accumulation_dtype(dtype).itemsize or None
    return transfer.collective_of_comm(ranks, wider=width, workspace=workspace)


@cache_plans
def list_copies_of_all(
    transfer: Transfer, ranks: tuple[int, ...], itemsize: int
) -> Sequence[Sequence[tuple[TensorBox, TensorBox]]] | None:
    """The copies (target and source) into the tensors of each rank, by which one rank makes a transfer for all of them.

    None where it takes several steps or reduces.

    >>> from shardwise.geometry import Mesh, MeshSpec, Replicate, Shard
    >>> rows, whole = (MeshSpec(Mesh.of(x=2), (kind,)).layout((8, 8)) for kind in (Shard(0), Replicate()))
    >>> [len(copies) for copies in list_copies_of_all(plan_transfer(rows, whole, itemsize=4), (0, 1), 4)]
    [2, 2]
    """
    if transfer.rank is not None or len(transfer.steps) != 1:
        return None
    step = transfer.steps[0]
    parts = [work_out_rank_part(step, rank, itemsize) for rank in ranks]
    if step.op is not None or step.in_place or any(part.fills for part in parts):
        return None
    return [_list_copies(step, i, ranks, parts) for i in range(len(ranks))]


def _list_copies(
    step: Step, index: int, ranks: tuple[int, ...], parts: Sequence[RankPart]
) -> list[tuple[TensorBox, TensorBox]]:
    """The copies into one rank's result."""
    rank, part = ranks[index], parts[index]
    found = []
    for copy in part.copies:
        found.append(((index, copy.dst_slot, copy.dst_box), (index, copy.src_slot, copy.src_box)))
    for number, edges in part.receives.items():
        for peer, messages in edges.items():
            theirs = ranks.index(peer)
            sent = chain.from_iterable(parts[theirs].sends[number][rank])
            for to, at in zip(chain.from_iterable(messages), sent, strict=True):
                found.append(((index, to.slot, to.box), (theirs, at.slot, at.box)))
    return [(_cut(to, step.dst.local_shapes(rank)), _cut(at, step.src.local_shapes(ranks[at[0]]))) for to, at in found]


def _cut(box: tuple[int, int, Box], shapes: Sequence[tuple[int, ...]]) -> TensorBox:
    index, slot, place = box
    return index, slot, _cut_out(place, shapes[slot])


_MAX_KEPT_ROWS = 1 << 16  # of a layout that is used again and again; rows of longer dims are worked out each time


@dataclass(frozen=True, eq=False, slots=True)
class RowPart:
    """A move of rows along one dim: local rows for each rank that gets some, and places of what comes from each."""

    dim: int
    sends: dict[int, IntArray]
    receives: dict[int, IntArray]
    shape: tuple[int, ...]
    is_local: bool


def held_rows(layout: Layout, rank: int, dim: int) -> IntArray:
    """The numbers of the rows of a dim that a rank has, in the order of its local tensor."""
    if layout.shape[dim] > _MAX_KEPT_ROWS and not layout.depends_on_data:
        return _find_held_rows(layout, rank, dim)
    known = _known_rows(layout)
    if (rank, dim) not in known:
        known[rank, dim] = _find_held_rows(layout, rank, dim)
    return known[rank, dim]


@cache_by_identity
def _known_rows(layout: Layout) -> dict[tuple[int, int], IntArray]:
    """The rows of ranks and dims, as far as they were asked for."""
    return {}


def _find_held_rows(layout: Layout, rank: int, dim: int) -> IntArray:
    rows = layout.rows_of(rank)
    at, starts, lengths = (t[rows, dim] for t in (layout.table.local_offsets, layout.table.offsets, layout.table.sizes))
    filled = np.flatnonzero(lengths)
    first = filled[np.unique(at[filled], return_index=True)[1]]  # cells that differ in other dims have the same rows
    starts, lengths = starts[first], lengths[first]
    shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return shift + np.arange(len(shift))


def plan_rows(src: Layout, dst: Layout, rank: int) -> RowPart | None:
    """How a rank takes part in a move, or None where more than the owners of rows of one dim changes."""
    if not isinstance(src.spec, MeshSpec) or not isinstance(dst.spec, MeshSpec) or src.spec.mesh != dst.spec.mesh:
        return None
    before, after = src.spec.resolved(src.shape), dst.spec.resolved(dst.shape)
    changed = [a for a, (p, q) in enumerate(zip(before.placements, after.placements, strict=True)) if p != q]
    pairs = [(before.placements[a], after.placements[a]) for a in changed]
    dims = {p.dim for pair in pairs for p in pair if isinstance(p, Shard)}
    if len(dims) != 1 or any(not isinstance(p, Shard | Replicate) for pair in pairs for p in pair):
        return None
    dim = dims.pop()
    if not _keeps_other_cuts(before, changed, dim) or not _keeps_other_cuts(after, changed, dim):
        return None
    cut = [a for a in changed if isinstance(before.placements[a], Shard)]
    receivers = _ranks_along(before, rank, changed)
    sends, receives = {}, {}
    wanted, places = held_rows(dst, rank, dim), _places_of(held_rows(src, rank, dim), src.shape[dim])
    for peer in receivers:
        if rank in _ranks_along(before, peer, cut):
            at = places[held_rows(dst, peer, dim)]
            sends[peer] = at[at >= 0]
    for peer in _ranks_along(before, rank, cut):
        receives[peer] = np.flatnonzero(_places_of(held_rows(src, peer, dim), src.shape[dim])[wanted] >= 0)
    return RowPart(dim, sends, receives, dst.local_shapes(rank)[0], not cut)


def _keeps_other_cuts(spec: MeshSpec, changed: Sequence[int], dim: int) -> bool:
    """Whether what other axes make of the dim does not depend on the axes that change."""
    order = [spec.mesh.axis_index(name) for name in spec.order]
    first = min(order.index(a) for a in changed)
    for axis, placement in enumerate(spec.placements):
        cuts = axis not in changed and isinstance(placement, Shard) and placement.dim == dim
        if cuts and order.index(axis) > first and placement.owners is None:  # type: ignore[union-attr]  # it is a Shard
            return False
    return True


def _ranks_along(spec: MeshSpec, rank: int, axes: Sequence[int]) -> list[int]:
    """The ranks that differ from one at most in their places along some axes."""
    at = np.argwhere(spec.mesh.ranks == rank)[0]
    index = tuple(slice(None) if a in axes else int(at[a]) for a in range(spec.mesh.ndim))
    return [int(r) for r in np.asarray(spec.mesh.ranks[index]).reshape(-1)]


def _places_of(rows: IntArray, length: int) -> IntArray:
    """For each row of the dim its place among some rows, -1 for others."""
    places = np.full(length, -1, np.int64)
    places[rows] = np.arange(len(rows))
    return places
