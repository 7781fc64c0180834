"""The queue of a comm: calls in order, errors where they are waited for, a thread that ends by itself."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from shardwise.comm import background
from shardwise.comm.background import BackgroundQueue, is_in_background


def test_calls_run_in_order_in_one_thread_and_a_failure_is_raised_where_it_is_waited_for() -> None:
    queue, seen = BackgroundQueue(), []

    def note(number: int) -> tuple[int, bool, int]:
        seen.append(number)
        if number == 3:
            raise KeyError("three")
        queue.drain()  # what is called in the background does not wait for the background
        return number, is_in_background(), threading.get_ident()

    calls = [queue.submit(lambda number=number: note(number)) for number in range(6)]  # type: ignore[misc]  # bound
    queue.drain()
    assert seen == list(range(6)) and all(call.is_done for call in calls)
    found = [call.wait() for call in calls if call is not calls[3]]
    assert len({thread for _, _, thread in found}) == 1 and found[0][2] != threading.get_ident()
    assert all(inside for _, inside, _ in found) and not is_in_background()
    for _ in range(2):
        with pytest.raises(KeyError, match="three"):
            calls[3].wait()


def test_the_thread_ends_when_nothing_is_left_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_SECONDS", 0.05)
    queue = BackgroundQueue()
    assert queue._thread is None
    for number in range(2):
        assert queue.submit(lambda number=number: number).wait() == number  # type: ignore[misc]  # bound
        thread = queue._thread
        deadline = time.monotonic() + 60
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert queue._thread is None


PROGRAM = """
import os, threading, time
from shardwise.comm.background import BackgroundQueue
queue = BackgroundQueue()
assert queue.submit(lambda: 1).wait() == 1
started, may_end = threading.Event(), threading.Event()
earlier = queue.submit(lambda: (started.set(), may_end.wait()))
started.wait()
queue._changed.acquire()  # as its thread does at times
child = os.fork()
if child == 0:
    try:
        earlier.wait()
    except RuntimeError as error:
        os._exit(queue.submit(lambda: 7).wait() if "wait for it there" in str(error) else 1)
queue._changed.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
may_end.set()
earlier.wait()
queue.submit(lambda: time.sleep(600))
print("ends")
"""


def test_a_forked_child_has_its_own_thread_and_a_program_ends_beside_a_call() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")
