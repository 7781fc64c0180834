"""Forward-mode differentiation: the tangents of a ShardedTensor are those of its local tensors.

1. `make_dual` gives each local tensor its part of the tangent, which is moved to the layout of the value first.
2. While dual numbers are in use, functions take no shortcut, rules choose as they do for tensors that are
   differentiated, and moves carry tangents (`autograd.py`).
3. `unpack_dual` puts the tangents together. Ranks agree on whether there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise._torch import forward_ad, is_batched_tensor, is_tracing, make_dual_function, unpack_dual_function
from shardwise.comm import Comm
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.move import move_to, replicated_layout
from shardwise.tensor.moving.autograd import any_rank_has_tangents, dual_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


@register_function(make_dual_function)
def _make_dual(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    value, tangent = args
    if is_tracing() or is_batched_tensor(value) or is_batched_tensor(tangent):
        raise UnsupportedOpError(
            "torch.func.jacfwd, hessian, linearize and vmap of forward mode are not supported for ShardedTensors; call "
            "torch.func.jvp for one tangent after the other"
        )
    if not isinstance(value, ShardedTensor):
        raise UnsupportedOpError("the tangent of a plain tensor cannot be a ShardedTensor; pass tangent.full()")
    if tuple(value.shape) != tuple(tangent.shape):
        raise ValueError(
            f"a tangent has the shape of its value: {tuple(value.shape)}, got {tuple(tangent.shape)}; expand it first"
        )
    dual_layout(value.sharding)  # raises for a pending maximum, which has no tangent
    if not isinstance(tangent, ShardedTensor):
        tangent = wrap(replicated_layout(tuple(tangent.shape), comm.ranks), (tangent,), comm)
    parts = [forward_ad.unpack_dual(t).primal for t in move_to(tangent, value.sharding, "tangent")[0]]
    duals = tuple(map(forward_ad.make_dual, value.local_parts, parts))
    return value._like(value.sharding, duals, value._anchor)


@register_function(unpack_dual_function)
def _unpack_dual(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    (tensor,) = args
    pairs = [forward_ad.unpack_dual(t) for t in tensor.local_parts]
    value = tensor._like(tensor.sharding, tuple(primal for primal, _ in pairs), tensor._anchor)
    if not any_rank_has_tangents(tensor.local_parts, comm, "unpack_dual"):
        return value, None
    parts = tuple(torch.zeros_like(primal) if tangent is None else tangent for primal, tangent in pairs)
    return value, tensor._like(tensor.sharding, parts)
