"""A fully sharded model of equal blocks: how much faster is it with moves beside computation?

Forward and backward, compiled with the usual memory limit for moves and with none, where each move is waited for at
once, and without compiling. Ranks share the cores of the machine. Between ranks of one host a move is work of the
cores, so that overlap shows only where there are more of them than ranks; between hosts (section "hosts") a move waits
for the link.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise
from bench.report import Cell, Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise import Mesh, ModelPlan, shard_module
from shardwise.comm import LocalWorld
from shardwise.compiler.compiled import DEFAULT_MEMORY_LIMIT

WAYS = {"overlap": DEFAULT_MEMORY_LIMIT, "no overlap": 0, "not compiled": None}
BLOCKS = 8


@dataclass(frozen=True)
class DeepModelSizes:
    """The ranks, the width of a block, the rows of each rank's batch, and the turns."""

    ranks: int = 4
    width: int = 1024
    rows: int = 256
    repeats: int = 15


def run(sizes: DeepModelSizes, backend: str) -> Figures:
    """The table."""
    with LocalWorld(sizes.ranks) as world:
        return measure_in(world, sizes, backend)


def measure_in(world: LocalWorld, sizes: DeepModelSizes, backend: str, where: str = "one host") -> Figures:
    """The table, of ranks that have been started."""
    found = world.run(_measure, sizes, backend)
    times = {way: seconds([spans[way] for spans in found]) * 1e3 for way in WAYS}
    rows: list[list[Cell]] = [[way, times[way], times["no overlap"] / times[way]] for way in WAYS]
    model = f"{BLOCKS} blocks of width {sizes.width}, {sizes.rows} rows each"
    title = f"Fully sharded, {model}, {sizes.ranks} gloo ranks, {where}"
    return Figures(title, ["way", "step, ms", "no overlap / it"], rows, [f"{_threads(sizes)} threads for each rank"])


def _threads(sizes: DeepModelSizes) -> int:
    return max(1, (os.cpu_count() or 1) // sizes.ranks)


def _measure(sizes: DeepModelSizes, backend: str) -> dict[str, list[Span]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(_threads(sizes))
    x = torch.randn(sizes.rows, sizes.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    steps = {way: _make_step(sizes, limit, x, backend) for way, limit in WAYS.items()}
    losses = [step(None).full() for step in steps.values()]
    for loss in losses[1:]:
        assert_close(loss, losses[0], rtol=1e-3, atol=1e-4)
    contenders = [Contender(way, step) for way, step in steps.items()]
    run_interleaved(contenders, min(2, sizes.repeats))
    return run_interleaved(contenders, sizes.repeats, dist.barrier)


def _make_step(sizes: DeepModelSizes, limit: int | None, x: Tensor, backend: str) -> Callable[[Any], Any]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.GELU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*layers)
    plan = ModelPlan(Mesh.of(dp=sizes.ranks), {"**.weight": "S(0)"}, axis="dp", input_plan="dp: S(0)")
    shard_module(model, plan)
    run_model: Any = model if limit is None else shardwise.compile(model, backend=backend, memory_limit=limit)

    def run_step(_: Any) -> Any:
        model.zero_grad()
        loss = run_model(x).square().mean()
        loss.backward()
        return loss

    return run_step
