"""Small messages between the ranks of one host: one stream socket for each pair of ranks.

A message is a frame: kind, operation number, label, body. Sends never block; what the socket does not take is kept
and sent while waiting. A socket that ends means that the rank's process ended, which is seen at once.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

_FRAME_HEADER = struct.Struct("<BQHI")
_CREDENTIALS = struct.Struct("3i")
_RANK_FIELD = struct.Struct("<i")
_CHUNK = 1 << 18


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


class PeerSockets:
    """The sockets from this rank to its peers."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._rank_of = {s.fileno(): rank for rank, s in self._sockets.items()}
        self._input = {rank: bytearray() for rank in sockets}
        self._output: dict[int, deque[memoryview]] = {rank: deque() for rank in sockets}
        self._arrived = memoryview(bytearray(_CHUNK))  # fresh memory for each message would cost more than its bytes
        self._poll = select.poll()
        self.ended: set[int] = set()
        for s in self._sockets.values():
            s.setblocking(False)
            self._poll.register(s, select.POLLIN)

    def send(self, rank: int, kind: FrameKind, number: int, label: str, body: bytes) -> None:
        """Send a frame to a rank, now or, if its socket is full, while waiting; a rank that ended gets nothing."""
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
        for number, events in self._poll.poll(max(0.0, timeout) * 1000):
            rank = self._rank_of[number]
            if events & select.POLLOUT:
                self._flush(rank)
            if events & ~select.POLLOUT:
                frames += self._read(rank)
        return frames

    def close(self) -> None:
        """Close all sockets."""
        for rank in list(self._sockets):
            self._end(rank)

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

    def _read(self, rank: int) -> list[Frame]:
        try:
            count = self._sockets[rank].recv_into(self._arrived)
        except BlockingIOError:
            return []
        except OSError:
            count = 0
        if not count:
            self._end(rank)
            return []
        buffer = self._input[rank]
        buffer += self._arrived[:count]
        frames = []
        while (frame := _next_frame(rank, buffer)) is not None:
            frames.append(frame)
        return frames

    def _end(self, rank: int) -> None:
        if rank not in self.ended:
            self.ended.add(rank)
            self._output[rank].clear()
            self._poll.unregister(self._sockets[rank])
            self._sockets[rank].close()


def _next_frame(rank: int, buffer: bytearray) -> Frame | None:
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
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + self.name)
        self._socket.listen(1024)

    def connect(self, rank: int, names: Mapping[int, str], pids: Mapping[int, int], timeout: float) -> PeerSockets:
        """Connect to every lower rank and accept every higher one; refuse processes other than the announced ones."""
        deadline = time.monotonic() + timeout
        sockets: dict[int, socket.socket] = {}
        for lower in sorted(r for r in names if r < rank):
            sockets[lower] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sockets[lower].connect("\0" + names[lower])
            sockets[lower].sendall(_RANK_FIELD.pack(rank))
        while len(sockets) < len(names) - 1:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            accepted, _ = self._socket.accept()
            accepted.settimeout(timeout)
            higher = _RANK_FIELD.unpack(accepted.recv(_RANK_FIELD.size, socket.MSG_WAITALL))[0]
            if pids.get(higher) == _peer_pid(accepted):
                sockets[higher] = accepted
            else:
                accepted.close()
        return PeerSockets(sockets)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def _peer_pid(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid
