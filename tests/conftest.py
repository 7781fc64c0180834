"""Settings for every test: one thread per rank, Hypothesis runs that repeat, worlds of processes that files share."""

from __future__ import annotations

import os

# Ranks share few cores. Set before anything can load torch, which reads it once; spawned ranks inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
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

# Files that take longest, the longest first: two workers that take files in turn should end together.
LONG_FILES = [
    "planner/test_auto.py",
    "ops/test_check_rule.py",
    "testing/test_fuzz.py",
    "testing/test_fuzz_ranks.py",
    "comm/test_network_hosts.py",
    "comm/test_trust.py",
    "house/test_docs.py",
    "ops/rules/test_op_db.py",
    "house/test_examples.py",
    "compiler/test_compile_ranks.py",
    "ops/test_refusals.py",
    "comm/test_faults.py",
    "transfer/test_many_ranks.py",
    "transfer/test_exhaustive.py",
    "ops/test_regressions.py",
    "ops/test_stale_calls.py",
    "ops/rules/test_views.py",
    "nn/test_pipeline.py",
    "nn/test_rebalance.py",
    "checkpoint/test_chaos.py",
    "checkpoint/test_reshard_kill.py",
    "ops/rules/test_distributions.py",
    "ops/test_irregular.py",
    "ops/rules/test_indexing.py",
    "ops/rules/test_layers.py",
    "comm/test_rank_chaos.py",
    "sync/test_ports.py",
    "house/test_bench.py",
    "checkpoint/test_checkpoint_kill.py",
    "comm/test_process_group.py",
    "nn/test_transformer.py",
    "nn/test_moe.py",
]


@pytest.hookimpl(specname="pytest_collection_modifyitems")
def pytest_put_long_files_first(items: list[pytest.Item]) -> None:
    """Sort tests by file: the long ones as they are listed, then all others as they were."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


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
