"""Torch's DTensor as a ShardedTensor, over the same memory.

Gradients pass through, since in both a sharded tensor gets a sharded gradient and all else a replicated one. What is
asked of torch's objects is found by attribute and class name, so that `torch.distributed.tensor` is not loaded for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from shardwise._torch import pytree
from shardwise.comm import Comm
from shardwise.comm.device_meshes import comm_of_device_mesh, remember_device_mesh
from shardwise.geometry import LayoutError, Mesh, MeshSpec
from shardwise.geometry.torch_words import read_order, to_mesh, to_placement
from shardwise.tensor.dispatch import sharded_leaves
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

TENSOR_MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> bool:
    """Whether this is torch's DTensor; whoever has one has loaded its module, which takes long to load.

    Another thread may be loading it right now: then nobody has one.
    """
    kind = getattr(sys.modules.get(TENSOR_MODULE), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def from_dtensor(tensor: DTensor, comm: Comm | None = None) -> ShardedTensor:
    """A DTensor as a ShardedTensor over the same memory.

    `comm` holds the mesh's ranks; the default is the mesh's own group for one axis, else the world if the mesh covers
    it. Placements without a counterpart (torch's private ones) are refused.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> import torch
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> x = from_dtensor(distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)]))
    >>> type(x).__name__, x.local_tensor().shape
    ('ShardedTensor', torch.Size([4]))
    >>> dist.destroy_process_group()
    """
    if not is_dtensor(tensor):
        raise TypeError(
            f"from_dtensor takes a DTensor, got {type(tensor).__name__}; shard(x, spec) lays out a plain one"
        )
    spec = tensor._spec
    shape = tuple(spec.shape)
    native = spec_from_dtensor(spec.mesh, spec.placements, shape, dtensor_split_order(spec))
    layout = native.layout(shape)
    comm = comm or comm_of_device_mesh(spec.mesh)
    remember_device_mesh(spec.mesh)
    if comm.rank not in native.mesh.ranks:
        return wrap(layout, (), comm, dtype=tensor.dtype)
    local: Any = tensor.to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    if layout.local_shapes(comm.rank) != (tuple(local.shape),):
        raise LayoutError(
            f"the DTensor {spec} has {tuple(local.shape)} on rank {comm.rank}, where {format_layout_text(layout)} has "
            f"{layout.local_shapes(comm.rank)[0]}; redistribute it to plain Shard placements first"
        )
    return wrap(layout, (local,), comm)


def convert_dtensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a function of ShardedTensors with DTensors among them as ShardedTensors of the same comm."""
    if TENSOR_MODULE not in sys.modules or not any(is_dtensor(leaf) for leaf in pytree.tree_iter((args, kwargs))):
        return args, kwargs
    comm = next(sharded_leaves(args, kwargs)).comm
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda leaf: from_dtensor(leaf, comm) if is_dtensor(leaf) else leaf, (args, kwargs)
    )
    return found


def spec_from_dtensor(
    device_mesh: Any, placements: Sequence[Any], shape: Sequence[int], shard_order: Any = None
) -> MeshSpec:
    """A DTensor's mesh and placements as a MeshSpec; strided shards become an order of splits."""
    mesh = to_mesh(device_mesh)
    order = None if shard_order is None else [mesh.axes[axis] for entry in shard_order for axis in entry.mesh_dims]
    for dim in {p.dim for p in placements if type(p).__name__ == "_StridedShard"}:
        check_even(mesh, [a for a, p in enumerate(placements) if getattr(p, "dim", None) == dim], dim, shape)
    return MeshSpec(mesh, [to_placement(p) for p in placements], order or read_order(mesh, placements))


def check_even(mesh: Mesh, axes: Sequence[int], dim: int, shape: Sequence[int]) -> None:
    """Raise unless axes that split a dim in another order than the mesh's split it evenly."""
    parts = prod(mesh.shape[a] for a in axes)
    if shape[dim] % parts:
        raise LayoutError(
            f"dim {dim} of length {shape[dim]} is split by {parts} ranks in another order than the mesh's; torch's "
            f"strided shards mean the same as ours only for multiples of {parts}: redistribute first"
        )


def dtensor_split_order(spec: Any) -> Any:
    """The order of splits that a DTensor's spec has apart from its placements; None where strided shards say it."""
    strided = any(type(p).__name__ == "_StridedShard" for p in spec.placements)
    return None if strided else getattr(spec, "shard_order", None)
