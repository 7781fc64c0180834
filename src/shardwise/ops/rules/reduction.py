"""Rules of reductions: along a sharded dim the local results are still to be combined, along others they are whole.

A sum stays pending as a sum, `all` as a minimum, `any` as a maximum. What does not combine like that (products,
norms, variances) takes two steps, see `two_step.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.comm import Comm
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.engine.local_view import LocalView
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta, ignores_lengths
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import all_dims, cutting_axes, gather_rank_rows, is_in_one_run, resolve_partial
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.sharded_tensor import ShardedTensor

Dims = int | Sequence[int] | None


def reduction_strategies(
    x: TensorMeta,
    dim: Dims,
    keepdim: bool,
    over: Placement | None,
    *,
    keeps: Sequence[str] = (),
    outputs: int = 1,
    local: Callable[..., Any] | None = None,
) -> list[Strategy]:
    """Strategies of a reduction.

    `over` is what the result is along an axis that cuts a reduced dim (None: not possible), `local` computes it there.
    `keeps` are the pending reductions that stay pending.
    """
    dims = all_dims(dim, x.ndim)
    found = [Strategy((Replicate(),) * outputs, (Replicate(),))]
    for d in range(x.ndim):
        if d not in dims:
            left = d if keepdim else d - sum(r < d for r in dims)
            found.append(Strategy((Shard(left),) * outputs, (Shard(d),)))
        elif over is not None:
            found.append(Strategy((over,) * outputs, (Shard(d),), local))
    pending = {p for p in x.placements if isinstance(p, Partial) and p.op in keeps}
    return found + [Strategy((p,) * outputs, (p,)) for p in sorted(pending, key=repr)]


@register_sharding(aten.sum.default)
@ignores_lengths
def sum_rule(x: TensorMeta, *, dtype: Any = None) -> list[Any]:
    return reduction_strategies(x, None, False, Partial("sum"), keeps=_linear_kinds(x, dtype))


@register_sharding(aten.nansum.default)
def nansum_rule(x: TensorMeta, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, Partial("sum"))


@register_sharding(aten.sum.dim_IntList)
@ignores_lengths
def sum_dims(x: TensorMeta, dim: Dims, keepdim: bool = False, *, dtype: Any = None) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, Partial("sum"), keeps=_linear_kinds(x, dtype))


def _linear_kinds(x: TensorMeta, dtype: Any) -> tuple[str, ...]:
    """The pending reductions that a sum keeps: those of the dtype in which it adds."""
    exact = dtype is None or dtype == x.dtype or (dtype.is_floating_point and x.dtype.is_floating_point)
    return ("sum", "avg") if exact and x.dtype != torch.bool else ()


@register_sharding(aten.hash_tensor.default)
def hash_dims(x: TensorMeta, dim: Dims = None, *, keepdim: bool = False, mode: int = 0) -> list[Any]:
    """The hash of elements is not combined from hashes of parts here: the dims it runs over are whole."""
    return reduction_strategies(x, dim, keepdim, None)


@register_sharding(aten.count_nonzero.dim_IntList)
def count_dims(x: TensorMeta, dim: Dims) -> list[Any]:
    return reduction_strategies(x, dim, False, Partial("sum"))


@register_sharding(aten.count_nonzero.default)
def count(x: TensorMeta, dim: int | None = None) -> list[Any]:
    return reduction_strategies(x, dim, False, Partial("sum"))


@register_sharding(aten.histc.default)
def histc(x: TensorMeta, bins: int = 100, min: complex = 0, max: complex = 0) -> list[Any]:
    """Counts of each rank's elements add up, if the bins do not depend on the values."""
    return reduction_strategies(x, None, False, Partial("sum") if min != max else None)


def _local_mean_part(
    view: LocalView, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """This rank's share of a mean: its sum over the global number of elements."""
    shape = view.shapes[0]
    dims = all_dims(dim, len(shape))
    return x.sum(dims, keepdim, dtype=dtype) / math.prod(shape[d] for d in dims)


def _check_mean(x: TensorMeta, dtype: Any) -> None:
    kind = x.dtype if dtype is None else dtype
    if not (kind.is_floating_point or kind.is_complex):
        raise RuntimeError(f"mean() of {kind} has no such result; pass dtype=torch.float32 or convert the tensor first")


@register_sharding(aten.mean.default)
def mean(x: TensorMeta, *, dtype: Any = None) -> list[Any]:
    _check_mean(x, dtype)
    return reduction_strategies(x, None, False, Partial("sum"), keeps=_linear_kinds(x, dtype), local=_local_mean_part)


@register_sharding(aten.mean.dim)
def mean_dims(x: TensorMeta, dim: Dims, keepdim: bool = False, *, dtype: Any = None) -> list[Any]:
    _check_mean(x, dtype)
    return reduction_strategies(x, dim, keepdim, Partial("sum"), keeps=_linear_kinds(x, dtype), local=_local_mean_part)


@register_sharding(aten.all.default)
def all_of(x: TensorMeta) -> list[Any]:
    return reduction_strategies(x, None, False, Partial("min"))


@register_sharding([aten.all.dim, aten.all.dims])
def all_along(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, Partial("min"))


@register_sharding(aten.any.default)
def any_of(x: TensorMeta) -> list[Any]:
    return reduction_strategies(x, None, False, Partial("max"))


@register_sharding([aten.any.dim, aten.any.dims])
def any_along(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, Partial("max"))


register_sharding(aten._is_all_true.default, Steps(aten.all.default))
register_sharding(aten._is_any_true.default, Steps(aten.any.default))


# In two steps: one row for each rank, then the same reduction of the rows


def two_step_rule(x: TensorMeta, dim: Dims, keepdim: bool, over_ranks: Callable[..., Any]) -> list[Strategy] | Steps:
    """Each rank by itself along dims that are whole on every rank; in steps along a dim that is cut."""
    cut = cutting_axes(x.layout, all_dims(dim, x.ndim))
    return Steps(over_ranks) if cut else reduction_strategies(x, dim, keepdim, None)


def _gather_rows(x: ShardedTensor, dims: tuple[int, ...], reduce: Callable[[Tensor], Tensor], name: str) -> Any:
    """One row for each rank along the dims, on every rank."""
    return gather_rank_rows(resolve_partial(x, name), dims, reduce, name)


@register_sharding(aten.prod.default)
def prod(x: TensorMeta, *, dtype: Any = None) -> list[Strategy] | Steps:
    return two_step_rule(x, None, False, _prod_over_ranks)


def _prod_over_ranks(x: ShardedTensor, *, dtype: Any = None) -> Any:
    dims = all_dims(None, x.ndim)
    rows = _gather_rows(x, dims, lambda local: local.prod(dtype=dtype).reshape((1,) * local.ndim), "prod")
    return aten.prod.default(rows)


@register_sharding(aten.prod.dim_int)
def prod_along(x: TensorMeta, dim: int, keepdim: bool = False, *, dtype: Any = None) -> list[Strategy] | Steps:
    return two_step_rule(x, dim, keepdim, _prod_along_ranks)


def _prod_along_ranks(x: ShardedTensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    rows = _gather_rows(x, all_dims(dim, x.ndim), lambda local: local.prod(dim, True, dtype=dtype), "prod")
    return aten.prod.dim_int(rows, dim, keepdim)


@register_sharding(aten.logsumexp.default)
def logsumexp(x: TensorMeta, dim: Dims, keepdim: bool = False) -> list[Strategy] | Steps:
    return two_step_rule(x, dim, keepdim, _logsumexp_over_ranks)


def _logsumexp_over_ranks(x: ShardedTensor, dim: Dims, keepdim: bool = False) -> Any:
    dims = all_dims(dim, x.ndim)
    rows = _gather_rows(x, dims, lambda local: _local_logsumexp(local, dims), "logsumexp")
    return aten.logsumexp.default(rows, dims, keepdim)


def _local_logsumexp(local: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Of nothing it is -inf; torch's own tangent of that is not a number."""
    return torch.logsumexp(local, dims, True) if local.numel() else local.sum(dims, True) - torch.inf


@register_sharding(aten.linalg_vector_norm.default)
def vector_norm(
    x: TensorMeta, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> list[Strategy] | Steps:
    if ord < 0 or math.isinf(ord):
        check_not_empty(x, dim, f"norm of order {ord:g}")
    return two_step_rule(x, dim, keepdim, _vector_norm_over_ranks)


def check_not_empty(x: TensorMeta, dim: Dims, name: str) -> None:
    """Raise if a dim that is reduced has no elements, for reductions that have no value for none."""
    for reduced in all_dims(dim, x.ndim):
        if x.shape[reduced] == 0:
            raise IndexError(f"{name} of a tensor of shape {list(x.shape)}: dim {reduced} has no elements")


def _vector_norm_over_ranks(
    x: ShardedTensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """The norm of the ranks' norms; of counts of non-zero elements, their sum; of infinite order, an extreme."""
    dims = all_dims(dim, x.ndim)
    if math.isinf(ord) and x.numel():
        return _extreme_norm(x, ord, dims, keepdim, dtype)

    def reduce(local: Tensor) -> Tensor:
        if local.numel() == 0 and (ord < 0 or ord == math.inf):
            return _constant_rows(local, dims, 0.0 if ord > 0 else math.inf)
        norm: Tensor = torch.linalg.vector_norm(local, ord, dims, True, dtype=dtype)
        return norm

    rows = _gather_rows(x, dims, reduce, "vector_norm")
    if ord == 0:
        return aten.sum.dim_IntList(rows, dims, keepdim)
    return aten.linalg_vector_norm.default(rows, ord, dims, keepdim)


def _extreme_norm(x: Any, ord: float, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Any:
    """The largest or smallest magnitude: elements that tie have equal shares of the gradient, on whatever ranks."""
    size = resolve_partial(x if dtype is None else x.to(dtype), "vector_norm").abs()
    return aten.amax.default(size, dims, keepdim) if ord > 0 else aten.amin.default(size, dims, keepdim)


def _constant_rows(local: Tensor, dims: tuple[int, ...], value: float) -> Tensor:
    """Rows of one value, for a rank that has nothing along the dims."""
    kind: torch.dtype = local.dtype.to_real()
    shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
    return torch.full(shape, value, dtype=kind, device=local.device) + local.sum(dims, True).abs().to(kind)


@register_function(torch.norm, Tensor.norm)
def _norm_function(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """torch.norm, which asks wrappers for their memory format and would take another path."""
    return _norm_of(*args, **kwargs)


def _norm_of(
    x: Any, p: Any = "fro", dim: Dims = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    if p == "nuc" or out is not None:
        raise UnsupportedOpError(
            f"torch.norm with p={p!r} and {'an' if out is not None else 'no'} out tensor: of a ShardedTensor it takes "
            "a number or 'fro' for p, and no out"
        )
    return torch.linalg.vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


def _norm_by_vector_norm(x: Any, p: Any = 2, dim: Dims = None, keepdim: bool = False) -> Any:
    return aten.linalg_vector_norm.default(x, 2 if p is None else p, dim, keepdim)


def _dist_by_norm(x: Any, other: Any, p: float = 2) -> Any:
    return aten.linalg_vector_norm.default(aten.sub.Tensor(x, other), p)


register_sharding([aten.norm.Scalar, aten.norm.ScalarOpt_dim], Steps(_norm_by_vector_norm))
register_sharding(aten.dist.default, Steps(_dist_by_norm))


def _trace_part(view: LocalView, x: Tensor) -> Tensor:
    """The part of the diagonal that crosses this rank's block."""
    return x.diagonal(view.interval(0, 0)[0] - view.interval(0, 1)[0]).sum()


@register_sharding(aten.trace.default)
def trace(x: TensorMeta) -> list[Any]:
    over = Partial("sum") if all(is_in_one_run(x.layout, dim) for dim in range(x.ndim)) else None
    return reduction_strategies(x, None, False, over, keeps=_linear_kinds(x, None), local=_trace_part)
