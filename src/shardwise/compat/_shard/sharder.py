"""The names of `torch.distributed._shard.sharder`."""

from shardwise.nn.plan import Sharder

__all__ = ["Sharder"]
