"""The names of `torch.distributed._shard.sharding_spec.chunk_sharding_spec`."""

from shardwise.compat.specs import ChunkShardingSpec

__all__ = ["ChunkShardingSpec"]
