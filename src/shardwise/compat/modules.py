"""torch's functions on modules, and its optimizer: the native ones with torch's meaning.

1. Parameters are tensors of torch's class, and take gradients even if they were frozen before they were sharded.
2. The parameter groups of an optimizer have the local tensors: programs clip, scale and read their gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise import nn as native
from shardwise.comm.current import GroupOrComm
from shardwise.compat.creation import check_same_request
from shardwise.compat.functions import set_tensor_type
from shardwise.compat.sharded_tensor import TorchShardedTensor
from shardwise.geometry import ShardingSpec
from shardwise.nn.optimizer import teach_state_dict_functions
from shardwise.nn.plan import ShardingPlan


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupOrComm | None = None,
) -> None:
    """Replace a parameter of a module by a ShardedTensor that holds the values of `src_rank`.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> layer = nn.Linear(4, 2)
    >>> shard_parameter(layer, "weight", ChunkShardingSpec(0, ["rank:0/cpu"]))
    >>> type(layer.weight).__name__
    'ShardedTensor'
    """
    tensor = getattr(module, param_name, None)
    if isinstance(tensor, Tensor) and tensor.is_contiguous():  # what else may be wrong is found on every rank
        check_same_request(src_rank, sharding_spec, process_group)
    comm = TorchShardedTensor._resolve_comm(process_group)
    native.shard_parameter(module, param_name, sharding_spec, src_rank, comm)
    _unfreeze(set_tensor_type(getattr(module, param_name), TorchShardedTensor))
    module.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]  # untyped in torch


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Let torch's functions of state dicts, which may be loaded by now, gather the parameters as torch's own."""
    teach_state_dict_functions()


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int = 0,
    process_group: GroupOrComm | None = None,
    **options: Any,
) -> None:
    """Shard a model in place as a plan says; called on every rank. Options as of `shardwise.shard_module`."""
    # A ModelPlan, which is taken as well, has none; its mesh says which group is meant.
    named: dict[str, Any] | None = getattr(plan, "plan", None)
    group = process_group if named is None else TorchShardedTensor._resolve_comm(process_group)
    native.shard_module(module, plan, src_rank, group, **options)
    for tensor in (*module.parameters(), *module.buffers()):
        set_tensor_type(tensor, TorchShardedTensor)
    for name, spec in (named or {}).items():
        if isinstance(spec, ShardingSpec):
            _unfreeze(module.get_parameter(name))


def _unfreeze(parameter: Tensor) -> None:
    """As torch, whose sharded parameters are made by `nn.Parameter(tensor)`."""
    if parameter.is_floating_point() or parameter.is_complex():
        parameter.requires_grad_()


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Make a module reshard its sharded output in place; other outputs pass.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> reshard_output(nn.ReLU(), ChunkShardingSpec(0, ["rank:0/cpu"]))
    ReLU()
    """

    def hook(_module: nn.Module, _input: Any, output: Any) -> Any:
        return output.reshard(resharding_spec) if isinstance(output, TorchShardedTensor) else output

    module.register_forward_hook(hook)
    return module


class TorchShardedOptimizer(native.ShardedOptimizer):
    """torch's `ShardedOptimizer`: its parameter groups are those of the optimizer on the local tensors.

    >>> import torch
    >>> optimizer = TorchShardedOptimizer({"weight": nn.Parameter(torch.ones(2))}, torch.optim.SGD, lr=0.5)
    >>> optimizer.param_groups is optimizer._optim.param_groups
    True
    """

    def _share(self) -> None:
        super()._share()
        self.param_groups = self._optim.param_groups


TorchShardedOptimizer.__name__ = "ShardedOptimizer"  # programs print and compare the names of classes
