"""The names of `torch.distributed._shard.sharding_plan.api`."""

from shardwise.nn.plan import ShardingPlan, ShardingPlanner

__all__ = ["ShardingPlan", "ShardingPlanner"]
