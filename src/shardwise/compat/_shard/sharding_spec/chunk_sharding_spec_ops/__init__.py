"""The names of `torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops` that programs define operators with."""

from shardwise.compat._shard.sharding_spec.chunk_sharding_spec_ops import _common as _common

__all__: list[str] = []
