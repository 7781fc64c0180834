"""Are links, odd names, full disks and folders in each other's way told, and survived?"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint import clean, files, folders, leftovers, reshard
from shardwise.checkpoint.storage import place
from shardwise.comm import default_comm

LIMIT = 1 << 20


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may become longer than a MiB: writing on fails as it does on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_told_with_the_file_and_leaves_the_old_checkpoint(tmp_path: Path, full_disk: None) -> None:
    shardwise.save({"n": 1}, tmp_path / "c")
    large = {"w": torch.zeros(LIMIT)}
    for write in (
        lambda: shardwise.save(large, tmp_path / "c"),
        lambda: shardwise.save(large, tmp_path / "c", async_op=True).wait(),
        lambda: shardwise.save_hf(large, tmp_path / "c"),
    ):
        with pytest.raises(CheckpointError, match=r"File too large: '.*/\.c\.saving-.*\.safetensors'"):
            write()
        assert shardwise.open(tmp_path / "c").values() == {"n": 1}
        assert os.listdir(tmp_path) == ["c"]


def test_a_reshard_that_fails_at_its_start_leaves_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shardwise.save({"w": torch.zeros(LIMIT)}, tmp_path / "c")
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match="File too large"):
        reshard(tmp_path / "c", tmp_path / "d", workers=1)
    assert os.listdir(tmp_path) == ["c"]


def test_a_link_stands_for_what_it_names(tmp_path: Path) -> None:
    shardwise.save({"n": 1}, tmp_path / "step-1")
    (tmp_path / "latest").symlink_to("step-1")
    shardwise.save({"n": 2}, tmp_path / "latest")
    assert shardwise.open(tmp_path / "step-1").values() == shardwise.open(tmp_path / "latest").values() == {"n": 2}
    assert leftovers(tmp_path / "latest") == clean(tmp_path / "latest") == []
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-1"] and (tmp_path / "latest").is_symlink()
    with pytest.raises(CheckpointError, match="step-1 is both source and destination"):
        reshard(tmp_path / "step-1", tmp_path / "latest", overwrite=True)


def test_nothing_is_written_into_the_source(tmp_path: Path) -> None:
    shardwise.save({"w": torch.ones(4)}, tmp_path / "c")
    before = sorted(os.listdir(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=r"c/inner is inside the source .*/c; choose a path outside it"):
        reshard(tmp_path / "c", tmp_path / "c" / "inner")
    assert sorted(os.listdir(tmp_path / "c")) == before


def save_clashing(comm: Comm, path: Path) -> str:
    w = shardwise.shard(torch.arange(4.0), ChunkSpec(0, 2))
    with pytest.raises(CheckpointError) as error:
        shardwise.save({"w": w, "w[0:2]": torch.ones(3)}, path)
    return str(error.value)


def test_names_that_the_files_cannot_hold_are_told_to_every_rank(tmp_path: Path) -> None:
    told = run_local(save_clashing, 2, tmp_path / "c")
    assert told[0] == told[1] and "a tensor is named like a part of another, such as 'w[0:2]'" in told[0]
    for write in (shardwise.save, shardwise.save_hf):
        with pytest.raises(CheckpointError, match="a tensor is called __metadata__, which safetensors reserves"):
            write({"__metadata__": torch.ones(2)}, tmp_path / "c")
    assert os.listdir(tmp_path) == []


class OtherDisk(folders.LocalSave):
    """What a save finds on a host with a disk of its own under the same path: for all ranks but the first."""

    def __init__(self, path: Path, token: str) -> None:
        super().__init__(path, token)
        if default_comm().rank:
            self.work = path.parent / "other" / self.work.name


def save_to_two_disks(comm: Comm, path: Path, async_op: bool) -> str:
    with pytest.raises(CheckpointError) as error:
        saving = shardwise.save({"w": shardwise.shard(torch.ones(4), ChunkSpec(0, 2))}, path, async_op=async_op)
        if saving is not None:
            saving.wait()
    return str(error.value)


@pytest.mark.parametrize("async_op", [False, True])
def test_hosts_that_do_not_share_the_path_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_op: bool
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(place, "LocalSave", OtherDisk)
    monkeypatch.setattr(folders, "_SEEN_SECONDS", 0.1)
    for told in run_local(save_to_two_disks, 2, tmp_path / "c", async_op):
        assert "rank 1: " in told and "ranks of several hosts save to a path that all of them share" in told
    assert os.listdir(tmp_path) == ["other"] and os.listdir(tmp_path / "other") == []


def test_folders_above_a_new_checkpoint_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    plain = files.sync_folder

    def sync(folder: Path) -> None:
        synced.append(folder)
        plain(folder)

    monkeypatch.setattr(files, "sync_folder", sync)
    shardwise.save({"n": 1}, tmp_path / "a" / "b" / "c")
    assert set(synced) == {tmp_path, tmp_path / "a"}, "each has a new folder in it"


def test_a_replaced_folder_without_its_partner_is_not_brought_back(tmp_path: Path) -> None:
    shardwise.save({"n": 1}, tmp_path / ".c.replaced-1")
    with pytest.raises(CheckpointError, match=r"c: no such checkpoint; complete ones are left next to it: rename"):
        shardwise.open(tmp_path / "c")
    shardwise.save({"n": 2}, tmp_path / ".c.replaced-2")
    shardwise.save({"n": 3}, tmp_path / ".c.saving-2")
    assert shardwise.open(tmp_path / "c").values() == {"n": 3}


def test_the_only_complete_checkpoint_is_no_leftover(tmp_path: Path) -> None:
    shardwise.save({"n": 1}, tmp_path / ".c.saving-12ab")
    (tmp_path / ".c.saving-34cd").mkdir()
    assert [p.name for p in clean(tmp_path / "c")] == [".c.saving-34cd"]
    assert os.listdir(tmp_path) == [".c.saving-12ab"]
    shardwise.save({"n": 2}, tmp_path / "c")
    assert [p.name for p in clean(tmp_path / "c")] == [".c.saving-12ab"]


def test_a_half_written_single_file_is_a_leftover(tmp_path: Path) -> None:
    shardwise.save_hf({"w": torch.ones(4)}, tmp_path / ".m.saving-1")
    file = tmp_path / ".m.saving-1" / "model.safetensors"
    assert leftovers(tmp_path / "m") == []
    file.write_bytes(file.read_bytes()[:-1])
    assert [p.name for p in leftovers(tmp_path / "m")] == [".m.saving-1"]
