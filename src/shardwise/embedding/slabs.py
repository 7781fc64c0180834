"""Which rows of a table does a rank hold, and whom does a rank ask for them?

1. The pieces of a rank that span the same columns form a *band*: runs of rows, each with its place in a local tensor.
2. Of several ranks that hold the same box, an asking rank takes itself, else the one with the nearest number: often on
   the same host, and the asking ranks spread over the replicas.
3. A rank is asked with one list of row numbers: those in the *reach* of its bands.

Everything here follows from the layout, so that both sides of an edge know it without a word.
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
from shardwise.geometry.cells import PieceTable
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
            held = self._contains_rows(rows, run)
            if not held.all():
                where = np.flatnonzero(held)
                return where, _to_local_rows(rows[where], self.shifts, None if run is None else run[where])
        return slice(0, len(rows)), _to_local_rows(rows, self.shifts, run)

    def _contains_rows(self, rows: RowNumbers, run: IntArray | None) -> BoolArray:
        if run is None:
            held: BoolArray = (rows >= self.starts[0]) & (rows < self.ends[0])
        else:
            held = (run >= 0) & (rows < self.ends[run])
        return held


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
