"""Section "move": how long does a tensor take to another layout, beside torch's ways and the raw collective?

1. Four ranks hold the tensor. Each case is prepared once; the result of every way is compared with the expected values.
2. All ways take turns, with a barrier before each. A run lasts from the first rank's start to the last rank's end.
3. Apart from the timing, bytes on the loopback interface and the peak of each rank's memory are counted.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import move_init, move_report
from bench.memory import Peak
from bench.move_cases import CASES, RANKS, MoveCase, Shape, expected_parts, local_parts, whole
from bench.move_peers import FRESH, NATIVE, READY, dtensor_contenders, raw_contenders, sharded_tensor_contenders
from bench.move_report import LIMITED, OURS, SOCKETS, Measured, MoveOutcome
from bench.report import Figures
from bench.timing import Contender, Span, run_interleaved, seconds
from bench.wire import loopback_bytes
from shardwise.comm import Comm, LocalWorld, ProcessGroupComm, default_comm
from shardwise.tensor import ShardedTensor, shard, wrap
from shardwise.transfer import plan_transfer

ITEMSIZE = 4
LIMIT_PART = 8
BYTES_ONLY = (FRESH, READY, NATIVE)  # they move bytes and do not lay them out, so that their results are not compared
_sockets: list[Comm] = []


@dataclass(frozen=True)
class MoveBenchSizes:
    """For each tensor its shape and number of runs; runs in which bytes are counted; runs of init; cases by number."""

    tensors: tuple[tuple[Shape, int], ...] = (((512, 512), 21), ((2048, 2048), 11), ((8192, 8192), 5))
    counted_runs: int = 3
    inits: int = 31
    cases: tuple[int, ...] = tuple(range(len(CASES)))


TINY = MoveBenchSizes(tensors=(((64, 64), 1),), counted_runs=1, inits=1, cases=(0, 4, 7, 8))


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured of one way: its runs, the bytes seen on the wire, the memory beyond its result."""

    spans: list[Span]
    wire: int | None
    extra: int | None


def run(sizes: MoveBenchSizes) -> list[Figures]:
    """All cases at all sizes, on spawned gloo ranks."""
    with LocalWorld(RANKS) as world:
        outcomes = []
        for shape, repeats in sizes.tensors:
            for index in sizes.cases:
                by_rank = world.run(_measure_case, index, shape, repeats, sizes.counted_runs)
                outcomes.append(_outcome(CASES[index], shape, by_rank))
                print(move_report.line(outcomes[-1]), file=sys.stderr, flush=True)
        made = move_init.measure(world, sizes.inits)
    return [*move_report.tables(outcomes), made]


def _outcome(case: MoveCase, shape: Shape, by_rank: Sequence[dict[str, RankFigures]]) -> MoveOutcome:
    src, dst = case.layouts(shape)
    plan = plan_transfer(src, dst, itemsize=ITEMSIZE)
    ways = {name: _join_rank_figures([found[name] for found in by_rank]) for name in by_rank[0]}
    return MoveOutcome(case.name, plan.moved_bytes, plan.lower_bound_bytes, _size(shape), _limit(shape), ways)


def _size(shape: Shape) -> int:
    return shape[0] * shape[1] * ITEMSIZE


def _limit(shape: Shape) -> int:
    return _size(shape) // LIMIT_PART


def _join_rank_figures(by_rank: Sequence[RankFigures]) -> Measured:
    extra = [found.extra for found in by_rank if found.extra is not None]
    return Measured(seconds([found.spans for found in by_rank]), by_rank[0].wire, max(extra, default=None))


def _measure_case(index: int, shape: Shape, repeats: int, counted_runs: int) -> dict[str, RankFigures]:
    """On one rank: prepare, check, count, time."""
    warnings.simplefilter("ignore", FutureWarning)  # the peers deprecate themselves and each other
    logging.disable(logging.WARNING)
    case, rank, values = CASES[index], dist.get_rank(), whole(shape)
    src, dst = case.layouts(shape)
    held = local_parts(src, values, rank)
    ways = [
        *_our_contenders(case, shape, held, values),
        *raw_contenders(case, held, sum(p.box.numel for p in dst.pieces_of(rank)), values),
        *dtensor_contenders(case, shape, held, values),
        *sharded_tensor_contenders(case, shape, held, values),
    ]
    for way in ways:
        _check(way, case, expected_parts(src, dst, values, rank))
    counted = {way.name: _count_wire_and_memory(way, counted_runs) for way in ways}
    spans = run_interleaved(ways, repeats, before=dist.barrier)
    return {name: RankFigures(spans[name], *counted[name]) for name in spans}


def _our_contenders(case: MoveCase, shape: Shape, held: tuple[Tensor, ...], values: Tensor) -> list[Contender]:
    """Ours through the comm that ranks of one host get, through gloo's sockets, and with a buffer limit."""
    if not _sockets:
        _sockets.append(ProcessGroupComm(shared_memory=False))
    kinds = {OURS: (default_comm(), None), SOCKETS: (_sockets[0], None), LIMITED: (default_comm(), _limit(shape))}
    if case.verb == "shard":
        del kinds[LIMITED]
    return [Contender(name, _our_move(case, shape, held, values, *kind)) for name, kind in kinds.items()]


def _our_move(
    case: MoveCase, shape: Shape, held: tuple[Tensor, ...], values: Tensor, comm: Comm, limit: int | None
) -> Any:
    src, dst = case.layouts(shape)
    if case.verb == "shard":
        source = values if comm.rank == 0 else None
        return lambda _: shard(source, dst, comm=comm).local_tensors()
    tensor: ShardedTensor = wrap(src, held, comm, dtype=values.dtype)
    if case.verb == "gather":
        return lambda _: _whole(tensor.gather_to(0, max_buffer_bytes=limit))
    return lambda _: tensor.redistribute(dst, max_buffer_bytes=limit).local_tensors()


def _whole(tensor: Tensor | None) -> tuple[Tensor, ...]:
    return () if tensor is None else (tensor,)


def _check(way: Contender, case: MoveCase, wanted: tuple[Tensor, ...]) -> None:
    """Run once, so that plans and connections exist, and compare what came out."""
    result = way.run(way.prepare())
    if way.name in BYTES_ONLY or (case.verb == "gather" and not wanted):
        return
    right = len(result) == len(wanted) and all(map(torch.equal, result, wanted))
    if not right:
        raise AssertionError(f"{way.name} gives wrong values for {case.name}")


def _count_wire_and_memory(way: Contender, runs: int) -> tuple[int | None, int | None]:
    """Bytes on the loopback interface, and the growth of this rank's memory beyond the result; the least of some runs.

    Whatever else the machine does only adds to them.
    """
    found = [_count_once(way) for _ in range(runs)]
    wires, extras = ([value for value in column if value is not None] for column in zip(*found, strict=True))
    return min(wires, default=None), min(extras, default=None)


def _count_once(way: Contender) -> tuple[int | None, int | None]:
    prepared = way.prepare()
    peak = Peak()
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    result = way.run(prepared)
    grown = peak.grown()
    dist.barrier()
    after = loopback_bytes()
    wire = None if before is None or after is None else after - before
    return wire, None if grown is None else max(0, grown - _fresh_bytes(result))


def _fresh_bytes(result: Any) -> int:
    return sum(t.nbytes for t in ((result,) if isinstance(result, Tensor) else result))
