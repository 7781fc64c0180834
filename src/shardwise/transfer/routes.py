"""The moves of a transfer, as columns: which box goes from which piece to which piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardwise.geometry.box import Box
from shardwise.geometry.cells import PieceTable
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray

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

    A step that passes on (`in_place`) completes the destination of the step before it: ranks exchange boxes of it.
    """

    src: Layout
    dst: Layout
    routes: Routes
    copies: Routes
    fills: IntArray
    op: str | None
    scale: tuple[int, int]
    rounds: int
    in_place: bool = False

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
            (self.src, self.dst, self.op, self.scale, self.rounds, self.in_place)
            == (other.src, other.dst, other.op, other.scale, other.rounds, other.in_place)
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
