"""How `torch.distributed.checkpoint` sees a ShardedTensor: the boxes this rank writes and reads, and a box's tensor.

torch calls these through methods of the tensor, so its modules are loaded by then and are not imported here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from shardwise.geometry import Layout
from shardwise.tensor.shards import Shard

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_PACKAGE = "torch.distributed.checkpoint"


class DcpSource(Protocol):
    """What is required of a ShardedTensor."""

    sharding: Layout

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    def local_shards(self) -> list[Shard]: ...


def make_write_items(tensor: DcpSource, name: str) -> list[WriteItem]:
    """What this rank offers to write; torch drops the copies of other ranks."""
    planner, metadata = (sys.modules[f"{_PACKAGE}.{part}"] for part in ("planner", "metadata"))
    properties = metadata.TensorProperties(dtype=tensor.dtype)

    def item(chunk: Any) -> Any:
        data = planner.TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape)
        return planner.WriteItem(
            metadata.MetadataIndex(name, chunk.offsets), planner.WriteItemType.SHARD, tensor_data=data
        )

    return [item(chunk) for chunk in held_chunks(tensor)]


def held_chunks(tensor: DcpSource) -> list[ChunkStorageMetadata]:
    """The boxes that this rank holds, without the empty ones."""
    if tensor.sharding.pending is not None:
        raise ValueError(
            f"{tensor.sharding!r} has a {tensor.sharding.pending} pending, which torch.distributed.checkpoint cannot "
            "store; redistribute it to Shard or Replicate first, or use shardwise.save"
        )
    chunk = sys.modules[f"{_PACKAGE}.metadata"].ChunkStorageMetadata
    return [
        chunk(torch.Size(shard.metadata.shard_offsets), torch.Size(shard.metadata.shard_sizes))
        for shard in tensor.local_shards()
        if 0 not in shard.metadata.shard_sizes
    ]


def find_chunk_tensor(tensor: DcpSource, index: MetadataIndex) -> Tensor:
    """The tensor of the box that begins at the requested offset."""
    for shard in tensor.local_shards():
        found = torch.Size(shard.metadata.shard_offsets) == index.offset
        if found and 0 not in shard.metadata.shard_sizes:
            return shard.tensor.detach()
    raise ValueError(
        f"{index.fqn}: this rank has no box that begins at {tuple(index.offset or ())}; its boxes begin at "
        f"{[tuple(s.metadata.shard_offsets) for s in tensor.local_shards()][:8]}"
    )
