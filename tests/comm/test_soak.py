"""A short soak, whether growth is found, and disks that fail under ranks with processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.comm import LocalWorld
from tests.chaos.disks import disk_errors_of_processes
from tests.chaos.soak import MORE_MEMORY, SAMPLES, Held, find_growth, soak_rank
from tests.world import DeviceWorld

FLAT = Held(300 << 20, 17, 7, 0, 0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalWorld]:
    with DeviceWorld(2, timeout=60.0) as world:
        yield world


def test_a_short_soak_has_right_results_and_leaves_nothing(ranks: LocalWorld, tmp_path: Path) -> None:
    """Too short for memory to be judged; files, threads and temporary folders are flat from the start.

    One thread more waits a while for calls in the background, and one may be about to end.
    """
    for count, samples in ranks.run(soak_rank, 3.0, tmp_path, 5, limit=240):
        assert count >= 20 and samples
        assert samples[-1].temporary == samples[-1].shared == 0
        assert samples[-1].files <= samples[0].files and samples[-1].threads <= samples[0].threads + 2


@pytest.mark.parametrize("growing", ["memory", "files", "threads", "shared", "temporary"])
def test_growth_is_found(growing: str) -> None:
    step = MORE_MEMORY // 4 if growing == "memory" else 1
    samples = [replace(FLAT, **{growing: getattr(FLAT, growing) + step * number}) for number in range(SAMPLES)]
    assert [text.partition(":")[0] for text in find_growth(samples)] == [growing]
    assert find_growth([FLAT] * SAMPLES) == []


@pytest.mark.parametrize(("async_op", "lasting", "failing"), [(False, False, 0), (True, True, 1)])
def test_a_failing_disk_of_one_process_is_reported_on_every_rank(
    ranks: LocalWorld, tmp_path: Path, async_op: bool, lasting: bool, failing: int
) -> None:
    found = disk_errors_of_processes(tmp_path, ranks, async_op, lasting, failing, step=4)
    assert found["failed"] > 1 and found["saved"] > 0 and found["left"] == found["lost"] == 0
