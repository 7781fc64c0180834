"""The names of `torch.distributed._shard.sharding_spec.chunk_sharding_spec`."""

from shardwise.tensor.placement_specs import ChunkShardingSpec

__all__ = ["ChunkShardingSpec"]
