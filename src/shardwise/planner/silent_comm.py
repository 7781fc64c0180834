"""A comm that sends nothing: one rank of a world of any size, for a step that is rehearsed without values.

Every rank is taken to pass what this one passes: the same arguments, and batches of the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.protocol import CompletedWork, Work


@dataclass(frozen=True, eq=False)
class SilentComm:
    """One rank of many, alone in its process, on the meta device."""

    rank: int
    ranks: tuple[int, ...]
    timeout: float = 300.0

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return None

    def find_topology(self) -> None:
        """No host is near another one."""

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        return [data] * self.world_size

    def all_gather(self, tensor: Tensor, *, label: str) -> list[Tensor]:
        return [tensor] * self.world_size

    def _send_nothing(self, *args: Any, label: str, **kwargs: Any) -> Work:
        return CompletedWork()

    exchange = all_gather_into = reduce_scatter_into = all_reduce = broadcast = _send_nothing

    def barrier(self, *, label: str = "barrier") -> None:
        """There is nobody to wait for."""

    def subset(self, ranks: Sequence[int]) -> SilentComm:
        return silent_comm(self.rank, tuple(sorted(ranks)))


@lru_cache(maxsize=64)
def silent_comm(rank: int, ranks: tuple[int, ...]) -> SilentComm:
    """The comm of a rank, one for each: what is remembered about moves is remembered by comm.

    >>> silent_comm(0, (0, 1)).all_gather_bytes(b"x", label="lengths")
    [b'x', b'x']
    """
    return SilentComm(rank, ranks)
