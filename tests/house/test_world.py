"""Are ranks of tests like spawned ones: forks of a process with one thread, in the environment of their starter?"""

from __future__ import annotations

import os
import sys

import pytest

from tests.world import START_METHOD, DeviceWorld

pytestmark = pytest.mark.skipif(
    START_METHOD != "forkserver" or sys.platform != "linux", reason="about ranks that are forked on Linux"
)


def origin() -> tuple[int, int, str, bool]:
    """The process that this one was forked from, its threads, a variable, and whether another one is there."""
    parent = os.getppid()
    return parent, len(os.listdir(f"/proc/{parent}/task")), os.environ["TEST_WORLD"], "TEST_GONE" in os.environ


def test_ranks_are_forks_of_one_process_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_WORLD", "first")
    monkeypatch.setenv("TEST_GONE", "")
    with DeviceWorld(2, timeout=60.0) as world:
        (server, threads, word, there), other = world.run(origin)
    assert (threads, word, there) == (1, "first", True) and other == (server, 1, "first", True)
    assert server != os.getpid()
    monkeypatch.setenv("TEST_WORLD", "second")
    monkeypatch.delenv("TEST_GONE")
    with DeviceWorld(1, timeout=60.0) as world:
        assert world.run(origin) == [(server, 1, "second", False)]
