"""Which rows of a table does a rank hold, and whom does a rank ask for them?

1. The pieces of a rank that span the same columns form a *band*: runs of rows, each with its place in a local tensor.
2. Of several ranks that hold the same box, an asking rank takes itself, else the one with the nearest number: often on
   the same host, and the asking ranks spread over the replicas.
3. A rank is asked with one list of row numbers, ascending, each once: those in the *reach* of its bands.

Everything here follows from the layout, so that both sides of an edge know it without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from shardwise.geometry import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.pieces import PieceTable


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """Disjoint runs of rows, ascending: starts, ends, and what to add to a row's number to get its local number."""

    starts: Tensor
    ends: Tensor
    shifts: Tensor

    def find(self, rows: Tensor) -> tuple[Tensor | slice, Tensor]:
        """Which of some ascending row numbers lie in these runs, and their local numbers."""
        starts, ends, shifts = (t.to(rows.device) for t in (self.starts, self.ends, self.shifts))
        if len(starts) == 1:
            low, high = torch.searchsorted(rows, torch.cat((starts, ends))).tolist()
            inside = slice(low, high)
            return inside, rows[inside] + shifts
        run = torch.searchsorted(starts, rows, right=True) - 1
        held = (run >= 0) & (rows < ends[run.clamp(min=0)])
        where = held.nonzero().reshape(-1)
        return where, rows[where] + shifts[run[where]]


@dataclass(frozen=True, eq=False, slots=True)
class Band:
    """Runs of rows over one span of columns, in one local tensor of a rank."""

    slot: int
    columns: tuple[int, int]
    local_column: int
    runs: Runs

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    def of_local(self, local: Tensor) -> Tensor:
        """The columns of the local tensor that belong to this band."""
        if self.local_column == 0 and self.width == local.shape[1]:
            return local
        return local[:, self.local_column : self.local_column + self.width]


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """What one rank has for another: bands, and the rows that any of them reaches."""

    bands: tuple[Band, ...]
    reach: Runs | None


def _tensor(values: IntArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))


@lru_cache(maxsize=8192)
def share(layout: Layout, holder: int, asker: int | None) -> Share:
    """What `holder` has for `asker`; for None, all that it holds: there gradients go."""
    rows = layout.rows_of(holder)
    own = layout.table.take(rows)
    keep = own.sizes.all(axis=1)
    if asker is not None:
        keep &= chosen_holders(layout, asker)[own.cells] == holder
    kept = own.take(np.flatnonzero(keep))
    return Share(_bands(kept), _reach(kept))


@lru_cache(maxsize=1024)
def chosen_holders(layout: Layout, asker: int) -> IntArray:
    """For each cell of a layout the rank that is asked for it.

    >>> from shardwise.geometry import Mesh, MeshSpec, Replicate, Shard
    >>> layout = MeshSpec(Mesh.of(dp=2, tp=2), (Replicate(), Shard(0))).layout((4, 1))
    >>> [chosen_holders(layout, asker).tolist() for asker in range(4)]
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


def _bands(own: PieceTable) -> tuple[Band, ...]:
    """The pieces of a rank by local tensor and span of columns."""
    spans: dict[tuple[int, int, int, int], list[int]] = {}
    columns = zip(own.slots, own.offsets[:, 1], own.sizes[:, 1], own.local_offsets[:, 1], strict=True)
    for row, (slot, start, width, local) in enumerate(columns):
        spans.setdefault((int(slot), int(start), int(width), int(local)), []).append(row)
    return tuple(
        Band(slot, (start, start + width), local, _runs(own.take(np.array(rows))))
        for (slot, start, width, local), rows in spans.items()
    )


def _runs(pieces: PieceTable) -> Runs:
    order = np.argsort(pieces.offsets[:, 0])
    starts, lengths = pieces.offsets[order, 0], pieces.sizes[order, 0]
    return Runs(_tensor(starts), _tensor(starts + lengths), _tensor(pieces.local_offsets[order, 0] - starts))


def _reach(pieces: PieceTable) -> Runs | None:
    """The rows that any piece holds, as few runs as they make."""
    if not len(pieces):
        return None
    order = np.argsort(pieces.offsets[:, 0])
    starts, ends = pieces.offsets[order, 0], (pieces.offsets + pieces.sizes)[order, 0]
    ends = np.maximum.accumulate(ends)
    new = np.concatenate([[True], starts[1:] > ends[:-1]])
    last = np.concatenate([new[1:], [True]])
    starts, ends = starts[new], ends[last]
    return Runs(_tensor(starts), _tensor(ends), _tensor(np.zeros_like(starts)))


def distinct(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The different numbers of a flat tensor, ascending, and for each entry the place of its number among them.

    >>> distinct(torch.tensor([5, 2, 5]))
    (tensor([2, 5]), tensor([1, 0, 1]))
    """
    ordered, order = torch.sort(numbers)
    new = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=new[1:])
    places = torch.empty_like(order)
    places[order] = new.cumsum(0) - 1
    return ordered[new], places


def rows_in(reach: Runs | None, rows: Tensor) -> Tensor | slice:
    """Which of some ascending row numbers a rank can be asked for."""
    return slice(0, 0) if reach is None else reach.find(rows)[0]


def length(where: Tensor | slice) -> int:
    """How many entries an index takes.

    >>> length(slice(2, 5)), length(torch.tensor([7]))
    (3, 1)
    """
    return where.stop - where.start if isinstance(where, slice) else len(where)


def check_table(shape: Sequence[int]) -> None:
    """Raise unless a tensor can be looked up by row."""
    if len(shape) != 2:
        raise ValueError(f"Weight needs to have exactly 2 dims, got shape {tuple(shape)}")
