"""Which comm a call uses when none is passed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from shardwise.comm.local import LocalComm
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.protocol import Comm, CommError

_current: ContextVar[Comm | None] = ContextVar("shardwise_comm", default=None)
_alone = LocalComm.alone()
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def use_comm(comm: Comm) -> Iterator[Comm]:
    """Make a comm the current one of this thread (and of code it awaits) inside a `with` block.

    >>> with use_comm(LocalComm.alone()) as comm:
    ...     current_comm() is comm
    True
    """
    token = _current.set(comm)
    try:
        yield comm
    finally:
        _current.reset(token)


def current_comm() -> Comm | None:
    """Return the comm set by `use_comm` or `run_local` in this thread, or None.

    >>> current_comm() is None
    True
    """
    return _current.get()


def default_comm() -> Comm:
    """Return the current comm, else that of torch's default process group, else a world of this one process.

    A process that torchrun or another launcher started as one of several (RANK, WORLD_SIZE) is not alone: without a
    process group it is an error.

    >>> default_comm().ranks
    (0,)
    """
    comm = _current.get()
    if comm is not None:
        return comm
    if dist.is_available() and dist.is_initialized():
        return ProcessGroupComm.of(None)
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        raise CommError(
            f"this process is rank {rank} of {size} (RANK, WORLD_SIZE), but torch.distributed has no process group, so "
            "each rank would work alone and overwrite what the others save; call torch.distributed."
            "init_process_group() first, start the program through shardwise.launch(fn), or pass comm="
        )
    return _alone


def advise_ranks(comm: Comm) -> str:
    """What to do about ranks that a comm does not have, as the end of an error message.

    >>> advise_ranks(default_comm())
    'this process is a world by itself: call torch.distributed.init_process_group() first, or start ranks with ...'
    """
    if comm.process_group is None and comm.world_size == 1:
        return (
            "this process is a world by itself: call torch.distributed.init_process_group() first, or start ranks with "
            "shardwise.launch, torchrun or shardwise.run_local"
        )
    return f"start that many processes, or name ranks among these {comm.world_size}"


def given_world() -> tuple[int, int] | None:
    """Return the rank and size that torchrun's variables give this process; None if they are not set.

    >>> given_world() is None
    True
    """
    if not all(name in os.environ for name in _TORCHRUN):
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
