"""How do ranks read and write notes when the process that hosts torch's store hangs or has died?

1. Every call of the store is made by one thread of its own. Writers do not wait; readers wait for a limited time. A
   call that hangs makes later ones return at once, until it ends.
2. Before a call the host is knocked at: torch prints pages when a call meets a host that has died. Once it is gone, the
   log says so in one line, and the store is left alone.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from shardwise._log import package_logger
from shardwise._torch import Store, store_address

_PATIENCE_SECONDS = 3.0
_HANGS_SECONDS = 2.0  # less than the patience: whoever was patient once does not wait for the same call again
_KNOCK_SECONDS = 1.0
_log = package_logger(__name__)
T = TypeVar("T")


class NoteStore:
    """A store of small texts that never holds a caller up for long.

    >>> from torch.distributed import HashStore
    >>> notes = NoteStore(HashStore())
    >>> notes.write("a", "1")
    >>> notes.read("a"), notes.read("b")
    ('1', None)
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._is_gone = False
        threading.Thread(target=self._work, name="shardwise-notes", daemon=True).start()

    def write(self, key: str, text: str, *, wait: bool = False) -> None:
        """Write a note, soon or, with `wait`, now; a store that cannot be reached keeps nothing."""
        written = self._submit(lambda: self.store.set(key, text))
        if wait:
            _result_of(written)

    def read(self, key: str) -> str | None:
        """Return a note; None if there is none, or no answer."""
        return _result_of(self._submit(lambda: self._get(key)))

    def _get(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _submit(self, call: Callable[[], T]) -> Future[T] | None:
        """Hand a call to the thread; None if the store is gone, or hangs in an earlier call."""
        since = self._busy_since
        if self._is_gone or (since is not None and time.monotonic() - since > _HANGS_SECONDS):
            return None
        done: Future[T] = Future()

        def job() -> None:
            try:
                self._knock()
                done.set_result(call())
            except (OSError, RuntimeError) as error:
                self._leave(error)
                done.set_exception(error)

        self._jobs.put(job)
        return done

    def _work(self) -> None:
        while not self._is_gone:
            job = self._jobs.get()
            self._busy_since = time.monotonic()
            job()
            self._busy_since = None

    def _knock(self) -> None:
        address = store_address(self.store)
        if address is not None:
            socket.create_connection(address, _KNOCK_SECONDS).close()

    def _leave(self, error: Exception) -> None:
        self._is_gone = True
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        _log.warning("the store of the process group is gone (%s): failures are named by guess", reason)


def _result_of(answer: Future[T] | None) -> T | None:
    try:
        return None if answer is None else answer.result(_PATIENCE_SECONDS)
    except (FutureTimeoutError, OSError, RuntimeError):
        return None
