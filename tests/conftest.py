"""Settings for every test: one thread per rank, and Hypothesis runs that repeat."""

import os

# Ranks share few cores. Set before anything can load torch, which reads it once; spawned ranks inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.fixture
def renorm_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of plain tables are scaled to a largest norm in host memory, where torch does it right."""
    import torch

    from tests.device import renorm_on_host

    monkeypatch.setattr(torch, "embedding_renorm_", renorm_on_host)
