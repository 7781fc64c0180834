"""The names of `torch.distributed._shard.sharding_spec.api`."""

from shardwise.compat._shard.metadata import ShardMetadata
from shardwise.tensor.custom_ops import custom_sharding_spec_op
from shardwise.tensor.custom_ops import dispatch_custom_op as _dispatch_custom_op
from shardwise.tensor.custom_ops import has_custom_op as _has_custom_op
from shardwise.tensor.placement_specs import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
)
from shardwise.tensor.placement_specs import PlacementShardingSpec as ShardingSpec
from shardwise.tensor.placement_specs import infer_sharding_spec as _infer_sharding_spec_from_shards_metadata

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
    "custom_sharding_spec_op",
]
