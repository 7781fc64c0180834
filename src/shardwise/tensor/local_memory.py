"""The memory of this rank's local tensors: a ShardedTensor has none of its own, so torch must never look for it there.

torch's own versions of these methods would read or share the wrapper's missing storage, which ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from shardwise.geometry import Layout
from shardwise.tensor.described import Described


class InLocalMemory(Described):
    """What ShardedTensor does with the memory of its local tensors."""

    def _like(self, layout: Layout, locals_: tuple[Tensor, ...], anchor: Tensor | None = None) -> Self:
        raise NotImplementedError

    def is_pinned(self, device: Any = None) -> bool:
        """Whether the local tensors lie in pinned memory."""
        return bool(self._locals) and all(t.is_pinned() for t in self._locals)

    def pin_memory(self, device: Any = None) -> Self:
        """This tensor with its local tensors in pinned memory; itself if they are there already."""
        if not self._locals or self.is_pinned():
            return self
        return self._like(self._layout, tuple(t.pin_memory() for t in self._locals))

    def is_shared(self) -> bool:
        """Whether the local tensors lie in memory that other processes can be given."""
        return bool(self._locals) and all(t.is_shared() for t in self._locals)  # type: ignore[no-untyped-call]  # untyped in torch

    def share_memory_(self) -> Self:
        """Move the local tensors to shared memory, in place."""
        for tensor in self._locals:
            tensor.share_memory_()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def apply_(self, callable: Callable[[Any], Any]) -> Self:
        """Replace each element by what a Python function makes of it, in place; slow, as torch's is."""
        if self._layout.pending is not None:
            raise ValueError(
                f"apply_ changes values, and this tensor holds addends of a pending {self._layout.pending}; "
                "redistribute to Shard or Replicate first"
            )
        with torch.no_grad():
            for tensor in self._locals:
                tensor.apply_(callable)
        return self
