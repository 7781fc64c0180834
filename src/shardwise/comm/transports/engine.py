"""What moves the bytes of a comm over a process group, on one kind of device: the interface of a transport.

To add a transport, write a subclass of `Engine` and let `process_group.py` choose it, on all ranks alike.
An engine gets flat, contiguous, checked tensors on its own device: `Stage` copies those of other devices there
and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from shardwise.comm.flat_tensors import Edges
from shardwise.comm.protocol import Capabilities, Combine, ReduceOp, TensorsByRank, Work


class Gatherer(Protocol):
    """The means by which the ranks talk before they are connected."""

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Return the bytes of all ranks in group order."""
        ...


class Engine:
    """The operations of a `Comm` on checked, contiguous, flat tensors on one device; ranks are global ones.

    `call` says what is done: operation, label, reduction, sizes and dtype. Ranks for which it differs fail.
    """

    device: torch.device
    """Where the tensors handed to it must live."""
    awaited: tuple[int, ...]
    """The ranks that the present wait is for."""
    capabilities = Capabilities()
    """What it can do in addition to what all engines can."""
    starts_early = False
    """Whether the next call may be started while ranks agree, and be withdrawn."""
    calls = 0
    """The number of the last call that was started (`starts_early`)."""

    def stage(self) -> Stage:
        """What stands in for tensors of other devices during one operation."""
        return Stage(self.device)

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Move byte views along edges between different ranks.

        With `reads_peers`: copy tensors of any strides, those that this rank sends to itself included.
        """
        raise NotImplementedError

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Fill `out` with all tensors in group order."""
        raise NotImplementedError

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce run i into rank i's `out`."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce in place."""
        raise NotImplementedError

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce a tensor into `out` on every rank."""
        return self.all_reduce(out.copy_(tensor), op, call=call)

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Overwrite with the tensor of `src`."""
        raise NotImplementedError

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Return the bytes of all ranks in group order."""
        raise NotImplementedError

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify the others, if possible, that this rank has stopped; the notes in the store report it in any case."""

    def close(self) -> None:
        """Release what the engine holds."""

    def lend(self, sends: TensorsByRank, receives: Iterable[int], combine: Combine, *, call: str) -> Work:
        """Let others read tensors of any strides, and combine those of the ranks in `receives` (`reads_peers`)."""
        raise NotImplementedError

    def start_agreeing(self, data: bytes, *, call: str) -> Callable[[], list[bytes]]:
        """Send bytes to all others; returns what waits for theirs. The next call may be started before that.

        Its messages are taken from those ranks only that sent the same bytes (`starts_early`).
        """
        raise NotImplementedError

    def withdraw_call(self, number: int) -> None:
        """Take back a call that some ranks have started and others have not (`starts_early`).

        All ranks withdraw it, and none may return to its caller before all have.
        """
        raise NotImplementedError


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
        own = self._device.type
        return {rank: [t if t.device.type == own else self.read(t) for t in ts] for rank, ts in edges.items()}

    def write_edges(self, edges: Edges) -> Edges:
        """Apply `write` to every tensor of one side of an exchange."""
        own = self._device.type
        return {rank: [t if t.device.type == own else self.write(t) for t in ts] for rank, ts in edges.items()}

    def finish(self) -> None:
        """Copy the results to where they were requested."""
        for given, staged in self._back:
            given.copy_(staged)

    def _like(self, tensor: Tensor) -> Tensor:
        """Return memory on the engine's device; host memory is pinned, which a device copies at full speed."""
        pinned = self._device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device, pin_memory=pinned)
