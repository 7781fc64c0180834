"""Shard the parameters of a model in place, as a plan says.

1. The whole plan is checked against the model before any parameter changes, so that a wrong plan leaves it whole.
2. Each planned parameter becomes a ShardedTensor; each module with a `Sharder` is replaced by what it returns.
3. Forward hooks lay outputs out anew and hand back local tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.geometry import ShardingSpec
from shardwise.nn.plan import Sharder, ShardingPlan
from shardwise.tensor.comms import Group
from shardwise.tensor.placement_specs import ChunkShardingSpec
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.spec_shard import shard_tensor


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: Group | None = None,
) -> None:
    """Replace a parameter of a module by a ShardedTensor that holds the values of `src_rank`.

    >>> from shardwise.geometry import ChunkSpec
    >>> layer = nn.Linear(4, 2)
    >>> shard_parameter(layer, "weight", ChunkSpec(0, ranks=1))
    >>> type(layer.weight).__name__, tuple(layer.weight.shape)
    ('ShardedTensor', (2, 4))
    """
    tensor = _parameter(module, param_name)
    sharded = shard_tensor(tensor, sharding_spec, src_rank, process_group)
    # nn.Parameter keeps the class of a tensor subclass and marks it as a parameter.
    module.register_parameter(param_name, nn.Parameter(sharded, requires_grad=tensor.requires_grad))


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


def shard_module(module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: Group | None = None) -> None:
    """Shard a model in place as a plan says; called on every rank.

    >>> from shardwise.geometry import ChunkSpec
    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> shard_module(model, ShardingPlan({"0.weight": ChunkSpec(0, ranks=1)}))
    >>> type(model[0].weight).__name__
    'ShardedTensor'
    """
    check_plan(module, plan)
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
