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
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.faults import TransportError

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
