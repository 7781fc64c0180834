"""Settings for every test: one thread per rank, Hypothesis runs that repeat, worlds of processes that files share."""

from __future__ import annotations

import os

# Ranks share few cores. Set before anything can load torch, which reads it once; spawned ranks inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from shardwise.comm import LocalWorld

if os.environ.get("SHARDWISE_TEST_DEVICE", "cpu") != "cpu":
    from tests.device_hooks import (  # noqa: F401
        pytest_collect_file,
        pytest_collection_modifyitems,
        pytest_runtest_makereport,
    )

# No limits on time: examples are not slow to make, the machine may be busy.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", patient, derandomize=True)
settings.register_profile("explore", patient, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over what lives as long as the session: modules and tests."""
    gc.collect()
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:  # many tests will need it; what starts later finds it with all it needs
        from tests.world import start_server

        start_server()


@pytest.fixture
def renorm_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of plain tables are scaled to a largest norm in host memory, where torch does it right."""
    import torch

    from tests.device import renorm_on_host

    monkeypatch.setattr(torch, "embedding_renorm_", renorm_on_host)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that the library or a benchmark starts in this process are forks, as those of tests are."""
    from shardwise.comm import LocalWorld
    from tests.world import DeviceWorld, start_server

    start_server()  # now: it keeps a folder among the temporary ones of its start
    monkeypatch.setattr(LocalWorld, "_context", DeviceWorld._context)


@pytest.fixture(scope="session")
def shared_worlds() -> Iterator[Callable[[int, float], LocalWorld]]:
    """Worlds that several test files share; they end with the session."""
    from tests.world import start_world

    worlds: dict[tuple[int, float], LocalWorld] = {}
    with ExitStack() as stack:

        def find(nprocs: int, timeout: float) -> LocalWorld:
            if (nprocs, timeout) not in worlds:
                worlds[nprocs, timeout] = stack.enter_context(start_world(nprocs, timeout))
            return worlds[nprocs, timeout]

        yield find
