"""Small messages between the ranks of one host through memory that both map: sending and reading need no system call.

1. For each ordered pair of ranks there is a pipe: a ring of bytes in shared memory, how many were written so far, how
   many were read, and whether the reader sleeps. The writer puts bytes in place before it counts them. Processors that
   show stores in the order in which they were made (x86) show nothing else to the reader; others keep to sockets.
2. A reader looks at its pipes for a short time, if there is a core for each rank. Then it says that it sleeps, looks
   once more, and polls its sockets. A writer that finds the reader asleep wakes it by a byte through their socket.
3. Sockets also tell that a process has ended, as in `links`; what it wrote before is read first.

The descriptor of a pipe is sent through the socket of its two ranks when they connect.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.comm.transports.links import Door, Frame, Listener, PeerSockets, closed_if_raised, next_frame

_WRITTEN, _READ, _ASLEEP = 0, 8, 16  # indices of 64-bit words, each in a cache line of its own
_HEADER = 256
CAPACITY = 1 << 17
_SPIN_SECONDS = 3e-4
_FULL_SECONDS = 1e-3  # how often a writer looks whether the reader of a full pipe has made room
_LONGEST_SLEEP = 0.5


def are_pipes_supported() -> bool:
    """Whether this machine can have pipes: it shares memory by descriptors, and shows stores in order."""
    return platform.machine().lower() in ("x86_64", "amd64") and hasattr(os, "memfd_create")


class SharedPipe:
    """One direction between two ranks; one process writes and one reads.

    >>> descriptor = make_pipe()
    >>> writer, reader = SharedPipe(descriptor), SharedPipe(descriptor)
    >>> writer.write(memoryview(b"some bytes"))
    10
    >>> bytes(reader.read()), bytes(reader.read())
    (b'some bytes', b'')
    >>> os.close(descriptor)
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _HEADER + CAPACITY)
        whole = memoryview(self._memory)
        self._words, self._ring = whole[:_HEADER].cast("Q"), whole[_HEADER:]
        self._written, self._read = self._words[_WRITTEN], self._words[_READ]

    def write(self, data: memoryview) -> int:
        """Append as many bytes as there is room for; return how many."""
        room = CAPACITY - (self._written - self._words[_READ])
        count = min(len(data), room)
        at = self._written % CAPACITY
        first = min(count, CAPACITY - at)
        self._ring[at : at + first] = data[:first]
        if first < count:
            self._ring[: count - first] = data[first:count]
        self._written += count
        self._words[_WRITTEN] = self._written
        return count

    @property
    def has_bytes(self) -> bool:
        """Whether the reader has something to read."""
        return self._words[_WRITTEN] != self._read

    def read(self) -> bytes:
        """Take all bytes that were written."""
        end, at = self._words[_WRITTEN], self._read % CAPACITY
        count = end - self._read
        found = bytes(self._ring[at : at + count])
        if len(found) < count:
            found += bytes(self._ring[: count - len(found)])
        self._read = self._words[_READ] = end
        return found

    @property
    def asleep(self) -> bool:
        """Whether the reader has to be woken."""
        return bool(self._words[_ASLEEP])

    @asleep.setter
    def asleep(self, value: bool) -> None:
        self._words[_ASLEEP] = int(value)


def make_pipe() -> int:
    """Return the descriptor of memory for a new pipe."""
    descriptor = os.memfd_create("shardwise-pipe", os.MFD_CLOEXEC)
    os.truncate(descriptor, _HEADER + CAPACITY)
    return descriptor


@dataclass(frozen=True)
class PipePair:
    """The pipes between this rank and a peer."""

    outgoing: SharedPipe
    incoming: SharedPipe


def exchange_pipes(sockets: Mapping[int, socket.socket], timeout: float) -> dict[int, PipePair]:
    """Make the pipes to all peers, who do the same; raises OSError if they are not there in time."""
    deadline = time.monotonic() + timeout
    outgoing = {}
    for rank, connection in sockets.items():
        descriptor = make_pipe()
        try:
            outgoing[rank] = SharedPipe(descriptor)
            socket.send_fds(connection, [b"p"], [descriptor])
        finally:
            os.close(descriptor)
    return {
        rank: PipePair(outgoing[rank], _receive_pipe(connection, rank, deadline - time.monotonic()))
        for rank, connection in sockets.items()
    }


def _receive_pipe(connection: socket.socket, rank: int, timeout: float) -> SharedPipe:
    connection.settimeout(max(1e-3, timeout))
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        if len(descriptors) != 1 or os.fstat(descriptors[0]).st_size != _HEADER + CAPACITY:
            raise OSError(f"rank {rank} sent no memory for its messages")
        return SharedPipe(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def connect_pipes(listener: Listener, rank: int, doors: Mapping[int, Door], timeout: float) -> PeerPipes:
    """Connect to all others, who do the same; raises OSError if they are not there in time."""
    sockets = listener.open_sockets(rank, doors, timeout)
    with closed_if_raised(sockets):
        pipes = exchange_pipes(sockets, timeout)
    return PeerPipes(sockets, {r: door.pid for r, door in doors.items()}, pipes)


class PeerPipes(PeerSockets):
    """The pipes from this rank to its peers and back, and the sockets that wake them."""

    def __init__(
        self, sockets: Mapping[int, socket.socket], pids: Mapping[int, int], pipes: Mapping[int, PipePair]
    ) -> None:
        super().__init__(sockets, pids)
        self._outgoing = {rank: pair.outgoing for rank, pair in pipes.items()}
        self._incoming = {rank: pair.incoming for rank, pair in pipes.items()}
        self._order = threading.Lock()
        self.spin_seconds = _SPIN_SECONDS if len(os.sched_getaffinity(0)) > len(pipes) else 0.0

    def receive(self, timeout: float) -> list[Frame]:
        """Wait until something has come, or a full pipe has room, and return the frames that are complete."""
        full = [rank for rank, queue in self._output.items() if queue]
        for rank in full:
            self._flush(rank)
        frames = self._read_pipes() or self._spin(min(timeout, self.spin_seconds))
        return frames or self._sleep(min(timeout, _FULL_SECONDS if full else _LONGEST_SLEEP))

    def look(self) -> list[Frame]:
        """Return the frames that are complete by now; without a system call."""
        return self._read_pipes()

    def _spin(self, seconds: float) -> list[Frame]:
        incoming, deadline = tuple(self._incoming.values()), time.monotonic() + seconds
        while seconds > 0 and time.monotonic() < deadline:
            for pipe in incoming:
                if pipe.has_bytes:
                    return self._read_pipes()
        return []

    def _sleep(self, timeout: float) -> list[Frame]:
        try:
            self._set_asleep(True)
            if any(pipe.has_bytes for pipe in self._incoming.values()):
                timeout = 0.0
            found = super().receive(timeout)
        finally:
            self._set_asleep(False)
        return found + self._read_pipes()

    def _set_asleep(self, value: bool) -> None:
        for pipe in self._incoming.values():
            pipe.asleep = value
        self._pass_stores()

    def _pass_stores(self) -> None:
        """Make this process's stores visible before its next loads: taking a lock does, on the processors in use."""
        with self._order:
            pass

    def _flush(self, rank: int) -> None:
        queue, pipe = self._output[rank], self._outgoing[rank]
        while queue and rank not in self.ended:
            sent = pipe.write(queue[0])
            if sent < len(queue[0]):
                queue[0] = queue[0][sent:]
                break
            queue.popleft()
        self._pass_stores()
        if pipe.asleep and rank not in self.ended:
            self._wake_reader(rank)

    def _wake_reader(self, rank: int) -> None:
        try:
            self._sockets[rank].send(b"w")
        except BlockingIOError:
            pass  # it has been woken often enough
        except OSError:
            self._stop_sending(rank)

    def _read_pipes(self) -> list[Frame]:
        frames: list[Frame] = []
        for rank, pipe in self._incoming.items():
            if pipe.has_bytes:
                frames += self._read_pipe(rank)
        return frames

    def _read_pipe(self, rank: int) -> list[Frame]:
        buffer, frames = self._input[rank], []
        buffer += self._incoming[rank].read()
        while (frame := next_frame(rank, buffer)) is not None:
            frames.append(frame)
        return frames

    def _read(self, rank: int) -> list[Frame] | None:
        """The frames of a rank whose socket has a byte that wakes this one, or has ended."""
        try:
            count = self._sockets[rank].recv_into(self._arrived)
        except BlockingIOError:
            return self._read_pipe(rank) or None
        except OSError:
            count = 0
        frames = self._read_pipe(rank)  # after the socket has ended: everything has been written
        if not count:
            self._end(rank)
        return frames
