"""torch's `shard_parameter` and `shard_module`: the native ones, whose parameters get torch's meaning."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise import nn as native
from shardwise.compat.creation import check_same_request
from shardwise.compat.sharded_tensor import set_tensor_type
from shardwise.geometry import ShardingSpec
from shardwise.nn.model_plan import ShardingPlan
from shardwise.tensor.comms import GroupOrComm


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
    native.shard_parameter(module, param_name, sharding_spec, src_rank, process_group)
    set_tensor_type(getattr(module, param_name))


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int = 0,
    process_group: GroupOrComm | None = None,
    **options: Any,
) -> None:
    """Shard a model in place as a plan says; called on every rank. Options as of `shardwise.shard_module`."""
    native.shard_module(module, plan, src_rank, process_group, **options)
    for tensor in (*module.parameters(), *module.buffers()):
        set_tensor_type(tensor)
