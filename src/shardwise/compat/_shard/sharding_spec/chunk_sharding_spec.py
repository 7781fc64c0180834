"""The names of `torch.distributed._shard.sharding_spec.chunk_sharding_spec`."""

from shardwise.compat._shard._utils import narrow_tensor
from shardwise.compat.metadata import rank_and_device as _parse_and_validate_remote_device
from shardwise.compat.specs import ChunkShardingSpec, get_chunked_dim_size, get_split_size
from shardwise.compat.specs import PlacementShardingSpec as ShardingSpec
from shardwise.tensor.shards import Shard, ShardMetadata

__all__ = [
    "ChunkShardingSpec",
    "Shard",
    "ShardMetadata",
    "ShardingSpec",
    "_parse_and_validate_remote_device",
    "get_chunked_dim_size",
    "get_split_size",
    "narrow_tensor",
]
