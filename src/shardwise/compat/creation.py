"""torch's functions that make a ShardedTensor: of one value, of random values, of local shards, of a whole tensor.

Random values are drawn for each local shard from this rank's default generator, as torch does; those of the native
functions do not depend on the layout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm import DisagreementError, agree
from shardwise.compat.sharded_tensor import TorchShardedTensor
from shardwise.compat.specs import shard_tensor as _shard_tensor_as
from shardwise.geometry import ShardingSpec
from shardwise.tensor.comms import GroupOrComm
from shardwise.tensor.creation import takes_options_of
from shardwise.tensor.shards import Shard


@takes_options_of(TorchShardedTensor.__new__)
def empty(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor whose values are not set; options as of `ShardedTensor`.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> empty(ChunkShardingSpec(0, ["rank:0/cpu"]), 3, 2).local_tensor().shape
    torch.Size([3, 2])
    """
    return TorchShardedTensor(sharding_spec, *size, **options)


@takes_options_of(TorchShardedTensor.__new__)
def full(sharding_spec: ShardingSpec, size: Any, fill_value: complex, **options: Any) -> TorchShardedTensor:
    """A tensor filled with one value; the dtype is the default one unless it is passed.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> full(ChunkShardingSpec(0, ["rank:0/cpu"]), (2,), 7).local_tensor()
    tensor([7., 7.])
    """
    tensor = empty(sharding_spec, *(size if isinstance(size, Sequence) else (size,)), **options)
    nn.init.constant_(tensor, fill_value)  # type: ignore[arg-type]  # complex is taken as well
    return tensor


@takes_options_of(TorchShardedTensor.__new__)
def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor of zeros; options as of `ShardedTensor`."""
    return full(sharding_spec, size, 0, **options)


@takes_options_of(TorchShardedTensor.__new__)
def ones(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor of ones; options as of `ShardedTensor`."""
    return full(sharding_spec, size, 1, **options)


@takes_options_of(TorchShardedTensor.__new__)
def rand(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor of uniform random numbers in [0, 1), drawn for each local shard from this rank's generator."""
    tensor = empty(sharding_spec, *size, **options)
    nn.init.uniform_(tensor)
    return tensor


@takes_options_of(TorchShardedTensor.__new__)
def randn(sharding_spec: ShardingSpec, *size: Any, **options: Any) -> TorchShardedTensor:
    """A tensor of normal random numbers, drawn for each local shard from this rank's generator."""
    tensor = empty(sharding_spec, *size, **options)
    nn.init.normal_(tensor)
    return tensor


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: GroupOrComm | None = None, init_rrefs: bool = False
) -> TorchShardedTensor:
    """The tensor that all ranks' local shards make together; the ranks exchange theirs in one small message."""
    return TorchShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


def shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: GroupOrComm | None = None
) -> Any:
    """Return the tensor of `src_rank`, counted in the group, laid out by a spec, which a user's `shard` may implement.

    >>> from shardwise.compat.specs import ChunkShardingSpec
    >>> shard_tensor(torch.arange(4), ChunkShardingSpec(0, ["rank:0/cpu"])).full()
    tensor([0, 1, 2, 3])
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"input tensor is not a contiguous Tensor: shape {tuple(tensor.shape)}, strides {tensor.stride()}; "
            "call contiguous() on it first"
        )
    check_same_request(src_rank, sharding_spec, process_group)
    return _shard_tensor_as(tensor, sharding_spec, src_rank, process_group, TorchShardedTensor)


def check_same_request(src_rank: int, spec: ShardingSpec, process_group: GroupOrComm | None) -> None:
    """Raise on every rank, in torch's words, if ranks name different sources or specs."""
    comm = TorchShardedTensor._resolve_comm(process_group)
    own = {"src_rank": str(src_rank), "sharding_spec": str(spec)}
    try:
        agree(comm, own, label="_shard_tensor")
    except DisagreementError as error:
        told = [json.loads(data) for data in comm.all_gather_bytes(json.dumps(own).encode(), label="_shard_tensor")]
        name, rank = next((n, r) for n in own for r, other in zip(comm.ranks, told, strict=True) if other[n] != own[n])
        theirs = told[comm.ranks.index(rank)][name]
        raise ValueError(
            f"{name}={own[name]} on rank: {comm.rank} does not match with {name}={theirs} on rank: {rank}; {error}"
        ) from error
