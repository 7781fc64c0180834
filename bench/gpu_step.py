"""Section "gpu_step": how long does a whole training step of a small block take on one GPU?

One rank over nccl. A step is forward and backward of a block of a Llama, clipping and fused AdamW, in bfloat16. All
ways begin with the same weights and see the same batches and learning rates; their losses are compared, and the step
counts synchronisations of the host with the device, with the place in the program. Times are until the device is done.

1. Plain: the same block without shardwise, eager; with `torch.compile` of the model (default, reduce-overhead); and
   with the whole step recorded as one CUDA graph by hand, the most that code without shardwise can do.
2. Ours: eager; `shardwise.compile` of the step, default and reduce-overhead.
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from bench.report import Cell, Figures
from bench.timing import Contender, run_interleaved, seconds
from shardwise import Mesh, ModelPlan, shard_module

EAGER, COMPILED, REDUCED, RECORDED = "eager", "compiled", "reduce-overhead", "whole step recorded by hand"
PLAIN, OURS = "plain", "ours"
CHECKED_STEPS, HEAD = 8, 64
PLAN = {"query|key|value|gate|up": "S(0)", "out|down": "S(1)"}
Step: TypeAlias = Callable[[Tensor, float], Any]


@dataclass(frozen=True)
class GpuStepSizes:
    """Widths of the block, rows and tokens of a batch, steps that are timed; where, and by which compiler."""

    widths: tuple[int, ...] = (256,)
    batch: tuple[int, int] = (4, 128)
    runs: int = 200
    device: str = "cuda"
    backend: str = "inductor"
    dtype: torch.dtype = torch.bfloat16


TINY = GpuStepSizes((64,), (2, 8), 1, "cpu", "aot_eager", torch.float32)


class LlamaBlock(nn.Module):
    """Attention with rotated heads and a gated perceptron, each behind a norm and with a residual."""

    speeds: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.register_buffer("speeds", 1e4 ** -(torch.arange(0, HEAD, 2) / HEAD), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        angles = torch.outer(torch.arange(x.shape[1], device=x.device, dtype=self.speeds.dtype), self.speeds)
        turns = torch.cat([angles, angles], -1)
        cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
        query, key = (t * cos + _turn(t) * sin for t in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _turn(x: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([-other, one], -1)


def run(sizes: GpuStepSizes) -> list[Figures]:
    """A table for each width, or a note where there is no GPU."""
    if sizes.device == "cuda" and not torch.cuda.is_available():
        return [Figures("Whole steps on a GPU", ("way",), (), ("this machine has no GPU that torch can use",))]
    backend = "cpu:gloo,cuda:nccl" if sizes.device == "cuda" else "gloo"
    with TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            return [_measure(width, sizes) for width in sizes.widths]
        finally:
            dist.destroy_process_group()


def _measure(width: int, sizes: GpuStepSizes) -> Figures:
    batches = [_batch(width, seed, sizes) for seed in range(CHECKED_STEPS)]
    steps, notes = _make_ways(width, sizes), list[str]()
    firsts, losses, stops = {}, {}, {}
    for name, step in list(steps.items()):
        begin = time.perf_counter()
        try:
            losses[name] = [_read(step(batch, 1e-3 * (i + 1))) for i, batch in enumerate(batches)]
        except Exception as error:  # a way that this torch or machine refuses is a row without figures
            del steps[name]
            notes.append(f"{name}: {type(error).__name__}: {str(error).strip()[:300]}")
            traceback.print_exc(limit=-12)
            continue
        firsts[name] = time.perf_counter() - begin
        stops[name] = _count_stops(name, partial(step, batches[0], 1e-3))
        print(f"{name}: 8 steps in {firsts[name]:.1f} s, {stops[name]} synchronisations", file=sys.stderr, flush=True)
    contenders = [Contender(name, partial(_run_one, step, batches), _synchronize) for name, step in steps.items()]
    run_interleaved(contenders, min(3, sizes.runs))
    spans = run_interleaved(contenders, sizes.runs)
    for name, program in _programs.items():
        notes += [f"{name}: {line.strip()}" for line in program.explain().splitlines() if "graph:" in line]
    took = {name: 1e3 * seconds([found]) for name, found in spans.items()}
    rows: list[list[Cell]] = []
    for name in steps:
        way = name.partition(", ")[2]
        peer = took.get(f"{PLAIN}, {way}") if name.startswith(OURS) else None
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[f"{PLAIN}, {EAGER}"], strict=True))
        if apart > 0.02:
            notes.append(f"WRONG: the losses of {name} differ by {apart:.3g} of those of plain steps")
        ratios = took[name] / took[f"{PLAIN}, {EAGER}"], None if peer is None else took[name] / peer
        rows.append([name, took[name], *ratios, stops[name], apart, firsts[name]])
    columns = (
        "way",
        "ms",
        "to plain eager",
        "to plain in this way",
        "synchronisations",
        "error of losses",
        "first 8, s",
    )
    return Figures(f"Whole steps of a block of width {width} on {sizes.device}", columns, rows, notes)


def _batch(width: int, seed: int, sizes: GpuStepSizes) -> Tensor:
    made = torch.randn((*sizes.batch, width), generator=torch.Generator().manual_seed(seed))
    return made.to(sizes.device, sizes.dtype)


def _run_one(step: Step, batches: Sequence[Tensor], _: object) -> None:
    step(batches[0], 1e-3)
    _synchronize()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _read(loss: Any) -> float:
    whole = loss.full() if isinstance(loss, shardwise.ShardedTensor) else loss
    return float(whole.detach().float())


_programs: dict[str, Any] = {}


def _make_ways(width: int, sizes: GpuStepSizes) -> dict[str, Step]:
    """The step of each way, with weights of its own."""
    _programs.clear()
    options: dict[str, Any] = {} if sizes.backend != "inductor" else {"mode": "reduce-overhead"}
    compiled, reduced = torch.compile(backend=sizes.backend), torch.compile(backend=sizes.backend, **options)
    steps = {f"{PLAIN}, {EAGER}": _plain_step(width, sizes, lambda model: model)}
    for way in (EAGER, COMPILED, REDUCED):
        steps[f"{OURS}, {way}"] = _our_step(width, sizes, way)
    steps[f"{PLAIN}, {COMPILED}"] = _plain_step(width, sizes, compiled)
    steps[f"{PLAIN}, {REDUCED}"] = _plain_step(width, sizes, reduced)
    if sizes.device == "cuda":
        steps[f"{PLAIN}, {RECORDED}"] = _recorded_step(width, sizes)
    return steps


def _make_model(width: int, sizes: GpuStepSizes) -> nn.Module:
    torch.manual_seed(7)
    return LlamaBlock(width).to(sizes.device, sizes.dtype)


def _step_of(model: nn.Module, call: Callable[[Tensor], Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(batch: Tensor) -> Any:
        optimizer.zero_grad()
        loss = call(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def _with_rate(step: Callable[[Tensor], Any], optimizer: torch.optim.Optimizer) -> Step:
    def run_step(batch: Tensor, rate: float) -> Any:
        optimizer.param_groups[0]["lr"] = rate
        return step(batch)

    return run_step


def _plain_step(width: int, sizes: GpuStepSizes, wrap: Callable[[Any], Any]) -> Step:
    model = _make_model(width, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _with_rate(_step_of(model, wrap(model), optimizer), optimizer)


def _recorded_step(width: int, sizes: GpuStepSizes) -> Step:
    """A compiled model, whose whole step is recorded after three calls; inputs and rates are copied."""
    model = _make_model(width, sizes)
    rate = torch.full((), 1e-3, device=sizes.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    step = _step_of(model, torch.compile(model, backend=sizes.backend), optimizer)
    batch = _batch(width, 0, sizes)
    stream, graph, calls = torch.cuda.Stream(), torch.cuda.CUDAGraph(), [0]
    results: list[Tensor] = []

    def run_step(given: Tensor, number: float) -> Tensor:
        batch.copy_(given)
        rate.fill_(number)
        calls[0] += 1
        if calls[0] <= 3:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss: Tensor = step(batch)
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if not results:
            optimizer.zero_grad()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                results.append(step(batch))
        graph.replay()
        return results[0]

    return run_step


def _our_step(width: int, sizes: GpuStepSizes, way: str) -> Step:
    model = _make_model(width, sizes)
    plan = {pattern: cut for names, cut in PLAN.items() for pattern in (f"{n}.weight" for n in names.split("|"))}
    shard_module(model, ModelPlan(Mesh.of(tp=1), plan, axis="tp", input_plan="replicated"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = _step_of(model, model, optimizer)
    if way != EAGER:
        mode = "default" if way == COMPILED else way
        step = _programs[f"{OURS}, {way}"] = shardwise.compile(step, backend=sizes.backend, mode=mode)
    return _with_rate(step, optimizer)


def _count_stops(name: str, call: Callable[[], Any]) -> int:
    """How often torch warns of a synchronisation in a warm call; where, is printed."""
    if not torch.cuda.is_available():
        return 0
    found: list[str] = []

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            found.append("".join(traceback.format_stack(limit=14)[:-1]))

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for stack in found[:2]:
        print(f"{name} stops here:\n{stack}", file=sys.stderr, flush=True)
    return len(found)
