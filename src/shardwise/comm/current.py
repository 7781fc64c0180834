"""Which comm a call uses when none is passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from shardwise.comm.local import LocalComm
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.protocol import Comm

_current: ContextVar[Comm | None] = ContextVar("shardwise_comm", default=None)
_alone = LocalComm.alone()


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

    >>> default_comm().ranks
    (0,)
    """
    comm = _current.get()
    if comm is not None:
        return comm
    if dist.is_available() and dist.is_initialized():
        return ProcessGroupComm.of(None)
    return _alone
