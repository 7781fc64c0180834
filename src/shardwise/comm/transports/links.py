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
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from shardwise.comm.faults import TransportError
from shardwise.comm.transports.engine import Gatherer

_FRAME_HEADER = struct.Struct("<BQHI")
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


@dataclass(frozen=True)
class Frame:
    """One message from a rank."""

    rank: int
    kind: FrameKind
    number: int
    label: str
    body: bytearray


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
        self._arrived = memoryview(bytearray(_CHUNK))  # fresh memory for each message would cost more than its bytes
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._descriptors = {self._wake, *self._process_of}  # those that are no sockets
        self._poll.register(self._wake, select.POLLIN)
        self.ended: set[int] = set()
        for s in self._sockets.values():
            s.setblocking(False)
            self._poll.register(s, select.POLLIN)
        for fd in self._process_of:
            self._poll.register(fd, select.POLLIN)
        weakref.finalize(self, _close_all, self._sockets, self._descriptors)

    def send(self, rank: int, kind: FrameKind, number: int, label: str, body: bytes) -> None:
        """Send a frame to a rank, now or, if its socket is full, while waiting; a rank that ended gets nothing."""
        if rank in self.ended:
            return
        text = label.encode()
        frame = _FRAME_HEADER.pack(kind, number, len(text), len(body)) + text + body
        self._output[rank].append(memoryview(frame))
        self._flush(rank)

    def unsent(self, ranks: set[int]) -> set[int]:
        """Return those ranks to which something is still to be sent."""
        return {rank for rank in ranks if self._output[rank]}

    def receive(self, timeout: float) -> list[Frame]:
        """Wait until something can be read or written, and return the frames that are complete."""
        frames: list[Frame] = []
        gone: list[int] = []
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
        try:
            while queue and rank not in self.ended:
                sent = self._sockets[rank].send(queue[0])
                if sent == len(queue[0]):
                    queue.popleft()
                else:
                    queue[0] = queue[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._stop_sending(rank)
            return
        if rank not in self.ended:
            self._poll.modify(self._sockets[rank], select.POLLIN | (select.POLLOUT if queue else 0))

    def _stop_sending(self, rank: int) -> None:
        """The peer reads no more; what it had sent before is still to be read."""
        self._output[rank].clear()
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
        buffer = self._input[rank]
        buffer += self._arrived[:count]
        frames = []
        while (frame := next_frame(rank, buffer)) is not None:
            frames.append(frame)
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
    """Close what a `PeerSockets` that is no more has left open."""
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


def next_frame(rank: int, buffer: bytearray) -> Frame | None:
    """Take one complete frame off the front of a buffer."""
    if len(buffer) < _FRAME_HEADER.size:
        return None
    kind, number, text, body = _FRAME_HEADER.unpack_from(buffer)
    middle = _FRAME_HEADER.size + text
    if len(buffer) < middle + body:
        return None
    frame = Frame(
        rank, FrameKind(kind), number, buffer[_FRAME_HEADER.size : middle].decode(), buffer[middle : middle + body]
    )
    del buffer[: middle + body]
    return frame


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

    def connect(self, rank: int, doors: Mapping[int, Door], timeout: float) -> PeerSockets:
        """Connect to every lower rank and accept every higher one; raises OSError if they are not there in time."""
        return PeerSockets(self.open_sockets(rank, doors, timeout), {r: door.pid for r, door in doors.items()})

    def open_sockets(self, rank: int, doors: Mapping[int, Door], timeout: float) -> dict[int, socket.socket]:
        """The sockets of such connections."""
        deadline = time.monotonic() + timeout
        sockets: dict[int, socket.socket] = {}
        with closed_if_raised(sockets):
            for lower in sorted(r for r in doors if r < rank):
                sockets[lower] = _knock(doors[lower], rank, timeout)
            self._accept(sockets, {r: door.pid for r, door in doors.items() if r > rank}, deadline)
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
class Door:
    """What a peer must know to connect to a listener."""

    name: str
    token: bytes
    pid: int


def is_reachable(door: Door) -> bool:
    """Say whether a listener is on this host; one of another host with the same name is not."""
    try:
        _open_door(door, _REACH_SECONDS).close()
    except OSError:
        return False
    return True


def _knock(door: Door, rank: int, timeout: float) -> socket.socket:
    """Connect to a listener and say who we are."""
    connection = _open_door(door, timeout)
    with closed_if_raised({rank: connection}):
        connection.sendall(_HELLO.pack(rank, door.token))
    return connection


def _open_door(door: Door, timeout: float) -> socket.socket:
    """Connect to a listener; refuse one that another process holds."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with closed_if_raised({-1: connection}):
        connection.settimeout(timeout)
        connection.connect("\0" + door.name)
        if _peer_pid(connection) != door.pid:
            raise ConnectionRefusedError(f"the listener of process {door.pid} belongs to another process")
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


def describe_door(listener: Listener) -> dict[str, Any]:
    """Return what other ranks must know to connect to a listener of this process, for JSON."""
    return {"pid": os.getpid(), "listener": listener.name, "token": listener.token.hex()}


def door_of(card: Mapping[str, Any]) -> Door:
    """Return the door that another rank has described."""
    return Door(card["listener"], bytes.fromhex(card["token"]), card["pid"])


def number_hosts(over: Gatherer, rank: int, cards: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Number the hosts of all ranks, whose cards have the name of the host and, if all can listen, their doors."""
    names = [card["host"] for card in cards.values()]
    hosts = _number_in_order(names)
    if None in names or len(set(hosts)) == len(names) or any("listener" not in card for card in cards.values()):
        return None if None in names else hosts
    same = [r for r, card in cards.items() if card["host"] == cards[rank]["host"]]
    first = next(r for r in same if r == rank or is_reachable(door_of(cards[r])))
    return _number_in_order(over.all_gather_bytes(str(first).encode(), call="connect to ranks of one host"))


def _number_in_order(values: Sequence[Hashable]) -> tuple[int, ...]:
    """Number values in order of appearance.

    >>> _number_in_order(["b", "a", "b"])
    (0, 1, 0)
    """
    order = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return tuple(order[value] for value in values)
