"""A device made of host memory: its segments have addresses that are used again, handles, and numbers that are not."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.transports.device_memory import (
    DeviceEntry,
    DevicePeers,
    DeviceSegment,
    OpenedSegments,
    SameHostDeviceEngine,
    SharedSegments,
)
from shardwise.comm.transports.links import Listener, PeerSockets

CPU = torch.device("cpu")


class FakeDevice:
    """Segments of one process: made of host memory, known to others by their handles."""

    def __init__(self) -> None:
        self.segments: dict[int, tuple[int, Tensor]] = {}  # number and memory by address
        self.by_handle: dict[bytes, Tensor] = {}
        self.opened: list[bytes] = []
        self.closed: list[int] = []
        self._numbers = count(1)

    def allocate(self, size: int, address: int | None = None) -> Tensor:
        memory = torch.zeros(size, dtype=torch.uint8) if address is None else self.segments[address][1].zero_()
        number = next(self._numbers)
        self.segments[memory.data_ptr()] = number, memory
        self.by_handle[str(number).encode()] = memory
        return memory

    def free(self, memory: Tensor) -> None:
        number, _ = self.segments[memory.data_ptr()]
        self.segments[memory.data_ptr()] = -number, memory
        del self.by_handle[str(number).encode()]

    def find_segment(self, address: int) -> DeviceSegment | None:
        for start, (number, memory) in self.segments.items():
            if number > 0 and start <= address < start + len(memory):
                return DeviceSegment(number, start, len(memory))
        return None

    def export(self, segment: DeviceSegment) -> bytes:
        return str(segment.number).encode()

    def open(self, handle: bytes, size: int) -> Tensor:
        self.opened.append(handle)
        return self.by_handle[handle][:size]

    def close(self, opened: Tensor) -> None:
        self.closed.append(opened.data_ptr())


class NoEvents:
    """A device whose work is done when a call returns; what was recorded must come before it is awaited."""

    recorded: set[tuple[int, int, int]]

    def __init__(self, rank: int, recorded: set[tuple[int, int, int]]) -> None:
        self._rank, self.recorded = rank, recorded

    def record(self, moment: int, number: int, stream: Any) -> None:
        self.recorded.add((self._rank, moment, number))

    def wait(self, rank: int, moment: int, number: int, stream: Any) -> None:
        assert (rank, moment, number) in self.recorded, "awaited before it was recorded"

    def wait_if_marked(self, rank: int, moment: int, number: int, stream: Any) -> None:
        """Nothing is left to wait for."""


MakePeers = Callable[..., DevicePeers]


@contextmanager
def engines(
    world: int, device: FakeDevice, timeout: float = 20.0, *, make_peers: MakePeers = DevicePeers
) -> Iterator[list[SameHostDeviceEngine]]:
    pairs = {(a, b): socket.socketpair() for a in range(world) for b in range(a)}
    recorded: set[tuple[int, int, int]] = set()
    made = []
    for rank in range(world):
        sockets = {b: pair[0] for (a, b), pair in pairs.items() if a == rank}
        sockets |= {a: pair[1] for (a, b), pair in pairs.items() if b == rank}
        links = PeerSockets(sockets, dict.fromkeys(sockets, os.getpid()))
        owners = {r: f"process {r}" for r in range(world)}
        peers = make_peers(CPU, SharedSegments(device), OpenedSegments(device), NoEvents(rank, recorded), owners)
        made.append(SameHostDeviceEngine(rank, tuple(range(world)), links, peers, timeout))
    try:
        yield made
    finally:
        for engine in made:
            engine.close()


def run(made: Sequence[SameHostDeviceEngine], body: Callable[..., Any]) -> list[Any]:
    with ThreadPoolExecutor(len(made)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(body, rank, engine) for rank, engine in enumerate(made)]]


def on_device(device: FakeDevice, values: Tensor) -> Tensor:
    memory = device.allocate(values.nbytes)
    return memory.view(values.dtype).view(values.shape).copy_(values)


class SharedFileDevice(FakeDevice):
    """Segments in files of a folder, which other processes open by their names."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def allocate(self, size: int, address: int | None = None) -> Tensor:
        assert address is None
        number = next(self._numbers)
        path = self._folder / f"{os.getpid()}-{number}"
        path.write_bytes(bytes(size))
        memory = self.open(str(path).encode(), size)
        self.segments[memory.data_ptr()] = number, memory
        return memory

    def export(self, segment: DeviceSegment) -> bytes:
        return str(self._folder / f"{os.getpid()}-{segment.number}").encode()

    def open(self, handle: bytes, size: int) -> Tensor:
        return torch.from_file(handle.decode(), shared=True, size=size, dtype=torch.uint8)


class HostEvents:
    """Events of a device whose work is done when a call returns."""

    def open(self, handles: Any) -> None:
        """Nothing to open."""

    def record(self, moment: int, number: int, stream: Any) -> None:
        """Everything before is done."""

    def wait(self, rank: int, moment: int, number: int, stream: Any) -> None:
        """The message came after the work."""

    def wait_if_marked(self, rank: int, moment: int, number: int, stream: Any) -> None:
        """Nothing is left to wait for."""


def open_fake_entry(device: FakeDevice, events: Any, **fields: Any) -> tuple[DeviceEntry, dict[str, Any]]:
    """What `device_memory` makes of a rank's GPU, of a stand-in; `fields` replace those of the info."""
    secret, listener, shared = secrets.token_bytes(16), Listener(), SharedSegments(device)
    probe = on_device(device, torch.frombuffer(bytearray(secret), dtype=torch.uint8))
    messages, _ = shared.describe({-1: [probe]})
    info = {"probe": messages[-1].decode(), "secret": secret.hex(), "events": ["handle"], "pid": os.getpid()}
    info |= {"listener": listener.name, "token": listener.token.hex(), "host": "here", "process": str(os.getpid())}
    return DeviceEntry(CPU, listener, shared, events, probe), info | fields
