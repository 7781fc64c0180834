"""Comms that send nothing, for ranks that trace, plan, or take part without data: one class, `StandInComm`.

Tracing a program:

1. While a rank traces, its tensors have a stand-in in place of their comm. Moves become operators of the graph, so
   nothing is exchanged. Small questions to all ranks (do we agree? how long is your part?) are noted, and answered as
   if every rank had given the same answer.
2. After the trace the ranks compare their notes in one exchange. Where answers differ, each rank traces again with
   the true ones.
3. So a rank never waits inside a trace, and ranks that are threads of one process can trace one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import compute_again, last_traced_node
from shardwise.comm.protocol import (
    DEFAULT_TIMEOUT,
    Capabilities,
    Combine,
    Comm,
    CompletedWork,
    Request,
    TensorsByRank,
    Work,
)
from shardwise.transfer.topology import Topology

BEFORE_BACKWARD = "shardwise_before_backward"  # marks nodes: which call of backward follows, counted from 1


class StandInComm(Comm):
    """A comm that sends nothing: of a rank that traces, plans, or takes part without data.

    What it does with a call is said by its arguments; all others raise what `refuse(label)` returns.

    - `ask(label, data)` answers questions to all ranks (`all_gather_bytes`), and makes a barrier return at once.
    - `joins`: exchanges are made by the `real` comm, in which this rank sends and receives nothing.
    - `completes`: exchanges and collectives complete at once and leave results as they are.
    """

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        device: torch.device,
        *,
        refuse: Callable[[str], Exception],
        ask: Callable[[str, bytes], list[bytes]] | None = None,
        real: Comm | None = None,
        joins: bool = False,
        completes: bool = False,
        is_traced: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
        process_group: Any = None,
    ) -> None:
        self.rank, self.ranks, self.device, self.real = rank, ranks, device, real
        self.timeout = timeout if real is None else real.timeout
        self.process_group = real.process_group if real is not None and is_traced else process_group
        self.is_traced = is_traced
        self._refuse_call, self._ask, self.joins, self._completes = refuse, ask, joins, completes

    def __eq__(self, other: object) -> bool:
        """Stand-ins that join for one rank of one comm are the same: what is known of moves is known by comm."""
        return isinstance(other, StandInComm) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        return (self.rank, self.device, self.real) if self.joins or not self.ranks else (id(self),)

    @property
    def world_size(self) -> int:
        """How many ranks the comm has; -1, as torch answers, in a group of which this rank is not a member."""
        return len(self.ranks) or -1

    @property
    def device_of_others(self) -> torch.device:
        """Where the ranks that this one joins compute."""
        return self.real.device if self.joins and self.real is not None else self.device

    @property
    def capabilities(self) -> Capabilities:
        """How the bytes of the others travel, where it joins them: chosen by the real comm, the same on every rank."""
        reads_peers = self.joins and self.real is not None and self.real.capabilities.reads_peers
        return Capabilities(sends=False, reads_peers=reads_peers)

    def find_topology(self) -> Topology | None:
        if not self.ranks:
            raise self._refuse_call("a collective")
        return None if self.real is None else self.real.find_topology()

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        if self._ask is None:
            raise self._refuse_call(label)
        return self._ask(label, data)

    def barrier(self, *, label: str = "barrier") -> None:
        if self._ask is None:
            raise self._refuse_call(label)

    def subset(self, ranks: Sequence[int]) -> Comm:
        raise self._refuse_call("a collective")

    def all_gather(self, tensor: Tensor, *, label: str) -> list[Tensor]:
        self._complete(label=label)
        return [tensor] * self.world_size

    def exchange(
        self,
        sends: TensorsByRank,
        receives: TensorsByRank,
        *,
        label: str,
        request: Request | None = None,
        combine: Combine | None = None,
    ) -> Work:
        if self.real is None or not self.joins:
            return self._complete(label=label)
        own = None if combine is None else _combine_nothing
        return self.real.exchange({}, {}, label=label, request=request, combine=own)

    def _complete(self, *args: Any, label: str = "a collective", **kwargs: Any) -> Work:
        if not self._completes:
            raise self._refuse_call(label)
        return CompletedWork()

    all_gather_into = reduce_scatter_into = all_reduce = all_reduce_into = broadcast = _complete


def _combine_nothing(arrived: Mapping[int, Sequence[Tensor]]) -> None:
    assert not arrived


class NotTraceableError(RuntimeError):
    """A program asks for something that a graph cannot hold, such as values of other ranks."""


@dataclass
class CommTrace:
    """The questions that a traced program asked, and the answers of all ranks as far as they are known."""

    answers: Sequence[tuple[str, Sequence[bytes]]] = ()
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    twins: dict[int, StandInComm] = field(default_factory=dict)
    backward_calls: int = 0
    in_step: bool = False
    regions: int = 0

    def twin_of(self, comm: Comm) -> StandInComm:
        """The traced comm that stands for a comm."""
        if isinstance(comm, StandInComm) and comm.is_traced:
            return comm
        if id(comm) not in self.twins:
            if any(twin.ranks != comm.ranks for twin in self.twins.values()):
                raise NotTraceableError("the program uses tensors of several comms; compile the part that uses one")
            self.twins[id(comm)] = _trace_comm(comm, self)
        return self.twins[id(comm)]

    def start(self) -> None:
        """Begin again: torch runs a program more than once to trace it."""
        self.asked.clear()
        self.backward_calls = self.regions = 0

    def ask(self, label: str, data: bytes, count: int) -> list[bytes]:
        """The answers of all ranks to a question that this rank answers with `data`."""
        number = len(self.asked)
        self.asked.append((label, data))
        if number < len(self.answers) and self.answers[number][0] == label:
            return list(self.answers[number][1])
        return [data] * count


def _trace_comm(comm: Comm, trace: CommTrace) -> StandInComm:
    def refuse(label: str) -> Exception:
        return NotTraceableError(
            f"'{label}' exchanges values between ranks outside of a move between layouts, which a graph cannot hold"
        )

    def ask(label: str, data: bytes) -> list[bytes]:
        return trace.ask(label, data, comm.world_size)

    return StandInComm(comm.rank, comm.ranks, comm.device, refuse=refuse, ask=ask, real=comm, is_traced=True)


_active: ContextVar[CommTrace | None] = ContextVar("shardwise_trace", default=None)


@contextmanager
def trace_comms(trace: CommTrace) -> Iterator[CommTrace]:
    """Let `traced_comm` answer with the twins of this trace inside a `with` block."""
    token = _active.set(trace)
    try:
        yield trace
    finally:
        _active.reset(token)


def traced_comm(comm: Comm) -> Comm:
    """The comm that stands for this one while this thread traces a program; else the comm itself.

    >>> from shardwise.comm import LocalComm
    >>> alone = LocalComm.alone()
    >>> traced_comm(alone) is alone
    True
    >>> with trace_comms(CommTrace()):
    ...     traced_comm(alone).ranks
    (0,)
    """
    trace = _active.get()
    return comm if trace is None else trace.twin_of(comm)


def is_tracing() -> bool:
    """Whether this thread traces a program."""
    return _active.get() is not None


def note_backward() -> None:
    """Note that the program calls backward itself, and mark the nodes that were traced before."""
    trace = _active.get()
    if trace is None:
        return
    trace.backward_calls += 1
    node = last_traced_node()
    while node is not None and node.op != "root" and BEFORE_BACKWARD not in node.meta:
        node.meta[BEFORE_BACKWARD] = trace.backward_calls
        node = node.prev


def splits_backward() -> bool:
    """Whether this thread traces a program whose backward pass becomes a graph of its own."""
    trace = _active.get()
    return trace is not None and not trace.in_step


def compute_region_again() -> Generator[None, None, None]:
    """Let the backward pass compute again what is traced between the first and the second step of this generator."""
    first = last_traced_node()
    yield
    trace = _active.get()
    if first is None or trace is None:
        return
    trace.regions += 1
    while (first := first.next).op != "root":
        compute_again(first, trace.regions)


def untraced_comm(comm: Comm) -> Comm:
    """The comm for which a traced one stands; any other comm is itself."""
    return comm.real if isinstance(comm, StandInComm) and comm.is_traced and comm.real is not None else comm


def real_comm(comm: Comm) -> Comm:
    """The comm for which a stand-in was made; any other comm is itself."""
    return comm.real if isinstance(comm, StandInComm) and comm.real is not None else comm
