"""Calls of a comm that go on while its rank computes.

1. A comm has a queue. What is submitted runs in a thread, one after another: so the order of a comm's calls, which
   must be that of all ranks, is the order in which they were submitted.
2. A call that is made outside the queue waits until the queue is empty, for the same reason. With an empty queue
   it runs at once in the caller's thread, and there is no thread at all unless something was submitted.
3. The thread waits for other ranks inside the system, and copies there: both release Python's interpreter lock. It ends
   by itself when nothing was submitted for a while, and before the interpreter ends.

Why a thread that makes whole calls and not one that only lets transports progress: transports, reductions in windows
and moves of several rounds stay as they are, also those that are yet to be written.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _ThreadRole(threading.local):
    serves = False


_role = _ThreadRole()


def is_in_background() -> bool:
    """Whether the caller is the thread of a queue."""
    return _role.serves


_IDLE_SECONDS = 2.0
_EXIT_SECONDS = 2.0


class BackgroundCall(Generic[T]):
    """A submitted call; `wait()` returns its result, or raises what it raised; it may be called repeatedly."""

    def __init__(self, run: Callable[[], T], queue: BackgroundQueue) -> None:
        self._run: Callable[[], T] | None = run
        self._queue = queue
        self._result: tuple[T] | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has returned or raised."""
        return self._run is None

    def run(self) -> None:
        """Make the call; in the queue's thread."""
        assert self._run is not None
        try:
            self._result = (self._run(),)
        except BaseException as error:
            self._error = error
        self._run = None  # it holds what it reads

    def give_up(self, error: BaseException) -> None:
        """Let those who wait for the call know that it will not be made."""
        self._run, self._error = None, error

    def wait(self) -> T:
        """The result of the call."""
        self._queue.wait_until(lambda: self.is_done)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result[0]


class BackgroundQueue:
    """The calls of one comm that were submitted and have not ended; `interrupted(error)` is called if a wait is.

    >>> queue = BackgroundQueue()
    >>> one, other = queue.submit(lambda: 1), queue.submit(lambda: 2)
    >>> other.wait(), one.is_done, one.wait()
    (2, True, 1)
    """

    def __init__(self, interrupted: Callable[[BaseException], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._calls: deque[BackgroundCall[Any]] = deque()
        self._thread: threading.Thread | None = None
        self._interrupted = interrupted
        _queues.add(self)

    def submit(self, run: Callable[[], T]) -> BackgroundCall[T]:
        """Run something after all that was submitted before."""
        call = BackgroundCall(run, self)
        with self._changed:
            self._calls.append(call)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_serve, args=(weakref.ref(self), self._changed, self._calls), name="shardwise-background"
                )
                self._thread.daemon = True
                self._thread.start()
            self._changed.notify_all()
        return call

    def drain(self) -> None:
        """Return when all that was submitted has ended; in the queue's own thread at once."""
        if self._calls and threading.current_thread() is not self._thread:
            self.wait_until(lambda: not self._calls)

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Return when a condition is met; it can change only when a call ends."""
        if is_over():
            return
        try:
            with self._changed:
                self._changed.wait_for(is_over)
        except BaseException as error:  # Ctrl-C: the program may go on and write to what is being read
            if self._interrupted is not None:
                self._interrupted(error)
            raise

    def start_anew(self) -> None:
        """In a forked child: it has no threads, and its lock may be held by one that it does not have."""
        for call in self._calls:
            call.give_up(RuntimeError("the process that was forked made this call; wait for it there"))
        self._changed, self._calls, self._thread = threading.Condition(), deque(), None

    def stop(self, seconds: float) -> None:
        """Let the thread end, for at most so long: none may return to an interpreter that has ended."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            with self._changed:
                _stopping.add(self)
                self._changed.notify_all()
            thread.join(seconds)


def _serve(
    owner: weakref.ref[BackgroundQueue], changed: threading.Condition, calls: deque[BackgroundCall[Any]]
) -> None:
    """Make the calls of a queue until there are none for a while, or the queue is gone."""
    _role.serves = True
    while True:
        with changed:
            deadline = time.monotonic() + _IDLE_SECONDS
            while not calls and (left := deadline - time.monotonic()) > 0 and owner() not in _stopping:
                changed.wait(left)
            queue = owner()
            if not calls:
                if queue is not None:
                    queue._thread = None
                return
            del queue
        calls[0].run()
        with changed:
            calls.popleft()
            changed.notify_all()


_queues: weakref.WeakSet[BackgroundQueue] = weakref.WeakSet()
_stopping: weakref.WeakSet[BackgroundQueue] = weakref.WeakSet()


def _start_all_anew() -> None:
    for queue in list(_queues):
        queue.start_anew()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_start_all_anew)


@atexit.register
def _stop_all() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for queue in list(_queues):
        queue.stop(max(0.0, deadline - time.monotonic()))
