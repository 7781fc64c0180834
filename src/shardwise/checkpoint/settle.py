"""Tensors with a pending reduction are stored reduced: which layout they get, and the local tensors in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.checkpoint.leaves import Leaf, torch_dtype
from shardwise.comm import Comm
from shardwise.geometry import ChunkSpec, Layout
from shardwise.tensor import ShardedTensor, redistribute_many, wrap
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


def settled_locals(leaves: Sequence[Leaf], comm: Comm) -> dict[str, tuple[Tensor, ...]]:
    """Each leaf's local tensors in its settled layout; all ranks of those with a pending reduction take part."""
    held = {leaf.name: leaf.locals for leaf in leaves}
    pending = [leaf for leaf in leaves if leaf.layout.pending is not None]
    moved = redistributed([as_sharded(leaf, comm) for leaf in pending], [settled_layout(e.layout) for e in pending])
    return held | {leaf.name: tensor._locals for leaf, tensor in zip(pending, moved, strict=True)}


def redistributed(tensors: Sequence[ShardedTensor], layouts: Sequence[Layout]) -> list[ShardedTensor]:
    """The tensors in other layouts; those that share a comm share its exchanges."""
    groups: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(id(tensor._comm), []).append(number)
    results: dict[int, ShardedTensor] = {}
    with torch.no_grad():
        for group in groups.values():
            moved = redistribute_many([tensors[i] for i in group], [layouts[i] for i in group])
            results |= dict(zip(group, moved, strict=True))
    return [results[i] for i in range(len(tensors))]


def as_sharded(leaf: Leaf, comm: Comm) -> ShardedTensor:
    """A leaf as a ShardedTensor over the ranks that take part in its moves."""
    if isinstance(leaf.tensor, ShardedTensor):
        return leaf.tensor
    members = comm if set(leaf.layout.ranks) == set(comm.ranks) else comm.subset(leaf.layout.ranks)
    return wrap(leaf.layout, leaf.locals, members, dtype=torch_dtype(leaf.dtype))
