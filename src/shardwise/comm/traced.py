"""The comm of a program that is being traced: it sends nothing, and notes what the program asks the other ranks.

1. While a rank traces, its tensors have a `TracedComm` in place of their comm. Moves become operators of the graph, so
   nothing is exchanged. Small questions to all ranks (do we agree? how long is your part?) are noted, and answered as
   if every rank had given the same answer.
2. After the trace the ranks compare their notes in one exchange. Where answers differ, each rank traces again with
   the true ones.
3. So a rank never waits inside a trace, and ranks that are threads of one process can trace one after another.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise._torch_graphs import compute_again, last_traced_node
from shardwise.comm.protocol import Comm
from shardwise.transfer.topology import Topology

BEFORE_BACKWARD = "shardwise_before_backward"  # marks nodes: which call of backward follows, counted from 1


class NotTraceableError(RuntimeError):
    """A program asks for something that a graph cannot hold, such as values of other ranks."""


@dataclass
class CommTrace:
    """The questions that a traced program asked, and the answers of all ranks as far as they are known."""

    answers: Sequence[tuple[str, Sequence[bytes]]] = ()
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    twins: dict[int, TracedComm] = field(default_factory=dict)
    backward_calls: int = 0
    in_step: bool = False
    regions: int = 0

    def twin_of(self, comm: Comm) -> TracedComm:
        """The traced comm that stands for a comm."""
        if isinstance(comm, TracedComm):
            return comm
        if id(comm) not in self.twins:
            if any(twin.ranks != comm.ranks for twin in self.twins.values()):
                raise NotTraceableError("the program uses tensors of several comms; compile the part that uses one")
            self.twins[id(comm)] = TracedComm(comm, self)
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


@dataclass(frozen=True, eq=False)
class TracedComm:
    """Stands for a comm while a program is traced."""

    real: Comm
    trace: CommTrace

    @property
    def rank(self) -> int:
        return self.real.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.real.ranks

    @property
    def world_size(self) -> int:
        return self.real.world_size

    @property
    def device(self) -> torch.device:
        return self.real.device

    @property
    def timeout(self) -> float:
        return self.real.timeout

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return self.real.process_group

    def find_topology(self) -> Topology | None:
        return self.real.find_topology()

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        return self.trace.ask(label, data, self.world_size)

    def barrier(self, *, label: str = "barrier") -> None:
        """Every rank traces the same program: there is nothing to wait for."""

    def _refuse(self, *args: Any, label: str = "a collective", **kwargs: Any) -> NoReturn:
        raise NotTraceableError(
            f"'{label}' exchanges values between ranks outside of a move between layouts, which a graph cannot hold"
        )

    exchange = all_gather = all_gather_into = reduce_scatter_into = all_reduce = broadcast = subset = _refuse


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


def real_comm(comm: Comm) -> Comm:
    """The comm for which a traced one stands; any other comm is itself."""
    return comm.real if isinstance(comm, TracedComm) else comm
