"""Which rank does a placement such as "rank:1/cuda:1" or "worker0/cpu" mean?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.remote_device import _remote_device

from shardwise.comm import name_ranks
from shardwise.tensor.comms import resolve_comm


def rank_of(placement: _remote_device | None) -> int:
    """Return the global rank of a placement; a worker's name is looked up in the RPC world.

    >>> rank_of(_remote_device("rank:3/cuda:1"))
    3
    """
    if placement is None:
        raise ValueError("remote device is None; give each shard a placement such as 'rank:0/cpu'")
    name, rank = placement.worker_name(), placement.rank()
    if name is not None:
        return rank_of_worker(name)
    if rank is None:
        raise ValueError(f"the placement {placement} names no rank; write 'rank:<rank>/{placement.device()}'")
    return rank


def rank_of_worker(name: str) -> int:
    """Return the rank of an RPC worker."""
    # The two private names are the only way to query the world without joining it.
    if not rpc.is_available() or not rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]  # private
        raise RuntimeError(f"RPC framework needs to be initialized for using worker names: {name}")
    agent = rpc._get_current_rpc_agent()  # type: ignore[attr-defined]  # private
    workers = {worker.name: worker.id for worker in agent.get_worker_infos()}
    if name not in workers:
        raise ValueError(f"Invalid worker name: {name}; the RPC world has {sorted(workers)}")
    return int(workers[name])


def with_device(placement: _remote_device | None, device: torch.device | str) -> _remote_device:
    """Return a placement on the same rank or worker, on another device.

    >>> with_device(_remote_device("worker0/cuda:1"), "cpu")
    worker0/cpu
    """
    name = placement.worker_name() if placement is not None else None
    return _remote_device(f"{name}/{device}" if name is not None else f"rank:{rank_of(placement)}/{device}")


def rank_and_device(pg: Any, remote_device: _remote_device | None) -> tuple[int | None, torch.device]:
    """Return the rank and device of a placement, checked to be in a process group of which this rank is a member.

    >>> rank_and_device(None, _remote_device("rank:3/cpu"))
    (3, device(type='cpu'))
    """
    if remote_device is None:
        raise ValueError("remote device is None; give each shard a placement such as 'rank:0/cpu'")
    if remote_device.worker_name() is not None:
        return rank_of(remote_device), remote_device.device()
    rank = remote_device.rank()
    known = pg is not None or dist.is_initialized()
    if rank is not None and known and pg is not dist.GroupMember.NON_GROUP_MEMBER:
        members = resolve_comm(pg).ranks
        if rank not in members:
            raise ValueError(f"Global rank {rank} does not exist in input process group: it has {name_ranks(members)}")
    return rank, remote_device.device()
