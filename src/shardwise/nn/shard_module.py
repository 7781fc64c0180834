"""Shard the parameters of a model in place, as a plan says.

1. The whole plan is checked against the model before any parameter changes, so that a wrong plan leaves it whole.
2. Each planned parameter becomes a ShardedTensor; each module with a `Sharder` is replaced by what it returns.
   Parameters on the meta device get their local parts only, and their values afterwards.
3. Forward hooks say how plain inputs are read, lay outputs out anew and hand back local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.geometry import ShardingSpec
from shardwise.nn.inputs import read_inputs
from shardwise.nn.materialise import Initialiser, check_initialisers, initialise, laid_out, owners_of_meta
from shardwise.nn.model_plan import ModelPlan
from shardwise.nn.plan import Sharder, ShardingPlan
from shardwise.nn.reading import read_local_batches
from shardwise.tensor.comms import Group, comm_for
from shardwise.tensor.placement_specs import ChunkShardingSpec
from shardwise.tensor.sharded_tensor import ShardedTensor


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Group | None = None,
) -> None:
    """Replace a parameter of a module by a ShardedTensor that holds the values of `src_rank`.

    The module then reads plain inputs of embedding, embedding_bag and linear as this rank's own batch. A parameter on
    the meta device gets local tensors without values.

    >>> from shardwise.geometry import ChunkSpec
    >>> layer = nn.Linear(4, 2)
    >>> shard_parameter(layer, "weight", ChunkSpec(0, ranks=1))
    >>> type(layer.weight).__name__, tuple(layer.weight.shape)
    ('ShardedTensor', (2, 4))
    """
    tensor = _parameter(module, param_name)
    sharded = laid_out(tensor, sharding_spec, src_rank, process_group)
    # nn.Parameter keeps the class of a tensor subclass and marks it as a parameter.
    module.register_parameter(param_name, nn.Parameter(sharded, requires_grad=tensor.requires_grad))
    read_local_batches(module)


def _parameter(module: nn.Module, param_name: str) -> torch.Tensor:
    """Return a parameter that can be sharded, or raise."""
    if not hasattr(module, param_name):
        raise AttributeError(f"{type(module).__name__} has no attribute `{param_name}`")
    tensor = getattr(module, param_name)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"Expected {type(module).__name__}.{param_name} to be a Tensor, but found {type(tensor).__name__}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"param: {param_name} is not a contiguous Tensor; make it contiguous before it is sharded")
    return tensor


def shard_module(
    module: nn.Module,
    plan: ShardingPlan | ModelPlan,
    src_rank: int = 0,
    process_group: Group | None = None,
    *,
    init: Initialiser | None = None,
) -> None:
    """Shard a model in place as a plan says; called on every rank.

    Parameters on the meta device are allocated in their local parts only. They get values from `init(model)`, which may
    load a checkpoint, or else from their modules' `reset_parameters`: the same values for every layout.

    >>> from shardwise.geometry import ChunkSpec
    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> shard_module(model, ShardingPlan({"0.weight": ChunkSpec(0, ranks=1)}))
    >>> type(model[0].weight).__name__
    'ShardedTensor'
    """
    shard_parts = _check_model_plan(module, plan) if isinstance(plan, ModelPlan) else _check_listed_plan(module, plan)
    empty = owners_of_meta(module)
    check_initialisers(empty, init)
    shard_parts(src_rank, process_group)
    initialise(module, empty, init)


def _check_listed_plan(module: nn.Module, plan: ShardingPlan) -> Callable[[int, Group | None], None]:
    """Check a plan and return what carries it out."""
    check_plan(module, plan)
    _check_all_meta_listed(module, plan)

    def carry_out(src_rank: int, process_group: Group | None) -> None:
        for name, rule in plan.plan.items():
            path, _, last = name.rpartition(".")
            parent = module.get_submodule(path)
            if isinstance(rule, Sharder):
                setattr(parent, last, rule.shard(module.get_submodule(name)))
            else:
                shard_parameter(parent, last, rule, src_rank=src_rank, process_group=process_group)
        for path, spec in (plan.output_plan or {}).items():
            reshard_output(module.get_submodule(path), spec)
        for path in plan.return_local_tensor or ():
            collect_local_shard(module.get_submodule(path))

    return carry_out


def _check_all_meta_listed(module: nn.Module, plan: ShardingPlan) -> None:
    """Raise if parameters on the meta device would be left there."""
    sharders = tuple(f"{name}." for name, rule in plan.plan.items() if isinstance(rule, Sharder))
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    left = [n for n, t in tensors if t.is_meta and n not in plan.plan and not n.startswith(sharders)]
    if left:
        raise ValueError(
            f"{', '.join(left[:3])}{' ...' * (len(left) > 3)}: {len(left)} tensors on the meta device are not in the "
            "plan and would stay without values; list them, or use a ModelPlan, which replicates what has no pattern"
        )


def _check_model_plan(module: nn.Module, plan: ModelPlan) -> Callable[[int, Group | None], None]:
    """Check a plan by patterns and return what carries it out: a parameter with several names stays one."""
    specs = plan.specs(module)
    tensors = dict(module.named_parameters(remove_duplicate=False))

    def carry_out(src_rank: int, process_group: Group | None) -> None:
        made: dict[int, nn.Parameter] = {}
        for name, spec in specs.items():
            tensor, (path, _, last) = tensors[name], name.rpartition(".")
            if id(tensor) not in made:
                sharded = laid_out(tensor.detach().contiguous(), spec, src_rank, process_group)
                made[id(tensor)] = nn.Parameter(sharded, requires_grad=tensor.requires_grad)
            parent = module.get_submodule(path)
            parent.register_parameter(last, made[id(tensor)])
            if plan.input_plan is None:
                read_local_batches(parent)
        if plan.input_plan is not None:
            _replicate_buffers(module, plan, src_rank, process_group)
            read_inputs(module, plan, comm_for(process_group))

    return carry_out


def _replicate_buffers(module: nn.Module, plan: ModelPlan, src_rank: int, process_group: Group | None) -> None:
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(
                name,
                laid_out(buffer, plan.replicated, src_rank, process_group),
                persistent=name not in part._non_persistent_buffers_set,
            )


def check_plan(module: nn.Module, plan: ShardingPlan) -> None:
    """Raise unless every entry of a plan names something of the model and no two are in each other's way."""
    sharded = [name for name, rule in plan.plan.items() if isinstance(rule, Sharder)]
    for name, rule in plan.plan.items():
        path, _, last = name.rpartition(".")
        if isinstance(rule, Sharder):
            _check_sharder_path(module, name)
        elif isinstance(rule, ShardingSpec):
            _check_free_of_sharders(name, path, sharded)
            _parameter(module.get_submodule(path), last)
        else:
            raise TypeError(
                f"Only `ShardingSpec` and `Sharder` are supported to shard '{name}', got {type(rule).__name__}"
            )
    for path, spec in (plan.output_plan or {}).items():
        module.get_submodule(path)
        if not isinstance(spec, ShardingSpec):
            raise TypeError(f"Only `ShardingSpec` is supported as output_plan for '{path}', got {type(spec).__name__}")
    for path in plan.return_local_tensor or ():
        module.get_submodule(path)


def _check_sharder_path(module: nn.Module, name: str) -> None:
    if name == "":
        raise KeyError("Module path must not be empty for custom sharder! Call its shard() on the model yourself")
    module.get_submodule(name)


def _check_free_of_sharders(name: str, path: str, sharded: list[str]) -> None:
    for other in sharded:
        if path == other or path.startswith(other + "."):
            raise RuntimeError(
                f"ShardingPlan is in-valid, trying to shard a parameter: {name}, but there's already a Sharder entry "
                f"for module {other}, parameter sharding should not conflict with the submodule tree that a Sharder "
                "is working with!"
            )


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Make a module lay its sharded output out by a spec; other outputs pass.

    >>> from shardwise.geometry import ChunkSpec
    >>> reshard_output(nn.ReLU(), ChunkSpec(0, ranks=1))
    ReLU()
    """

    def hook(_module: nn.Module, _input: Any, output: Any) -> Any:
        return output.redistribute(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Make a module return its rank's local tensor in place of a sharded output.

    A chunk of length 1 loses the dim that was cut: rank 2 of a (4, 16) tensor over 4 ranks returns shape (16,).

    >>> collect_local_shard(nn.ReLU())(torch.ones(1))
    tensor([1.])
    """

    def hook(_module: nn.Module, _input: Any, output: Any) -> Any:
        return _local_part(output) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def _local_part(output: ShardedTensor) -> torch.Tensor:
    local, spec = output.local_tensor(), output.sharding_spec()
    if isinstance(spec, ChunkShardingSpec) and isinstance(spec.dim, int) and local.size(spec.dim) == 1:
        return local.squeeze(spec.dim)
    return local
