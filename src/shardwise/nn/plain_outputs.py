"""Outputs of a sharded model as plain tensors: what code outside of the model expects that knows nothing of sharding.

An output whose dim 0 is as long as the batch comes back as the rows that this rank passed in; all others, losses among
them, come back whole on every rank. Both are differentiable: gradients flow back as for the sharded outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from shardwise._nests import map_nest
from shardwise.geometry import Mesh, MeshSpec, Placement, Replicate, Shard
from shardwise.tensor.sharded_tensor import ShardedTensor

# For each length of dim 0 of an input that is split over ranks: how it is split.
BatchSplits: TypeAlias = Mapping[int, MeshSpec]


def find_batch_splits(tensors: Sequence[Any], placements: Sequence[Placement]) -> BatchSplits:
    """How the inputs that are split over ranks are split, by their length."""
    if not any(isinstance(p, Shard) for p in placements):
        return {}
    placed = [t for t in tensors if isinstance(t, ShardedTensor) and t.ndim > 0]
    return {int(t.shape[0]): t.sharding.spec for t in placed if isinstance(t.sharding.spec, MeshSpec)}


def make_plain(tree: Any, mesh: Mesh, splits: BatchSplits) -> Any:
    """The same nest with its ShardedTensors as plain tensors.

    >>> import torch
    >>> from shardwise import run_local, shard
    >>> mesh = Mesh.of(tp=2)
    >>> run_local(lambda comm: make_plain([shard(torch.arange(4), MeshSpec(mesh, (Shard(0),)))], mesh, {}), 2)[1]
    [tensor([0, 1, 2, 3])]
    """
    return map_nest(lambda value: _take_rows(value, mesh, splits), tree)


def _take_rows(value: Any, mesh: Mesh, splits: BatchSplits) -> Any:
    if not isinstance(value, ShardedTensor):
        return value
    split = splits.get(int(value.shape[0])) if value.ndim > 0 else None
    spec = split if split is not None else MeshSpec(mesh, (Replicate(),) * mesh.ndim)
    local: Tensor = value.redistribute(spec).local_tensor()
    return local
