"""Buffers for packing and unpacking, used again.

Fresh memory costs as much to touch for the first time as the bytes cost to move. So a buffer in CPU memory goes back to
a pool when its round is done. On accelerators torch's own allocator does the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT_BYTES = 256 * 1024 * 1024
_LEAST = 1 << 16


class StagingPool:
    """Free byte buffers of power-of-two sizes; keeps at most `KEPT_BYTES` of them.

    >>> pool = StagingPool()
    >>> first = staging_pool.take(100, torch.float32, torch.device("cpu"))
    >>> staging_pool.give_back([first])
    >>> staging_pool.take(50, torch.float64, torch.device("cpu")).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised run of `count` elements."""
        if device.type != "cpu":
            return torch.empty(count, dtype=dtype, device=device)
        size = max(_LEAST, 1 << (count * dtype.itemsize - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else None
            self._kept -= size if buffer is not None else 0
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[: count * dtype.itemsize].view(dtype)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Take buffers back that nobody reads or writes any more."""
        for buffer in buffers:
            if buffer.device.type != "cpu":
                continue
            size = buffer.untyped_storage().nbytes()
            with self._lock:
                if self._kept + size > KEPT_BYTES:
                    continue
                self._kept += size
                self._free.setdefault(size, []).append(
                    buffer.new_empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
                )


staging_pool = StagingPool()
