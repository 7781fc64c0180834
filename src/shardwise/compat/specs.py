"""torch's sharding specs: the same names and arguments, as rules that return a `Layout`.

A placement such as "rank:1/cuda:1" or "worker0/cpu" says which rank and device holds a shard. A spec of this file is a
`shardwise.geometry.ShardingSpec`, so that it works wherever one is expected. A user's own subclass of
`PlacementShardingSpec` needs only torch's two methods, `build_metadata` and `shard`.

Which rank does a placement mean, do these shards tile the tensor, and what do all ranks' shards say together?

1. A placement such as "rank:1/cuda:1" or "worker0/cpu" is a rank and a device.
2. Shards tile a tensor if none overlap and their volumes add up, found in O(n log n) by the layout's own check.
3. One rank: its shards agree with their metadata, with the rank, and with each other. All ranks: same size, dtype,
   requires_grad, pin_memory; the shards tile the tensor.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from shardwise._torch import _remote_device
from shardwise.comm import name_ranks
from shardwise.comm.current import GroupOrComm, resolve_comm
from shardwise.geometry import ChunkSpec, Layout, LayoutError, Piece, ShardingSpec
from shardwise.geometry.layout import (
    Cells,
    PieceTable,
    check_piece_table,
    check_shape,
    first_miscovered_point,
    table_from_boxes,
)
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import chunk_sizes
from shardwise.tensor.creation import shard
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.shards import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties

Columns: TypeAlias = tuple[IntArray, IntArray]


def rank_of(placement: _remote_device | None) -> int:
    """Return the global rank of a placement; a worker's name is looked up in the RPC world.

    >>> rank_of(_remote_device("rank:3/cuda:1"))
    3
    """
    if placement is None:
        raise ValueError("remote device is None; give each shard a placement such as 'rank:0/cpu'")
    name, rank = placement.worker_name(), placement.rank()
    if name is not None:
        return rank_of_worker(name)
    if rank is None:
        raise ValueError(f"the placement {placement} names no rank; write 'rank:<rank>/{placement.device()}'")
    return rank


def rank_of_worker(name: str) -> int:
    """Return the rank of an RPC worker."""
    # The two private names are the only way to query the world without joining it.
    if not rpc.is_available() or not rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]  # private
        raise RuntimeError(f"RPC framework needs to be initialized for using worker names: {name}")
    agent = rpc._get_current_rpc_agent()  # type: ignore[attr-defined]  # private
    workers = {worker.name: worker.id for worker in agent.get_worker_infos()}
    if name not in workers:
        raise ValueError(f"Invalid worker name: {name}; the RPC world has {sorted(workers)}")
    return int(workers[name])


def with_device(placement: _remote_device | None, device: torch.device | str) -> _remote_device:
    """Return a placement on the same rank or worker, on another device.

    >>> with_device(_remote_device("worker0/cuda:1"), "cpu")
    worker0/cpu
    """
    name = placement.worker_name() if placement is not None else None
    return _remote_device(f"{name}/{device}" if name is not None else f"rank:{rank_of(placement)}/{device}")


def rank_and_device(pg: Any, remote_device: _remote_device | None) -> tuple[int | None, torch.device]:
    """Return the rank and device of a placement, checked to be in a process group of which this rank is a member.

    >>> rank_and_device(None, _remote_device("rank:3/cpu"))
    (3, device(type='cpu'))
    """
    if remote_device is None:
        raise ValueError("remote device is None; give each shard a placement such as 'rank:0/cpu'")
    if remote_device.worker_name() is not None:
        return rank_of(remote_device), remote_device.device()
    rank = remote_device.rank()
    known = pg is not None or dist.is_initialized()
    if rank is not None and known and pg is not dist.GroupMember.NON_GROUP_MEMBER:
        members = resolve_comm(pg).ranks
        if rank not in members:
            raise ValueError(f"Global rank {rank} does not exist in input process group: it has {name_ranks(members)}")
    return rank, remote_device.device()


def columns_of(shards: Sequence[ShardMetadata], shape: Sequence[int] | None = None) -> Columns:
    """Return offsets and sizes as arrays of shape (shards, ndim); offsets of empty shards are kept inside `shape`.

    >>> offsets, sizes = columns_of([ShardMetadata([0], [2]), ShardMetadata([4], [0])], shape=(2,))
    >>> offsets.tolist(), sizes.tolist()
    ([[0], [2]], [[2], [0]])
    """
    rows = (len(shards), len(shards[0].shard_sizes) if shards else 0)
    offsets = np.array([s.shard_offsets for s in shards], np.int64).reshape(rows)
    sizes = np.array([s.shard_sizes for s in shards], np.int64).reshape(rows)
    if shape is not None and len(shape) == rows[1]:
        empty = (sizes == 0).any(axis=1, keepdims=True)
        offsets = np.where(empty, np.minimum(offsets, np.asarray(shape, np.int64) - sizes), offsets)
    return offsets, sizes


def check_same_ndim(shards: Sequence[ShardMetadata]) -> None:
    """Raise unless all shards have the same number of dims."""
    ndims = [len(shard.shard_offsets) for shard in shards]
    for ndim in ndims:
        if ndim != ndims[0]:
            raise ValueError(
                f"Found inconsistent ranks for shards: {ndims[0]} and {ndim} dims; shards of one tensor have the same"
            )


def pair_overlaps(shard1: ShardMetadata, shard2: ShardMetadata) -> bool:
    """Return whether two shards share an element.

    >>> pair_overlaps(ShardMetadata([0], [3]), ShardMetadata([2], [2]))
    True
    """
    starts = map(max, shard1.shard_offsets, shard2.shard_offsets)
    ends = map(min, _ends(shard1), _ends(shard2))
    return all(start < end for start, end in zip(starts, ends, strict=True))


def _ends(shard: ShardMetadata) -> list[int]:
    return [offset + size for offset, size in zip(shard.shard_offsets, shard.shard_sizes, strict=True)]


def check_no_overlap(shards: Sequence[ShardMetadata]) -> None:
    """Raise a ValueError that names two shards if any two share an element; gaps are allowed.

    >>> check_no_overlap([ShardMetadata([0], [3]), ShardMetadata([2], [2])])
    Traceback (most recent call last):
    ...
    ValueError: Shards ShardMetadata(shard_offsets=[0], ...) and ShardMetadata(shard_offsets=[2], ...) overlap
    """
    pair = find_overlap(*columns_of(shards)) if len(shards) > 1 else None
    if pair is not None:
        raise ValueError(f"Shards {shards[pair[0]]} and {shards[pair[1]]} overlap")


def find_overlap(offsets: IntArray, sizes: IntArray) -> tuple[int, int] | None:
    """Return two boxes that share an element, or None.

    Boxes one after another along a dim, and boxes that tile their hull, as those of a tensor do, are seen to be free of
    overlaps at once. Otherwise a sweep along a dim compares each box with those that are open when it starts.
    """
    filled = np.flatnonzero((sizes > 0).all(axis=1))
    if len(filled) < 2:
        return None
    starts, ends = offsets[filled], (offsets + sizes)[filled]
    if any(_is_disjoint_in_order(starts[:, d], ends[:, d]) for d in range(starts.shape[1])):
        return None
    low, hull = starts.min(axis=0), ends.max(axis=0) - starts.min(axis=0)
    point = first_miscovered_point(hull.tolist(), starts - low, sizes[filled])
    if point is None:
        return None
    here = np.flatnonzero(((starts - low <= point) & (point < ends - low)).all(axis=1))
    found = (here[0], here[1]) if len(here) > 1 else _sweep(starts, ends)
    return None if found is None else (int(filled[found[0]]), int(filled[found[1]]))


def _is_disjoint_in_order(starts: IntArray, ends: IntArray) -> bool:
    order = np.argsort(starts)
    return bool((ends[order[:-1]] <= starts[order[1:]]).all())


def _sweep(starts: IntArray, ends: IntArray) -> tuple[int, int] | None:
    """Compare each box with the ones still open at its start, all at once in NumPy, in order of the starts."""
    axis = int(np.argmax([len(np.unique(starts[:, d])) for d in range(starts.shape[1])]))
    order = np.argsort(starts[:, axis], kind="stable")
    live = np.empty(0, np.int64)
    for row in order:
        live = live[ends[live, axis] > starts[row, axis]]
        meets = ((starts[live] < ends[row]) & (starts[row] < ends[live])).all(axis=1)
        if meets.any():
            return int(live[np.argmax(meets)]), int(row)
        live = np.append(live, row)
    return None


def check_tiles(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Raise a ValueError unless shards that do not overlap are inside a tensor of this shape and cover all of it.

    >>> check_tiles([ShardMetadata([0], [3])], (4,))
    Traceback (most recent call last):
    ...
    ValueError: Total volume of shards: 3 does not match tensor volume: 4, in other words all the individual shards ...
    """
    shards, shape = shards_metadata, tensor_dims
    check_same_ndim(shards)
    offsets, sizes = columns_of(shards, shape)
    if not shards or offsets.shape[1] != len(shape):
        raise ValueError(f"Rank of tensor is {len(shape)}, but shards rank is {offsets.shape[1]}")
    outside = np.argwhere(offsets + sizes > np.asarray(shape, np.int64))
    if len(outside):
        row, dim = outside[0].tolist()
        raise ValueError(
            f"Shard offset {offsets[row, dim]} and length {sizes[row, dim]} exceeds tensor dim: {shape[dim]} "
            f"for shard {shards[row]}"
        )
    _check_volume(sizes, shape)


def _check_volume(sizes: IntArray, shape: Sequence[int]) -> None:
    total, whole = sum(math.prod(row) for row in sizes.tolist()), math.prod(shape)
    if total != whole:
        raise ValueError(
            f"Total volume of shards: {total} does not match tensor volume: {whole}, in other words "
            "all the individual shards do not cover the entire tensor"
        )


def flatten_size(size: Sequence[int] | Sequence[Sequence[int]]) -> torch.Size:
    """Return a size passed as ints or as one sequence of them.

    >>> flatten_size((2, 3)), flatten_size(([2, 3],))
    (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    first = size[0] if len(size) == 1 else None
    dims = list(first) if isinstance(first, Sequence) else list(size)
    if not all(isinstance(dim, int) for dim in dims):
        raise TypeError(f"size has to be a sequence of ints, found: {dims}")
    return torch.Size(dims)  # type: ignore[arg-type]  # every dim was seen to be an int


def check_gather_output(my_rank: int, dst_rank: int, size: torch.Size, dst_tensor: Tensor | None) -> None:
    """Raise unless the destination rank, and no other, passes a tensor of the whole size.

    >>> check_gather_output(0, 0, torch.Size([2]), torch.empty(3))
    Traceback (most recent call last):
    ...
    ValueError: Argument ``dst_tensor`` have size (3,), but should be (2,)
    """
    if dst_rank != my_rank:
        if dst_tensor is not None:
            raise ValueError(
                "Argument ``dst_tensor`` must NOT be specified on non-destination ranks: "
                f"this is rank {my_rank}, the destination is rank {dst_rank}"
            )
        return
    if dst_tensor is None:
        raise ValueError(f"Argument ``dst_tensor`` must be specified on destination rank {dst_rank}")
    if tuple(size) != tuple(dst_tensor.size()):
        raise ValueError(f"Argument ``dst_tensor`` have size {tuple(dst_tensor.size())}, but should be {tuple(size)}")


def metadata_from_local_shards(
    local_shards: Sequence[Shard], global_size: torch.Size, current_rank: int, pg: dist.ProcessGroup | None
) -> ShardedTensorMetadata:
    """Return what a rank's shards say of the tensor, checked against each other.

    >>> shard = Shard.from_tensor_and_offsets(torch.zeros(2), [0], rank=0)
    >>> metadata_from_local_shards([shard], torch.Size([4]), 0, None).size
    torch.Size([4])
    """
    assert len(local_shards) > 0, "must have local shards!"
    first = TensorProperties.create_from_tensor(local_shards[0].tensor)
    for part in local_shards:
        _check_placement(part, current_rank, pg)
        _check_same_properties(part.tensor, first, current_rank)
    whole = replace(first, strides=None)  # those of a part are not those of the tensor
    return ShardedTensorMetadata([part.metadata for part in local_shards], global_size, whole)


def _check_placement(part: Shard, current_rank: int, pg: dist.ProcessGroup | None) -> None:
    rank, device = rank_and_device(pg, part.metadata.placement)
    if part.tensor.layout != torch.strided:
        raise ValueError(
            f"Only torch.strided layout is currently supported, but found {part.tensor.layout} on rank:{current_rank}!"
        )
    if not part.tensor.is_contiguous():
        raise ValueError("Only torch.contiguous_format memory_format is currently supported!")
    if rank != current_rank:
        raise ValueError(
            "Local shard metadata's rank does not match with the rank in its process group! Found current rank in the "
            f"process group: {current_rank}, local ShardMetadata placement's rank: {rank}"
        )
    if part.tensor.device != device:
        raise ValueError(
            "Local shard tensor device does not match with local Shard's placement! Found local shard tensor device: "
            f"{part.tensor.device}, local shard metadata placement device: {device}"
        )


def _check_same_properties(tensor: Tensor, first: TensorProperties, rank: int) -> None:
    own = TensorProperties.create_from_tensor(tensor)
    for name in ("dtype", "requires_grad", "pin_memory"):
        expected, actual = getattr(first, name), getattr(own, name)
        if expected != actual:
            raise ValueError(
                f"Local shards' tensor {name} property need to be the same on rank:{rank}! Found one local shard "
                f"tensor {name}={expected}, the other local shard tensor {name}={actual}."
            )


def global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """Return the metadata of the whole tensor from that of each rank (None: no shards), checked to tile it.

    With `recalc_metadata` the offsets along dim 0 and its length follow from the ranks' order and sizes.

    >>> from shardwise.tensor.shards import ShardMetadata
    >>> parts = [ShardedTensorMetadata([ShardMetadata([r], [1], f"rank:{r}/cpu")], torch.Size([2])) for r in range(2)]
    >>> len(global_metadata(parts).shards_metadata)
    2
    """
    given = [(rank, part) for rank, part in enumerate(gathered_metadatas) if part is not None]
    if not given:
        raise ValueError("ShardedTensor have no local shards on all ranks!")
    for rank, part in given[1:]:
        _check_same_tensor(given[0], (rank, part))
    shards = [copy.deepcopy(shard) for _, part in given for shard in part.shards_metadata]
    whole = ShardedTensorMetadata(shards, given[0][1].size, copy.deepcopy(given[0][1].tensor_properties))
    if recalc_metadata:
        stack_along_dim(whole, 0)
    check_no_overlap(whole.shards_metadata)
    check_tiles(whole.shards_metadata, whole.size)
    return whole


def _check_same_tensor(first: tuple[int, ShardedTensorMetadata], other: tuple[int, ShardedTensorMetadata]) -> None:
    pairs = {"global_size": (first[1].size, other[1].size)}
    properties = first[1].tensor_properties, other[1].tensor_properties
    for name in ("dtype", "requires_grad", "pin_memory"):
        pairs[name] = (getattr(properties[0], name), getattr(properties[1], name))
    for name, (expected, actual) in pairs.items():
        if expected != actual:
            raise ValueError(
                f"ShardedTensor {name} property does not match from different ranks! Found {name}={expected} on "
                f"rank:{first[0]}, and {name}={actual} on rank:{other[0]}."
            )


def stack_along_dim(global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int) -> None:
    """Place the shards one after another along a dim, in the order of their ranks, and set the size that follows.

    >>> shards = [ShardMetadata([0, 0], [2, 3], f"rank:{rank}/cpu") for rank in range(2)]
    >>> metadata = ShardedTensorMetadata(shards, torch.Size([0, 3]))
    >>> stack_along_dim(metadata, 0)
    >>> shards[1].shard_offsets, metadata.size
    ([2, 0], torch.Size([4, 3]))
    """
    metadata, dim = global_sharded_tensor_metadata, sharded_dim
    ordered = sorted(metadata.shards_metadata, key=lambda shard: rank_of(shard.placement))
    ends = list(accumulate(shard.shard_sizes[dim] for shard in ordered))
    for part, end in zip(ordered, ends, strict=True):
        part.shard_offsets = [0] * len(part.shard_sizes)
        part.shard_offsets[dim] = end - part.shard_sizes[dim]
    size = list(ordered[0].shard_sizes)
    size[dim] = ends[-1]
    metadata.size = torch.Size(size)


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
