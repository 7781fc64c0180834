"""Run one function as every rank of a world of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from shardwise.comm.current import use_comm
from shardwise.comm.local import (
    LocalComm,
    RendezvousHub,
    ThreadWorldState,
    default_device,
    find_default_device,
    number_device,
)
from shardwise.comm.protocol import Comm, CommError
from shardwise.comm.threads.turns import TurnTaking

T = TypeVar("T")


def run_local(
    fn: Callable[..., T],
    world_size: int = 4,
    *args: Any,
    timeout: float = 60.0,
    device: torch.device | str | None = None,
) -> list[T]:
    """Call `fn(comm, *args)` on one thread per rank and return the results in rank order.

    `device` is where tensors normally live, by default torch's default device. On a GPU all ranks share it, and ranks
    take turns: one runs until it waits for the others.

    An exception on one rank ends the others at their next collective and is raised here, with a note that names its
    rank. Each thread computes with one intra-op thread and runs its own backward pass. Torch's global random
    generator is shared by all threads, so seed generators of your own.

    >>> def total(comm, scale):
    ...     x = torch.tensor([comm.rank * scale])
    ...     comm.all_reduce(x, label="total").wait()
    ...     return x.item()
    >>> run_local(total, 3, 10)
    [30, 30, 30]
    """
    if not isinstance(world_size, int) or not callable(fn):  # type: ignore[redundant-expr]  # callers may not be typed
        raise TypeError(
            "run_local(fn, world_size, *args) calls fn(comm, *args) on each rank; got "
            f"{type(fn).__name__} and {type(world_size).__name__}"
        )
    if world_size < 1:
        raise ValueError(f"run_local with world_size={world_size}: pass at least 1 rank")
    device = default_device() if device is None else number_device(device)
    room = ThreadWorldState(turns=TurnTaking() if device.type == "cuda" else None, device=device)
    hub = RendezvousHub(tuple(range(world_size)), room)
    results: dict[int, T] = {}
    comms = [LocalComm(rank, hub, device=device, timeout=timeout) for rank in range(world_size)]
    intra_op_threads = torch.get_num_threads()
    try:
        threads = [_start_rank(comm, fn, args, results, room) for comm in comms]
        _join_ranks(threads, room, timeout)
    finally:
        torch.set_num_threads(intra_op_threads)
    if room.failure is not None:
        rank, error = room.failure
        error.add_note(f"on rank {rank} of run_local (world of {world_size})")
        raise error
    return [results[rank] for rank in range(world_size)]


def _start_rank(
    comm: LocalComm, fn: Callable[..., T], args: tuple[Any, ...], results: dict[int, T], room: ThreadWorldState
) -> threading.Thread:
    grad, device = torch.is_grad_enabled(), find_default_device()
    gpu = _find_gpu(comm.device)
    context = copy_context()

    def body() -> None:
        try:
            if gpu is not None:
                _enter_gpu(gpu)
            results[comm.rank] = _run_as_rank(fn, comm, args, grad, device)
            room.leave(comm.rank)
        except BaseException as error:
            room.fail(comm.rank, error)

    thread = threading.Thread(target=context.run, args=(body,), name=f"rank {comm.rank}", daemon=True)
    thread.start()
    return thread


def _find_gpu(device: torch.device) -> int | None:
    """The number of a GPU, of the caller's present one if it has none; None for another device."""
    if device.type != "cuda":
        return None
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index


def _enter_gpu(number: int) -> None:
    """Make a GPU the present one of this thread, with its context, which a thread has after its first call only.

    Memory comes from torch's pool without a call, and then cuBLAS warns that there is no context.
    """
    torch.cuda.set_device(number)
    torch.cuda.current_stream(number).query()


def _run_as_rank(fn: Callable[..., T], comm: Comm, args: tuple[Any, ...], grad: bool, device: torch.device) -> T:
    torch.set_num_threads(1)
    made_there = nullcontext() if find_default_device() == device else device
    with use_comm(comm), torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(grad), made_there:
        return fn(comm, *args)


def _join_ranks(threads: list[threading.Thread], room: ThreadWorldState, timeout: float) -> None:
    """Wait for the ranks; once one has failed, for the others no longer than the time-out."""
    try:
        for thread in threads:
            while thread.is_alive() and room.failure is None:
                thread.join(0.05)
    except BaseException as error:
        room.fail(-1, CommError(f"run_local was interrupted by {type(error).__name__}"))
        raise
    for thread in threads:
        thread.join(timeout)
