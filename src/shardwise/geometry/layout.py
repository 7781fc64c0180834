"""What is where? A `Layout` is a sharding spec applied to one shape; every such question goes to it.

Layouts are interned: one spec and one shape make one object. They are equal when they mean the same, that is when every
rank holds the same boxes in the same local tensors with the same reduction pending, however they were described.

The product form of regular layouts: per-dim cuts, and an array of owners.

Every mesh, chunk and grid layout is a product of 1-D cuts. `Cells` keeps it in that form, so that questions about it
and intersections with it cost what the answer costs, not what all pairs would.

`PieceTable` lists all pieces of a layout as NumPy columns: one row for each box that a rank has.

Do these boxes cover the tensor exactly once? An exact answer in O(n log n), for any number of dims.

Write +1 or -1 at each corner of each box (the sign alternates from corner to neighbouring corner). The signs at all
corners of all boxes together determine how often each point is covered, and determine it uniquely. So:

1. the boxes tile the tensor exactly if, and only if, their summed corner signs equal those of the whole tensor;
2. if not, the difference at the first corner (in row-major order) where the sums differ is the error there: at that
   very point the boxes cover once too often, or not at all;
3. one pass over the boxes then names the two that overlap there, or the largest uncovered box that starts there.

Dims that no box cuts are left out, so the cost is n * 2^(cut dims) * log n.
"""

from __future__ import annotations

import hashlib
import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np

from shardwise._text import draw_html
from shardwise.geometry.box import Box, LayoutError, Piece, to_int_tuple
from shardwise.geometry.mesh import IntArray, Mesh, freeze_array
from shardwise.geometry.placements import (
    DimIntervals,
    Partial,
    Placement,
    Reduction,
    Replicate,
    RowOwners,
    Shard,
    even_edges,
    split_part,
)

if TYPE_CHECKING:
    from typing import Self


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
    shards = [cast(Shard, placements[axis]) for axis in axes]
    if shards and all(shard.is_even for shard in shards):
        return _cut_evenly(length, [(mesh.shape[a], shard.unit or 1) for a, shard in zip(axes, shards, strict=True)])
    owners = shards[0].owners if len(axes) == 1 else None
    if owners is not None and owners.count <= mesh.shape[axes[0]]:  # else the general way says what is wrong
        return _cut_by_owners(owners, mesh.shape[axes[0]])
    rows = []
    for coords, part in _split_dim(length, axes, mesh, placements):
        position = 0
        for start, stop in part:
            rows.append((start, stop - start, position, *coords))
            position += stop - start
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 + len(axes))
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    return DimCuts(*(freeze_array(table[:, i]) for i in range(3))), table[:, 3:]


def _split_dim(
    length: int, axes: Sequence[int], mesh: Mesh, placements: Sequence[Placement]
) -> list[tuple[tuple[int, ...], DimIntervals]]:
    """The part of a dim at each of the coordinates along the axes that split it, the outermost first."""
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
    return parts


def _cut_evenly(length: int, cuts: Sequence[tuple[int, int]]) -> tuple[DimCuts, IntArray]:
    """The same for splits as torch.chunk's, by arithmetic: a dim over thousands of ranks is an ordinary one.

    `cuts` has the number of ranks and the length of a unit for each axis.
    """
    starts, ends = np.zeros(1, np.int64), np.full(1, length, np.int64)
    for count, unit in cuts:
        edges = even_edges(starts[:, None], ends[:, None], count, unit, np.arange(count + 1))
        starts, ends = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)
    lengths = ends - starts
    coordinates = np.stack(np.unravel_index(np.arange(len(starts)), tuple(n for n, _ in cuts)), axis=1)
    order = np.lexsort((lengths, starts))
    made = DimCuts(freeze_array(starts[order]), freeze_array(lengths[order]), freeze_array(np.zeros(len(order))))
    return made, coordinates[order]


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


def mesh_table(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], order: Sequence[int]) -> PieceTable:
    """The rows of a mesh layout that has copies: another number of ranks for one box than for another.

    In order of cells, then addends. Copies are replicas of a cell, or its addends where they are said to be.
    """
    parts, place, numbers = [], {}, 1
    for dim, length in enumerate(shape):
        axes = [a for a in order if isinstance(p := placements[a], Shard) and p.dim == dim]
        parts.append(_cut_with_copies(length, axes, mesh, placements))
        place.update({axis: (dim, 4 + i) for i, axis in enumerate(axes)})
        numbers *= 1 + int(parts[dim].rows[:, 3].max(initial=0))
    spread = [a for kind in (Partial, Replicate) for a, p in enumerate(placements) if isinstance(p, kind)]
    counts = [len(part.rows) for part in parts] + [mesh.shape[a] for a in spread]
    index = np.unravel_index(np.arange(math.prod(counts)), tuple(counts)) if counts else (np.zeros(1, np.int64),)
    taken = [part.rows[index[d]] for d, part in enumerate(parts)]
    cells, copies, addends = (np.zeros(math.prod(counts), np.int64) for _ in range(3))
    for d, part in enumerate(parts):
        cells = cells * part.cell_count + part.cells[index[d]]
        copies = copies * (1 + int(part.rows[:, 3].max(initial=0))) + taken[d][:, 3]
    for number, axis in enumerate(spread, start=len(parts)):
        if isinstance(placements[axis], Partial):
            addends = addends * mesh.shape[axis] + index[number]
    where = [
        taken[place[a][0]][:, place[a][1]] if a in place else index[len(parts) + spread.index(a)]
        for a in range(mesh.ndim)
    ]
    if any(isinstance(p, Shard) and p.addends for p in placements):
        addends = addends * numbers + copies
    rows = np.lexsort((addends, cells))
    columns = [_columns([rows_of_dim[:, i] for rows_of_dim in taken], len(cells), len(shape)) for i in range(3)]
    ranks, zeros = np.asarray(mesh.ranks[tuple(where)]), np.zeros(len(cells), np.int64)
    return PieceTable(columns[0], columns[1], ranks, cells, addends, zeros, columns[2]).take(rows)


class _DimParts(NamedTuple):
    """The intervals of a dim, each once for every holder: start, length, place in the local tensor, number of the copy,
    coordinates; and which of `cell_count` cells of the dim it is."""

    rows: IntArray
    cells: IntArray
    cell_count: int


def _cut_with_copies(length: int, axes: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> _DimParts:
    """The cells of one dim and their holders; where intervals of ranks overlap in part, they are cut so that they do
    not."""
    parts = _split_dim(length, axes, mesh, placements)
    edges = sorted({edge for _, part in parts for interval in part for edge in interval})
    found = []
    for coords, part in parts:
        position = 0
        for start, stop in part:
            inside = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
            for low, high in pairwise((start, *inside, stop)):
                found.append((low, high - low, position + low - start, 0, *coords))
            position += stop - start
    rows = np.array(found, dtype=np.int64).reshape(len(found), 4 + len(axes))
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    new = (rows[1:, :2] != rows[:-1, :2]).any(axis=1) | (rows[1:, 1] == 0)  # ranks with nothing have no copies of it
    cells = np.concatenate([np.zeros(min(1, len(rows)), np.int64), np.cumsum(new)])
    rows[:, 3] = np.arange(len(rows)) - np.searchsorted(cells, cells, side="left")
    return _DimParts(rows, cells, int(cells[-1]) + 1)


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


_KEY_LIMIT = 2**62


def check_coverage(
    shape: Sequence[int], offsets: IntArray, sizes: IntArray, describe: Callable[[int], str], what: str = "pieces"
) -> None:
    """Raise a LayoutError that names the culprits unless the boxes tile a tensor of this shape exactly.

    >>> check_coverage((4,), np.array([[0], [1]]), np.array([[2], [3]]), lambda i: f"piece {i}")
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: pieces of a tensor of shape (4,) overlap in [1:2]: piece 0 and piece 1
    """
    _check_bounds(shape, offsets, sizes, describe)
    point = first_miscovered_point(shape, offsets, sizes)
    if point is None:
        return
    inside = np.flatnonzero(((offsets <= point) & (point < offsets + sizes)).all(axis=1))
    if len(inside) > 1:
        a, b = int(inside[0]), int(inside[1])
        shared = Box(offsets[a], sizes[a]).intersect(Box(offsets[b], sizes[b]))
        raise LayoutError(
            f"{what} of a tensor of shape {tuple(shape)} overlap in {shared}: {describe(a)} and {describe(b)}"
        )
    gap = _uncovered_box(shape, offsets, sizes, point)
    raise LayoutError(f"no piece covers {gap} of a tensor of shape {tuple(shape)}; add one, or enlarge its neighbour")


def _check_bounds(shape: Sequence[int], offsets: IntArray, sizes: IntArray, describe: Callable[[int], str]) -> None:
    if offsets.shape[1] != len(shape):
        raise LayoutError(
            f"{describe(0)} has {offsets.shape[1]} dims; the tensor's shape {tuple(shape)} has {len(shape)}"
        )
    bad = np.flatnonzero(((offsets < 0) | (sizes < 0) | (offsets + sizes > np.asarray(shape, np.int64))).any(axis=1))
    if len(bad):
        raise LayoutError(f"{describe(int(bad[0]))} is outside the tensor's shape {tuple(shape)}")


def first_miscovered_point(shape: Sequence[int], offsets: IntArray, sizes: IntArray) -> IntArray | None:
    """The first point, in row-major order, that the boxes do not cover exactly once; None if there is none.

    >>> first_miscovered_point((4, 2), np.array([[0, 0]]), np.array([[3, 2]])).tolist()
    [3, 0]
    """
    limits = np.asarray(shape, np.int64)
    if not (limits > 0).all():
        return None
    filled = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[filled], sizes[filled]
    cut = np.flatnonzero(((offsets != 0) | (sizes != limits)).any(axis=0)) if len(offsets) else np.arange(len(shape))
    starts = np.concatenate([offsets[:, cut], np.zeros((1, len(cut)), np.int64)])
    ends = np.concatenate([(offsets + sizes)[:, cut], limits[None, cut]])
    weights = np.ones(len(starts), np.int64)
    weights[-1] = -1
    corner = _first_nonzero_corner(starts, ends, weights)
    if corner is None:
        return None
    point = np.zeros(len(shape), np.int64)
    point[cut] = corner
    return point


def _first_nonzero_corner(starts: IntArray, ends: IntArray, weights: IntArray) -> IntArray | None:
    """The first corner at which the signed, weighted corner counts do not cancel."""
    grids, low, high = _compress(starts, ends)
    keys, signs = np.zeros((1, len(starts)), np.int64), weights[None, :]
    for d, grid in enumerate(grids):
        if int(keys.max()) >= _KEY_LIMIT // len(grid):
            keys = np.unique(keys, return_inverse=True)[1].reshape(keys.shape)
        keys = keys * len(grid)
        keys, signs = np.concatenate([keys + low[:, d], keys + high[:, d]]), np.concatenate([signs, -signs])
    order = np.argsort(keys, axis=None)
    flat_keys, flat_signs = keys.reshape(-1)[order], signs.reshape(-1)[order]
    first = np.flatnonzero(np.concatenate([[True], flat_keys[1:] != flat_keys[:-1]]))
    sums = np.add.reduceat(flat_signs, first)
    wrong = np.flatnonzero(sums)
    if len(wrong) == 0:
        return None
    corner, box = divmod(int(order[first[wrong[0]]]), len(starts))
    return np.array([(ends if corner >> d & 1 else starts)[box, d] for d in range(len(grids))], np.int64)


def _compress(starts: IntArray, ends: IntArray) -> tuple[list[IntArray], IntArray, IntArray]:
    """Replace coordinates by their rank among the distinct ones, so that a corner fits in one int64."""
    grids, low, high = [], [], []
    for d in range(starts.shape[1]):
        grid, inverse = np.unique(np.concatenate([starts[:, d], ends[:, d]]), return_inverse=True)
        grids.append(grid)
        low.append(inverse[: len(starts)])
        high.append(inverse[len(starts) :])
    if not grids:
        empty = np.zeros((len(starts), 0), np.int64)
        return [], empty, empty
    return grids, np.stack(low, axis=1), np.stack(high, axis=1)


def _uncovered_box(shape: Sequence[int], offsets: IntArray, sizes: IntArray, point: IntArray) -> Box:
    """The box that starts at an uncovered point, grown along each dim, last dim first, until it meets a piece."""
    start, end = point.copy(), point + 1
    for d in reversed(range(len(shape))):
        others = [i for i in range(len(shape)) if i != d]
        meets = ((offsets[:, others] < end[others]) & (start[others] < (offsets + sizes)[:, others])).all(axis=1)
        ahead = offsets[meets & (offsets[:, d] > point[d]) & (sizes > 0).all(axis=1), d]
        end[d] = ahead.min() if len(ahead) else shape[d]
    return Box(tuple(start.tolist()), tuple((end - start).tolist()))


class ShardingSpec(ABC):
    """A rule that lays out a tensor of any fitting shape. Subclasses are hashable values with at least `pieces`.

    >>> class OddRows(ShardingSpec):
    ...     def pieces(self, shape):
    ...         return [Piece(Box((row,), (1,)), rank=row % 2) for row in range(shape[0])]
    >>> OddRows().layout((3,)).ranks
    (0, 1)
    """

    @property
    def shards_itself(self) -> bool:
        """Whether tensors are laid out by a `shard` method of the spec's own, as torch's old API allows."""
        return False

    def of_addends(self) -> ShardingSpec | None:
        """That of gradients, where parts have copies, which are addends there; None without copies.

        What ranks do with copies they do each by itself, so a gradient is the sum of theirs; not so with replicas.
        """
        return None

    @property
    def dropped_dim(self) -> int | None:
        """The dim that a local output loses where its length is 1 (`collect_local_shard`), as in torch's old API."""
        return None

    @abstractmethod
    def pieces(self, shape: Sequence[int]) -> Sequence[Piece]:
        """The boxes of a tensor of this shape and the ranks that hold them, in the order of the local tensors."""

    def layout(self, shape: Sequence[int]) -> Layout:
        """This spec applied to a shape: the same object each time."""
        shape = check_shape(shape)
        key = _InternKey(self, shape)
        return _interned.get(key) or _intern(key, Layout(shape, self))

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        """Where everything is: a product form where there is one, else a table of validated pieces."""
        return build_checked_table(shape, self.pieces(shape))

    def is_arithmetic(self, shape: tuple[int, ...]) -> bool:
        """Whether the spec fits a shape and `local_shapes` follows by arithmetic: then `resolve` can wait."""
        return False

    def local_shapes(self, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of a rank's local tensors, where the spec is arithmetic."""
        raise NotImplementedError

    def reduction(self) -> Reduction | None:
        """The reduction that this spec leaves pending."""
        return None

    def to_json(self) -> dict[str, Any] | None:
        """Plain data from which the spec is rebuilt; None: the layout is written as its pieces."""
        return None


class _InternKey:
    """A spec and a shape, hashed once: dropping a layout must not call a spec's own methods."""

    __slots__ = ("hash", "shape", "spec")

    def __init__(self, spec: ShardingSpec, shape: tuple[int, ...]) -> None:
        self.spec, self.shape = spec, shape
        self.hash = hash((type(spec), spec, shape))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _InternKey):
            return NotImplemented
        same_kind = type(self.spec) is type(other.spec) and self.shape == other.shape
        return same_kind and bool(self.spec == other.spec)


_interned: WeakValueDictionary[_InternKey, Layout] = WeakValueDictionary()
_interning = threading.RLock()


def _intern(key: _InternKey, made: Layout) -> Layout:
    """The one layout of a key: of two threads that made it at the same time, both get that of the first."""
    with _interning:
        found = _interned.get(key)
        if found is None:
            found = _interned[key] = made
        return found


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of ints, or an error."""
    if type(shape) is tuple and all(type(s) is int and s >= 0 for s in shape):
        return shape
    checked = to_int_tuple(shape, "a shape")
    if any(s < 0 for s in checked):
        raise LayoutError(f"a shape has no negative lengths, got {checked}")
    return checked


def build_checked_table(shape: Sequence[int], pieces: Sequence[Piece], replicated: bool = False) -> PieceTable:
    """The table of pieces that are checked to cover the tensor exactly once (each replica once)."""
    for piece in pieces:
        if piece.box.ndim != len(shape):
            raise LayoutError(f"{piece} has {piece.box.ndim} dims; the tensor's shape {tuple(shape)} has {len(shape)}")
    size = (len(pieces), len(shape))
    offsets = np.array([p.box.offsets for p in pieces], np.int64).reshape(size)
    sizes = np.array([p.box.sizes for p in pieces], np.int64).reshape(size)
    ranks = np.array([p.rank for p in pieces], np.int64)
    named = any(p.device is not None for p in pieces)
    devices = tuple(p.device for p in pieces) if named else None
    return check_piece_table(shape, table_from_boxes(offsets, sizes, ranks, devices), replicated)


def check_piece_table(shape: Sequence[int], table: PieceTable, replicated: bool) -> PieceTable:
    """The same table, checked."""
    rows = np.arange(len(table))
    if replicated:
        _check_replicas(table)
        rows = np.unique(table.cells, return_index=True)[1]

    def describe(row: int) -> str:
        return str(table.take(rows[row : row + 1]).pieces()[0])

    check_coverage(shape, table.offsets[rows], table.sizes[rows], describe)
    return table


def _check_replicas(table: PieceTable) -> None:
    pairs = np.stack([table.cells, table.ranks], axis=1)
    _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
    if len(counts) and counts.max() > 1:
        twice = table.take(first[counts.argmax()][None]).pieces()[0]
        raise LayoutError(f"{twice} is listed {int(counts.max())} times; a rank can have a box only once")


class Layout:
    """A spec applied to one shape; made by `ShardingSpec.layout(shape)`.

    >>> from shardwise.geometry.specs import ChunkSpec
    >>> layout = ChunkSpec(0, ranks=4).layout((10, 2))
    >>> layout.local_shapes(3)
    ((1, 2),)
    >>> print(layout.pieces[1])
    [3:6, 0:2] on rank 1
    """

    shape: tuple[int, ...]
    spec: ShardingSpec

    def __init__(self, shape: tuple[int, ...], spec: ShardingSpec) -> None:
        self.__dict__.update(shape=shape, spec=spec, _is_arithmetic=spec.is_arithmetic(shape))
        if not self.__dict__["_is_arithmetic"]:
            self.__dict__["_resolved"] = spec.resolve(shape)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is frozen: {name} cannot be set")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _resolved(self) -> Cells | PieceTable:
        return self.spec.resolve(self.shape)

    @cached_property
    def cells(self) -> Cells | None:
        """The product form of a regular layout."""
        return self._resolved if isinstance(self._resolved, Cells) else None

    @cached_property
    def table(self) -> PieceTable:
        """All pieces as NumPy columns."""
        if isinstance(self._resolved, PieceTable):
            return self._resolved
        return table_from_cells(self._resolved, getattr(self.spec, "devices", None))

    @cached_property
    def pending(self) -> Reduction | None:
        """The pending reduction, or None."""
        return self.spec.reduction()

    @cached_property
    def depends_on_data(self) -> bool:
        """Whether values of tensors decided which rank has which rows: then nothing about the layout is remembered."""
        return any(getattr(p, "owners", None) is not None for p in getattr(self.spec, "placements", ()))

    @property
    def is_regular(self) -> bool:
        """Whether the layout is a product of per-dim cuts (mesh, chunk and grid layouts are)."""
        return self.cells is not None

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return self.table.pieces()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a piece (an empty one counts), ascending."""
        return tuple(np.unique(self.table.ranks).tolist())

    @cached_property
    def _by_rank(self) -> tuple[IntArray, IntArray]:
        order = np.argsort(self.table.ranks, kind="stable")
        return order, self.table.ranks[order]

    def rows_of(self, rank: int) -> IntArray:
        """The rows of `table` that a rank holds, in order."""
        order, ranks = self._by_rank
        low, high = np.searchsorted(ranks, (rank, rank + 1))
        return order[low:high]

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank holds, in the order of its local tensors."""
        return self.table.take(self.rows_of(rank)).pieces()

    def ranks_holding(self, box: Box) -> tuple[int, ...]:
        """The ranks that hold at least one element of a box."""
        if box.ndim != self.ndim:
            raise LayoutError(f"{box} has {box.ndim} dims; the tensor's shape {self.shape} has {self.ndim}")
        start, end = np.array(box.offsets, np.int64), np.array(box.ends, np.int64)
        low = np.maximum(self.table.offsets, start)
        high = np.minimum(self.table.offsets + self.table.sizes, end)
        return tuple(np.unique(self.table.ranks[(low < high).all(axis=1)]).tolist())

    @cached_property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that hold the same values, each once; a set of one has no copy elsewhere."""
        table = self.table
        key = np.stack([table.cells, table.addends], axis=1)
        _, group = np.unique(key, axis=0, return_inverse=True)
        order = np.lexsort((table.ranks, np.asarray(group).reshape(-1)))
        edges = np.flatnonzero(np.diff(np.asarray(group).reshape(-1)[order])) + 1
        return tuple(sorted({tuple(part.tolist()) for part in np.split(table.ranks[order], edges) if len(part)}))

    def local_shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of a rank's local tensors: none, one or many."""
        known = self._shapes.get(rank)
        if known is None:
            known = self._shapes[rank] = self._shapes_of(rank)
        return known

    @cached_property
    def _shapes(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        return {}

    def _shapes_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        if self.__dict__["_is_arithmetic"]:
            return self.spec.local_shapes(self.shape, rank)
        own = self.table.take(self.rows_of(rank))
        count = int(own.slots.max()) + 1 if len(own) else 0
        extents = np.zeros((count, self.ndim), np.int64)
        np.maximum.at(extents, own.slots, own.local_offsets + own.sizes)
        return tuple(tuple(row) for row in extents.tolist())

    def elements_per_rank(self) -> dict[int, int]:
        """How many elements each rank holds."""
        totals = np.zeros(len(self.ranks), np.int64)
        np.add.at(totals, np.searchsorted(self.ranks, self.table.ranks), self.table.sizes.prod(axis=1))
        return dict(zip(self.ranks, totals.tolist(), strict=True))

    def bytes_per_rank(self, itemsize: int) -> dict[int, int]:
        """How many bytes each rank holds."""
        return {rank: count * itemsize for rank, count in self.elements_per_rank().items()}

    @cached_property
    def _layout_digest(self) -> bytes:
        """A digest of all that decides what is where."""
        table = self.table
        order, ranks = self._by_rank
        lead = np.full(
            (int(table.cells.max(initial=-1)) + 1, int(table.addends.max(initial=0)) + 1), np.iinfo(np.int64).max
        )
        np.minimum.at(lead, (table.cells, table.addends), table.ranks)
        addends = lead[table.cells, table.addends] if self.pending else np.zeros(len(table), np.int64)
        digest = hashlib.blake2b(repr((self.shape, self.pending)).encode(), digest_size=16)
        for column in (table.slots, table.offsets, table.sizes, table.local_offsets, addends):
            digest.update(np.ascontiguousarray(column[order]).tobytes())
        digest.update(np.ascontiguousarray(ranks).tobytes())
        return digest.digest()

    def is_used_as(self, other: Layout) -> bool:
        """Whether it is equal to another layout, and so is that of its gradients: copies have addends, replicas do not.

        >>> from shardwise.geometry import parse_spec
        >>> copies, replicas = (parse_spec(f"on tp=2: {text}").layout((4,)) for text in ("S(0) each 2", "R"))
        >>> copies == replicas, copies.is_used_as(replicas), copies.is_used_as(copies)
        (True, False, True)
        """
        if self is other:
            return True
        ours, theirs = (layout.spec.of_addends() for layout in (self, other))
        if ours is None or theirs is None:
            return ours is theirs and self == other
        return self == other and ours.layout(self.shape) == theirs.layout(other.shape)

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self._layout_digest))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.shape == other.shape and self._layout_digest == other._layout_digest

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_layout, (self.spec, self.shape)

    def __repr__(self) -> str:
        return f"Layout(shape={self.shape}, spec={self.spec!r})"

    def _repr_html_(self) -> str:
        """A picture for notebooks."""
        return draw_html("layout_html", self)


def rebuild_layout(spec: ShardingSpec, shape: tuple[int, ...]) -> Layout:
    """Make the layout that pickle wrote."""
    return spec.layout(shape)


_rebuild = rebuild_layout  # pickles may name it so
