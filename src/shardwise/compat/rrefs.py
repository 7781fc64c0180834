"""Remote references to the shards that other ranks hold (`init_rrefs=True`), over torch.distributed.rpc.

1. A tensor gets a number, and a weak reference to it is kept under that number.
2. All ranks of the world exchange their RPC rank and the tensor's number. Every rank sees what every
   other said, so a mistake on one is raised on all of them, before anything is sent by RPC.
3. Each rank sends references to its local shards to the others, which find their tensor by its number.
4. All wait until all are done.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import rpc

from shardwise.comm import Comm, default_comm, name_ranks
from shardwise.compat.groups import OutsideComm

if TYPE_CHECKING:
    from shardwise.compat.sharded_tensor import TorchShardedTensor

_ENTRY = struct.Struct("<qq?")
_NO_RPC = -1
_numbers = itertools.count()
_sharded_tensor_map: dict[int, weakref.ref[TorchShardedTensor]] = {}


def register_rrefs(tensor: TorchShardedTensor) -> None:
    """Give every rank of a tensor references to the others' shards.

    All ranks of the world call it together, after `torch.distributed.rpc.init_rpc`; those outside of the tensor's
    process group get references too.
    """
    number = next(_numbers)
    tensor._sharded_tensor_id = number
    _sharded_tensor_map[number] = weakref.ref(tensor, partial(_forget_number, number))
    try:
        exchange_rrefs(tensor)
    except BaseException:
        _forget_number(number)
        raise


def forget_rrefs(tensor: TorchShardedTensor) -> None:
    """Let references to a tensor's number go; a tensor that is collected is forgotten without this."""
    if tensor._sharded_tensor_id is not None:
        _forget_number(tensor._sharded_tensor_id)


def exchange_rrefs(tensor: TorchShardedTensor) -> None:
    """Send references to this rank's shards to the other ranks of the world and receive theirs."""
    assert tensor._sharded_tensor_id is not None, "a tensor is numbered before its references are sent"
    comm = default_comm()  # also ranks outside of the tensor's group hold references
    tensor._remote_shards.clear()
    outside = isinstance(tensor.comm, OutsideComm)
    numbers = _exchange_numbers(comm, tensor._sharded_tensor_id, tensor.comm.ranks, outside)
    shards = tensor.local_shards()
    sent = []
    for rank, number in numbers.items():
        if rank != comm.rank and shards:
            references = [rpc.RRef(shard) for shard in shards]
            sent.append(rpc.rpc_async(rank, register_remote_shards, args=(number, references, comm.rank)))
    torch.futures.wait_all(sent)
    comm.barrier(label="init_rrefs: all references have arrived")


def register_remote_shards(sharded_tensor_id: int, rrefs: list[Any], rpc_rank: int) -> None:
    """Keep the references that another rank sent; RPC calls this on the rank that receives them."""
    reference = _sharded_tensor_map.get(sharded_tensor_id)
    if reference is None:
        raise RuntimeError(
            f"Could not find sharded_tensor_id: {sharded_tensor_id} in map: {sorted(_sharded_tensor_map)}; "
            "the tensor no longer exists on the rank that was sent references"
        )
    tensor = reference()
    if tensor is None:
        raise RuntimeError(f"ShardedTensor weakref has been deallocated: number {sharded_tensor_id}")
    tensor._remote_shards[rpc_rank] = rrefs


def remote_shards(tensor: TorchShardedTensor) -> dict[int, list[Any]]:
    """Return the references to the shards of the other ranks, by RPC rank."""
    if not tensor._init_rrefs:
        raise RuntimeError(
            "ShardedTensor created with init_rrefs=False, no RRefs to remote shards available; "
            "create it with init_rrefs=True after torch.distributed.rpc.init_rpc"
        )
    return tensor._remote_shards


def _forget_number(number: int, reference: object = None) -> None:
    _sharded_tensor_map.pop(number, None)


def _exchange_numbers(comm: Comm, number: int, members: tuple[int, ...], outside: bool) -> dict[int, int]:
    """Return the number for the tensor of each rank in its group or outside of every group, or raise on all ranks."""
    own = _ENTRY.pack(_rpc_rank(), number, outside)
    entries = comm.all_gather_bytes(own, label="init_rrefs: numbers of the tensor")
    said = {rank: _ENTRY.unpack(entry) for rank, entry in zip(comm.ranks, entries, strict=True)}
    without = [rank for rank, (rpc_rank, _, _) in said.items() if rpc_rank == _NO_RPC]
    if without:
        raise RuntimeError(
            "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc if init_rrefs is set to True; "
            f"it is not on {name_ranks(without)}"
        )
    if comm.process_group is None and comm.world_size > 1:
        raise RuntimeError("init_rrefs=True needs ranks that are processes; those of run_local are threads of one")
    for rank, (rpc_rank, _, _) in said.items():
        if rank != rpc_rank:
            raise ValueError(
                "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process group rank: "
                f"{rank} and RPC rank: {rpc_rank}; pass init_rpc the rank of init_process_group"
            )
    return {rank: theirs for rank, (_, theirs, is_outside) in said.items() if rank in members or is_outside}


def _rpc_rank() -> int:
    try:
        return int(rpc.get_worker_info().id)
    except RuntimeError:
        return _NO_RPC
