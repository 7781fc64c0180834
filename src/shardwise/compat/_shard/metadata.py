"""The names of `torch.distributed._shard.metadata`."""

from shardwise.tensor.metadata import ShardMetadata

__all__ = ["ShardMetadata"]
