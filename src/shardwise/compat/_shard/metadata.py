"""The names of `torch.distributed._shard.metadata`."""

from shardwise.tensor.shards import ShardMetadata

__all__ = ["ShardMetadata"]
