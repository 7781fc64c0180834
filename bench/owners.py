"""Muon with matrices dealt to ranks beside `torch.optim.Muon` on parameters that are gathered on every rank.

Both begin with the same sharded parameters and gradients; both are compared with one rank before they take turns. The
peak is what a step adds to a process, on the rank where that is most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from bench.memory import Peak
from bench.report import Cell, Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise.comm import LocalWorld
from shardwise.geometry import Mesh, MeshSpec, Shard
from shardwise.nn import Muon
from shardwise.tensor import redistribute_many, shard
from shardwise.tensor.move import replicated_layout

OURS, GATHERED = "ours", "torch.optim.Muon, gathered"
TIME_AIM = 0.5


@dataclass(frozen=True)
class OwnerBenchSizes:
    """Layers of one width (each with two matrices of 4 x the width), ranks, turns."""

    cases: tuple[tuple[int, int], ...] = ((4, 256), (2, 512))
    ranks: int = 4
    turns: int = 5


TINY = OwnerBenchSizes(cases=((1, 16),), ranks=2, turns=1)


def run(sizes: OwnerBenchSizes) -> list[Figures]:
    """The table."""
    rows = []
    with LocalWorld(sizes.ranks) as world:
        for layers, width in sizes.cases:
            rows.append(_row(layers, width, world.run(_measure, layers, width, sizes.turns)))
    columns = ["matrices", OURS, GATHERED, "ours / gathered", "aim", "peak MB", "gathered MB", "aim MB", "met"]
    title = f"Muon on {sizes.ranks} gloo ranks, a thread each: medians of a step in ms, interleaved"
    notes = ["aims: half of the time of the gathered optimizer; at most one matrix more memory than it"]
    return [Figures(title, columns, rows, notes)]


def _row(layers: int, width: int, found: Sequence[tuple[dict[str, list[Span]], dict[str, int | None]]]) -> list[Cell]:
    times = {name: seconds([one[0][name] for one in found]) for name in (OURS, GATHERED)}
    peaks = {name: max((one[1][name] or 0) for one in found) / 1e6 for name in (OURS, GATHERED)}
    ratio, room = times[OURS] / times[GATHERED], peaks[GATHERED] + 4 * width * width * 4 / 1e6
    met = "yes" if ratio <= TIME_AIM and peaks[OURS] <= room else "no"
    shapes = f"{2 * layers} of {4 * width} x {width}"
    return [shapes, times[OURS] * 1e3, times[GATHERED] * 1e3, ratio, TIME_AIM, *peaks.values(), room, met]


def _measure(layers: int, width: int, turns: int) -> tuple[dict[str, list[Span]], dict[str, int | None]]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(5)
    shapes = [(4 * width, width), (width, 4 * width)] * layers
    start = [(torch.randn(s, generator=generator), torch.randn(s, generator=generator)) for s in shapes]
    steps = {OURS: _ours(start), GATHERED: _gathered(start)}
    whole = [nn.Parameter(value.clone()) for value, _ in start]
    for parameter, (_, grad) in zip(whole, start, strict=True):
        parameter.grad = grad
    torch.optim.Muon(whole).step()
    for name, step in steps.items():
        for found, wanted in zip(step(None), whole, strict=True):
            assert_close(found.full(), wanted.detach(), msg=f"{name} differs from one rank")
    peaks: dict[str, int | None] = {}
    for name, step in steps.items():
        dist.barrier()
        peak = Peak()
        step(None)
        peaks[name] = peak.grown()
    ways = [Contender(name, step) for name, step in steps.items()]
    return run_interleaved(ways, turns, before=dist.barrier), peaks


def _shard(start: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
    spec = MeshSpec(Mesh.of(tp=dist.get_world_size()), [Shard(0)])
    made = []
    for value, grad in start:
        parameter: Any = nn.Parameter(shard(value, spec))
        parameter.grad = shard(grad, spec)
        made.append(parameter)
    return made


def _ours(start: Sequence[tuple[Tensor, Tensor]]) -> Callable[[Any], Any]:
    parameters = _shard(start)
    optimizer = Muon(parameters)

    def run(_: Any) -> Any:
        optimizer.step()
        return [p.detach() for p in parameters]

    return run


def _gathered(start: Sequence[tuple[Tensor, Tensor]]) -> Callable[[Any], Any]:
    """Parameters and gradients are gathered on every rank, updated there, and each rank keeps its part."""
    parameters = _shard(start)
    ranks = tuple(range(dist.get_world_size()))
    whole = [nn.Parameter(torch.empty(p.shape)) for p in parameters]
    optimizer = torch.optim.Muon(whole)

    def run(_: Any) -> Any:
        with torch.no_grad():
            held = [t.detach() for p in parameters for t in (p, p.grad)]
            moved = redistribute_many(held, [replicated_layout(tuple(t.shape), ranks) for t in held])
            for number, parameter in enumerate(whole):
                parameter.data, parameter.grad = (t.local_parts[0] for t in moved[2 * number : 2 * number + 2])
            optimizer.step()
            for mine, parameter in zip(parameters, whole, strict=True):
                mine.local_parts[0].copy_(parameter.chunk(len(ranks))[mine.comm.rank])
                parameter.data, parameter.grad = torch.empty(0), None
        return [p.detach() for p in parameters]

    return run
