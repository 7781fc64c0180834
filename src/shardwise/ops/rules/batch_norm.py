"""Batch normalisation: statistics of a sharded batch are those of the whole batch, alike on every rank.

While training, the mean and the variance of each channel are added up over the ranks, and running statistics are
moved by these. Otherwise each element is scaled on its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import EnableTorchFunction, aten
from shardwise.geometry import Placement, Replicate, Shard
from shardwise.ops.engine.local_view import LocalView
from shardwise.ops.engine.mixed import MixedTensorsError, replicate
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import empty_result_like, redistribute_to, resolve_partial
from shardwise.ops.rules.variance import compute_moments
from shardwise.tensor.moving.reductions import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor


def _native_norm_part(view: LocalView, x: Tensor, *args: Any) -> Any:
    """torch's own, except on a rank without elements, where its backward pass divides by their number."""
    if x.numel():
        return aten.native_batch_norm.default(x, *args)
    saved = x.new_zeros((x.shape[1] if args[4] else 0,))
    return empty_result_like(x, *args[:4]), saved, saved


@register_sharding(aten.native_batch_norm.default)
def native_batch_norm(
    x: TensorMeta, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> list[Strategy]:
    """Channels may be sharded; other dims where the statistics are given."""
    given = [value for value in (weight, bias, mean, variance) if value is not None]
    whole: tuple[Placement, ...] = tuple(Replicate() for _ in given)
    stats: Placement = Shard(0) if training else Replicate()
    found = [Strategy((Replicate(),) * 3, (Replicate(), *whole))]
    if training:
        return [
            *found,
            Strategy(
                (Shard(1), stats, stats), (Shard(1), *(Shard(0) for _ in given)), local_if_empty=_native_norm_part
            ),
        ]
    for dim in range(x.ndim):
        others = tuple(Shard(0) for _ in given) if dim == 1 else whole
        found.append(Strategy((Shard(dim), stats, stats), (Shard(dim), *others), local_if_empty=_native_norm_part))
    return found


def _normalise_batch(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalise by the statistics of the whole batch, or by running ones; plain running ones count as replicated."""
    if not isinstance(input, ShardedTensor):
        raise MixedTensorsError("batch_norm of a plain tensor with sharded statistics or weights; shard the input too")
    with EnableTorchFunction():
        wide: Any = resolve_partial(input, "batch_norm").to(accumulation_dtype(input.dtype))
        if training:
            average, variance = _compute_statistics(wide, running_mean, running_var, momentum)
        else:
            average, variance = (
                _reshape_to_channels(_replicate_plain(t, input), input.ndim) for t in (running_mean, running_var)
            )
        out = (wide - average) * (variance + eps).rsqrt()
        out = out if weight is None else out * _reshape_to_channels(weight, input.ndim)
        out = out if bias is None else out + _reshape_to_channels(bias, input.ndim)
        return out.to(input.dtype)


register_sharding(aten.batch_norm.default, Steps(_normalise_batch))


def _compute_statistics(x: Any, running_mean: Any, running_var: Any, momentum: float) -> tuple[Any, Any]:
    """Mean and variance of each channel over the whole batch; running ones are moved towards them."""
    dims = tuple(d for d in range(x.ndim) if d != 1)
    count = math.prod(x.shape[d] for d in dims)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    average, variance = compute_moments(x, dims, "batch_norm")
    if running_mean is not None:
        _track(_replicate_plain(running_mean, x), average.detach().sum(dims), momentum)
    if running_var is not None:
        _track(_replicate_plain(running_var, x), variance.detach().sum(dims) * (count / (count - 1)), momentum)
    return average, variance


def _replicate_plain(values: Tensor, like: ShardedTensor) -> ShardedTensor:
    return values if isinstance(values, ShardedTensor) else replicate(values, like)


def _reshape_to_channels(values: Tensor, ndim: int) -> Tensor:
    return values.reshape([-1 if d == 1 else 1 for d in range(ndim)])


def _track(running: ShardedTensor, found: Any, momentum: float) -> None:
    """Move a running statistic towards the one found, in place, on every rank alike."""
    local = redistribute_to(found, running.sharding, "batch_norm").local_parts[0]
    with torch.no_grad():
        running.local_parts[0].mul_(1 - momentum).add_(local.to(running.dtype), alpha=momentum)
