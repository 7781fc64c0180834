"""The names of `torch.distributed._shard.sharding_plan`."""

from shardwise.compat._shard.sharding_plan.api import ShardingPlan, ShardingPlanner

__all__ = ["ShardingPlan", "ShardingPlanner"]
