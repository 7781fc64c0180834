"""Section "estimates": are estimated steps those that are measured? Calibrated in one world, measured in another.

1. `calibrate` measures links and products between 2 ranks and between 4; moves that it has not seen are compared with
   their estimates.
2. Twelve plans of a small transformer and of a layer of experts, at one batch of all ranks together, make steps of
   forward and backward, eager and compiled. A step takes as long as on its slowest rank.
3. Memory: the most that a rank holds during a step, beyond what it held before the model was made.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from bench.report import Cell, Figures
from shardwise import Mesh, ModelPlan, parse_layout, shard_module
from shardwise.comm import LocalWorld, default_comm
from shardwise.planner import Estimate, estimate
from shardwise.planner.calibrate import Calibration, MoveSample, calibrate
from shardwise.planner.estimate import batch_for

MB = 1e6


@dataclass(frozen=True)
class EstimateBenchSizes:
    """The transformer, the batch of all ranks together, and how often."""

    width: int = 256
    blocks: int = 4
    words: int = 2048
    sequences: int = 8
    length: int = 128
    repeats: int = 11
    plans: int = 12
    worlds: tuple[int, ...] = (2, 4)
    backend: str = "inductor"


TINY = EstimateBenchSizes(32, 1, 64, 4, 8, 1, 1, (2,), "aot_eager")


class Block(nn.Module):
    """A block of a transformer with 4 heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).view(*x.shape[:2], 4, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Four experts, each of which computes all tokens; their results are weighted and summed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        shares = torch.softmax(self.gate(tokens), -1)
        found = torch.bmm(F.gelu(torch.bmm(tokens.expand(4, *tokens.shape), self.up)), self.down)
        return (found * shares.t().unsqueeze(-1)).sum(0).view(x.shape)


class Net(nn.Module):
    """Embedding, blocks or experts, head."""

    def __init__(self, sizes: EstimateBenchSizes, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.words, sizes.width)
        self.blocks = nn.ModuleList((Experts if experts else Block)(sizes.width) for _ in range(sizes.blocks))
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


ROWS, COLUMNS, TABLES = "blocks.*.{q,k,v,up}.*", "blocks.*.{o,down}.weight", "{embed,head}.weight"
TENSOR = {ROWS: "tp: S(0)", COLUMNS: "tp: S(1)"}
WEIGHTS = ("blocks.*.{q,k,v,o,up,down}.weight", TABLES)


def make_plans() -> dict[str, tuple[ModelPlan, bool]]:
    """Plans by name, and whether they are for the experts."""
    fully = dict.fromkeys(WEIGHTS, "S(0)")
    both = {"blocks.*.{q,k,v,up}.weight": "fsdp: S(1), tp: S(0)", COLUMNS: "fsdp: S(0), tp: S(1)", TABLES: "fsdp: S(0)"}
    dp, whole = "dp: S(0)", "replicated"
    found = {
        "tp=2": ModelPlan(Mesh.of(tp=2), TENSOR, input_plan=whole),
        "tp=2, vocabulary": ModelPlan(Mesh.of(tp=2), {**TENSOR, TABLES: "S(0)"}, input_plan=whole),
        "tp=2, sequence": ModelPlan(Mesh.of(tp=2), TENSOR, input_plan=whole, activations="tp: S(1)"),
        "dp=2": ModelPlan(Mesh.of(dp=2), {}, input_plan=dp),
        "fsdp=2": ModelPlan(Mesh.of(dp=2), fully, input_plan=dp, reshard_after_forward=True),
        "tp=4": ModelPlan(Mesh.of(tp=4), TENSOR, input_plan=whole),
        "dp=4": ModelPlan(Mesh.of(dp=4), {}, input_plan=dp),
        "fsdp=4": ModelPlan(Mesh.of(dp=4), fully, input_plan=dp, reshard_after_forward=True),
        "fsdp=4, kept": ModelPlan(Mesh.of(dp=4), fully, input_plan=dp, reshard_after_forward=False),
        "dp=2,tp=2": ModelPlan(Mesh.of(dp=2, tp=2), TENSOR, input_plan=dp),
        "fsdp=2,tp=2": ModelPlan(Mesh.of(fsdp=2, tp=2), both, input_plan="fsdp: S(0)", reshard_after_forward=True),
    }
    experts = ModelPlan(Mesh.of(ep=4), {"blocks.*.{up,down}": "ep: S(0)"}, input_plan=whole)
    return {**{name: (plan, False) for name, plan in found.items()}, "ep=4": (experts, True)}


def run(sizes: EstimateBenchSizes) -> list[Figures]:
    """The tables: moves, steps, and how well the figures agree."""
    rows: list[list[Cell]] = []
    moves: list[list[Cell]] = []
    for ranks in sizes.worlds:
        with LocalWorld(ranks, timeout=300.0) as world:
            made = world.run(calibrate_one_thread, 3 if sizes.plans == 1 else 15)[0]
        with LocalWorld(ranks, timeout=300.0) as world:
            moves += _move_rows(world, made, sizes)
            chosen = [(n, *p) for n, p in make_plans().items() if p[0].mesh.size == ranks][: sizes.plans]
            for name, plan, experts in chosen:
                for compiled in (False, True):
                    found = world.run(measure_step, plan, experts, compiled, sizes)
                    seconds = median(max(turn) for turn in zip(*(own for own, _ in found), strict=True))
                    guess = estimate_step(plan, experts, compiled, made, sizes)
                    peak = max(nbytes for _, nbytes in found)
                    way = "compiled" if compiled else "eager"
                    times = (guess.step_seconds * 1000, seconds * 1000, guess.step_seconds / seconds)
                    memory = (guess.peak_bytes / MB, peak / MB, guess.peak_bytes / max(peak, 1))
                    parts = guess.compute_seconds * 1000, guess.communication_seconds * 1000
                    rows.append([name, way, *times, *parts, *memory])
    columns = ["plan", "way", "estimate, ms", "measured, ms", "ratio", "computing, ms", "moving, ms"]
    columns += ["peak: estimate, MB", "measured, MB", "ratio"]
    return [
        Figures("Moves that were not calibrated with", ["move", "estimate, ms", "measured, ms", "ratio"], moves),
        Figures("Steps: forward and backward", columns, rows),
        _agreement(rows, moves),
    ]


def calibrate_one_thread(repeats: int) -> Calibration:
    """What is measured with as many threads as the steps have."""
    torch.set_num_threads(1)
    return calibrate(None, repeats)


def _agreement(rows: Sequence[Sequence[Any]], moves: Sequence[Sequence[Any]]) -> Figures:
    found: list[list[Cell]] = [_agree("moves", [float(row[3]) for row in moves], None)]
    for way in ("eager", "compiled"):
        own = [row for row in rows if row[1] == way]
        found.append(
            _agree(f"steps, {way}", [float(row[4]) for row in own], kendall_tau([(row[2], row[3]) for row in own]))
        )
    found.append(_agree("peak memory, eager", [float(row[9]) for row in rows if row[1] == "eager"], None))
    columns = ["figure", "median error", "worst error", "within 25 %", "Kendall tau"]
    return Figures("Agreement: error is the ratio's distance from 1", columns, found)


def _agree(name: str, ratios: Sequence[float], tau: float | None) -> list[Cell]:
    errors = [abs(ratio - 1) for ratio in ratios]
    return [name, median(errors), max(errors), f"{sum(e <= 0.25 for e in errors)} of {len(errors)}", tau]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """How well two orders agree: 1 for the same, -1 for the opposite.

    >>> kendall_tau([(1, 10), (2, 20), (3, 15)])
    0.3333333333333333
    """
    signs = [(a - c) * (b - d) for i, (a, b) in enumerate(pairs) for c, d in pairs[:i]]
    return sum((s > 0) - (s < 0) for s in signs) / max(1, len(signs))


def estimate_step(
    plan: ModelPlan, experts: bool, compiled: bool, made: Calibration, sizes: EstimateBenchSizes
) -> Estimate:
    """What a step of the net should take by what was measured."""
    with torch.device("meta"):
        net = Net(sizes, experts)
    return estimate(
        net,
        plan,
        batch=batch_for(plan, sizes.sequences) if plan.input_placements is not None else sizes.sequences,
        sequence=sizes.length,
        optimizer="none",
        inputs=(torch.zeros(_local_sequences(plan, sizes), sizes.length, dtype=torch.int64, device="meta"),),
        topology=made.topology,
        device=made.device,
        compiled=compiled,
    )


def _local_sequences(plan: ModelPlan, sizes: EstimateBenchSizes) -> int:
    """What a rank passes: its part of the batch where the plan cuts it."""
    return sizes.sequences // math.prod(
        size for placed, size in zip(plan.input_placements or (), plan.mesh.shape, strict=False) if placed.is_shard(0)
    )


def measure_step(plan: ModelPlan, experts: bool, compiled: bool, sizes: EstimateBenchSizes) -> tuple[list[float], int]:
    """Seconds of each step on this rank, and the most bytes that it held."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = default_comm()
    small = shard_module(Net(replace(TINY, blocks=sizes.blocks), experts), plan)
    small(torch.zeros(TINY.sequences, TINY.length, dtype=torch.int64)).sum().backward()  # loads what every step needs
    del small
    gc.collect()
    before = _memory("VmRSS")
    net = shard_module(Net(sizes, experts), plan)
    step = make_step(net, plan, sizes, compiled)
    for _ in range(3):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    spans = []
    for _ in range(sizes.repeats):
        comm.barrier(label="step")
        start = time.perf_counter()
        step()
        spans.append(time.perf_counter() - start)
    return spans, _memory("VmHWM") - before


def make_step(net: nn.Module, plan: ModelPlan, sizes: EstimateBenchSizes, compiled: bool = False) -> Callable[[], None]:
    """Forward and backward of a sharded net."""
    ids = torch.arange(_local_sequences(plan, sizes) * sizes.length).reshape(-1, sizes.length) % sizes.words
    forward: Callable[[Tensor], Any] = shardwise.compile(net, backend=sizes.backend) if compiled else net

    def step() -> None:
        forward(ids).sum().backward()
        for parameter in net.parameters():
            parameter.grad = None

    return step


def _memory(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _move_rows(world: LocalWorld, made: Calibration, sizes: EstimateBenchSizes) -> list[list[Cell]]:
    ranks, side = len(world.run(_rank)), 1024 if sizes.plans > 1 else 64
    axis, large, small = f"on x={ranks}:", f"f32[{side},{side * 2}]", f"f32[{side // 8},{side}]"
    kinds = (("S(1)", "S(0)"), ("S(1)", "R"), ("P", "S(1)"), ("P", "R"))
    moves = [(f"{tensor} {axis} {a}", f"{axis} {b}") for tensor in (large, small) for a, b in kinds]
    if ranks == 4:
        grids = (("S(0), S(1)", "S(1), S(0)"), ("P, S(0)", "R, S(0)"))
        moves += [(f"{large} on a=2,b=2: {a}", f"on a=2,b=2: {b}") for a, b in grids]
    found = world.run(_time_moves, moves, sizes.repeats)
    rows: list[list[Cell]] = []
    for number, (src, dst) in enumerate(moves):
        seconds = median(max(turn) for turn in zip(*(own[number] for own in found), strict=True))
        guess = MoveSample(src, dst, seconds).transfer().estimate(made.topology)
        rows.append([f"{src} -> {dst.partition(': ')[2]}", guess * 1000, seconds * 1000, guess / seconds])
    return rows


def _rank() -> int:
    return default_comm().rank


def _time_moves(moves: Sequence[tuple[str, str]], repeats: int) -> list[list[float]]:
    torch.set_num_threads(1)
    comm, spans = default_comm(), []
    for src, dst in moves:
        source = parse_layout(src)
        target = parse_layout(dst, like=source).layout
        x = shardwise.from_local(torch.ones(source.layout.local_shapes(comm.rank)[0]), source.layout)
        own = []
        for _ in range(repeats + 2):
            comm.barrier(label="move")
            start = time.perf_counter()
            x.redistribute(target)
            own.append(time.perf_counter() - start)
        spans.append(own[2:])
    return spans
