"""Functions that run on a local tensor with the shape that the layout of their result has on this rank.

Their own arguments are sizes of the whole. Whether the result is a view or a copy depends on the strides of the whole,
which are part of the fingerprint, and never on those of the local tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.tensor.dense_strides import can_view, copy_if_shared
from shardwise.tensor.sharded_tensor import ShardedTensor

ShapeFunction = Callable[[Tensor, Sequence[int]], Tensor]
_RESHAPES: frozenset[Any] = frozenset(
    (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten)
)
_EXPANDS: frozenset[Any] = frozenset((Tensor.expand, Tensor.broadcast_to, torch.broadcast_to))


def find_shape_function(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any, operators: int
) -> ShapeFunction | None:
    """What a function that nothing was moved for does to the local tensor, given so many operators; None for others."""
    known = func in _RESHAPES or func in _EXPANDS or func is Tensor.contiguous
    if not known or kwargs or not isinstance(result, ShardedTensor) or not isinstance(args[0], ShardedTensor):
        return None
    tensor = args[0]
    if func is Tensor.contiguous:  # computed without an operator; the tensor itself where it is contiguous
        copied = operators == 0 and len(args) == 1 and tensor._dense_strides is not None
        return _copy_contiguous if copied else None
    if operators != 1 or result.dtype != tensor.dtype:  # `view` takes a dtype as well
        return None
    if func in _EXPANDS:
        return Tensor.expand
    viewed = can_view(tensor.sharding.shape, tensor._dense_strides, result.sharding.shape)
    return Tensor.reshape if viewed else _reshape_to_copy


def _reshape_to_copy(local: Tensor, shape: Sequence[int]) -> Tensor:
    return copy_if_shared(local.reshape(shape), local)


def _copy_contiguous(local: Tensor, shape: Sequence[int]) -> Tensor:
    return local.clone(memory_format=torch.contiguous_format)
