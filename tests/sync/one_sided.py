"""A one-sided transport in the form of torch 2.15's, within a process: what is read is copied from where it is.

Its remote buffers have no offsets, its endpoints have one peer, registered memory is contiguous, and transfers go on
after a time-out, as those of a network card do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import one_sided_transports

NAME = "standin"
_interface: Any = one_sided_transports()
_Base: Any = object if _interface is None else _interface.Transport
_memory: dict[int, Tensor] = {}
_endpoints: dict[str, StandInTransport] = {}
made: list[StandInTransport] = []


class Buffer:
    """Where registered memory is, without an offset."""

    def __init__(self, key: int, length: int) -> None:
        self.key, self.length = key, length

    def serialize(self) -> bytes:
        return json.dumps([self.key, self.length]).encode()

    @classmethod
    def deserialize(cls, data: bytes) -> Buffer:
        return cls(*json.loads(data))


class Registered:
    """Memory of an endpoint."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous() and tensor.numel()
        self.tensor = tensor.view(torch.uint8)
        _memory[id(self)] = self.tensor

    def to_mutable_view(self, offset: int, length: int) -> Tensor:
        return self.tensor[offset : offset + length]

    def to_remote_buffer(self, *, timeout: float | None = None) -> Buffer:
        return Buffer(id(self), len(self.tensor))


class Transfer:
    """A read that ends when it is let."""

    def __init__(self, run: Callable[[], None], free: threading.Event) -> None:
        self._run, self._free = run, free

    def wait(self, timeout: timedelta) -> bool:
        if not self._free.wait(timeout.total_seconds()):
            raise TimeoutError("transport wait timed out; operations remain pending")
        self._run()
        return True


class StandInTransport(_Base):  # type: ignore[misc]
    """One endpoint; `free` lets its transfers end."""

    def __init__(self, device: Any = None) -> None:
        if _interface is not None:
            super().__init__(device)
        self.url, self.peer, self.closed, self.reads = f"end-{id(self)}", "", False, list[int]()
        self.free = threading.Event()
        self.free.set()
        _endpoints[self.url] = self
        made.append(self)

    @staticmethod
    def supported() -> bool:
        return True

    def bind(self, *, timeout: float | None = None) -> bytes:
        return self.url.encode()

    def connect(self, peer_url: bytes, *, timeout: float | None = None) -> int:
        assert not self.peer, "an endpoint has one peer"
        self.peer = peer_url.decode()
        return 0

    def connected(self) -> bool:
        return bool(self.peer)

    def register_memory(self, tensor: Tensor, *, timeout: float | None = None) -> Registered:
        return Registered(tensor)

    def read(self, local: Tensor, remote: Buffer, *, async_op: bool = False, timeout: float | None = None) -> Any:
        assert async_op and _endpoints[self.peer].peer == self.url, "both ends must be connected"
        if _endpoints[self.peer].closed:
            raise RuntimeError("the peer has closed its endpoint")
        assert len(local) <= remote.length
        self.reads.append(len(local))

        def run() -> None:
            local.copy_(_memory[remote.key][: len(local)])

        return Transfer(run, self.free)

    def write(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("nobody writes")

    def close(self, *, timeout: float | None = None) -> None:
        if not self.free.is_set():
            raise TimeoutError("transfers are pending")
        self.closed = True


def stand_in_module() -> Any:
    """What torch's module would be in a version that does not have it."""

    def new_transport(name: str, device: Any = None) -> StandInTransport:
        assert name == NAME
        return StandInTransport(device)

    return SimpleNamespace(available_transports=lambda: (NAME,), new_transport=new_transport)
