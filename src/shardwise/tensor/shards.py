"""How the pieces of a sharded tensor are described: offsets, sizes, placement, properties, by torch's names for them.

A `Shard` is one local tensor together with what it is of the whole. The shards of a ShardedTensor are tied to it: what
is assigned to `shard.tensor` becomes a local tensor. torch's CPU offload assigns in this way; without the tie the new
memory would belong to the Shard alone, and what is written there later would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from shardwise._torch import _remote_device
from shardwise.geometry import Box, Layout, ShardingSpec
from shardwise.tensor.execute import view_box

if TYPE_CHECKING:
    from shardwise.tensor.sharded_tensor import ShardedTensor


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
_HAVE_STRIDES = torch.__version__ >= "2.15"
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
    # Of torch 2.15, where they are the sixth argument, printed and compared; earlier calls have five.
    strides: tuple[int, ...] | None = field(  # type: ignore[misc]  # mypy wants to know the release of torch
        default=None, kw_only=not _HAVE_STRIDES, repr=_HAVE_STRIDES, compare=_HAVE_STRIDES
    )

    def __getstate__(self) -> tuple[Any, ...]:
        """Five entries, as before torch 2.15; strides follow where there are any."""
        encoding = _ENCODINGS.get(self.memory_format)
        if encoding is None:
            raise RuntimeError(f"Invalid torch.memory_format: {self.memory_format}; one of {list(_ENCODINGS)} pickles")
        strides = () if self.strides is None else (self.strides,)
        return self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory, *strides

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory, *strides = state
        self.strides = strides[0] if strides else None
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
            strides=tensor.stride() if tensor.layout == torch.strided else None,
        )


@dataclass
class ShardedTensorMetadata:
    """All shards of a tensor, its size, and what its shards have in common."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default=torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)


@dataclass
class Shard:
    """A local tensor and the metadata of the shard it holds; the two are checked against each other.

    `_replaced` is called with the old and the new tensor before one is assigned; the shard's ShardedTensor sets it.

    >>> Shard(torch.zeros(2, 4), ShardMetadata([2, 0], [2, 4], "rank:1/cpu")).metadata.shard_offsets
    [2, 0]
    """

    __slots__ = ("_replaced", "metadata", "tensor")
    tensor: torch.Tensor
    metadata: ShardMetadata
    if TYPE_CHECKING:  # a slot, but no field: programs list and copy the fields of torch's Shard
        _replaced: Callable[[torch.Tensor, torch.Tensor], None] | None = field(init=False)

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


def describe_layout(
    layout: Layout, properties: TensorProperties, device: torch.device | str = "cpu"
) -> ShardedTensorMetadata:
    """Return the shards of a layout: as its spec describes them, if it has torch's `build_metadata`, else all on the
    devices that the layout names or on `device`.

    >>> from shardwise.geometry import ChunkSpec
    >>> describe_layout(ChunkSpec(0, ranks=2).layout((3,)), TensorProperties()).shards_metadata[1]
    ShardMetadata(shard_offsets=[2], shard_sizes=[1], placement=rank:1/cpu)
    """
    size, build = torch.Size(layout.shape), getattr(layout.spec, "build_metadata", None)
    if build is not None:
        described: ShardedTensorMetadata = build(size, properties)
        return described
    shards = [ShardMetadata(p.box.offsets, p.box.sizes, f"rank:{p.rank}/{p.device or device}") for p in layout.pieces]
    return ShardedTensorMetadata(shards, size, properties)


def spec_on_device(spec: ShardingSpec, device: torch.device | str) -> ShardingSpec:
    """Return a spec that names devices with this one in their place; specs that name none stay as they are.

    >>> from shardwise.geometry import ChunkSpec
    >>> spec_on_device(ChunkSpec(0, ranks=2), "cpu")
    ChunkSpec(dim=0, ranks=0-1)
    """
    move = getattr(spec, "with_device", None)
    moved: ShardingSpec = spec if move is None else move(device)
    return moved


def make_local_shards(tensor: ShardedTensor, described: Sequence[ShardMetadata]) -> list[Shard]:
    """The shards of this rank, of all that are described; their tensors are views of the local tensors."""
    rows = tensor.sharding.rows_of(tensor.comm.rank)
    own = tensor.sharding.table.take(rows)
    shards = []
    for row, slot, start, size in zip(
        rows.tolist(), own.slots.tolist(), own.local_offsets.tolist(), own.sizes.tolist(), strict=True
    ):
        local = tensor.local_parts[slot]
        shard = Shard(view_box(local, Box(tuple(start), tuple(size))), described[row])
        shard._replaced = partial(_replace_local, ref(tensor), slot, tuple(size) == tuple(local.shape))
        shards.append(shard)
    return shards


def _replace_local(owner: ref[ShardedTensor], slot: int, whole: bool, old: Tensor, new: Tensor) -> None:
    """Make a tensor that was assigned to a shard the local tensor of the shard's owner, or say why not."""
    tensor = owner()
    if tensor is None or new is old or not _is_current(tensor, slot, old):
        return
    if not whole:
        raise ValueError(
            f"a shard that is a part of a local tensor of shape {tuple(tensor.local_parts[slot].shape)} cannot "
            "have memory of its own; write the values into it: shard.tensor.copy_(new)"
        )
    if tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype:
        raise ValueError(
            f"a shard of shape {tuple(old.shape)} and {old.dtype} cannot take a tensor of shape {tuple(new.shape)} and "
            f"{new.dtype}; convert it first, or make a new ShardedTensor with to() or from_local()"
        )
    if new.device != old.device:
        tensor.sharding = spec_on_device(tensor.sharding.spec, new.device).layout(tensor.sharding.shape)
    tensor.local_parts = (*tensor.local_parts[:slot], new, *tensor.local_parts[slot + 1 :])
    tensor._fingerprint = None
    tensor.__dict__.pop("_described", None)


def _is_current(tensor: ShardedTensor, slot: int, old: Tensor) -> bool:
    """Whether a shard's tensor is still memory of the ShardedTensor, which may have been resharded since."""
    if slot >= len(tensor.local_parts):
        return False
    held = tensor.local_parts[slot]
    return old is held or old._base is held
