"""The names of `torch.distributed._shard.sharding_plan.api`."""

from shardwise.nn.model_plan import ShardingPlan, ShardingPlanner

__all__ = ["ShardingPlan", "ShardingPlanner"]
