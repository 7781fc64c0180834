"""`spec.shard(tensor)` and torch's `_shard_tensor`: from one rank's tensor to a ShardedTensor, by any spec."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm import agree
from shardwise.geometry import ShardingSpec
from shardwise.tensor.comms import GroupOrComm, resolve_comm
from shardwise.tensor.placement_specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    PlacementShardingSpec,
    Scatter,
)
from shardwise.tensor.redistribute import shard
from shardwise.tensor.sharded_tensor import ShardedTensor

_OWN = (ChunkShardingSpec.shard, EnumerableShardingSpec.shard)


def shard_by_spec(
    tensor: torch.Tensor, spec: ShardingSpec, src_rank: int = 0, process_group: GroupOrComm | None = None
) -> ShardedTensor:
    """Return the tensor of `src_rank`, counted in the group, laid out by a spec; a leaf, as the tensor may be.

    >>> shard_by_spec(torch.arange(4), ChunkShardingSpec(0, ["rank:0/cpu"])).local_tensor()
    tensor([0, 1, 2, 3])
    """
    comm = resolve_comm(process_group)
    if not 0 <= src_rank < comm.world_size:
        raise ValueError(f"src_rank={src_rank} is not in the group: it has ranks 0 to {comm.world_size - 1}")
    return shard(tensor.detach(), spec, comm.ranks[src_rank], comm=comm).requires_grad_(tensor.requires_grad)


Scatter.run = shard_by_spec


def shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: GroupOrComm | None = None
) -> Any:
    """Return the tensor of `src_rank`, counted in the group, laid out by a spec, which a user's `shard` may implement.

    >>> shard_tensor(torch.arange(4), ChunkShardingSpec(0, ["rank:0/cpu"])).full()
    tensor([0, 1, 2, 3])
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"input tensor is not a contiguous Tensor: shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
            "call contiguous() on it first"
        )
    if not isinstance(sharding_spec, PlacementShardingSpec) or type(sharding_spec).shard in _OWN:
        return shard_by_spec(tensor, sharding_spec, src_rank, process_group)
    fields = {"src_rank": src_rank, "sharding_spec": sharding_spec}
    agree(resolve_comm(process_group), fields, label="_shard_tensor")
    return sharding_spec.shard(tensor, src_rank=src_rank, process_group=process_group)
