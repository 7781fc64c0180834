"""One local tensor together with what it is of the whole: torch's `Shard`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.tensor.metadata import ShardMetadata


@dataclass(slots=True)
class Shard:
    """A local tensor and the metadata of the shard it holds; the two are checked against each other.

    `_replaced` is called with the old and the new tensor before one is assigned; the shard's ShardedTensor sets it.

    >>> Shard(torch.zeros(2, 4), ShardMetadata([2, 0], [2, 4], "rank:1/cpu")).metadata.shard_offsets
    [2, 0]
    """

    tensor: torch.Tensor
    metadata: ShardMetadata
    _replaced: Callable[[torch.Tensor, torch.Tensor], None] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __setattr__(self, name: str, value: Any) -> None:
        replaced = getattr(self, "_replaced", None) if name == "tensor" else None
        if replaced is not None:
            replaced(self.tensor, value)
        object.__setattr__(self, name, value)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {"tensor": self.tensor, "metadata": self.metadata}

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        object.__setattr__(self, "_replaced", None)
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        size, placement = list(self.tensor.size()), self.metadata.placement
        if size != self.metadata.shard_sizes:
            raise ValueError(
                "Shard tensor size does not match with metadata.shard_lengths! "
                f"Found shard tensor size: {size}, metadata.shard_lengths: {self.metadata.shard_sizes}"
            )
        if placement is not None and placement.device() != self.tensor.device:
            raise ValueError(
                "Local shard tensor device does not match with local Shard's placement! "
                f"Found local shard tensor device: {self.tensor.device}, "
                f"local shard metadata placement device: {placement.device()}"
            )

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """Return the shard that a rank holds in `tensor`, at these offsets of the whole.

        >>> Shard.from_tensor_and_offsets(torch.zeros(2), [4], rank=3).metadata
        ShardMetadata(shard_offsets=[4], shard_sizes=[2], placement=rank:3/cpu)
        """
        return cls(tensor, ShardMetadata(shard_offsets, list(tensor.size()), f"rank:{rank}/{tensor.device}"))
