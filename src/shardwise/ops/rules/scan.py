"""Rules of what needs a dim in its order: running sums, sorting. Any other dim may be sharded.

A sharded dim is gathered, or the tensor is split along another dim, whichever moves less; running sums along a
sharded dim need the totals of the ranks before, and nothing else.

Softmax over a whole dim is computed by each rank alone; over a sharded dim it takes two small reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.geometry import Layout, Shard
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta, ignores_lengths, stands_for
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import cutting_axes, gather_rank_rows, mesh_spec_of, resolve_partial
from shardwise.ops.engine.vary import vary_along
from shardwise.ops.rules.reduction import reduction_strategies
from shardwise.tensor.moving.reductions import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


def other_dim_strategies(x: TensorMeta, dim: int, outputs: int = 1, keeps: Sequence[str] = ()) -> list[Strategy]:
    """Strategies of an operator that keeps its shape and needs one dim whole."""
    whole = dim % max(x.ndim, 1)
    found = [s for s in reduction_strategies(x, whole, True, None, keeps=keeps, outputs=outputs)]
    return found if x.ndim else found[:1]


@register_sharding(aten.cumsum.default)
def cumsum(x: TensorMeta, dim: int, *, dtype: Any = None) -> list[Strategy] | Steps:
    if _is_in_order(x.layout, dim % max(x.ndim, 1)):
        return Steps(_cumsum_over_ranks)
    exact = dtype is None or dtype == x.dtype
    return other_dim_strategies(x, dim, keeps=("sum", "avg") if exact and x.dtype != torch.bool else ())


@register_sharding(aten.cumprod.default)
def cumprod(x: TensorMeta, dim: int, *, dtype: Any = None) -> list[Any]:
    return other_dim_strategies(x, dim)


@register_sharding(aten.logcumsumexp.default)
def logcumsumexp(x: TensorMeta, dim: int) -> list[Any]:
    if x.dtype.is_complex and x.requires_grad and 0 in x.layout.elements_per_rank().values():
        raise RuntimeError("logcumsumexp of complex numbers has no gradient in torch; detach() the tensor")
    return other_dim_strategies(x, dim)


@register_sharding([aten.cummax.default, aten.cummin.default])
def running_minmax(x: TensorMeta, dim: int) -> list[Any]:
    return other_dim_strategies(x, dim, outputs=2)


@register_sharding(aten.sort.default)
def sort(x: TensorMeta, dim: int = -1, descending: bool = False) -> list[Any]:
    return other_dim_strategies(x, dim, outputs=2)


@register_sharding(aten.sort.stable)
def stable_sort(x: TensorMeta, *, stable: Any = None, dim: int = -1, descending: bool = False) -> list[Any]:
    return other_dim_strategies(x, dim, outputs=2)


@register_sharding(aten.argsort.stable)
def argsort(x: TensorMeta, *, stable: Any = None, dim: int = -1, descending: bool = False) -> list[Any]:
    return other_dim_strategies(x, dim)


@register_sharding(aten.topk.default)
def topk(x: TensorMeta, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Any]:
    return other_dim_strategies(x, dim, outputs=2)


# Running sums along a sharded dim


def _is_in_order(layout: Layout, dim: int) -> bool:
    """Whether the ranks hold the dim in one run each, in the order of the axis that cuts it."""
    spec, axes = mesh_view(layout), cutting_axes(layout, (dim,))
    if spec is None or len(axes) != 1 or not spec.splits_in_mesh_order:
        return False
    cut = spec.placements[axes[0]]
    return isinstance(cut, Shard) and cut.is_in_runs


def _cumsum_over_ranks(x: ShardedTensor, dim: int, *, dtype: Any = None) -> ShardedTensor:
    dim %= max(x.ndim, 1)
    x = resolve_partial(x, "cumsum")
    totals = gather_rank_rows(x, (dim,), lambda local: local.sum(dim, True, dtype=dtype), "cumsum")
    before = _sum_before(x, totals, dim)
    return wrap(x.sharding, (x.local_parts[0].cumsum(dim, dtype=dtype) + before,), x.comm)


def _sum_before(x: ShardedTensor, totals: ShardedTensor, dim: int) -> Tensor:
    """The sum of the totals of the ranks before this one, which differs from rank to rank."""
    spec, axis = mesh_spec_of(x), cutting_axes(x.sharding, (dim,))[0]
    assert spec is not None
    place = spec.mesh.coordinates(x.comm.rank)[spec.mesh.axes[axis]]
    return vary_along(totals, totals.sharding, (axis,)).narrow(dim, 0, place).sum(dim, True)


@register_sharding(aten._softmax.default)
@ignores_lengths
def softmax(x: TensorMeta, dim: int, half_to_float: bool) -> list[Strategy] | Steps:
    return _softmax_rule(x, dim, _softmax_over_ranks)


@register_sharding(aten._log_softmax.default)
@ignores_lengths
def log_softmax(x: TensorMeta, dim: int, half_to_float: bool) -> list[Strategy] | Steps:
    return _softmax_rule(x, dim, _log_softmax_over_ranks)


@register_sharding(aten.softmax.int)
@stands_for(aten._softmax.default)
@ignores_lengths
def softmax_as(x: TensorMeta, dim: int, dtype: Any = None) -> list[Strategy] | Steps:
    """As an operator of its own, which is called more often than the one that torch makes of it."""
    return _softmax_rule(x, dim, lambda x, dim, dtype=None: aten._softmax.default(_cast(x, dtype), dim, False))


@register_sharding(aten.log_softmax.int)
@stands_for(aten._log_softmax.default)
@ignores_lengths
def log_softmax_as(x: TensorMeta, dim: int, dtype: Any = None) -> list[Strategy] | Steps:
    return _softmax_rule(x, dim, lambda x, dim, dtype=None: aten._log_softmax.default(_cast(x, dtype), dim, False))


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    return x if dtype is None else x.to(dtype)


def _softmax_rule(x: TensorMeta, dim: int, over_ranks: Callable[..., Any]) -> list[Strategy] | Steps:
    cut = cutting_axes(x.layout, (dim % max(x.ndim, 1),))
    return Steps(over_ranks) if cut else other_dim_strategies(x, dim)


def _subtract_max(x: Any, dim: int, name: str) -> tuple[Any, Any]:
    """`x` in a wide dtype less its largest value along the dim, which has no gradient; the sum of its exponentials."""
    wide: Any = resolve_partial(x, name).to(accumulation_dtype(x.dtype))
    if wide.numel() == 0:
        return wide, wide.sum(dim, True)
    below = wide - resolve_partial(aten.amax.default(wide.detach(), [dim], True), name)
    return below, resolve_partial(below.exp().sum(dim, True), name)


def _softmax_over_ranks(x: Any, dim: int, half_to_float: bool) -> Any:
    below, total = _subtract_max(x, dim % max(x.ndim, 1), "softmax")
    result = below.exp() / total
    return result if half_to_float else result.to(x.dtype)


def _log_softmax_over_ranks(x: Any, dim: int, half_to_float: bool) -> Any:
    below, total = _subtract_max(x, dim % max(x.ndim, 1), "log_softmax")
    result = below - total.log()
    return result if half_to_float else result.to(x.dtype)
