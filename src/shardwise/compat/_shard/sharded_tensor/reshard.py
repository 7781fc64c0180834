"""The names of `torch.distributed._shard.sharded_tensor.reshard`, for any two specs."""

from collections.abc import Sequence

import torch

from shardwise._torch import _remote_device
from shardwise.compat.metadata import rank_of
from shardwise.geometry import ShardingSpec
from shardwise.tensor.comms import GroupOrComm, resolve_comm
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.shards import Shard, ShardMetadata, TensorProperties, describe_layout


def get_idx_from_placements(placements: Sequence[_remote_device], current_rank: int) -> int:
    """Return the position of a rank among placements."""
    ranks = [rank_of(placement) for placement in placements]
    if current_rank not in ranks:
        raise RuntimeError(f"current_rank not in the placement. Found rank {current_rank} and placements {placements}")
    return ranks.index(current_rank)


def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """Return the shards of a spec by rank, and the ranks in the order of the spec, which says how many there are."""
    shards = describe_layout(sharding_spec.layout(st_size), TensorProperties()).shards_metadata
    return _by_rank(shards), [rank_of(shard.placement) for shard in shards]


def _by_rank(shards: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    return sorted(shards, key=lambda shard: rank_of(shard.placement))


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: GroupOrComm,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """Return this rank's shards after a move to another spec, and all shards by rank; differentiable."""
    layout = sharding_spec.layout(st_size)
    moved: ShardedTensor = wrap(layout, (local_tensor,), resolve_comm(pg)).redistribute(
        resharding_spec, label="reshard"
    )
    return moved.local_shards(), _by_rank(moved.metadata().shards_metadata)


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: GroupOrComm,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """Return the same as `reshard_local_shard`; torch distinguishes moves along one dim, here all are the same."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)


__all__ = ["build_reshard_metadata", "get_idx_from_placements", "reshard_local_shard", "reshuffle_local_shard"]
