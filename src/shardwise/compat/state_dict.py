"""Sharded tensors in state dicts: those that are plain attributes of a module, and torch's state of one tensor.

Parameters and buffers need no hook. For other attributes:

    module._register_state_dict_hook(state_dict_hook)
    module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)

Registered on a root module or on any module below it, a hook covers that module and all below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from shardwise.geometry import Box, Layout, ShardingSpec
from shardwise.tensor.moving.execute import view_box
from shardwise.tensor.pickling import ProcessGroupState, comm_to_load_on
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.shards import Shard, ShardedTensorMetadata

if TYPE_CHECKING:
    from shardwise.compat.sharded_tensor import TorchShardedTensor

TorchState: TypeAlias = tuple[list[Shard], ShardedTensorMetadata, ProcessGroupState, ShardingSpec, bool]


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add the attributes that are sharded tensors, of a module and all below it, to its state dict.

    >>> from shardwise.geometry import ChunkSpec
    >>> module = nn.Module()
    >>> module.table = ShardedTensor(ChunkSpec(0, ranks=1), 4, 2)
    >>> handle = module._register_state_dict_hook(state_dict_hook)
    >>> list(module.state_dict())
    ['table']
    """
    for owner, name, key in _plain_attributes(module, prefix):
        value = owner.__dict__[name]
        if isinstance(value, ShardedTensor):
            destination[key] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set attributes of a module and all below it to the sharded tensors that a state dict holds for them.

    What was set is taken out of `state_dict` (`load_state_dict` hands over a copy), since a strict load would find it
    unexpected: it is neither parameter nor buffer.

    >>> from shardwise.geometry import ChunkSpec
    >>> module = nn.Module()
    >>> module.table = None
    >>> handle = module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)
    >>> table = ShardedTensor(ChunkSpec(0, ranks=1), 4, 2)
    >>> module.load_state_dict({"table": table})
    <All keys matched successfully>
    >>> module.table is table
    True
    """
    for owner, name, key in list(_plain_attributes(module, prefix)):
        if isinstance(value := state_dict.get(key), ShardedTensor):
            setattr(owner, name, value)
            if name in owner.__dict__:
                del state_dict[key]


def _plain_attributes(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Every plain attribute of a module and those below it: its owner, its name, and its key in a state dict.

    A module that is registered in several places has a key for each, as its parameters have.
    """
    for path, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}{path}." if path else prefix
        for name in owner.__dict__:
            yield owner, name, start + name


def get_state(tensor: TorchShardedTensor) -> TorchState:
    """Return torch's state of a tensor: shards, metadata, group, spec, and whether it has remote references."""
    group = ProcessGroupState.of(tensor.comm)
    return tensor.local_shards(), tensor.metadata(), group, tensor.sharding_spec(), tensor._init_rrefs


def set_state(tensor: TorchShardedTensor, state: TorchState) -> None:
    """Give a tensor of the same size and dtype torch's state, on the process group of the moment.

    A file that torch's own class wrote is read in this way: pickle makes a tensor that has nothing yet.
    """
    shards, metadata, group, spec, init_rrefs = state
    comm = comm_to_load_on(type(tensor), group)
    if hasattr(tensor, "sharding"):
        _check_same_kind(tensor, metadata)
    layout = spec.layout(metadata.size)
    for name in ("_shards", "_shard_order"):
        tensor.__dict__.pop(name, None)
    tensor.sharding, tensor.comm, tensor._anchor, tensor._fingerprint = layout, comm, None, None
    tensor.local_parts = _locals_of(shards, layout, comm.rank)
    tensor._metadata, tensor._sharding_spec = metadata, spec
    if len(shards) == len(tensor.local_parts):
        tensor._local_shards = shards
    tensor.requires_grad_(metadata.tensor_properties.requires_grad)
    tensor._with_rrefs(init_rrefs)


def _check_same_kind(tensor: TorchShardedTensor, metadata: ShardedTensorMetadata) -> None:
    have, given = (tuple(tensor.shape), tensor.dtype), (tuple(metadata.size), metadata.tensor_properties.dtype)
    if have != given:
        raise ValueError(
            f"a ShardedTensor of shape {have[0]} and {have[1]} cannot take a state of shape {given[0]} and {given[1]}; "
            "make a tensor of the state's shape and dtype, or use pickle, which does"
        )


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
