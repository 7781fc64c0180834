"""torch's sharding specs: the same names and arguments, as rules that return a `Layout`.

A placement such as "rank:1/cuda:1" or "worker0/cpu" says which rank and device holds a shard. A spec of this file is a
`shardwise.geometry.ShardingSpec`, so that it works wherever one is expected. A user's own subclass of
`PlacementShardingSpec` needs only torch's two methods, `build_metadata` and `shard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.remote_device import _remote_device

from shardwise.geometry import ChunkSpec, Layout, LayoutError, Piece, ShardingSpec
from shardwise.geometry.cells import Cells, PieceTable, table_from_boxes
from shardwise.geometry.layout import check_piece_table, check_shape
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import chunk_sizes
from shardwise.tensor.comms import GroupOrComm
from shardwise.tensor.metadata_checks import check_no_overlap, check_same_ndim, check_tiles, columns_of
from shardwise.tensor.remote_devices import rank_of, with_device
from shardwise.tensor.shards import ShardedTensorMetadata, ShardMetadata, TensorProperties

if TYPE_CHECKING:
    from collections.abc import Callable


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
    """The base of specs in torch's manner: `build_metadata` says where everything is, and `pieces` follows from it."""

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


class Scatter:
    """How `spec.shard` makes a ShardedTensor: filled by the module that defines it, which imports this one."""

    run: Callable[[torch.Tensor, ShardingSpec, int, GroupOrComm | None], Any]


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
    def remote_devices(self) -> list[_remote_device]:
        """The placements; strings were parsed when the spec was made or are now."""
        return [p if isinstance(p, _remote_device) else _remote_device(p) for p in self.placements]

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each placement."""
        return tuple(str(p.device()) for p in self.remote_devices)

    def __hash__(self) -> int:
        return hash((self.dim, tuple(self.remote_devices)))

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
        shards, start = [], 0
        lengths = chunk_sizes(tensor_sizes[dim], len(self.placements))
        for length, placement in zip(lengths, self.remote_devices, strict=True):
            offsets, sizes = [0] * len(tensor_sizes), list(tensor_sizes)
            offsets[dim], sizes[dim] = start, length
            shards.append(ShardMetadata(offsets, sizes, placement))
            start += length
        return ShardedTensorMetadata(shards, torch.Size(tensor_sizes), tensor_properties)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: GroupOrComm | None = None) -> Any:
        """Return a ShardedTensor that holds the tensor of `src_rank` (its rank in the group)."""
        return Scatter.run(tensor, self, src_rank, process_group)


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

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """Return the shards, checked to cover a tensor of this size."""
        check_tiles(self.shards, tensor_sizes)
        return ShardedTensorMetadata(list(self.shards), torch.Size(tensor_sizes), tensor_properties)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: GroupOrComm | None = None) -> Any:
        """Return a ShardedTensor that holds the tensor of `src_rank` (its rank in the group)."""
        return Scatter.run(tensor, self, src_rank, process_group)


def metadata_of(
    layout: Layout, properties: TensorProperties, device: torch.device | str = "cpu"
) -> ShardedTensorMetadata:
    """Return the shards of a layout: on the devices that its spec names, else all on `device`.

    >>> layout = ChunkSpec(0, ranks=2).layout((3,))
    >>> metadata_of(layout, TensorProperties()).shards_metadata[1]
    ShardMetadata(shard_offsets=[2], shard_sizes=[1], placement=rank:1/cpu)
    """
    if isinstance(layout.spec, PlacementShardingSpec):
        return layout.spec.build_metadata(torch.Size(layout.shape), properties)
    shards = [ShardMetadata(p.box.offsets, p.box.sizes, f"rank:{p.rank}/{p.device or device}") for p in layout.pieces]
    return ShardedTensorMetadata(shards, torch.Size(layout.shape), properties)


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
        if _are_chunks(offsets[order], sizes[order], dim) and _keeps_turns(order, placements):
            return ChunkShardingSpec(dim, [p for p in placements if p is not None])
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


def _keeps_turns(order: IntArray, placements: Sequence[_remote_device | None]) -> bool:
    """Return whether all have a placement and each placement keeps its shards in their original order."""
    last: dict[_remote_device, int] = {}
    for row, placement in zip(order.tolist(), placements, strict=True):
        if placement is None or row < last.get(placement, -1):
            return False
        last[placement] = row
    return True


def spec_on_device(spec: ShardingSpec, device: torch.device | str) -> ShardingSpec:
    """Return the spec with every placement moved to a device of the same rank; specs that name no device stay.

    >>> spec_on_device(ChunkShardingSpec(0, ["rank:1/cuda:1", "rank:0/cuda:0"]), "cpu")
    ChunkShardingSpec(dim=0, placements=[rank:1/cpu, rank:0/cpu])
    """
    if isinstance(spec, ChunkShardingSpec):
        return replace(spec, placements=[with_device(p, device) for p in spec.remote_devices])
    if isinstance(spec, EnumerableShardingSpec):
        shards = [ShardMetadata(s.shard_offsets, s.shard_sizes, with_device(s.placement, device)) for s in spec.shards]
        return replace(spec, shards=shards)
    return spec
