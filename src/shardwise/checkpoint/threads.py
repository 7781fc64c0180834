"""Work on bytes by several threads of a rank, where a machine has more cores than ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_WORTH_BYTES = 32 << 20
MOST_THREADS = 4
T = TypeVar("T")


def threads_for(nbytes: int, ranks: int) -> int:
    """How many threads of this rank work on so many bytes; all ranks may lie on this machine.

    >>> threads_for(1000, ranks=1)
    1
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if nbytes < _WORTH_BYTES else max(1, min(MOST_THREADS, cores // ranks))


def runs(items: Sequence[T], sizes: Sequence[int], count: int) -> list[Sequence[T]]:
    """Cut a sequence into at most this many runs of about equal size, none of them empty.

    >>> runs("abcd", [1, 1, 1, 3], 2), runs("ab", [5, 5], 3), runs("", [], 2)
    (['abc', 'd'], ['a', 'b'], [])
    """
    total, done, start = sum(sizes), 0, 0
    found: list[Sequence[T]] = []
    for number, size in enumerate(sizes):
        done += size
        if number + 1 == len(items) or done * count >= total * (len(found) + 1):
            found.append(items[start : number + 1])
            start = number + 1
    return found


def spread(work: Callable[[Sequence[T]], None], parts: Sequence[Sequence[T]]) -> None:
    """Do the work on every part, each in a thread of its own; raise what the first that failed raised."""
    if len(parts) == 1:
        work(parts[0])
    elif parts:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(work, parts))
