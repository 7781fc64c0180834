"""The rules that lay out a tensor of any fitting shape: chunk, grid, mesh, enumerable."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise._text import count_of, public
from shardwise.geometry.box import LayoutError, Piece, to_int_tuple
from shardwise.geometry.layout import (
    MAX_ARRAY_DIMS,
    Cells,
    PieceTable,
    ShardingSpec,
    check_piece_table,
    grid_cells,
    mesh_cells,
    mesh_table,
    table_from_boxes,
)
from shardwise.geometry.mesh import DeviceMeshLike, IntArray, Mesh, format_ranks, freeze_array, number_ranks, to_mesh
from shardwise.geometry.placements import (
    Partial,
    Placement,
    PlacementLike,
    Reduction,
    Replicate,
    Shard,
    chunk_sizes,
    even_edges,
    pending_reduction,
    resolve_dim,
    to_placement,
)

Devices: TypeAlias = tuple[str | None, ...] | None


def _has_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and any(isinstance(v, str) for v in value))


class _ProductSpec(ShardingSpec):
    """A spec whose layouts have a product form."""

    def pieces(self, shape: Sequence[int]) -> Sequence[Piece]:
        return self.layout(shape).pieces


@dataclass(frozen=True)
class ChunkSpec(_ProductSpec):
    """Chunks along one dim, as `torch.chunk` splits them, chunk i on `ranks[i]`; a rank may appear several times.

    >>> layout = ChunkSpec(0, ranks=(2, 0, 1)).layout((7,))
    >>> [str(p) for p in layout.pieces]
    ['[0:3] on rank 2', '[3:6] on rank 0', '[6:7] on rank 1']
    """

    dim: int
    ranks: tuple[int, ...]
    devices: Devices = None

    def __init__(self, dim: int, ranks: int | Sequence[int], devices: Sequence[str | None] | None = None) -> None:
        if _has_text(ranks):
            raise LayoutError(
                f"ChunkSpec takes ranks as numbers, a count such as 4 or a list such as [0, 1]; got {ranks!r}. Texts "
                "such as 'rank:0/cpu' belong in the ChunkShardingSpec of shardwise.compat"
            )
        chosen = (
            tuple(number_ranks((ranks,)).tolist())
            if isinstance(ranks, int)
            else to_int_tuple(ranks, "ranks of ChunkSpec")
        )
        object.__setattr__(self, "dim", to_int_tuple((dim,), "a dim", single=True)[0])
        object.__setattr__(self, "ranks", chosen)
        object.__setattr__(self, "devices", None if devices is None else tuple(devices))
        if not chosen or min(chosen) < 0:
            raise LayoutError(f"ChunkSpec needs at least one rank, all 0 or more; got {chosen}")
        if self.devices is not None and len(self.devices) != len(chosen):
            raise LayoutError(f"ChunkSpec over {len(chosen)} ranks needs as many devices, got {len(self.devices)}")

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        dim = resolve_dim(self.dim, shape, f"ChunkSpec(dim={self.dim})")
        sizes = [chunk_sizes(s, len(self.ranks)) if d == dim else (s,) for d, s in enumerate(shape)]
        grid_shape = tuple(len(s) for s in sizes)
        return grid_cells(sizes, np.array(self.ranks, np.int64).reshape((*grid_shape, 1)))

    def to_json(self) -> dict[str, Any]:
        devices = {} if self.devices is None else {"devices": list(self.devices)}
        return {"kind": "chunk", "dim": self.dim, "ranks": list(self.ranks), **devices}

    def __repr__(self) -> str:
        return f"ChunkSpec(dim={self.dim}, ranks={format_ranks(self.ranks)})"


class GridSpec(_ProductSpec):
    """A grid of cells: for each dim a number of chunks or the lengths of its cuts, and an array of ranks.

    The array has the grid's shape; one axis more holds replicas. A rank may hold several cells.

    >>> layout = GridSpec(splits=(2, (1, 3)), ranks=[[0, 1], [2, 0]]).layout((4, 4))
    >>> layout.local_shapes(0)
    ((2, 1), (2, 3))
    """

    splits: tuple[int | tuple[int, ...], ...]
    ranks: IntArray

    @public
    def __init__(self, splits: Sequence[int | Sequence[int]], ranks: npt.ArrayLike) -> None:
        chosen = tuple(s if isinstance(s, int) else to_int_tuple(s, "splits of GridSpec") for s in splits)
        object.__setattr__(self, "splits", chosen)
        counts = tuple(s if isinstance(s, int) else len(s) for s in chosen)
        array = freeze_array(ranks)
        if array.shape != counts and array.shape[:-1] != counts:
            raise LayoutError(
                f"splits {chosen} make a grid of shape {counts}; pass a rank array of this shape "
                f"(or with one more axis for replicas), got shape {array.shape}"
            )
        array = freeze_array(array.reshape((*counts, -1))) if array.size else array
        object.__setattr__(self, "ranks", array)
        self._check()

    def _check(self) -> None:
        if self.ranks.size == 0 or self.ranks.min() < 0:
            raise LayoutError("GridSpec needs at least one rank for each cell, all 0 or more")
        copies = np.sort(self.ranks, axis=-1)
        if (copies[..., 1:] == copies[..., :-1]).any():
            raise LayoutError(
                "GridSpec: the replicas of a cell are on different ranks; one rank appears twice for a cell"
            )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a GridSpec is frozen: {name} cannot be set")

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        if len(shape) != len(self.splits):
            raise LayoutError(f"GridSpec has splits for {len(self.splits)} dims; the shape {shape} has {len(shape)}")
        sizes = [chunk_sizes(n, s) if isinstance(s, int) else s for n, s in zip(shape, self.splits, strict=True)]
        for dim, (cut, length) in enumerate(zip(sizes, shape, strict=True)):
            if sum(cut) != length or min(cut, default=0) < 0:
                raise LayoutError(f"dim {dim} of length {length} is split into sizes {cut}, which must sum to {length}")
        return grid_cells(sizes, self.ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GridSpec):
            return NotImplemented
        return self.splits == other.splits and np.array_equal(self.ranks, other.ranks)

    def __hash__(self) -> int:
        return hash((self.splits, self.ranks.tobytes()))

    def __reduce__(self) -> tuple[Any, ...]:
        return GridSpec, (self.splits, self.ranks)

    def to_json(self) -> dict[str, Any]:
        splits = [s if isinstance(s, int) else list(s) for s in self.splits]
        return {"kind": "grid", "splits": splits, "ranks": self.ranks.tolist()}

    def __repr__(self) -> str:
        return f"GridSpec(splits={self.splits}, ranks={self.ranks.tolist()})"


@dataclass(frozen=True)
class MeshSpec(_ProductSpec):
    """A mesh and what each of its axes does to the tensor; torch's DeviceMesh and placements are read as ours.

    Two axes may shard the same dim. `order` then says which splits first: axis names from the outermost to the
    innermost; the default is mesh order, the left axis outermost.

    >>> spec = MeshSpec(Mesh.of(dp=2, tp=2), (Shard(0), Shard(0)), order=("tp", "dp"))
    >>> [str(p) for p in spec.layout((8,)).pieces]
    ['[0:2] on rank 0', '[2:4] on rank 2', '[4:6] on rank 1', '[6:8] on rank 3']
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[str, ...]

    def __init__(
        self,
        mesh: Mesh | DeviceMeshLike,
        placements: Placement | PlacementLike | Sequence[Placement | PlacementLike],
        order: Sequence[str] | None = None,
    ) -> None:
        object.__setattr__(self, "mesh", to_mesh(mesh))
        listed = tuple(placements) if isinstance(placements, list | tuple) else (placements,)
        if len(listed) != self.mesh.ndim:
            raise LayoutError(
                f"a mesh with axes {self.mesh.axes} needs {count_of(self.mesh.ndim, 'placement')}, one for each axis; "
                f"got {len(listed)}: {listed}"
            )
        read = tuple(
            p if isinstance(p, Shard | Replicate | Partial) else to_placement(p, f"axis {axis!r}: ")
            for axis, p in zip(self.mesh.axes, listed, strict=True)
        )
        object.__setattr__(self, "placements", read)
        object.__setattr__(self, "order", self._full_order(order or read_order(self.mesh, listed)))
        if self.splits_in_mesh_order:
            object.__setattr__(self, "order", self.mesh.axes)
        pending_reduction(self.placements, self.mesh.shape)
        kinds = set()
        for placement in self.placements:
            if placement.__class__ is Shard and placement.each is not None:
                kinds.add(placement.addends)
        if len(kinds) > 1:
            raise LayoutError(f"{self.placements}: the copies of all axes are addends, or those of none")

    def _full_order(self, order: Sequence[str] | None) -> tuple[str, ...]:
        """The named axes first, in their order, then the others in mesh order."""
        named = list(order or ())
        for axis in named:
            self.mesh.axis_index(axis)
        if len(set(named)) != len(named):
            raise LayoutError(f"an axis appears twice in order: {tuple(named)}")
        rest = [a for a in self.mesh.axes if a not in named]
        return tuple(named + rest) if named else self.mesh.axes

    @cached_property
    def splits_in_mesh_order(self) -> bool:
        """Whether the order of splits is the default one, as far as it matters."""
        dims = [p.dim if isinstance(p, Shard) else None for p in self.placements]
        if len({d < 0 for d in dims if d is not None}) > 1:
            return self.order == self.mesh.axes
        by_dim: dict[int, list[int]] = {}
        for axis in self.order:
            index = self.mesh.axis_index(axis)
            if (dim := dims[index]) is not None:
                by_dim.setdefault(dim, []).append(index)
        return all(axes == sorted(axes) for axes in by_dim.values())

    @cached_property
    def _has_even_cuts(self) -> bool:
        """Whether every split is as `torch.chunk`'s, of a dim counted from the front; subclasses may mean others."""
        even = all(not isinstance(p, Shard) or (p.is_even and p.dim >= 0) for p in self.placements)
        return even and type(self) is MeshSpec

    @cached_property
    def has_copies(self) -> bool:
        """Whether an axis splits a dim so that parts are on several of its ranks."""
        return any(isinstance(p, Shard) and p.each is not None for p in self.placements)

    def of_addends(self) -> MeshSpec | None:
        if not self.has_copies or any(isinstance(p, Shard) and p.addends for p in self.placements):
            return None
        return MeshSpec(self.mesh, [p.dual for p in self.placements], self.order)

    def is_arithmetic(self, shape: tuple[int, ...]) -> bool:
        ndim = len(shape)
        fits = all(not isinstance(p, Shard) or p.dim < ndim for p in self.placements)
        return self._has_even_cuts and fits and ndim + self.mesh.ndim < MAX_ARRAY_DIMS - 1

    def local_shapes(self, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], ...]:
        place = self.mesh.indices(rank)
        if place is None:
            return ()
        starts, ends = [0] * len(shape), list(shape)
        for name in self.order:
            axis = self.mesh.axes.index(name)
            if isinstance(cut := self.placements[axis], Shard):
                start, end, unit = starts[cut.dim], ends[cut.dim], cut.unit or 1
                starts[cut.dim], ends[cut.dim] = (
                    even_edges(start, end, self.mesh.shape[axis], unit, place[axis] + n) for n in (0, 1)
                )
        return (tuple(end - start for start, end in zip(starts, ends, strict=True)),)

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        resolved = self.resolved(shape)
        make = mesh_table if self.has_copies else mesh_cells
        return make(shape, self.mesh, resolved.placements, [self.mesh.axis_index(a) for a in self.order])

    def resolved(self, shape: Sequence[int]) -> MeshSpec:
        """The same spec with dims counted from the front, checked against a shape."""
        if self.is_arithmetic(tuple(shape)):
            return self
        placements = tuple(self._resolve_placement(p, axis, shape) for axis, p in enumerate(self.placements))
        return self if placements == self.placements else MeshSpec(self.mesh, placements, self.order)

    def _resolve_placement(self, placement: Placement, axis: int, shape: Sequence[int]) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        dim = resolve_dim(placement.dim, shape, f"{placement!r} on axis {self.mesh.axes[axis]!r}")
        if placement.groups is not None and sum(placement.groups) != shape[dim]:
            raise LayoutError(
                f"dim {dim} of length {shape[dim]} is declared as groups {placement.groups}, which add up to "
                f"{sum(placement.groups)}; pass groups that add up to {shape[dim]}"
            )
        if placement.owners is not None and len(placement.owners) != shape[dim]:
            raise LayoutError(
                f"dim {dim} of length {shape[dim]} has owners for {len(placement.owners)} rows; pass one for each"
            )
        return placement.along(dim)

    def reduction(self) -> Reduction | None:
        return pending_reduction(self.placements, self.mesh.shape)

    def to_json(self) -> dict[str, Any]:
        order = {} if self.splits_in_mesh_order else {"order": list(self.order)}
        placements = [p.to_json() for p in self.placements]
        return {"kind": "mesh", "mesh": self.mesh.to_json(), "placements": placements, **order}

    def __repr__(self) -> str:
        order = "" if self.splits_in_mesh_order else f", order={self.order}"
        return f"MeshSpec({self.mesh}, {self.placements}{order})"


def read_order(mesh: Mesh, placements: Sequence[Any]) -> list[str]:
    """The order of splits, as axis names, that torch's strided shards represent; empty without any."""
    strided = {p.dim for p in placements if type(p).__name__ == "_StridedShard"}
    order: list[str] = []
    for dim in sorted(strided):
        axes = [a for a, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        wanted = {a: getattr(placements[a], "split_factor", 1) for a in axes}
        fits = [p for p in permutations(axes) if all(split_factor(mesh, p, a) == wanted[a] for a in axes)]
        if not fits:
            raise LayoutError(
                f"the split factors {wanted} of dim {dim} do not order the axes {mesh}; redistribute to Shard({dim})"
            )
        order += [mesh.axes[a] for a in fits[0]]
    return order


def split_factor(mesh: Mesh, order: Sequence[int], axis: int) -> int:
    """Torch's split factor: the ranks of the axes that split earlier but come later in the mesh."""
    return prod(mesh.shape[a] for a in order[: order.index(axis)] if a > axis)


class EnumerableSpec(ShardingSpec):
    """Any disjoint boxes that cover the tensor; a rank has none, one or many, in the listed order.

    With `replicated=True` several ranks may hold the very same box.

    >>> from shardwise.geometry.box import Box
    >>> spec = EnumerableSpec([Piece(Box((0,), (3,)), 1), Piece(Box((3,), (1,)), 0), Piece(Box((4,), (2,)), 1)])
    >>> spec.layout((6,)).local_shapes(1)
    ((3,), (2,))
    """

    offsets: IntArray
    sizes: IntArray
    ranks: IntArray
    devices: Devices
    replicated: bool

    @public
    def __init__(self, pieces: Sequence[Piece], replicated: bool = False) -> None:
        ndims = {p.box.ndim for p in pieces}
        if len(ndims) > 1:
            odd = next(p for p in pieces if p.box.ndim != pieces[0].box.ndim)
            raise LayoutError(f"pieces of one tensor have the same number of dims; {pieces[0]} and {odd} differ")
        size = (len(pieces), ndims.pop() if ndims else 0)
        offsets = np.array([p.box.offsets for p in pieces], np.int64).reshape(size)
        sizes = np.array([p.box.sizes for p in pieces], np.int64).reshape(size)
        named = any(p.device is not None for p in pieces)
        devices = tuple(p.device for p in pieces) if named else None
        self._fill(offsets, sizes, np.array([p.rank for p in pieces], np.int64), devices, replicated)

    @classmethod
    def from_arrays(
        cls, offsets: npt.ArrayLike, sizes: npt.ArrayLike, ranks: npt.ArrayLike, replicated: bool = False
    ) -> EnumerableSpec:
        """The same from columns: offsets and sizes of shape (pieces, ndim), ranks of shape (pieces,)."""
        spec = cls.__new__(cls)
        spec._fill(np.asarray(offsets), np.asarray(sizes), np.asarray(ranks), None, replicated)
        if spec.offsets.ndim != 2 or spec.offsets.shape != spec.sizes.shape or len(spec.ranks) != len(spec.offsets):
            shapes = f"{spec.offsets.shape}, {spec.sizes.shape} and {spec.ranks.shape}"
            raise LayoutError(f"offsets and sizes have shape (pieces, ndim), ranks (pieces,); got {shapes}")
        if len(spec.ranks) and spec.ranks.min() < 0:
            raise LayoutError(f"a rank is 0 or more, got {int(spec.ranks.min())}")
        return spec

    def _fill(self, offsets: IntArray, sizes: IntArray, ranks: IntArray, devices: Devices, replicated: bool) -> None:
        own = {"offsets": freeze_array(offsets), "sizes": freeze_array(sizes), "ranks": freeze_array(ranks)}
        digest = hashlib.blake2b(repr((offsets.shape, replicated)).encode(), digest_size=16)
        for column in own.values():
            digest.update(column.tobytes())
        self.__dict__.update(own, devices=devices, replicated=replicated, _digest=digest.digest())

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an EnumerableSpec is frozen: {name} cannot be set")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fill(*(state[name] for name in ("offsets", "sizes", "ranks", "devices", "replicated")))

    def pieces(self, shape: Sequence[int]) -> Sequence[Piece]:
        return self.layout(shape).pieces

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        offsets, sizes = self.offsets, self.sizes
        if len(self.ranks) == 0:
            offsets = sizes = np.zeros((0, len(shape)), np.int64)
        if offsets.shape[1] != len(shape):
            raise LayoutError(f"the pieces have {offsets.shape[1]} dims; the tensor's shape {shape} has {len(shape)}")
        return check_piece_table(shape, table_from_boxes(offsets, sizes, self.ranks, self.devices), self.replicated)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EnumerableSpec):
            return NotImplemented
        return bool(self.__dict__["_digest"] == other.__dict__["_digest"]) and self.devices == other.devices

    def __hash__(self) -> int:
        return hash(self.__dict__["_digest"])

    def to_json(self) -> dict[str, Any]:
        rows = zip(self.ranks.tolist(), self.offsets.tolist(), self.sizes.tolist(), strict=True)
        devices = {} if self.devices is None else {"devices": list(self.devices)}
        replicated = {"replicated": True} if self.replicated else {}
        return {"kind": "enumerable", "pieces": [list(r) for r in rows], **replicated, **devices}

    def __repr__(self) -> str:
        return f"EnumerableSpec({len(self.ranks)} pieces on {len(np.unique(self.ranks))} ranks)"
