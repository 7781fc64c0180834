"""Are ranks of tests like spawned ones: forks of a process with one thread, in the environment of their starter?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import LONG_FILES, pytest_put_long_files_first
from tests.world import START_METHOD, DeviceWorld

only_forked = pytest.mark.skipif(
    START_METHOD != "forkserver" or sys.platform != "linux", reason="about ranks that are forked on Linux"
)


def test_long_files_are_there() -> None:
    folder = Path(__file__).parents[1]
    assert [name for name in LONG_FILES if not (folder / name).exists()] == []
    assert len(set(LONG_FILES)) == len(LONG_FILES)


def test_long_files_come_first() -> None:
    folder = Path(__file__).parents[1]
    names = ["geometry/test_errors.py", LONG_FILES[1], "view/test_view.py", LONG_FILES[0]]
    items: Any = [SimpleNamespace(path=folder / name) for name in names]
    pytest_put_long_files_first(items)
    assert [item.path for item in items] == [folder / names[place] for place in (3, 1, 0, 2)]


def origin() -> tuple[int, int, str, bool]:
    """The process that this one was forked from, its threads, a variable, and whether another one is there."""
    parent = os.getppid()
    return parent, len(os.listdir(f"/proc/{parent}/task")), os.environ["TEST_WORLD"], "TEST_GONE" in os.environ


@only_forked
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
