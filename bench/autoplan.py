"""Section "autoplan": how long does a search take, and is the plan that it finds as fast as the best by hand?

1. A model like Llama 3 8B, on the meta device, on dp=8,tp=8: seconds and memory of a whole process, imports included.
2. Links and products of 4 ranks are measured; the best plan on all meshes of 4 ranks is found with them. Its step and
   those of twelve plans by hand take turns in another world: forward and backward, eager. Where ranks share cores with
   other programs, the clock of a step varies by more than plans do: the processor time of all ranks tells them apart.
3. Estimates of Llama 3 beside steps that others have published.
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
    calibrate_one_thread,
    estimate_step,
    kendall_tau,
    make_step,
)
from bench.report import Cell, Figures
from shardwise import Mesh, ModelPlan, shard_module
from shardwise.comm import LocalWorld, default_comm
from shardwise.nn.plan_files import plan_from_data
from shardwise.planner import AutoPlanner, estimate, sweep
from shardwise.transfer import Link, Topology


@dataclass(frozen=True)
class AutoplanBenchSizes:
    """Layers of the large model, and the small one whose steps are measured."""

    layers: tuple[int, ...] = (8, 32)
    small: EstimateBenchSizes = field(default_factory=EstimateBenchSizes)
    plans: int = 12


TINY = AutoplanBenchSizes((1,), estimates.TINY, 1)
AIMS = {8: "8 s", 32: "40 s, 2 GiB"}


class LlamaBlock(nn.Module):
    """A block with heads of 128, 8 of keys and values."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.RMSNorm(width) for name in ("attention", "mlp")})
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, 1024, bias=False) for _ in range(2))
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
    """Embedding, blocks, head; a `stage` in the middle of a pipeline has blocks alone."""

    def __init__(self, layers: int, width: int = 4096, inner: int = 14_336, stage: bool = False) -> None:
        super().__init__()
        self.embed = nn.Identity() if stage else nn.Embedding(128_256, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, inner) for _ in range(layers))
        self.norm = nn.Identity() if stage else nn.RMSNorm(width)
        self.head = nn.Identity() if stage else nn.Linear(width, 128_256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def run(sizes: AutoplanBenchSizes) -> list[Figures]:
    """The tables: searches, steps, and published steps."""
    return [_search_table(sizes), _step_table(sizes), _published_table(sizes)]


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


A100S = Topology(8, within=Link(3e-6, 300e9, 0.5e-6), between=Link(1e-5, 25e9))
H100S = Topology(8, within=Link(3e-6, 450e9, 0.5e-6), between=Link(1e-5, 50e9))
TITAN_A100, TITAN_H100 = "torchtitan, docs/performance.md", "torchtitan, benchmarks/llama3_h100_202412"
FULLY_SHARDED: tuple[tuple[str, tuple[int, int, int], int, int, str, Topology, float, str], ...] = (
    ("8B", (32, 4096, 14_336), 64, 1, "a100", A100S, 2973, TITAN_A100),
    ("70B", (80, 8192, 28_672), 64, 1, "a100", A100S, 331, TITAN_A100),
    ("8B", (32, 4096, 14_336), 8, 2, "h100", H100S, 6667, TITAN_H100),
    ("8B", (32, 4096, 14_336), 128, 2, "h100", H100S, 6514, TITAN_H100),
)
STAGES, MICRO_BATCHES, LAYERS_OF_STAGE = 16, 32, 126 / 16


def _published_table(sizes: AutoplanBenchSizes) -> Figures:
    """Steps of Llama 3 in bf16 with sequences of 8,192 as others have measured them, and estimates."""
    rows: list[list[Cell]] = []
    few = sizes.plans == 1
    for name, (layers, width, inner), ranks, batch, device, links, measured, source in FULLY_SHARDED[: 1 if few else 4]:
        with torch.device("meta"):
            net = Llama(1 if few else layers, width, inner)
        split = {parameter: "S(0)" for parameter, p in net.named_parameters() if p.ndim > 1}
        plan = ModelPlan(Mesh.of(dp=ranks), split, input_plan="dp: S(0)", reshard_after_forward=True)
        inputs = (torch.zeros(batch, 8192, dtype=torch.long, device="meta"),)
        for again in (False, True):
            found = estimate(net, plan, inputs=inputs, dtype="bf16", device=device, topology=links, again=again)
            speed = found.tokens / found.step_seconds / ranks
            what = f"{name} on {ranks} {device}, fully sharded, {batch} x 8192 a rank"
            rows.append([what, "all" if again else "nothing", speed, 100 * found.utilisation, measured, source])
    with torch.device("meta"):
        net = Llama(1 if few else 8, 16_384, 53_248, stage=True)
    split = {"blocks.*.{q,k,v,gate,up}.weight": "tp: S(0)", "blocks.*.{o,down}.weight": "tp: S(1)"}
    inputs = (torch.zeros(1, 8192, 16_384, dtype=torch.bfloat16, device="meta"),)
    plan = ModelPlan(Mesh.of(tp=8), split, input_plan="replicated")
    found = estimate(net, plan, inputs=inputs, dtype="bf16", device="h100", topology=H100S, optimizer="none")
    idle = (STAGES - 1) / MICRO_BATCHES / LAYERS_OF_STAGE  # of an interleaved schedule, a layer at a time
    speed = 8192 * STAGES * MICRO_BATCHES / (found.step_seconds * MICRO_BATCHES * (1 + idle)) / (8 * STAGES)
    speed *= len(net.blocks) / (LAYERS_OF_STAGE * STAGES)
    what = "405B, one stage of pp=16 on tp=8 h100, 32 micro-batches of 8192"
    rows.append([what, "nothing", speed, 100 * found.utilisation / (1 + idle), None, "Llama 3 paper: MFU 43 %, 41 %"])
    columns = ["step", "computed again", "tokens/s per GPU", "MFU, %", "published tokens/s", "source"]
    return Figures("Llama 3: estimates beside what was published", columns, rows)


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
        made = world.run(calibrate_one_thread, 3 if sizes.plans == 1 else 15)[0]
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
