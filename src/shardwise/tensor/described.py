"""Shape, dtype and device of a ShardedTensor, answered without a detour through torch's function protocol.

Models ask for them at every step; from the layout and the local tensors the answer takes a tenth of the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.geometry import Layout


class Described(Tensor):
    """What ShardedTensor says about itself. A rank without local tensors asks the wrapper."""

    _layout: Layout
    _locals: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # answered from the layout
        """The global shape."""
        return torch.Size(self._layout.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]  # answered from the layout
        """The number of dims."""
        return len(self._layout.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # answered from the local tensors
        """The type of the elements."""
        return self._locals[0].dtype if self._locals else super().dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # answered from the local tensors
        """Where this rank's local tensors lie."""
        return self._locals[0].device if self._locals else super().device

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]  # never
        """Whether only some elements are stored: never."""
        return False

    def dim(self) -> int:
        """The number of dims."""
        return len(self._layout.shape)

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or the length of one dim."""
        return torch.Size(self._layout.shape) if dim is None else self._layout.shape[dim]

    def numel(self) -> int:
        """The number of elements of the whole."""
        return self._layout.numel
