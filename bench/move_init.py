"""Making a tensor of local shards: no data moves, the ranks only tell each other what they hold."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from bench.move_cases import RANKS
from bench.move_peers import make_torch_sharded
from bench.report import Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise.comm import LocalWorld
from shardwise.compat.from_shards import init_from_local_shards
from shardwise.tensor.shards import Shard

OURS, TORCH = "ours", "torch"
AIM = 0.5


def measure(world: LocalWorld, repeats: int) -> Figures:
    """Time both on the ranks of a world."""
    by_rank = world.run(_measure_init_on_rank, repeats)
    ours, peer = (_median(by_rank, name) for name in (OURS, TORCH))
    return Figures(
        f"init_from_local_shards, {RANKS} gloo ranks: medians in ms, interleaved",
        ["ours", "torch", "ours / torch", "aim", "met"],
        [[ours * 1e3, peer * 1e3, ours / peer, AIM, "yes" if ours / peer <= AIM else "no"]],
    )


def _median(by_rank: Sequence[dict[str, list[Span]]], name: str) -> float:
    return seconds([spans[name] for spans in by_rank])


def _measure_init_on_rank(repeats: int) -> dict[str, list[Span]]:
    warnings.simplefilter("ignore", FutureWarning)  # torch's ShardedTensor says that it is deprecated
    rank, rows = dist.get_rank(), torch.zeros(16, 64)
    own = Shard.from_tensor_and_offsets(rows, [16 * rank, 0], rank)
    shape = (16 * RANKS, 64)
    ways = [
        Contender(OURS, lambda _: init_from_local_shards([own], *shape)),
        Contender(TORCH, lambda _: make_torch_sharded(rows, shape)),
    ]
    for way in ways:
        way.run(None)
    return run_interleaved(ways, repeats, before=dist.barrier)
