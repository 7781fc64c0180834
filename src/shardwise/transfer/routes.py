"""The moves of a transfer, as columns: which box goes from which piece to which piece.

A transfer stays within a buffer limit by rounds: boxes are cut small and shared out over them.

With at most `degree` messages in and out of a rank, each message of a round may hold `limit / degree` bytes.

1. Cut every box into parts of at most a quarter of that.
2. Along each edge, deal the parts to rounds by the bytes before them; a round starts every three quarters.

Both sides of an edge compute the same rounds from the edge's own boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from shardwise.geometry.box import Box
from shardwise.geometry.cells import PieceTable
from shardwise.geometry.errors import LayoutError
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.intersect import expand_runs

RouteColumns: TypeAlias = tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]


def constant_column(value: int, length: int) -> IntArray:
    """A column that holds one value everywhere and takes no memory."""
    return np.broadcast_to(np.int64(value), (length,))


def take_column_rows(column: IntArray, rows: IntArray) -> IntArray:
    """These rows of a column; a constant column stays one."""
    if column.ndim == 1 and column.strides[0] == 0 and len(column):
        return constant_column(int(column[0]), len(rows))
    return np.take(column, rows, axis=0)


def box_volumes(sizes: IntArray) -> IntArray:
    """The number of elements of each box."""
    total = np.ones(len(sizes), np.int64)
    for d in range(sizes.shape[1]):
        total *= sizes[:, d]
    return total


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """Columns over moves, sorted by source rank, then destination rank, then destination piece.

    `src_rows` and `dst_rows` are rows of the two layouts' tables, `starts` and `sizes` the region in global indices.
    `terms` numbers the addends of a reduction in the order in which they are combined, `rounds` the exchanges.
    """

    src_rows: IntArray
    dst_rows: IntArray
    src_ranks: IntArray
    dst_ranks: IntArray
    starts: IntArray
    sizes: IntArray
    terms: IntArray
    rounds: IntArray

    def __len__(self) -> int:
        return len(self.src_rows)

    def take(self, rows: IntArray) -> Routes:
        return Routes(*(take_column_rows(column, rows) for column in self.columns()))

    def columns(self) -> RouteColumns:
        return (
            self.src_rows,
            self.dst_rows,
            self.src_ranks,
            self.dst_ranks,
            self.starts,
            self.sizes,
            self.terms,
            self.rounds,
        )

    def elements(self) -> IntArray:
        """The number of elements of each move."""
        return box_volumes(self.sizes)

    def same_as(self, other: Routes) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.columns(), other.columns(), strict=True))


@dataclass(frozen=True, slots=True)
class Move:
    """One box of a rank's local tensor number `slot`, to be sent to or received from `peer`."""

    peer: int
    slot: int
    box: Box
    term: int
    round: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One box to be copied from a rank's source tensor to its own destination tensor."""

    src_slot: int
    src_box: Box
    dst_slot: int
    dst_box: Box
    term: int


@dataclass(frozen=True, eq=False)
class Step:
    """One exchange: `routes` between ranks, `copies` within a rank, `fills` with the reduction's identity.

    With `op`, the terms that reach one destination are combined by it in ascending order of `term`; then every
    destination element is multiplied by `scale[0] / scale[1]`.
    """

    src: Layout
    dst: Layout
    routes: Routes
    copies: Routes
    fills: IntArray
    op: str | None
    scale: tuple[int, int]
    rounds: int

    def sends_of(self, rank: int) -> list[Move]:
        """What a rank sends, in the order in which its peers receive it."""
        routes = self.routes.take(np.flatnonzero(self.routes.src_ranks == rank))
        return _list_moves(routes, routes.dst_ranks, routes.src_rows, self.src.table)

    def receives_of(self, rank: int) -> list[Move]:
        """What a rank receives, in the order in which its peers send it."""
        routes = self.routes.take(np.flatnonzero(self.routes.dst_ranks == rank))
        return _list_moves(routes, routes.src_ranks, routes.dst_rows, self.dst.table)

    def copies_of(self, rank: int) -> list[Copy]:
        """What a rank copies within itself."""
        copies = self.copies.take(np.flatnonzero(self.copies.dst_ranks == rank))
        sources = _local_boxes(copies, copies.src_rows, self.src.table)
        targets = _local_boxes(copies, copies.dst_rows, self.dst.table)
        slots = zip(
            self.src.table.slots[copies.src_rows].tolist(), self.dst.table.slots[copies.dst_rows].tolist(), strict=True
        )
        terms = copies.terms.tolist()
        return [Copy(s, a, d, b, t) for (s, d), a, b, t in zip(slots, sources, targets, terms, strict=True)]

    def fills_of(self, rank: int) -> list[tuple[int, Box]]:
        """The (slot, box) pairs of a rank's destination tensors that get the reduction's identity."""
        table = self.dst.table.take(self.fills[self.dst.table.ranks[self.fills] == rank])
        boxes = zip(table.slots.tolist(), table.local_offsets.tolist(), table.sizes.tolist(), strict=True)
        return [(slot, Box(tuple(o), tuple(s))) for slot, o, s in boxes]

    def same_as(self, other: Step) -> bool:
        return (
            (self.src, self.dst, self.op, self.scale, self.rounds)
            == (other.src, other.dst, other.op, other.scale, other.rounds)
            and self.routes.same_as(other.routes)
            and self.copies.same_as(other.copies)
            and np.array_equal(self.fills, other.fills)
        )


def _local_boxes(routes: Routes, rows: IntArray, table: PieceTable) -> list[Box]:
    starts = routes.starts - table.offsets[rows] + table.local_offsets[rows]
    return [Box(tuple(o), tuple(s)) for o, s in zip(starts.tolist(), routes.sizes.tolist(), strict=True)]


def _list_moves(routes: Routes, peers: IntArray, rows: IntArray, table: PieceTable) -> list[Move]:
    boxes = _local_boxes(routes, rows, table)
    columns = zip(
        peers.tolist(), table.slots[rows].tolist(), boxes, routes.terms.tolist(), routes.rounds.tolist(), strict=True
    )
    return [Move(*values) for values in columns]


class BufferTooSmallError(LayoutError):
    """A buffer limit under which not one element fits in each message; `needed` is the least that works."""

    def __init__(self, limit: int, degree: int, itemsize: int) -> None:
        self.needed = degree * itemsize
        super().__init__(
            f"max_buffer_bytes={limit} is too small: a rank exchanges up to {degree} messages at a time with elements "
            f"of {itemsize} bytes; pass at least {self.needed} bytes"
        )


def split_in_rounds(routes: Routes, degree: int, itemsize: int, limit: int) -> Routes:
    """The same moves split into rounds so that a rank's messages of one round add up to at most `limit` bytes."""
    per_message = limit // max(1, degree * itemsize)
    if per_message < 1:
        raise BufferTooSmallError(limit, degree, itemsize)
    part = max(1, per_message // 4)
    cut = _cut_boxes(routes, part)
    return _assign_rounds(cut, per_message - part + 1)


def _cut_boxes(routes: Routes, limit: int) -> Routes:
    """Cut boxes of more than `limit` elements, keeping rows of the last dims whole where they fit."""
    if len(routes) == 0 or int(routes.elements().max()) <= limit:
        return routes
    part = np.empty_like(routes.sizes)
    left = np.full(len(routes), limit, np.int64)
    for d in reversed(range(routes.sizes.shape[1])):
        part[:, d] = np.minimum(routes.sizes[:, d], left)
        left = np.maximum(1, left // np.maximum(1, part[:, d]))
    counts = -(-routes.sizes // part)
    items, digits = expand_runs([counts[:, d] for d in range(counts.shape[1])])
    shift = np.stack(digits, axis=1) * part[items]
    taken = routes.take(items)
    sizes = np.minimum(part[items], taken.sizes - shift)
    return replace(taken, starts=taken.starts + shift, sizes=sizes)


def _assign_rounds(routes: Routes, step: int) -> Routes:
    """Number the rounds along each edge; the routes are sorted by edge already."""
    elements = routes.elements()
    before = np.cumsum(elements) - elements
    new_edge = (np.diff(routes.src_ranks) != 0) | (np.diff(routes.dst_ranks) != 0)
    first = np.concatenate([[0], np.flatnonzero(new_edge) + 1]) if len(routes) else np.zeros(0, np.int64)
    edge = np.concatenate([[0], np.cumsum(new_edge)]) if len(routes) else np.zeros(0, np.int64)
    rounds = (before - before[first][edge]) // step if len(routes) else before
    return replace(routes, rounds=rounds)


def degree_bound(src: Layout, dst: Layout, terms: int) -> int | None:
    """An upper bound of the messages in and out of a rank between two regular layouts, from their cuts alone."""
    if src.cells is None or dst.cells is None:
        return None
    out, into = 1, 1
    for a, b in zip(src.cells.dims, dst.cells.dims, strict=True):
        out *= _most_met(a.starts, a.lengths, b.starts, b.lengths)
        into *= _most_met(b.starts, b.lengths, a.starts, a.lengths)
    sends = out * dst.cells.addends * dst.cells.replicas * _most_cells(src)
    receives = into * terms * _most_cells(dst)
    return min(sends, _most_peers(src, dst)) + min(receives, _most_peers(dst, src))


def _most_peers(ours: Layout, theirs: Layout) -> int:
    """How many other ranks of the second layout a rank of the first may meet: one less if it is always one of them."""
    return len(theirs.ranks) - bool(np.isin(ours.ranks, theirs.ranks).all())


def _most_met(starts: IntArray, lengths: IntArray, other_starts: IntArray, other_lengths: IntArray) -> int:
    begins = other_starts[other_lengths > 0]
    filled = lengths > 0
    low = np.searchsorted(begins, starts[filled], side="right")
    high = np.searchsorted(begins, (starts + lengths)[filled], side="left")
    return int((high - low + 1).max(initial=1))


def _most_cells(layout: Layout) -> int:
    return int(np.unique(layout.table.ranks, return_counts=True)[1].max())
