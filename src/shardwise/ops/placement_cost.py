"""Mesh views of layouts, torch's placements as ours, and what a change of placement costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise._cache import cache_by_identity, cached
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.geometry.layout import Cells
from shardwise.geometry.placements import chunk_sizes


@cache_by_identity
def mesh_view(layout: Layout) -> MeshSpec | None:
    """The mesh spec with one local tensor per rank for this layout, or None for irregular layouts.

    >>> from shardwise.geometry import ChunkSpec
    >>> mesh_view(ChunkSpec(0, (2, 0)).layout((4,)))
    MeshSpec(chunks=2 @ 2,0, (Shard(0),))
    """
    spec = layout.spec
    if isinstance(spec, MeshSpec):
        return spec.resolved(layout.shape)
    return None if layout.cells is None or layout.cells.replicas > 1 else find_mesh(layout)


@cache_by_identity
def find_mesh(layout: Layout) -> MeshSpec | None:
    """The mesh spec with one local tensor per rank that means this layout, also where pieces or replicas are listed.

    >>> from shardwise.geometry import Box, EnumerableSpec, Piece
    >>> find_mesh(EnumerableSpec([Piece(Box((0,), (3,)), 1), Piece(Box((3,), (1,)), 0)]).layout((4,)))
    MeshSpec(chunks=2 @ 1,0, (Shard(0, sizes=(3, 1)),))
    """
    if isinstance(layout.spec, MeshSpec):
        return mesh_view(layout)
    if len(set(layout.table.ranks.tolist())) != len(layout.table):
        return None
    found = _boxes_view(layout) if layout.cells is None else _cells_view(layout, layout.cells)
    return found if found is not None and found.layout(layout.shape) == layout else None


def _cells_view(layout: Layout, cells: Cells) -> MeshSpec:
    """Cells of a grid, one on each rank: an axis for each dim that is cut, and one for replicas."""
    cut = [d for d, c in enumerate(cells.dims) if c.count > 1]
    if not cut and layout.shape and cells.replicas == 1:
        cut = [0]
    names = ["chunks"] if len(cut) == 1 else [f"cells{d}" for d in cut]
    counts = [cells.dims[d].count for d in cut]
    if cells.replicas > 1:
        names, counts = [*names, "replicas"], [*counts, cells.replicas]
    sizes = {d: tuple(cells.dims[d].lengths.tolist()) for d in cut}
    placements = [Shard(d, None if s == chunk_sizes(sum(s), len(s)) else s) for d, s in sizes.items()]
    more = [Replicate()] if cells.replicas > 1 else []
    return MeshSpec(Mesh(names, cells.owners.reshape(counts)), [*placements, *more])


def _boxes_view(layout: Layout) -> MeshSpec | None:
    """Boxes, one on each rank, that are the runs of one dim: an axis for this dim."""
    table = layout.table
    cut = [d for d in range(layout.ndim) if len(set(table.offsets[:, d].tolist())) > 1]
    if len(cut) > 1 or not len(table) or not layout.shape:
        return None
    dim = cut[0] if cut else 0
    order = np.argsort(table.offsets[:, dim], kind="stable")
    sizes = tuple(table.sizes[order, dim].tolist())
    plain = sizes == chunk_sizes(sum(sizes), len(sizes))
    if sum(sizes) != layout.shape[dim]:
        return None
    return MeshSpec(Mesh(("chunks",), table.ranks[order]), [Shard(dim, None if plain else sizes)])


@cache_by_identity
def view_on_mesh(layout: Layout, mesh: Mesh) -> MeshSpec | None:
    """The placements on a mesh that mean this layout, which may be described on another one; None if there are none.

    >>> layout = MeshSpec(Mesh.of(dp=2), (Shard(0),)).layout((4,))
    >>> view_on_mesh(layout, Mesh.of(pp=1, tp=2))
    MeshSpec(pp=1,tp=2, (Replicate(), Shard(0)))
    """
    own = mesh_view(layout)
    found = own if own is None or own.mesh == mesh else _carry_to_mesh(own, mesh)
    return found if found is not None and found.layout(layout.shape) == layout else None


def _carry_to_mesh(spec: MeshSpec, mesh: Mesh) -> MeshSpec | None:
    """The placements of axes that differ in name only, or that all replicate; axes of one rank do not count."""
    own, axes = ([a for a, n in enumerate(m.shape) if n > 1] for m in (spec.mesh, mesh))
    placements: list[Placement] = [Replicate()] * mesh.ndim
    kinds = {spec.placements[a] for a in own}
    if np.array_equal(spec.mesh.ranks.squeeze(), mesh.ranks.squeeze()):
        for a, b in zip(own, axes, strict=True):
            placements[b] = spec.placements[a]
        names = {spec.mesh.axes[a]: mesh.axes[b] for a, b in zip(own, axes, strict=True)}
        return MeshSpec(mesh, placements, [names[n] for n in spec.order if n in names])
    if len(kinds) != 1 or isinstance(next(iter(kinds)), Shard):
        return None
    return MeshSpec(mesh, [next(iter(kinds)) if a in axes else p for a, p in enumerate(placements)])


def mesh_spec(mesh: Mesh, placements: tuple[Placement, ...], order: tuple[str, ...]) -> MeshSpec:
    """A mesh spec, made and checked once unless rows have owners."""
    if any(isinstance(p, Shard) and p.owners is not None for p in placements):
        return MeshSpec(mesh, placements, order)
    return _known_spec(mesh, placements, order)


@cached(8192)
def _known_spec(mesh: Mesh, placements: tuple[Placement, ...], order: tuple[str, ...]) -> MeshSpec:
    return MeshSpec(mesh, placements, order)


def to_native_placement(placement: Any) -> Placement | None:
    """One of our placements, from ours or torch's; None stays None."""
    if placement is None or isinstance(placement, Shard | Replicate | Partial):
        return placement
    kind = type(placement).__name__
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial":
        return Partial(placement.reduce_op)
    raise LayoutError(f"a rule returns Shard, Replicate or Partial (ours or torch's) or None, got {placement!r}")


def same_kind(one: Placement, other: Placement) -> bool:
    """Whether two placements agree up to how a Shard is cut."""
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.dim == other.dim
    return one == other


def change_cost(now: Placement, then: Placement, nbytes: float, ranks: int) -> float:
    """The bytes that a rank receives when one axis of `ranks` ranks changes what it does to a tensor of `nbytes` bytes.

    One direction is counted, and the gradients take as much on their way back: what is gathered forward is summed and
    scattered backward. A sum takes both at once, wherever it goes: what is saved by scattering it is paid when the
    gradients are gathered. A change that moves nothing costs a fraction of a byte, so of two free strategies the one
    without changes wins, and a sum stays pending where it may.
    """
    share = nbytes * (ranks - 1) / ranks
    if same_kind(now, then):
        recut = isinstance(then, Shard) and not then.is_plain and then != now  # a plain Shard means: as it is cut
        return 0.5 + share / ranks if recut else 0.0
    if isinstance(now, Partial):
        return share + (1.5 if isinstance(then, Shard) else 1.0)
    if isinstance(then, Partial):
        return 2.0 if isinstance(now, Shard) else 0.5
    if isinstance(now, Replicate):
        return 0.25
    return 0.5 + (share if isinstance(then, Replicate) else share / ranks)


def result_cost(
    result: Placement | None, belongs: Sequence[Placement | None], split: bool, nbytes: float, ranks: int
) -> float:
    """The bytes that a rank receives until a result of `nbytes` bytes is where it belongs, counted as by `change_cost`.

    `belongs` are the splits of results for which an input stays as it is split; `split`: an input is split.
    A pending result is summed. One that every rank has, though the inputs were split, counts as much: all that follows
    is computed by every rank.
    """
    share = nbytes * (ranks - 1) / ranks
    if isinstance(result, Partial):
        return share
    if not split or result is None or any(p is not None and same_kind(result, p) for p in belongs):
        return 0.0
    return share / ranks if belongs and isinstance(result, Shard) else share
