"""Does a program that moves, trains, saves and loads for long keep its memory, descriptors, threads and files flat?

`python -m tests.chaos.soak --minutes 30` runs two ranks; a test runs some seconds. Each result is compared with what it
must be. Samples are taken after a collection of garbage; the last ones must not be above the first, which come after a
fifth of the time, when caches are filled.

`--lengths 20000` runs a step on so many lengths, each of which is new, and the same step of torch alone: what it keeps
beyond that is flat.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import re
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise import ChunkSpec, Mesh, MeshSpec, Partial, Replicate, Shard, ShardedTensor
from shardwise.checkpoint import leftovers
from shardwise.comm import Comm, LocalWorld, default_comm
from tests.moving import local_parts, same_bytes

SHAPES = ((64, 48), (33, 70), (5, 8, 6), (1000,), (257, 129))
SAMPLES = 20
MORE_MEMORY = 24 << 20  # what the allocator and page sizes of one run differ by

MORE_MEMORY_OF_LENGTHS = 50 << 20  # than torch alone keeps


@dataclass(frozen=True)
class Held:
    """What a process holds: bytes of memory, open files, threads, segments of shared memory, temporary files."""

    memory: int
    files: int
    threads: int
    shared: int
    temporary: int


def look(folder: Path) -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    own = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")  # not those of tests that run beside this one
    mine = [name for name in os.listdir("/dev/shm") if own.search(name)]
    files = [name for name in os.listdir(folder) if name.startswith(".")]
    return Held(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(mine),
        len(files),
    )


class Soak:
    """The operations of one rank; all ranks draw the same ones."""

    def __init__(self, comm: Comm, folder: Path, seed: int) -> None:
        self.comm, self.folder, self.chance = comm, folder, random.Random(seed)
        mesh = Mesh.of(tp=comm.world_size)
        self.specs = [ChunkSpec(0, comm.world_size), MeshSpec(mesh, (Shard(0),)), MeshSpec(mesh, (Replicate(),))]
        torch.manual_seed(0)
        self.weight = shardwise.shard(torch.randn(32, 16), MeshSpec(mesh, (Shard(0),)), None, comm=comm)
        self.weight.requires_grad_()
        self.optimizer = torch.optim.AdamW([self.weight], lr=1e-3)
        self.partial = MeshSpec(mesh, (Partial("sum"),))

    def tensor(self) -> tuple[ShardedTensor, torch.Tensor]:
        shape, number = self.chance.choice(SHAPES), self.chance.randrange(100)
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + number
        layout = self.chance.choice(self.specs).layout(shape)
        return shardwise.from_local(local_parts(layout, self.comm.rank, whole), layout, comm=self.comm), whole

    def check(self, moved: ShardedTensor, whole: torch.Tensor) -> None:
        wanted = local_parts(moved.sharding, self.comm.rank, whole)
        assert all(map(same_bytes, moved.local_tensors(), wanted)), "wrong data"

    def move(self) -> None:
        x, whole = self.tensor()
        limit = self.chance.choice((None, 4096))
        self.check(x.redistribute(self.chance.choice(self.specs), max_buffer_bytes=limit), whole)

    def move_in_background(self) -> None:
        x, whole = self.tensor()
        self.check(x.redistribute(self.chance.choice(self.specs), async_op=True).wait(), whole)

    def reduce(self) -> None:
        x, whole = self.tensor()
        self.check(x.redistribute(self.partial).redistribute(self.chance.choice(self.specs)), whole)

    def compute(self) -> None:
        x, whole = self.tensor()
        assert float((x.double() * 2).sum().full()) == float((whole.double() * 2).sum()), "wrong sum"

    def step(self) -> None:
        batch = torch.ones(self.chance.choice((4, 8)), 16)
        loss = torch.nn.functional.linear(shardwise.shard(batch, self.specs[2], None, comm=self.comm), self.weight)
        loss.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        x, whole = self.tensor()
        saving = shardwise.save({"x": x, "n": 1}, self.folder / "c", async_op=self.chance.random() < 0.5)
        if saving is not None:
            saving.wait()
        shape = tuple(whole.shape)
        into: dict[str, Any] = {"x": shardwise.zeros(self.chance.choice(self.specs), shape), "n": 0}
        shardwise.load(into, self.folder / "c")
        self.check(into["x"], whole)

    def look(self) -> Held:
        """A sample, once no rank removes in the background what a save has replaced."""
        leftovers(self.folder / "c")
        self.comm.barrier(label="nothing is being removed")
        held = look(self.folder)
        self.comm.barrier(label="all ranks have looked")
        return held


def soak_rank(seconds: float, folder: Path, seed: int) -> tuple[int, list[Held]]:
    """Random operations for so long; how many, and samples."""
    soak = Soak(default_comm(), folder, seed)
    calls = [soak.move, soak.move_in_background, soak.reduce, soak.compute, soak.step, soak.save]
    samples: list[Held] = []
    started, done = time.monotonic(), 0
    while True:
        for _ in range(20):
            soak.chance.choice(calls)()
            done += 1
        spent = torch.tensor([time.monotonic() - started])
        soak.comm.broadcast(spent, 0, label="time").wait()  # all ranks end together
        if float(spent) >= seconds * (len(samples) + 1) / SAMPLES:
            samples.append(soak.look())
        if float(spent) >= seconds:
            return done, samples


def find_growth(samples: list[Held]) -> list[str]:
    """What is larger at the end than after a fifth of the time."""
    early, late = samples[len(samples) // 5 : len(samples) // 2], samples[-3:]
    found = []
    for place, name in enumerate(("memory", "files", "threads", "shared", "temporary")):
        before, after = max(astuple(s)[place] for s in early), min(astuple(s)[place] for s in late)
        if after > before + (MORE_MEMORY if name == "memory" else 0):
            found.append(f"{name}: {before} -> {after}")
    return found


def run_soak(seconds: float, seed: int = 0) -> tuple[int, list[list[Held]]]:
    """Two ranks for so long: the number of operations, and each rank's samples."""
    with tempfile.TemporaryDirectory() as folder, LocalWorld(2, timeout=60.0) as world:
        ended = world.run(soak_rank, seconds, Path(folder), seed, limit=seconds + 300)
    return ended[0][0], [samples for _, samples in ended]


def trim() -> None:
    """Let the allocator give back what it keeps for later: much after ever-new lengths, of torch alone as well."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def run_lengths(count: int, is_sharded: bool) -> list[int]:
    """Steps of this process alone on ever-new lengths: memory after a twentieth of them, a tenth and so on."""
    mesh = MeshSpec(Mesh.of(tp=1), (Shard(0),))
    weight: Any = torch.ones(16, 16)
    if is_sharded:
        weight = shardwise.shard(weight, MeshSpec(Mesh.of(tp=1), (Replicate(),)))
    weight.requires_grad_()
    samples: list[int] = []
    for number in range(count):
        rows = torch.ones(2 * number + 100, 16)
        x: Any = shardwise.shard(rows, mesh) if is_sharded else rows
        y = torch.softmax(torch.nn.functional.gelu(torch.nn.functional.linear(x, weight)) * 2 + x, -1)
        y.reshape(2, -1, 16).transpose(0, 1)[1:].sum(0).square().mean().backward()
        weight.grad = None
        if number in (count // 20, *range(count // 10, count, count // 10), count - 1):
            trim()
            samples.append(look(Path("/tmp")).memory)
    return samples


def compare_lengths(count: int) -> int:
    """What steps on so many lengths keep beyond those of torch alone, in bytes; printed as well."""
    with LocalWorld(1, timeout=60.0) as world:
        ours = world.run(run_lengths, count, True, limit=count)[0]
    with LocalWorld(1, timeout=60.0) as world:
        plain = world.run(run_lengths, count, False, limit=count)[0]
    beyond = [(own - ours[0]) - (other - plain[0]) for own, other in zip(ours, plain, strict=True)]
    for name, row in (("shardwise", ours), ("torch", plain), ("beyond torch, since the start", beyond)):
        print(f"{name}: {' '.join(f'{value / 2**20:.0f}' for value in row)} MiB", flush=True)
    return max(beyond)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--lengths", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.lengths:
        sys.exit(compare_lengths(given.lengths) > MORE_MEMORY_OF_LENGTHS)
    count, ranks = run_soak(60 * given.minutes, given.seed)
    print(f"soak: {count} operations in {given.minutes:g} minutes", flush=True)
    for rank, samples in enumerate(ranks):
        first, last = samples[len(samples) // 5], samples[-1]
        print(f"rank {rank}: {first} -> {last}; growth: {find_growth(samples) or 'none'}", flush=True)
    sys.exit(any(map(find_growth, ranks)))


if __name__ == "__main__":
    main()
