"""The chaos of `make chaos`, in a small form: kills, replacing saves, bit flips, forged files, failing disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import checkpoints as chaos
from tests.chaos import disks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("exchange", [True, False])
def test_two_kills_lose_nothing(tmp_path: Path, exchange: bool) -> None:
    assert chaos.kill_pairs(tmp_path, 5, exchange)["pairs"] > 15


def test_loads_beside_a_saver_never_mix_two_saves(tmp_path: Path) -> None:
    found = chaos.loads_beside_a_saver(tmp_path, 60)
    assert found["loads"] == 60 and found["saves seen"] > 1


def test_loads_of_tensors_beside_a_saver(tmp_path: Path) -> None:
    assert chaos.loads_of_tensors_beside_a_saver(tmp_path, 30)["saves seen"] > 1


def test_cleaning_and_saving_beside_a_saver_loses_nothing(tmp_path: Path) -> None:
    found = chaos.cleans_beside_savers(tmp_path, 25)
    assert found["cleaned"] + found["saved"] + found["refused"] == 50 and found["saves seen"] > 1


@pytest.mark.parametrize("format", chaos.FORMATS)
def test_bit_flips_are_found(tmp_path: Path, format: str) -> None:
    found = chaos.bit_flips(tmp_path, format, 150)
    assert found["found"] > 20
    assert not found["silent"] or format == "hf"


@pytest.mark.parametrize("format", chaos.FORMATS)
def test_forged_files_are_refused_in_bounded_time_and_memory(tmp_path: Path, format: str) -> None:
    found = chaos.fuzz(tmp_path, format, 150)
    assert found["refused"] > 50


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_a_failing_disk_is_reported_on_every_rank(tmp_path: Path, async_op: bool, lasting: bool) -> None:
    found = disks.disk_errors(tmp_path, async_op, lasting, step=3)
    assert found["failed"] > 3 and found["saved"] > 0
