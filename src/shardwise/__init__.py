"""Shardwise: describe, compute on and move sharded tensors.

Importing this package is light: names that need torch are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise._version import __version__
from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    NotationError,
    Partial,
    Piece,
    Placement,
    Reduction,
    Replicate,
    Shard,
    ShardingSpec,
    TensorType,
    format_layout,
    infer_spec,
    layout_from_json,
    layout_to_json,
    parse_layout,
    parse_placements,
    parse_spec,
)
from shardwise.transfer import Link, Topology, Transfer, plan_transfer, transfer_from_json

if TYPE_CHECKING:
    from shardwise.checkpoint import (
        Checkpoint,
        CheckpointError,
        load,
        open,
        save,
        save_hf,
    )
    from shardwise.comm import (
        Comm,
        CommError,
        DisagreementError,
        agree,
        comm_from_device_mesh,
        default_comm,
        launch,
        run_local,
        use_comm,
    )
    from shardwise.nn import (
        Balance,
        BalancedPlanner,
        ModelPlan,
        PlanError,
        PlanTable,
        ShardedOptimizer,
        Sharder,
        ShardingPlan,
        ShardingPlanner,
        check_plan,
        describe_plan,
        load_plan,
        named_params_with_sharded_tensor,
        plain_as_local_batch,
        save_plan,
        shard_module,
        shard_parameter,
    )
    from shardwise.ops import (
        explain,
        no_communication,
        plain_as_replicated,
        register_sharding,
        remove_sharding,
        replicate,
        sharding_rule,
    )
    from shardwise.ops.discovery.check import check_sharding
    from shardwise.ops.discovery.discover import discover_sharding
    from shardwise.tensor import (
        ShardedTensor,
        from_local,
        redistribute_many,
        shard,
    )
    from shardwise.tensor.creation import (
        empty,
        empty_like,
        full,
        full_like,
        init_from_local_shards,
        ones,
        ones_like,
        rand,
        rand_like,
        randn,
        randn_like,
        zeros,
        zeros_like,
    )
    from shardwise.tensor.custom_ops import (
        custom_sharded_op_impl,
        custom_sharding_spec_op,
    )
    from shardwise.tensor.random.streams import (
        manual_seed,
    )

_LAZY = {
    "shardwise.checkpoint": ("Checkpoint", "CheckpointError", "load", "open", "save", "save_hf"),
    "shardwise.comm": (
        "Comm",
        "CommError",
        "DisagreementError",
        "agree",
        "comm_from_device_mesh",
        "default_comm",
        "launch",
        "run_local",
        "use_comm",
    ),
    "shardwise.nn": (
        "Balance",
        "BalancedPlanner",
        "ModelPlan",
        "PlanError",
        "PlanTable",
        "ShardedOptimizer",
        "Sharder",
        "ShardingPlan",
        "ShardingPlanner",
        "check_plan",
        "describe_plan",
        "load_plan",
        "named_params_with_sharded_tensor",
        "plain_as_local_batch",
        "save_plan",
        "shard_module",
        "shard_parameter",
    ),
    "shardwise.tensor": (
        "ShardedTensor",
        "from_local",
        "redistribute_many",
        "shard",
    ),
    "shardwise.tensor.creation": (
        "empty",
        "empty_like",
        "full",
        "full_like",
        "init_from_local_shards",
        "ones",
        "ones_like",
        "rand",
        "rand_like",
        "randn",
        "randn_like",
        "zeros",
        "zeros_like",
    ),
    "shardwise.tensor.random.streams": ("manual_seed",),
    "shardwise.tensor.custom_ops": (
        "custom_sharded_op_impl",
        "custom_sharding_spec_op",
    ),
    "shardwise.ops.discovery.check": ("check_sharding",),
    "shardwise.ops.discovery.discover": ("discover_sharding",),
    "shardwise.ops": (
        "explain",
        "no_communication",
        "plain_as_replicated",
        "register_sharding",
        "remove_sharding",
        "replicate",
        "sharding_rule",
    ),
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "Balance",
    "BalancedPlanner",
    "Box",
    "Checkpoint",
    "CheckpointError",
    "ChunkSpec",
    "Comm",
    "CommError",
    "DisagreementError",
    "EnumerableSpec",
    "GridSpec",
    "Layout",
    "LayoutError",
    "Link",
    "Mesh",
    "MeshSpec",
    "ModelPlan",
    "NotationError",
    "Partial",
    "Piece",
    "Placement",
    "PlanError",
    "PlanTable",
    "Reduction",
    "Replicate",
    "Shard",
    "ShardedOptimizer",
    "ShardedTensor",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorType",
    "Topology",
    "Transfer",
    "__version__",
    "agree",
    "check_plan",
    "check_sharding",
    "comm_from_device_mesh",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "default_comm",
    "describe_plan",
    "discover_sharding",
    "empty",
    "empty_like",
    "explain",
    "format_layout",
    "from_local",
    "full",
    "full_like",
    "infer_spec",
    "init_from_local_shards",
    "launch",
    "layout_from_json",
    "layout_to_json",
    "load",
    "load_plan",
    "manual_seed",
    "named_params_with_sharded_tensor",
    "no_communication",
    "ones",
    "ones_like",
    "open",
    "parse_layout",
    "parse_placements",
    "parse_spec",
    "plain_as_local_batch",
    "plain_as_replicated",
    "plan_transfer",
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "redistribute_many",
    "register_sharding",
    "remove_sharding",
    "replicate",
    "run_local",
    "save",
    "save_hf",
    "save_plan",
    "shard",
    "shard_module",
    "shard_parameter",
    "sharding_rule",
    "transfer_from_json",
    "use_comm",
    "zeros",
    "zeros_like",
]


def __getattr__(name: str) -> Any:
    """Load a name that needs torch, and with it the operators."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    import_module("shardwise.ops")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
