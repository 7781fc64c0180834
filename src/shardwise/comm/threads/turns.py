"""Ranks that are threads and take turns: Python runs one of them at a time, so that waking all of them is of no use."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol


class Completable(Protocol):
    """What a rank waits for."""

    complete: bool


_TURN_SECONDS = 0.005


class TurnTaking:
    """A rank runs until it has to wait; then it wakes one that can go on.

    A rank that is not woken, since the others are busy with something else, looks for itself after a while.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Completable, SimpleQueue[None]]] = {}

    def wait(self, rank: int, meeting: Completable, seconds: float) -> None:
        """Wake another rank, and wait until a meeting may be complete."""
        woken: SimpleQueue[None] = SimpleQueue()
        with self._lock:
            self._waiting[rank] = meeting, woken
            self._wake_one()
        with suppress(Empty):
            woken.get(timeout=min(_TURN_SECONDS, seconds))
            return  # whoever woke this rank has taken it off the list
        with self._lock:
            self._waiting.pop(rank, None)

    def pass_on(self) -> None:
        """Wake one rank whose meeting is complete."""
        with self._lock:
            self._wake_one()

    def _wake_one(self) -> None:
        for rank, (meeting, woken) in self._waiting.items():
            if meeting.complete:
                del self._waiting[rank]
                woken.put(None)
                return
