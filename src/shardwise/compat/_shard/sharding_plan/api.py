"""The names of `torch.distributed._shard.sharding_plan.api`."""

from shardwise.compat.specs import PlacementShardingSpec as ShardingSpec
from shardwise.nn.model_plan import Sharder, ShardingPlan, ShardingPlanner

__all__ = ["Sharder", "ShardingPlan", "ShardingPlanner", "ShardingSpec"]
