"""The table of all pieces of a layout, as NumPy columns: one row for each box that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.geometry.box import Box, Piece
from shardwise.geometry.cells import Cells
from shardwise.geometry.mesh import IntArray


@dataclass(frozen=True, eq=False, slots=True)
class PieceTable:
    """Columns over pieces. Rows with the same `cells` entry hold the same box; `addends` tells pending addends apart.

    A row's box lies in local tensor number `slots` of its rank, at `local_offsets`.
    """

    offsets: IntArray
    sizes: IntArray
    ranks: IntArray
    cells: IntArray
    addends: IntArray
    slots: IntArray
    local_offsets: IntArray
    devices: tuple[str | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.ranks)

    def take(self, rows: IntArray) -> PieceTable:
        """The table of these rows."""
        return PieceTable(
            self.offsets[rows],
            self.sizes[rows],
            self.ranks[rows],
            self.cells[rows],
            self.addends[rows],
            self.slots[rows],
            self.local_offsets[rows],
            None if self.devices is None else tuple(self.devices[int(r)] for r in rows),
        )

    def pieces(self) -> tuple[Piece, ...]:
        devices = self.devices or (None,) * len(self)
        columns = zip(self.offsets.tolist(), self.sizes.tolist(), self.ranks.tolist(), devices, strict=True)
        return tuple(Piece(Box(tuple(o), tuple(s)), r, d) for o, s, r, d in columns)


def table_from_cells(cells: Cells, devices: tuple[str | None, ...] | None = None) -> PieceTable:
    """Multiply a product form out into rows, in row-major order of cells, then addends, then replicas."""
    shape = cells.owners.shape
    ndim = len(cells.dims)
    index = np.unravel_index(np.arange(cells.owners.size), shape)
    picked = [(cut, index[d]) for d, cut in enumerate(cells.dims)]
    copies = shape[-1] * shape[-2]
    slots = np.zeros(cells.owners.size, np.int64)
    if cells.slots is not None:
        slots = np.broadcast_to(cells.slots, shape).reshape(-1)
    return PieceTable(
        offsets=_columns([cut.starts[i] for cut, i in picked], cells.owners.size, ndim),
        sizes=_columns([cut.lengths[i] for cut, i in picked], cells.owners.size, ndim),
        ranks=cells.owners.reshape(-1),
        cells=np.arange(cells.owners.size) // copies,
        addends=np.asarray(index[-2]),
        slots=slots,
        local_offsets=_columns([cut.local_starts[i] for cut, i in picked], cells.owners.size, ndim),
        devices=devices,
    )


def _columns(columns: Sequence[IntArray], rows: int, ndim: int) -> IntArray:
    return np.stack(columns, axis=1) if columns else np.zeros((rows, ndim), np.int64)


def table_from_boxes(
    offsets: IntArray, sizes: IntArray, ranks: IntArray, devices: tuple[str | None, ...] | None = None
) -> PieceTable:
    """A table in which every row is a local tensor of its own; rows of equal boxes are replicas of one cell."""
    both = np.concatenate([offsets, sizes], axis=1)
    _, cells = np.unique(both, axis=0, return_inverse=True) if both.size else (None, np.zeros(len(ranks), np.int64))
    cells = np.asarray(cells).reshape(-1)
    empty = (sizes == 0).any(axis=1)
    cells = np.where(empty, len(ranks) + np.arange(len(ranks)), cells)
    _, cells = np.unique(cells, return_inverse=True)
    zeros = np.zeros(len(ranks), np.int64)
    order = np.argsort(ranks, kind="stable")
    slots = np.empty(len(ranks), np.int64)
    slots[order] = np.arange(len(ranks)) - np.searchsorted(ranks[order], ranks[order], side="left")
    return PieceTable(offsets, sizes, ranks, np.asarray(cells), zeros, slots, np.zeros_like(offsets), devices)
