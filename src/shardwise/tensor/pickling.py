"""How does a sharded tensor pass through pickle, copy, deepcopy, torch.save and torch.load?

A pickled tensor is one rank's part: its layout, its local tensors, and which rank of which world wrote it. It is read
by the same rank of a world of the same size, on the default process group or that of `load_with_process_group`. Reading
it elsewhere would produce the wrong shards, so it is an error, which names the fix: a checkpoint, which reshards.

`torch.load` reads it with `weights_only=False`: a pickled layout is more than weights.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import make_wrapper_subclass
from shardwise.comm import Comm, current_comm
from shardwise.geometry import Box, Layout, ShardingSpec
from shardwise.tensor import rrefs
from shardwise.tensor.comms import loading_group, resolve_comm
from shardwise.tensor.execute import view_box
from shardwise.tensor.shards import Shard, ShardedTensorMetadata

if TYPE_CHECKING:
    from shardwise.tensor.sharded_tensor import ShardedTensor

_PICKLE_HINT = (
    "; a pickled ShardedTensor is read by the rank that wrote it in a world of the same size. To change either, "
    "write a checkpoint with shardwise.save and read it with shardwise.load, which reshards"
)


@dataclass
class ProcessGroupState:
    """Which rank of which group and world wrote a tensor.

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


State: TypeAlias = tuple[list[Shard], ShardedTensorMetadata, ProcessGroupState, ShardingSpec, bool]


@dataclass(frozen=True)
class SavedTensor:
    """One rank's part of a sharded tensor, without its comm.

    `sample` has no elements; it holds the dtype and the device, so that `map_location` of torch.load applies to it too.
    """

    layout: Layout
    locals: tuple[Tensor, ...]
    anchor: Tensor | None
    sample: Tensor
    is_parameter: bool
    init_rrefs: bool
    group: ProcessGroupState


def reduce(tensor: ShardedTensor) -> tuple[Any, ...]:
    """Say how pickle writes a tensor: for `__reduce_ex__`."""
    saved = SavedTensor(
        layout=tensor.sharding,
        locals=tensor.local_parts,
        anchor=tensor._anchor,
        sample=torch.empty(0, dtype=tensor.dtype, device=tensor.device),
        is_parameter=getattr(tensor, "_is_param", False),
        init_rrefs=tensor._init_rrefs,
        group=ProcessGroupState.of(tensor.comm),
    )
    return rebuild, (type(tensor), saved)


def rebuild(cls: type[ShardedTensor], saved: SavedTensor) -> ShardedTensor:
    """Make the tensor that `reduce` wrote, on the process group of the moment."""
    comm = _comm_to_load_on(saved.group)
    tensor: ShardedTensor = make_wrapper_subclass(
        cls, saved.layout.shape, dtype=saved.sample.dtype, device=saved.sample.device
    )
    tensor.sharding, tensor.local_parts, tensor._anchor, tensor.comm = saved.layout, saved.locals, saved.anchor, comm
    return _finish_rebuild(tensor, saved.init_rrefs, saved.is_parameter)


def get_state(tensor: ShardedTensor) -> State:
    """Return torch's state of a tensor: shards, metadata, group, spec, and whether it has remote references."""
    group = ProcessGroupState.of(tensor.comm)
    return tensor.local_shards(), tensor.metadata(), group, tensor.sharding_spec(), tensor._init_rrefs


def set_state(tensor: ShardedTensor, state: State) -> None:
    """Give a tensor of the same size and dtype torch's state, on the process group of the moment."""
    shards, metadata, group, spec, init_rrefs = state
    comm = _comm_to_load_on(group)
    have, given = (tuple(tensor.shape), tensor.dtype), (tuple(metadata.size), metadata.tensor_properties.dtype)
    if have != given:
        raise ValueError(
            f"a ShardedTensor of shape {have[0]} and {have[1]} cannot take a state of shape {given[0]} and {given[1]}; "
            "make a tensor of the state's shape and dtype, or use pickle, which does"
        )
    layout = spec.layout(metadata.size)
    tensor.local_parts = _locals_of(shards, layout, comm.rank)
    tensor.sharding, tensor.comm, tensor._anchor = layout, comm, None
    tensor._sharded_tensor_id = None
    tensor._forget()
    tensor.requires_grad_(metadata.tensor_properties.requires_grad)
    _finish_rebuild(tensor, init_rrefs, is_parameter=False)


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
    return _finish_rebuild(made, tensor._init_rrefs, getattr(tensor, "_is_param", False))


def _finish_rebuild(tensor: ShardedTensor, init_rrefs: bool, is_parameter: bool) -> ShardedTensor:
    tensor._init_rrefs = init_rrefs
    if is_parameter:
        tensor._is_param = True
    if init_rrefs:
        rrefs.register_rrefs(tensor)
    return tensor


def _comm_to_load_on(saved: ProcessGroupState) -> Comm:
    if loading_group() is None and saved.global_world_size > 1:
        raise RuntimeError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor; '
            f"this one was written by rank {saved.global_rank} of a world of {saved.global_world_size}{_PICKLE_HINT}"
        )
    comm = resolve_comm()
    saved.check(comm)
    return comm


def _world_size(comm: Comm) -> int:
    """The size of the world around a comm; ranks that are threads know only the comm that is current."""
    if comm.process_group is not None:
        return dist.get_world_size()
    around = current_comm()
    return comm.world_size if around is None else max(comm.world_size, around.world_size)


def _locals_of(shards: list[Shard], layout: Layout, rank: int) -> tuple[Tensor, ...]:
    """The local tensors that shards, one for each piece, are parts of."""
    shapes, table = layout.local_shapes(rank), layout.table.take(layout.rows_of(rank))
    if len(table) != len(shards):
        raise ValueError(f"rank {rank} holds {len(table)} pieces of {layout}; the state has {len(shards)} shards")
    if len(shapes) == len(shards):
        return tuple(shard.tensor for shard in shards)
    whole = [shards[0].tensor.detach().new_empty(shape) for shape in shapes]
    for shard, slot, start in zip(shards, table.slots.tolist(), table.local_offsets.tolist(), strict=True):
        view_box(whole[slot], Box(tuple(start), tuple(shard.tensor.shape))).copy_(shard.tensor.detach())
    return tuple(whole)
