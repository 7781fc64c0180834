"""What do all ranks' shards say together? torch's checks of local shards and of the metadata gathered from all ranks.

1. One rank: its shards agree with their metadata, with the rank, and with each other.
2. All ranks: same size, dtype, requires_grad, pin_memory; the shards tile the tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.tensor.metadata_checks import check_no_overlap, check_tiles
from shardwise.tensor.remote_devices import rank_and_device, rank_of
from shardwise.tensor.shards import Shard, ShardedTensorMetadata, TensorProperties


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
    for shard in local_shards:
        _check_placement(shard, current_rank, pg)
        _check_same_properties(shard.tensor, first, current_rank)
    return ShardedTensorMetadata([shard.metadata for shard in local_shards], global_size, first)


def _check_placement(shard: Shard, current_rank: int, pg: dist.ProcessGroup | None) -> None:
    rank, device = rank_and_device(pg, shard.metadata.placement)
    if shard.tensor.layout != torch.strided:
        raise ValueError(
            f"Only torch.strided layout is currently supported, but found {shard.tensor.layout} on rank:{current_rank}!"
        )
    if not shard.tensor.is_contiguous():
        raise ValueError("Only torch.contiguous_format memory_format is currently supported!")
    if rank != current_rank:
        raise ValueError(
            "Local shard metadata's rank does not match with the rank in its process group! Found current rank in the "
            f"process group: {current_rank}, local ShardMetadata placement's rank: {rank}"
        )
    if shard.tensor.device != device:
        raise ValueError(
            "Local shard tensor device does not match with local Shard's placement! Found local shard tensor device: "
            f"{shard.tensor.device}, local shard metadata placement device: {device}"
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
        stack_along_dim_0(whole)
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


def stack_along_dim_0(metadata: ShardedTensorMetadata) -> None:
    """Place the shards one after another along dim 0, in the order of their ranks, and set the size that follows."""
    shards = metadata.shards_metadata
    ordered = sorted(shards, key=lambda shard: rank_of(shard.placement))
    ends = list(accumulate(shard.shard_sizes[0] for shard in ordered))
    for shard, end in zip(ordered, ends, strict=True):
        shard.shard_offsets = [end - shard.shard_sizes[0]] + [0] * (len(shard.shard_sizes) - 1)
    metadata.size = torch.Size([ends[-1], *ordered[0].shard_sizes[1:]])
