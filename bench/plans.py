"""Section "plans": how does the time to plan a transfer grow with the number of ranks and routes?

Every run starts from specs: the layouts are made anew, since the time to make them is part of a first plan.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isqrt

import numpy as np
import numpy.typing as npt

from bench.memory import Peak
from bench.report import Cell, Figures, bar
from bench.timing import Contender, medians
from shardwise.geometry import ChunkSpec, EnumerableSpec, Layout, Mesh, MeshSpec, Shard, ShardingSpec, parse_spec
from shardwise.transfer import Topology, Transfer, plan_transfer

SIDE = 65_536
ITEMSIZE = 4
MB = 1e6
Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlanBenchSizes:
    """Numbers of ranks (squares), and runs of each."""

    ranks: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    repeats: int = 5
    meshes: tuple[str, ...] = ("x=16384", "a=128,b=128", "a=16,b=32,c=32")
    pairs: int = 100
    tensors: int = 1000


TINY = PlanBenchSizes(ranks=(4, 16), repeats=1, meshes=("x=4", "a=2,b=2"), pairs=3, tensors=3)
HOSTS = Topology(ranks_per_host=8)


def make_regular_specs(ranks: int) -> tuple[ShardingSpec, ShardingSpec]:
    """Rows over all ranks, and blocks over a square mesh of the same ranks."""
    side = isqrt(ranks)
    assert side * side == ranks, f"{ranks} ranks make no square mesh"
    return ChunkSpec(0, ranks), MeshSpec(Mesh.of(a=side, b=side), (Shard(0), Shard(1)))


def make_irregular_specs(ranks: int) -> tuple[ShardingSpec, ShardingSpec]:
    """Bands of rows, each cut into columns of its own, and the same turned around; one piece for each rank."""
    rng = np.random.default_rng(ranks)
    rows, columns = _bands(isqrt(ranks), rng), _bands(isqrt(ranks), rng)
    holders = np.arange(ranks)
    turned = (columns[0][:, ::-1], columns[1][:, ::-1])
    return EnumerableSpec.from_arrays(*rows, holders), EnumerableSpec.from_arrays(*turned, rng.permutation(holders))


def _bands(side: int, rng: np.random.Generator) -> tuple[Array, Array]:
    heights = _cuts(side, rng)
    offsets, sizes = [], []
    for top, height in zip(np.cumsum(heights) - heights, heights, strict=True):
        widths = _cuts(side, rng)
        offsets.append(np.stack([np.full(side, top), np.cumsum(widths) - widths], axis=1))
        sizes.append(np.stack([np.full(side, height), widths], axis=1))
    return np.concatenate(offsets), np.concatenate(sizes)


def _cuts(count: int, rng: np.random.Generator) -> Array:
    """Random lengths of at least 1 that add up to the side of the tensor."""
    inner = np.sort(rng.choice(np.arange(1, SIDE), size=count - 1, replace=False))
    return np.diff(np.concatenate([[0], inner, [SIDE]]))


def _plan(specs: tuple[ShardingSpec, ShardingSpec], rank: int | None = None) -> Transfer:
    src, dst = (spec.layout((SIDE, SIDE)) for spec in specs)
    return plan_transfer(src, dst, itemsize=ITEMSIZE, rank=rank)


def _part(specs: tuple[ShardingSpec, ShardingSpec], _: object) -> Transfer:
    return _plan(specs, rank=1)


def _measure(prepared: tuple[ShardingSpec, ShardingSpec], repeats: int) -> tuple[float, float, int, float | None]:
    """Seconds of the whole plan and of one rank's part, the number of routes, and MB at the peak."""
    whole = Contender("whole", lambda _: _plan(prepared))
    part = Contender("part", partial(_part, prepared))
    times = medians([whole, part], repeats)
    peak = Peak()
    transfer = _plan(prepared)
    grown = peak.grown()
    routes = sum(len(step.routes) + len(step.copies) for step in transfer.steps)
    return times["whole"], times["part"], routes, None if grown is None else grown / MB


def _growth(title: str, pair: Callable[[int], tuple[ShardingSpec, ShardingSpec]], sizes: PlanBenchSizes) -> Figures:
    found = [(n, *_measure(pair(n), sizes.repeats)) for n in sizes.ranks]
    longest = max(whole for _, whole, *_ in found)
    rows: list[list[Cell]] = []
    for n, whole, part, routes, peak in found:
        rows.append([n, routes, whole * 1e3, whole / routes * 1e6, part * 1e3, peak, bar(whole, longest)])
    columns = ["ranks", "routes", "whole plan, ms", "us per route", "one rank's part, ms", "peak memory, MB", "time"]
    return Figures(title, columns, rows, ["Routes include copies within a rank. Layouts are made anew in every run."])


def _known_layouts(sizes: PlanBenchSizes) -> Figures:
    """One rank's part where the layouts exist already, as in a program that plans many tensors."""
    rows: list[list[Cell]] = []
    for n in sizes.ranks:
        specs = make_regular_specs(n)
        kept: list[Layout] = [spec.layout((SIDE, SIDE)) for spec in specs]
        times = medians([Contender("part", partial(_part, specs))], sizes.repeats)
        rows.append([len(kept[0].ranks), times["part"] * 1e3])
    return Figures("One rank's part, layouts known", ["ranks", "ms"], rows)


def _regular_pairs(sizes: PlanBenchSizes) -> Figures:
    """Plans, their figures and their printed table between meshes with S(0), S(1), R and P on each axis."""
    rows: list[list[Cell]] = []
    for mesh in sizes.meshes:
        axes = mesh.count("=")
        texts = [", ".join(each) for each in itertools.product(("S(0)", "S(1)", "R", "P"), repeat=axes)]
        every = list(itertools.product(texts, repeat=2))
        chosen = random.Random(0).sample(every, min(sizes.pairs, len(every)))
        for limit in (None, 1 << 28):
            found = [_plan_pair(mesh, one, other, limit) for one, other in chosen]
            times, peaks = (list(column) for column in zip(*found, strict=True))
            label = "none" if limit is None else f"{limit >> 20} MiB"
            slow = f"{' -> '.join(chosen[times.index(max(times))])}"
            middle = sorted(times)[len(times) // 2]
            rows.append([mesh, label, len(chosen), middle * 1e3, max(times) * 1e3, slow, max(peaks) / MB])
    columns = [
        "mesh",
        "buffer limit",
        "pairs",
        "median, ms of CPU",
        "slowest, ms of CPU",
        "slowest pair",
        "peak memory, MB",
    ]
    return Figures("Plans and printed tables between regular layouts of many ranks", columns, rows)


def _plan_pair(mesh: str, one: str, other: str, limit: int | None) -> tuple[float, float]:
    """Seconds of CPU and the bytes at the peak of one plan, its table and its estimate."""
    peak, started = Peak(), time.process_time()
    src, dst = (parse_spec(f"on {mesh}: {text}").layout((SIDE, SIDE)) for text in (one, other))
    transfer = plan_transfer(src, dst, itemsize=ITEMSIZE, topology=HOSTS, max_buffer_bytes=limit)
    assert str(transfer) and transfer.estimate(HOSTS) >= 0
    return time.process_time() - started, float(peak.grown() or 0)


def _many_tensors(sizes: PlanBenchSizes) -> Figures:
    """Plans of many tensors, each of its own shape, and the bytes that they move."""
    rows: list[list[Cell]] = []
    for mesh in sizes.meshes[:2]:
        one, other = ("S(0)", "S(1)") if "," not in mesh else ("S(0), R", "S(1), S(1)")
        specs = [parse_spec(f"on {mesh}: {text}") for text in (one, other)]
        started = time.process_time()
        moved = 0
        for number in range(sizes.tensors):
            src, dst = (spec.layout((SIDE + 64 * number, SIDE // 4)) for spec in specs)
            moved += plan_transfer(src, dst, itemsize=ITEMSIZE).moved_bytes
        assert moved > 0
        rows.append([mesh, f"{one} -> {other}", sizes.tensors, time.process_time() - started])
    return Figures("Plans of many tensors of different shapes", ["mesh", "pair", "tensors", "s of CPU"], rows)


def run(sizes: PlanBenchSizes) -> list[Figures]:
    """The growth for regular and irregular layouts."""
    shape = f"shape ({SIDE:,}, {SIDE:,})"
    return [
        _growth(
            f"Shard(0) over N ranks -> [Shard(0), Shard(1)] over a square mesh, {shape}", make_regular_specs, sizes
        ),
        _known_layouts(sizes),
        _regular_pairs(sizes),
        _many_tensors(sizes),
        _growth(f"N irregular pieces -> N other irregular pieces, {shape}", make_irregular_specs, sizes),
    ]
