"""Small messages between the ranks of one host: one stream socket for each pair of ranks.

A message is a frame: kind, operation number, label, body. Sends never block; what the socket does not take is kept
and sent while waiting. A socket that ends means that the rank's process ended, which is seen at once. A child that
the process forked keeps its sockets open, so the process itself is watched as well, where the system can do that.

Connecting: every rank listens under a name that any process of the host can connect to. A peer proves that it is one
by the listener's token, which the ranks exchanged over the group's own backend, and by its process number. All others
are turned away, and none of them holds the set-up up.

Which ranks share a host?

1. Each rank names its host: kernel, process numbers, sockets and user. Ranks with different names share nothing.
2. Equal names are not enough: machines that were restored from one snapshot have all of this in common. So each rank
   connects to the listeners of the ranks with its name, in rank order, until one answers, and all ranks exchange the
   number of that one. Only a process of the same kernel and network can answer.

Numbered calls between the ranks of one host, over their sockets: who waits for whose message, and who gave up.

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

import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from shardwise.comm.faults import TransportError
from shardwise.comm.protocol import PendingWork, Work
from shardwise.comm.transports.engine import Engine, Gatherer

_FRAME_HEADER = struct.Struct("<BQHI")
_HEADER_BYTES = _FRAME_HEADER.size
_CREDENTIALS = struct.Struct("3i")
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<i{_TOKEN_BYTES}s")
_CHUNK = 1 << 18
_REACH_SECONDS = 5.0  # a listener is there or not; only one with a long queue takes time


class FrameKind(IntEnum):
    """What a frame says."""

    DATA = 0  # the bytes themselves
    RANGES = 1  # where in the sender's memory the bytes are
    TAKEN = 2  # the ranges have been read
    FAILED = 3  # the sender gives up, and why


_KINDS = tuple(FrameKind)
Message: TypeAlias = tuple[FrameKind, Sequence[bytes]]
"""What a frame says: its kind, and its body in parts."""
_MOST_PARTS = 512  # of what waits for a socket, passed to it at once


class Frame(NamedTuple):
    """One message from a rank."""

    rank: int
    kind: FrameKind
    number: int
    label: str
    body: bytearray


def pack_frame(kind: FrameKind, number: int, label: str, body: Sequence[bytes] = ()) -> bytes:
    """A frame as bytes; the body comes in parts."""
    text = label.encode()
    return b"".join([_FRAME_HEADER.pack(kind, number, len(text), sum(map(len, body))), text, *body])


def different_calls_error(frame: Frame, rank: int, here: str | None) -> TransportError:
    """The error of a rank that gets a message of another call than the one it is in, if it is in one."""
    return TransportError(
        f"the ranks made different calls: rank {frame.rank} offers bytes to rank {rank} "
        f"in {frame.label}, but rank {rank} is in {here or 'another call, which has ended'} and expects none of them",
        (frame.rank, rank),
        exact=True,
    )


def different_sizes_error(call: str, src: int, dst: int, sent: str, wanted: str) -> TransportError:
    """The error of two ranks whose k-th sent and k-th received tensors do not match."""
    return TransportError(
        f"{call}: rank {src} sends {sent} to rank {dst}, which do not match the {wanted} received; "
        "the k-th tensors on both sides must match",
        (src, dst),
        exact=True,
    )


class PeerSockets:
    """The sockets from this rank to its peers; they are closed with it, at the latest when the interpreter exits."""

    def __init__(self, sockets: Mapping[int, socket.socket], pids: Mapping[int, int]) -> None:
        self._sockets = dict(sockets)
        self._rank_of = {s.fileno(): rank for rank, s in self._sockets.items()}
        self._process_of = {fd: rank for rank in sockets if (fd := _open_process(pids[rank])) is not None}
        self._input = {rank: bytearray() for rank in sockets}
        self._output: dict[int, deque[memoryview]] = {rank: deque() for rank in sockets}
        self._blocked, self._held = (
            set[int](),
            set[int](),
        )  # whose sockets are full; to whom something is to be sent later
        self._arrived = memoryview(bytearray(_CHUNK))  # fresh memory for each message would cost more than its bytes
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._descriptors = {self._wake, *self._process_of}  # those that are not sockets
        self._poll.register(self._wake, select.POLLIN)
        self.ended: set[int] = set()
        for s in self._sockets.values():
            s.setblocking(False)
            self._poll.register(s, select.POLLIN)
        for fd in self._process_of:
            self._poll.register(fd, select.POLLIN)
        weakref.finalize(self, _close_all, self._sockets, self._descriptors)

    def send(self, rank: int, frame: bytes, *, later: bool = False) -> None:
        """Send a packed frame to a rank, now or, if its socket is full, while waiting; a rank that ended gets nothing.

        `later`: together with the next frame to that rank, or with the next call of `send_held` or `receive`.
        """
        if rank in self.ended:
            return
        self._output[rank].append(memoryview(frame))
        if later:
            self._held.add(rank)
        else:
            self._flush(rank)

    def send_held(self) -> None:
        """Send what was to be sent later."""
        for rank in tuple(self._held):
            self._flush(rank)

    def unsent(self, ranks: set[int]) -> set[int]:
        """Return those ranks to which something is still to be sent."""
        return {rank for rank in ranks if self._output[rank]}

    def receive(self, timeout: float) -> list[Frame]:
        """Wait until something can be read or written, and return the frames that are complete."""
        frames: list[Frame] = []
        gone: list[int] = []
        self.send_held()
        for number, events in self._poll.poll(max(0.0, timeout) * 1000):
            if number == self._wake:
                os.eventfd_read(self._wake)
                continue
            if number in self._process_of:
                gone.append(self._process_of[number])
                continue
            rank = self._rank_of.get(number)
            if rank is None or rank in self.ended:
                continue  # its socket ended while the earlier ones were read
            if events & select.POLLOUT:
                self._flush(rank)
            if events & ~select.POLLOUT:
                frames += self._read(rank) or ()
        for rank in gone:
            while rank not in self.ended and (sent_before := self._read(rank)) is not None:
                frames += sent_before
            self._end(rank)
        return frames

    def look(self) -> list[Frame]:
        """Return the frames that are complete by now, without waiting."""
        return self.receive(0.0)

    def wake(self) -> None:
        """Let a `receive` in another thread return now."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close all sockets."""
        for rank in list(self._sockets):
            self._end(rank)
        if self._wake >= 0:
            self._drop_descriptor(self._wake)
            self._wake = -1

    def _flush(self, rank: int) -> None:
        queue = self._output[rank]
        self._held.discard(rank)
        try:
            while queue and rank not in self.ended:
                parts = list(islice(queue, _MOST_PARTS))
                sent = self._sockets[rank].sendmsg(parts)
                if sent == sum(map(len, parts)) and len(parts) == len(queue):
                    queue.clear()
                    break
                while queue and sent >= len(queue[0]):
                    sent -= len(queue.popleft())
                if sent:
                    queue[0] = queue[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._stop_sending(rank)
            return
        if bool(queue) != (rank in self._blocked) and rank not in self.ended:
            self._poll.modify(self._sockets[rank], select.POLLIN | (select.POLLOUT if queue else 0))
            self._blocked ^= {rank}

    def _stop_sending(self, rank: int) -> None:
        """The peer reads no more; what it had sent before is still to be read."""
        self._output[rank].clear()
        self._blocked.discard(rank)
        if rank not in self.ended:
            self._poll.modify(self._sockets[rank], select.POLLIN)

    def _read(self, rank: int) -> list[Frame] | None:
        """The frames that some more bytes complete; None if there are no more bytes now."""
        try:
            count = self._sockets[rank].recv_into(self._arrived)
        except BlockingIOError:
            return None
        except OSError:
            count = 0
        if not count:
            self._end(rank)
            return None
        kept = self._input[rank]
        kept += self._arrived[:count] if kept else b""
        data = memoryview(kept) if kept else self._arrived[:count]
        frames, at, end = [], 0, len(data)
        while at + _HEADER_BYTES <= end:
            kind, number, text, body = _FRAME_HEADER.unpack_from(data, at)
            middle = at + _HEADER_BYTES + text
            if middle + body > end:
                break
            label = str(data[at + _HEADER_BYTES : middle], "utf-8")
            at = middle + body
            frames.append(Frame(rank, _KINDS[kind], number, label, bytearray(data[middle:at])))
        self._input[rank] = bytearray(data[at:])
        return frames

    def _end(self, rank: int) -> None:
        if rank not in self.ended:
            self.ended.add(rank)
            self._output[rank].clear()
            self._poll.unregister(self._sockets[rank])
            self._sockets[rank].close()
            for fd in [fd for fd, r in self._process_of.items() if r == rank]:
                self._drop_descriptor(fd)
                del self._process_of[fd]

    def _drop_descriptor(self, fd: int) -> None:
        self._poll.unregister(fd)
        if fd in self._descriptors:
            self._descriptors.discard(fd)
            os.close(fd)


def _close_all(sockets: Mapping[int, socket.socket], descriptors: set[int]) -> None:
    """Close what a `PeerSockets` that was closed has left open."""
    for each in sockets.values():
        each.close()
    while descriptors:
        os.close(descriptors.pop())


def _open_process(pid: int) -> int | None:
    """A descriptor that becomes readable when a process ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class Listener:
    """Where the peers of one host connect; its name exists only while a process holds it."""

    def __init__(self) -> None:
        self.name = f"shardwise-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with closed_if_raised({0: self._socket}):
            self._socket.bind("\0" + self.name)
            self._socket.listen(1024)
            self._socket.setblocking(False)

    def connect(self, rank: int, addresses: Mapping[int, ListenerAddress], timeout: float) -> PeerSockets:
        """Connect to every lower rank and accept every higher one; raises OSError if they are not there in time."""
        return PeerSockets(
            self.open_sockets(rank, addresses, timeout), {r: address.pid for r, address in addresses.items()}
        )

    def open_sockets(
        self, rank: int, addresses: Mapping[int, ListenerAddress], timeout: float
    ) -> dict[int, socket.socket]:
        """The sockets of such connections."""
        deadline = time.monotonic() + timeout
        sockets: dict[int, socket.socket] = {}
        with closed_if_raised(sockets):
            for lower in sorted(r for r in addresses if r < rank):
                sockets[lower] = _introduce(addresses[lower], rank, timeout)
            self._accept(sockets, {r: address.pid for r, address in addresses.items() if r > rank}, deadline)
        return sockets

    def _accept(self, accepted: dict[int, socket.socket], pids: Mapping[int, int], deadline: float) -> None:
        """Add the sockets of these ranks; whoever else connects is turned away, or left unheard."""
        unknown: dict[int, socket.socket] = {}
        try:
            self._accept_each(accepted, unknown, pids, deadline)
        finally:
            for guest in unknown.values():
                guest.close()

    def _accept_each(
        self,
        accepted: dict[int, socket.socket],
        unknown: dict[int, socket.socket],
        pids: Mapping[int, int],
        deadline: float,
    ) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while missing := pids.keys() - accepted.keys():
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"{len(missing)} ranks of this host did not connect in time")
            for number, _ in poll.poll(left * 1000):
                if number == self._socket.fileno():
                    guest, _ = self._socket.accept()
                    guest.setblocking(False)
                    unknown[guest.fileno()] = guest
                    poll.register(guest, select.POLLIN)
                    continue
                poll.unregister(number)
                guest = unknown.pop(number)
                rank = self._recognise(guest, pids)
                if rank is None:
                    guest.close()
                else:
                    accepted[rank] = guest

    def _recognise(self, guest: socket.socket, pids: Mapping[int, int]) -> int | None:
        """Which rank has connected; None for a stranger. A peer says who it is in one message."""
        try:
            said = guest.recv(_HELLO.size)
        except OSError:
            return None
        if len(said) != _HELLO.size:
            return None
        rank, token = _HELLO.unpack(said)
        known = hmac.compare_digest(token, self.token) and pids.get(rank) == _peer_pid(guest)
        return int(rank) if known else None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


@dataclass(frozen=True)
class ListenerAddress:
    """What a peer must know to connect to a listener."""

    name: str
    token: bytes
    pid: int


def is_reachable(address: ListenerAddress) -> bool:
    """Say whether a listener is on this host; one of another host with the same name is not."""
    try:
        _connect_to(address, _REACH_SECONDS).close()
    except OSError:
        return False
    return True


def _introduce(address: ListenerAddress, rank: int, timeout: float) -> socket.socket:
    """Connect to a listener and say who we are."""
    connection = _connect_to(address, timeout)
    with closed_if_raised({rank: connection}):
        connection.sendall(_HELLO.pack(rank, address.token))
    return connection


def _connect_to(address: ListenerAddress, timeout: float) -> socket.socket:
    """Connect to a listener; refuse one that another process holds."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closed_if_raised({-1: connection}):
        connection.settimeout(timeout)
        connection.connect("\0" + address.name)
        if _peer_pid(connection) != address.pid:
            raise ConnectionRefusedError(f"the listener of process {address.pid} belongs to another process")
    return connection


@contextmanager
def closed_if_raised(sockets: Mapping[int, socket.socket]) -> Iterator[None]:
    """Close sockets that nobody gets."""
    try:
        yield
    except BaseException:
        for each in sockets.values():
            each.close()
        raise


def _peer_pid(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


def identify_host() -> str | None:
    """Return what identifies a running kernel, its process numbers, its sockets and its user; None if it hides that."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net", "user")]
    except OSError:
        return None
    return "/".join([socket.gethostname(), boot, str(os.getuid()), *spaces])


def describe_listener(listener: Listener) -> dict[str, Any]:
    """Return what other ranks must know to connect to a listener of this process, for JSON."""
    return {"pid": os.getpid(), "listener": listener.name, "token": listener.token.hex()}


def listener_address(info: Mapping[str, Any]) -> ListenerAddress:
    """Return the address that another rank has described."""
    return ListenerAddress(info["listener"], bytes.fromhex(info["token"]), info["pid"])


def number_hosts(over: Gatherer, rank: int, infos: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Number the hosts of all ranks, whose infos have the name of the host and, if all can listen, their addresses."""
    names = [info["host"] for info in infos.values()]
    hosts = _number_in_order(names)
    if None in names or len(set(hosts)) == len(names) or any("listener" not in info for info in infos.values()):
        return None if None in names else hosts
    same = [r for r, info in infos.items() if info["host"] == infos[rank]["host"]]
    first = next(r for r in same if r == rank or is_reachable(listener_address(infos[r])))
    return _number_in_order(over.all_gather_bytes(str(first).encode(), call="connect to ranks of one host"))


def _number_in_order(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Number values in order of appearance.

    >>> _number_in_order(["b", "a", "b"])
    (0, 1, 0)
    """
    order = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return tuple(order[value] for value in values)


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

    def accept(self, frame: Frame, check: Callable[[list[int]], None] | None = None) -> list[int]:
        """Keep what came along: nobody's memory."""
        self.expected.discard(frame.rank)
        self.taken[frame.rank] = frame.body
        return []


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

    def start(self, call: PeerCall, messages: Iterable[tuple[int, Message]], *, before_another: bool = False) -> None:
        """Send a registered call's messages, each as soon as it is made, and use those that came before.

        `before_another`: another call is started at once, or waited for; the messages travel with those of that one.
        """
        self._open[call.number] = call
        frame, packed = b"", None
        for rank, message in messages:
            if message is not packed:  # all ranks may get one message
                frame, packed = pack_frame(message[0], call.number, call.call, message[1]), message
            call.sent_to.add(rank)
            self._links.send(rank, frame, later=before_another)
        if not before_another:
            self._links.send_held()
        for early in self._early.pop(call.number, []):
            self._take(early)
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
                self._links.send(rank, pack_frame(FrameKind.FAILED, 0, "", [body]))
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
            self._links.send(rank, pack_frame(FrameKind.TAKEN, frame.number, ""))
            call.sent_to.add(rank)

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

    def _compare_beside(self, work: Work, call: str) -> Work:
        """Work that ends when all ranks have made the same call: one that only sends would not hear of another call."""
        compared = self._start_collecting(b"", call)

        def wait() -> None:
            work.wait()
            self._calls.wait(compared)

        return PendingWork(wait)

    def _start_collecting(self, data: bytes, call: str, *, agreeing: bool = False) -> CollectCall:
        operation = CollectCall(call, self._others, data)
        with self._calls.lock:
            self._calls.register(operation)
            message = FrameKind.DATA, [data]
            self._calls.start(operation, [(rank, message) for rank in self._others], before_another=agreeing)
            self._calls.agreeing = operation if agreeing else None
        return operation

    def _list_bytes(self, own: bytes, taken: Mapping[int, bytearray]) -> list[bytes]:
        return [own if rank == self._rank else bytes(taken[rank]) for rank in self._ranks]
