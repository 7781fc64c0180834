"""Device memory that several processes of one host use: which allocation a tensor is in, and how others open it.

1. A tensor is a part of a segment, one allocation of the device, which torch's allocator cuts up. CUDA gives a segment
   a handle (for other processes) and a number that is never used again in the process, unlike its address.
2. `SharedSegments` describes tensors to other processes: number, handle and size of the segment, and the tensor's
   place in it. Handles are kept by number. It notices segments that were freed and names them to the processes that
   know them.
3. `OpenedSegments` opens what others describe, once for each process and number, so that a new segment at the address
   of an old one is never taken for it. What its owner has freed is closed.

A handle exists for memory of cudaMalloc alone, not for torch's expandable segments or memory pools of other kinds.

What a rank needs to read the device memory of its peers, and they to read its own.

Before a process ends it waits, for a short time, until its streams have passed the moments that it marked for others,
and those of others at which they have read its memory: work that is queued ends with its process, and streams of
others would wait for it for ever; memory ends with its process as well.

Ranks of one host find out together whether all can read each other's device memory, and connect if so.

1. Each rank describes itself: its host and process, its listener, handles of its events, and where a secret of its own
   is on the device. One that cannot says why. The descriptions are gathered over the group's own backend.
2. Each connects to all others, opens their events and reads their secrets.
3. They exchange whether that worked. If it did not on one rank (another container, expandable segments, GPUs without
   peer access, MIG), none reads device memory, and the log of every rank says which rank cannot, and why.

In a group with nccl, ranks of one host use nccl if each has a GPU of its own; nccl refuses ranks that share one.
SHARDWISE_DEVICE_TRANSPORT, or an argument of the comm, asks for `nccl` or `ipc` instead, the same on every rank.

Ranks of one host with device memory: a rank reads the others' tensors where they are, by CUDA's IPC.

1. A sender marks the moment at which its tensors are ready in its stream and sends the receiver their places: segment,
   handle, offset, shape, strides. Nothing is packed: a box of a larger tensor is a tensor with strides.
2. The receiver opens the segments it does not know, lets its stream wait for that moment, and uses the tensors as if
   they were its own: copies them into place, or reduces them. It marks the moment after that and confirms.
3. The sender lets its stream wait for the receivers' moments. From then on its program may write to what it lent.

No rank waits for a device here: only the messages are waited for, which say what streams will do. Ranks have GPUs with
peer access, or share one.

Streams: a call belongs to the stream on which it was started, but it may be served on another one, by whoever waits.
So the stream that reads and writes first waits for the one that started the call, and both wait for the readers: memory
that is freed after `wait()` goes back to the stream it was made on.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from shardwise._text import package_logger
from shardwise.comm.agree import fold_texts, name_ranks
from shardwise.comm.faults import TransportError
from shardwise.comm.flat_tensors import as_bytes, match_tensors
from shardwise.comm.protocol import Capabilities, Combine, PendingWork, ReduceOp, TensorsByRank, Work
from shardwise.comm.transports.backends import NativeEngine
from shardwise.comm.transports.engine import Engine, Gatherer
from shardwise.comm.transports.kernels import copy_boxes, reduce_tensors
from shardwise.comm.transports.links import (
    Frame,
    FrameKind,
    Listener,
    PeerCall,
    PeerEngine,
    PeerSockets,
    describe_listener,
    different_sizes_error,
    identify_host,
    listener_address,
)

_PROCESS_TOKEN = secrets.token_hex(8)
_LOOK_EVERY = 64  # descriptions, after which freed segments are looked for; also with each new segment
_HANDLE_BYTES = 64
_NUMBER, _IS_SHAREABLE, _START, _SIZE = 7, 10, 11, 12  # attributes of a pointer in CUDA's driver
_ENABLE_PEER_ACCESS = 1
_NO_SEGMENT = -1  # the number of the segment of a tensor without elements


def identify_process() -> str:
    """Return what no other process of this host has; forked ranks share everything else that was drawn before."""
    return f"{_PROCESS_TOKEN}-{os.getpid()}"


@dataclass(frozen=True)
class DeviceSegment:
    """One allocation of device memory; its number is never used again in the process, its address may be."""

    number: int
    start: int
    size: int


class SegmentMemory(Protocol):
    """What the caches need of a device's memory."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return new memory of the device, as bytes."""
        ...

    def find_segment(self, address: int) -> DeviceSegment | None:
        """Return the segment of an address; None for memory that other processes cannot open."""
        ...

    def export(self, segment: DeviceSegment) -> bytes:
        """Return the handle by which other processes open a segment."""
        ...

    def open(self, handle: bytes, size: int) -> Tensor:
        """Return another process's segment as bytes of this process."""
        ...

    def close(self, opened: Tensor) -> None:
        """Undo `open`."""
        ...


class _IpcHandle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_byte * _HANDLE_BYTES),)


@dataclass(frozen=True)
class _MappedRange:
    """Memory as torch takes it from other libraries."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class CudaMemory:
    """Segments of this process's GPUs, by CUDA's driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds = (ctypes.c_int * 4)(_NUMBER, _IS_SHAREABLE, _START, _SIZE)
        self._values = (ctypes.c_ulonglong * 4)()
        self._places = (ctypes.c_void_p * 4)(*(ctypes.addressof(self._values) + 8 * i for i in range(4)))
        self._asking = threading.Lock()  # the arrays are filled by every question: making them takes longer than asking

    def allocate(self, nbytes: int) -> Tensor:
        """Ask torch's allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def find_segment(self, address: int) -> DeviceSegment | None:
        """Ask the driver for the allocation of an address."""
        with self._asking:
            self._values[1] = 0  # its answer is shorter than the others
            _call("cuPointerGetAttributes", 4, self._kinds, self._places, ctypes.c_ulonglong(address))
            number, shareable, start, size = self._values
        return DeviceSegment(number, start, size) if shareable and start else None

    def export(self, segment: DeviceSegment) -> bytes:
        """Ask the driver for the handle."""
        handle = _IpcHandle()
        with self._context():
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_ulonglong(segment.start))
        return bytes(handle.data)

    def open(self, handle: bytes, size: int) -> Tensor:
        """Map the segment into this process."""
        address = ctypes.c_ulonglong()
        given = _IpcHandle((ctypes.c_byte * _HANDLE_BYTES).from_buffer_copy(handle))
        with self._context():
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_ENABLE_PEER_ACCESS))
            opened = torch.as_tensor(_MappedRange(address.value, size), device=self._device)
        if opened.data_ptr() != address.value:
            raise OSError(f"torch copies memory of another GPU to {self._device} instead of using it where it is")
        return opened

    def close(self, opened: Tensor) -> None:
        """Unmap the segment; its owner freed it, after everything that read it."""
        with self._context():
            _call("cuIpcCloseMemHandle", ctypes.c_ulonglong(opened.data_ptr()))

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Bind the device's context to this thread: the driver maps memory into the current one, whichever it is."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).query()  # a new thread has no context yet, even of this device
            yield


def is_driver_present() -> bool:
    """Whether CUDA's driver can be called."""
    try:
        _driver()
    except OSError:
        return False
    return torch.cuda.is_available()


def segment_memory(device: torch.device) -> SegmentMemory | None:
    """The memory of a device that other processes can open; None where there is none."""
    return CudaMemory(device) if device.type == "cuda" and is_driver_present() else None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise OSError(code, f"{name}: {(text.value or b'unknown error').decode()}")


class SharedSegments:
    """What this process shows of its device memory to others, by rank."""

    def __init__(self, memory: SegmentMemory) -> None:
        self._memory = memory
        self._handles: dict[int, tuple[DeviceSegment, str]] = {}
        self._known: dict[int, set[int]] = {}
        self._described = 0

    def describe(self, lent: Mapping[int, Sequence[Tensor]]) -> tuple[dict[int, bytes], dict[int, list[Tensor]]]:
        """Return for each rank the message that tells where tensors are, and the tensors to keep until it is read.

        Those that the rank could not open are copied first. The message also names segments that the rank knows and
        that have been freed since.
        """
        seen: list[tuple[DeviceSegment, str]] = []  # in this call: a segment may have been freed since the last one
        found = {rank: self._describe_to(rank, tensors, seen) for rank, tensors in lent.items()}
        self._described += 1
        if self._described % _LOOK_EVERY == 0:
            self._forget_freed()
        return {rank: each[0] for rank, each in found.items()}, {rank: each[1] for rank, each in found.items()}

    def _describe_to(
        self, rank: int, tensors: Sequence[Tensor], seen: list[tuple[DeviceSegment, str]]
    ) -> tuple[bytes, list[Tensor]]:
        placed = [self._place(tensor, seen) for tensor in tensors]
        segments = {found[0].number: found for _, found, _ in placed if found is not None}
        self._known.setdefault(rank, set()).update(segments)
        handles, places = ",".join([text for _, text in segments.values()]), ",".join([text for _, _, text in placed])
        message = f"[[{handles}],[{places}],{self._take_freed(rank)}]".encode()
        return message, [tensor for tensor, _, _ in placed]

    def _place(
        self, tensor: Tensor, seen: list[tuple[DeviceSegment, str]]
    ) -> tuple[Tensor, tuple[DeviceSegment, str] | None, str]:
        """Return the tensor or a copy of it, its segment if it has elements, and its place in it as text."""
        if not tensor.numel():
            return tensor, None, _place_text(_NO_SEGMENT, 0, tensor.dtype, tensor.shape, tensor.stride())
        address = tensor.data_ptr()
        found = next((each for each in seen if each[0].start <= address < each[0].start + each[0].size), None)
        if found is None:
            segment = self._memory.find_segment(address)
            if segment is None:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                address = tensor.data_ptr()
                segment = self._memory.find_segment(address)
            if segment is None:
                raise OSError(
                    f"memory of {tensor.device} cannot be opened by other processes; that of expandable_segments in "
                    "PYTORCH_CUDA_ALLOC_CONF and of cudaMallocAsync never can (set before the first call of a comm, "
                    "they let it go through host memory)"
                )
            found = self._share(segment)
            seen.append(found)
        start = address - found[0].start
        return tensor, found, _place_text(found[0].number, start, tensor.dtype, tensor.shape, tensor.stride())

    def _take_freed(self, rank: int) -> list[int]:
        known = self._known[rank]
        freed = [number for number in known if number not in self._handles]
        known.difference_update(freed)
        return freed

    def _share(self, segment: DeviceSegment) -> tuple[DeviceSegment, str]:
        known = self._handles.get(segment.number)
        if known is None:
            self._forget_freed()
            text = f'[{segment.number},"{self._memory.export(segment).hex()}",{segment.size}]'
            known = self._handles[segment.number] = segment, text
        return known

    def _forget_freed(self) -> None:
        for number, (segment, _) in list(self._handles.items()):
            if self._memory.find_segment(segment.start) != segment:
                del self._handles[number]


@lru_cache(maxsize=4096)
def _place_text(number: int, start: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> str:
    kind = str(dtype).removeprefix("torch.")
    return f'[{number},{start},"{kind}",{[*shape]},{[*strides]}]'


_KEPT_MESSAGES = 1024


class OpenedSegments:
    """Other processes' segments that are open in this process, by their owner and number."""

    def __init__(self, memory: SegmentMemory) -> None:
        self._memory = memory
        self._opened: dict[tuple[str, int], Tensor] = {}
        self._read: dict[tuple[str, bytes], list[Tensor]] = {}  # programs that go round in steps lend the same again
        self._lock = threading.Lock()

    def read(self, owner: str, message: bytes) -> list[Tensor]:
        """Return the tensors that a message of another process describes, as tensors of this one; nothing is copied."""
        known = self._read.get((owner, message))
        if known is not None:
            return known
        segments, places, freed = json.loads(message)
        with self._lock:
            self._drop(owner, freed)
            for number, handle, size in segments:
                if (owner, number) not in self._opened:
                    self._opened[owner, number] = self._memory.open(bytes.fromhex(handle), size)
            if len(self._read) >= _KEPT_MESSAGES:
                self._read.clear()
            found = [self._view(owner, *place) for place in places]
            if not freed:
                self._read[owner, message] = found
        return found

    def _view(self, owner: str, number: int, start: int, kind: str, shape: list[int], strides: list[int]) -> Tensor:
        dtype = getattr(torch, kind)
        if number == _NO_SEGMENT:
            return torch.empty(shape, dtype=dtype, device="cpu")
        whole = self._opened[owner, number]
        typed = whole[: len(whole) - len(whole) % dtype.itemsize].view(dtype)
        return typed.as_strided(shape, strides, start // dtype.itemsize)

    def _drop(self, owner: str, numbers: Sequence[int]) -> None:
        """Close segments that their owner has freed."""
        if numbers:
            self._read.clear()
        for number in numbers:
            opened = self._opened.pop((owner, number), None)
            if opened is not None:
                self._memory.close(opened)

    def close(self) -> None:
        """Close all segments; nobody may use tensors of them any more."""
        with self._lock:
            for owner in {owner for owner, _ in self._opened}:
                self._drop(owner, [number for other, number in self._opened if other == owner])

    def __len__(self) -> int:
        return len(self._opened)


_opened_by_device: dict[torch.device, OpenedSegments] = {}


def opened_segments(device: torch.device) -> OpenedSegments:
    """Return what this process has open for a device: one table, since a handle is opened once in a process."""
    return _opened_by_device.setdefault(device, OpenedSegments(CudaMemory(device)))


class PeerEvents(Protocol):
    """The order of work on the device between ranks: moments of one rank's stream that the streams of others await."""

    def record(self, moment: int, number: int, stream: Any) -> None:
        """Mark the end of what a stream of this rank has to do so far."""
        ...

    def wait(self, rank: int, moment: int, number: int, stream: Any) -> None:
        """Let a stream of this rank wait until a rank's stream has reached what it marked."""
        ...

    def wait_if_marked(self, rank: int, moment: int, number: int, stream: Any) -> None:
        """The same for a moment that the rank may not have marked: then the stream does not wait."""
        ...


LENT, READ = 0, 1
_Event: Any = torch.cuda.Event  # untyped in torch
_RING = 16  # calls in flight; one more waits a little longer than it had to


class CudaEvents:
    """Events that processes share; those of a call are used again some calls later.

    Waiting for a later mark of the same event is waiting longer than needed, never for something that itself waits:
    a mark is made before its message is sent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = [[_Event(interprocess=True) for _ in range(_RING)] for _ in (LENT, READ)]
        self._theirs: dict[int, list[list[Any]]] = {}

    def handles(self) -> list[list[str]]:
        """Return what the other processes need to open these events."""
        with torch.cuda.device(self._device):
            return [[event.ipc_handle().hex() for event in ring] for ring in self._own]

    def open(self, handles: Mapping[int, Sequence[Sequence[str]]]) -> None:
        """Open the events of the other ranks."""
        for rank, rings in handles.items():
            self._theirs[rank] = [
                [_Event.from_ipc_handle(self._device, bytes.fromhex(text)) for text in ring] for ring in rings
            ]

    def record(self, moment: int, number: int, stream: Any) -> None:
        """Record the event on the stream."""
        self._own[moment][number % _RING].record(stream)

    def wait(self, rank: int, moment: int, number: int, stream: Any) -> None:
        """Let the stream wait for the event."""
        self._theirs[rank][moment][number % _RING].wait(stream)

    def wait_if_marked(self, rank: int, moment: int, number: int, stream: Any) -> None:
        """Let the stream wait for the event; one that was not marked in this call has an older mark, or none."""
        self.wait(rank, moment, number, stream)


_EXIT_SECONDS, _LOOK_SECONDS = 5.0, 0.001


class DevicePeers:
    """What a rank needs to read the device memory of its peers, and they to read its own."""

    def __init__(
        self,
        device: torch.device,
        shared: SharedSegments,
        opened: OpenedSegments,
        events: PeerEvents,
        owners: Mapping[int, str],
    ) -> None:
        self.device, self.events = device, events
        self._used: set[Any] = set()  # streams on which something was marked, or awaited
        _peers.add(self)
        self._shared, self._opened, self._owners = shared, opened, owners

    def describe(
        self, lent: Mapping[int, Sequence[Tensor]], *, rank: int, call: str
    ) -> tuple[dict[int, bytes], dict[int, list[Tensor]]]:
        """Return the messages by which `rank` lends tensors to others, and the tensors to keep until they are read."""
        try:
            return self._shared.describe(lent)
        except OSError as error:
            raise TransportError(
                f"{call}: rank {rank} cannot lend its tensors: {error}", (rank,), exact=True
            ) from error

    def read(self, rank: int, message: bytes) -> list[Tensor]:
        """Return the tensors that a rank lends."""
        try:
            return self._opened.read(self._owners[rank], message)
        except OSError as error:
            raise TransportError(f"its device memory cannot be read ({error})", (rank,)) from error

    def mark(self, moment: int, number: int, stream: Any) -> None:
        """Mark the end of what a stream has to do so far, for the streams of others."""
        self.events.record(moment, number, stream)
        if stream is not None:
            self._used.add(stream)

    def await_readers(self, ranks: Iterable[int], number: int, stream: Any) -> None:
        """Let a stream wait until ranks have read, or written, what this rank lent them in a call."""
        for rank in ranks:
            self.events.wait(rank, READ, number, stream)
            if stream is not None:
                self._used.add(stream)

    def await_possible_readers(self, ranks: Iterable[int], number: int) -> None:
        """After a failure: let the current stream wait for ranks that use what was lent, if they do."""
        with suppress(RuntimeError):  # the device itself may have failed: then nothing is left to wait for
            for rank in ranks:
                self.events.wait_if_marked(rank, READ, number, self.current_stream())

    def passes_marks(self, seconds: float) -> bool:
        """Wait until the used streams have nothing left to do; whether they have, within so many seconds."""
        deadline = time.monotonic() + seconds
        while not all(stream.query() for stream in self._used):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    @staticmethod
    def order_streams(later: Any, earlier: Any) -> None:
        """Let one stream wait for what another one has to do so far, unless they are the same."""
        if earlier is not None and earlier != later:
            later.wait_stream(earlier)

    def current_stream(self) -> Any:
        """Return the stream on which this thread works; None where the device has none."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None


_peers: weakref.WeakSet[DevicePeers] = weakref.WeakSet()


@atexit.register
def _pass_all_marks() -> None:
    """Not longer than a few seconds: a stream that waits for a process that was killed never ends."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for peers in list(_peers):
        try:
            peers.passes_marks(max(0.0, deadline - time.monotonic()))
        except RuntimeError:
            continue  # the device has failed: nothing is left to wait for


_ONE_CALL_BYTES = 1 << 26  # of the tensors of all ranks: up to here every rank reads all of them in an all-reduce


class LendCall(PeerCall):
    """One call in which ranks lend each other tensors: `take` is called once, with those of all expected ranks."""

    def __init__(
        self,
        call: str,
        lent: Mapping[int, Sequence[Tensor]],
        expected: Iterable[int],
        take: Combine,
        peers: DevicePeers,
    ) -> None:
        super().__init__(call, expected, lent)
        self._lent, self._take, self._peers = lent, take, peers
        self._readers, self._arrived = tuple(lent), dict[int, bytes]()
        self._started_on, self._stream = peers.current_stream(), None

    def take(self, frame: Frame) -> Iterable[int]:
        """Keep where the tensors are; use them after the last message."""
        self._arrived[frame.rank] = bytes(frame.body)
        if self.expected:
            return ()
        self.use()
        return self._arrived

    def use(self) -> None:
        """Use the tensors of all ranks, on the current stream."""
        events, self._stream = self._peers.events, self._peers.current_stream()
        self._peers.order_streams(self._stream, self._started_on)
        for rank in self._arrived:
            events.wait(rank, LENT, self.number, self._stream)
        self._take({rank: self._peers.read(rank, self._arrived[rank]) for rank in sorted(self._arrived)})
        if self._arrived:
            self._peers.mark(READ, self.number, self._stream)

    def settle(self) -> None:
        """Let the current stream wait for what was read and written in this call."""
        stream = self._peers.current_stream()
        self._peers.order_streams(stream, self._stream)
        self._peers.await_readers(self._readers, self.number, stream)
        self._peers.order_streams(self._started_on, stream)
        self._lent = {}

    def give_up(self, ended: set[int]) -> None:
        """After a failure: what ranks read of this one's memory, they have read before its program goes on."""
        self._peers.await_possible_readers(set(self._readers) - ended, self.number)


class SameHostDeviceEngine(PeerEngine):
    """Moves device tensors between processes of one host."""

    capabilities, starts_early = Capabilities(reads_peers=True), True

    def __init__(
        self, rank: int, ranks: tuple[int, ...], links: PeerSockets, peers: DevicePeers, timeout: float
    ) -> None:
        super().__init__(rank, ranks, links, timeout)
        self._peers, self.device = peers, peers.device

    def lend(self, sends: TensorsByRank, receives: Iterable[int], take: Combine, *, call: str) -> Work:
        """Lend tensors of any strides to ranks; `take` reads what others lend, on this rank's stream."""
        with self._calls.lock, self._calls.abort_if_raised(call):
            messages, lent = self._peers.describe(sends, rank=self._rank, call=call)
            operation = LendCall(call, lent, receives, take, self._peers)
            number = self._calls.register(operation)
            if lent:
                self._peers.mark(LENT, number, self._peers.current_stream())
            if not operation.expected:
                operation.use()
            self._calls.start(operation, [(rank, (FrameKind.RANGES, [body])) for rank, body in messages.items()])
        return PendingWork(partial(self._finish, operation))

    def exchange(self, sends: TensorsByRank, receives: TensorsByRank, *, call: str) -> Work:
        """Copy tensors of any strides, those that this rank sends to itself included."""
        own = _pair_boxes(call, self._rank, self._rank, sends.get(self._rank, ()), receives.get(self._rank, ()))

        def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
            copy_boxes([*own, *(pair for r in lent for pair in _pair_boxes(call, r, self._rank, lent[r], receives[r]))])

        others = {r: tensors for r, tensors in sends.items() if r != self._rank}
        return self.lend(others, (r for r in receives if r != self._rank), take, call=call)

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Every rank reads every other rank's tensor."""
        parts = list(out.view(len(self._ranks), -1))
        if parts[self._index].data_ptr() != tensor.data_ptr():
            parts[self._index].copy_(tensor)
        return self._share(parts, tensor, call)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Every rank reads its run of all others, and reduces them in rank order."""
        return self._reduce(out, list(tensor.view(len(self._ranks), -1)), op, call)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce small tensors on every rank; reduce-scatter and gather large ones, in place."""
        if not self._reads_all(tensor):
            return self.all_reduce_into(tensor, tensor, op, call=call)
        total = torch.empty_like(tensor)
        work = self.all_reduce_into(total, tensor, op, call=call)

        def finish() -> None:
            work.wait()
            tensor.copy_(total)

        return PendingWork(finish)

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """The same, into another tensor: in one call, unless ranks had to read too much."""
        if self._reads_all(tensor):
            return self._reduce(out, [tensor] * len(self._ranks), op, call)
        runs, results = (list(t.tensor_split(len(self._ranks))) for t in (tensor, out))
        self._reduce(results[self._index], runs, op, call).wait()
        return self._share(results, results[self._index], call)

    def _reads_all(self, tensor: Tensor) -> bool:
        """Whether an all-reduce is one call, in which every rank reads all tensors."""
        return tensor.nbytes * len(self._ranks) <= _ONE_CALL_BYTES

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Every rank reads the source's tensor."""
        view = [as_bytes(tensor, label=call)] if tensor.numel() else []
        sends = dict.fromkeys(self._others, view) if self._rank == src and view else {}
        receives = {src: view} if self._rank != src and view else {}
        return self._compare_beside(self.exchange(sends, receives, call=call), call)

    def _share(self, parts: Sequence[Tensor], mine: Tensor, call: str) -> Work:
        """Lend one tensor to all others and copy theirs into `parts`, in group order."""
        edges = {r: [t] for r, t in zip(self._ranks, parts, strict=True) if r != self._rank and t.numel()}
        return self.exchange({r: [mine] for r in self._others} if mine.numel() else {}, edges, call=call)

    def _reduce(self, out: Tensor, runs: Sequence[Tensor], op: ReduceOp, call: str) -> Work:
        """Lend the i-th run to the i-th rank and reduce what all ranks lend and this rank's own run."""
        sends = {r: [run] for r, run in zip(self._ranks, runs, strict=True) if r != self._rank and run.numel()}
        own = runs[self._index]
        expected = self._others if own.numel() else ()

        def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
            if own.numel():
                for rank in lent:
                    _pair_boxes(call, rank, self._rank, lent[rank], [out])
                terms = [own if rank == self._rank else lent[rank][0] for rank in self._ranks]
                reduce_tensors(out, terms, op)

        return self.lend(sends, expected, take, call=call)

    def _finish(self, operation: LendCall) -> None:
        self._calls.wait(operation)
        operation.settle()


def _pair_boxes(
    call: str, src: int, dst: int, sent: Sequence[Tensor], wanted: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The k-th tensor that is received and the k-th that is sent; they must match."""
    matched = [match_tensors(*pair) for pair in zip(wanted, sent, strict=False)]
    if None in matched or len(sent) != len(wanted):
        theirs, ours = [t.nbytes for t in sent], [t.nbytes for t in wanted]
        if theirs != ours:
            raise different_sizes_error(call, src, dst, f"{theirs} bytes", str(ours))
        shapes = [str([tuple(t.shape) for t in each]) for each in (sent, wanted)]
        raise different_sizes_error(call, src, dst, f"shapes {shapes[0]}", shapes[1])
    return cast(list[tuple[Tensor, Tensor]], matched)


_CONNECT_SECONDS = 10.0
_VARIABLE = "SHARDWISE_DEVICE_TRANSPORT"
_REQUESTS = ("auto", "ipc", "nccl")
_log = package_logger(__name__)


def find_request(argument: str | None) -> str:
    """Return which transport is asked for, by an argument or else by the variable."""
    found = argument or os.environ.get(_VARIABLE) or "auto"
    if found == "measured":
        warnings.warn(
            "device transport 'measured' is 'auto' now: nccl where each rank has a GPU of its own, else CUDA IPC",
            FutureWarning,
            stacklevel=3,
        )
        return "auto"
    if found not in _REQUESTS:
        raise ValueError(
            f"device transport {found!r} (argument device_transport, or {_VARIABLE}): use one of {_REQUESTS}"
        )
    return found


def choose_device_engine(
    native: NativeEngine, rank: int, ranks: tuple[int, ...], timeout: float, request: str
) -> Engine:
    """The engine for ranks of one host with nccl, of one kind on every rank."""
    info = json.dumps([request, identify_gpu(native.device)]).encode()
    said = [json.loads(data) for data in native.all_gather_bytes(info, call="choose device transport")]
    if len({asked for asked, _ in said}) > 1:
        texts = fold_texts({r: repr(asked) for r, (asked, _) in zip(ranks, said, strict=True)})
        raise ValueError(f"ranks ask for different device transports ({texts}); set {_VARIABLE} alike on every rank")
    if request == "nccl" or (request == "auto" and len({gpu for _, gpu in said}) == len(ranks)):
        return native
    reading = connect_devices(native, rank, ranks, native.device, timeout, wanted=True, instead="nccl is used")
    if reading is None:
        return native
    why = "as was asked" if request == "ipc" else "some share a GPU, which nccl refuses"
    level = logging.INFO if rank == ranks[0] else logging.DEBUG
    _log.log(level, "%s read each other's device memory and do not use nccl: %s", name_ranks(ranks), why)
    return reading


def identify_gpu(device: torch.device) -> str:
    """What identifies a GPU of this host: its number differs between processes that see different ones."""
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True)
class DeviceEntry:
    """Where others connect to this rank, and what they read to see that they can."""

    device: torch.device
    listener: Listener
    shared: SharedSegments
    events: CudaEvents
    probe: Tensor


def connect_devices(
    over: Gatherer,
    rank: int,
    ranks: tuple[int, ...],
    device: torch.device,
    timeout: float,
    *,
    wanted: bool,
    instead: str = "it goes through host memory",
) -> SameHostDeviceEngine | None:
    """Return an engine for ranks of one host with device memory, or None on every rank if some rank cannot.

    `instead`: what happens then, for the log.
    """
    entry, info = _open_entry(device) if wanted else (None, {})
    try:
        gathered = over.all_gather_bytes(json.dumps(info).encode(), call="connect devices of one host")
        infos: dict[int, dict[str, Any]] = {r: json.loads(data) for r, data in zip(ranks, gathered, strict=True)}
        problems = {r: info["problem"] for r, info in infos.items() if "problem" in info}
        if problems:
            _log_refusal(problems, instead)
        if entry is None or len({each.get("host") for each in infos.values()}) != 1 or not info["host"]:
            return None
        owners = {r: each["process"] for r, each in infos.items()}
        peers = DevicePeers(entry.device, entry.shared, opened_segments(entry.device), entry.events, owners)
        links, problem = _connect(entry, rank, infos, peers, min(_CONNECT_SECONDS, timeout / 2))
        answers = over.all_gather_bytes(problem.encode(), call="devices of one host can be read")
        problems = {r: answer.decode() for r, answer in zip(ranks, answers, strict=True) if answer}
        if links is None or problems:
            _log_refusal(problems, instead)
            if links is not None:
                links.close()
            return None
        return SameHostDeviceEngine(rank, ranks, links, peers, timeout)
    finally:
        if entry is not None:
            entry.listener.close()


def _open_entry(device: torch.device) -> tuple[DeviceEntry | None, dict[str, Any]]:
    """Listen, and write down what the others must know, or why this rank's memory cannot be read."""
    try:
        if not is_driver_present():
            raise OSError("CUDA's driver is not there")
        device = torch.empty(0, device=device).device  # with its number
        secret = secrets.token_bytes(16)
        probe = torch.frombuffer(bytearray(secret), dtype=torch.uint8).to(device)
        torch.cuda.synchronize(device)
        shared, events = SharedSegments(CudaMemory(device)), CudaEvents(device)
        messages, _ = shared.describe({-1: [probe]})
        info = {
            "probe": messages[-1].decode(),
            "secret": secret.hex(),
            "events": events.handles(),
            "host": identify_host(),
            "process": identify_process(),
        }
        listener = Listener()
    except (OSError, RuntimeError) as error:
        return None, {"problem": _first_line(error)}
    return DeviceEntry(device, listener, shared, events, probe), info | describe_listener(listener)


def _connect(
    entry: DeviceEntry, rank: int, infos: Mapping[int, dict[str, Any]], peers: DevicePeers, seconds: float
) -> tuple[PeerSockets | None, str]:
    """Connect to all others and read their secrets; return the connections, and what went wrong."""
    others = {r: info for r, info in infos.items() if r != rank}
    links: PeerSockets | None = None
    try:
        addresses = {r: listener_address(info) for r, info in infos.items()}
        links = entry.listener.connect(rank, addresses, seconds)
        entry.events.open({r: info["events"] for r, info in others.items()})
        for r, info in others.items():
            read = peers.read(r, info["probe"].encode())[0].cpu()
            if read.numpy().tobytes().hex() != info["secret"]:
                return links, f"other bytes are read than rank {r} wrote"
    except (OSError, RuntimeError, TransportError) as error:
        return links, _first_line(error)
    return links, ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _log_refusal(problems: Mapping[int, str], instead: str) -> None:
    _log.warning("ranks of one host do not read each other's device memory (%s): %s", fold_texts(problems), instead)
