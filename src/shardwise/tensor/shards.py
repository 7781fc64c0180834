"""How the pieces of a sharded tensor are described to users of torch's names: offsets, sizes, placement, properties.

One local tensor together with what it is of the whole: torch's `Shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch.distributed.remote_device import _remote_device


class MEM_FORMAT_ENCODING(Enum):
    """How a memory format is pickled: `torch.memory_format` itself cannot be."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


_ENCODINGS = {
    torch.contiguous_format: MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT,
    torch.channels_last: MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST,
    torch.preserve_format: MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT,
}
_FORMATS = {encoding: memory_format for memory_format, encoding in _ENCODINGS.items()}


@dataclass(init=False, slots=True)
class ShardMetadata:
    """Where one shard is in the whole tensor, and on which rank and device.

    >>> ShardMetadata([2, 0], [2, 4], "rank:1/cpu")
    ShardMetadata(shard_offsets=[2, 0], shard_sizes=[2, 4], placement=rank:1/cpu)
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: _remote_device | None

    def __init__(
        self, shard_offsets: Sequence[int], shard_sizes: Sequence[int], placement: str | _remote_device | None = None
    ) -> None:
        self.shard_offsets = list(shard_offsets)
        self.shard_sizes = list(shard_sizes)
        self.placement = _remote_device(placement) if isinstance(placement, str) else placement
        if len(self.shard_offsets) != len(self.shard_sizes):
            raise ValueError(
                f"shard_offsets and shard_sizes should have the same number of elements, found "
                f"{self.shard_offsets} and {self.shard_sizes}"
            )
        if any(offset < 0 for offset in self.shard_offsets):
            raise ValueError(f"shard_offsets should be >=0, found {self.shard_offsets}")
        if any(size < 0 for size in self.shard_sizes):
            raise ValueError(f"shard_sizes should be >= 0, found {self.shard_sizes}")

    def __hash__(self) -> int:
        return hash((tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement))


PropertiesState: TypeAlias = tuple[torch.dtype, torch.layout, bool, MEM_FORMAT_ENCODING, bool]


@dataclass
class TensorProperties:
    """What all shards of a tensor have in common.

    >>> TensorProperties(dtype=torch.int32).dtype
    torch.int32
    """

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = field(default=torch.strided)
    requires_grad: bool = False
    memory_format: torch.memory_format = field(default=torch.contiguous_format)
    pin_memory: bool = False

    def __getstate__(self) -> PropertiesState:
        encoding = _ENCODINGS.get(self.memory_format)
        if encoding is None:
            raise RuntimeError(f"Invalid torch.memory_format: {self.memory_format}; one of {list(_ENCODINGS)} pickles")
        return self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory

    def __setstate__(self, state: PropertiesState) -> None:
        self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory = state
        if encoding not in _FORMATS:
            raise RuntimeError(f"Invalid torch.memory_format encoding: {encoding}; it is one of {list(_FORMATS)}")
        self.memory_format = _FORMATS[encoding]

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """Return the properties of a tensor.

        >>> TensorProperties.create_from_tensor(torch.zeros(2, requires_grad=True)).requires_grad
        True
        """
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.is_pinned(),
        )


@dataclass
class ShardedTensorMetadata:
    """All shards of a tensor, its size, and what its shards have in common."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default=torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)


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
