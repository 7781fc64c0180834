"""torch's sharding specs: the same names and arguments, as rules that return a `Layout`.

A placement such as "rank:1/cuda:1" or "worker0/cpu" says which rank and device holds a shard. A spec of this file is a
`shardwise.geometry.ShardingSpec`, so that it works wherever one is expected. A user's own subclass of
`PlacementShardingSpec` needs only torch's two methods, `build_metadata` and `shard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from shardwise._torch import _remote_device
from shardwise.comm.current import GroupOrComm
from shardwise.compat.metadata import (
    check_no_overlap,
    check_same_ndim,
    check_tiles,
    columns_of,
    rank_of,
    with_device,
)
from shardwise.geometry import ChunkSpec, Layout, LayoutError, Piece, ShardingSpec
from shardwise.geometry.layout import Cells, PieceTable, check_piece_table, check_shape, table_from_boxes
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import chunk_sizes
from shardwise.tensor.creation import shard
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.shards import ShardedTensorMetadata, ShardMetadata, TensorProperties


class PlacementSpec(ABC):  # noqa: B024 (a base to subclass, with nothing to define)
    """Where an entity is placed; the base of kinds of placements that users define."""


@dataclass(unsafe_hash=True)
class DevicePlacementSpec(PlacementSpec):
    """An entity on one device.

    >>> DevicePlacementSpec("rank:1/cpu")
    DevicePlacementSpec(device=rank:1/cpu)
    """

    device: _remote_device | str

    def __post_init__(self) -> None:
        if not isinstance(self.device, _remote_device):
            self.device = _remote_device(self.device)


class PlacementShardingSpec(ShardingSpec):
    """The base of specs in torch's manner: `build_metadata` says where everything is, and `pieces` follows from it.

    `tensor_type` is the class of the tensors that `shard` of torch's own specs makes.
    """

    tensor_type: ClassVar[type[ShardedTensor]] = ShardedTensor

    @property
    def shards_itself(self) -> bool:
        """Whether this is a user's own spec with a `shard` method of its own."""
        return type(self).shard not in (ChunkShardingSpec.shard, EnumerableShardingSpec.shard)

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return all shards of a tensor of this size."""

    @abstractmethod
    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: GroupOrComm | None = None) -> Any:
        """Return a ShardedTensor that holds the tensor of `src_rank` (its rank in the group)."""

    def layout(self, shape: Sequence[int]) -> Layout:
        """Return this spec applied to a shape; the same object each time when the spec is hashable."""
        return Layout(check_shape(shape), self) if type(self).__hash__ is None else super().layout(shape)

    def pieces(self, shape: Sequence[int]) -> Sequence[Piece]:
        return self.layout(shape).pieces

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        metadata = self.build_metadata(torch.Size(shape), TensorProperties())
        return build_piece_table(metadata.shards_metadata, shape)


def build_piece_table(shards: Sequence[ShardMetadata], shape: tuple[int, ...]) -> PieceTable:
    """Return the table of the shards of a tensor, checked to cover it exactly once."""
    check_same_ndim(shards)
    offsets, sizes = columns_of(shards, shape)
    ranks = np.array([rank_of(s.placement) for s in shards], np.int64)
    devices = tuple(None if s.placement is None else str(s.placement.device()) for s in shards)
    return check_piece_table(shape, table_from_boxes(offsets, sizes, ranks, devices), replicated=False)


@dataclass
class ChunkShardingSpec(PlacementShardingSpec):
    """Chunks along one dim, as `torch.chunk` splits them, chunk i on `placements[i]`; a rank may appear several times.

    >>> spec = ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"])
    >>> [str(piece) for piece in spec.layout((3,)).pieces]
    ['[0:2] on rank 1', '[2:3] on rank 0']
    """

    ShardingDim = int | str

    dim: int | str
    placements: list[_remote_device | str]

    def __post_init__(self) -> None:
        self._verify_dim(self.dim)
        self.placements = [p if isinstance(p, _remote_device) else _remote_device(p) for p in self.placements]

    @staticmethod
    def _verify_dim(dim: object) -> int:
        if isinstance(dim, str):
            raise NotImplementedError(f"ChunkShardingSpec does not support named dimension yet! Found {dim!r}")
        if not isinstance(dim, int):
            raise ValueError(f"Sharding dim needs to be an integer, found: {dim}")
        return dim

    @property
    def dropped_dim(self) -> int | None:
        return self.dim if isinstance(self.dim, int) else None

    @property
    def remote_devices(self) -> list[_remote_device]:
        """The placements; strings were parsed when the spec was made or are now."""
        return [p if isinstance(p, _remote_device) else _remote_device(p) for p in self.placements]

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each placement."""
        return tuple(str(p.device()) for p in self.remote_devices)

    def __hash__(self) -> int:
        return hash((self.dim, tuple(self.remote_devices)))

    def with_device(self, device: torch.device | str) -> ChunkShardingSpec:
        """Return the spec with every chunk on a device of the same rank.

        >>> ChunkShardingSpec(0, ["rank:1/cuda:1", "rank:0/cuda:0"]).with_device("cpu")
        ChunkShardingSpec(dim=0, placements=[rank:1/cpu, rank:0/cpu])
        """
        return replace(self, placements=[with_device(p, device) for p in self.remote_devices])

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        if type(self).build_metadata is not ChunkShardingSpec.build_metadata:
            return super().resolve(shape)
        self._check_dim(shape)
        return ChunkSpec(self._verify_dim(self.dim), [rank_of(p) for p in self.remote_devices]).resolve(shape)

    def _check_dim(self, shape: Sequence[int]) -> int:
        dim = self._verify_dim(self.dim)
        if not -len(shape) <= dim < len(shape):
            raise LayoutError(
                f"Invalid sharding dim: {dim}; a tensor of shape {tuple(shape)} has dims {-len(shape)} to "
                f"{len(shape) - 1}"
            )
        return dim % len(shape)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return all shards of a tensor of this size, in the order of the placements."""
        dim = self._check_dim(tensor_sizes)
        shards = []
        lengths = chunk_sizes(tensor_sizes[dim], len(self.placements))
        for index, (length, placement) in enumerate(zip(lengths, self.remote_devices, strict=True)):
            offsets, sizes = [0] * len(tensor_sizes), list(tensor_sizes)
            # Empty chunks start past the end, each elsewhere: torch.distributed.checkpoint tells shards by offset.
            offsets[dim], sizes[dim] = lengths[0] * index, length
            shards.append(ShardMetadata(offsets, sizes, placement))
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: GroupOrComm | None = None) -> Any:
        """Return a ShardedTensor that holds the tensor of `src_rank` (its rank in the group)."""
        return scatter(tensor, self, src_rank, process_group, self.tensor_type)


@dataclass
class EnumerableShardingSpec(PlacementShardingSpec):
    """Any disjoint shards that cover the tensor; a rank has none, one or many, in the listed order.

    >>> spec = EnumerableShardingSpec([ShardMetadata([0], [3], "rank:1/cpu"), ShardMetadata([3], [1], "rank:0/cpu")])
    >>> spec.layout((4,)).local_shapes(1)
    ((3,),)
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        if len(self.shards) == 0:
            raise ValueError(f"Empty shard list provided: {self.shards}; pass at least one ShardMetadata")
        check_same_ndim(self.shards)
        check_no_overlap(self.shards)

    def __hash__(self) -> int:
        return hash((len(self.shards), self.shards[0], self.shards[-1]))

    def with_device(self, device: torch.device | str) -> EnumerableShardingSpec:
        """Return the spec with every shard on a device of the same rank."""
        shards = [ShardMetadata(s.shard_offsets, s.shard_sizes, with_device(s.placement, device)) for s in self.shards]
        return replace(self, shards=shards)

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the shards, checked to cover a tensor of this size."""
        check_tiles(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: GroupOrComm | None = None) -> Any:
        """Return a ShardedTensor that holds the tensor of `src_rank` (its rank in the group)."""
        return scatter(tensor, self, src_rank, process_group, self.tensor_type)


def infer_sharding_spec(shards_metadata: Sequence[ShardMetadata]) -> ChunkShardingSpec | EnumerableShardingSpec:
    """Return the chunks along one dim that these shards are, else a spec that enumerates them.

    >>> shards = [ShardMetadata([2, 0], [2, 4], "rank:0/cpu"), ShardMetadata([0, 0], [2, 4], "rank:1/cpu")]
    >>> infer_sharding_spec(shards)
    ChunkShardingSpec(dim=0, placements=[rank:1/cpu, rank:0/cpu])
    """
    check_same_ndim(shards_metadata)
    offsets, sizes = columns_of(shards_metadata)
    moved = np.flatnonzero((offsets != 0).any(axis=0))
    if len(moved) == 1:
        dim = int(moved[0])
        order = np.argsort(offsets[:, dim], kind="stable")
        placements = [shards_metadata[int(row)].placement for row in order]
        named = [placement for placement in placements if placement is not None]
        if len(named) == len(placements) and _are_chunks(offsets[order], sizes[order], dim):
            return ChunkShardingSpec(dim, list(named))
    return EnumerableShardingSpec(list(shards_metadata))


def _are_chunks(offsets: IntArray, sizes: IntArray, dim: int) -> bool:
    """Return whether boxes in order of their offsets are the chunks of a dim; empty ones may be anywhere."""
    lengths = sizes[:, dim]
    starts = np.cumsum(lengths) - lengths
    others = np.delete(sizes, dim, axis=1)
    return (
        tuple(lengths.tolist()) == chunk_sizes(int(lengths.sum()), len(lengths))
        and bool(((offsets[:, dim] == starts) | (lengths == 0)).all())
        and bool((others == others[0]).all())
    )


def get_split_size(dim_size: int, chunks: int) -> int:
    """Return the length of all chunks but the last ones.

    >>> get_split_size(10, 4)
    3
    """
    return -(-dim_size // chunks)


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """Return the length of chunk `idx`.

    >>> [get_chunked_dim_size(10, 3, i) for i in range(5)]
    [3, 3, 3, 1, 0]
    """
    return max(0, min(split_size, dim_size - split_size * idx))


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Return where the chunk of a rank starts and how long it is.

    >>> get_chunk_sharding_params(5, 2, ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), rank=0)
    (3, 2)
    """
    ranks = [rank_of(placement) for placement in spec.remote_devices]
    if rank not in ranks:
        raise LayoutError(f"rank {rank} is not among the placements' ranks {ranks}; it has no chunk")
    split, index = get_split_size(sharding_dim_size, world_size), ranks.index(rank)
    return min(split * index, sharding_dim_size), get_chunked_dim_size(sharding_dim_size, split, index)


def scatter(
    tensor: torch.Tensor,
    spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupOrComm | None = None,
    tensor_type: type[ShardedTensor] = ShardedTensor,
) -> ShardedTensor:
    """Return the tensor of `src_rank`, counted in the group, laid out by a spec; a leaf, as the tensor may be.

    >>> scatter(torch.arange(4), ChunkShardingSpec(0, ["rank:0/cpu"])).local_tensor()
    tensor([0, 1, 2, 3])
    """
    comm = tensor_type._resolve_comm(process_group)
    if not 0 <= src_rank < comm.world_size:
        raise ValueError(f"src_rank={src_rank} is not in the group: it has ranks 0 to {comm.world_size - 1}")
    made = shard(tensor.detach(), spec, comm.ranks[src_rank], comm=comm)
    made.__class__ = tensor_type
    made.__dict__["_given_spec"] = spec  # torch's class answers with the very object
    return made.requires_grad_(tensor.requires_grad)
