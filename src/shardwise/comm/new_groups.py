"""How do some ranks make a torch process group by themselves?

1. torch asks its store, in a process that may hang: a thread waits for it, and the caller no longer than the time-out.
2. The members find the same name for the group, whatever other groups each of them has made.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise._torch import Store, default_store, name_new_groups
from shardwise.comm.faults import TransportError, to_transport_error

_GRACE_SECONDS = 1.0
_groups_made: tuple[Store | None, Counter[tuple[int, ...]]] = None, Counter()  # of the world with this store


def make_group(
    ranks: tuple[int, ...], rank: int, device: torch.device, timeout: float, backend: str | None
) -> dist.ProcessGroup:
    """Make the group of these ranks, which all call this; raises TransportError if they do not in time."""
    made: Future[dist.ProcessGroup] = Future()
    name = _find_name(ranks, backend)

    def make() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a property of the thread
            limit = timedelta(seconds=timeout)
            with name_new_groups(name):
                group = dist.new_group(list(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
            made.set_result(group)
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=make, name="shardwise-new-group", daemon=True).start()
    others = tuple(r for r in ranks if r != rank)
    try:
        return made.result(timeout + _GRACE_SECONDS)
    except FutureTimeoutError as error:
        raise TransportError(f"no answer within {timeout:g} s", others, timed_out=True) from error
    except RuntimeError as error:
        raise to_transport_error(error, others) from error


def _find_name(ranks: tuple[int, ...], backend: str | None) -> str:
    """A name that all members find: their ranks, and how many groups of just these ranks the world has had."""
    global _groups_made
    store = default_store()
    if _groups_made[0] is not store:
        _groups_made = store, Counter()
    _groups_made[1][ranks] += 1
    text = f"{ranks} {backend} {_groups_made[1][ranks]}"
    return f"shardwise_{hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()}"
