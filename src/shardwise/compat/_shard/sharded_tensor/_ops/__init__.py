"""The names of `torch.distributed._shard.sharded_tensor._ops` that programs define operators with."""

from shardwise.compat._shard.sharded_tensor._ops import _common as _common

__all__: list[str] = []
