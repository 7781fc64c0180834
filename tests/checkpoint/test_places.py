"""Are links, odd names, full disks and folders in each other's way told, and survived?"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint import clean, files, leftovers, reshard
from shardwise.checkpoint import commit as folders
from shardwise.checkpoint import commit as place
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


WRITER = """
import sys, time, torch, shardwise
from shardwise.checkpoint import saving
plain = saving.write_rank_files

def slowly(*args):
    record = plain(*args)
    print("writing", flush=True)
    sys.stdin.readline()
    return record

saving.write_rank_files = slowly
shardwise.save({"w": torch.full((4,), 2.0)}, sys.argv[1])
print("saved", flush=True)
"""


@pytest.fixture(params=["flock", "no flock"])
def running_save(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A process that saves to a path and has written everything but the index; it goes on with a line of input."""
    path = tmp_path / "c"
    shardwise.save({"w": torch.full((4,), 1.0)}, path)
    setup = "" if request.param == "flock" else f"{NO_LOCKS}\n"
    if setup:
        request.getfixturevalue("monkeypatch").setattr(files.fcntl, "flock", no_flock)
    command = [sys.executable, "-c", setup + WRITER, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        yield path, process
        process.kill()


NO_LOCKS = """
import fcntl
def no_flock(*_):
    raise OSError(95, "Operation not supported")
fcntl.flock = no_flock
"""


def no_flock(*_: object) -> None:
    raise OSError(95, "Operation not supported")


def test_clean_leaves_a_running_save_alone(running_save: tuple[Path, subprocess.Popen[str]]) -> None:
    path, process = running_save
    with pytest.raises(CheckpointError, match=rf"another save to it is running \(process {process.pid} on "):
        clean(path)
    with pytest.raises(CheckpointError, match="another save to it is running"):
        shardwise.save({"w": torch.zeros(4)}, path)
    reshard(path, path.parent / "d", layout="S(0)", ranks=2)
    with pytest.raises(CheckpointError, match="another save to it is running"):
        reshard(path.parent / "d", path, overwrite=True)
    out, _ = process.communicate("\n", timeout=120)
    assert out == "saved\n" and shardwise.open(path)["w"].read().tolist() == [2.0] * 4
    assert sorted(os.listdir(path.parent)) == ["c", "d"] and clean(path) == []


def test_a_killed_save_gives_its_lock_up(running_save: tuple[Path, subprocess.Popen[str]]) -> None:
    path, process = running_save
    process.kill()
    process.wait()
    assert len(clean(path)) == 1 and os.listdir(path.parent) == ["c"]
    shardwise.save({"w": torch.full((4,), 3.0)}, path)
    assert shardwise.open(path)["w"].read().tolist() == [3.0] * 4


def test_a_commit_finds_out_that_its_files_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    shardwise.save({"w": torch.ones(4)}, path)
    plain = folders.LocalSave.write_index

    with monkeypatch.context() as patched:
        for lost in ("*.safetensors", "*.json"):

            def gutted(self: folders.LocalSave, *args: object, lost: str = lost) -> None:
                plain(self, *args)  # type: ignore[arg-type]  # as it was called
                for file in self.work.glob(lost):
                    file.unlink()

            patched.setattr(folders.LocalSave, "write_index", gutted)
            with pytest.raises(CheckpointError, match="it was removed while the checkpoint was written"):
                shardwise.save({"w": torch.zeros(4)}, path)
        patched.setattr(folders.LocalSave, "write_index", lambda self, *args: os.unlink(tmp_path / ".c.lock"))
        with pytest.raises(CheckpointError, match="another save has taken its lock; the checkpoint stays as it is"):
            shardwise.save({"w": torch.zeros(4)}, path)
    assert os.listdir(tmp_path) == ["c"] and shardwise.open(path)["w"].read().tolist() == [1.0] * 4


def test_an_owner_on_another_host_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    monkeypatch.setattr(files, "DEAD_SECONDS", 0.4)
    lock = tmp_path / ".c.lock"
    lock.write_text('{"what": "save", "host": "h7", "machine": "other", "pid": 1, "token": "0123456789abcdef"}')
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [os.utime(lock) for _ in iter(lambda: stop.wait(0.05), True)])
    thread.start()
    with pytest.raises(CheckpointError, match=r"another save to it is running \(process 1 on h7\)"):
        shardwise.save({"w": torch.ones(2)}, path)
    stop.set()
    thread.join()
    shardwise.save({"w": torch.ones(2)}, path)
    assert os.listdir(tmp_path) == ["c"]
