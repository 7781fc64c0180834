"""The names of `torch.distributed._shard.sharded_optim.api`."""

from shardwise.nn.optimizer import ShardedOptimizer, named_params_with_sharded_tensor

__all__ = ["ShardedOptimizer", "named_params_with_sharded_tensor"]
