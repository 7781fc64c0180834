# The public names, each listed once: type checkers read them here, and `_lazy.attach_stub` does at run time.

from shardwise import (
    checkpoint as checkpoint,
    compat as compat,
    hf as hf,
    nn as nn,
    planner as planner,
    sync as sync,
    testing as testing,
)
from shardwise._version import __version__ as __version__
from shardwise.checkpoint import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    load as load,
    open as open,
    save as save,
    save_hf as save_hf,
)
from shardwise.comm import (
    Comm as Comm,
    CommError as CommError,
    DisagreementError as DisagreementError,
    agree as agree,
    comm_from_device_mesh as comm_from_device_mesh,
    default_comm as default_comm,
    launch as launch,
    run_local as run_local,
    use_comm as use_comm,
)
from shardwise.compiler import compile as compile
from shardwise.geometry import (
    Box as Box,
    ChunkSpec as ChunkSpec,
    EnumerableSpec as EnumerableSpec,
    GridSpec as GridSpec,
    Layout as Layout,
    LayoutError as LayoutError,
    Mesh as Mesh,
    MeshSpec as MeshSpec,
    NotationError as NotationError,
    Partial as Partial,
    Piece as Piece,
    Placement as Placement,
    Reduction as Reduction,
    Replicate as Replicate,
    Shard as Shard,
    ShardingSpec as ShardingSpec,
    TensorType as TensorType,
    format_layout as format_layout,
    infer_spec as infer_spec,
    layout_from_json as layout_from_json,
    layout_to_json as layout_to_json,
    parse_layout as parse_layout,
    parse_placements as parse_placements,
    parse_spec as parse_spec,
)
from shardwise.nn import (
    Balance as Balance,
    BalancedPlanner as BalancedPlanner,
    ModelPlan as ModelPlan,
    PlanError as PlanError,
    PlanTable as PlanTable,
    ShardedOptimizer as ShardedOptimizer,
    check_plan as check_plan,
    check_replicas as check_replicas,
    describe_plan as describe_plan,
    load_plan as load_plan,
    named_params_with_sharded_tensor as named_params_with_sharded_tensor,
    plain_as_local_batch as plain_as_local_batch,
    save_plan as save_plan,
    shard_module as shard_module,
    shard_parameter as shard_parameter,
)
from shardwise.ops import (
    explain as explain,
    no_communication as no_communication,
    plain_as_replicated as plain_as_replicated,
    replicate as replicate,
)
from shardwise.ops.check_rule import check_sharding as check_sharding
from shardwise.ops.registration import (
    discover_sharding as discover_sharding,
    register_sharding as register_sharding,
    remove_sharding as remove_sharding,
    sharding_rule as sharding_rule,
)
from shardwise.checkpoint.digests import digest as digest
from shardwise.tensor import (
    ShardedTensor as ShardedTensor,
    from_local as from_local,
    redistribute_many as redistribute_many,
    register_autograd_function as register_autograd_function,
    shard as shard,
)
from shardwise.tensor.creation import (
    empty as empty,
    empty_like as empty_like,
    full as full,
    full_like as full_like,
    ones as ones,
    ones_like as ones_like,
    rand as rand,
    rand_like as rand_like,
    randn as randn,
    randn_like as randn_like,
    zeros as zeros,
    zeros_like as zeros_like,
)
from shardwise.tensor.random import manual_seed as manual_seed
from shardwise.tensor.sharded_tensor import set_printoptions as set_printoptions
from shardwise.tracing import trace as trace
from shardwise.transfer import (
    Link as Link,
    Topology as Topology,
    Transfer as Transfer,
    plan_transfer as plan_transfer,
    transfer_from_json as transfer_from_json,
)
from shardwise.view import draw as draw
