"""Numbered calls between the ranks of one host, over their sockets: who waits for whose message, and who gave up.

1. Every call has a number and a description (operation, label, reduction, sizes, dtype). A message under another
   description means that the ranks made different calls.
2. Whoever waits serves all started calls, so the order in which ranks wait does not matter.
3. A rank that gives up sends its peers the reason, which counts before the messages that it sent earlier; a process
   that ends closes its sockets. Both end all waits.
4. Memory that a rank lent is used first and confirmed then. In between, a rank looks whether the lender has given up:
   its program may have gone on and written to that memory, and nobody may take what was read. A rank that gives up says
   so first, and then lets its program wait for those that use its memory by then.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from shardwise.comm.faults import TransportError
from shardwise.comm.transports.links import Frame, FrameKind, PeerSockets, different_calls_error

_REASON_SECONDS = 1.0  # how long to wait for the reason of a rank that has just given up


class PeerCall:
    """One call: from whom messages are expected, and who has yet to confirm what was lent to it."""

    def __init__(self, call: str, expected: Iterable[int], lent_to: Iterable[int] = ()) -> None:
        self.call, self.number = call, 0
        self.expected, self.lent_to = set(expected), set(lent_to)
        self.agreeing: CollectCall | None = None  # what the ranks have yet to agree on, when this was started

    def awaited(self) -> set[int]:
        """Return the ranks without which the call cannot end."""
        return self.expected | self.lent_to

    def take(self, frame: Frame) -> Iterable[int]:
        """Use an expected message; return the ranks whose memory has been read."""
        raise NotImplementedError

    def give_up(self, ended: set[int]) -> None:
        """This rank has given up: let its program go on after those that use what it lent, unless they have ended."""


class CollectCall(PeerCall):
    """Keeps the bytes of every rank."""

    def __init__(self, call: str, expected: Iterable[int], own: bytes) -> None:
        super().__init__(call, expected)
        self._own = own
        self.taken: dict[int, bytes] = {}

    def is_same(self, rank: int) -> bool:
        """Whether a rank sent the same bytes as this one."""
        return self.taken.get(rank) == self._own

    def take(self, frame: Frame) -> Iterable[int]:
        """Keep what came along."""
        self.taken[frame.rank] = bytes(frame.body)
        return ()


class PeerCalls:
    """The calls of one rank with its peers."""

    def __init__(self, rank: int, links: PeerSockets, others: tuple[int, ...], timeout: float) -> None:
        self._rank, self._links, self._others, self._timeout = rank, links, others, timeout
        self.awaited: tuple[int, ...] = others
        self.lock = threading.RLock()
        self.started = 0  # the number of the last call
        self.agreeing: CollectCall | None = None
        self._withdrawn: set[int] = set()
        self._open: dict[int, PeerCall] = {}
        self._early: dict[int, list[Frame]] = {}
        self._arrived: deque[Frame] = deque()
        self._failure: TransportError | None = None
        self._gave_up: set[int] = set()

    @property
    def ended(self) -> set[int]:
        """The ranks whose processes have ended."""
        return self._links.ended

    def register(self, call: PeerCall) -> int:
        """Number a call, under the lock; messages for it are kept until it is started."""
        self._raise_failure()
        self.started += 1
        call.number, call.agreeing = self.started, self.agreeing
        return self.started

    def start(self, call: PeerCall, kind: FrameKind, messages: Mapping[int, bytes]) -> None:
        """Send a registered call's messages, and use those that came before."""
        self._open[call.number] = call
        for rank, body in messages.items():
            self._links.send(rank, kind, call.number, call.call, body)
        for frame in self._early.pop(call.number, []):
            self._take(frame)
        self._serve([])

    def wait(self, call: PeerCall) -> None:
        """Serve all calls until this one has ended; raise `TransportError` if it cannot."""
        deadline = time.monotonic() + self._timeout
        with self.lock:
            while missing := call.awaited():
                self._raise_failure(missing)
                self.awaited = tuple(sorted(missing))
                if missing & self._links.ended:
                    raise TransportError("its process ended", sorted(missing & self._links.ended))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransportError(f"no answer within {self._timeout:g} s", self.awaited, timed_out=True)
                left = 0.0 if self._arrived else min(left, _REASON_SECONDS) if self._failure else left
                self._serve(self._links.receive(left))
            while self._links.unsent(set(self._others)) and deadline > time.monotonic():
                self._serve(self._links.receive(deadline - time.monotonic()))
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
        with self.lock:
            self._failure = self._failure or TransportError(reason, ranks, exact=True)
            body = json.dumps({"reason": reason, "ranks": list(ranks)}).encode()
            for rank in self._others:
                self._links.send(rank, FrameKind.FAILED, 0, "", body)
            for call in self._open.values():
                call.give_up(self.ended)

    def close(self) -> None:
        """Close the connections."""
        self._links.close()

    def _serve(self, frames: Sequence[Frame]) -> None:
        self._note_arrived(frames)
        while self._arrived:
            self._dispatch(self._arrived.popleft())

    def _note_arrived(self, frames: Sequence[Frame]) -> None:
        """Keep frames until their turn comes; that a rank has given up counts now."""
        for frame in frames:
            if frame.kind is FrameKind.FAILED:
                told = json.loads(frame.body)
                self._failure = self._failure or TransportError(told["reason"], told["ranks"], exact=True)
                self._gave_up.add(frame.rank)
            else:
                self._arrived.append(frame)

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
        call.expected.discard(frame.rank)
        try:
            used = list(call.take(frame))
            self._check_lenders(used)
        except BaseException:
            call.expected.add(frame.rank)  # whoever served it may have waited for another call: this one never ends
            raise
        for rank in used:
            self._links.send(rank, FrameKind.TAKEN, frame.number, "", b"")

    def _check_lenders(self, ranks: Sequence[int]) -> None:
        """Raise if one of these ranks has given up by now: its memory may have been written to before it was used."""
        if ranks:
            self._note_arrived(self._links.look())
        if self._failure is not None and self._gave_up.intersection(ranks):
            raise self._failure

    def _raise_failure(self, awaited: set[int] | None = None) -> None:
        """Raise if a rank gave up. A call that awaits only others may still be completed: it is over for the others."""
        if self._failure is not None and (awaited is None or not self._gave_up or awaited & self._gave_up):
            raise self._failure
