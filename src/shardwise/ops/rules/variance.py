"""Variances and standard deviations: over sharded dims the mean, then the mean of squared distances to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.geometry import Partial
from shardwise.ops.engine.local_view import LocalView
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import all_dims, cutting_axes, resolve_partial
from shardwise.ops.rules.reduction import Dims, reduction_strategies
from shardwise.tensor.moving.reductions import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor


def _register_variance(op: Any, name: str, outputs: int) -> None:
    """Register the rule of a variance; ranks without elements do not ask torch, which would warn of too few.

    The variance of nothing is not a number.
    """

    def over_ranks(x: Any, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        found = _variance_over_ranks(x, dim, correction, keepdim, name)
        return found if outputs == 2 else found[0]

    def part(view: LocalView, x: Tensor, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        if x.numel():
            return op(x, dim, correction=correction, keepdim=keepdim)
        nothing = x.sum(all_dims(dim, x.ndim), keepdim) * math.nan
        return nothing.abs() if outputs == 1 else (nothing.abs(), nothing)

    def rule(x: TensorMeta, dim: Dims = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        if cutting_axes(x.layout, all_dims(dim, x.ndim)):
            return Steps(over_ranks)
        found = reduction_strategies(x, dim, keepdim, None, outputs=outputs)
        moves = any(isinstance(p, Partial) for p in x.placements)
        careful = moves or 0 in x.layout.elements_per_rank().values()
        return [Strategy(s.outputs, s.inputs, part) for s in found] if careful else found

    register_sharding(op)(rule)


def compute_moments(x: ShardedTensor, dims: Sequence[int], name: str) -> tuple[ShardedTensor, ShardedTensor]:
    """The mean and the mean of squared distances to it, both with the dims kept, reduced on every rank."""
    average = resolve_partial(aten.mean.dim(x, dims, True), name)
    away = x - average
    squares = (away * away.conj()).real if x.dtype.is_complex else away * away
    return average, resolve_partial(aten.mean.dim(squares, dims, True), name)


def _take_root(spread: Any) -> Any:
    """The square root; at 0 its gradient is 0 and not infinite, as torch's standard deviation has it."""
    zero = spread == 0
    return torch.where(zero, spread, spread.masked_fill(zero, 1).sqrt())


def _variance_over_ranks(x: Any, dim: Dims, correction: Any, keepdim: bool, name: str) -> tuple[Any, Any]:
    """Variance (or its root, where the name says so) and mean over sharded dims."""
    dims = all_dims(dim, x.ndim)
    count = math.prod(x.shape[d] for d in dims)
    left = count - (1 if correction is None else correction)
    wide: Any = resolve_partial(x, name).to(accumulation_dtype(x.dtype))
    average: Any
    average, square = compute_moments(wide, dims, name)
    spread: Any = square * (count / left if left > 0 else math.inf)
    spread = _take_root(spread) if name.startswith("std") else spread
    spread, average = (spread, average) if keepdim else (spread.sum(dims), average.sum(dims))
    return spread.to(x.dtype.to_real()), average.to(x.dtype)


for _op, _name, _outputs in (
    (aten.var.correction, "var", 1),
    (aten.std.correction, "std", 1),
    (aten.var_mean.correction, "var_mean", 2),
    (aten.std_mean.correction, "std_mean", 2),
):
    _register_variance(_op, _name, _outputs)
