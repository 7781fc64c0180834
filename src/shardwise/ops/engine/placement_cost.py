"""Mesh views of layouts, torch's placements as ours, and what a change of placement costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.tensor.caches import cache_by_identity


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
    cells = layout.cells
    if cells is None or cells.replicas > 1 or len(set(layout.table.ranks.tolist())) != len(layout.table):
        return None
    cut = [d for d, c in enumerate(cells.dims) if c.count > 1]
    if len(cut) > 1:
        return _grid_view(layout, cut)
    dim = cut[0] if cut else 0
    if not layout.shape:
        return MeshSpec(Mesh((), int(layout.table.ranks[0])), ())
    sizes = tuple(cells.dims[dim].lengths.tolist())
    mesh = Mesh(("chunks",), cells.owners.reshape(-1))
    return _drop_chunk_sizes(MeshSpec(mesh, (Shard(dim, sizes),)), layout)


def _grid_view(layout: Layout, cut: Sequence[int]) -> MeshSpec:
    assert layout.cells is not None
    counts = [layout.cells.dims[d].count for d in cut]
    mesh = Mesh([f"cells{d}" for d in cut], layout.cells.owners.reshape(counts))
    return _drop_chunk_sizes(
        MeshSpec(mesh, [Shard(d, tuple(layout.cells.dims[d].lengths.tolist())) for d in cut]), layout
    )


def _drop_chunk_sizes(spec: MeshSpec, layout: Layout) -> MeshSpec:
    """The same without sizes where they are those of torch.chunk."""
    simple = MeshSpec(spec.mesh, [Shard(p.dim) for p in spec.placements if isinstance(p, Shard)])
    return simple if simple.layout(layout.shape) == layout else spec


@lru_cache(maxsize=8192)
def mesh_spec(mesh: Mesh, placements: tuple[Placement, ...], order: tuple[str, ...]) -> MeshSpec:
    """A mesh spec, made and checked once."""
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


def change_cost(now: Placement, then: Placement, nbytes: int, ranks: int) -> float:
    """The bytes that move when one axis of `ranks` ranks changes what it does to a tensor of `nbytes` bytes.

    A change that moves nothing costs a fraction of a byte, so of two free strategies the one without changes wins.
    A pending sum costs the same wherever it goes: what is saved by scattering it is paid when its parts, or its
    gradients, are gathered again. So it is scattered only to meet something that is sharded.
    """
    share = nbytes * (ranks - 1) / ranks
    if same_kind(now, then):
        return 0.0
    if isinstance(now, Replicate):
        return 0.25 if isinstance(then, Shard) else 0.5
    if isinstance(now, Shard):
        return 0.5 + (share if isinstance(then, Replicate) else share / ranks if isinstance(then, Shard) else 3 * share)
    return 2 * share + (1.0 if isinstance(then, Shard) else 0.5)
