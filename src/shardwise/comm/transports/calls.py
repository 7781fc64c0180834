"""Numbered calls between the ranks of one host, over their sockets: who waits for whose message, and who gave up.

1. Every call has a number and a description (operation, label, reduction, sizes, dtype). A message under another
   description means that the ranks made different calls. One of a call that this rank has yet to start is kept.
2. Whoever waits serves all started calls, so the order in which ranks wait does not matter. A call has ended when all
   its messages have come, what it lent has been confirmed, and its own messages have left.
3. A rank that gives up sends its peers the reason, which counts before the messages that it sent earlier; a process
   that ends closes its sockets. Both end the waits of those who need that rank. A wait for others goes on for a moment:
   they may have sent everything before they hear of it.
4. Memory that a rank lent is used first and confirmed then. In between, a rank looks whether the lender has given up:
   its program may have gone on and written to that memory, and nobody may take what was read. A rank that gives up says
   so first, and then lets its program wait for those that use its memory by then.
5. While ranks compare what they ask for, the next call may be started. Its messages are taken from those ranks only
   that asked for the same, and if some did not, all ranks withdraw the call before any of them returns.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from shardwise.comm.faults import TransportError
from shardwise.comm.transports.engine import Engine
from shardwise.comm.transports.links import Frame, FrameKind, PeerSockets, different_calls_error

_REASON_SECONDS = 1.0  # how long to wait for the reason of a rank that has just given up, and for others after that


class LenderGoneError(Exception):
    """A rank gave up while its memory was read: what was read may be anything."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has ended the lease of its memory")
        self.rank = rank


class PeerCall:
    """One call: from whom messages are expected, and who has yet to confirm what was lent to it."""

    is_leased = False
    """Whether `take` finds out by itself that a lender has given up."""

    def __init__(self, call: str, expected: Iterable[int], lent_to: Iterable[int] = ()) -> None:
        self.call, self.number = call, 0
        self.expected, self.lent_to, self.sent_to = set(expected), set(lent_to), set[int]()
        self.kept: object = None  # what was lent, alive until the call has ended
        self.agreeing: CollectCall | None = None  # what the ranks have yet to agree on, when this was started

    def awaited(self) -> set[int]:
        """Return the ranks without which the call cannot end."""
        return self.expected | self.lent_to

    def take(self, frame: Frame) -> Iterable[int]:
        """Use a message that is expected no more; return the ranks whose memory has been read."""
        raise NotImplementedError

    def accept(self, frame: Frame, check: Callable[[list[int]], None] | None = None) -> list[int]:
        """Take a message and check what was used; if that fails the message stays expected, and the call never ends.

        Whoever served the call may have waited for another one, and got the error.
        """
        self.expected.discard(frame.rank)
        try:
            used = list(self.take(frame))
            if check is not None:
                check(used)
        except BaseException:
            self.expected.add(frame.rank)
            raise
        return used

    def give_up(self, ended: set[int]) -> None:
        """This rank has given up: let its program go on after those that use what it lent, unless they have ended."""


class CollectCall(PeerCall):
    """Keeps the bytes of every rank."""

    def __init__(self, call: str, expected: Iterable[int], own: bytes) -> None:
        super().__init__(call, expected)
        self._own = own
        self.taken: dict[int, bytearray] = {}

    def is_same(self, rank: int) -> bool:
        """Whether a rank sent the same bytes as this one."""
        return rank in self.taken and bytes(self.taken[rank]) == self._own

    def take(self, frame: Frame) -> Iterable[int]:
        """Keep what came along."""
        self.taken[frame.rank] = frame.body
        return ()


class PeerCalls:
    """The calls of one rank with its peers; `give_up` is called first of all when this rank stops."""

    def __init__(
        self,
        rank: int,
        links: PeerSockets,
        others: tuple[int, ...],
        timeout: float,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._links, self._others, self._timeout, self._give_up = rank, links, others, timeout, give_up
        self.awaited: tuple[int, ...] = others
        self.lock = threading.RLock()
        self.started = 0  # the number of the last call
        self.agreeing: CollectCall | None = None
        self._withdrawn: set[int] = set()
        self._open: dict[int, PeerCall] = {}
        self._early: dict[int, list[Frame]] = {}
        self._arrived: deque[Frame] = deque()
        self._failure: TransportError | None = None
        self._failure_counts_at = float("inf")  # for calls that await other ranks than those that gave up
        self._gave_up: set[int] = set()

    def register(self, call: PeerCall) -> int:
        """Number a call, under the lock; messages for it are kept until it is started."""
        self._raise_failure()
        self.started += 1
        call.number, call.agreeing = self.started, self.agreeing
        return self.started

    def start(self, call: PeerCall, messages: Mapping[int, tuple[FrameKind, bytes]]) -> None:
        """Send a registered call's messages, and use those that came before."""
        self._open[call.number] = call
        call.sent_to.update(messages)
        for rank, (kind, body) in messages.items():
            self._links.send(rank, kind, call.number, call.call, body)
        for frame in self._early.pop(call.number, []):
            self._take(frame)
        self._serve([])

    def wait(self, call: PeerCall) -> None:
        """Serve all calls until this one has ended; raise `TransportError` if it cannot."""
        try:
            self._serve_until_ended(call)
        except TransportError:
            raise  # whoever called finds out the cause, and then aborts
        except BaseException as error:
            self._abort_interrupted(call.call, error)
            raise

    def _serve_until_ended(self, call: PeerCall) -> None:
        deadline = time.monotonic() + self._timeout
        with self.lock:
            while (missing := call.awaited()) or self._links.unsent(call.sent_to):
                self._raise_failure(missing)
                self.awaited = tuple(sorted(missing))
                left = min(deadline, self._failure_counts_at) - time.monotonic()
                if left <= 0:
                    self._raise_failure()
                    raise TransportError(f"no answer within {self._timeout:g} s", self.awaited, timed_out=True)
                if missing & self._links.ended:
                    raise TransportError("its process ended", sorted(missing & self._links.ended))
                self._serve(self._links.receive(0.0 if self._arrived else left))
            self._open.pop(call.number, None)

    def withdraw(self, number: int) -> None:
        """Forget a call that some ranks have started and others have not; what comes for it is ignored."""
        with self.lock:
            self._open.pop(number, None)
            self._early.pop(number, None)
            self._withdrawn.add(number)
            self.started, self.agreeing = max(self.started, number), None

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify all peers that this rank has stopped, and refuse further calls; what was lent stays alive."""
        self._give_up()
        if self._failure is None:
            self._failure = TransportError(reason, ranks, exact=True)
            self._failure_counts_at = time.monotonic()
        self._links.wake()  # another thread may wait inside of the lock
        with self.lock:
            body = json.dumps({"reason": reason, "ranks": list(ranks)}).encode()
            for rank in self._others:
                self._links.send(rank, FrameKind.FAILED, 0, "", body)
            for call in self._open.values():
                call.give_up(self._links.ended)

    @contextmanager
    def abort_if_raised(self, call: str) -> Iterator[None]:
        """Abort for a rank that ran out of memory or was interrupted: its program may write to what it lent."""
        try:
            yield
        except TransportError:
            raise
        except BaseException as error:
            self._abort_interrupted(call, error)
            raise

    def _abort_interrupted(self, call: str, error: BaseException) -> None:
        self.abort(f"{call}: rank {self._rank} was ended by {type(error).__name__}", (self._rank,))

    def close(self) -> None:
        """Close the connections."""
        self._give_up()
        self._links.close()

    def _serve(self, frames: Sequence[Frame]) -> None:
        self._note_arrived(frames)
        while self._arrived:
            self._dispatch(self._arrived.popleft())

    def _note_arrived(self, frames: Sequence[Frame]) -> None:
        """Keep frames until their turn comes; that a rank has given up counts now."""
        for frame in frames:
            if frame.kind is not FrameKind.FAILED:
                self._arrived.append(frame)
                continue
            said = json.loads(frame.body)
            if self._failure is None:
                self._failure = TransportError(said["reason"], said["ranks"], exact=True)
                self._failure_counts_at = time.monotonic() + _REASON_SECONDS
            self._gave_up.add(frame.rank)

    def _dispatch(self, frame: Frame) -> None:
        if frame.number in self._withdrawn:
            return
        if frame.kind is FrameKind.TAKEN:
            if frame.number in self._open:
                self._open[frame.number].lent_to.discard(frame.rank)
        elif frame.kind is FrameKind.RANGES and frame.rank in self._gave_up:
            return  # its program goes on and may write to what it lent
        elif frame.number > self.started:
            self._early.setdefault(frame.number, []).append(frame)
        else:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        call = self._open.get(frame.number)
        if call is not None and call.agreeing is not None and not call.agreeing.is_same(frame.rank):
            return  # its rank made another request: this call will be withdrawn
        if call is None or frame.rank not in call.expected or frame.label != call.call:
            raise different_calls_error(frame, self._rank, call.call if call is not None else None)
        try:
            used = call.accept(frame, None if call.is_leased else self._check_lenders)
        except LenderGoneError as error:
            self._note_arrived(self._links.receive(_REASON_SECONDS))
            self._raise_failure()
            raise TransportError("it gave up before all of its bytes were read", (error.rank,)) from error
        for rank in used:
            self._links.send(rank, FrameKind.TAKEN, frame.number, "", b"")
        call.sent_to.update(used)

    def _check_lenders(self, ranks: list[int]) -> None:
        """Raise if one of these ranks has given up by now: its memory may have been written to before it was used."""
        if ranks:
            self._note_arrived(self._links.look())
        if self._failure is not None and self._gave_up.intersection(ranks):
            raise self._failure

    def _raise_failure(self, awaited: set[int] | None = None) -> None:
        """Raise if a rank gave up. A call that awaits only others may still be completed: it is over for the others."""
        if self._failure is not None and (awaited is None or awaited & self._gave_up):
            raise self._failure


class PeerEngine(Engine):
    """What engines of ranks of one host have in common: numbered calls, and bytes that travel with the messages."""

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        links: PeerSockets,
        timeout: float,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._ranks, self._index = rank, ranks, ranks.index(rank)
        self._others = tuple(r for r in ranks if r != rank)
        self._calls = PeerCalls(rank, links, self._others, timeout, give_up)

    @property
    def awaited(self) -> tuple[int, ...]:  # type: ignore[override]  # computed
        """The ranks that the present wait is for."""
        return self._calls.awaited

    @property
    def calls(self) -> int:  # type: ignore[override]  # computed
        """The number of the last call that was started."""
        return self._calls.started

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Send the bytes along with the messages."""
        return self._list_bytes(data, self._collect(data, call))

    def start_agreeing(self, data: bytes, *, call: str) -> Callable[[], list[bytes]]:
        """Send bytes to all others; returns what waits for theirs."""
        operation = self._start_collecting(data, call, agreeing=True)

        def finish() -> list[bytes]:
            self._calls.wait(operation)
            self._calls.agreeing = None
            return self._list_bytes(data, operation.taken)

        return finish

    def withdraw_call(self, number: int) -> None:
        """Take back a call that some ranks have started and others have not."""
        self._calls.withdraw(number)

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify all peers that this rank has stopped, and refuse further calls."""
        self._calls.abort(reason, ranks)

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()

    def _collect(self, data: bytes, call: str) -> Mapping[int, bytearray]:
        """Send bytes to all others, and return theirs, in memory that nobody else uses."""
        operation = self._start_collecting(data, call)
        self._calls.wait(operation)
        return operation.taken

    def _start_collecting(self, data: bytes, call: str, *, agreeing: bool = False) -> CollectCall:
        operation = CollectCall(call, self._others, data)
        with self._calls.lock:
            self._calls.register(operation)
            self._calls.start(operation, dict.fromkeys(self._others, (FrameKind.DATA, data)))
            self._calls.agreeing = operation if agreeing else None
        return operation

    def _list_bytes(self, own: bytes, taken: Mapping[int, bytearray]) -> list[bytes]:
        return [own if rank == self._rank else bytes(taken[rank]) for rank in self._ranks]
