"""Are checkpoints safe, and are all ranks told, when disks fail or are full?

`python -m tests.chaos.disks` (or `make chaos`) lets every operation of saves fail in turn, on ranks of one process and
of processes of their own, synchronous and in the background; tests call the same functions with fewer. Each raises an
AssertionError at the first thing that is wrong, and returns what it counted.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint import commit as folders
from shardwise.checkpoint import leftovers
from shardwise.comm import LocalWorld, default_comm
from tests.chaos.checkpoints import WRITES, loaded_value, state

TOLD_SECONDS = 5.0


@contextmanager
def failing_disk(number: int, code: int, lasting: bool) -> Iterator[list[int]]:
    """Let the `number`-th operation on the file system fail, and with `lasting` all that need room after it."""
    done = [0]
    plain = {name: getattr(os, name) for name in WRITES}
    exchange = folders.exchange_folders

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            reads = name == "open" and not args[1] & os.O_WRONLY
            done[0] += not reads
            failed = done[0] > number and _needs_room(name, args) if lasting else done[0] == number + 1
            if failed and not reads:
                raise OSError(code, os.strerror(code))
            return call(*args, **kwargs)

        return attempt

    try:
        for name, call in plain.items():
            setattr(os, name, wrapped(name, call))
        folders.exchange_folders = wrapped("exchange", exchange)
        yield done
    finally:
        for name, call in plain.items():
            setattr(os, name, call)
        folders.exchange_folders = exchange


def _needs_room(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a full disk refuses this: not names that change, nor the sync of a folder."""
    folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
    return not folder and name not in ("rename", "exchange")


def save_on_bad_disk(comm: Comm, path: Path, value: float, async_op: bool) -> tuple[str, float]:
    """Save on one rank; how it ended, and after how long. The comm can be used after that."""
    x = shardwise.full(ChunkSpec(0, comm.world_size), (6, 4), value)
    started = time.monotonic()
    try:
        saving = shardwise.save({**state(value), "x": x}, path, async_op=async_op)
        if saving is not None:
            saving.wait()
        text = "saved"
    except CheckpointError as error:
        text = str(error)
    seconds = time.monotonic() - started
    assert comm.all_gather_bytes(b"alive", label="alive") == [b"alive"] * comm.world_size, "the comm lives"
    return text, seconds


def save_in_process(path: Path, value: float, async_op: bool, failing: int, *bad: Any) -> tuple[str, float, int]:
    """The same on a rank with a process of its own; the disk of rank `failing` is bad. Also counts its operations."""
    comm = default_comm()
    with failing_disk(*bad) if comm.rank == failing else nullcontext([0]) as done:
        ended = save_on_bad_disk(comm, path, value, async_op)
        folders.wait_for_removals()
    return *ended, done[0]


def disk_errors(folder: Path, async_op: bool, lasting: bool, step: int = 1, ranks: int = 2) -> Counter[str]:
    """A disk that fails at every `step`th operation of a save: all ranks report the cause, nothing is lost or left."""
    code = errno.ENOSPC if lasting else errno.EIO

    def run(path: Path, value: float, number: int) -> tuple[list[tuple[str, float]], bool]:
        with failing_disk(number, code, lasting) as done:
            ended = run_local(save_on_bad_disk, ranks, path, value, async_op)
            folders.wait_for_removals()
        return ended, done[0] <= number

    return _try_operations(folder, step, code, run)


def disk_errors_of_processes(
    folder: Path, world: LocalWorld, async_op: bool, lasting: bool, failing: int, step: int = 1
) -> Counter[str]:
    """The same with ranks in processes of their own, of which one has a bad disk."""
    code = errno.ENOSPC if lasting else errno.EIO

    def run(path: Path, value: float, number: int) -> tuple[list[tuple[str, float]], bool]:
        ended = world.run(save_in_process, path, value, async_op, failing, number, code, lasting, limit=100)
        return [(text, seconds) for text, seconds, _ in ended], ended[failing][2] <= number

    return _try_operations(folder, step, code, run)


def _try_operations(
    folder: Path, step: int, code: int, run: Callable[[Path, float, int], tuple[list[tuple[str, float]], bool]]
) -> Counter[str]:
    found: Counter[str] = Counter(lost=0, left=0)
    for number in range(0, 1000, step):
        path = folder / "disk" / "c"
        shardwise.save(state(1.0), path)
        ended, came_through = run(path, 2.0, number)
        where = f"error {code} at operation {number}: {ended}"
        texts = {text for text, _ in ended}
        assert len(texts) == 1, f"{where}: ranks differ"
        assert texts == {"saved"} or os.strerror(code) in next(iter(texts)), f"{where}: the cause is lost"
        assert max(seconds for _, seconds in ended) < TOLD_SECONDS, where
        value = loaded_value(path)
        assert value == 2.0 if texts == {"saved"} else value in (1.0, 2.0), where
        assert leftovers(path) == [], f"{where}: {[p.name for p in leftovers(path)]} are left"
        found["failed" if texts != {"saved"} else "saved"] += 1
        run(path, 3.0, 1 << 30)
        assert loaded_value(path) == 3.0, f"{where}: the next save comes through"
        folders.wait_for_removals()
        shutil.rmtree(path.parent)
        if came_through:
            return found
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as text, LocalWorld(2, timeout=60.0) as world:
        for async_op in (False, True):
            for lasting in (False, True):
                name = f"{'full' if lasting else 'failing'} disk, {'async' if async_op else 'sync'}"
                print(f"{name}: {dict(disk_errors(Path(text), async_op, lasting, given.step))}", flush=True)
                for failing in (0, 1):
                    found = disk_errors_of_processes(Path(text), world, async_op, lasting, failing, given.step)
                    print(f"{name}, processes, rank {failing}: {dict(found)}", flush=True)


if __name__ == "__main__":
    main()
