"""Reading another process's memory with one copy and no intermediate buffer (Linux, same user, same host).

The kernel copies straight from the other process's pages into ours. There is nothing to clean up afterwards, and
nothing that a killed process could leave behind.

`HostOperation` says what an operation between ranks of one host does with the bytes it is offered.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shardwise.comm.flat_tensors import REDUCE_BLOCK_ELEMENTS, Edges, accumulate_run, finish_average
from shardwise.comm.protocol import ReduceOp
from shardwise.comm.transports.links import Frame, FrameKind, different_sizes_error

_BATCH_RANGES = 512
_BATCH_BYTES = 1 << 30
_PR_SET_PTRACER = 0x59616D61
_SECRET_BYTES = 16

MemoryRange = tuple[int, int]
"""An address and a number of bytes."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def is_supported() -> bool:
    """Say whether this system has the call; only a trial shows whether it is allowed."""
    return sys.platform == "linux" and hasattr(_libc(), "process_vm_readv")


def allow_readers(pids: Sequence[int]) -> None:
    """Let these processes read our memory where the kernel's Yama module restricts that to our ancestors.

    Yama takes one process, which stands for its descendants as well: of one reader, the reader itself; of several, our
    parent, which started them and us. Without readers, nobody is allowed any more. Orphans have no such parent.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() != "1":
        return
    allowed = 0 if not pids else pids[0] if len(pids) == 1 else os.getppid()
    _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(0 if allowed == 1 else allowed), 0, 0, 0)


def read_memory(pid: int, source: Sequence[MemoryRange], target: Sequence[MemoryRange]) -> None:
    """Copy ranges of process `pid` into our own ranges of the same lengths, pair by pair; raise OSError if refused."""
    for remote, local in _batch_ranges(source, target):
        wanted = sum(length for _, length in local)
        got = _libc().process_vm_readv(pid, _io_vector(local), len(local), _io_vector(remote), len(remote), 0)
        if got != wanted:
            code = ctypes.get_errno() if got < 0 else 0
            raise OSError(code, f"read {max(got, 0)} of {wanted} bytes of process {pid}: {os.strerror(code)}")


def _batch_ranges(
    source: Sequence[MemoryRange], target: Sequence[MemoryRange]
) -> Iterator[tuple[list[MemoryRange], list[MemoryRange]]]:
    """Group the pairs so that one call neither holds too many ranges nor too many bytes."""
    remote: list[MemoryRange] = []
    local: list[MemoryRange] = []
    total = 0
    for (theirs, length), (ours, _) in zip(source, target, strict=True):
        for at in range(0, length, _BATCH_BYTES):
            size = min(_BATCH_BYTES, length - at)
            if remote and (len(remote) == _BATCH_RANGES or total + size > _BATCH_BYTES):
                yield remote, local
                remote, local, total = [], [], 0
            remote.append((theirs + at, size))
            local.append((ours + at, size))
            total += size
    if remote:
        yield remote, local


def _io_vector(ranges: Sequence[MemoryRange]) -> ctypes.Array[_IoVec]:
    return (_IoVec * len(ranges))(*(_IoVec(*each) for each in ranges))


def _libc() -> ctypes.CDLL:
    return _LIBC


_LIBC = ctypes.CDLL(None, use_errno=True)
if hasattr(_LIBC, "process_vm_readv"):
    _LIBC.process_vm_readv.restype = ctypes.c_ssize_t


class MemoryLease:
    """A secret at a fixed address: while it is there, memory that this process has lent is as it was offered."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._held = ctypes.create_string_buffer(self.secret, _SECRET_BYTES)
        self.address = ctypes.addressof(self._held)

    def end(self) -> None:
        """Erase the secret: whoever has not read what was lent must not use it."""
        ctypes.memset(self._held, 0, _SECRET_BYTES)

    def __del__(self) -> None:
        self.end()


@dataclass(frozen=True)
class RemoteLease:
    """Where another process keeps the secret of its lease."""

    pid: int
    address: int
    secret: bytes

    def is_valid(self) -> bool:
        """Whether the secret is still there: reads it from the other process."""
        seen = ctypes.create_string_buffer(_SECRET_BYTES)
        try:
            read_memory(self.pid, [(self.address, _SECRET_BYTES)], [(ctypes.addressof(seen), _SECRET_BYTES)])
        except OSError:
            return False
        return seen.raw == self.secret


class LeaseEndedError(Exception):
    """A rank gave up while its memory was read: what was read may be anything."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has ended the lease of its memory")
        self.rank = rank


_COUNT = struct.Struct("<I")
_RANGE = struct.Struct("<QQ")
_INLINE = 1 << 14


def pack_offer(tensors: Sequence[Tensor]) -> tuple[FrameKind, bytes]:
    """Return the message for some byte views: where they are or, if they are few bytes, the bytes as well."""
    places = [(tensor.data_ptr(), len(tensor)) for tensor in tensors]
    head = _COUNT.pack(len(places)) + b"".join(_RANGE.pack(*place) for place in places)
    if sum(length for _, length in places) > _INLINE:
        return FrameKind.RANGES, head
    return FrameKind.DATA, head + b"".join(ctypes.string_at(*place) for place in places)


@dataclass(frozen=True)
class Offer:
    """A read message: ranges of another process, or bytes that came along."""

    rank: int
    ranges: list[MemoryRange]
    data: memoryview | None
    lease: RemoteLease

    @classmethod
    def of(cls, frame: Frame, lease: RemoteLease) -> Offer:
        """Read an offer from its message."""
        (count,) = _COUNT.unpack_from(frame.body)
        ranges = [_RANGE.unpack_from(frame.body, _COUNT.size + i * _RANGE.size) for i in range(count)]
        data = memoryview(frame.body)[_COUNT.size + count * _RANGE.size :] if frame.kind is FrameKind.DATA else None
        return cls(frame.rank, ranges, data, lease)

    def copy(self, targets: Sequence[MemoryRange]) -> None:
        """Copy the k-th range into the k-th target."""
        if self.data is None:
            read_memory(self.lease.pid, self.ranges, targets)
            return
        at = 0
        for address, length in targets:
            ctypes.memmove(address, bytes(self.data[at : at + length]), length)
            at += length

    def copy_part(self, at: int, target: MemoryRange) -> None:
        """Copy some bytes of the only range, from byte `at` on."""
        address, length = target
        if self.data is None:
            read_memory(self.lease.pid, [(self.ranges[0][0] + at, length)], [target])
        else:
            ctypes.memmove(address, bytes(self.data[at : at + length]), length)

    def confirm(self) -> None:
        """Raise unless what was copied is what was offered; bytes that came along always are."""
        if self.data is None and not self.lease.is_valid():
            raise LeaseEndedError(self.rank)


class HostOperation:
    """One call: from whom offers are expected, and to whom memory is lent."""

    def __init__(self, call: str, expected: Iterable[int]) -> None:
        self.call, self.number = call, 0
        self.expected = set(expected)
        self.sent_to: set[int] = set()
        self._lent: dict[int, Sequence[Tensor]] = {}
        self.agreeing: CollectOperation | None = None  # what the ranks have yet to agree on, when this was started

    def awaited(self) -> set[int]:
        """Return the ranks without which the operation cannot end."""
        return self.expected | set(self._lent)

    def lend(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Keep memory alive until a rank has read it."""
        self._lent[rank] = tensors

    def give_back(self, rank: int) -> None:
        """A rank has read what it was offered."""
        self._lent.pop(rank, None)

    def take(self, frame: Frame) -> list[int]:
        """Use an expected offer; return the ranks whose memory is read and free again."""
        raise NotImplementedError


class CollectOperation(HostOperation):
    """Keeps the bytes of every rank."""

    def __init__(self, call: str, expected: Iterable[int], own: bytes = b"") -> None:
        super().__init__(call, expected)
        self.taken: dict[int, bytearray] = {}
        self._own = own

    def is_same(self, rank: int) -> bool:
        """Whether a rank sent the same bytes as this one."""
        return rank in self.taken and bytes(self.taken[rank]) == self._own

    def take(self, frame: Frame) -> list[int]:
        """Keep what came along."""
        self.taken[frame.rank] = frame.body
        self.expected.discard(frame.rank)
        return []


class CopyOperation(HostOperation):
    """Copies each rank's offer into the tensors that wait for it."""

    def __init__(self, call: str, rank: int, receives: Edges, leases: Mapping[int, RemoteLease]) -> None:
        super().__init__(call, receives)
        self._rank, self._receives, self._leases = rank, receives, leases

    def take(self, frame: Frame) -> list[int]:
        """Copy into place."""
        given = Offer.of(frame, self._leases[frame.rank])
        targets = [(tensor.data_ptr(), len(tensor)) for tensor in self._receives[frame.rank]]
        _check_sizes(self.call, frame.rank, self._rank, given.ranges, targets)
        given.copy(targets)
        given.confirm()
        self.expected.discard(frame.rank)
        return [frame.rank] if given.data is None else []


class ReduceOperation(HostOperation):
    """Reduces one run of every rank, in rank order, when all have been offered; a block at a time stays in cache."""

    def __init__(
        self, call: str, rank: int, leases: Mapping[int, RemoteLease], out: Tensor, mine: Tensor, op: ReduceOp
    ) -> None:
        super().__init__(call, (r for r in leases if r != rank))
        self._rank, self._leases, self._op = rank, leases, op
        self._out, self._mine = out, mine
        self._offers: dict[int, Offer] = {}

    def take(self, frame: Frame) -> list[int]:
        """Keep the offer; reduce after the last one."""
        given = Offer.of(frame, self._leases[frame.rank])
        _check_sizes(self.call, frame.rank, self._rank, given.ranges, [(0, self._mine.nbytes)])
        self._offers[frame.rank] = given
        if self.expected != {frame.rank}:
            self.expected.discard(frame.rank)
            return []
        step = REDUCE_BLOCK_ELEMENTS
        scratch = self._mine.new_empty((2, min(step, len(self._mine))))
        for at in range(0, len(self._mine), step):
            self._reduce_block(at, min(step, len(self._mine) - at), scratch)
        for given in self._offers.values():
            given.confirm()
        self.expected.clear()  # not before: a call whose reduction fails does not end
        return [rank for rank, given in self._offers.items() if given.data is None]

    def _reduce_block(self, at: int, count: int, scratch: Tensor) -> None:
        total, other = scratch[0, :count], scratch[1, :count]
        for i, rank in enumerate(self._leases):
            into = other if i else total
            if rank == self._rank:
                into.copy_(self._mine[at : at + count])
            else:
                self._offers[rank].copy_part(at * into.element_size(), (into.data_ptr(), into.nbytes))
            if i:
                accumulate_run(total, other, self._op)
        finish_average(total, self._op, len(self._leases))
        self._out[at : at + count].copy_(total)


def _check_sizes(call: str, src: int, dst: int, offered: Sequence[MemoryRange], wanted: Sequence[MemoryRange]) -> None:
    theirs, ours = [length for _, length in offered], [length for _, length in wanted]
    if theirs != ours:
        raise different_sizes_error(call, src, dst, f"{theirs} bytes", str(ours))
