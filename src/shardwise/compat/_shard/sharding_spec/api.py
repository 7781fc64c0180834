"""The names of `torch.distributed._shard.sharding_spec.api`."""

from typing import Any

from shardwise.compat._shard.metadata import ShardMetadata
from shardwise.compat.custom_ops import Op, custom_sharding_spec_op, dispatch_custom_op, has_custom_op
from shardwise.compat.metadata import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.compat.metadata import check_tiles as check_tensor
from shardwise.compat.specs import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    get_chunked_dim_size,
    get_split_size,
)
from shardwise.compat.specs import PlacementShardingSpec as ShardingSpec
from shardwise.compat.specs import infer_sharding_spec as _infer_sharding_spec_from_shards_metadata
from shardwise.tensor.comms import GroupOrComm


def _has_custom_op(sharding_spec: object, op: Op) -> bool:
    return has_custom_op(sharding_spec, op)


def _dispatch_custom_op(
    sharding_spec: object, op: Op, types: Any, args: Any, kwargs: Any, process_group: GroupOrComm | None
) -> Any:
    return dispatch_custom_op(sharding_spec, op, types, args, kwargs, process_group)


__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_dispatch_custom_op",
    "_has_custom_op",
    "_infer_sharding_spec_from_shards_metadata",
    "check_tensor",
    "custom_sharding_spec_op",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]
