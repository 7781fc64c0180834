"""Section "autoplan": how long does a search take, and is the plan that it finds as fast as the best by hand?

1. A model like Llama 3 8B, on the meta device, on dp=8,tp=8: seconds and memory of a whole process, imports included.
2. Links and products of 4 ranks are measured; the best plan on all meshes of 4 ranks is found with them. Its step and
   those of twelve plans by hand take turns in another world: forward and backward, eager. Where ranks share cores with
   other programs, the clock of a step varies by more than plans do: the processor time of all ranks tells them apart.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import estimates
from bench.estimates import (
    COLUMNS,
    ROWS,
    TABLES,
    TENSOR,
    WEIGHTS,
    EstimateBenchSizes,
    Net,
    estimate_step,
    kendall_tau,
    make_step,
)
from bench.report import Cell, Figures
from shardwise import Mesh, ModelPlan, shard_module
from shardwise.comm import LocalWorld, default_comm
from shardwise.nn.plan_files import plan_from_data
from shardwise.planner import AutoPlanner, sweep
from shardwise.planner.calibrate import calibrate


@dataclass(frozen=True)
class AutoplanBenchSizes:
    """Layers of the large model, and the small one whose steps are measured."""

    layers: tuple[int, ...] = (8, 32)
    small: EstimateBenchSizes = field(default_factory=EstimateBenchSizes)
    plans: int = 12


TINY = AutoplanBenchSizes((1,), estimates.TINY, 1)
AIMS = {8: "8 s", 32: "40 s, 2 GiB"}


class LlamaBlock(nn.Module):
    """A block with 32 heads, 8 of keys and values, width 4,096."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.RMSNorm(width) for name in ("attention", "mlp")})
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 4, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms["attention"](x)
        q, k, v = (part(y).view(*x.shape[:2], -1, 128).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(heads.transpose(1, 2).reshape(x.shape))
        y = self.norms["mlp"](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(128_256, 4096)
        self.blocks = nn.ModuleList(LlamaBlock(4096, 14_336) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(4096), nn.Linear(4096, 128_256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def run(sizes: AutoplanBenchSizes) -> list[Figures]:
    """The tables: searches, and steps."""
    return [_search_table(sizes), _step_table(sizes)]


def _search_table(sizes: AutoplanBenchSizes) -> Figures:
    rows: list[list[Cell]] = []
    for layers in sizes.layers:
        start = time.perf_counter()
        command = [sys.executable, "-c", f"from bench.autoplan import search; search({layers})"]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ}).stdout
        found = json.loads(out.splitlines()[-1])
        wall = time.perf_counter() - start
        figures = (found["gap"] * 100, found["step"] * 1000, found["bound"] * 1000)
        rows.append([layers, wall, found["processor"], found["memory"] / 1e9, *figures, AIMS.get(layers)])
    columns = ["layers", "wall, s", "processor, s", "memory, GB", "gap, %", "rehearsed step, ms", "bound, ms", "aim"]
    return Figures("Search: Llama of width 4,096 on dp=8,tp=8, 64 sequences of 4,096", columns, rows)


def search(layers: int) -> None:
    """Find a plan and print what it took; in a process of its own."""
    with torch.device("meta"):
        model = Llama(layers)
    ids = torch.zeros(64, 4096, dtype=torch.long, device="meta")
    finding = AutoPlanner("dp=8,tp=8", dtype="bf16").plan(model, (ids,)).finding
    figures = {"gap": finding.certificate.gap, "bound": finding.certificate.bound}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures |= {"processor": time.process_time(), "memory": memory, "step": finding.estimate.step_seconds}
    print(json.dumps(figures))


def make_plans() -> dict[str, ModelPlan]:
    """Twelve plans by hand of four ranks."""
    vocabulary = {**TENSOR, TABLES: "tp: S(0)"}
    fully = dict.fromkeys(WEIGHTS, "S(0)")
    both = {"blocks.*.{q,k,v,up}.weight": "fsdp: S(1), tp: S(0)", COLUMNS: "fsdp: S(0), tp: S(1)", TABLES: "fsdp: S(0)"}
    one, two, dp, whole = Mesh.of(tp=4), Mesh.of(dp=2, tp=2), "dp: S(0)", "replicated"
    hybrid = dict.fromkeys(WEIGHTS, "fsdp: S(0)")
    return {
        "tp=4": ModelPlan(one, TENSOR, input_plan=whole),
        "tp=4, vocabulary": ModelPlan(one, vocabulary, input_plan=whole),
        "tp=4, sequence": ModelPlan(one, TENSOR, input_plan=whole, activations="tp: S(1)"),
        "dp=4": ModelPlan(Mesh.of(dp=4), {}, input_plan=dp),
        "fsdp=4": ModelPlan(Mesh.of(dp=4), fully, input_plan=dp, reshard_after_forward=True),
        "fsdp=4, kept": ModelPlan(Mesh.of(dp=4), fully, input_plan=dp, reshard_after_forward=False),
        "dp=2,tp=2": ModelPlan(two, TENSOR, input_plan=dp),
        "dp=2,tp=2, vocabulary": ModelPlan(two, vocabulary, input_plan=dp),
        "dp=2,tp=2, columns only": ModelPlan(two, {ROWS: "tp: S(0)"}, input_plan=dp),
        "fsdp=2,tp=2": ModelPlan(Mesh.of(fsdp=2, tp=2), both, input_plan="fsdp: S(0)", reshard_after_forward=True),
        "dp=2,fsdp=2": ModelPlan(
            Mesh.of(dp=2, fsdp=2), hybrid, input_plan="dp: S(0), fsdp: S(0)", reshard_after_forward=True
        ),
        "replicated": ModelPlan(one, {}, input_plan=whole),
    }


def _step_table(sizes: AutoplanBenchSizes) -> Figures:
    small = sizes.small
    with LocalWorld(4, timeout=300.0) as world:
        made = world.run(calibrate, None, 3 if sizes.plans == 1 else 15)[0]
    ids = torch.zeros(small.sequences, small.length, dtype=torch.long)
    planner = AutoPlanner("dp=4", topology=made.topology, device=made.device, optimizer="none", memory_limit="8GB")
    swept = sweep(planner, Net(small), 4, (ids,))
    ours = plan_from_data(swept.fastest.to_data())
    plans = {"found": ours, **dict(list(make_plans().items())[: sizes.plans])}
    guesses = {name: estimate_step(plan, False, False, made, small).step_seconds for name, plan in plans.items()}
    with LocalWorld(4, timeout=300.0) as world:
        ranks = world.run(measure_in_turns, plans, small)
    clock = {n: median(max(turn) for turn in zip(*(own[n][0] for own in ranks), strict=True)) for n in plans}
    processor = {n: median(sum(turn) for turn in zip(*(own[n][1] for own in ranks), strict=True)) for n in plans}
    best, least = (min(v for n, v in times.items() if n != "found") for times in (clock, processor))
    rows: list[list[Cell]] = [
        [n, guesses[n] * 1000, v * 1000, guesses[n] / v, v / best, processor[n] * 1000, processor[n] / least]
        for n, v in clock.items()
    ]
    taus = [kendall_tau([(guesses[n], times[n]) for n in plans]) for times in (clock, processor)]
    notes = [
        f"found on {ours.mesh}: {dict(ours.parameters)}, inputs {ours.input_plan}, {ours.activations}",
        f"Kendall tau of estimates: {taus[0]:.2f} to steps by the clock, {taus[1]:.2f} to processor time",
    ]
    columns = ["plan", "estimate, ms", "step, ms", "ratio", "best by hand = 1", "processor, ms", "least by hand = 1"]
    return Figures("Steps on 4 gloo ranks", columns, rows, notes)


def measure_in_turns(
    plans: Mapping[str, ModelPlan], sizes: EstimateBenchSizes
) -> dict[str, tuple[list[float], list[float]]]:
    """By plan the seconds of each step on this rank, by the clock and of the processor; the plans take turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm, steps = default_comm(), dict[str, Callable[[], None]]()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in plans}
    for name, plan in plans.items():
        torch.manual_seed(0)
        steps[name] = make_step(shard_module(Net(sizes), plan), plan, sizes)
        for _ in range(3):
            steps[name]()
    for _ in range(sizes.repeats):
        for name, step in steps.items():
            comm.barrier(label="step")
            clock, processor = time.perf_counter(), time.process_time()
            step()
            found[name][0].append(time.perf_counter() - clock)
            found[name][1].append(time.process_time() - processor)
    return found
