"""Section "checkpoint": how long does a state take to disk and back, beside torch.distributed.checkpoint and the disk?

1. Four ranks hold the state as Shard(0) and save it: ours, torch.distributed.checkpoint, and each rank's bytes written
   raw to one file and synced. Each way finds nothing in its place: what was there is removed before the clock starts.
   Only "replacing" saves over a checkpoint. Ways take turns, with a barrier before each.
2. Two ranks load it as Shard(1), which no rank held before: ours, without checksums, torch.distributed.checkpoint, and
   as many bytes read raw into the same memory, tensor by tensor. All files are in the page cache: each way has read
   its own once. What was loaded is compared with what was saved.
3. The peak of each rank's memory beyond the tensors is counted once, apart from the timing.
4. How long a save in the background holds up a step follows (`bench.checkpoint_stall`), then offline resharding by
   the command (`bench.checkpoint_reshard`).
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import shardwise
from bench.checkpoint_reshard import TINY_RESHARD, ReshardSizes, reshard_figures
from bench.checkpoint_stall import TINY_STALL, StallSizes, stall_figures
from bench.memory import Peak
from bench.report import Cell, Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from shardwise.checkpoint import leftovers
from shardwise.comm import LocalWorld
from shardwise.geometry import ChunkSpec
from shardwise.tensor import ShardedTensor

SAVERS, LOADERS = 4, 2
OURS, UNCHECKED, PEER, RAW = "ours", "ours, verify=False", "torch.distributed.checkpoint", "raw disk"
REPLACING = "ours, replacing"
LIMIT = 64 << 20
Load = tuple[str, int, tuple[int, int], int]


@dataclass(frozen=True)
class CheckpointBenchSizes:
    """Each load: its name, how many tensors of which shape, and the runs of each way."""

    loads: tuple[Load, ...] = (("16 large tensors", 16, (4096, 2048), 7), ("2,000 small tensors", 2000, (64, 64), 3))
    stall: StallSizes = field(default_factory=StallSizes)
    offline: ReshardSizes = field(default_factory=ReshardSizes)


TINY = CheckpointBenchSizes(loads=(("4 tensors", 4, (64, 64), 1),), stall=TINY_STALL, offline=TINY_RESHARD)
Found = dict[str, tuple[list[Span], int | None]]


def run(sizes: CheckpointBenchSizes) -> list[Figures]:
    """Both loads, saved and loaded, on spawned gloo ranks."""
    rows: list[Sequence[Cell]] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        for name, count, shape, repeats in sizes.loads:
            place = str(Path(folder) / str(count))
            os.mkdir(place)
            for verb, ranks, work in (("save", SAVERS, measure_save), ("load", LOADERS, measure_load)):
                with LocalWorld(ranks) as world:
                    by_rank = world.run(work, place, count, shape, repeats)
                rows += _rows(f"{verb} {name}", by_rank, count * shape[0] * shape[1] * 4)
    columns = ("case", "way", "ms", "GB/s", "x raw disk", f"x {PEER}", "extra memory, MB")
    notes = (
        f"Saved by {SAVERS} ranks as Shard(0), loaded by {LOADERS} as Shard(1); files in the page cache; medians of "
        f"{' and '.join(str(load[3]) for load in sizes.loads)} interleaved runs. Ours verifies checksums before a "
        f"tensor is written, within a buffer limit of {LIMIT >> 20} MiB.",
        "Targets: large, within 1.3x of raw write+fsync and 1.1x of raw read; small, 20x faster than the peer.",
    )
    live = Figures("Checkpoints: save, and load in another layout", columns, rows, notes)
    return [live, stall_figures(sizes.stall), reshard_figures(sizes.offline)]


def _rows(case: str, by_rank: Sequence[Found], size: int) -> list[Sequence[Cell]]:
    times = {way: seconds([found[way][0] for found in by_rank]) for way in by_rank[0]}
    extra = {way: [e for found in by_rank if (e := found[way][1]) is not None] for way in times}
    return [
        (
            case,
            way,
            1e3 * time,
            size / time / 1e9,
            time / times[RAW],
            time / times[PEER],
            max(extra[way]) / 1e6 if extra[way] else None,
        )
        for way, time in times.items()
    ]


def _silence_peers() -> None:
    warnings.simplefilter("ignore")  # the peer deprecates its own arguments
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def _state(count: int, shape: tuple[int, int], dim: int, ranks: int, filled: bool) -> dict[str, Any]:
    spec = ChunkSpec(dim, ranks)
    state: dict[str, Any] = {f"layers.{i}.weight": shardwise.zeros(spec, *shape) for i in range(count)}
    for number, tensor in enumerate(state.values()):
        for piece, local in zip(tensor.sharding.pieces_of(dist.get_rank()), tensor.local_tensors(), strict=True):
            local.copy_(_make_expected(number, shape)[piece.box.slices] if filled else torch.zeros(()))
    return state


def _make_expected(number: int, shape: tuple[int, int]) -> Tensor:
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).add_(number).reshape(shape)


def _locals(state: dict[str, Any]) -> list[Tensor]:
    return [local for tensor in state.values() for local in tensor.local_tensors()]


def measure_save(folder: str, count: int, shape: tuple[int, int], repeats: int) -> Found:
    """On one rank: save in every way, first once to count memory, then timed."""
    _silence_peers()
    state = _state(count, shape, 0, SAVERS, filled=True)
    ours, replaced, dcp = (f"{folder}/{name}" for name in ("ours", "replaced", "dcp"))
    raw = f"{folder}/raw{dist.get_rank()}"
    return _measure_ways(
        [
            Contender(OURS, lambda _: shardwise.save(state, ours), lambda: _remove(ours)),
            Contender(REPLACING, lambda _: shardwise.save(state, replaced), lambda: _remove(None)),
            Contender(PEER, lambda _: state_dict_saver.save(state, checkpoint_id=dcp), lambda: _remove(dcp)),
            Contender(RAW, lambda _: _write_raw(raw, _locals(state)), lambda: _remove(raw)),
        ],
        repeats,
    )


def _remove(path: str | None) -> None:
    """Take away what an earlier run left at a path, and wait for removals that are under way."""
    leftovers(path or "none")
    if path is not None and os.path.isfile(path):
        os.unlink(path)
    dist.barrier()
    if dist.get_rank() == 0 and path is not None:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def _write_raw(path: str, tensors: Sequence[Tensor]) -> None:
    """Write and sync; small tensors are collected, large ones go straight through."""
    with open(path, "wb", buffering=1 << 20) as file:
        for tensor in tensors:
            file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def measure_load(folder: str, count: int, shape: tuple[int, int], repeats: int) -> Found:
    """On one rank: load in every way, and compare what came."""
    _silence_peers()
    state = _state(count, shape, 1, LOADERS, filled=False)
    ours = f"{folder}/ours"
    found = _measure_ways(
        [
            Contender(OURS, lambda _: shardwise.load(state, ours, max_buffer_bytes=LIMIT)),
            Contender(UNCHECKED, lambda _: shardwise.load(state, ours, verify=False, max_buffer_bytes=LIMIT)),
            Contender(PEER, lambda _: state_dict_loader.load(state, checkpoint_id=f"{folder}/dcp")),
            Contender(RAW, lambda _: _read_raw(folder, _locals(state))),
        ],
        repeats,
    )
    for path in (
        lambda: shardwise.load(state, ours),
        lambda: state_dict_loader.load(state, checkpoint_id=f"{folder}/dcp"),
    ):
        for local in _locals(state):
            local.zero_()
        path()
        _check(state, shape)
    return found


def _read_raw(folder: str, tensors: Sequence[Tensor]) -> None:
    """Read this rank's share of the raw files into the memory that is loaded into, tensor by tensor."""
    share = SAVERS // LOADERS
    names = iter(f"{folder}/raw{dist.get_rank() * share + i}" for i in range(share))
    file = open(next(names), "rb", buffering=0)  # noqa: SIM115  # the next file follows where one ends
    for tensor in tensors:
        place = tensor.numpy().data.cast("B")
        while len(place):
            got = file.readinto(place)
            if not got:
                file.close()
                file = open(next(names), "rb", buffering=0)  # noqa: SIM115
            place = place[got:]
    file.close()


def _check(state: dict[str, ShardedTensor], shape: tuple[int, int]) -> None:
    for number, tensor in enumerate(state.values()):
        piece = tensor.sharding.pieces_of(dist.get_rank())[0]
        if not torch.equal(tensor.local_tensor(), _make_expected(number, shape)[piece.box.slices]):
            raise AssertionError(f"tensor {number} came back wrong")


def _measure_ways(ways: Sequence[Contender], repeats: int) -> Found:
    extra = {way.name: _extra(way) for way in ways}
    spans = run_interleaved(ways, repeats, before=dist.barrier)
    return {name: (found, extra[name]) for name, found in spans.items()}


def _extra(way: Contender) -> int | None:
    prepared = way.prepare()
    dist.barrier()
    peak = Peak()
    way.run(prepared)
    return peak.grown()
