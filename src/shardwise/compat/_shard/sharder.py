"""The names of `torch.distributed._shard.sharder`."""

from shardwise.nn.model_plan import Sharder

__all__ = ["Sharder"]
