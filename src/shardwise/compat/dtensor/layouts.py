"""What does torch's DTensor call a layout, and what do we? Meshes and placements, in both directions.

torch is asked by attribute and class name, so that `torch.distributed.tensor` is not loaded for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import permutations, product
from math import prod
from typing import Any

from shardwise.geometry import LayoutError, Mesh, MeshSpec, Partial, Placement, Replicate, Shard

TENSOR_MODULE = "torch.distributed.tensor"


def mesh_from_device_mesh(device_mesh: Any) -> Mesh:
    """torch's DeviceMesh as a Mesh; axes without names are called axis0, axis1..."""
    ranks = device_mesh.mesh
    names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(ranks.ndim))
    return Mesh(tuple(names), ranks.tolist())


def spec_from_dtensor(
    device_mesh: Any, placements: Sequence[Any], shape: Sequence[int], shard_order: Any = None
) -> MeshSpec:
    """A DTensor's mesh and placements as a MeshSpec; strided shards become an order of splits."""
    mesh = mesh_from_device_mesh(device_mesh)
    if shard_order is not None:
        order = [mesh.axes[axis] for entry in shard_order for axis in entry.mesh_dims]
    else:
        order = _order_from_strided(mesh, placements, shape)
    return MeshSpec(mesh, [_placement_from_torch(p) for p in placements], order or None)


def dtensor_split_order(spec: Any) -> Any:
    """The order of splits that a DTensor's spec has apart from its placements; None where strided shards say it."""
    strided = any(type(p).__name__ == "_StridedShard" for p in spec.placements)
    return None if strided else getattr(spec, "shard_order", None)


def _placement_from_torch(placement: Any) -> Placement:
    kind = type(placement).__name__
    if kind in ("Shard", "_StridedShard"):
        return Shard(placement.dim)
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial":
        return Partial(placement.reduce_op)
    raise LayoutError(
        f"{placement!r} of a DTensor has no counterpart; redistribute it to Shard, Replicate or Partial first"
    )


def _order_from_strided(mesh: Mesh, placements: Sequence[Any], shape: Sequence[int]) -> list[str]:
    """The order of splits that strided shards represent."""
    strided = {p.dim for p in placements if type(p).__name__ == "_StridedShard"}
    order: list[str] = []
    for dim in sorted(strided):
        axes = [a for a, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        wanted = {a: getattr(placements[a], "split_factor", 1) for a in axes}
        fits = [p for p in permutations(axes) if all(_split_factor(mesh, p, a) == wanted[a] for a in axes)]
        if not fits:
            raise LayoutError(
                f"the split factors {wanted} of dim {dim} do not order the axes {mesh}; redistribute to Shard({dim})"
            )
        _check_even(mesh, axes, dim, shape)
        order += [mesh.axes[a] for a in fits[0]]
    return order


def _split_factor(mesh: Mesh, order: Sequence[int], axis: int) -> int:
    """torch's split factor: the ranks of the axes that split earlier but come later in the mesh."""
    return prod(mesh.shape[a] for a in order[: order.index(axis)] if a > axis)


def _check_even(mesh: Mesh, axes: Sequence[int], dim: int, shape: Sequence[int]) -> None:
    parts = prod(mesh.shape[a] for a in axes)
    if shape[dim] % parts:
        raise LayoutError(
            f"dim {dim} of length {shape[dim]} is split by {parts} ranks in another order than the mesh's; torch's "
            f"strided shards mean the same as ours only for multiples of {parts}: redistribute first"
        )


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
    plain = placement.sizes is None and placement.groups is None and placement.block is None
    return words.Shard(placement.dim) if plain else None


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
        if axis in split and (factor := _split_factor(spec.mesh, split, axis)) > 1:
            _check_even(spec.mesh, split, dim, shape)
            found[axis] = words._StridedShard(dim, split_factor=factor)
