"""What moves the bytes of a comm over a process group, on one kind of device: the protocol of a transport.

To add a transport, write a class with the methods of `Engine` and let `process_group.py` choose it, on all ranks alike.
An engine gets flat, contiguous, checked tensors on its own device: `Stage` copies those of other devices there
and back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from shardwise.comm.flat_tensors import Edges
from shardwise.comm.protocol import ReduceOp, TakeLent, Work


class Gatherer(Protocol):
    """The means by which the ranks talk before they are connected."""

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Return the bytes of all ranks in group order."""
        ...


class Engine(Protocol):
    """The operations of a `Comm` on checked, contiguous, flat tensors on one device; ranks are global ones.

    `call` says what is done: operation, label, reduction, sizes and dtype. Ranks for which it differs fail.
    """

    @property
    def device(self) -> torch.device:
        """Where the tensors handed to it must live."""
        ...

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that the present wait is for."""
        ...

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Move byte views along edges between different ranks."""
        ...

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Fill `out` with all tensors in group order."""
        ...

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce run i into rank i's `out`."""
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce in place."""
        ...

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Overwrite with the tensor of `src`."""
        ...

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Return the bytes of all ranks in group order."""
        ...

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify the others, if possible, that this rank has stopped."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


class LendingEngine(Engine, Protocol):
    """An engine whose ranks can read each other's tensors where they are."""

    def exchange_boxes(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], *, call: str
    ) -> Work:
        """Copy tensors of any strides along edges, those from a rank to itself included."""
        ...

    def exchange_cut(
        self,
        key: Hashable,
        bases: Sequence[Tensor],
        cut: Callable[[], tuple[Mapping[int, Sequence[Tensor]], Mapping[int, Sequence[Tensor]]]],
        *,
        call: str,
    ) -> Work:
        """The same with boxes that `cut` makes of the bases, equal ones for equal keys and places of the bases."""
        ...

    def lend(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Iterable[int], take: TakeLent, *, call: str
    ) -> Work:
        """Lend tensors of any strides; see `LendingComm`."""
        ...

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce a tensor into `out` on every rank, which may be the tensor itself."""
        ...


class AgreeingEngine(Engine, Protocol):
    """An engine that can start a call while the ranks compare what they ask for, and take it back."""

    @property
    def calls(self) -> int:
        """The number of the last call that was started."""
        ...

    def start_agreeing(self, data: bytes, *, call: str) -> Callable[[], list[bytes]]:
        """Send bytes to all others; returns what waits for theirs. The next call may be started before that."""
        ...

    def withdraw_call(self, number: int) -> None:
        """Take back a call that some ranks have started and others have not."""
        ...


def find_agreeing(engine: Engine | None) -> AgreeingEngine | None:
    """Return the engine as one that starts calls while ranks agree, if it does."""
    return cast(AgreeingEngine, engine) if hasattr(engine, "withdraw_call") else None


class Stage:
    """Stands in for tensors of other devices during one operation.

    >>> stage = Stage(torch.device("cpu"))
    >>> x = torch.ones(2)
    >>> stage.read(x) is x
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._back: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy of it where the engine can read it."""
        if tensor.device.type == self._device.type:
            return tensor
        return self._like(tensor).copy_(tensor)

    def write(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or memory for the engine to fill that `finish` copies back."""
        if tensor.device.type == self._device.type:
            return tensor
        self._back.append((tensor, self._like(tensor)))
        return self._back[-1][1]

    def update(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy for the engine to change that `finish` copies back."""
        if tensor.device.type == self._device.type:
            return tensor
        return self.write(tensor).copy_(tensor)

    def read_edges(self, edges: Edges) -> Edges:
        """Apply `read` to every tensor of one side of an exchange."""
        return {rank: [self.read(t) for t in ts] for rank, ts in edges.items()}

    def write_edges(self, edges: Edges) -> Edges:
        """Apply `write` to every tensor of one side of an exchange."""
        return {rank: [self.write(t) for t in ts] for rank, ts in edges.items()}

    def finish(self) -> None:
        """Copy the results to where they were requested."""
        for given, staged in self._back:
            given.copy_(staged)

    def _like(self, tensor: Tensor) -> Tensor:
        """Return memory on the engine's device; host memory is pinned, which a device copies at full speed."""
        pinned = self._device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device, pin_memory=pinned)
