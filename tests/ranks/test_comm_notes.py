"""Notes in a store whose host hangs or dies: nobody waits long, and nothing floods the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from shardwise._torch import TCPStore
from shardwise.comm import note_store
from shardwise.comm.note_store import NoteStore

HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[bytes], NoteStore]]:
    """A process that hosts a store, and the notes in it."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            notes = NoteStore(TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60)))
            notes.write("a", "1", wait=True)
            assert read_in_time(notes) == "1"
            yield process, notes
        finally:
            process.kill()


def read_in_time(notes: NoteStore) -> str | None:
    """Read on a thread of its own: a read that hangs fails the test instead of holding it up."""
    found: list[str | None] = []
    reader = threading.Thread(target=lambda: found.append(notes.read("a")), daemon=True)
    reader.start()
    reader.join(20 * note_store._PATIENCE_SECONDS)
    assert found, "a read waits for a host that does not answer"
    return found[0]


def test_a_host_that_hangs_costs_a_limited_time_and_is_used_again(
    host: tuple[subprocess.Popen[bytes], NoteStore],
) -> None:
    process, notes = host
    os.kill(process.pid, signal.SIGSTOP)
    assert [read_in_time(notes) for _ in range(3)] == [None] * 3
    notes.write("b", "2", wait=True)
    os.kill(process.pid, signal.SIGCONT)
    for _ in range(600):
        time.sleep(0.1)
        if (answer := read_in_time(notes)) is not None:
            break
    assert answer == "1"


def test_a_host_that_has_died_is_mentioned_once(
    host: tuple[subprocess.Popen[bytes], NoteStore], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    process, notes = host
    process.kill()
    process.wait(60)
    capfd.readouterr()
    for number in range(20):
        notes.write(f"{number}", "3", wait=True)
        assert read_in_time(notes) is None
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("the store of the process group is gone")
    assert capfd.readouterr().err == ""
