"""Processes that kill themselves at a chosen point, for tests of what a kill leaves behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm import Comm, CommError


def die_before(number: int, operations: Sequence[str], others: Sequence[tuple[Any, str]] = ()) -> None:
    """Let this process kill itself right before the `number`-th of these functions of os, or others, from now on."""
    left = [number]

    def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return plain(*args, **kwargs)

        return call

    for module, name in [*((os, name) for name in operations), *others]:
        setattr(module, name, wrapped(getattr(module, name)))


def die_with_a_living_child(comm: Comm, numel: int) -> str:
    """Rank 1 dies, its forked child lives on for a minute; how a sum ends on the others."""
    if comm.rank == 1:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(torch.ones(numel), label="w").wait()
    except CommError as error:
        return str(error)
    return "done"
