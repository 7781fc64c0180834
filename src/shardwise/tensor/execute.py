"""How are moves carried out? Local copies, one exchange per round, and what arrives is put in place.

1. Each step of each move gets fresh destination tensors; one that passes on within hosts completes those before it.
2. On every edge, large boxes travel on their own, straight from the source and into the destination where both are
   one run of memory; small neighbours are packed into one message. Both sides split an edge the same way, from the box
   sizes alone.
3. While messages travel, local copies are made. Then what arrived in buffers is unpacked, or combined by the
   reduction in order of its terms.
4. Several moves share the exchanges: their messages to a rank follow each other.
5. A reduction of whole tensors by all ranks of the comm, or by groups of them side by side, in equal runs, is left to
   a comm's own collective: it combines as it reads and needs no buffers. Small all-reduces of a group are joined.
6. Where ranks can read each other's memory, nothing is packed: boxes are copied, or added, from where they are.

Sources are only read. If an exchange fails they are whole, and the destinations are dropped. A buffer in CPU memory
goes back to a pool when its round is done, since fresh memory costs as much to touch for the first time as the bytes
cost to move. On accelerators torch's own allocator does the same.

`Running` is moves that were started, here or in the background of the comm. The arithmetic of pending reductions on
local tensors is in this file too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from shardwise.comm import Comm, ReduceOp, Work
from shardwise.comm.agree import agree_on_request
from shardwise.comm.background import BackgroundCall
from shardwise.comm.flat_tensors import add_to, cut_for_one_thread, run_bytes
from shardwise.comm.protocol import FAST_RUN_BYTES, LEAST_RUN_BYTES, Combine, Request
from shardwise.comm.transports.kernels import add_together, copy_boxes
from shardwise.geometry import Box, Reduction
from shardwise.geometry.mesh import IntArray
from shardwise.tensor.parts import (
    LOW_PRECISION_BYTES,
    SMALL_MESSAGE_BYTES,
    BoxPlace,
    RowPart,
    accumulation_dtype,
    work_out_rank_part,
)
from shardwise.tensor.recorder import (
    find_recorder,
    observed_exchange,
    profiled_move,
    recorded_wait,
    recorders,
    user_line,
)
from shardwise.transfer import Step

if TYPE_CHECKING:
    from shardwise.tensor.move import Move

KEPT_BYTES = 256 * 1024 * 1024
_LEAST = 1 << 16


class StagingPool:
    """Free byte buffers of sizes at most an eighth larger than asked for; keeps at most `KEPT_BYTES` of them.

    >>> pool = StagingPool()
    >>> first = staging_pool.take(100, torch.float32, torch.device("cpu"))
    >>> staging_pool.give_back([first])
    >>> staging_pool.take(50, torch.float64, torch.device("cpu")).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised run of `count` elements."""
        if device.type != "cpu":
            return torch.empty(count, dtype=dtype, device=device)
        nbytes = max(_LEAST, count * dtype.itemsize)
        step = 1 << max(0, nbytes.bit_length() - 4)
        size = -(-nbytes // step) * step
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else None
            self._kept -= size if buffer is not None else 0
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[: count * dtype.itemsize].view(dtype)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Take buffers back that nobody reads or writes any more."""
        for buffer in buffers:
            if buffer.device.type != "cpu":
                continue
            size = buffer.untyped_storage().nbytes()
            with self._lock:
                if self._kept + size > KEPT_BYTES:
                    continue
                self._kept += size
                self._free.setdefault(size, []).append(
                    buffer.new_empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
                )


staging_pool = StagingPool()


_LARGEST_WHOLE = 2**63 - 1024  # the largest float64 that is an int64


def reduction_identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing when it is combined.

    >>> kinds = ("sum", torch.float32), ("max", torch.int8), ("min", torch.float64)
    >>> tuple(reduction_identity(*kind) for kind in kinds)
    (0, -128, inf)
    """
    if op in ("sum", "product"):
        return int(op == "product")
    sign = 1 if op == "min" else -1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        finite_only = dtype.itemsize == 1 and dtype != torch.float8_e5m2  # it has no infinity
        return sign * (torch.finfo(dtype).max if finite_only else float("inf"))
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min


def combine_term(op: str, target: Tensor, part: Tensor) -> None:
    """Combine a term into the target, in place."""
    if part.dtype != target.dtype and part.dtype.itemsize < LOW_PRECISION_BYTES:
        part = part.to(target.dtype)  # torch promotes the others itself, on a GPU without a pass of its own
    if op == "sum":
        add_to(target, part)
    elif op == "product":
        target.mul_(part)
    else:
        (torch.minimum if op == "min" else torch.maximum)(target, part, out=target)


def rescale(target: Tensor, scale: tuple[int, int]) -> None:
    """Multiply by a fraction, in place and with one rounding; `check_reducible` has refused what it cannot do."""
    if scale == (1, 1):
        return
    wide = target.to(accumulation_dtype(target.dtype))
    if scale[0] != 1:
        wide.mul_(scale[0])
    if scale[1] != 1:
        wide.div_(scale[1])
    if wide is not target:
        target.copy_(wide)


def check_reducible(op: str, divisor: int, dtype: torch.dtype) -> None:
    """Raise unless this kind of reduction is possible on this dtype."""
    if dtype == torch.bool and op in ("sum", "product"):
        raise ValueError(
            f"a pending {op} of bool values is not defined; use Partial('max') for any, Partial('min') for all"
        )
    if dtype.is_complex and op in ("min", "max"):
        raise ValueError(f"a pending {op} of complex values ({dtype}) is not defined; use Partial('sum')")
    if divisor != 1 and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"a pending average of {dtype} values does not stay in {dtype}; convert to a floating dtype first"
        )


def _keeps_order(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether of two values the smaller one is converted to the smaller one, or both to one."""
    if new.is_floating_point or old == torch.bool:
        return True
    if new == torch.bool:
        return False
    if old.is_floating_point:
        return torch.iinfo(new).min < 0
    return torch.iinfo(new).min <= torch.iinfo(old).min and torch.iinfo(new).max >= torch.iinfo(old).max


def check_conversion(pending: Reduction | None, old: torch.dtype, new: torch.dtype) -> None:
    """Raise if converting addends is not converting the value: rounding to whole numbers, losing a part or the order.

    >>> check_conversion(Reduction("max"), torch.float32, torch.int64)
    >>> check_conversion(None, torch.float32, torch.int64)
    """
    if pending is None or old == new:
        return
    if pending.op in ("min", "max"):
        same = not new.is_complex and _keeps_order(old, new)  # complex numbers have no order
    else:
        fractions = (old.is_floating_point or old.is_complex) and not (new.is_floating_point or new.is_complex)
        same = not fractions and new != torch.bool
    if same:
        return
    raise ValueError(
        f"addends of a pending {pending} converted from {old} to {new} do not yield the converted value; "
        "redistribute to Shard or Replicate first"
    )


def limit_addend(addend: Tensor, pending: Reduction | None, new: torch.dtype) -> Tensor:
    """An addend of a pending minimum or maximum that can be converted: where nothing is reduced it is infinite.

    As a whole number it becomes the largest or smallest one, to which infinity is not converted.

    >>> limit_addend(torch.tensor(float("inf")), Reduction("min"), torch.int8)
    tensor(127., dtype=torch.float64)
    """
    if pending is None or pending.op not in ("min", "max") or not addend.is_floating_point():
        return addend
    if new.is_floating_point or new.is_complex or new == torch.bool:
        return addend
    limits = torch.iinfo(new)
    return addend.double().clamp(limits.min, min(limits.max, _LARGEST_WHOLE))


BACKGROUND_BYTES = 1 << 16  # fewer are moved in less time than another thread takes to begin
T = TypeVar("T")
Tensors: TypeAlias = tuple[Tensor, ...]
Rounds: TypeAlias = Generator[Work, None, list[Tensors]]
Allocate: TypeAlias = Callable[..., Tensor]
"""What makes a tensor without values, as `torch.empty` does: of a shape, a `dtype` and a `device`."""


class Running:
    """Moves that were started together. `wait` completes them and returns each move's destination tensors, in order.

    They go on round by round in whoever waits, or by themselves as a call in the background of the comm.
    """

    def __init__(
        self,
        comm: Comm,
        label: str,
        rounds: Rounds | None = None,
        call: BackgroundCall[list[Tensors]] | None = None,
        finished: Callable[[], None] | None = None,
    ) -> None:
        self._comm, self._label = comm, label
        self._rounds, self._call, self._finished = rounds, call, finished
        self._work: Work | None = None
        self._results: list[Tensors | None] | None = None
        if rounds is not None:
            self._advance(rounds)

    def _advance(self, rounds: Rounds) -> None:
        try:
            self._work = next(rounds)
        except StopIteration as end:
            self._results = end.value

    def wait(self) -> list[Tensors]:
        """The destination tensors of each move that were not taken."""
        if self._results is None and self._call is not None:
            idle = recorders and not self._call.is_done  # a trace shows that this rank has nothing to do
            with recorded_wait(self._comm, f"{self._label}: wait") if idle else nullcontext():
                self._results = list(self._call.wait())
            self._call = None  # it holds the results
        while self._results is None:
            assert self._work is not None and self._rounds is not None
            self._work.wait()
            self._work = None  # it holds the round's buffers
            self._advance(self._rounds)
        if self._finished is not None:
            self._finished()
            self._finished = None
        return cast(list[Tensors], self._results)

    def take(self, index: int) -> Tensors | None:
        """The destination tensors of one move, the first time; None later."""
        self.wait()
        assert self._results is not None
        result, self._results[index] = self._results[index], None
        return result


def run_moves(
    moves: Sequence[Move],
    sources: Sequence[Sequence[Tensor]],
    label: str | None = None,
    *,
    limit: int | None = None,
    into: Sequence[Tensors | None] = (),
    line: str = "",
    request: Request | None = None,
) -> Running:
    """Start moves of one comm here; their messages share exchanges, as many as have up to `limit` bytes under way.

    `request`: all ranks agree on it with the first exchange, else they raise.
    """
    comm, label = moves[0].comm, label or moves[0].label
    recorder = find_recorder(comm) if recorders else None
    finished = None if recorder is None else recorder.begin_move(comm, moves, label, line)
    return Running(comm, label, exchange_rounds(moves, sources, label, limit, into, request), finished=finished)


def start_moves(
    moves: Sequence[Move],
    sources: Sequence[Sequence[Tensor]],
    label: str | None = None,
    *,
    limit: int | None = None,
    least: int = BACKGROUND_BYTES,
    allocate: Allocate | None = None,
) -> Running:
    """Start moves of one comm that go on while this rank computes: in the background of the comm, where it has one.

    A total of up to `least` bytes is started here: it arrives sooner. All ranks decide alike, by the size of the whole.
    `allocate`: where the results get their memory.
    """
    comm, name = moves[0].comm, label or moves[0].label
    here = not comm.capabilities.background or sum(move.nbytes for move in moves) <= least
    into: list[Tensors | None] = []
    # The thread that moves has a heap of its own, in which fresh memory costs more, and does not run the user's code.
    if not here or allocate is not None:
        into = [allocate_result(move, held, allocate) for move, held in zip(moves, sources, strict=True)]
    if here:
        return run_moves(moves, sources, name, limit=limit, into=into)
    line = user_line() if recorders else ""

    def run() -> list[Tensors]:
        with torch.no_grad():
            return run_moves(moves, sources, name, limit=limit, into=into, line=line).wait()

    return Running(comm, name, call=comm.submit(run))


def allocate_result(move: Move, sources: Sequence[Tensor], allocate: Allocate | None) -> Tensors | None:
    """Memory for the result of a move of one step."""
    if len(move.transfer.steps) != 1:
        return None
    dtype, device = move.out_dtype or move.dtype, move.device_of(sources)
    shapes = move.transfer.steps[0].dst.local_shapes(move.comm.rank)
    return tuple((allocate or torch.empty)(s, dtype=dtype, device=device) for s in shapes)


def exchange_rounds(
    moves: Sequence[Move],
    sources: Sequence[Sequence[Tensor]],
    label: str,
    limit: int | None,
    into: Sequence[Tensors | None],
    request: Request | None,
) -> Rounds:
    """The rounds of moves as they are run, one exchange each; returns the destination tensors of each move."""
    results: list[Tensors] = []
    for first, end in _split_by_limit(moves, limit):
        batch, held = moves[first:end], [resolve_lazy(tensors) for tensors in sources[first:end]]
        memory = into[first:end] or [None] * len(batch)
        if _is_one_collective(batch):
            if request is not None:
                agree_on_request(batch[0].comm, request, label=label)
            results += yield from _reduce_whole(batch, [tensors[0] for tensors in held], memory[0], label)
        else:
            results += yield from _exchange_batch(batch, held, memory, label, request)
        request = None
    for move, moved in zip(moves, results, strict=True):
        for tensor in moved if move.scale != (1, 1) else ():
            rescale(tensor, move.scale)
    return results


def _split_by_limit(moves: Sequence[Move], limit: int | None) -> list[tuple[int, int]]:
    """The runs of moves that share exchanges: as many as fit in a limit together."""
    if limit is None or len(moves) == 1:
        return [(0, len(moves))]
    firsts: list[int] = []
    left = 0
    for i, move in enumerate(moves):
        if not firsts or move.bytes_in_flight > left:
            firsts.append(i)
            left = limit
        left -= move.bytes_in_flight
    return list(zip(firsts, [*firsts[1:], len(moves)], strict=True))


def _exchange_batch(
    moves: Sequence[Move], current: list[Tensors], into: Sequence[Tensors | None], label: str, request: Request | None
) -> Rounds:
    """Moves that share exchanges; the first exchange carries the request."""
    comm = moves[0].comm
    reads_peers = comm.capabilities.reads_peers
    for index in range(max(len(move.transfer.steps) for move in moves)):
        active = [i for i, move in enumerate(moves) if index < len(move.transfer.steps)]
        runs = [_StepRun(moves[i], index, current[i], into[i]) for i in active]
        quiet = all(run.step.rounds == 0 and run.move.transfer.rank is None for run in runs)
        if quiet and request is not None:
            agree_on_request(comm, request, label=label)
            request = None
        for number in range(0 if quiet else max(1, *(run.step.rounds for run in runs))):
            sends, receives, combine = (_find_boxes if reads_peers else _pack_messages)(runs, number, comm.rank)
            work = comm.exchange(sends, receives, label=label, request=request, combine=combine)
            if number == 0 and not reads_peers:
                _start_beside(work, runs)
            yield work
            request = None
            del work, sends, receives, combine  # before the next round's buffers are made
            for run in runs if not reads_peers else ():
                run.settle()
        if quiet:
            _start_locally(runs)
        for i, run in zip(active, runs, strict=True):
            current[i] = run.finish()
    return current


Exchange: TypeAlias = tuple[dict[int, list[Tensor]], dict[int, list[Tensor]], Combine | None]


def _pack_messages(runs: Sequence[_StepRun], number: int, rank: int) -> Exchange:
    """What this rank sends and receives in a round, by peer: boxes or buffers that are one run of memory each."""
    sends = _merge_edges([run.outgoing(number) for run in runs])
    return sends, _merge_edges([run.incoming(number) for run in runs]), None


def _find_boxes(runs: Sequence[_StepRun], number: int, rank: int) -> Exchange:
    """The boxes that this rank sends and receives in a round, by peer, where ranks read each other's memory.

    In the first round also those of its own copies. If a step reduces, each rank combines what the others send.
    """
    sends = _merge_edges([run.lent(number) for run in runs])
    receives = _merge_edges([run.places(number) for run in runs])
    if all(run.step.op is None for run in runs):  # the same on every rank, unlike what a rank's part reduces
        if number == 0:
            for run in runs:
                run.fill()
            own = [pair for run in runs for pair in run.local_pairs()]
            sends[rank], receives[rank] = [source for _, source in own], [target for target, _ in own]
        return sends, receives, None

    def combine(arrived: Mapping[int, Sequence[Tensor]]) -> None:
        if number == 0:
            _start_locally(runs)
        boxes = {peer: iter(tensors) for peer, tensors in arrived.items()}
        for run in runs:
            run.take_lent(number, boxes)

    return sends, receives, combine


def _start_beside(work: Work, runs: Sequence[_StepRun]) -> None:
    """Copy this rank's own boxes while messages travel; if that fails, no other rank waits for this one."""
    try:
        _start_locally(runs)
    except BaseException:
        work.wait()
        raise


def _is_one_collective(moves: Sequence[Move]) -> bool:
    """Whether moves are one collective of the comm; all-reduces of one kind are, as their tensors can be joined."""
    first = moves[0].collective
    if first is None or len(moves) == 1 or first.kind != "all_reduce":
        return first is not None and len(moves) == 1
    kinds = {(move.collective, move.dtype, move.transfer.steps[0].op) for move in moves}
    return len(kinds) == 1


def _reduce_whole(moves: Sequence[Move], sources: Sequence[Tensor], into: Tensors | None, label: str) -> Rounds:
    """Moves that are one collective of the comm, or of the part of it that reduces among itself."""
    first, collective, comm = moves[0], moves[0].collective, moves[0].reducing_comm
    assert collective is not None
    op, wide = cast(ReduceOp, first.transfer.steps[0].op), accumulation_dtype(first.dtype)
    if len(moves) == 1:
        source = sources[0].to(wide).contiguous()
        target = _make_targets(into, first.out_shapes, wide, source.device)[0]
    else:
        source = target = torch.cat([tensor.reshape(-1).to(wide) for tensor in sources])
    reduce = comm.all_reduce_into if collective.kind == "all_reduce" else comm.reduce_scatter_into
    yield reduce(target, source, op, label=label)
    shapes = [move.out_shapes[0] for move in moves]
    cut = [target] if len(moves) == 1 else torch.split(target, [math.prod(shape) for shape in shapes])
    results: list[Tensors] = []
    for move, part, shape in zip(moves, cut, shapes, strict=True):
        for step in move.transfer.steps:
            rescale(part, step.scale)
        own = part.to(move.out_dtype or move.dtype).view(shape)
        results.append((own.clone() if len(moves) > 1 and own.dtype == wide else own,))
    return results


def finish_locally(move: Move, source: Tensor) -> Tensor:
    """The only destination tensor of a move that sends nothing: a copy of the only source, or filled."""
    if move.local_kind == "copy":
        target = source.clone(memory_format=torch.contiguous_format)
    else:
        value = reduction_identity(move.transfer.steps[0].op or "sum", move.dtype)
        target = torch.full(source.shape, value, dtype=move.dtype, device=source.device)
    for scale in (*(step.scale for step in move.transfer.steps), move.scale):
        rescale(target, scale)
    return target


def resolve_lazy(tensors: Sequence[Tensor]) -> Tensors:
    """The tensors off the tape, with lazy conjugations and negations (of complex gradients) carried out."""
    return tuple([_resolve(t.detach()) for t in tensors])


def _resolve(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _make_targets(
    into: Tensors | None, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The destination tensors of a step, in the memory that there is for them, if there is."""
    if into is not None and all(t.dtype == dtype for t in into):
        return list(into)
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


def _start_locally(runs: Sequence[_StepRun]) -> None:
    for run in runs:
        run.copy_locally()


def _merge_edges(parts: Sequence[dict[int, list[Tensor]]]) -> dict[int, list[Tensor]]:
    first, *others = parts
    merged = dict(first)
    for part in others:
        for peer, tensors in part.items():
            merged.setdefault(peer, []).extend(tensors)
    return merged


def view_box(tensor: Tensor, box: Box) -> Tensor:
    """A box of a tensor as a view."""
    return tensor if box.sizes == tensor.shape else tensor[box.slices]


def _view(tensor: Tensor, at: tuple[slice, ...] | None) -> Tensor:
    """A box of a tensor as a view, or the tensor itself."""
    return tensor if at is None else tensor[at]


class _StepRun:
    """One step of one tensor on this rank."""

    def __init__(self, move: Move, index: int, sources: Tensors, into: Tensors | None) -> None:
        self.move, self.sources = move, sources
        self.step: Step = move.transfer.steps[index]
        self.part = work_out_rank_part(self.step, move.comm.rank, move.dtype.itemsize)
        self.device = move.device_of(sources)
        least_run = FAST_RUN_BYTES if move.limit is None else LEAST_RUN_BYTES
        self.least_run = least_run if move.comm.capabilities.takes_strides else None
        dtype = accumulation_dtype(move.dtype) if self.part.reducing else move.dtype
        in_place = self.step.in_place
        self.targets = list(sources) if in_place else _make_targets(into, self.part.shapes, dtype, self.device)
        self.arrived: list[tuple[Tensor, Sequence[BoxPlace]]] = []
        self.staged: list[Tensor] = []

    def outgoing(self, number: int) -> dict[int, list[Tensor]]:
        """The messages this rank sends in a round, by peer."""
        edges = self.part.sent_places.get(number, {})
        return {peer: [self._pack(message) for message in cut] for peer, cut in edges.items()}

    def _pack(self, message: Sequence[BoxPlace]) -> Tensor:
        first = _view(self.sources[message[0].slot], message[0].at)
        if len(message) == 1 and self._is_straight(first):
            return first
        buffer = self._buffer(message)
        for one in message:
            buffer[one.run].view(one.sizes).copy_(_view(self.sources[one.slot], one.at))
        return buffer

    def _is_straight(self, box: Tensor) -> bool:
        """Whether a box is sent from where it is, or received there, and needs no buffer."""
        if box.is_contiguous():
            return True
        if self.least_run is None:
            return False
        return box.nbytes <= SMALL_MESSAGE_BYTES or run_bytes(box) >= self.least_run

    def _buffer(self, message: Sequence[BoxPlace]) -> Tensor:
        buffer = staging_pool.take(message[-1].run.stop, self.move.dtype, self.device)
        self.staged.append(buffer)
        return buffer

    def incoming(self, number: int) -> dict[int, list[Tensor]]:
        """Where this rank receives in a round, by peer: destination memory where it is one run, else buffers."""
        places: dict[int, list[Tensor]] = {}
        for peer, cut in self.part.received_places.get(number, {}).items():
            for message in cut:
                place = _view(self.targets[message[0].slot], message[0].at)
                if len(message) != 1 or self.part.reducing or not self._is_straight(place):
                    place = self._buffer(message)
                    self.arrived.append((place, message))
                places.setdefault(peer, []).append(place)
        return places

    def lent(self, number: int) -> dict[int, list[Tensor]]:
        """The boxes that other ranks read in a round, by peer."""
        listed = self.part.sent_slices.get(number, {})
        return {peer: [self.sources[slot][at] for slot, at, _ in boxes] for peer, boxes in listed.items()}

    def places(self, number: int) -> dict[int, list[Tensor]]:
        """Where the boxes of other ranks go in a round, by peer."""
        listed = self.part.received_slices.get(number, {})
        return {peer: [self.targets[slot][at] for slot, at, _ in boxes] for peer, boxes in listed.items()}

    def fill(self) -> None:
        """Fill boxes that nothing is reduced into."""
        for slot, box in self.part.fills:
            view_box(self.targets[slot], box).fill_(reduction_identity(self.step.op or "sum", self.move.dtype))

    def local_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Targets and sources of this rank's own copies, of a step that reduces nothing."""
        return [
            (_view(self.targets[to], at), _view(self.sources[source], there))
            for to, at, source, there in self.part.copied_places
        ]

    def take_lent(self, number: int, boxes: Mapping[int, Iterator[Tensor]]) -> None:
        """Read the boxes of other ranks that belong to this round of this tensor."""
        listed = self.part.received_slices.get(number, {})
        found = [(box, next(boxes[peer])) for peer, cut in listed.items() for box in cut]
        if self.part.reducing:
            found.sort(key=lambda pair: pair[0][2])
        pairs = [(self.targets[slot][at], part) for (slot, at, _), part in found]
        pairs = [(t, part if part.device == t.device else part.to(t.device)) for t, part in pairs]  # of a host tensor
        if self.part.reducing and self.step.op == "sum" and number in self.part.separate_rounds:
            pairs = add_together(pairs)
        self._combine_pairs(pairs)

    def copy_locally(self) -> None:
        """Copies within this rank, and fills; a reduction starts from them, or from its identity."""
        self.fill()
        if self.part.reducing and not self.part.is_filled_by_copies:
            for target in self.targets:
                target.fill_(reduction_identity(self.step.op or "sum", target.dtype))
            for target, source in self.local_pairs():
                self._combine(target, source)
            return
        for whole, term in self.local_pairs():
            for target, source in cut_for_one_thread(whole, term):
                target.copy_(source)

    def settle(self) -> None:
        """Put in place what arrived in buffers, in order of terms."""
        parts: list[tuple[BoxPlace, Tensor]] = []
        for buffer, message in self.arrived:
            parts += [(one, (buffer if len(message) == 1 else buffer[one.run]).view(one.sizes)) for one in message]
        if self.part.reducing:
            parts.sort(key=lambda pair: pair[0].term)
        self._combine_pairs([(_view(self.targets[one.slot], one.at), part) for one, part in parts])
        self.arrived.clear()
        staging_pool.give_back(self.staged)
        self.staged.clear()

    def _combine_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if not self.part.reducing:
            copy_boxes(pairs)
            return
        for target, part in pairs:
            self._combine(target, part)

    def _combine(self, target: Tensor, part: Tensor) -> None:
        for whole, term in cut_for_one_thread(target, part):
            combine_term(self.step.op or "sum", whole, term)

    def finish(self) -> Tensors:
        """The destination tensors, scaled and in the tensor's dtype; those of the last step in the result's."""
        for target in self.targets if self.step.scale != (1, 1) else ():
            rescale(target, self.step.scale)
        last = self.step is self.move.transfer.steps[-1]
        dtype = self.move.out_dtype if last and self.move.out_dtype is not None else self.move.dtype
        return tuple(t.to(dtype) for t in self.targets)


def exchange_blocks(
    comm: Comm, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], label: str
) -> None:
    """Exchange blocks of which both sides know the sizes; what a rank has for itself is copied."""
    own = comm.rank
    for source, target in zip(sends.get(own, ()), receives.get(own, ()), strict=True):
        if target is not source:
            target.copy_(source)
    outgoing, incoming = ({r: b for r, b in blocks.items() if r != own} for blocks in (sends, receives))
    with observed_exchange(comm, label, outgoing, incoming):
        comm.exchange(outgoing, incoming, label=label).wait()


def exchange_rows(part: RowPart, local: Tensor, comm: Comm, label: str) -> Tensor:
    """Carry out a move of rows on this rank: an uneven all-to-all."""
    result, own = local.new_empty(part.shape), comm.rank
    if own in part.sends:
        _put_rows(result, part.dim, part.receives[own], _take_rows(local, part.dim, part.sends[own]))
    if part.is_local:
        return result
    sends = {r: [_take_rows(local, part.dim, at)] for r, at in part.sends.items() if r != own and len(at)}
    receives = {r: at for r, at in part.receives.items() if r != own and len(at)}
    buffers = {r: _receive_into(result, part.dim, at) for r, at in receives.items()}
    exchange_blocks(comm, sends, {r: [buffer] for r, buffer in buffers.items()}, label)
    for peer, at in receives.items():
        if not _is_run(at, part.dim):
            _put_rows(result, part.dim, at, buffers[peer])
    return result


def _is_run(at: IntArray, dim: int) -> bool:
    """Whether rows are adjacent in the memory of a tensor."""
    return dim == 0 and len(at) > 0 and int(at[-1] - at[0]) == len(at) - 1


def _take_rows(tensor: Tensor, dim: int, at: IntArray) -> Tensor:
    if _is_run(at, dim):
        return tensor[int(at[0]) : int(at[-1]) + 1].contiguous()
    return tensor.index_select(dim, torch.from_numpy(at).to(tensor.device))


def _receive_into(result: Tensor, dim: int, at: IntArray) -> Tensor:
    """Where rows arrive: in their place if they are one run of memory, else in a buffer."""
    if _is_run(at, dim):
        return result[int(at[0]) : int(at[-1]) + 1]
    shape = [len(at) if d == dim else n for d, n in enumerate(result.shape)]
    return result.new_empty(shape)


def _put_rows(result: Tensor, dim: int, at: IntArray, rows: Tensor) -> None:
    if _is_run(at, dim):
        result[int(at[0]) : int(at[-1]) + 1] = rows
    else:
        result.index_copy_(dim, torch.from_numpy(at).to(result.device), rows)


class Handle(Generic[T]):
    """What `async_op=True` returns: `wait()` completes the move and returns its result; it may be called repeatedly."""

    def __init__(self, running: Running | None, finish: Callable[[Sequence[tuple[Tensor, ...]]], T]) -> None:
        self._running, self._finish = running, finish
        self._result: tuple[T] | None = None

    def wait(self) -> T:
        """The result; raises `CommError` if the exchange failed."""
        if self._result is None:
            with profiled_move("wait"):
                self._result = (self._finish(self._running.wait() if self._running is not None else []),)
        return self._result[0]
