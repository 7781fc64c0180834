"""Softmax: over a whole dim each rank by itself; over a sharded dim two small reductions, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.ops.local_tape import recording
from shardwise.ops.reduction_rules import Args
from shardwise.ops.rules import TensorMeta, register_sharding
from shardwise.ops.scan_rules import other_dims
from shardwise.ops.settle import axes_of, settled
from shardwise.tensor.dispatch import handler
from shardwise.tensor.reductions import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor

aten = torch.ops.aten


@register_sharding([aten._softmax.default, aten._log_softmax.default])
def softmax(x: TensorMeta, dim: int, half_to_float: bool) -> list[Any]:
    return other_dims(x, dim)


def _below_the_largest(x: ShardedTensor, dim: int, name: str) -> tuple[ShardedTensor, ShardedTensor]:
    """`x` less its largest value along the dim, which has no gradient, and the sum of its exponentials."""
    largest = settled(aten.amax.default(x.detach(), [dim], True), name)
    with recording():
        below: Any = x - largest
        return below, settled(below.exp().sum(dim, True), name)


def _over_ranks(args: Args, logarithm: bool, name: str) -> Any:
    """Softmax over a sharded dim, summed in a wide dtype; NotImplemented where the dim is whole."""
    x, dim, half_to_float = args
    dim %= max(x.ndim, 1)
    if not axes_of(x, (dim,)):
        return NotImplemented
    with recording():
        wide: Any = settled(x, name).to(accumulation_dtype(x.dtype))
        below, total = _below_the_largest(wide, dim, name)
        result = below - total.log() if logarithm else below.exp() / total
        return result if half_to_float else result.to(x.dtype)


@handler(aten._softmax.default)
def _softmax(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    return _over_ranks(args, False, "softmax")


@handler(aten._log_softmax.default)
def _log_softmax(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    return _over_ranks(args, True, "log_softmax")
