"""Fully sharded training beside FSDP2 and DDP: every parameter and the batch are cut along one axis of the mesh.

1. One step is forward, backward and optimizer step of a stack of equal layers. All ways begin with the same parameters
   and have the same losses.
2. They take turns, with a barrier before each; a run lasts from the first rank's start to the last rank's end.
3. The peak of memory is what a step adds to a process that already has its parameters and gradients, on the rank where
   that is most.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from bench.memory import Peak
from bench.report import Cell, Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise.comm import LocalWorld
from shardwise.geometry import Mesh
from shardwise.nn import ModelPlan, shard_module
from shardwise.tensor import ShardedTensor

OURS, AT_ONCE, FSDP, DDP = "ours", "without overlap", "FSDP2", "DDP"
TIME_AIM, MEMORY_AIM = 0.9, 1.0


@dataclass(frozen=True)
class ShardedCase:
    """Layers of one width, rows of each rank, ranks, and threads of each rank (None: the cores are divided)."""

    layers: int
    width: int
    rows: int
    ranks: int = 4
    threads: int | None = None

    @property
    def name(self) -> str:
        """The case in words."""
        per = "cores / ranks" if self.threads is None else self.threads
        return f"{self.layers} x {self.width}, {self.rows} rows, {self.ranks} ranks x {per} threads"


@dataclass(frozen=True)
class ShardedBenchSizes:
    """The cases and their turns."""

    cases: tuple[ShardedCase, ...] = (
        ShardedCase(8, 1024, 512),
        ShardedCase(8, 2048, 2048),
        ShardedCase(16, 1024, 64),
        ShardedCase(8, 1024, 512, ranks=2, threads=os.cpu_count()),
    )
    turns: int = 7


TINY = ShardedBenchSizes(cases=(ShardedCase(2, 32, 64, ranks=2),), turns=1)


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured: spans and peaks by contender."""

    spans: dict[str, list[Span]]
    peaks: dict[str, int | None]


def run(sizes: ShardedBenchSizes) -> list[Figures]:
    """The table."""
    rows = []
    for case in sizes.cases:
        with LocalWorld(case.ranks) as world:
            rows.append(_row(case, world.run(_measure, case, sizes.turns)))
    columns = ["model", OURS, AT_ONCE, FSDP, DDP, f"ours / {FSDP}", "aim", "peak MB", f"{FSDP} MB", f"{DDP} MB", "met"]
    notes = [f"aims: {TIME_AIM} of {FSDP}'s time, no more memory than {FSDP}; {os.cpu_count()} cores"]
    title = "fully sharded, forward + backward + step: medians in ms, interleaved; memory that a step adds to a rank"
    return [Figures(title, columns, rows, notes)]


def _row(case: ShardedCase, found: Sequence[RankFigures]) -> list[Cell]:
    times = {name: seconds([one.spans[name] for one in found]) for name in found[0].spans}
    peaks = {name: max((one.peaks[name] or 0) for one in found) / 1e6 for name in found[0].peaks}
    ratio = times[OURS] / times[FSDP]
    met = "yes" if ratio <= TIME_AIM and peaks[OURS] <= MEMORY_AIM * peaks[FSDP] else "no"
    shown = [times[name] * 1e3 for name in (OURS, AT_ONCE, FSDP, DDP)]
    return [case.name, *shown, ratio, TIME_AIM, *(peaks[name] for name in (OURS, FSDP, DDP)), met]


def _measure(case: ShardedCase, turns: int) -> RankFigures:
    """On one rank: all ways have the same losses, then they take turns."""
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    x = torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    made: dict[str, Callable[[nn.Module], nn.Module]] = {
        OURS: _shard_ours,
        AT_ONCE: partial(_shard_ours, prefetch_bytes=0),
        FSDP: _shard_fsdp,
        DDP: DistributedDataParallel,
    }
    ways = [Contender(name, _make_step(make(_make_layers(case)), x)) for name, make in made.items()]
    losses = {way.name: [_number(way.run(None)) for _ in range(3)] for way in ways}
    for name, found in losses.items():
        assert_close(found, losses[DDP], rtol=1e-3, atol=1e-5, msg=f"{name} differs from {DDP}")
    peaks = {}
    for way in ways:
        dist.barrier()
        peak = Peak()
        way.run(None)
        peaks[way.name] = peak.grown()
    return RankFigures(run_interleaved(ways, turns, before=dist.barrier), peaks)


def _make_layers(case: ShardedCase) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(case.layers):
        layers += [nn.Linear(case.width, case.width), nn.ReLU()]
    return nn.Sequential(*layers)


def _shard_ours(model: nn.Module, prefetch_bytes: int | None = None) -> nn.Module:
    plan = ModelPlan(
        Mesh.of(dp=dist.get_world_size()),
        {"**": "S(0)"},
        axis="dp",
        input_plan="dp: S(0)",
        reshard_after_forward=True,
        prefetch_bytes=prefetch_bytes,
    )
    shard_module(model, plan)
    return model


def _shard_fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _make_step(model: nn.Module, x: Tensor) -> Callable[[Any], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run(_: Any) -> Any:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def _number(loss: Any) -> float:
    """The loss of all rows: ours is that already, the others have their own rows' each."""
    if isinstance(loss, ShardedTensor):
        return float(loss.full())
    total = loss.clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
