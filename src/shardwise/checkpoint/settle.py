"""Tensors with a pending reduction are stored reduced: which layout they get, and the local tensors in it."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.checkpoint.leaves import Leaf, torch_dtype
from shardwise.comm import Comm
from shardwise.geometry import ChunkSpec, Layout
from shardwise.tensor import ShardedTensor, wrap
from shardwise.tensor.moves import on_one_rank


def settled_layout(layout: Layout) -> Layout:
    """A layout without a pending reduction: the same one, or rows over the same ranks.

    >>> from shardwise.geometry import Mesh, MeshSpec, Partial
    >>> settled_layout(MeshSpec(Mesh.of(x=2), (Partial("sum"),)).layout((4, 2))).local_shapes(0)
    ((2, 2),)
    """
    if layout.pending is None:
        return layout
    return ChunkSpec(0, layout.ranks).layout(layout.shape) if layout.ndim else on_one_rank((), layout.ranks[0])


def settled_locals(leaf: Leaf, comm: Comm) -> tuple[Tensor, ...]:
    """This rank's local tensors in the settled layout; all ranks of the tensor take part if something is pending."""
    if leaf.layout.pending is None:
        return leaf.locals
    with torch.no_grad():
        reduced = as_sharded(leaf, comm).redistribute(settled_layout(leaf.layout), label=f"save {leaf.name}")
    held: tuple[Tensor, ...] = reduced._locals
    return held


def as_sharded(leaf: Leaf, comm: Comm) -> ShardedTensor:
    """A leaf as a ShardedTensor over the ranks that take part in its moves."""
    if isinstance(leaf.tensor, ShardedTensor):
        return leaf.tensor
    members = comm if set(leaf.layout.ranks) == set(comm.ranks) else comm.subset(leaf.layout.ranks)
    return wrap(leaf.layout, leaf.locals, members, dtype=torch_dtype(leaf.dtype))
