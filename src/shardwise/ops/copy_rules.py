"""Conversions and copies that torch's functions are broken down into; recorded on the local tensors' tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.geometry import Replicate, Shard
from shardwise.ops.engine import call_op
from shardwise.ops.local_tape import recording
from shardwise.ops.placing import mesh_view
from shardwise.ops.rules import Strategy, TensorMeta, register_sharding
from shardwise.tensor.dispatch import handler
from shardwise.tensor.inplace import mark_copied
from shardwise.tensor.sharded_tensor import ShardedTensor

_CONVERT = torch.ops.aten._to_copy.default
_NAMES = ("dtype", "device", "non_blocking", "memory_format")


@register_sharding([_CONVERT, torch.ops.aten.alias.default])
def _same_shape(x: TensorMeta, **_: Any) -> list[Strategy]:
    whole = Strategy((Replicate(),), (Replicate(),))
    return [whole, *(Strategy((Shard(d),), (Shard(d),)) for d in range(x.ndim))]


def _register_at_once(op: Any, function: Callable[[Tensor], Tensor]) -> None:
    """Conjugated or negated now, not when it is read: local tensors are moved as they lie in memory.

    The result is marked, since torch's own would share memory.
    """

    @register_sharding(op)
    def rule(x: TensorMeta) -> list[Strategy]:
        return [Strategy(s.outputs, s.inputs, lambda view, tensor: function(tensor)) for s in _same_shape(x)]

    @handler(op)
    def at_once(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        if mesh_view(args[0]._layout) is None:
            return NotImplemented
        return mark_copied(call_op(op, types, args, kwargs), "a conjugate or negative")


_register_at_once(torch.ops.aten._conj.default, torch.conj_physical)
_register_at_once(torch.ops.aten._neg_view.default, torch.neg)


@handler(torch.ops.aten._linalg_check_errors.default)
def _check_errors(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> None:
    """Every rank sees the verdicts of all, so that all raise or none."""
    verdicts: ShardedTensor = args[0]
    with recording():
        torch.ops.aten._linalg_check_errors.default(verdicts.detach().full(), *args[1:], **kwargs)


@handler(_CONVERT)
def _convert(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """Pending sums, irregular pieces and other devices, piece by piece; anything else by the rule."""
    tensor: ShardedTensor = args[0]
    device = kwargs.get("device")
    regular = mesh_view(tensor._layout) is not None and tensor._layout.pending is None
    if regular and (device is None or torch.device(device) == tensor.device):
        return NotImplemented
    known = {k: v for k, v in kwargs.items() if k in _NAMES and v is not None}
    with recording():
        return tensor.to(**known, copy=True)
