"""Calls that wait long say so: one thread per process notes in the store for whom its ranks wait.

A rank that times out on another learns from this that the other one waits as well, and for whom. Without it the time
at which each began to wait would decide who gets blamed. Calls that end soon cost two dictionary operations.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from ._faults import Board

_LONG = 0.5
_PERIOD = 0.2


class Waits:
    """The calls of one comm that have begun and not ended; `awaited` tells for whom the transport waits now."""

    def __init__(self, board: Board, awaited: Callable[[], tuple[int, ...]]) -> None:
        self._board, self._awaited = board, awaited
        self._begun: dict[int, tuple[float, str]] = {}
        self._noted: set[int] = set()
        _watch(self)

    def begin(self, number: int, label: str) -> None:
        """A call starts to wait."""
        self._begun[number] = (time.monotonic(), label)

    def end(self, number: int) -> None:
        """It waits no more; what was noted is taken back."""
        self._begun.pop(number, None)
        if number in self._noted:
            self._noted.discard(number)
            self._board.note_wait(number, "", ())

    def note_long_ones(self) -> None:
        """Write down the calls that have waited long, once each."""
        now = time.monotonic()
        for number, (since, label) in list(self._begun.items()):
            if now - since > _LONG and number not in self._noted and (ranks := self._awaited()):
                self._noted.add(number)
                self._board.note_wait(number, label, ranks)
                if number not in self._begun:  # it ended while the note was on its way
                    self._board.note_wait(number, "", ())


_watched: weakref.WeakSet[Waits] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _watch(waits: Waits) -> None:
    global _thread
    with _lock:
        _watched.add(waits)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="shardwise-waits", daemon=True)
            _thread.start()


def _run() -> None:
    while True:
        time.sleep(_PERIOD)
        with _lock:
            watched = list(_watched)
        for waits in watched:
            waits.note_long_ones()
