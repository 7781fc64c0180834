"""What moves the bytes of a comm over a process group, on one kind of device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ._tensors import Edges
from .protocol import ReduceOp, Work


class Engine(Protocol):
    """The operations of a `Comm` on checked, contiguous, flat tensors on one device; ranks are global ones."""

    @property
    def device(self) -> torch.device:
        """Where the tensors handed to it must live."""
        ...

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that the present wait is for."""
        ...

    def exchange(self, sends: Edges, receives: Edges, *, label: str) -> Work:
        """Move byte views along edges between different ranks."""
        ...

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, label: str) -> Work:
        """Fill `out` with all tensors in group order."""
        ...

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, label: str) -> Work:
        """Reduce run i into rank i's `out`."""
        ...

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, label: str) -> Work:
        """Reduce in place."""
        ...

    def broadcast(self, tensor: Tensor, src: int, *, label: str) -> Work:
        """Overwrite with the tensor of `src`."""
        ...

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        """Return the bytes of all ranks in group order."""
        ...

    def give_up(self, reason: str, ranks: Iterable[int]) -> None:
        """Tell the others, if there is a way, that this rank will not go on."""
        ...

    def close(self) -> None:
        """Let go of what the engine holds."""
        ...
