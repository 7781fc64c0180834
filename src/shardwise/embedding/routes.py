"""How are the rows that a rank looks up sorted by the ranks that hold them?

1. Holders that reach the same rows form a group: one for each run of a table cut in rows, one in all for a table cut in
   columns. What travels is one list of row numbers for each group.
2. Ids are made distinct where many repeat; by marking rows where the table is not much longer than the ids, else by
   sorting.
3. The rows come back into a buffer in the order in which they were asked for, so that each group fills one run of it.
   Where groups overlap, the buffer keeps the order of the ids.

Routing is done by NumPy, in host memory: it is short compared to the rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.embedding.slabs import BoolArray, RowIndex, RowNumbers, RowRuns, has_replicas, owned_rows
from shardwise.geometry import Layout
from shardwise.geometry.mesh import IntArray

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
