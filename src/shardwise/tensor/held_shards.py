"""This rank's pieces as torch's `Shard`s, tied to their tensor: what is assigned to one becomes a local tensor.

torch's CPU offload assigns to `shard.tensor`. Without the tie the new memory would belong to the Shard alone, and what
is written there later would be lost.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from torch import Tensor

from shardwise.geometry import Box
from shardwise.tensor.execute import view_box
from shardwise.tensor.placement_specs import spec_on_device
from shardwise.tensor.shards import Shard

if TYPE_CHECKING:
    from shardwise.tensor.sharded_tensor import ShardedTensor


def make_local_shards(tensor: ShardedTensor) -> list[Shard]:
    """The shards of this rank; their tensors are views of the local tensors."""
    rows = tensor.sharding.rows_of(tensor.comm.rank)
    own = tensor.sharding.table.take(rows)
    described = tensor.metadata().shards_metadata
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
            f"a shard that is a part of a local tensor of shape {tuple(tensor.local_parts[slot].shape)} cannot be "
            "given "
            "memory of its own; write the values into it: shard.tensor.copy_(new)"
        )
    if tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype:
        raise ValueError(
            f"a shard of shape {tuple(old.shape)} and {old.dtype} cannot take a tensor of shape {tuple(new.shape)} and "
            f"{new.dtype}; convert it first, or make a new ShardedTensor with to() or from_local()"
        )
    if new.device != old.device:
        tensor.sharding = spec_on_device(tensor.sharding.spec, new.device).layout(tensor.sharding.shape)
    tensor.local_parts = (*tensor.local_parts[:slot], new, *tensor.local_parts[slot + 1 :])
    tensor.__dict__.pop("_described", None)


def _is_current(tensor: ShardedTensor, slot: int, old: Tensor) -> bool:
    """Whether a shard's tensor is still memory of the ShardedTensor, which may have been resharded since."""
    if slot >= len(tensor.local_parts):
        return False
    held = tensor.local_parts[slot]
    return old is held or old._base is held
