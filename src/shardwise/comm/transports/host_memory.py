"""Ranks of one host: bytes go straight from one process's memory into another's.

1. A sender sends the receiver the addresses of its bytes (RANGES), or the bytes themselves if they are few (DATA).
2. The receiver copies them into place with one system call and confirms (TAKEN); the sender's memory is free then.
   Lent memory is a lease: a rank that gives up erases its secret before its program goes on, and a receiver reads the
   secret after the bytes. If it is erased, what was read may be anything, and the receiver fails as well.
3. The messages are those of numbered calls (`calls`). Nothing moves while no rank is inside a call.

The ranks find out together which of them share a host and can read each other's memory, and connect if so:

1. Each rank listens and sends the others, over the group's own backend: its host, process, listener with its token, and
   the address of a secret.
2. If none declines, those of one host, of one user (`host_names`), allow each other to read their memory, connect, and
   each reads the others' secrets.
3. They exchange whether that worked. The engines are used only if all succeeded; otherwise all ranks use the backend,
   and the log says why. Between hosts the backend is used in any case (`several_hosts`).

Reading another process's memory with one copy and no intermediate buffer (Linux, same user, same host).

The kernel copies straight from the other process's pages into ours. There is nothing to clean up afterwards, and
nothing that a killed process could leave behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardwise._text import package_logger
from shardwise.comm.faults import TransportError
from shardwise.comm.flat_tensors import (
    REDUCE_BLOCK_ELEMENTS,
    Edges,
    accumulate_run,
    as_bytes,
    fill_from_bytes,
    finish_average,
    memory_runs,
    run_bytes,
)
from shardwise.comm.protocol import LEAST_RUN_BYTES, Capabilities, CompletedWork, PendingWork, ReduceOp, Work
from shardwise.comm.transports.engine import Gatherer
from shardwise.comm.transports.links import (
    Frame,
    FrameKind,
    LenderGoneError,
    Listener,
    Message,
    PeerCall,
    PeerEngine,
    PeerSockets,
    describe_listener,
    different_sizes_error,
    identify_host,
    listener_address,
    number_hosts,
)
from shardwise.geometry.mesh import IntArray

_BATCH_RANGES = 512
_BATCH_BYTES = 1 << 30
_PR_SET_PTRACER = 0x59616D61
_SECRET_BYTES = 16

T = TypeVar("T")
ByteRanges: TypeAlias = IntArray | Sequence[tuple[int, int]]
"""Addresses and numbers of bytes."""


def is_supported() -> bool:
    """Say whether this system has the call; only a trial shows whether it is allowed."""
    return sys.platform == "linux" and hasattr(_LIBC, "process_vm_readv")


def allow_readers(pids: Sequence[int]) -> None:
    """Let these processes read our memory where the kernel's Yama module restricts that to our ancestors.

    Yama takes one process, which stands for its descendants as well: of one reader, the reader itself; of several, our
    parent, which started them and us. Without readers, nobody is allowed any more. Orphans have no such parent.
    """
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() != "1":
        return
    allowed = 0 if not pids else pids[0] if len(pids) == 1 else os.getppid()
    _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(0 if allowed == 1 else allowed), 0, 0, 0)


def read_memory(pid: int, source: ByteRanges, target: ByteRanges) -> None:
    """Copy ranges of process `pid` into our own, which have as many bytes together; raise OSError if refused."""
    for remote, local in _batch_ranges(np.asarray(source, np.int64), np.asarray(target, np.int64)):
        wanted = int(local[:, 1].sum())
        got = _LIBC.process_vm_readv(pid, local.tobytes(), len(local), remote.tobytes(), len(remote), 0)
        if got != wanted:
            code = ctypes.get_errno() if got < 0 else 0
            raise OSError(code, f"read {max(got, 0)} of {wanted} bytes of process {pid}: {os.strerror(code)}")


def _batch_ranges(source: IntArray, target: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Cut ranges so that one call neither has too many of them nor too many bytes."""
    total = int(source[:, 1].sum())
    if max(len(source), len(target)) <= _BATCH_RANGES and total <= _BATCH_BYTES:
        yield source, target
        return
    ends = [side[:, 1].cumsum() for side in (source, target)]
    cuts = np.unique(np.concatenate([*ends, np.arange(_BATCH_BYTES, total, _BATCH_BYTES)]))
    starts = np.concatenate([[0], cuts[:-1]])
    both = []
    for side, end in zip((source, target), ends, strict=True):
        at = np.searchsorted(end, starts, side="right")
        both.append(np.stack([side[at, 0] + starts - end[at] + side[at, 1], cuts - starts], axis=1))
    batch = np.maximum(np.arange(len(cuts)) // _BATCH_RANGES, 0) + starts // _BATCH_BYTES  # each starts a call
    for part in np.split(np.arange(len(cuts)), np.flatnonzero(np.diff(batch)) + 1):
        yield both[0][part], both[1][part]


_LIBC = ctypes.CDLL(None, use_errno=True)
if hasattr(_LIBC, "process_vm_readv"):
    _LIBC.process_vm_readv.restype = ctypes.c_ssize_t
    _vector = ctypes.c_char_p, ctypes.c_ulong
    _LIBC.process_vm_readv.argtypes = (ctypes.c_int, *_vector, *_vector, ctypes.c_ulong)


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
        try:
            return self.read((), ())
        except OSError:
            return False

    def read(self, source: ByteRanges, target: ByteRanges) -> bool:
        """Copy ranges of the process into our own, and the secret after them: whether it was there by then."""
        seen = ctypes.create_string_buffer(_SECRET_BYTES)
        secret, place = (self.address, _SECRET_BYTES), (ctypes.addressof(seen), _SECRET_BYTES)
        read_memory(self.pid, _append(source, secret), _append(target, place))
        return seen.raw == self.secret


def _append(ranges: ByteRanges, one: tuple[int, int]) -> IntArray:
    return np.concatenate([np.asarray(ranges, np.int64).reshape(-1, 2), np.asarray([one], np.int64)])


_INLINE = 1 << 16  # one word between two processes takes as long as two more copies of so many bytes


def pack_offer(tensors: Sequence[Tensor]) -> tuple[Message, list[Tensor]]:
    """Return the message for some tensors: the bytes if they are few, else where they are; and what is lent by it.

    It begins with how many tensors and runs of memory there are, the bytes of each tensor, and the runs. Tensors whose
    runs are too short to be read one by one are copied.
    """
    sizes = [tensor.nbytes for tensor in tensors]
    few = sum(sizes) <= _INLINE
    lent = [
        t if t.is_contiguous() or (not few and run_bytes(t) >= LEAST_RUN_BYTES) else t.contiguous() for t in tensors
    ]
    if few:
        parts = [ctypes.string_at(tensor.data_ptr(), size) for tensor, size in zip(lent, sizes, strict=True)]
        return (FrameKind.DATA, [_pack_sizes(sizes, 0), *parts]), []
    runs = np.concatenate([memory_runs(tensor) for tensor in lent])
    return (FrameKind.RANGES, [_pack_sizes(sizes, len(runs)), runs.tobytes()]), lent


def _pack_sizes(sizes: Sequence[int], runs: int) -> bytes:
    return struct.pack(f"<II{len(sizes)}q", len(sizes), runs, *sizes)


class Offer(NamedTuple):
    """A read message: the bytes of each tensor, and runs of memory of another process, or the bytes in the message."""

    rank: int
    sizes: list[int]
    runs: IntArray
    body: bytearray | None
    at: int
    lease: RemoteLease

    @classmethod
    def of(cls, frame: Frame, lease: RemoteLease) -> Offer:
        """Read an offer from its message."""
        tensors, count = struct.unpack_from("<II", frame.body)
        sizes, at = list(struct.unpack_from(f"<{tensors}q", frame.body, 8)), 8 + 8 * tensors
        runs = np.frombuffer(frame.body, np.int64, 2 * count, at).reshape(-1, 2) if count else _NO_RUNS
        return cls(frame.rank, sizes, runs, frame.body if frame.kind is FrameKind.DATA else None, at, lease)

    def copy(self, targets: Sequence[Tensor]) -> None:
        """Copy the bytes into tensors of their sizes; raise unless what was copied is what was offered."""
        if self.body is None:
            places = list(map(_lendable_empty, targets))
            if not self._read(partial(self.lease.read, self.runs, np.concatenate(list(map(memory_runs, places))))):
                raise LenderGoneError(self.rank)
            for target, place in zip(targets, places, strict=True):
                if target is not place:
                    target.copy_(place)
            return
        at = self.at
        for target in targets:
            if target.is_contiguous():
                ctypes.memmove(target.data_ptr(), _address_of(self.body, at), target.nbytes)
            else:
                fill_from_bytes(target, self.body, at)
            at += target.nbytes

    def copy_part(self, at: int, address: int, length: int) -> None:
        """Copy some bytes of the only tensor, which is one run of memory, from byte `at` on."""
        if self.body is None:
            read = partial(read_memory, self.lease.pid, [(int(self.runs[0, 0]) + at, length)], [(address, length)])
            self._read(read)
        else:
            ctypes.memmove(address, _address_of(self.body, self.at + at), length)

    def _read(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except OSError as error:
            raise TransportError(f"its memory cannot be read ({error.strerror or error})", (self.rank,)) from error

    def confirm(self) -> None:
        """Raise unless what was copied is what was offered; bytes that came along always are."""
        if self.body is None and not self.lease.is_valid():
            raise LenderGoneError(self.rank)


_NO_RUNS = np.zeros((0, 2), np.int64)


def _lendable_empty(tensor: Tensor) -> Tensor:
    """Memory to fill in place of a tensor: its own, where its runs are long enough."""
    own = tensor.is_contiguous() or run_bytes(tensor) >= LEAST_RUN_BYTES
    return tensor if own else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _address_of(data: bytearray, at: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data, at))


class CopyOperation(PeerCall):
    """Copies each rank's offer into the tensors that wait for it."""

    is_leased = True

    def __init__(self, call: str, rank: int, receives: Edges, leases: Mapping[int, RemoteLease]) -> None:
        super().__init__(call, receives)
        self._rank, self._receives, self._leases = rank, receives, leases

    def take(self, frame: Frame) -> list[int]:
        """Copy into place."""
        given = Offer.of(frame, self._leases[frame.rank])
        targets = self._receives[frame.rank]
        _check_sizes(self.call, frame.rank, self._rank, given.sizes, [tensor.nbytes for tensor in targets])
        given.copy(targets)
        return [frame.rank] if given.body is None else []


class ReduceOperation(PeerCall):
    """Reduces one run of every rank, in rank order, when all have been offered; a block at a time stays in cache."""

    is_leased = True

    def __init__(
        self, call: str, rank: int, leases: Mapping[int, RemoteLease], out: Tensor, mine: Tensor, op: ReduceOp
    ) -> None:
        super().__init__(call, (r for r in leases if r != rank))
        self._rank, self._leases, self._op = rank, leases, op
        self._out, self._mine = out, mine
        self._is_in_place = out.data_ptr() == mine.data_ptr()
        self._offers: dict[int, Offer] = {}

    def take(self, frame: Frame) -> list[int]:
        """Keep the offer; reduce after the last one."""
        given = Offer.of(frame, self._leases[frame.rank])
        _check_sizes(self.call, frame.rank, self._rank, given.sizes, [self._mine.nbytes])
        self._offers[frame.rank] = given
        if self.expected:
            return []
        step = REDUCE_BLOCK_ELEMENTS
        scratch = self._mine.new_empty((1 + self._is_in_place, min(step, len(self._mine))))
        for at in range(0, len(self._mine), step):
            self._reduce_block(at, min(step, len(self._mine) - at), scratch)
        for given in self._offers.values():
            given.confirm()
        return [rank for rank, given in self._offers.items() if given.body is None]

    def _reduce_block(self, at: int, count: int, scratch: Tensor) -> None:
        out, other = self._out[at : at + count], scratch[-1, :count]
        total = scratch[0, :count] if self._is_in_place else out
        for i, rank in enumerate(self._leases):
            into = other if i else total
            if rank == self._rank:
                into.copy_(self._mine[at : at + count])
            else:
                self._offers[rank].copy_part(at * into.element_size(), into.data_ptr(), into.nbytes)
            if i:
                accumulate_run(total, other, self._op)
        finish_average(total, self._op, len(self._leases))
        if self._is_in_place:
            out.copy_(total)


def _check_sizes(call: str, src: int, dst: int, offered: Sequence[int], wanted: Sequence[int]) -> None:
    if offered != wanted:
        raise different_sizes_error(call, src, dst, f"{offered} bytes", str(wanted))


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
    listener, info = _open_listener(lease) if wanted and is_supported() else (None, {})
    try:
        info["host"] = identify_host()
        gathered = over.all_gather_bytes(json.dumps(info).encode(), call="connect ranks of one host")
        infos = {r: json.loads(data) for r, data in zip(ranks, gathered, strict=True)}
        hosts = number_hosts(over, rank, infos)
        if hosts is None or len(set(hosts)) == len(ranks) or any("listener" not in each for each in infos.values()):
            return HostNeighbours(hosts)
        assert listener is not None
        own = hosts[ranks.index(rank)]
        near = {r: infos[r] for r, host in zip(ranks, hosts, strict=True) if host == own}
        connected, engine = _connect(over, listener, rank, near, lease, timeout)
        return HostNeighbours(hosts, connected, engine)
    finally:
        if listener is not None:
            listener.close()


def _open_listener(lease: MemoryLease) -> tuple[Listener | None, dict[str, Any]]:
    """Listen, and write down what the others must know; without a listener if the system does not let us."""
    try:
        listener = Listener()
    except OSError as error:
        _log_slower(error)
        return None, {}
    return listener, {**describe_listener(listener), "lease": [lease.address, lease.secret.hex()]}


def _log_slower(reason: object) -> None:
    _log.warning("ranks of one host do not read each other's memory (%s): they use the group's sockets", reason)


def _connect(
    over: Gatherer, listener: Listener, rank: int, infos: Mapping[int, Any], lease: MemoryLease, timeout: float
) -> tuple[bool, SameHostEngine | None]:
    """Connect to the others of this host and try to read their memory; nowhere if anything is refused anywhere."""
    leases = {
        r: RemoteLease(info["pid"], info["lease"][0], bytes.fromhex(info["lease"][1])) for r, info in infos.items()
    }
    links: PeerSockets | None = None
    try:
        allow_readers([each.pid for r, each in leases.items() if r != rank])
        addresses = {r: listener_address(info) for r, info in infos.items()}
        links = listener.connect(rank, addresses, min(_CONNECT_SECONDS, timeout / 2))
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
    allow_readers([])
    return False, None


_SMALL_COLLECT_BYTES = 1 << 17  # bytes that a rank sends to all others together without asking them to read its memory


class SameHostEngine(PeerEngine):
    """Moves host tensors between processes of one host."""

    device = torch.device("cpu")
    capabilities = Capabilities(takes_strides=True, reduction_elements=REDUCE_BLOCK_ELEMENTS)
    starts_early = True

    def __init__(
        self, rank: int, links: PeerSockets, leases: Mapping[int, RemoteLease], own: MemoryLease, timeout: float
    ) -> None:
        super().__init__(rank, tuple(leases), links, timeout, own.end)
        self._leases = leases

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
        return self.all_reduce_into(tensor, tensor, op, call=call)

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """The same into other memory, from where the tensor is."""
        if tensor.nbytes * len(self._others) <= _SMALL_COLLECT_BYTES:
            self._reduce_small(call, out if out is tensor else out.copy_(tensor), op)
            return CompletedWork()
        runs, results = (list(t.tensor_split(len(self._ranks))) for t in (tensor, out))
        self._start_reduce(call, results[self._index], runs, op).wait()
        self._share(call, results[self._index], dict(zip(self._ranks, results, strict=True))).wait()
        return CompletedWork()

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Every rank reads the source's tensor."""
        view = [as_bytes(tensor, label=call)] if tensor.numel() else []
        mine = self._rank == src
        receives = {} if mine or not view else {src: view}
        sends = dict.fromkeys(self._others, view) if mine and view else {}
        return self._compare_beside(self._start(CopyOperation(call, self._rank, receives, self._leases), sends), call)

    def _reduce_small(self, call: str, tensor: Tensor, op: ReduceOp) -> None:
        """Reduce few bytes, which come along with the messages, in rank order: every rank gets the same bits."""
        taken = self._collect(ctypes.string_at(tensor.data_ptr(), tensor.nbytes), call)
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

    def _start(self, operation: PeerCall, sends: Edges) -> Work:
        with self._calls.lock:
            self._calls.register(operation)
            self._calls.start(operation, _offer(operation, sends))
        return PendingWork(partial(self._calls.wait, operation))


def _offer(operation: PeerCall, sends: Edges) -> Iterator[tuple[int, Message]]:
    """The messages of a call, made one after another: one at a time takes memory, and leaves while the next is made."""
    kept = operation.kept = []
    for rank, tensors in sends.items():
        message, lent = pack_offer(tensors)
        if lent:
            kept.append(lent)
            operation.lent_to.add(rank)
        yield rank, message
