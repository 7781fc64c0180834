"""Which layout does a tensor take before a view that cannot carry its cuts over?

Each axis is decided on its own, from the lengths of the dims that are merged or split, so that a batch of any length is
treated alike. An axis takes the first of these for which the view can be expressed:

1. the cut that it has;
2. the same dim, cut in even chunks;
3. the same dim, cut so that one dim of the result is: one that the ranks divide evenly first, then any;
4. no cut: the axis replicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.geometry import LayoutError, MeshSpec, Placement, Replicate, Shard
from shardwise.ops.engine.view_sharding import NoViewError, match_dims, view_spec


def recut_for_view(spec: MeshSpec, before: Sequence[int], after: Sequence[int]) -> MeshSpec:
    """The spec to move a tensor of shape `before` to, so that it can be viewed as one of shape `after`.

    >>> from shardwise.geometry import Mesh
    >>> rows = MeshSpec(Mesh.of(tp=2), (Shard(1),))
    >>> recut_for_view(rows, (5, 24), (5, 3, 8))
    MeshSpec(tp=2, (Shard(1, block=4),))
    >>> recut_for_view(rows, (5, 9), (5, 3, 3))
    MeshSpec(tp=2, (Shard(1, sizes=(6, 3)),))
    """
    placements: list[Placement] = [Replicate() if isinstance(p, Shard) else p for p in spec.placements]
    for name in spec.order:
        axis = spec.mesh.axis_index(name)
        if isinstance(own := spec.placements[axis], Shard):
            placements[axis] = _first_that_fits(spec, placements, axis, own, (before, after))
    return MeshSpec(spec.mesh, placements, spec.order)


def _first_that_fits(
    spec: MeshSpec, chosen: Sequence[Placement], axis: int, own: Shard, shapes: tuple[Sequence[int], Sequence[int]]
) -> Placement:
    before, after = shapes
    for placement in (own, Shard(own.dim), *_cuts_of_result(spec, axis, own.dim, before, after)):
        tried = MeshSpec(spec.mesh, [placement if a == axis else p for a, p in enumerate(chosen)], spec.order)
        if _can_view(tried, before, after):
            return placement
    return Replicate()


def _can_view(spec: MeshSpec, before: Sequence[int], after: Sequence[int]) -> bool:
    try:
        spec.layout(before)
        view_spec(spec, before, after).layout(after)
    except (NoViewError, LayoutError):  # of sizes that fit a whole dim, where another axis cuts it first
        return False
    return True


def _cuts_of_result(
    spec: MeshSpec, axis: int, dim: int, before: Sequence[int], after: Sequence[int]
) -> Iterator[Placement]:
    """The cuts of a dim that are an even or, later, an uneven cut of a dim of the result."""
    group = next(g for g in match_dims(before, after) if dim in g.inputs)
    count = spec.mesh.shape[axis]
    for out in sorted((d for d in group.outputs if after[d] > 1), key=lambda d: after[d] % count != 0):
        alone = [Shard(out) if a == axis else Replicate() for a in range(spec.mesh.ndim)]
        try:
            found = view_spec(MeshSpec(spec.mesh, alone), after, before).placements[axis]
        except NoViewError:
            continue
        if isinstance(found, Shard) and found.dim == dim:
            yield found
