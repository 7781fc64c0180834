"""Weights from 4 ranks to 2 others: push and pull beside raw messages of the same bytes, and beside whole parameters.

All ranks are processes of one world, so that all contenders run in one program and in turns. The trainer's 4 ranks have
rows of every tensor, the server's 2 ranks want rows. Raw: one message of gloo for each pair of ranks. Whole parameters:
each is gathered on one rank and broadcast to the server's ranks, which cut their part out, as many projects do. Over
TCP: the server takes itself for another host, and reads from sockets what it could map. Tensors of 16 elements show
what a push and a pull cost besides their bytes: that is a figure of CPU time on each rank.

With a GPU: the same on the memory of one GPU that all six share, beside bare copies of the same bytes out of the other
processes' memory, one copy for each pair of ranks, whose handles are open already.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

import shardwise
from bench.memory import Peak
from bench.report import Cell, Figures
from shardwise.comm import LocalWorld, default_comm, gather_values
from shardwise.sync.plan import DEFAULT_BUFFER_BYTES
from shardwise.sync.subscriber import Apply

BARE = "bare copies"
TRAINERS, SERVERS = (0, 1, 2, 3), (4, 5)
WIDTH = 1024
OVER_TCP, EXTRA = "push and pull, over TCP", "memory of a pull over TCP beyond staged copies, MB"
SMALL = ("push of 16 elements each, CPU time", "pull of 16 elements each, CPU time")
ADDRESS, TOKEN = "tcp://127.0.0.1:29644", "of the benchmark"


@dataclass(frozen=True)
class SyncBenchSizes:
    """Megabytes in so many tensors, and how often."""

    megabytes: int = 512
    tensors: int = 300
    repeats: int = 7
    gpu_megabytes: tuple[int, ...] = (512, 8192)


TINY = SyncBenchSizes(megabytes=2, tensors=8, repeats=1, gpu_megabytes=(2,))


def run(sizes: SyncBenchSizes) -> list[Figures]:
    """Run all contenders in a world of six processes."""
    with LocalWorld(len(TRAINERS) + len(SERVERS), timeout=300.0) as world:
        found = world.run(_measure, sizes)
    names = list(found[0])
    seconds = {name: [max(turn) for turn in zip(*(rank[name] for rank in found), strict=True)] for name in names}
    raw = median(seconds["raw messages (gloo)"])
    nbytes = _rows(sizes) * sizes.tensors * WIDTH * 4
    rows: list[list[Cell]] = [
        [name, median(spans) * 1000, nbytes / median(spans) / 1e9, median(spans) / raw]
        for name, spans in seconds.items()
        if name not in (*SMALL, EXTRA)
    ]
    rows += [[name, median(seconds[name]) * 1000, None, None] for name in SMALL]
    extra = f"Largest {EXTRA}: {max(seconds[EXTRA]) / 1e6:.0f}; the limit is {DEFAULT_BUFFER_BYTES / 1e6:.0f}."
    return [
        Figures(
            f"sync: {nbytes / 1e6:.0f} MB in {sizes.tensors} tensors, 4 -> 2 processes of one host",
            ["contender", "ms", "GB/s", "of raw"],
            rows,
            ["Medians; a turn ends when the last rank is done. Pushes copy into slots; pulls stage, then copy.", extra],
        ),
        *(_run_on_gpu(replace(sizes, megabytes=each)) for each in sizes.gpu_megabytes if torch.cuda.is_available()),
    ]


def _run_on_gpu(sizes: SyncBenchSizes) -> Figures:
    """The contenders whose bytes stay on one GPU."""
    with LocalWorld(len(TRAINERS) + len(SERVERS), timeout=300.0, device="cuda") as world:
        found = world.run(_measure_on_gpu, sizes)
    seconds = {
        name: [max(turn) for turn in zip(*(spans[name] for spans, _ in found), strict=True)] for name in found[0][0]
    }
    nbytes, bare = _rows(sizes) * sizes.tensors * WIDTH * 4, median(seconds[BARE])
    return Figures(
        f"sync: {nbytes / 1e6:.0f} MB in {sizes.tensors} tensors, 4 -> 2 processes of one GPU",
        ["contender", "ms", "GB/s", "of bare"],
        [[name, median(s) * 1000, nbytes / median(s) / 1e9, median(s) / bare] for name, s in seconds.items()],
        ["Medians of what the last rank took.", *sorted({line for _, lines in found for line in lines})],
    )


def _rows(sizes: SyncBenchSizes) -> int:
    return max(4, sizes.megabytes * 10**6 // (sizes.tensors * WIDTH * 4) // 4 * 4)


def _measure(sizes: SyncBenchSizes) -> dict[str, list[float]]:
    """The seconds of each contender on this rank, turn by turn."""
    comm, rows = default_comm(), _rows(sizes)
    rank = comm.rank
    ours = comm.subset(TRAINERS if rank in TRAINERS else SERVERS)
    ranks = TRAINERS if rank in TRAINERS else SERVERS
    layout = shardwise.ChunkSpec(0, ranks=list(ranks)).layout((rows, WIDTH))
    local = [torch.full(layout.local_shapes(rank)[0], float(rank)) for _ in range(sizes.tensors)]
    state = {f"w{i}": shardwise.from_local(x, layout, comm=ours) for i, x in enumerate(local)}
    pairs = [dist.new_group([0, *SERVERS]), dist.new_group(list(TRAINERS))]
    link: Any
    far: Any = None
    if rank in TRAINERS:
        link = shardwise.sync.publish(state, ADDRESS, token=TOKEN, comm=ours)
    else:
        link = shardwise.sync.subscribe(state, ADDRESS, token=TOKEN, comm=ours)
        with patch("shardwise.sync.subscriber.identify_host", lambda: "another host"):
            far = shardwise.sync.subscribe(state, ADDRESS, token=TOKEN, comm=ours)
    spans: dict[str, list[float]] = {}
    contenders: dict[str, Callable[[int], None]] = {
        "raw messages (gloo)": lambda _: _raw(rank, rows * WIDTH // 4 * sizes.tensors),
        "whole parameters, gathered and broadcast": lambda _: _whole(rank, local, rows, pairs),
    }
    for turn in range(sizes.repeats + 1):
        for name, contender in contenders.items():
            _time(spans, name, contender, turn)
        _time(spans, "push", lambda t: link.push(t) if rank in TRAINERS else None, turn)
        _time(spans, "pull", lambda t: _sync(link, rank, t) if rank in SERVERS else None, turn)
        _time(spans, "push and pull", lambda t: _sync(link, rank, t), turn)
        peak = Peak() if far is not None else None  # it collects garbage, for which who serves a pull would wait
        _time(spans, OVER_TCP, lambda t: _sync(far or link, rank, t), turn)
        spans.setdefault(EXTRA, []).append(float(peak.grown() or 0) if peak is not None else 0.0)
    if rank in SERVERS:
        assert all(float(x[0, 0]) == (rank - 4) * 2 for x in local), "wrong values arrived"
    dist.barrier()  # a publisher that closes too early leaves the last pull waiting for it
    for each in (link, far):
        if each is not None:
            each.close()
    spans |= _measure_small(sizes, ours, rank in TRAINERS)
    return {name: found[1:] for name, found in spans.items()}  # the first turn plans and allocates


def _measure_small(sizes: SyncBenchSizes, ours: Any, trains: bool) -> dict[str, list[float]]:
    """CPU seconds of this rank's thread for a push and a pull of as many tensors of 16 elements."""
    spans: dict[str, list[float]] = {name: [] for name in SMALL}
    state = {f"w{i}": torch.zeros(16) for i in range(sizes.tensors)}
    link: Any = (shardwise.sync.publish if trains else shardwise.sync.subscribe)(state, ADDRESS, token=TOKEN, comm=ours)
    for turn in range(sizes.repeats + 1):
        for name, works in zip(SMALL, (trains, not trains), strict=True):
            dist.barrier()
            start = time.thread_time()
            if works:
                _sync(link, 0 if trains else TRAINERS[-1] + 1, turn)
            spans[name].append(time.thread_time() - start)
    dist.barrier()
    link.close()
    return spans


def _measure_on_gpu(sizes: SyncBenchSizes) -> tuple[dict[str, list[float]], list[str]]:
    """The seconds of each contender on this rank, turn by turn, and by which ways it has read."""
    comm, rows = default_comm(), _rows(sizes)
    rank, trains = comm.rank, comm.rank in TRAINERS
    ranks = TRAINERS if trains else SERVERS
    ours = comm.subset(ranks)
    layout = shardwise.ChunkSpec(0, ranks=list(ranks)).layout((rows, WIDTH))
    shape = layout.local_shapes(rank)[0]

    def make_state() -> dict[str, Any]:
        local = (torch.full(shape, float(rank), device="cuda") for _ in range(sizes.tensors))
        return {f"w{i}": shardwise.from_local(x, layout, comm=ours) for i, x in enumerate(local)}

    states = {apply: make_state() for apply in get_args(Apply)[: 1 if trains else None]}
    whole = torch.full((rows // 4 * WIDTH * sizes.tensors,), float(rank), device="cuda")
    torch.cuda.synchronize()
    everyone = gather_values(comm, pickle.dumps(reduce_tensor(whole)).hex(), label="handles")
    pairs: list[tuple[Tensor, Tensor]] = []
    rebuilt: list[Any] = []
    if not trains:
        near = [r for r in TRAINERS if SERVERS[r // 2] == rank]
        rebuilt = [pickle.loads(bytes.fromhex(everyone[r])) for r in near]
        pairs = [(torch.empty_like(whole), rebuild(*args)) for rebuild, args in rebuilt]

    def copy_bare(_: int) -> None:
        for target, source in pairs:
            target.copy_(source)

    links: dict[str, Any] = {}
    if trains:
        link = shardwise.sync.publish(states["stage"], ADDRESS, token=TOKEN, comm=ours, keep="device")
        links = dict.fromkeys(get_args(Apply), link)
    else:
        for apply, state in states.items():
            links[apply] = shardwise.sync.subscribe(state, ADDRESS, token=TOKEN, comm=ours, apply=apply)
    spans: dict[str, list[float]] = {}
    for turn in range(sizes.repeats + 2):
        _time(spans, BARE, copy_bare, turn)
        _time(spans, "push", lambda t: links["stage"].push(t) if trains else None, turn)
        for apply, link in links.items():
            _time(spans, f"pull, apply={apply!r}", partial(_pull_if_server, link, rank), turn)
    if not trains:
        for x in (x.local_tensor() for state in states.values() for x in state.values()):
            assert x[[0, -1], 0].tolist() == [(rank - 4) * 2, (rank - 4) * 2 + 1], "wrong values arrived"
    lines = [] if trains else [each.strip() for each in links["stage"].describe().splitlines() if "reads" in each]
    pairs.clear()
    rebuilt = []
    dist.barrier()  # nobody has others' memory open any more, before it is freed
    for link in links.values():
        link.close()
    torch.cuda.ipc_collect()
    return {name: found[2:] for name, found in spans.items()}, lines


def _time(spans: dict[str, list[float]], name: str, contender: Callable[[int], object], turn: int) -> None:
    dist.barrier()
    start = time.perf_counter()
    contender(turn)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    spans.setdefault(name, []).append(time.perf_counter() - start)


def _pull_if_server(link: Any, rank: int, turn: int) -> None:
    if rank in SERVERS:
        _sync(link, rank, turn)


def _sync(link: Any, rank: int, turn: int) -> None:
    if rank in TRAINERS:
        link.push(1000 + turn)
    else:
        assert link.pull() is not None, "nothing arrived"


_buffers: dict[int, Tensor] = {}


def _raw(rank: int, count: int) -> None:
    """One message of all its bytes from each trainer to the server that needs them."""
    if rank in TRAINERS:
        data = _buffers.setdefault(rank, torch.ones(count))
        dist.send(data, SERVERS[rank // 2])
        return
    works = []
    for source in TRAINERS:
        if SERVERS[source // 2] == rank:
            works.append(dist.irecv(_buffers.setdefault(source, torch.empty(count)), source))
    for work in works:
        if work is not None:
            work.wait()


def _whole(rank: int, local: Sequence[Tensor], rows: int, groups: Sequence[Any]) -> None:
    """Each parameter as a whole on rank 0, then on the servers, which keep their rows."""
    for x in local:
        whole = torch.empty(rows, WIDTH)
        if rank in TRAINERS:
            dist.gather(x, list(whole.chunk(len(TRAINERS))) if rank == 0 else None, 0, group=groups[1])
        if rank == 0 or rank in SERVERS:
            dist.broadcast(whole, 0, group=groups[0])
        if rank in SERVERS:
            x.copy_(whole.chunk(len(SERVERS))[rank - SERVERS[0]])
