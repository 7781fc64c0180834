"""Is the previous checkpoint safe, wherever a save is killed?

A child process saves over an existing checkpoint and kills itself (SIGKILL) right before its k-th operation on the file
system, for every k until a save comes through. After each kill the checkpoint is the old one or the new one, whole.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise import ChunkSpec, Comm, run_local
from shardwise.checkpoint import clean, leftovers
from shardwise.checkpoint import commit as folders
from shardwise.checkpoint.commit import recover_commit
from tests.killing import die_before

OPERATIONS = ("open", "write", "pwrite", "pwritev", "fsync", "rename", "mkdir", "unlink", "rmdir")
RANKS = 2
LIMIT = 480
OLD, NEW, LATER = 1.0, 2.0, 3.0


def state(value: float) -> dict[str, Any]:
    x = shardwise.full(ChunkSpec(0, RANKS), (6, 4), value)
    return {"x": x, "y": torch.full((5,), value), "value": value}


def save(path: Path, value: float, async_op: bool = False) -> None:
    def body(comm: Comm) -> None:
        saving = shardwise.save(state(value), path, async_op=async_op)
        if saving is not None:
            saving.wait()

    run_local(body, RANKS)


def held(path: Path) -> float:
    """The value that a whole checkpoint holds throughout, loaded and verified on one rank."""
    into = {"x": torch.zeros(6, 4), "y": torch.zeros(5), "value": 0.0}
    shardwise.load(into, path)
    value: float = into["value"]
    assert (into["x"] == value).all() and (into["y"] == value).all()
    return value


def main(folder: str, mode: str, first: int, last: int) -> None:
    """For each k, fork a child that saves and dies before operation k; write down how it ended."""
    torch.set_num_threads(1)
    for k in range(first, last):
        path = Path(folder) / str(k) / "c"
        shutil.copytree(Path(folder) / "start", path.parent)
        child = os.fork()
        if child == 0:
            die_before(k, OPERATIONS, [(folders, "exchange_folders")])
            save(path, NEW, async_op=mode == "background")
            leftovers(path)  # waits until what was replaced is gone
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ended = "done" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        (path.parent / "ended").write_text(ended)
        if ended == "done":
            return


@pytest.mark.parametrize("mode", ["at once", "background"])
def test_a_save_killed_anywhere_leaves_the_old_or_the_new(tmp_path: Path, mode: str) -> None:
    (tmp_path / "start").mkdir()
    save(tmp_path / "start" / "c", OLD)
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path), mode, "0", "200"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, timeout=LIMIT, env=environment)
    ends = {int(p.parent.name): p.read_text() for p in tmp_path.glob("*/ended")}
    assert ends[max(ends)] == "done" and len(ends) > 20, "the last one comes through, after many were killed"
    seen = []
    for k in sorted(ends):
        path = tmp_path / str(k) / "c"
        seen.append(held(path))
        assert seen[-1] in (OLD, NEW)
        assert all(p.name.startswith(".c.") for p in leftovers(path))
        check_afterwards(path, seen[-1], k)
    assert seen == sorted(seen), "once the new checkpoint is in place it stays"
    assert seen[0] == OLD and seen[-1] == NEW


def check_afterwards(path: Path, value: float, k: int) -> None:
    """Cleaning keeps what is loadable; so does saving again."""
    if k % 2:
        recover_commit(path)
        save(path, LATER)
        assert held(path) == LATER
    else:
        clean(path)
        assert held(path) == value
        assert sorted(p.name for p in path.parent.iterdir()) == ["c", "ended"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
