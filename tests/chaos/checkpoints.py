"""Are checkpoints safe under kills, replacing saves, bit flips and forged files?

`python -m tests.chaos.checkpoints` (or `make chaos`) runs all parts with the counts that are given; tests call the same
functions with small ones. Each raises an AssertionError at the first thing that is wrong, and returns what it counted.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint import clean, leftovers
from shardwise.checkpoint import commit as folders
from shardwise.checkpoint.store import open_store
from shardwise.checkpoint.verify import find_problems
from tests.killing import die_before

WRITES = ("open", "write", "pwrite", "pwritev", "fsync", "rename", "mkdir")
OPERATIONS = (*WRITES, "unlink", "rmdir")
FORMATS = ("shardwise", "dcp", "hf")


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((6, 4), value), "y": torch.full((5,), value), "value": value}


def loaded_value(path: Path) -> float:
    """The value that a whole checkpoint holds throughout, loaded and verified."""
    into = state(-1.0)
    shardwise.load(into, path)
    value: float = into["value"]
    assert (into["x"] == value).all() and (into["y"] == value).all(), f"{path}: tensors of several saves"
    return value


# Kills: two saves, each killed before one of its operations on the file system.


def save_and_die(path: Path, value: float, before: int, exchange: bool) -> bool:
    """Save in a fork that dies before an operation; whether it came through."""
    child = os.fork()
    if child == 0:
        try:
            if not exchange:
                folders.exchange_folders = lambda one, other: False
            die_before(before, OPERATIONS, [(folders, "exchange_folders")])
            shardwise.save(state(value), path)
            leftovers(path)  # waits until what was replaced is gone
            os._exit(0)
        finally:
            os._exit(1)  # whatever was raised: the program that forked goes on in its own process alone
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def kill_pairs(folder: Path, step: int, exchange: bool, limit: int = 1 << 30) -> Counter[str]:
    """Kill a save at every `step`th operation, and after each a second one; nothing is lost, also by cleaning up."""
    found: Counter[str] = Counter()
    start = folder / "start" / "c"
    shardwise.save(state(1.0), start)
    for first in range(0, 1000, step):
        once = folder / "once" / "c"
        shutil.copytree(start.parent, once.parent)
        came_through = save_and_die(once, 2.0, first, exchange)
        before = loaded_value(once)
        assert before in ((2.0,) if came_through else (1.0, 2.0)), f"after a kill before operation {first}"
        for second in range(0, 1000, step):
            path = folder / "twice" / "c"
            shutil.copytree(once.parent, path.parent)
            ended = save_and_die(path, 3.0, second, exchange)
            where = f"after kills before operations {first} and {second}"
            value = loaded_value(path)
            assert value == 3.0 if ended else value in (before, 3.0), f"{where}: {value} after {before}"
            clean(path)
            assert loaded_value(path) == value and leftovers(path) == [], f"{where}, cleaned"
            shutil.rmtree(path.parent)
            found["pairs"] += 1
            found["lost"] += 0
            if ended or found["pairs"] >= limit:
                break
        shutil.rmtree(once.parent)
        if came_through or found["pairs"] >= limit:
            break
    return found


# Loads beside a saver that replaces the checkpoint in place.


def run_saver(path: Path, format: str) -> None:
    """Replace a checkpoint again and again, until this process is killed."""
    value = 1.0
    while True:
        value += 1
        given = state(value)
        if format == "hf":
            given = {"x": given["x"], "y": given["y"]}
        try:
            shardwise.save(given, path, format=format)
        except CheckpointError as error:
            assert " is running (" in str(error), error


@contextmanager
def running_saver(path: Path, format: str = "shardwise") -> Iterator[None]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.chaos.checkpoints", "--saver", str(path), format]
    process = subprocess.Popen(command, env=environment)
    try:
        first = _identity(path)
        deadline = time.monotonic() + 120
        while _identity(path) == first and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
        assert process.poll() is None, "the saver ended"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _identity(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def load_once(comm: Comm, path: Path) -> float:
    into: dict[str, Any] = {**state(-1.0), "x": shardwise.full(ChunkSpec(0, comm.world_size), (6, 4), -1.0)}
    shardwise.load(into, path)
    value: float = into["value"]
    assert all((part == value).all() for part in into["x"].local_tensors()) and (into["y"] == value).all(), "mixed"
    return value


def open_once(path: Path) -> float:
    with shardwise.open(path) as opened:
        value = opened.values()["value"]
        time.sleep(0.001)
        assert (opened["x"].read() == value).all() and (opened["y"][1:] == value).all(), "mixed"
        return float(value)  # type: ignore[arg-type]  # it is a float


def load_tensors(path: Path) -> float:
    into = {"x": torch.zeros(6, 4), "y": torch.zeros(5)}
    shardwise.load(into, path)
    values = {*into["x"].flatten().tolist(), *into["y"].tolist()}
    assert len(values) == 1, f"mixed: {values}"
    return float(values.pop())


def loads_of_tensors_beside_a_saver(folder: Path, count: int) -> Counter[str]:
    """The same for a Hugging Face folder, which has no checksums to tell two saves apart."""
    path = folder / "tensors" / "c"
    shardwise.save_hf({"x": torch.ones(6, 4), "y": torch.ones(5)}, path)
    with running_saver(path, "hf"):
        seen = {load_tensors(path) for _ in range(count)}
    shutil.rmtree(path.parent)
    return Counter({"mixed": 0, "loads": count, "saves seen": len(seen)})


def loads_beside_a_saver(folder: Path, count: int) -> Counter[str]:
    """Verified loads on one and two ranks, and opens, while a saver replaces the checkpoint; never two saves in one."""
    path = folder / "beside" / "c"
    shardwise.save(state(1.0), path)
    found: Counter[str] = Counter(mixed=0)
    seen = set()
    with running_saver(path):
        for number in range(count):
            if number % 4 == 0:
                value = max(run_local(load_once, 2, path))
            else:
                value = loaded_value(path) if number % 2 else open_once(path)
            seen.add(value)
            found["loads"] += 1
    found["saves seen"] = len(seen)
    shutil.rmtree(path.parent)
    return found


# Bits that flip.


def cleans_beside_savers(folder: Path, count: int) -> Counter[str]:
    """Clean up after, and save to, a path that another process saves to; one writes at a time, and nothing is lost."""
    found: Counter[str] = Counter()
    path = folder / "c"
    shardwise.save(state(1.0), path)
    seen: set[float] = set()

    def attempt(what: str, work: Callable[[], object]) -> None:
        try:
            work()
            found[what] += 1
        except CheckpointError as error:
            assert " is running (" in str(error), error
            found["refused"] += 1

    with running_saver(path):
        for number in range(count):
            attempt("cleaned", lambda: clean(path))
            attempt("saved", partial(shardwise.save, state(-2.0 - number), path))
            seen.add(loaded_value(path))
    found["saves seen"] = len(seen)
    last = loaded_value(path)
    clean(path)
    assert leftovers(path) == [] and loaded_value(path) == last, "after the last kill"
    return found


def example(folder: Path, format: str) -> Path:
    """A small checkpoint of a format, written by two ranks."""
    path = folder / f"good-{format}"
    if not path.exists():
        run_local(_save_example, 2, path, format)
    return path


def _save_example(comm: Comm, path: Path, format: str) -> None:
    x = shardwise.shard(torch.arange(24.0).reshape(6, 4), ChunkSpec(0, 2))
    values = {} if format == "hf" else {"lr": 0.125, "betas": (0.5, 0.75), "name": "adam", "steps": [1, 2]}
    shardwise.save({"x": x, "y": torch.arange(5), **values}, path, format=format)


def read_all(path: Path) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Everything in a checkpoint, after it was found right."""
    store = open_store(path)
    try:
        problems = [str(problem) for problem in find_problems(store)]
        if problems:
            raise CheckpointError(problems[0])
        opaque = store.index.opaque
    finally:
        store.close()
    with shardwise.open(path) as opened:
        return {name: opened[name].read() for name in opened}, opened.values(), opaque


def same(one: Any, other: Any) -> bool:
    tensors = one[0].keys() == other[0].keys() and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one[0].values(), other[0].values(), strict=True)
    )
    return tensors and one[1:] == other[1:]


def bit_flips(folder: Path, format: str, count: int, seed: int = 0) -> Counter[str]:
    """Flip single bits of the files of a checkpoint; each is reported, or changes nothing that is read.

    In a Hugging Face folder flips of elements are not noticed: the format has no checksums.
    """
    good = example(folder, format)
    expected = read_all(good)
    files = sorted(p for p in good.iterdir())
    chance = random.Random(seed)
    found: Counter[str] = Counter(silent=0)
    for _ in range(count):
        file = chance.choice(files)
        data = bytearray(file.read_bytes())
        at = chance.randrange(len(data))
        plain = bytes(data)
        data[at] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        try:
            unchanged = same(read_all(good), expected)
            found["harmless" if unchanged else "silent"] += 1
            assert unchanged or format == "hf", f"{file.name}: a flip at byte {at} is not noticed"
        except CheckpointError:
            found["found"] += 1
        finally:
            file.write_bytes(plain)
    return found


# Forged files.

PICKLE_PARTS = [
    b"",
    b"N",
    b"0",
    b"]",
    b"}",
    b")",
    b"b",
    b"R",
    b"K\xff",
    b"(",
    b"2",
    b"\x86",
    b"h\x00",
    b"t",
    b"u",
    b"\x8e",
]
JSON_PARTS = [b"", b"0", b"-1", b"1e9", b"30000000", b"9" * 30, b"[]", b"{}", b"null", b'"a"', b"[[", b"]", b",", b'"']


def mutate(data: bytes, chance: random.Random, parts: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            some = chance.randrange(len(changed) + 1)
            changed[at:at] = changed[some : some + chance.randint(1, 60)]
        else:
            changed[at : at + chance.choice((0, 0, 1, 2, 8))] = chance.choice(parts)
    return bytes(changed)


def forged_index(data: bytes, chance: random.Random) -> bytes:
    """An index of shardwise with a number or text changed, without its checksum: whoever forges can forge that too."""
    body = data[: data.rindex(b',"index_sum"')] + b"}"
    return mutate(body, chance, JSON_PARTS)


def fuzz(folder: Path, format: str, count: int, seed: int = 0, seconds: float = 2.0) -> Counter[str]:
    """Open and read forged folders: errors of ours or a checkpoint, in bounded time and memory."""
    good = example(folder, format)
    path = folder / f"forged-{format}"
    shutil.copytree(good, path)
    files = sorted(p for p in path.iterdir())
    plain = {file: file.read_bytes() for file in files}
    chance = random.Random(seed)
    found: Counter[str] = Counter(raw=0)
    most = sum(map(len, plain.values()))
    allowed = _resident_peak() + (64 << 20) + 10 * most
    for number in range(count):
        file = chance.choice(files)
        if file.name == "shardwise.index.json":
            data = forged_index(plain[file], chance)
        else:
            data = mutate(plain[file], chance, JSON_PARTS if file.suffix == ".json" else PICKLE_PARTS)
        file.write_bytes(data)
        started = time.process_time()
        try:
            read_all(path)
            found["read"] += 1
        except CheckpointError as error:
            assert len(str(error)) < 5000, "an error that prints the file"
            found["refused"] += 1
        spent = time.process_time() - started
        assert spent < seconds, f"case {number} of seed {seed}, {file.name}: {spent:.1f} s"
        assert _resident_peak() < allowed, f"case {number} of seed {seed}, {file.name}: {_resident_peak() >> 20} MiB"
        file.write_bytes(plain[file])
    shutil.rmtree(path)
    return found


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saver", nargs=2)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--loads", type=int, default=10_000)
    parser.add_argument("--flips", type=int, default=5000)
    parser.add_argument("--fuzz", type=int, default=30_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.saver:
        run_saver(Path(given.saver[0]), given.saver[1])
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        parts: list[tuple[str, Callable[[], Counter[str]]]] = [
            ("kills, swapped names", lambda: kill_pairs(folder / "a", 1, True, given.pairs)),
            ("kills, two renames", lambda: kill_pairs(folder / "b", 1, False, given.pairs)),
            ("loads beside a saver", lambda: loads_beside_a_saver(folder, given.loads)),
            ("clean and saves beside a saver", lambda: cleans_beside_savers(folder / "c", given.loads // 10)),
            ("loads beside a saver, hf", lambda: loads_of_tensors_beside_a_saver(folder, given.loads // 10)),
        ]
        for kind in FORMATS:
            parts.append((f"bit flips, {kind}", lambda kind=kind: bit_flips(folder, kind, given.flips)))  # type: ignore[misc]
            parts.append((f"forged files, {kind}", lambda kind=kind: fuzz(folder, kind, given.fuzz)))  # type: ignore[misc]
        for name, part in parts:
            started = time.monotonic()
            counts = part()
            print(f"{name}: {dict(counts)}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
