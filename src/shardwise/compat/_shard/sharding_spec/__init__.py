"""The names of `torch.distributed._shard.sharding_spec`."""

from shardwise.compat._shard.metadata import ShardMetadata
from shardwise.compat._shard.sharding_spec.api import (
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    _infer_sharding_spec_from_shards_metadata,
)
from shardwise.compat._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "ShardMetadata",
    "ShardingSpec",
    "_infer_sharding_spec_from_shards_metadata",
]
