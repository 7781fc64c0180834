"""The names of `torch.distributed._shard._utils`."""

from collections.abc import Sequence

import torch

from shardwise.tensor.shards import ShardMetadata


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the box of a tensor at these offsets, as a view.

    >>> narrow_tensor_by_index(torch.arange(6).reshape(2, 3), [0, 1], [2, 2]).tolist()
    [[1, 2], [4, 5]]
    """
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=False)):
        if size < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """Return the part of a whole tensor that a shard holds, as a view."""
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)


__all__ = ["narrow_tensor", "narrow_tensor_by_index"]
