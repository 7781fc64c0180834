"""Modules: plans that shard a model, lookups in sharded tables, and optimizers over sharded parameters."""

from shardwise.nn.experts import ExpertBalance, GroupedExperts, place_experts, rebalance_experts
from shardwise.nn.inputs import check_replicas
from shardwise.nn.lookup import plain_as_local_batch
from shardwise.nn.optimizer import ShardedOptimizer, named_params_with_sharded_tensor
from shardwise.nn.owners import Muon, OwnerOptimizer, deal_owners
from shardwise.nn.plan import (
    ModelPlan,
    PlanError,
)

# Of torch's old API: shown as names of shardwise.compat.
from shardwise.nn.plan import Sharder as Sharder
from shardwise.nn.plan import ShardingPlan as ShardingPlan
from shardwise.nn.plan import ShardingPlanner as ShardingPlanner
from shardwise.nn.plan_costs import Balance, BalancedPlanner, PlanTable, describe_plan
from shardwise.nn.plan_files import load_plan, plan_from_data, plan_to_data, save_plan
from shardwise.nn.routing import RowSwap, TokenRoute, route_tokens, swap_rows
from shardwise.nn.shard_module import check_plan, collect_local_shard, reshard_output, shard_module, shard_parameter
from shardwise.nn.stages import Pipeline

__all__ = [
    "Balance",
    "BalancedPlanner",
    "ExpertBalance",
    "GroupedExperts",
    "ModelPlan",
    "Muon",
    "OwnerOptimizer",
    "Pipeline",
    "PlanError",
    "PlanTable",
    "RowSwap",
    "ShardedOptimizer",
    "TokenRoute",
    "check_plan",
    "check_replicas",
    "collect_local_shard",
    "deal_owners",
    "describe_plan",
    "load_plan",
    "named_params_with_sharded_tensor",
    "place_experts",
    "plain_as_local_batch",
    "plan_from_data",
    "plan_to_data",
    "rebalance_experts",
    "reshard_output",
    "route_tokens",
    "save_plan",
    "shard_module",
    "shard_parameter",
    "swap_rows",
]
