"""Does a reshard that was killed anywhere end, when it is run again, in the same bytes as one that was not?

A child process reshards and kills itself (SIGKILL) right before its k-th operation on the file system, until a k comes
through. After each kill the same is run again; at no time is the checkpoint that is replaced out of reach.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint import CheckpointError, leftovers
from shardwise.checkpoint import reshard_copy as planning
from shardwise.checkpoint.resharding import reshard
from shardwise.checkpoint.store import open_store
from tests.killing import die_before

OPERATIONS = ("open", "write", "pwrite", "pwritev", "fsync", "rename", "mkdir", "unlink", "rmdir", "ftruncate")
LIMIT = 480
CUT: dict[str, Any] = {"layout": "S(1)", "ranks": 3}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def in_child(work: Callable[[], object]) -> int:
    """Do something in a fork; how it ended."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, format: Any, replace: bool, step: int) -> None:
    """Kill at every `step`th k and run again; print how much was there each time it was taken up."""
    planning.SEGMENT_BYTES = 64
    source, path = folder / "source", folder / "work" / "c"
    path.parent.mkdir()
    reshard(source, folder / "whole", format=format, **CUT)
    whole, old = contents(folder / "whole"), contents(folder / "old")
    kept = []
    for k in range(0, 1000, step):
        if replace:
            shutil.copytree(folder / "old", path)

        def killed(k: int = k) -> None:
            die_before(k, OPERATIONS)
            reshard(source, path, format=format, overwrite=replace, **CUT)

        ended = in_child(killed)
        if replace:
            with_index = open_store(path).folder  # where a load finds it, also between the renames of a commit
            assert contents(with_index) in (whole, old), f"after a kill before operation {k}"
        if ended != 0:
            try:
                kept.append(reshard(source, path, format=format, overwrite=replace, **CUT).kept_bytes)
            except CheckpointError as error:
                assert "exists" in str(error) and contents(path) == whole, "it was complete but for an empty folder"
        assert contents(path) == whole, f"after a kill before operation {k}"
        assert [p.name for p in path.parent.iterdir()] == ["c"], f"after a kill before operation {k}"
        shutil.rmtree(path)
        if ended == 0:
            break
    print(json.dumps(kept))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    import shardwise

    found = tmp_path_factory.mktemp("kill")
    state = {"x": torch.arange(36.0).reshape(6, 6), "y": torch.arange(9, dtype=torch.int16), "step": 4}
    shardwise.save(state, found / "source")
    shardwise.save({"x": torch.zeros(2)}, found / "old")
    return found


def run_script(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-W", "ignore", __file__, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("format", "replace", "step"), [("shardwise", True, 2), ("dcp", False, 3)])
def test_killed_anywhere_and_run_again_gives_the_same_bytes(
    folder: Path, tmp_path: Path, format: str, replace: bool, step: int
) -> None:
    for name in ("source", "old"):
        shutil.copytree(folder / name, tmp_path / name)
    process = run_script("kill", tmp_path, format, int(replace), step)
    out, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    kept = json.loads(out)
    assert len(kept) > 40 // step and min(kept) == 0 and max(kept) > 100, "some were killed early, some with much done"


def wait_here(folder: Path, path: Path, as_command: bool) -> None:
    """Reshard with two workers, and stop for good when the first segment is done."""
    from shardwise.checkpoint import reshard_copy as pool
    from shardwise.cli import reshard as command

    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
    started = pool._start_worker

    def noted(*args: Any) -> Any:
        process = started(*args)
        print(process.pid)
        return process

    def stop(done: int, total: int) -> None:
        print("ready")
        time.sleep(LIMIT)

    pool._start_worker = noted
    planning.SEGMENT_BYTES = 64
    if not as_command:
        reshard(folder / "source", path, workers=2, progress=stop, max_buffer_bytes=1 << 30, **CUT)
        return
    from shardwise.cli.main import app

    command.reshard = lambda *places, **options: reshard(*places, **options, progress=stop)
    texts = [str(folder / "source"), str(path), "--layout", "S(1)", "--ranks", "3", "--workers", "2", "--memory", "1GB"]
    app(["reshard", *texts])


def started_workers(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    lines: list[str] = []
    while "ready" not in lines:
        line = process.stdout.readline()
        assert line, "it ended before the first segment was done"
        lines.append(line.strip())
    return [int(line) for line in lines if line.isdigit()]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers go on without their parent"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def take_up(folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it again here; it goes on, and comes to the same as a run of its own."""
    monkeypatch.setattr(planning, "SEGMENT_BYTES", 64)
    assert [p.name for p in leftovers(path)] == [f".{path.name}.resharding-work"]
    assert reshard(folder / "source", path, **CUT).kept_bytes > 0
    reshard(folder / "source", path.with_name("fresh"), **CUT)
    assert contents(path) == contents(path.with_name("fresh"))
    assert leftovers(path) == []


def test_workers_end_with_a_parent_that_is_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = run_script("wait", folder, tmp_path / "c", 0)
    workers = started_workers(process)
    assert len(workers) == 2
    process.kill()
    process.communicate(timeout=LIMIT)
    wait_until_gone(workers)
    take_up(folder, tmp_path / "c", monkeypatch)


def test_an_interrupt_stops_the_workers_and_tells_how_to_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = run_script("wait", folder, tmp_path / "c", 1)
    workers = started_workers(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, errors
    assert errors == "interrupted: the same command continues from here, `shardwise clean` removes it\n"
    wait_until_gone(workers)
    take_up(folder, tmp_path / "c", monkeypatch)


def test_a_worker_that_is_killed_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.checkpoint import reshard_copy as pool

    monkeypatch.setattr(planning, "SEGMENT_BYTES", 64)
    started = pool._start_worker
    processes: list[subprocess.Popen[bytes]] = []

    def noted(*args: Any) -> subprocess.Popen[bytes]:
        processes.append(started(*args))
        return processes[-1]

    asked, request, killed = count(), pool._request_segment, threading.Event()

    def request_later(*args: Any) -> Any:
        """All but the first segment are asked for when the workers are dead: they might all be done before."""
        if next(asked):
            assert killed.wait(LIMIT)
        return request(*args)

    def kill(done: int, total: int) -> None:
        for process in processes:
            process.kill()
        killed.set()

    monkeypatch.setattr(pool, "_start_worker", noted)
    monkeypatch.setattr(pool, "_request_segment", request_later)
    with pytest.raises(
        CheckpointError, match=r"a worker ended with exit status -9 while it wrote rank.*the same again"
    ):
        reshard(folder / "source", tmp_path / "c", workers=2, progress=kill, max_buffer_bytes=1 << 30, **CUT)
    take_up(folder, tmp_path / "c", monkeypatch)


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        main(Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "1", int(sys.argv[5]))
    else:
        wait_here(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "1")
