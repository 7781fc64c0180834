"""The names of `torch.distributed._shard.sharded_optim.api`."""

from shardwise.compat.modules import TorchShardedOptimizer as ShardedOptimizer
from shardwise.compat.sharded_tensor import TorchShardedTensor as ShardedTensor
from shardwise.nn.optimizer import named_params_with_sharded_tensor

__all__ = ["ShardedOptimizer", "ShardedTensor", "named_params_with_sharded_tensor"]
