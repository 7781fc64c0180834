"""What does torch's DTensor call our layouts?

torch is asked by attribute and class name, so that `torch.distributed.tensor` is not loaded for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from shardwise.geometry import LayoutError, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.geometry.torch_words import split_factor
from shardwise.tensor.dtensors import TENSOR_MODULE, check_even


def torch_placements(spec: MeshSpec, shape: Sequence[int]) -> tuple[Any, ...]:
    """The placements of a MeshSpec in torch's words; what torch cannot say is refused with the reason."""
    resolved = spec.resolved(shape)
    found = [torch_placement(p) for p in resolved.placements]
    for axis in range(len(found)):
        if found[axis] is None:
            found[axis] = _chunk_placement(resolved, axis, shape)
    if not resolved.splits_in_mesh_order:
        _insert_strided_shards(resolved, shape, found)
    return tuple(found)


def torch_placement(placement: Placement) -> Any:
    """One placement as torch's class; None for a Shard with explicit sizes, which torch does not have."""
    words = sys.modules[TENSOR_MODULE]
    if isinstance(placement, Replicate):
        return words.Replicate()
    if isinstance(placement, Partial):
        return words.Partial(placement.op)
    return words.Shard(placement.dim) if placement.is_plain else None


def _chunk_placement(spec: MeshSpec, axis: int, shape: Sequence[int]) -> Any:
    """A Shard with given lengths as a plain one, if that cuts alike."""
    placement = spec.placements[axis]
    assert isinstance(placement, Shard)
    plain = [Shard(p.dim) if a == axis and isinstance(p, Shard) else p for a, p in enumerate(spec.placements)]
    if MeshSpec(spec.mesh, plain, spec.order).layout(shape) != spec.layout(shape):
        raise LayoutError(
            f"{placement!r} on axis {spec.mesh.axes[axis]!r} has no counterpart in DTensor, which splits dim "
            f"{placement.dim} of length {shape[placement.dim]} as torch.chunk does; "
            f"redistribute to Shard({placement.dim})"
        )
    return torch_placement(Shard(placement.dim))


def _insert_strided_shards(spec: MeshSpec, shape: Sequence[int], found: list[Any]) -> None:
    """Replace shards that split in another order than the mesh's by torch's strided ones."""
    words = sys.modules[f"{TENSOR_MODULE}.placement_types"]
    dims = {p.dim for p in spec.placements if isinstance(p, Shard)}
    for dim, axis in product(dims, range(spec.mesh.ndim)):
        order = [spec.mesh.axis_index(a) for a in spec.order]
        split = [a for a in order if isinstance(p := spec.placements[a], Shard) and p.dim == dim]
        if axis in split and (factor := split_factor(spec.mesh, split, axis)) > 1:
            check_even(spec.mesh, split, dim, shape)
            found[axis] = words._StridedShard(dim, split_factor=factor)
