"""How is a transfer executed? Local copies, one exchange per round, and what arrives is put in place.

1. Each step of each tensor gets fresh destination tensors; one that passes on within hosts completes those before it.
2. On every edge, large boxes travel on their own, straight from the source and into the destination where both are
   one run of memory; small neighbours are packed into one message. Both sides split an edge the same way, from the box
   sizes alone.
3. While messages travel, local copies are made. Then what arrived in buffers is unpacked, or combined by the
   reduction in order of its terms.
4. Several tensors share the exchanges: their messages to a rank follow each other.
5. A reduction of whole tensors by all ranks of the comm, in equal runs, is left to the comm's own collective: it
   combines as it reads and needs no buffers.

Sources are only read. If an exchange fails they are whole, and the destinations are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from shardwise.comm import Comm, ReduceOp, Work
from shardwise.comm.background import BackgroundCall, BackgroundQueue
from shardwise.comm.flat_tensors import cut_for_one_thread
from shardwise.comm.kernels.box_copies import copy_boxes
from shardwise.comm.kernels.box_sums import add_together
from shardwise.comm.protocol import LendingComm, find_lending
from shardwise.geometry import Box
from shardwise.tensor.moving.box_slices import slices_by_round
from shardwise.tensor.moving.parts import (
    Message,
    find_traffic,
    find_whole_collective,
    local_only_kind,
    work_out_rank_part,
)
from shardwise.tensor.moving.reductions import accumulation_dtype, combine_term, reduction_identity, rescale
from shardwise.tensor.moving.staging_pool import staging_pool
from shardwise.tensor.recorder import profiled_move, record_moves, recorded_wait, recorders
from shardwise.tensor.user_line import user_line
from shardwise.transfer import Move, Step, Transfer
from shardwise.transfer.device_cost import DeviceTraffic

BACKGROUND_BYTES = 1 << 16  # fewer are moved in less time than another thread takes to begin


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One tensor to move: the plan (whole, or this rank's part), this rank's source tensors, dtype and device.

    `out_dtype`: that of the result, if it is another one: sums of low precision need not be rounded to it.
    `into`: memory for the result, where a thread with a heap of its own makes the move: fresh memory costs more.
    """

    transfer: Transfer
    sources: tuple[Tensor, ...]
    dtype: torch.dtype
    device: torch.device
    out_dtype: torch.dtype | None = None
    into: tuple[Tensor, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.transfer.src.numel * self.dtype.itemsize

    def with_memory(self, rank: int) -> TransferJob:
        """The same job with memory for its result, if it has one step."""
        if len(self.transfer.steps) != 1:
            return self
        shapes, dtype = self.transfer.steps[0].dst.local_shapes(rank), self.out_dtype or self.dtype
        return replace(self, into=tuple(torch.empty(s, dtype=dtype, device=self.device) for s in shapes))


def resolve_lazy(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors with lazy conjugations and negations carried out, as gradients of complex functions have them."""
    return tuple(t.resolve_conj().resolve_neg() for t in tensors)


class RunningTransfers:
    """Running transfers; the jobs of a batch share exchanges, and batches follow each other.

    `wait()` completes them and returns each tensor's destination tensors.
    """

    def __init__(self, batches: Sequence[Sequence[TransferJob]], comm: Comm, label: str, line: str = "") -> None:
        moves = [(job.transfer, job.dtype) for jobs in batches for job in jobs] if recorders else ()
        self._finished = record_moves(comm, moves, label, line) if recorders else None
        self._progress = _run_batches(batches, comm, label)
        self._work: Work | None = None
        self._results: list[tuple[Tensor, ...]] | None = None
        self._advance()

    def _advance(self) -> None:
        try:
            self._work = next(self._progress)
        except StopIteration as end:
            self._results = end.value

    def wait(self) -> list[tuple[Tensor, ...]]:
        """The destination tensors of each job, in order."""
        while self._results is None:
            assert self._work is not None
            self._work.wait()
            self._work = None  # it holds the round's buffers
            self._advance()
        if self._finished is not None:
            self._finished()
            self._finished = None
        return self._results


class RunningMoves(Protocol):
    """Moves that were started together."""

    def wait(self) -> list[tuple[Tensor, ...]]:
        """The destination tensors of each job, in order."""
        ...


def start_transfers(
    batches: Sequence[Sequence[TransferJob]], comm: Comm, label: str, *, least: int = BACKGROUND_BYTES
) -> RunningMoves:
    """Start transfers that go on while this rank computes: in the background of the comm, where it has one.

    A total of up to `least` bytes is started here: it arrives sooner. All ranks decide alike, by the size of the whole.
    """
    queue: BackgroundQueue | None = getattr(comm, "background", None)
    if queue is None or sum(job.nbytes for jobs in batches for job in jobs) <= least:
        return RunningTransfers(batches, comm, label)
    prepared = [[job.with_memory(comm.rank) for job in jobs] for jobs in batches]
    line = user_line() if recorders else ""  # the thread that moves does not run the user's code

    def run() -> list[tuple[Tensor, ...]]:
        with torch.no_grad():
            return RunningTransfers(prepared, comm, label, line).wait()

    return BackgroundMoves(queue.submit(run), comm, label)


@dataclass(frozen=True, eq=False, slots=True)
class BackgroundMoves:
    """Moves in the background; a trace shows when this rank has nothing to do until they end."""

    call: BackgroundCall[list[tuple[Tensor, ...]]]
    comm: Comm
    label: str

    def wait(self) -> list[tuple[Tensor, ...]]:
        """The destination tensors of each job, in order."""
        with recorded_wait(self.comm, f"{self.label}: wait") if recorders and not self.call.is_done else nullcontext():
            return self.call.wait()


def execute(
    transfer: Transfer,
    sources: Sequence[Tensor],
    comm: Comm,
    dtype: torch.dtype,
    label: str,
    out_dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Carry out one transfer on this rank and return its destination tensors."""
    job = TransferJob(transfer, resolve_lazy(sources), dtype, device, out_dtype)
    if out_dtype is not None and out_dtype != dtype:
        return RunningTransfers([[job]], comm, label).wait()[0]
    if (kind := find_whole_collective(transfer, comm.ranks, dtype)) is not None:
        finished = record_moves(comm, [(transfer, dtype)], label) if recorders else None
        target, work = _start_reduction(job, comm, kind, label)
        work.wait()
        if finished is not None:
            finished()
        return (_scale_result(target, transfer),)
    if (kind := local_only_kind(transfer, comm.rank, dtype.itemsize)) is not None:
        return (_scale_result(_finish_locally(job, kind), transfer),)
    return RunningTransfers([[job]], comm, label).wait()[0]


def _finish_locally(job: TransferJob, kind: str) -> Tensor:
    """The destination of a transfer that sends nothing."""
    source = job.sources[0]
    if kind == "copy":
        return source.clone(memory_format=torch.contiguous_format)
    value = reduction_identity(job.transfer.steps[0].op or "sum", job.dtype)
    return torch.full(source.shape, value, dtype=job.dtype, device=job.device)


def _run_batches(
    batches: Sequence[Sequence[TransferJob]], comm: Comm, label: str
) -> Generator[Work, None, list[tuple[Tensor, ...]]]:
    results: list[tuple[Tensor, ...]] = []
    for jobs in batches:
        results += yield from _run_batch(jobs, comm, label)
    return results


def _run_batch(jobs: Sequence[TransferJob], comm: Comm, label: str) -> Generator[Work, None, list[tuple[Tensor, ...]]]:
    if len(jobs) == 1 and (kind := find_whole_collective(jobs[0].transfer, comm.ranks, jobs[0].dtype)) is not None:
        whole = yield from _reduce_whole(jobs[0], comm, kind, label)
        return [tuple(t.to(jobs[0].out_dtype or t.dtype) for t in whole)]
    current = [job.sources for job in jobs]
    lending = _choose_lending(jobs, comm)
    for index in range(max((len(job.transfer.steps) for job in jobs), default=0)):
        active = [i for i, job in enumerate(jobs) if index < len(job.transfer.steps)]
        runs = [_StepRun(jobs[i].transfer.steps[index], comm.rank, current[i], jobs[i]) for i in active]
        quiet = all(run.step.rounds == 0 and jobs[i].transfer.rank is None for i, run in zip(active, runs, strict=True))
        for number in range(0 if quiet else max(1, *(run.step.rounds for run in runs))):
            if lending is not None:
                yield _start_lending(runs, number, lending, label)
                continue
            sends = _merge_edges(run.outgoing(number) for run in runs)
            receives = _merge_edges(run.incoming(number) for run in runs)
            work = comm.exchange(sends, receives, label=label)
            if number == 0:
                _start_locally(runs)
            yield work
            del work, sends, receives  # before the next round's buffers are made
            for run in runs:
                run.settle()
        if quiet:
            _start_locally(runs)
        for i, run in zip(active, runs, strict=True):
            current[i] = run.finish(last=index == len(jobs[i].transfer.steps) - 1)
    return current


def _choose_lending(jobs: Sequence[TransferJob], comm: Comm) -> LendingComm | None:
    """The comm, if it lends memory and that is how these transfers are to be made; the same on every rank."""
    lending = find_lending(comm)

    def count() -> DeviceTraffic | None:
        counted = [find_traffic(job.transfer, job.dtype.itemsize) for job in jobs]
        known = [each for each in counted if each is not None]
        return sum(known, DeviceTraffic(0, 0, 0)) if len(known) == len(jobs) else None

    return lending if lending is not None and lending.prefers_lending(count) else None


def _start_lending(runs: Sequence[_StepRun], number: int, comm: LendingComm, label: str) -> Work:
    """One round in which boxes are read where they are."""
    if all(run.step.op is None for run in runs):  # the same on every rank, unlike what a rank's part reduces
        for run in runs if number == 0 else ():
            run.fill()
        cut = partial(_cut_boxes, runs, number, comm.rank)
        if hasattr(comm, "exchange_cut"):
            bases = [t for run in runs for side in (run.sources, run.targets) for t in side]
            return cast(Work, comm.exchange_cut((number, *(run.part for run in runs)), bases, cut, label=label))
        return comm.exchange_boxes(*cut(), label=label)
    sends = _merge_edges(run.lent(number) for run in runs)
    receives = {peer for run in runs for peer in run.part.receives.get(number, {})}

    def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
        if number == 0:
            _start_locally(runs)
        boxes = {peer: iter(tensors) for peer, tensors in lent.items()}
        for run in runs:
            run.take_lent(number, boxes)

    return comm.lend(sends, receives, take, label=label)


def _cut_boxes(
    runs: Sequence[_StepRun], number: int, rank: int
) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
    """The boxes that this rank sends and receives in a round, by peer; in the first round those of its own copies."""
    sends = _merge_edges(run.lent(number) for run in runs)
    wanted = _merge_edges(run.places(number) for run in runs)
    if number == 0:
        own = [pair for run in runs for pair in run.local_pairs()]
        sends[rank], wanted[rank] = [source for _, source in own], [target for target, _ in own]
    return sends, wanted


def _reduce_whole(job: TransferJob, comm: Comm, kind: str, label: str) -> Generator[Work, None, tuple[Tensor, ...]]:
    """The whole transfer as one collective of the comm."""
    target, work = _start_reduction(job, comm, kind, label)
    yield work
    return (_scale_result(target, job.transfer),)


def _start_reduction(job: TransferJob, comm: Comm, kind: str, label: str) -> tuple[Tensor, Work]:
    first, source = job.transfer.steps[0], job.sources[0]
    assert first.op is not None
    op = cast(ReduceOp, first.op)
    lending = _choose_lending([job], comm) if kind == "all_reduce" else None
    if lending is not None and hasattr(lending, "all_reduce_into"):
        target = torch.empty_like(source, memory_format=torch.contiguous_format)
        return target, lending.all_reduce_into(target, source.contiguous(), op, label=label)
    if lending is not None and source.numel() % comm.world_size == 0:
        target = torch.empty_like(source, memory_format=torch.contiguous_format)
        run = target.view(comm.world_size, -1)[comm.ranks.index(comm.rank)]
        comm.reduce_scatter_into(run, source.contiguous(), op, label=label).wait()
        return target, comm.all_gather_into(target, run, label=label)
    if kind == "all_reduce":
        target = _make_targets(job, (tuple(source.shape),), job.dtype)[0].copy_(source)
        return target, comm.all_reduce(target, op, label=label)
    target = _make_targets(job, job.transfer.dst.local_shapes(comm.rank), job.dtype)[0]
    return target, comm.reduce_scatter_into(target, source.contiguous(), op, label=label)


def _make_targets(job: TransferJob, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """The destination tensors of a step, in the memory that a job has for them if it does."""
    if job.into is not None and all(t.dtype == dtype for t in job.into):
        return list(job.into)
    return [torch.empty(shape, dtype=dtype, device=job.device) for shape in shapes]


def _scale_result(target: Tensor, transfer: Transfer) -> Tensor:
    for step in transfer.steps:
        rescale(target, step.scale)
    return target


def _start_locally(runs: Sequence[_StepRun]) -> None:
    for run in runs:
        run.copy_locally()


def _merge_edges(parts: Iterable[Mapping[int, list[Tensor]]]) -> dict[int, list[Tensor]]:
    merged: dict[int, list[Tensor]] = {}
    for part in parts:
        for peer, tensors in part.items():
            merged.setdefault(peer, []).extend(tensors)
    return merged


def view_box(tensor: Tensor, box: Box) -> Tensor:
    """A box of a tensor as a view."""
    return tensor if box.sizes == tensor.shape else tensor[box.slices]


class _StepRun:
    """One step of one tensor on this rank."""

    def __init__(self, step: Step, rank: int, sources: tuple[Tensor, ...], job: TransferJob) -> None:
        self.step, self.sources, self.job = step, sources, job
        self.part = work_out_rank_part(step, rank, job.dtype.itemsize)
        dtype = accumulation_dtype(job.dtype) if self.part.reducing else job.dtype
        self.targets = list(sources) if step.in_place else _make_targets(job, self.part.shapes, dtype)
        self.arrived: list[tuple[Tensor, Message]] = []
        self.staged: list[Tensor] = []

    def outgoing(self, number: int) -> dict[int, list[Tensor]]:
        """The messages this rank sends in a round, by peer."""
        edges = self.part.sends.get(number, {})
        return {peer: [self._pack(message) for message in cut] for peer, cut in edges.items()}

    def _pack(self, message: Message) -> Tensor:
        views = [view_box(self.sources[m.slot], m.box) for m in message]
        if len(views) == 1 and views[0].is_contiguous():
            return views[0]
        buffer = self._buffer(message)
        position = 0
        for view in views:
            buffer[position : position + view.numel()].view(view.shape).copy_(view)
            position += view.numel()
        return buffer

    def _buffer(self, message: Message) -> Tensor:
        buffer = staging_pool.take(sum(m.box.numel for m in message), self.job.dtype, self.job.device)
        self.staged.append(buffer)
        return buffer

    def incoming(self, number: int) -> dict[int, list[Tensor]]:
        """Where this rank receives in a round, by peer: destination memory where it is one run, else buffers."""
        places: dict[int, list[Tensor]] = {}
        for peer, cut in self.part.receives.get(number, {}).items():
            for message in cut:
                place = self._place(message)
                if place is None:
                    place = self._buffer(message)
                    self.arrived.append((place, message))
                places.setdefault(peer, []).append(place)
        return places

    def _place(self, message: Message) -> Tensor | None:
        if len(message) != 1 or self.part.reducing:
            return None
        view = view_box(self.targets[message[0].slot], message[0].box)
        return view if view.is_contiguous() else None

    def lent(self, number: int) -> dict[int, list[Tensor]]:
        """The boxes that other ranks read in a round, by peer."""
        listed = slices_by_round(self.part).sends.get(number, {})
        return {peer: [self.sources[slot][at] for slot, at, _ in boxes] for peer, boxes in listed.items()}

    def places(self, number: int) -> dict[int, list[Tensor]]:
        """Where the boxes of other ranks go in a round, by peer."""
        listed = slices_by_round(self.part).receives.get(number, {})
        return {peer: [self.targets[slot][at] for slot, at, _ in boxes] for peer, boxes in listed.items()}

    def fill(self) -> None:
        """Fill boxes that nothing is reduced into."""
        for slot, box in self.part.fills:
            view_box(self.targets[slot], box).fill_(reduction_identity(self.step.op or "sum", self.job.dtype))

    def local_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Targets and sources of this rank's own copies, of a step that reduces nothing."""
        return [
            (view_box(self.targets[c.dst_slot], c.dst_box), view_box(self.sources[c.src_slot], c.src_box))
            for c in self.part.copies
        ]

    def take_lent(self, number: int, boxes: Mapping[int, Iterator[Tensor]]) -> None:
        """Read the boxes of other ranks that belong to this round of this tensor."""
        slices = slices_by_round(self.part)
        listed = slices.receives.get(number, {})
        found = [(box, next(boxes[peer])) for peer, cut in listed.items() for box in cut]
        if self.part.reducing:
            found.sort(key=lambda pair: pair[0][2])
        pairs = [(self.targets[slot][at], part) for (slot, at, _), part in found]
        pairs = [(t, part if part.device == t.device else part.to(t.device)) for t, part in pairs]  # of a host tensor
        if self.part.reducing and self.step.op == "sum" and slices.separate.get(number, False):
            pairs = add_together(pairs)
        self._combine_pairs(pairs)

    def copy_locally(self) -> None:
        """Copies within this rank, and fills; a reduction starts from them, or from its identity."""
        self.fill()
        own = sum(c.dst_box.numel for c in self.part.copies)
        if self.part.reducing and own != sum(t.numel() for t in self.targets):
            for target in self.targets:
                target.fill_(reduction_identity(self.step.op or "sum", target.dtype))
            for copy in self.part.copies:
                self._combine(
                    view_box(self.targets[copy.dst_slot], copy.dst_box), self._source_of(copy.src_slot, copy.src_box)
                )
            return
        for copy in self.part.copies:
            whole = view_box(self.targets[copy.dst_slot], copy.dst_box)
            for target, source in cut_for_one_thread(whole, self._source_of(copy.src_slot, copy.src_box)):
                target.copy_(source)

    def _source_of(self, slot: int, box: Box) -> Tensor:
        return view_box(self.sources[slot], box)

    def settle(self) -> None:
        """Put in place what arrived in buffers, in order of terms."""
        self._combine_parts([pair for buffer, message in self.arrived for pair in _unpack_message(buffer, message)])
        self.arrived.clear()
        staging_pool.give_back(self.staged)
        self.staged.clear()

    def _combine_parts(self, parts: Sequence[tuple[Move, Tensor]]) -> None:
        ordered = sorted(parts, key=lambda pair: pair[0].term)
        self._combine_pairs([(view_box(self.targets[move.slot], move.box), part) for move, part in ordered])

    def _combine_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if not self.part.reducing:
            copy_boxes(pairs)
            return
        for target, part in pairs:
            self._combine(target, part)

    def _combine(self, target: Tensor, part: Tensor) -> None:
        for whole, term in cut_for_one_thread(target, part):
            combine_term(self.step.op or "sum", whole, term)

    def finish(self, *, last: bool) -> tuple[Tensor, ...]:
        """The destination tensors, scaled and in the tensor's dtype; those of the last step in the result's."""
        for target in self.targets:
            rescale(target, self.step.scale)
        dtype = self.job.out_dtype if last and self.job.out_dtype is not None else self.job.dtype
        return tuple(t.to(dtype) for t in self.targets)


def _unpack_message(buffer: Tensor, message: Message) -> list[tuple[Move, Tensor]]:
    """The parts of a packed message, each in its box's shape."""
    parts, position = [], 0
    for move in message:
        parts.append((move, buffer.reshape(-1)[position : position + move.box.numel].view(move.box.sizes)))
        position += move.box.numel
    return parts


T = TypeVar("T")


class Handle(Generic[T]):
    """What `async_op=True` returns: `wait()` completes the move and returns its result; it may be called repeatedly."""

    def __init__(self, running: RunningMoves, finish: Callable[[Sequence[tuple[Tensor, ...]]], T]) -> None:
        self._running, self._finish = running, finish
        self._result: tuple[T] | None = None

    def wait(self) -> T:
        """The result; raises `CommError` if the exchange failed."""
        if self._result is None:
            with profiled_move("wait"):
                self._result = (self._finish(self._running.wait()),)
        return self._result[0]
