"""Ranks of one host: bytes go straight from one process's memory into another's.

1. A sender sends the receiver the addresses of its bytes (RANGES), or the bytes themselves if they are few (DATA).
2. The receiver copies them into place with one system call and confirms (TAKEN); the sender's memory is free then.
   Lent memory is a lease: a rank that gives up erases its secret before its program goes on, and a receiver reads the
   secret after the bytes. If it is erased, what was read may be anything, and the receiver fails as well.
3. Every call has a number and a description (operation, label, reduction, sizes, dtype). An offer under another
   description means that the ranks made different calls.
4. Whoever waits serves all started operations, so the order in which ranks wait does not matter. Nothing moves while
   no rank is inside a call.
5. A rank that gives up sends its peers the reason (FAILED), which counts before the offers that it sent earlier; a
   process that ends closes its sockets. Both end all waits.

The ranks find out together which of them share a host and can read each other's memory, and connect if so:

1. Each rank listens and sends the others, over the group's own backend: its host, process, listener with its token, and
   the address of a secret.
2. If none declines, those of one host, of one user (`host_names`), allow each other to read their memory, connect, and
   each reads the others' secrets.
3. They exchange whether that worked. The engines are used only if all succeeded; otherwise all ranks use the backend,
   and the log says why. Between hosts the backend is used in any case (`several_hosts`).
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._log import package_logger
from shardwise.comm.faults import TransportError
from shardwise.comm.flat_tensors import Edges, accumulate_run, as_bytes, finish_average
from shardwise.comm.protocol import CompletedWork, PendingWork, ReduceOp, Work
from shardwise.comm.transports import remote_memory as memory
from shardwise.comm.transports.engine import Gatherer
from shardwise.comm.transports.host_names import describe_door, door_of, identify_host, number_hosts
from shardwise.comm.transports.links import Frame, FrameKind, Listener, PeerSockets, different_calls_error
from shardwise.comm.transports.remote_memory import (
    CollectOperation,
    CopyOperation,
    HostOperation,
    LeaseEndedError,
    MemoryLease,
    ReduceOperation,
    RemoteLease,
    pack_offer,
)

_CONNECT_SECONDS = 10.0
_REASON_SECONDS = 1.0  # how long to wait for the reason of a rank that has just given up
_log = package_logger(__name__)


@dataclass(frozen=True)
class HostNeighbours:
    """What the ranks of a group found out together about their hosts.

    `hosts` has the host number of each rank, in group order; None if a rank does not know its host. `engine` connects
    the ranks of this rank's host, if there are others; `connected` says whether all hosts have connected theirs.
    """

    hosts: tuple[int, ...] | None
    connected: bool = False
    engine: SameHostEngine | None = None


def connect_same_host(
    over: Gatherer, rank: int, ranks: tuple[int, ...], timeout: float, *, wanted: bool
) -> HostNeighbours:
    """Connect the ranks of each host, or those of no host on every rank if some rank cannot or will not."""
    if len(ranks) == 1:
        return HostNeighbours((0,))
    lease = MemoryLease()
    listener, card = _open_door(lease) if wanted and memory.is_supported() else (None, {})
    try:
        card["host"] = identify_host()
        told = over.all_gather_bytes(json.dumps(card).encode(), call="connect ranks of one host")
        cards = {r: json.loads(data) for r, data in zip(ranks, told, strict=True)}
        hosts = number_hosts(over, rank, cards)
        if hosts is None or len(set(hosts)) == len(ranks) or any("listener" not in each for each in cards.values()):
            return HostNeighbours(hosts)
        assert listener is not None
        own = hosts[ranks.index(rank)]
        near = {r: cards[r] for r, host in zip(ranks, hosts, strict=True) if host == own}
        connected, engine = _connect(over, listener, rank, near, lease, timeout)
        return HostNeighbours(hosts, connected, engine)
    finally:
        if listener is not None:
            listener.close()


def _open_door(lease: MemoryLease) -> tuple[Listener | None, dict[str, Any]]:
    """Listen, and write down what the others must know; without a listener if the system does not let us."""
    try:
        listener = Listener()
    except OSError as error:
        _log_slower(error)
        return None, {}
    return listener, {**describe_door(listener), "lease": [lease.address, lease.secret.hex()]}


def _log_slower(reason: object) -> None:
    _log.warning("ranks of one host do not read each other's memory (%s): they use the group's sockets", reason)


def _connect(
    over: Gatherer, listener: Listener, rank: int, cards: Mapping[int, Any], lease: MemoryLease, timeout: float
) -> tuple[bool, SameHostEngine | None]:
    """Connect to the others of this host and try to read their memory; nowhere if anything is refused anywhere."""
    leases = {
        r: RemoteLease(card["pid"], card["lease"][0], bytes.fromhex(card["lease"][1])) for r, card in cards.items()
    }
    links: PeerSockets | None = None
    try:
        memory.allow_readers([each.pid for r, each in leases.items() if r != rank])
        doors = {r: door_of(card) for r, card in cards.items()}
        links = listener.connect(rank, doors, min(_CONNECT_SECONDS, timeout / 2))
    except OSError as error:
        _log_slower(error)
    connected = over.all_gather_bytes(b"y" if links is not None else b"n", call="ranks of one host connected")
    readable = b"n" not in connected and all(each.is_valid() for r, each in leases.items() if r != rank)
    answers = over.all_gather_bytes(b"y" if readable else b"n", call="ranks of one host can read")
    if links is not None and b"n" not in answers:
        return True, SameHostEngine(rank, links, leases, lease, timeout) if len(leases) > 1 else None
    if links is not None:
        links.close()
        _log_slower("a rank may not read the memory of another one")
    memory.allow_readers([])
    return False, None


_SMALL_COLLECT_BYTES = 1 << 17  # bytes that a rank sends to all others together without asking them to read its memory


class SameHostEngine:
    """Moves host tensors between processes of one host."""

    device = torch.device("cpu")

    def __init__(
        self, rank: int, links: PeerSockets, leases: Mapping[int, RemoteLease], own: MemoryLease, timeout: float
    ) -> None:
        ranks = tuple(leases)
        self._rank, self._ranks, self._links, self._timeout = rank, ranks, links, timeout
        self._leases, self._own_lease = leases, own
        self._index = ranks.index(rank)
        self._others = tuple(r for r in ranks if r != rank)
        self.awaited: tuple[int, ...] = self._others
        self._lock = threading.RLock()
        self._started = 0
        self._open: dict[int, HostOperation] = {}
        self._early: dict[int, list[Frame]] = {}
        self._failure: TransportError | None = None
        self._failure_counts_at = float("inf")
        self._gave_up: set[int] = set()
        self._agreeing: CollectOperation | None = None
        self._withdrawn: set[int] = set()

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Offer what is sent; take what is received when it is offered."""
        return self._start(CopyOperation(call, self._rank, receives, self._leases), sends)

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Every rank reads every other rank's tensor."""
        parts = out.view(len(self._ranks), -1)
        mine = parts[self._index]
        if mine.data_ptr() != tensor.data_ptr():
            mine.copy_(tensor)
        return self._share(call, tensor, dict(zip(self._ranks, parts, strict=True)))

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Every rank reads its run of all others, block by block in rank order, and reduces it."""
        return self._start_reduce(call, out, list(tensor.view(len(self._ranks), -1)), op)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Gather and reduce small tensors; reduce-scatter and gather large ones, in place."""
        if tensor.nbytes * len(self._others) <= _SMALL_COLLECT_BYTES:
            self._reduce_small(call, tensor, op)
            return CompletedWork()
        runs = list(tensor.tensor_split(len(self._ranks)))
        self._start_reduce(call, runs[self._index], runs, op).wait()
        self._share(call, runs[self._index], dict(zip(self._ranks, runs, strict=True))).wait()
        return CompletedWork()

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Every rank reads the source's tensor."""
        view = [as_bytes(tensor, label=call)] if tensor.numel() else []
        mine = self._rank == src
        receives = {} if mine or not view else {src: view}
        sends = dict.fromkeys(self._others, view) if mine and view else {}
        return self._start(CopyOperation(call, self._rank, receives, self._leases), sends)

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Send the bytes along with the messages."""
        taken = self._collect(call, data)
        return [data if rank == self._rank else bytes(taken[rank]) for rank in self._ranks]

    def start_agreeing(self, data: bytes, *, call: str) -> Callable[[], list[bytes]]:
        """Send bytes to all others; returns what waits for theirs. The next operation may be started before that.

        Its offers are taken from those ranks only that sent the same bytes: what each rank sends, comes in order.
        """
        operation = CollectOperation(call, self._others, data)
        with self._lock:
            self._send_collected(operation, data)
            self._agreeing = operation
            for frame in self._early.pop(operation.number, []):
                self._dispatch(frame)

        def finish() -> list[bytes]:
            self._wait(operation)
            self._agreeing = None
            return [data if rank == self._rank else bytes(operation.taken[rank]) for rank in self._ranks]

        return finish

    def withdraw_call(self, number: int) -> None:
        """Take back a call that some ranks have started and others have not; what comes for it is ignored.

        All ranks withdraw it, and none may return to its caller before all have.
        """
        with self._lock:
            self._open.pop(number, None)
            self._early.pop(number, None)
            self._withdrawn.add(number)
            self._started = max(self._started, number)

    @property
    def calls(self) -> int:
        """The number of the last call that was started."""
        return self._started

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify all peers that this rank has stopped, and refuse further calls.

        The lease ends first: afterwards the caller's program goes on and may write to what was lent.
        """
        self._own_lease.end()
        if self._failure is None:
            self._failure = TransportError(reason, ranks, exact=True)
            self._failure_counts_at = time.monotonic()
        self._links.wake()  # another thread may wait inside of the lock
        with self._lock:
            body = json.dumps({"reason": reason, "ranks": list(ranks)}).encode()
            for rank in self._others:
                self._links.send(rank, FrameKind.FAILED, 0, "", body)

    def close(self) -> None:
        """Close the connections."""
        self._own_lease.end()
        self._links.close()

    def _collect(self, call: str, data: bytes) -> Mapping[int, bytearray]:
        """Send bytes to all others along with the message, and return theirs."""
        operation = CollectOperation(call, self._others)
        with self._lock:
            self._send_collected(operation, data)
            self._wait(operation)
        return operation.taken

    def _send_collected(self, operation: CollectOperation, data: bytes) -> None:
        number = self._register(operation)
        for rank in self._others:
            self._links.send(rank, FrameKind.DATA, number, operation.call, data)

    def _reduce_small(self, call: str, tensor: Tensor, op: ReduceOp) -> None:
        """Reduce few bytes, which come along with the messages, in rank order: every rank gets the same bits."""
        taken = self._collect(call, ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
        if not tensor.numel():
            return
        runs = [tensor if r == self._rank else torch.frombuffer(taken[r], dtype=tensor.dtype) for r in self._ranks]
        total = runs[0]  # this rank's tensor, or memory that came for it alone: both may be written to
        for other in runs[1:]:
            accumulate_run(total, other, op)
        finish_average(total, op, len(runs))
        if total is not tensor:
            tensor.copy_(total)

    def _share(self, call: str, mine: Tensor, parts: Mapping[int, Tensor]) -> Work:
        """Send one tensor to all others and receive theirs into `parts`."""
        edges = {r: [as_bytes(t, label=call)] for r, t in parts.items() if r != self._rank and t.numel()}
        offered = [as_bytes(mine, label=call)]
        sends = dict.fromkeys(self._others, offered) if mine.numel() else {}
        return self._start(CopyOperation(call, self._rank, edges, self._leases), sends)

    def _start_reduce(self, call: str, out: Tensor, runs: list[Tensor], op: ReduceOp) -> Work:
        if not any(run.numel() for run in runs):
            return self._start(CopyOperation(call, self._rank, {}, self._leases), {})
        mine = runs[self._index]
        sends = {r: [as_bytes(run, label=call)] for r, run in zip(self._ranks, runs, strict=True) if r != self._rank}
        return self._start(ReduceOperation(call, self._rank, self._leases, out, mine, op), sends)

    def _start(self, operation: HostOperation, sends: Edges) -> Work:
        with self._lock:
            number = self._register(operation)
            for rank, tensors in sends.items():
                kind, body = pack_offer(tensors)
                if kind is FrameKind.RANGES:
                    operation.lend(rank, tensors)
                self._links.send(rank, kind, number, operation.call, body)
            operation.sent_to = set(sends)
            for frame in self._early.pop(number, []):
                self._dispatch(frame)
        return PendingWork(partial(self._wait, operation))

    def _register(self, operation: HostOperation) -> int:
        self._raise_failure()
        self._started += 1
        self._open[self._started] = operation
        operation.number, operation.agreeing = self._started, self._agreeing
        return self._started

    def _wait(self, operation: HostOperation) -> None:
        try:
            self._serve_until_done(operation)
        except TransportError:
            raise  # whoever called finds out the cause, and then aborts
        except BaseException as error:  # Ctrl-C: the program may go on and write to what was lent
            self.abort(f"{operation.call}: rank {self._rank} was ended by {type(error).__name__}", (self._rank,))
            raise

    def _serve_until_done(self, operation: HostOperation) -> None:
        deadline = time.monotonic() + self._timeout
        with self._lock:
            for frame in self._early.pop(operation.number, []):
                self._dispatch(frame)
            while self._unfinished(operation):
                missing = operation.awaited()
                self._raise_failure(missing)
                self.awaited = tuple(sorted(missing))
                left = min(deadline, self._failure_counts_at) - time.monotonic()
                if self._failure is not None and left <= 0:
                    self._raise_failure()
                if missing & self._links.ended:
                    raise TransportError("its process ended", sorted(missing & self._links.ended))
                if left <= 0:
                    raise TransportError(f"no answer within {self._timeout:g} s", self.awaited, timed_out=True)
                self._serve(self._links.receive(left))
            self._open.pop(operation.number, None)

    def _unfinished(self, operation: HostOperation) -> bool:
        return bool(operation.awaited() or self._links.unsent(operation.sent_to))

    def _serve(self, frames: Sequence[Frame]) -> None:
        """Use what arrived; that a rank gave up counts before the offers of its memory that it sent earlier."""
        for frame in frames:
            if frame.kind is FrameKind.FAILED:
                self._note_failure(frame)
        for frame in frames:
            if frame.kind is FrameKind.RANGES and frame.rank in self._gave_up:
                if frame.number <= self._started:
                    self._raise_failure()
            elif frame.kind is not FrameKind.FAILED:
                self._dispatch(frame)

    def _note_failure(self, frame: Frame) -> None:
        told = json.loads(frame.body)
        if self._failure is None:
            self._failure = TransportError(told["reason"], told["ranks"], exact=True)
            self._failure_counts_at = time.monotonic() + _REASON_SECONDS
        self._gave_up.add(frame.rank)

    def _dispatch(self, frame: Frame) -> None:
        if frame.number in self._withdrawn:
            return
        if frame.kind is FrameKind.TAKEN:
            if frame.number in self._open:
                self._open[frame.number].give_back(frame.rank)
        elif frame.number > self._started:
            self._early.setdefault(frame.number, []).append(frame)
        else:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        operation = self._open.get(frame.number)
        if operation is not None and operation.agreeing is not None and not operation.agreeing.is_same(frame.rank):
            return  # its rank made another request: this operation will be withdrawn
        if operation is None or frame.rank not in operation.expected or frame.label != operation.call:
            raise different_calls_error(frame, self._rank, operation.call if operation is not None else None)
        try:
            confirm = operation.take(frame)
        except LeaseEndedError as error:
            self._serve(self._links.receive(_REASON_SECONDS))
            self._raise_failure()
            raise TransportError("it gave up before all of its bytes were read", (error.rank,)) from error
        except OSError as error:
            raise TransportError(f"its memory cannot be read ({error.strerror or error})", (frame.rank,)) from error
        for rank in confirm:
            self._links.send(rank, FrameKind.TAKEN, frame.number, "", b"")
        operation.sent_to |= set(confirm)

    def _raise_failure(self, awaited: set[int] | None = None) -> None:
        """Raise if a rank gave up. A call that awaits only others may still be completed: it is over for the others."""
        if self._failure is not None and (awaited is None or awaited & self._gave_up):
            raise self._failure
