"""Section "gpu": how fast are moves of device memory, copies of boxes, ranks as threads; and what stops the host?

1. Four processes share GPU 0 in a gloo world. Each move is checked, then all ways take turns: ours, the same through
   host memory, and the bare copies out of the other processes' memory, whose handles are open already. Times are until
   the device is done; "until it returns" is what the host waits for, and can overlap with work of the device.
2. Boxes are copied beside a plain copy of as many bytes.
3. Four threads move a small tensor.
4. Warm calls run with torch's warnings about synchronisation, which are counted.
"""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from bench.move_cases import Shape, expected_parts, local_parts, whole
from bench.report import Cell, Figures
from bench.timing import Contender, run_interleaved, seconds
from shardwise.comm import Comm, LocalWorld, ProcessGroupComm, run_local, use_comm
from shardwise.comm.transports.kernels import copy_boxes
from shardwise.geometry import Layout, Mesh, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.nn import ModelPlan, ShardedOptimizer, shard_module
from shardwise.tensor import wrap

RANKS = 4
LINE = Mesh.of(x=RANKS)
CASES: tuple[tuple[Placement, Placement], ...] = (
    (Shard(0), Shard(1)),
    (Shard(0), Replicate()),
    (Partial("sum"), Shard(0)),
    (Partial("sum"), Replicate()),
)
OURS, ROW, STAGED, BARE = "ours", "ours, many in a row", "through the host", "bare copies"
HOST = "ours, until it returns"
_comms: dict[str, Comm] = {}


@dataclass(frozen=True)
class GpuBenchSizes:
    """Shapes of float32 tensors that move, bytes of copied boxes, runs of each, and moves of threads."""

    shapes: tuple[Shape, ...] = ((512, 512), (2048, 2048), (8192, 8192))
    boxes: tuple[int, ...] = (16 << 20, 64 << 20, 256 << 20)
    runs: int = 21
    in_a_row: int = 20
    thread_runs: int = 200


TINY = GpuBenchSizes(shapes=((64, 64),), boxes=(1 << 20,), runs=1, in_a_row=1, thread_runs=1)


def run(sizes: GpuBenchSizes) -> list[Figures]:
    """All figures, or a note where there is no GPU."""
    if not torch.cuda.is_available():
        return [Figures("GPU", ("figure",), (), ("this machine has no GPU that torch can use",))]
    with LocalWorld(RANKS) as world:
        moves = [_time_case(world, case, shape, sizes) for shape in sizes.shapes for case in CASES]
        opening = world.run(_time_opening)
        stops = world.run(_count_stops_of_process)
    columns = ("move", "MiB", *(f"{way}, ms" for way in (OURS, HOST, ROW, BARE, STAGED)), "ours / bare")
    connecting, first = (1e3 * max(column) for column in zip(*opening, strict=True))
    note = f"connecting takes {connecting:.0f} ms, the first move of fresh memory {first:.0f} ms"
    return [
        Figures(f"Moves of {RANKS} processes on one GPU", columns, moves, (note,)),
        Figures("Boxes of one tensor copied", ("box", "MiB", "TB/s", "share of a plain copy"), _time_boxes(sizes)),
        Figures("Ranks as threads, 1 MiB", ("move", "ms"), _time_threads(sizes)),
        Figures("Synchronisations in a warm call", ("call", "processes", "threads"), _count_all_stops(stops)),
    ]


def _layouts(case: tuple[Placement, Placement], shape: Shape) -> tuple[Layout, Layout]:
    src, dst = (MeshSpec(LINE, (placement,)).layout(shape) for placement in case)
    return src, dst


def _time_case(
    world: LocalWorld, case: tuple[Placement, Placement], shape: Shape, sizes: GpuBenchSizes
) -> tuple[Cell, ...]:
    by_rank = world.run(_measure, CASES.index(case), shape, sizes.runs, sizes.in_a_row)
    found = {way: 1e3 * seconds([spans[way] for spans in by_rank]) for way in by_rank[0]}
    found[ROW] /= sizes.in_a_row
    size = shape[0] * shape[1] * 4 / (1 << 20)
    name = f"{case[0]!r} -> {case[1]!r}"
    return (name, size, *(found.get(way) for way in (OURS, HOST, ROW, BARE, STAGED)), found[OURS] / found[BARE])


def _device_comm() -> Comm:
    if "device" not in _comms:
        _comms["device"] = ProcessGroupComm(device="cuda:0")
    return _comms["device"]


def _host_comm() -> Comm:
    if "host" not in _comms:
        _comms["host"] = ProcessGroupComm(device="cpu")
    return _comms["host"]


def _measure(index: int, shape: Shape, runs: int, in_a_row: int) -> dict[str, Any]:
    """On one rank: prepare all ways, check what they give, time them."""
    torch.cuda.set_device(0)
    src, dst = _layouts(CASES[index], shape)
    rank, values = dist.get_rank(), whole(shape)
    held = tuple(t.cuda() for t in local_parts(src, values, rank))
    wanted = tuple(t.cuda() for t in expected_parts(src, dst, values, rank))
    ways = {
        OURS: _mover(src, dst, held, _device_comm()),
        STAGED: _mover(src, dst, held, _host_comm()),
        BARE: _bare(index, held[0], dst),
    }
    for name, move in ways.items():
        for _ in range(2):
            result = move()
            torch.cuda.synchronize()
            dist.barrier()
            if len(result) != len(wanted) or not all(map(torch.equal, result, wanted)):
                raise AssertionError(f"{name} gives wrong values for {CASES[index]}")
    ways[ROW] = lambda: [ways[OURS]() for _ in range(in_a_row)][-1]
    runs_of: dict[str, Callable[[Any], Any]] = {name: partial(_run_to_the_end, move) for name, move in ways.items()}
    runs_of[HOST] = lambda _: ways[OURS]()  # the device may still be at work: the host is free
    contenders = [Contender(name, call, torch.cuda.synchronize) for name, call in runs_of.items()]
    return run_interleaved(contenders, runs, before=partial(_device_comm().barrier, label="start"))


def _run_to_the_end(move: Callable[[], Any], prepared: object = None) -> Any:
    result = move()
    torch.cuda.synchronize()
    return result


def _mover(src: Layout, dst: Layout, held: tuple[Tensor, ...], comm: Comm) -> Callable[[], tuple[Tensor, ...]]:
    tensor = wrap(src, held, comm, dtype=held[0].dtype)
    return lambda: tensor.redistribute(dst).local_tensors()


def _bare(index: int, mine: Tensor, dst: Layout) -> Callable[[], tuple[Tensor, ...]]:
    """The copies alone, out of memory of the other processes, without any word between the ranks."""
    rank, shape = dist.get_rank(), dst.local_shapes(dist.get_rank())[0]
    theirs: list[Any] = [None] * RANKS
    dist.all_gather_object(theirs, pickle.dumps(reduce_tensor(mine)))
    opened = [mine if r == rank else _rebuild(pickle.loads(theirs[r])) for r in range(RANKS)]
    torch.cuda.synchronize()
    dist.barrier()

    def move() -> tuple[Tensor, ...]:
        out = torch.empty(shape, device="cuda")
        if index == 0:
            step = shape[1]
            for part, source in zip(out.chunk(RANKS), opened, strict=True):
                part.copy_(source[:, rank * step : (rank + 1) * step])
        elif index == 1:
            for part, source in zip(out.chunk(RANKS), opened, strict=True):
                part.copy_(source)
        else:  # of a sum that all ranks get, each makes the whole: that needs no word between them
            rows = slice(None) if index == 3 else slice(rank * shape[0], (rank + 1) * shape[0])
            torch.add(opened[0][rows], opened[1][rows], out=out).add_(opened[2][rows]).add_(opened[3][rows])
        return (out,)

    return move


def _rebuild(reduced: Any) -> Tensor:
    function, args = reduced
    tensor: Tensor = function(*args)
    return tensor


def _time_opening() -> tuple[float, float]:
    """How long a fresh comm takes to connect, and then its first move of memory that nobody has opened."""
    comm = ProcessGroupComm(device="cuda:0")
    dist.barrier()
    start = time.perf_counter()
    comm.barrier(label="connect")
    middle = time.perf_counter()
    src, dst = _layouts(CASES[0], (1024, 1024))
    held = tuple(t.cuda() for t in local_parts(src, whole((1024, 1024)), dist.get_rank()))
    _run_to_the_end(_mover(src, dst, held, comm))
    return middle - start, time.perf_counter() - middle


def _time_boxes(sizes: GpuBenchSizes) -> list[tuple[Cell, ...]]:
    """Rows, columns and blocks of a square, into a dense tensor and out of it."""
    rows: list[tuple[Cell, ...]] = []
    for size in sizes.boxes:
        side = int((size / 4) ** 0.5)
        x, y = torch.rand(side, side, device="cuda"), torch.empty(side, side, device="cuda")
        plain = _device_seconds(partial(y.copy_, x), sizes.runs)
        for name, boxes in _cut(side).items():
            dense = list(y.view(-1).split([x[box].numel() for box in boxes]))
            pairs = [(d.view(x[box].shape), x[box]) for d, box in zip(dense, boxes, strict=True)]
            for way, both in (("packed", pairs), ("unpacked", [(b, a) for a, b in pairs])):
                took = _device_seconds(partial(copy_boxes, both), sizes.runs)
                rows.append((f"{len(boxes)} {name}, {way}", size >> 20, 2 * size / took / 1e12, plain / took))
    return rows


def _cut(side: int) -> dict[str, list[tuple[slice, slice]]]:
    step, every = side // RANKS, slice(None)
    cuts = [slice(i * step, (i + 1) * step) for i in range(RANKS)]
    return {
        "rows": [(cut, every) for cut in cuts],
        "columns": [(every, cut) for cut in cuts],
        "blocks": [(a, b) for a in cuts for b in cuts],
    }


def _device_seconds(call: Callable[[], Any], runs: int) -> float:
    """Median time on the device; filling other memory first empties the cache, and lets the host run ahead."""
    flush = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(runs + 2):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return median(found[2:])


def _time_threads(sizes: GpuBenchSizes) -> list[tuple[Cell, ...]]:
    def body(comm: Comm) -> list[tuple[str, float]]:
        torch.cuda.set_device(0)
        found = []
        for case in CASES:
            src, dst = _layouts(case, (512, 512))
            held = tuple(t.cuda() for t in local_parts(src, whole((512, 512)), comm.rank))
            move = _mover(src, dst, held, comm)
            for _ in range(20):
                move()
            torch.cuda.synchronize()
            comm.barrier(label="start")
            start = time.perf_counter()
            for _ in range(sizes.thread_runs):
                move()
            torch.cuda.synchronize()
            found.append((f"{case[0]!r} -> {case[1]!r}", (time.perf_counter() - start) / sizes.thread_runs))
        return found

    by_rank = run_local(body, RANKS, device="cuda:0")
    return [(name, 1e3 * max(found[i][1] for found in by_rank)) for i, (name, _) in enumerate(by_rank[0])]


def _count_all_stops(by_rank: Sequence[dict[str, int]]) -> list[tuple[Cell, ...]]:
    threads = run_local(_count_stops, RANKS, device="cuda:0")[0]
    return [(name, max(found[name] for found in by_rank), threads[name]) for name in by_rank[0]]


def _count_stops_of_process() -> dict[str, int]:
    with use_comm(_device_comm()):
        return _count_stops(_device_comm())


def _count_stops(comm: Comm) -> dict[str, int]:
    """How often torch warns of a synchronisation in each warm call; ranks that are threads are counted together."""
    torch.cuda.set_device(0)
    counts = comm.process_group is not None or comm.rank == 0
    found = {}
    for name, call in _warm_calls(comm).items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        comm.barrier(label="warm")
        with warnings.catch_warnings(record=True) if counts else nullcontext([]) as caught:
            if counts:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
            comm.barrier(label="counted")
            call()
            comm.barrier(label="called")
            if counts:
                torch.cuda.set_sync_debug_mode("default")
            comm.barrier(label="ended")
        stops = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
        found[name] = len(stops)
        for w in stops[:8]:
            print(f"rank {comm.rank}: {name} stops at {w.filename}:{w.lineno}", file=sys.stderr, flush=True)
    return found


def _warm_calls(comm: Comm) -> dict[str, Callable[[], Any]]:
    src, dst = _layouts(CASES[0], (512, 512))
    held = tuple(t.cuda() for t in local_parts(src, whole((512, 512)), comm.rank))
    return {"redistribute": _mover(src, dst, held, comm), "training step": _training_step(comm)}


def _training_step(comm: Comm) -> Callable[[], Any]:
    """Forward, backward, clipping and AdamW of two layers, whose weights and batch are sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    shard_module(model, ModelPlan(LINE, {"**": "S(0)"}, input_plan="x: S(0)"))
    optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-3)
    batch = torch.randn(8, 64, device="cuda")

    def step() -> None:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
