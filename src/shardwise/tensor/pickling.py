"""How does a sharded tensor pass through pickle, copy, deepcopy, torch.save, torch.load, torch.distributed.checkpoint?

A pickled tensor is one rank's part: its layout, its local tensors, and which rank of which world wrote it. It is read
by the same rank of a world of the same size, on the default process group or that of `load_with_process_group`. Reading
it elsewhere would produce the wrong shards, so it is an error, which names the fix: a checkpoint, which reshards.

The layout is written as plain data, so that `torch.load` reads it with `weights_only=True`, its default. A layout by a
spec of a user's own class is written as that object and needs `weights_only=False`.

torch.distributed.checkpoint (DCP) asks a tensor for the boxes that this rank writes and reads, and for a box's tensor.
It calls methods of the tensor, so its modules are loaded by then and are not imported here.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import make_wrapper_subclass
from shardwise.comm import Comm, current_comm
from shardwise.comm.current import loading_group
from shardwise.geometry import ChunkSpec, EnumerableSpec, GridSpec, Layout, MeshSpec, layout_from_json, layout_to_json

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardwise.tensor.sharded_tensor import ShardedTensor

PLAIN_SPECS = (ChunkSpec, EnumerableSpec, GridSpec, MeshSpec)
_DCP = "torch.distributed.checkpoint"
_PICKLE_HINT = (
    "; a pickled ShardedTensor is read by the rank that wrote it in a world of the same size. To change either, "
    "write a checkpoint with shardwise.save and read it with shardwise.load, which reshards"
)


@dataclass
class ProcessGroupState:
    """Which rank of which group and world wrote a tensor.

    >>> from shardwise.comm.current import resolve_comm
    >>> ProcessGroupState.of(resolve_comm())
    ProcessGroupState(local_rank=0, global_rank=0, local_world_size=1, global_world_size=1)
    """

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @classmethod
    def of(cls, comm: Comm) -> ProcessGroupState:
        """Return the state of this rank in a comm."""
        local_rank = comm.ranks.index(comm.rank) if comm.rank in comm.ranks else -1
        return cls(local_rank, comm.rank, comm.world_size, _world_size(comm))

    def check(self, comm: Comm) -> None:
        """Raise unless a comm has this rank in a group and a world of these sizes."""
        now = ProcessGroupState.of(comm)
        fields = ("local_rank", "global_rank", "local_world_size", "global_world_size")
        for name in fields:
            saved, found = getattr(self, name), getattr(now, name)
            if saved != found:
                what = name.replace("_", " ").capitalize()
                raise RuntimeError(f"{what} at save time was {saved}, but at load time was {found}{_PICKLE_HINT}")


@dataclass(frozen=True)
class SavedTensor:
    """One rank's part of a sharded tensor, without its comm.

    `sample` has no elements; it holds the dtype and the device, so that `map_location` of torch.load applies to it too.
    `extra` is what a subclass of ShardedTensor adds.
    """

    layout: Layout | dict[str, Any]
    locals: tuple[Tensor, ...]
    anchor: Tensor | None
    sample: Tensor
    is_parameter: bool
    extra: dict[str, Any]
    group: ProcessGroupState


def reduce(tensor: ShardedTensor) -> tuple[Any, ...]:
    """Say how pickle writes a tensor: for `__reduce_ex__`."""
    saved = SavedTensor(
        layout=layout_to_json(tensor.sharding) if type(tensor.sharding.spec) in PLAIN_SPECS else tensor.sharding,
        locals=tensor.local_parts,
        anchor=tensor._anchor,
        sample=torch.empty(0, dtype=tensor.dtype, device=tensor.device),
        is_parameter=getattr(tensor, "_is_param", False),
        extra=tensor._extra_state(),
        group=ProcessGroupState.of(tensor.comm),
    )
    return rebuild, (type(tensor), saved)


def rebuild(cls: type[ShardedTensor], saved: SavedTensor) -> ShardedTensor:
    """Make the tensor that `reduce` wrote, on the process group of the moment."""
    comm = comm_to_load_on(cls, saved.group)
    layout = layout_from_json(saved.layout) if isinstance(saved.layout, dict) else saved.layout
    tensor: ShardedTensor = make_wrapper_subclass(
        cls, layout.shape, dtype=saved.sample.dtype, device=saved.sample.device
    )
    tensor.sharding, tensor.local_parts, tensor._anchor, tensor.comm = layout, saved.locals, saved.anchor, comm
    tensor._fingerprint = None
    return _finish_rebuild(tensor, saved.extra, saved.is_parameter)


def shallow_copy(tensor: ShardedTensor) -> ShardedTensor:
    """Return another tensor over the same local tensors: for `__copy__`."""
    return _wrap_like(tensor, tensor.local_parts, tensor._anchor)


def deep_copy(tensor: ShardedTensor, memo: dict[int, Any]) -> ShardedTensor:
    """Return a tensor with copies of the local tensors on the same comm: for `__deepcopy__`."""
    if id(tensor) not in memo:
        locals_, anchor = copy.deepcopy((tensor.local_parts, tensor._anchor), memo)
        memo[id(tensor)] = _wrap_like(tensor, locals_, anchor)
    copied: ShardedTensor = memo[id(tensor)]
    return copied


def _wrap_like(tensor: ShardedTensor, locals_: tuple[Tensor, ...], anchor: Tensor | None) -> ShardedTensor:
    made = tensor._like(tensor.sharding, locals_, anchor)
    if tensor._pinned_axes:
        made._pinned_axes = tensor._pinned_axes
    return _finish_rebuild(made, tensor._extra_state(), getattr(tensor, "_is_param", False))


def _finish_rebuild(tensor: ShardedTensor, extra: dict[str, Any], is_parameter: bool) -> ShardedTensor:
    if is_parameter:
        tensor._is_param = True
    tensor._restore_extra_state(extra)
    return tensor


def comm_to_load_on(cls: type[ShardedTensor], saved: ProcessGroupState) -> Comm:
    """Return the comm of the moment, checked to be like the one that a tensor was written on."""
    group = loading_group()
    if group is None and saved.global_world_size > 1:
        raise RuntimeError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor; '
            f"this one was written by rank {saved.global_rank} of a world of {saved.global_world_size}{_PICKLE_HINT}"
        )
    comm = cls._resolve_comm(group)
    saved.check(comm)
    return comm


def _world_size(comm: Comm) -> int:
    """The size of the world around a comm; ranks that are threads know only the comm that is current."""
    if comm.process_group is not None:
        return dist.get_world_size()
    around = current_comm()
    return comm.world_size if around is None else max(comm.world_size, around.world_size)


def make_write_items(tensor: ShardedTensor, name: str) -> list[WriteItem]:
    """What this rank offers to write; torch drops the copies of other ranks."""
    planner, metadata = (sys.modules[f"{_DCP}.{part}"] for part in ("planner", "metadata"))
    properties = metadata.TensorProperties(dtype=tensor.dtype)

    def item(chunk: Any) -> Any:
        data = planner.TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape)
        return planner.WriteItem(
            metadata.MetadataIndex(name, chunk.offsets), planner.WriteItemType.SHARD, tensor_data=data
        )

    return [item(chunk) for chunk in held_chunks(tensor)]


def held_chunks(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """The boxes that this rank holds, without the empty ones."""
    if tensor.sharding.pending is not None:
        raise ValueError(
            f"{tensor.sharding!r} has a {tensor.sharding.pending} pending, which torch.distributed.checkpoint cannot "
            "store; redistribute it to Shard or Replicate first, or use shardwise.save"
        )
    chunk = sys.modules[f"{_DCP}.metadata"].ChunkStorageMetadata
    return [
        chunk(torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes))
        for shard in tensor.local_shards()
        if 0 not in shard.metadata.shard_sizes
    ]


def find_chunk_tensor(tensor: ShardedTensor, index: MetadataIndex) -> Tensor:
    """The tensor of the box that begins at the requested offset."""
    for shard in tensor.local_shards():
        found = torch.Size(shard.metadata.shard_offsets) == index.offset
        if found and 0 not in shard.metadata.shard_sizes:
            return shard.tensor.detach()
    raise ValueError(
        f"{index.fqn}: this rank has no box that begins at {tuple(index.offset or ())}; its boxes begin at "
        f"{[tuple(s.metadata.shard_offsets) for s in tensor.local_shards()][:8]}"
    )
