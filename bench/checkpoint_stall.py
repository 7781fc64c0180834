"""How long does a save in the background hold up a step, beside torch's and beside one copy of the bytes?

1. Ranks hold the state as Shard(0). Ours and torch's `async_save` are timed until they return; what they still write is
   waited for before the next turn, apart from the timing.
2. The copy is that of a rank's own bytes into memory that is ready, which a save in the background needs at least.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

import shardwise
from bench.report import Cell, Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise.comm import LocalWorld
from shardwise.geometry import ChunkSpec

OURS, PEER, COPY = "ours", "torch.distributed.checkpoint", "one copy into ready memory"
AIM = 1.2


@dataclass(frozen=True)
class StallSizes:
    """How many tensors of which shape, on how many ranks, and the turns."""

    count: int = 16
    shape: tuple[int, int] = (4096, 2048)
    ranks: int = 2
    turns: int = 7


TINY_STALL = StallSizes(2, (64, 64), turns=1)


def stall_figures(sizes: StallSizes) -> Figures:
    """The table."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder, LocalWorld(sizes.ranks) as world:
        by_rank = world.run(_measure, folder, sizes)
    times = {way: seconds([found[way] for found in by_rank]) for way in by_rank[0]}
    rows: list[list[Cell]] = [[way, 1e3 * t, t / times[COPY], t / times[PEER]] for way, t in times.items()]
    size = sizes.count * sizes.shape[0] * sizes.shape[1] * 4 / 1e6
    notes = [f"{size:.0f} MB on {sizes.ranks} ranks, medians of {sizes.turns} turns; aim: {AIM} of one copy"]
    return Figures("Saves in the background: time until they return", ["way", "ms", "x copy", f"x {PEER}"], rows, notes)


def _measure(folder: str, sizes: StallSizes) -> dict[str, list[Span]]:
    torch.set_num_threads(1)
    spec = ChunkSpec(0, sizes.ranks)
    state: dict[str, Any] = {f"layers.{i}.weight": shardwise.ones(spec, *sizes.shape) for i in range(sizes.count)}
    held = [local for tensor in state.values() for local in tensor.local_tensors()]
    ready = [torch.ones_like(local) for local in held]
    running: list[Callable[[], object]] = []

    def settle(path: str) -> None:
        """Wait for what the turn before has started, and remove what it wrote."""
        while running:
            running.pop()()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    def ours(_: Any) -> None:
        running.append(shardwise.save(state, f"{folder}/ours", async_op=True).wait)

    def peer(_: Any) -> None:
        saving: Any = state_dict_saver.async_save(state, checkpoint_id=f"{folder}/dcp")  # a Future
        running.append(saving.result)

    def copy(_: Any) -> None:
        for target, source in zip(ready, held, strict=True):
            target.copy_(source)

    ways = [
        Contender(OURS, ours, lambda: settle(f"{folder}/ours")),
        Contender(PEER, peer, lambda: settle(f"{folder}/dcp")),
        Contender(COPY, copy, lambda: settle(f"{folder}/none")),
    ]
    run_interleaved(ways, 1, before=dist.barrier)
    spans = run_interleaved(ways, sizes.turns, before=dist.barrier)
    settle(f"{folder}/ours")
    return spans
