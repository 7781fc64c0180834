"""The product form of regular layouts: per-dim cuts, and an array of owners.

Every mesh, chunk and grid layout is a product of 1-D cuts. `Cells` keeps it in that form, so that questions about it
and intersections with it cost what the answer costs, not what all pairs would.

`PieceTable` lists all pieces of a layout as NumPy columns: one row for each box that a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from shardwise.geometry.box import Box, Piece
from shardwise.geometry.errors import LayoutError
from shardwise.geometry.mesh import IntArray, Mesh, freeze_array
from shardwise.geometry.placements import DimIntervals, Partial, Placement, Replicate, RowOwners, Shard, split_part

MAX_ARRAY_DIMS = 64  # of NumPy


@dataclass(frozen=True, eq=False, slots=True)
class DimCuts:
    """The cells along one dim: where each starts, how long it is, and where it is in the owner's local tensor."""

    starts: IntArray
    lengths: IntArray
    local_starts: IntArray

    @property
    def count(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """A regular layout: the cell (i, j, ...) is held by `owners[i, j, ..., addend, replica]`.

    `slots` numbers the local tensors of a rank: one per cell for chunk and grid layouts; None for mesh layouts, where
    the cells of a rank are adjacent in one local tensor.
    """

    dims: tuple[DimCuts, ...]
    owners: IntArray
    slots: IntArray | None

    @property
    def addends(self) -> int:
        return int(self.owners.shape[-2])

    @property
    def replicas(self) -> int:
        return int(self.owners.shape[-1])


def whole_dim(length: int) -> DimCuts:
    """A dim that is not cut."""
    zero = freeze_array([0])
    return DimCuts(zero, freeze_array([length]), zero)


def cuts_from_sizes(sizes: Sequence[int]) -> DimCuts:
    """A dim cut in these lengths, each cell at the start of a local tensor of its own."""
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    return DimCuts(freeze_array(ends - np.asarray(sizes)), freeze_array(sizes), freeze_array(np.zeros(len(sizes))))


def grid_cells(sizes: Sequence[Sequence[int]], owners: IntArray) -> Cells:
    """Cells of a grid; `owners` has the grid's shape and one more axis of replicas."""
    grid_shape = owners.shape[:-1]
    flat = owners.reshape(-1, owners.shape[-1])
    slots = _running_count(flat).reshape((*grid_shape, 1, owners.shape[-1]))
    expanded = owners.reshape((*grid_shape, 1, owners.shape[-1]))
    return Cells(tuple(cuts_from_sizes(s) for s in sizes), freeze_array(expanded), freeze_array(slots))


def _running_count(ranks: IntArray) -> IntArray:
    """How often each entry's rank came before it, in row-major order."""
    flat = ranks.reshape(-1)
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    first = np.searchsorted(ordered, ordered, side="left")
    counts = np.empty_like(flat)
    counts[order] = np.arange(len(flat)) - first
    return counts.reshape(ranks.shape)


def mesh_cells(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], order: Sequence[int]) -> Cells:
    """Cells of a mesh layout; `order` lists the axes from the outermost split to the innermost."""
    cuts: list[DimCuts] = []
    coordinates: dict[int, tuple[int, IntArray]] = {}
    for dim, length in enumerate(shape):
        axes = [a for a in order if isinstance(p := placements[a], Shard) and p.dim == dim]
        dim_cuts, coords = _cut_dim(length, axes, mesh, placements)
        cuts.append(dim_cuts)
        coordinates.update({axis: (dim, coords[:, i]) for i, axis in enumerate(axes)})
    return Cells(tuple(cuts), _mesh_owners(len(shape), mesh, placements, coordinates), None)


def _cut_dim(length: int, axes: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> tuple[DimCuts, IntArray]:
    """The cells of one dim, and for each the coordinates of its holders along the axes that split this dim."""
    if axes and all(placements[axis] == Shard(cast(Shard, placements[axis]).dim) for axis in axes):
        return _cut_evenly(length, [mesh.shape[axis] for axis in axes])
    owners = cast(Shard, placements[axes[0]]).owners if len(axes) == 1 else None
    if owners is not None and owners.count <= mesh.shape[axes[0]]:  # else the general way says what is wrong
        return _cut_by_owners(owners, mesh.shape[axes[0]])
    parts: list[tuple[tuple[int, ...], DimIntervals]] = [((), ((0, length),))]
    for axis in axes:
        placement = placements[axis]
        assert isinstance(placement, Shard)
        count, name = mesh.shape[axis], mesh.axes[axis]
        parts = [
            ((*coords, i), sub)
            for coords, part in parts
            for i, sub in enumerate(split_part(part, placement, count, name))
        ]
    rows = []
    for coords, part in parts:
        position = 0
        for start, stop in part:
            rows.append((start, stop - start, position, *coords))
            position += stop - start
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 + len(axes))
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    return DimCuts(*(freeze_array(table[:, i]) for i in range(3))), table[:, 3:]


def _cut_evenly(length: int, counts: Sequence[int]) -> tuple[DimCuts, IntArray]:
    """The same for plain splits, by arithmetic: a dim over thousands of ranks is an ordinary one."""
    starts, lengths = np.zeros(1, np.int64), np.full(1, length, np.int64)
    for count in counts:
        step = -(-lengths // count)
        offsets = np.minimum(np.arange(count) * step[:, None], lengths[:, None])
        starts, lengths = starts[:, None] + offsets, np.minimum(step[:, None], lengths[:, None] - offsets)
        starts, lengths = starts.reshape(-1), lengths.reshape(-1)
    coordinates = np.stack(np.unravel_index(np.arange(len(starts)), tuple(counts)), axis=1)
    order = np.lexsort((lengths, starts))
    cuts = DimCuts(freeze_array(starts[order]), freeze_array(lengths[order]), freeze_array(np.zeros(len(order))))
    return cuts, coordinates[order]


def _cut_by_owners(owners: RowOwners, count: int) -> tuple[DimCuts, IntArray]:
    """The same for rows with owners along one axis, without a loop over rows; a rank without rows has an empty cell."""
    starts, lengths, holders = owners.starts, owners.lengths, owners.holders
    missing = np.setdiff1d(np.arange(count), holders)
    order = np.argsort(holders, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]
    first = np.searchsorted(holders[order], holders[order], side="left")
    local_starts = np.empty_like(starts)
    local_starts[order] = before - before[first]
    nothing = np.zeros(len(missing), np.int64)
    cuts = ((starts, nothing + len(owners)), (lengths, nothing), (local_starts, nothing))
    return DimCuts(*(freeze_array(np.concatenate(pair)) for pair in cuts)), np.concatenate([holders, missing])[:, None]


def _mesh_owners(
    ndim: int, mesh: Mesh, placements: Sequence[Placement], coordinates: dict[int, tuple[int, IntArray]]
) -> IntArray:
    """The owner array: cell axes first, then all pending axes folded into one, then all replicating axes."""
    pending = [a for a, p in enumerate(placements) if isinstance(p, Partial)]
    copied = [a for a, p in enumerate(placements) if isinstance(p, Replicate)]
    spread = {axis: ndim + i for i, axis in enumerate(pending + copied)}
    total = ndim + len(spread)
    if total + 2 > MAX_ARRAY_DIMS:
        raise LayoutError(
            f"a tensor of {ndim} dims on a mesh with {len(spread)} axes that do not shard it; together they may be "
            f"{MAX_ARRAY_DIMS - 2} at most"
        )
    index = []
    for axis, size in enumerate(mesh.shape):
        position, values = (spread[axis], np.arange(size)) if axis in spread else coordinates[axis]
        view = [1] * total
        view[position] = len(values)
        index.append(values.reshape(view))
    owners = np.asarray(mesh.ranks[tuple(index)])
    owners = owners.reshape((1,) * (total - owners.ndim) + owners.shape)
    addends = int(np.prod([mesh.shape[a] for a in pending], dtype=np.int64))
    replicas = int(np.prod([mesh.shape[a] for a in copied], dtype=np.int64))
    return freeze_array(owners.reshape((*owners.shape[:ndim], addends, replicas)))


@dataclass(frozen=True, eq=False, slots=True)
class PieceTable:
    """Columns over pieces. Rows with the same `cells` entry have the same box; `addends` distinguishes pending addends.

    A row's box is in local tensor number `slots` of its rank, at `local_offsets`.
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
