"""Layouts to and from plain JSON.

Which spec explains these pieces? The simplest one: chunk, then grid, then mesh, else enumerable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise._text import public
from shardwise.geometry.box import Box, LayoutError, Piece
from shardwise.geometry.layout import Layout, PieceTable, ShardingSpec, build_checked_table
from shardwise.geometry.mesh import IntArray, Mesh
from shardwise.geometry.placements import Partial, Placement, Replicate, RowOwners, Shard, chunk_sizes
from shardwise.geometry.specs import ChunkSpec, EnumerableSpec, GridSpec, MeshSpec


@public
def layout_to_json(layout: Layout) -> dict[str, Any]:
    """Return a layout as plain data for JSON. A spec of your own class is written as its pieces.

    >>> layout_to_json(ChunkSpec(0, 2).layout((4,)))
    {'shape': [4], 'spec': {'kind': 'chunk', 'dim': 0, 'ranks': [0, 1]}}
    """
    spec = layout.spec.to_json()
    if spec is None:
        spec = EnumerableSpec(layout.pieces).to_json()
    return {"shape": list(layout.shape), "spec": spec}


@public
def layout_from_json(data: dict[str, Any]) -> Layout:
    """Read a layout that `layout_to_json` wrote, and check it.

    >>> layout_from_json({"shape": [4], "spec": {"kind": "chunk", "dim": 0, "ranks": [0, 1]}}).local_shapes(1)
    ((2,),)
    """
    try:
        return spec_from_json(data["spec"]).layout(data["shape"])
    except (KeyError, TypeError, IndexError) as error:
        raise LayoutError(f"this is not a layout in JSON: {type(error).__name__}: {error}") from None


def spec_from_json(data: dict[str, Any]) -> ShardingSpec:
    """The spec that a spec's `to_json` wrote."""
    kind = data["kind"]
    if kind == "chunk":
        return ChunkSpec(data["dim"], data["ranks"], data.get("devices"))
    if kind == "grid":
        return GridSpec(data["splits"], data["ranks"])
    if kind == "mesh":
        placements = [placement_from_json(p) for p in data["placements"]]
        return MeshSpec(Mesh.from_json(data["mesh"]), placements, data.get("order"))
    if kind == "enumerable":
        devices = data.get("devices") or [None] * len(data["pieces"])
        pieces = [Piece(Box(tuple(o), tuple(s)), r, d) for (r, o, s), d in zip(data["pieces"], devices, strict=True)]
        return EnumerableSpec(pieces, data.get("replicated", False))
    raise LayoutError(f"unknown kind of spec {kind!r}; known: chunk, grid, mesh, enumerable")


def placement_from_json(data: dict[str, Any]) -> Placement:
    """The placement that its `to_json` wrote."""
    kind = data["kind"]
    if kind == "replicate":
        return Replicate()
    if kind == "partial":
        return Partial(data["op"])
    if kind == "shard":
        owners = None if data.get("owners") is None else RowOwners(data["owners"])
        rule: dict[str, Any] = {name: data.get(name) for name in ("sizes", "groups", "block", "unit", "each")}
        rule |= {name: bool(data.get(name)) for name in ("zigzag", "addends")}
        return Shard(data["dim"], owners=owners, **rule)
    raise LayoutError(f"unknown kind of placement {kind!r}; known: replicate, partial, shard")


@public
def infer_spec(shape: Sequence[int], pieces: Sequence[Piece]) -> ShardingSpec:
    """Find the simplest spec that assigns exactly these pieces to the ranks, in this order.

    >>> from shardwise.geometry.box import Box
    >>> infer_spec((4, 6), [Piece(Box((0, 3), (4, 3)), 0), Piece(Box((0, 0), (4, 3)), 1)])
    ChunkSpec(dim=1, ranks=1,0)
    """
    shape = tuple(shape)
    table = build_checked_table(shape, pieces, replicated=True)
    enumerable = EnumerableSpec(pieces, replicated=len(np.unique(table.cells)) < len(table))
    wanted = enumerable.layout(shape)
    for candidate in _candidates(shape, table):
        if candidate.layout(shape) == wanted:
            return candidate
    return enumerable


def _candidates(shape: tuple[int, ...], table: PieceTable) -> list[ShardingSpec]:
    grid = _grid(shape, table)
    if grid is None:
        return []
    sizes, owners = grid
    copies = np.sort(owners, axis=-1)
    if (copies[..., 1:] == copies[..., :-1]).any():
        return []
    found: list[ShardingSpec] = []
    cut = [d for d, s in enumerate(sizes) if len(s) > 1]
    if owners.shape[-1] == 1:
        dim = cut[0] if cut else 0
        if len(cut) <= 1 and shape and sizes[dim] == chunk_sizes(shape[dim], len(sizes[dim])):
            found.append(ChunkSpec(dim, owners.reshape(-1).tolist(), _devices(table)))
        found.append(GridSpec(sizes, owners))
    else:
        if len(np.unique(owners)) == owners.size:
            found.append(_mesh(shape, sizes, owners))
        found.append(GridSpec(sizes, owners))
    return found


def _devices(table: PieceTable) -> tuple[str | None, ...] | None:
    if table.devices is None:
        return None
    order = np.lexsort(tuple(table.offsets[:, d] for d in reversed(range(table.offsets.shape[1]))))
    return tuple(table.devices[int(row)] for row in order)


def _grid(shape: tuple[int, ...], table: PieceTable) -> tuple[list[tuple[int, ...]], IntArray] | None:
    """The cuts of each dim and the owner of each cell, if the pieces are all cells of one grid."""
    if len(table) == 0:
        return None
    sizes = [_dim_sizes(table, d) for d in range(len(shape))]
    counts = [len(s) for s in sizes]
    cells = int(np.prod(counts, dtype=np.int64))
    if len(table) % cells:
        return None
    index = np.zeros(len(table), np.int64)
    for d, cut in enumerate(sizes):
        index = index * counts[d] + _cell_index(table, d, cut)
    order = np.argsort(index, kind="stable")
    replicas = len(table) // cells
    if not np.array_equal(index[order], np.arange(cells).repeat(replicas)):
        return None
    return sizes, table.ranks[order].reshape((*counts, replicas))


def _dim_sizes(table: PieceTable, dim: int) -> tuple[int, ...]:
    """The cuts of one dim, as the distinct (offset, size) pairs in it; empty cells keep their number."""
    pairs = np.stack([table.offsets[:, dim], table.sizes[:, dim]], axis=1)
    distinct, counts = np.unique(pairs, axis=0, return_counts=True)
    if (distinct[:, 1] > 0).any():
        full = int(counts[distinct[:, 1] > 0].min())
        times = np.where(distinct[:, 1] > 0, 1, np.maximum(1, counts // full))
    else:
        times = np.ones(len(distinct), np.int64) if table.offsets.shape[1] > 1 else counts
    return tuple(np.repeat(distinct[:, 1], times).tolist())


def _cell_index(table: PieceTable, dim: int, sizes: Sequence[int]) -> IntArray:
    """Which cell of the dim each piece is; the empty pieces at one place take the empty cells there in turn."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    keys = starts * 2 + (np.asarray(sizes) > 0)
    wanted = table.offsets[:, dim] * 2 + (table.sizes[:, dim] > 0)
    first = np.minimum(np.searchsorted(keys, wanted, side="left"), len(sizes) - 1)
    width = np.searchsorted(keys, wanted, side="right") - first
    turn = np.zeros(len(wanted), np.int64)
    for key in np.unique(wanted[width > 1]):
        rows = np.flatnonzero(wanted == key)
        turn[rows] = np.arange(len(rows)) * int(width[rows[0]]) // len(rows)
    return first + turn


def _mesh(shape: tuple[int, ...], sizes: Sequence[tuple[int, ...]], owners: IntArray) -> MeshSpec:
    """A mesh with an axis for each cut dim and one for the replicas."""
    cut = [d for d, s in enumerate(sizes) if len(s) > 1]
    axes = [f"s{d}" for d in cut]
    placements: list[Placement] = [_shard(shape, d, sizes[d]) for d in cut]
    ranks = np.sort(owners, axis=-1).reshape([len(sizes[d]) for d in cut] + [owners.shape[-1]])
    return MeshSpec(Mesh([*axes, "r"], ranks), [*placements, Replicate()])


def _shard(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> Shard:
    return Shard(dim) if sizes == chunk_sizes(shape[dim], len(sizes)) else Shard(dim, sizes)


def infer_from_parts(spec: MeshSpec, parts: Mapping[int, tuple[int, ...]]) -> tuple[MeshSpec, tuple[int, ...]]:
    """The spec and the global shape of a tensor whose ranks hold parts of these shapes.

    Parts of one shape may be cut by any axes. Where they differ, one axis cuts one dim in these lengths.

    >>> infer_from_parts(MeshSpec(Mesh.of(dp=2, tp=2), (Shard(0), Shard(1))), dict.fromkeys(range(4), (3, 5)))[1]
    (6, 10)
    >>> infer_from_parts(MeshSpec(Mesh.of(dp=2), (Shard(0),)), {0: (3, 5), 1: (1, 5)})
    (MeshSpec(dp=2, (Shard(0, sizes=(3, 1)),)), (4, 5))
    """
    ranks = spec.mesh.ranks.reshape(-1).tolist()
    missing = [rank for rank in ranks if rank not in parts]
    if missing:
        raise LayoutError(f"rank {missing[0]} of the mesh {spec.mesh} has no local tensor; pass shape=")
    first = parts[ranks[0]]
    cuts = [(axis, p) for axis, p in enumerate(spec.resolved(first).placements) if isinstance(p, Shard)]
    if all(parts[rank] == first for rank in ranks):
        counts = [math.prod(spec.mesh.shape[a] for a, p in cuts if p.dim == d) for d in range(len(first))]
        return spec, tuple(n * count for n, count in zip(first, counts, strict=True))
    if len(cuts) == 1:
        axis, placement = cuts[0]
        groups = spec.mesh.groups(axis)
        sizes = {tuple(parts[r][placement.dim] if len(parts[r]) > placement.dim else -1 for r in g) for g in groups}
        alike = {tuple(n for d, n in enumerate(parts[r]) if d != placement.dim) for r in ranks}
        if len(sizes) == 1 and len(alike) == 1:
            lengths = sizes.pop()
            cut = placement if placement.zigzag else Shard(placement.dim, lengths, unit=placement.unit)
            given = [cut if a == axis else p for a, p in enumerate(spec.placements)]
            shape = tuple(sum(lengths) if d == placement.dim else n for d, n in enumerate(first))
            return MeshSpec(spec.mesh, given, spec.order), shape
    listed = "; ".join(f"{parts[r]} on rank {r}" for r in ranks[:6])
    raise LayoutError(
        f"the parts have the shapes {listed}, which {spec!r} does not explain: parts differ along "
        "one axis that shards, and in its dim only; pass shape=, or a Layout"
    )
