"""Modules: plans that shard a model, and optimizers over sharded parameters."""

from shardwise.nn.optimizer import ShardedOptimizer, named_params_with_sharded_tensor
from shardwise.nn.plan import Sharder, ShardingPlan, ShardingPlanner
from shardwise.nn.shard_module import check_plan, collect_local_shard, reshard_output, shard_module, shard_parameter

__all__ = [
    "ShardedOptimizer",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "check_plan",
    "collect_local_shard",
    "named_params_with_sharded_tensor",
    "reshard_output",
    "shard_module",
    "shard_parameter",
]
