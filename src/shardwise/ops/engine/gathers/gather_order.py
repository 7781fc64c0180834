"""In which order does a pass through a model gather parameters, and which gathers start ahead?

1. The first pass notes which parameters each operator gathers. The next pass follows these notes: when an operator
   gets its parameters, those of the next ones are already travelling, as many bytes ahead as the operator with most
   parameters needs (`prefetch_bytes` of a plan says another number).
2. Every rank makes the same notes, as it meets the same operators in the same order. So all ranks start the same
   moves in the same order, however far each of them has computed.
3. A pass that differs from the notes gathers from there on as without them; what was started is dropped. So is what
   was gathered of a parameter that was changed in the meantime. The notes of this pass are those for the next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from shardwise.geometry import Layout
from shardwise.tensor.move import buffer_limit
from shardwise.tensor.moving.execute import RunningMoves, TransferJob, start_transfers
from shardwise.tensor.moving.parts import notify_watchers, plan_for_rank
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.transfer import Transfer

LEAST_BYTES = 1 << 18  # of an operator's parameters: fewer are gathered in less time than another thread takes to begin
_CAST_FROM = "_cast_from"


def note_cast(parameter: ShardedTensor, cast: ShardedTensor) -> None:
    """Note from which parameter a tensor was cast."""
    origin = find_parameter(parameter)
    if origin is not None:
        cast.__dict__[_CAST_FROM] = origin


def find_parameter(tensor: ShardedTensor) -> ShardedTensor | None:
    """The parameter that a tensor is, or was cast from; None for anything else."""
    found: ShardedTensor | None = tensor.__dict__.get(_CAST_FROM)
    return found if found is not None else tensor if isinstance(tensor, nn.Parameter) else None


def is_cast(tensor: ShardedTensor) -> bool:
    """Whether a tensor was cast from a parameter."""
    return _CAST_FROM in tensor.__dict__


@dataclass(frozen=True, eq=False, slots=True)
class ParameterGather:
    """A move of a parameter to the layout in which an operator wants it, in its own dtype or in another one."""

    parameter: ShardedTensor
    dtype: torch.dtype
    layout: Layout
    label: str

    def is_same(self, other: ParameterGather) -> bool:
        """Whether it is the same move of the same parameter."""
        same = self.parameter is other.parameter and self.dtype == other.dtype
        return same and self.layout is other.layout and self.label == other.label

    @property
    def nbytes(self) -> int:
        """The bytes of the whole parameter."""
        return prod(self.layout.shape) * self.dtype.itemsize

    def read_state(self) -> tuple[tuple[int, int, int], ...]:
        """What changes if the parameter does."""
        return tuple((id(t), t.data_ptr(), t._version) for t in self.parameter.local_parts)

    def make_plan(self) -> Transfer:
        """How the bytes travel."""
        src, size = self.parameter.sharding, self.dtype.itemsize
        return plan_for_rank(src, self.layout, size, buffer_limit(src, self.layout, size, None), self.parameter.comm)

    def make_job(self) -> TransferJob:
        """The move as one of several that share an exchange."""
        sources = tuple(t.detach().to(self.dtype) for t in self.parameter.local_parts)
        return TransferJob(self.make_plan(), sources, self.dtype, self.parameter.device)


class StartedOperator:
    """The gathers of one operator, started together."""

    def __init__(self, gathers: list[ParameterGather]) -> None:
        self.nbytes = sum(g.nbytes for g in gathers)
        self._gathers = gathers
        self._states = [g.read_state() for g in gathers]
        comm, label = gathers[0].parameter.comm, f"{gathers[0].label}, ahead"
        self._running: RunningMoves | None = start_transfers([[g.make_job() for g in gathers]], comm, label, least=0)
        self._results: list[tuple[Tensor, ...] | None] = []

    def is_current(self, number: int) -> bool:
        """Whether a parameter is what it was when it was gathered."""
        return self._states[number] == self._gathers[number].read_state()

    def take(self, number: int) -> tuple[Tensor, ...] | None:
        """The results of one gather, the first time."""
        self.finish()
        result, self._results[number] = self._results[number], None
        if result is not None:
            gather = self._gathers[number]
            notify_watchers(gather.make_plan(), gather.label, gather.parameter.sharding, gather.layout)
        return result

    def finish(self) -> None:
        """Wait for all of them."""
        if self._running is not None:
            self._results = list(self._running.wait())
            self._running = None


@dataclass(frozen=True, slots=True)
class StartedGather:
    """One gather of an operator; see `StartedMove`."""

    operator: StartedOperator
    number: int

    def take(self) -> tuple[Tensor, ...] | None:
        """The result, the first time."""
        return self.operator.take(self.number)


class GatherOrder:
    """The gathers of one kind of pass, operator by operator: those of the last time and of this time."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._last: list[list[ParameterGather]] = []
        self._now: list[list[ParameterGather]] = []
        self._follows = self._within = False
        self._next = self._room = 0
        self._ahead: deque[StartedOperator] = deque()
        self._present: StartedOperator | None = None

    def begin(self) -> None:
        """A pass begins."""
        self.end()
        self._last, self._now = self._now, []
        self._within, self._next = False, 0
        most = max((sum(g.nbytes for g in gathers) for gathers in self._last), default=0)
        self._room = most + most // 4 if self._limit is None else self._limit
        self._follows = most >= LEAST_BYTES if self._limit is None else self._limit > 0 and most > 0

    def end(self) -> None:
        """A pass ends, or does not follow the last one any more: what was started is dropped."""
        self._follows, self._present = False, None
        while self._ahead:
            self._ahead.popleft().finish()

    def end_operator(self) -> None:
        """The next gather is that of another operator."""
        self._within, self._present = False, None

    def is_last(self, gather: ParameterGather) -> bool:
        """Whether this was the last gather of the last pass."""
        return bool(self._last) and any(gather.is_same(g) for g in self._last[-1])

    def ask(self, gather: ParameterGather) -> StartedGather | None:
        """The gather if it was started; None if the caller has to make it. Starts those that come next."""
        if not self._within:
            self._now.append([])
            self._within = True
        self._now[-1].append(gather)
        if not self._follows:
            return None
        operator, number = len(self._now) - 1, len(self._now[-1]) - 1
        wanted = self._last[operator] if operator < len(self._last) else []
        if number >= len(wanted) or not wanted[number].is_same(gather):
            self.end()
            return None
        if number == 0:
            self._start_next(operator)
            self._present = self._ahead.popleft()
            self._start_next(operator)
        assert self._present is not None
        if not self._present.is_current(number):
            self.end()
            return None
        return StartedGather(self._present, number)

    def _start_next(self, operator: int) -> None:
        """Start the gathers of this operator, if they are not, and of as many later ones as there is room for."""
        travelling = sum(started.nbytes for started in self._ahead)
        while self._next < len(self._last):
            gathers = self._last[self._next]
            travelling += sum(g.nbytes for g in gathers)
            if self._next > operator and travelling > self._room:
                return
            self._ahead.append(StartedOperator(gathers))
            self._next += 1
            if self._next == operator + 1:
                return  # the next ones count from when this one is not ahead any more
