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
from typing import Any

import pytest
import torch.distributed as dist

from shardwise._torch import TCPStore
from shardwise.comm import faults as note_store
from shardwise.comm.faults import FaultLog, NoteStore, TransportError

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


def test_a_wait_noted_before_its_process_ended_excuses_no_rank() -> None:
    """Rank 2 saw rank 3 end; the ranks of another host only time out, and find an old note that rank 3 waits."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        logs = [FaultLog("world", 1, rank) for rank in range(4)]
        logs[3].note_wait(7, "exchange 'w'", (1,))
        logs[1].note_wait(7, "exchange 'w'", (3,))
        call: Any = {"number": 7, "label": "w", "call": "exchange 'w'", "grace": 0.0}
        logs[2].explain(TransportError("its process ended", (3,)), **call)
        late = logs[0].explain(TransportError("timed out", (3,), timed_out=True), **call)
    finally:
        dist.destroy_process_group()
    assert "'w': rank 3 did not take part" in str(late) and late.ranks == (3,)
