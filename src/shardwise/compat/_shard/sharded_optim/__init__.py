"""The names of `torch.distributed._shard.sharded_optim`."""

from shardwise.compat._shard.sharded_optim.api import ShardedOptimizer, named_params_with_sharded_tensor

__all__ = ["ShardedOptimizer", "named_params_with_sharded_tensor"]
