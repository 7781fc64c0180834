"""A block of Llama over a split sequence: the three kinds of attention, beside an all-to-all over heads by hand.

torch's own `context_parallel` has no kernel for CPUs (2.13: "_scaled_dot_product_flash_attention_for_cpu.default does
not have a sharding strategy registered"), so the peer is written by hand. The peak is what a step adds to a process, on
the rank where that is most.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from bench.memory import Peak
from bench.report import Cell, Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise.comm import LocalWorld
from shardwise.geometry import Mesh
from shardwise.nn import ModelPlan, shard_module

BY_HAND = "Ulysses by hand"
KINDS = {"ulysses": "cp: S(1)", "ring": "cp: S(1) zigzag", "gather": "cp: S(1)"}
TIME_AIM = 1.15
Step = Callable[[Any], Tensor]


@dataclass(frozen=True)
class SequenceBenchSizes:
    """Lengths of the sequence, width, heads of queries and of keys, ranks, turns."""

    lengths: tuple[int, ...] = (1024, 4096)
    width: int = 256
    heads: int = 8
    keys: int = 4
    ranks: int = 4
    turns: int = 5


TINY = SequenceBenchSizes(lengths=(16,), width=16, heads=4, keys=2, ranks=2, turns=1)


class SequenceBlock(nn.Module):
    """Grouped attention and a gated perceptron; `exchange` brings heads and rows to where attention has all rows."""

    def __init__(self, sizes: SequenceBenchSizes, exchange: Callable[[Tensor, bool], Tensor] | None = None) -> None:
        super().__init__()
        width, self.counts = sizes.width, (sizes.heads, sizes.keys, sizes.keys)
        head = width // sizes.heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, n * head, bias=False) for n in (*self.counts, sizes.heads))
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down, self.before, self.between = nn.Linear(2 * width, width), nn.RMSNorm(width), nn.RMSNorm(width)
        self.exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        y, exchange = self.before(x), self.exchange or (lambda t, _: t)
        parts = zip((self.q, self.k, self.v), self.counts, strict=True)
        q, k, v = (exchange(f(y).unflatten(-1, (n, -1)).transpose(1, 2), True) for f, n in parts)
        mixed = exchange(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), False)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        raised: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + raised


class _Exchange(torch.autograd.Function):
    """[batch, heads, rows, head] between a part of the rows and a part of the heads, by one all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads, ranks = to_heads, dist.get_world_size()
        sent = torch.stack(x.chunk(ranks, 1 if to_heads else 2)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), 2 if to_heads else 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Exchange.apply(gradient, not ctx.to_heads), None


def run(sizes: SequenceBenchSizes) -> list[Figures]:
    """The table."""
    rows = []
    with LocalWorld(sizes.ranks) as world:
        for length in sizes.lengths:
            rows += _rows(length, world.run(_measure, sizes, length))
    columns = ["length", "attention", "ms", "by hand", "ratio", "aim", "peak MB", "by hand MB", "met"]
    title = (
        f"a block over a split sequence on {sizes.ranks} gloo ranks, width {sizes.width}, {sizes.heads} heads, "
        f"{sizes.keys} of keys, a thread each: forward and backward, medians in ms, interleaved"
    )
    notes = ["aim: 1.15 of the time by hand for ulysses, no more memory; ring and gather are shown beside it"]
    return [Figures(title, columns, rows, notes)]


def _rows(length: int, found: Sequence[tuple[dict[str, list[Span]], dict[str, int | None]]]) -> list[list[Cell]]:
    times = {name: seconds([one[0][name] for one in found]) for name in (*KINDS, BY_HAND)}
    peaks = {name: max((one[1][name] or 0) for one in found) / 1e6 for name in times}
    rows: list[list[Cell]] = []
    for kind in KINDS:
        ratio = times[kind] / times[BY_HAND]
        met = "-" if kind != "ulysses" else "yes" if ratio <= TIME_AIM and peaks[kind] <= peaks[BY_HAND] else "no"
        cells: list[Cell] = [length, kind, times[kind] * 1e3, times[BY_HAND] * 1e3, ratio]
        rows.append([*cells, TIME_AIM if kind == "ulysses" else "-", peaks[kind], peaks[BY_HAND], met])
    return rows


def _measure(sizes: SequenceBenchSizes, length: int) -> tuple[dict[str, list[Span]], dict[str, int | None]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start, x = SequenceBlock(sizes), torch.randn(1, length, sizes.width)
    dense = copy.deepcopy(start)
    loss = dense(x).square().mean()
    loss.backward()
    steps = {kind: _ours(start, x, kind, cut) for kind, cut in KINDS.items()} | {BY_HAND: _by_hand(sizes, start, x)}
    peaks: dict[str, int | None] = {}
    for name, step in steps.items():
        gradient = step(None)
        assert_close(gradient, dense.q.weight.grad, rtol=1e-3, atol=1e-6, msg=f"{name} differs from one rank")
        dist.barrier()
        peak = Peak()
        step(None)
        peaks[name] = peak.grown()
    return run_interleaved([Contender(n, s) for n, s in steps.items()], sizes.turns, before=dist.barrier), peaks


def _ours(start: SequenceBlock, x: Tensor, kind: str, cut: str) -> Step:
    plan = ModelPlan(Mesh.of(cp=dist.get_world_size()), {}, input_plan=cut, attention=kind)
    model = shard_module(copy.deepcopy(start), plan)

    def step(_: Any) -> Tensor:
        model.zero_grad()
        model(x).square().mean().backward()
        gradient: Any = model.q.weight.grad
        found: Tensor = gradient.local_parts[0]
        return found

    return step


def _by_hand(sizes: SequenceBenchSizes, start: SequenceBlock, x: Tensor) -> Step:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = SequenceBlock(sizes, lambda t, to_heads: _Exchange.apply(t, to_heads))
    model.load_state_dict(start.state_dict())
    part = x.chunk(ranks, 1)[rank]

    def step(_: Any) -> Tensor:
        model.zero_grad()
        (model(part).square().sum() / x.numel()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        found = model.q.weight.grad
        assert found is not None
        return found

    return step
