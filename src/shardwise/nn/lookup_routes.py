"""Which rows of a table does a rank hold, whom does a rank ask for them, and in which order do they come back?

1. The pieces of a rank that span the same columns form a *band*: runs of rows, each with its place in a local tensor.
2. Of several ranks that hold the same box, an asking rank takes itself, else the one with the nearest number: often on
   the same host, and the asking ranks spread over the replicas.
3. Holders that reach the same rows form a group: one for each run of a table cut in rows, one in all for a table cut in
   columns. What travels is one list of row numbers for each group: those in the *reach* of its bands.
4. Ids are made distinct where many repeat; by marking rows where the table is not much longer than the ids, else by
   sorting.
5. The rows come back into a buffer in the order in which they were asked for, so that each group fills one run of it.
   Where groups overlap, the buffer keeps the order of the ids.

Who holds what follows from the layout, so that both sides of an edge know it without communication. Routing is done by
NumPy, in host memory: it is short compared to the rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shardwise.geometry import Layout
from shardwise.geometry.layout import PieceTable
from shardwise.geometry.mesh import IntArray

BoolArray: TypeAlias = npt.NDArray[np.bool_]
RowNumbers: TypeAlias = npt.NDArray[np.integer[Any]]
RowIndex: TypeAlias = IntArray | slice


@dataclass(frozen=True, eq=False, slots=True)
class RowRuns:
    """Disjoint runs of rows, ascending: starts, ends, and what to add to a row's number to get its local number."""

    starts: IntArray
    ends: IntArray
    shifts: IntArray

    def find(self, rows: RowNumbers, inside: bool = False) -> tuple[RowIndex, IntArray]:
        """Which of some row numbers are in these runs (known with `inside`: all), and their local numbers.

        >>> RowRuns(np.array([4]), np.array([6]), np.array([-4])).find(np.array([5, 0, 4]))
        (array([0, 2]), array([1, 0]))
        >>> RowRuns(np.array([4]), np.array([6]), np.array([-4])).find(np.array([5, 4]))
        (slice(0, 2, None), array([1, 0]))
        """
        run = None if len(self.starts) == 1 else np.searchsorted(self.starts, rows, side="right") - 1
        if not inside:
            if run is None:
                held: BoolArray = (rows >= self.starts[0]) & (rows < self.ends[0])
            else:
                held = (run >= 0) & (rows < self.ends[run])
            if not held.all():
                where = np.flatnonzero(held)
                return where, _to_local_rows(rows[where], self.shifts, None if run is None else run[where])
        return slice(0, len(rows)), _to_local_rows(rows, self.shifts, run)


def _to_local_rows(rows: RowNumbers, shifts: IntArray, run: IntArray | None) -> IntArray:
    return np.add(rows, shifts[0] if run is None else shifts[run], dtype=np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class ColumnSlab:
    """Runs of rows over one span of columns, in one local tensor of a rank; `whole`: all rows that the rank reaches."""

    slot: int
    columns: tuple[int, int]
    local_column: int
    runs: RowRuns
    whole: bool

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    def take_columns(self, local: Tensor) -> Tensor:
        """The columns of the local tensor that belong to this band."""
        if self.local_column == 0 and self.width == local.shape[1]:
            return local
        return local[:, self.local_column : self.local_column + self.width]


@dataclass(frozen=True, eq=False, slots=True)
class OwnedRows:
    """What one rank has for another: bands, and the rows that any of them reaches."""

    slabs: tuple[ColumnSlab, ...]
    row_range: RowRuns | None


@lru_cache(maxsize=8192)
def owned_rows(layout: Layout, holder: int, asker: int | None) -> OwnedRows:
    """What `holder` has for `asker`; for None, all that it holds: there gradients go."""
    rows = layout.rows_of(holder)
    own = layout.table.take(rows)
    keep = own.sizes.all(axis=1)
    if asker is not None:
        keep &= choose_holders(layout, asker)[own.cells] == holder
    kept = own.take(np.flatnonzero(keep))
    reach = _row_range(kept)
    return OwnedRows(_column_slabs(kept, reach), reach)


@lru_cache(maxsize=1024)
def has_replicas(layout: Layout) -> bool:
    """Whether any box is on several ranks."""
    cells = layout.table.cells[layout.table.sizes.all(axis=1)]
    return len(np.unique(cells)) < len(cells)


@lru_cache(maxsize=1024)
def choose_holders(layout: Layout, asker: int) -> IntArray:
    """For each cell of a layout the rank that is asked for it.

    >>> from shardwise.geometry import Mesh, MeshSpec, Replicate, Shard
    >>> layout = MeshSpec(Mesh.of(dp=2, tp=2), (Replicate(), Shard(0))).layout((4, 1))
    >>> [choose_holders(layout, asker).tolist() for asker in range(4)]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    table = layout.table
    # Of two ranks equally near, an even rank takes the higher and an odd one the lower.
    side = table.ranks < asker if asker % 2 == 0 else table.ranks > asker
    order = np.lexsort((2 * abs(table.ranks - asker) + side, table.cells))
    cells = table.cells[order]
    first = np.flatnonzero(np.diff(cells, prepend=-1))
    found = np.zeros(int(cells.max(initial=-1)) + 1, np.int64)
    found[cells[first]] = table.ranks[order][first]
    return found


def _column_slabs(own: PieceTable, reach: RowRuns | None) -> tuple[ColumnSlab, ...]:
    """The pieces of a rank by local tensor and span of columns."""
    spans: dict[tuple[int, int, int, int], list[int]] = {}
    columns = zip(own.slots, own.offsets[:, 1], own.sizes[:, 1], own.local_offsets[:, 1], strict=True)
    for row, (slot, start, width, local) in enumerate(columns):
        spans.setdefault((int(slot), int(start), int(width), int(local)), []).append(row)
    return tuple(
        ColumnSlab(
            slot, (start, start + width), local, runs, reach is not None and _count_rows(runs) == _count_rows(reach)
        )
        for (slot, start, width, local), rows in spans.items()
        for runs in (_row_runs(own.take(np.array(rows))),)
    )


def _row_runs(pieces: PieceTable) -> RowRuns:
    order = np.argsort(pieces.offsets[:, 0])
    starts, lengths = pieces.offsets[order, 0], pieces.sizes[order, 0]
    return RowRuns(starts, starts + lengths, pieces.local_offsets[order, 0] - starts)


def _count_rows(runs: RowRuns) -> int:
    return int((runs.ends - runs.starts).sum())


def _row_range(pieces: PieceTable) -> RowRuns | None:
    """The rows that any piece holds, as few runs as they make."""
    if not len(pieces):
        return None
    order = np.argsort(pieces.offsets[:, 0])
    starts, ends = pieces.offsets[order, 0], (pieces.offsets + pieces.sizes)[order, 0]
    ends = np.maximum.accumulate(ends)
    new = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([new[1:], [True]])
    starts, ends = starts[new], ends[last]
    return RowRuns(starts, ends, np.zeros_like(starts))


def index_length(where: RowIndex) -> int:
    """How many entries an index takes.

    >>> index_length(slice(2, 5)), index_length(np.array([7]))
    (3, 1)
    """
    return where.stop - where.start if isinstance(where, slice) else len(where)


def check_table_shape(shape: Sequence[int]) -> None:
    """Raise unless a tensor can be looked up by row."""
    if len(shape) != 2:
        raise ValueError(f"Weight needs to have exactly 2 dims, got shape {tuple(shape)}")


FEW_RUNS = 16
SHORT_TABLE = 32  # rows for each id up to which marking rows is faster than sorting ids
MAX_DISTINCT_RATIO = (
    0.5  # distinct ids for each id up to which fewer rows pay for finding them; 0.4 between ranks of one host
)


@dataclass(frozen=True, eq=False, slots=True)
class HolderRoutes:
    """Whom a rank asks: groups of holders, and the group that each run of rows belongs to (None: groups overlap)."""

    row_ranges: tuple[RowRuns, ...]
    group_of: dict[int, int]
    starts: IntArray
    owners: RowNumbers | None

    def sort_rows(self, rows: RowNumbers, ascending: bool = False) -> tuple[IntArray | None, list[int]]:
        """The places of some rows in the order of their groups (None: as they are), and how many each group has."""
        if self.owners is None:
            found = [np.arange(len(rows))[reach.find(rows)[0]] for reach in self.row_ranges]
            return np.concatenate(found), [len(f) for f in found]
        if len(self.row_ranges) < 2:
            return None, [len(rows)] * len(self.row_ranges)
        owner = self.owners[_count_reached_bounds(rows, self.starts[1:])]
        counts = np.bincount(owner, minlength=len(self.row_ranges)).tolist()
        if ascending and (self.owners[1:] >= self.owners[:-1]).all():
            return None, counts
        return np.argsort(owner, kind="stable"), counts


def _count_reached_bounds(rows: RowNumbers, bounds: IntArray) -> RowNumbers:
    """How many of some ascending bounds each row has reached."""
    if len(bounds) > FEW_RUNS:
        return np.searchsorted(bounds, rows, side="right")
    reached = np.zeros(len(rows), np.uint8)
    for bound in bounds.tolist():
        reached += rows >= bound
    return reached


def replica_asker(layout: Layout, asker: int) -> int | None:
    """The rank to give to `owned_rows` for what an asking rank gets: without replicas all ranks get the same."""
    return asker if has_replicas(layout) else None


@lru_cache(maxsize=1024)
def holder_routes(layout: Layout, asker: int | None) -> HolderRoutes:
    """Whom a rank asks; for None, all that hold anything.

    >>> from shardwise.geometry import ChunkSpec
    >>> found = holder_routes(ChunkSpec(0, 2).layout((4, 2)), None)
    >>> found.sort_rows(np.array([3, 0, 2]))
    (array([1, 0, 2]), [1, 2])
    """
    groups: dict[tuple[bytes, bytes], tuple[RowRuns, list[int]]] = {}
    for holder in layout.ranks:
        reach = owned_rows(layout, holder, asker).row_range
        if reach is not None:
            groups.setdefault((reach.starts.tobytes(), reach.ends.tobytes()), (reach, []))[1].append(holder)
    ordered = sorted(groups.values(), key=lambda group: int(group[0].starts[0]))
    reaches = tuple(reach for reach, _ in ordered)
    group_of = {holder: number for number, (_, holders) in enumerate(ordered) for holder in holders}
    return HolderRoutes(reaches, group_of, *_find_boundaries(reaches))


def _find_boundaries(reaches: Sequence[RowRuns]) -> tuple[IntArray, RowNumbers | None]:
    """The starts of all runs and the group of each, or None if groups overlap."""
    if not reaches:
        return np.zeros(0, np.int64), np.zeros(0, np.uint8)
    starts, ends = np.concatenate([r.starts for r in reaches]), np.concatenate([r.ends for r in reaches])
    numbers = np.repeat(np.arange(len(reaches)), [len(r.starts) for r in reaches])
    order = np.argsort(starts, kind="stable")
    if (ends[order][:-1] > starts[order][1:]).any():
        return starts, None
    return starts[order], numbers[order].astype(np.uint8 if len(reaches) < 256 else np.uint16)


@dataclass(frozen=True, eq=False, slots=True)
class RowQuery:
    """Rows to fetch: what travels to each group, and how the rows that come back become those of the ids.

    `where` says which rows of the buffer each group fills, `places` which row of the buffer each id takes (None: its
    own), and `order` which id each row of the buffer is for, where that is one.
    """

    size: int
    sent: tuple[RowNumbers, ...]
    where: tuple[RowIndex, ...]
    places: IntArray | None
    order: IntArray | None


def build_row_query(ids: RowNumbers, found: HolderRoutes, rows: int) -> RowQuery:
    """How to ask for the rows of a table that flat ids name.

    >>> from shardwise.geometry import ChunkSpec
    >>> asked = build_row_query(np.array([3, 3, 3, 1]), holder_routes(ChunkSpec(0, 2).layout((4, 2)), None), 4)
    >>> asked.sent, asked.places
    ((array([1]), array([3])), array([1, 1, 1, 0]))
    """
    repeated = count_distinct(ids, rows) <= MAX_DISTINCT_RATIO * len(ids)
    wanted, places = find_distinct(ids, rows) if repeated else (ids, None)
    order, counts = found.sort_rows(wanted, ascending=repeated)
    ends = np.cumsum(counts).tolist()
    slices = tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))
    if order is None:
        return RowQuery(len(wanted), tuple(wanted[s] for s in slices), slices, places, None)
    taken = wanted[order]
    sent = tuple(taken[s] for s in slices)
    if found.owners is None:
        return RowQuery(len(wanted), sent, tuple(order[s] for s in slices), places, None)
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.arange(len(order))
    if places is not None:
        return RowQuery(len(wanted), sent, slices, inverse[places], None)
    return RowQuery(len(wanted), sent, slices, inverse, order)


def count_distinct(ids: RowNumbers, rows: int) -> int:
    """How many different numbers, all below `rows`, there are.

    >>> count_distinct(np.array([5, 2, 5]), 6), count_distinct(np.array([5, 2, 5]), 1000)
    (2, 2)
    """
    if rows <= SHORT_TABLE * len(ids):
        return int(np.count_nonzero(_mark_rows(ids, rows)))
    ordered = np.sort(ids)
    return int(np.count_nonzero(ordered[1:] != ordered[:-1])) + bool(len(ids))


def find_distinct(ids: RowNumbers, rows: int) -> tuple[RowNumbers, IntArray]:
    """The different numbers, all below `rows`, ascending, and for each entry the place of its number among them.

    >>> find_distinct(np.array([5, 2, 5]), 6)
    (array([2, 5]), array([1, 0, 1]))
    """
    if rows > SHORT_TABLE * len(ids):
        found, places = np.unique(ids, return_inverse=True)
        return found, places
    found = np.flatnonzero(_mark_rows(ids, rows))
    place_of = np.empty(rows, np.int64)
    place_of[found] = np.arange(len(found))
    return found.astype(ids.dtype), place_of[ids]


def _mark_rows(ids: RowNumbers, rows: int) -> BoolArray:
    marks = np.zeros(rows, np.bool_)
    marks[ids] = True
    return marks
