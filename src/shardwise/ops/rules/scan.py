"""Rules of what needs a dim in its order: running sums, sorting. Any other dim may be sharded.

A sharded dim is gathered, or the tensor is split along another dim, whichever moves less; running sums along a
sharded dim need the totals of the ranks before, and nothing else.

Softmax: over a whole dim each rank by itself; over a sharded dim two small reductions, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten, autograd_on_locals
from shardwise.comm import Comm
from shardwise.geometry import Shard
from shardwise.ops.engine.rules import Strategy, TensorMeta, register_sharding
from shardwise.ops.engine.two_step import cutting_axes, gather_rank_rows, mesh_spec_of, resolve_partial
from shardwise.ops.engine.vary import vary_along
from shardwise.ops.rules.reduction import Args, reduction_strategies
from shardwise.tensor.dispatch import register_handler
from shardwise.tensor.reductions import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


def other_dim_strategies(x: TensorMeta, dim: int, outputs: int = 1, keeps: Sequence[str] = ()) -> list[Strategy]:
    """Strategies of an operator that keeps its shape and needs one dim whole."""
    whole = dim % max(x.ndim, 1)
    found = [s for s in reduction_strategies(x, whole, True, None, keeps=keeps, outputs=outputs)]
    return found if x.ndim else found[:1]


@register_sharding(aten.cumsum.default)
def cumsum(x: TensorMeta, dim: int, *, dtype: Any = None) -> list[Any]:
    exact = dtype is None or dtype == x.dtype
    return other_dim_strategies(x, dim, keeps=("sum", "avg") if exact and x.dtype != torch.bool else ())


@register_sharding(aten.cumprod.default)
def cumprod(x: TensorMeta, dim: int, *, dtype: Any = None) -> list[Any]:
    return other_dim_strategies(x, dim)


@register_sharding(aten.logcumsumexp.default)
def logcumsumexp(x: TensorMeta, dim: int) -> list[Any]:
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


def _is_in_order(x: ShardedTensor, dim: int) -> bool:
    """Whether the ranks hold the dim in one run each, in the order of the axis that cuts it."""
    spec, axes = mesh_spec_of(x), cutting_axes(x, (dim,))
    if spec is None or len(axes) != 1 or not spec.splits_in_mesh_order:
        return False
    cut = spec.placements[axes[0]]
    return isinstance(cut, Shard) and not cut.groups and not cut.block


@register_handler(aten.cumsum.default)
def _cumsum(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    x, dtype = args[0], kwargs.get("dtype")
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % max(x.ndim, 1)
    if not _is_in_order(x, dim):
        return NotImplemented
    x = resolve_partial(x, "cumsum")
    totals = gather_rank_rows(x, (dim,), lambda local: local.sum(dim, True, dtype=dtype), "cumsum")
    with autograd_on_locals():
        before = _sum_before(x, totals, dim)
        return wrap(x.sharding, (x.local_parts[0].cumsum(dim, dtype=dtype) + before,), x.comm)


def _sum_before(x: ShardedTensor, totals: ShardedTensor, dim: int) -> Tensor:
    """The sum of the totals of the ranks before this one, which differs from rank to rank."""
    spec, axis = mesh_spec_of(x), cutting_axes(x, (dim,))[0]
    assert spec is not None
    place = spec.mesh.coordinates(x.comm.rank)[spec.mesh.axes[axis]]
    return vary_along(totals, totals.sharding, (axis,)).narrow(dim, 0, place).sum(dim, True)


@register_sharding([aten._softmax.default, aten._log_softmax.default])
def softmax(x: TensorMeta, dim: int, half_to_float: bool) -> list[Any]:
    return other_dim_strategies(x, dim)


def _subtract_max(x: ShardedTensor, dim: int, name: str) -> tuple[ShardedTensor, ShardedTensor]:
    """`x` less its largest value along the dim, which has no gradient, and the sum of its exponentials."""
    largest = resolve_partial(aten.amax.default(x.detach(), [dim], True), name)
    with autograd_on_locals():
        below: Any = x - largest
        return below, resolve_partial(below.exp().sum(dim, True), name)


def _softmax_over_ranks(args: Args, logarithm: bool, name: str) -> Any:
    """Softmax over a sharded dim, summed in a wide dtype; NotImplemented where the dim is whole."""
    x, dim, half_to_float = args
    dim %= max(x.ndim, 1)
    if not cutting_axes(x, (dim,)):
        return NotImplemented
    with autograd_on_locals():
        wide: Any = resolve_partial(x, name).to(accumulation_dtype(x.dtype))
        below, total = _subtract_max(wide, dim, name)
        result = below - total.log() if logarithm else below.exp() / total
        return result if half_to_float else result.to(x.dtype)


@register_handler(aten._softmax.default)
def _softmax(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    return _softmax_over_ranks(args, False, "softmax")


@register_handler(aten._log_softmax.default)
def _log_softmax(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    return _softmax_over_ranks(args, True, "log_softmax")
