"""Variances and standard deviations: over sharded dims the mean, then the mean of squared distances to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise._torch import aten, autograd_on_locals
from shardwise.comm import Comm
from shardwise.geometry import Partial
from shardwise.ops.engine.dispatcher import LocalView
from shardwise.ops.engine.rules import Strategy, TensorMeta, register_sharding
from shardwise.ops.engine.two_step import all_dims, cutting_axes, resolve_partial
from shardwise.ops.rules.reduction import Args, Dims, reduction_strategies
from shardwise.tensor.dispatch import register_handler
from shardwise.tensor.reductions import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor


def _register_variance(op: Any, outputs: int) -> None:
    """Register the rule of a variance; ranks without elements do not ask torch, which would warn of too few."""

    def part(view: LocalView, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        if x.numel():
            return op(x, dim, correction=correction, keepdim=keepdim)
        nothing = x.sum(all_dims(dim, x.ndim), keepdim)
        return nothing if outputs == 1 else (nothing, nothing)

    def rule(x: TensorMeta, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> list[Any]:
        found = reduction_strategies(x, dim, keepdim, None, outputs=outputs)
        moves = any(isinstance(p, Partial) for p in x.placements)
        careful = moves or 0 in x.layout.elements_per_rank().values()
        return [Strategy(s.outputs, s.inputs, part) for s in found] if careful else found

    register_sharding(op)(rule)


for _op, _outputs in (
    (aten.var.correction, 1),
    (aten.std.correction, 1),
    (aten.var_mean.correction, 2),
    (aten.std_mean.correction, 2),
):
    _register_variance(_op, _outputs)


def compute_moments(x: ShardedTensor, dims: Sequence[int], name: str) -> tuple[ShardedTensor, ShardedTensor]:
    """The mean and the mean of squared distances to it, both with the dims kept, reduced on every rank."""
    with autograd_on_locals():
        average = resolve_partial(aten.mean.dim(x, dims, True), name)
        away = x - average
        squares = (away * away.conj()).real if x.is_complex() else away * away
        return average, resolve_partial(aten.mean.dim(squares, dims, True), name)


def _compute_variance(args: Args, kwargs: dict[str, Any], root: bool, name: str) -> Any:
    """Variance (or its root) and mean over sharded dims; NotImplemented where none is."""
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    dims = all_dims(dim, x.ndim)
    if not cutting_axes(x, dims):
        return NotImplemented
    correction, keepdim = kwargs.get("correction"), kwargs.get("keepdim", False)
    count = math.prod(x.shape[d] for d in dims)
    left = count - (1 if correction is None else correction)
    with autograd_on_locals():
        wide: Any = resolve_partial(x, name).to(accumulation_dtype(x.dtype))
        average, square = compute_moments(wide, dims, name)
        spread = square * (count / left if left > 0 else math.inf)
        spread = spread.sqrt() if root else spread
        found = (spread, average) if keepdim else (spread.sum(dims), average.sum(dims))
        return tuple(value.to(x.dtype.to_real() if value is found[0] else x.dtype) for value in found)


@register_handler(aten.var.correction)
def _var(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    found = _compute_variance(args, kwargs, False, "var")
    return found if found is NotImplemented else found[0]


@register_handler(aten.std.correction)
def _std(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    found = _compute_variance(args, kwargs, True, "std")
    return found if found is NotImplemented else found[0]


@register_handler(aten.var_mean.correction)
def _var_mean(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    return _compute_variance(args, kwargs, False, "var_mean")


@register_handler(aten.std_mean.correction)
def _std_mean(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    return _compute_variance(args, kwargs, True, "std_mean")
