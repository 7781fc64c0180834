"""Rules of reductions: along a sharded dim the local results are still to be combined, along others they are whole.

A sum stays pending as a sum, `all` as a minimum, `any` as a maximum. What does not combine like that (products,
norms, variances) takes two steps, see `settle.py`.
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
from shardwise.ops.engine.dispatcher import LocalView
from shardwise.ops.engine.rules import Strategy, TensorMeta, register_sharding
from shardwise.ops.engine.two_step import all_dims, arguments_by_name, cutting_axes, gather_rank_rows, resolve_partial
from shardwise.tensor.dispatch import UnsupportedOpError, register_handler
from shardwise.tensor.sharded_tensor import ShardedTensor

Dims = int | Sequence[int] | None
Args = tuple[Any, ...]


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
def sum_rule(x: TensorMeta, *, dtype: Any = None) -> list[Any]:
    return reduction_strategies(x, None, False, Partial("sum"), keeps=_linear_kinds(x, dtype))


@register_sharding(aten.nansum.default)
def nansum_rule(x: TensorMeta, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, Partial("sum"))


@register_sharding(aten.sum.dim_IntList)
def sum_dims(x: TensorMeta, dim: Dims, keepdim: bool = False, *, dtype: Any = None) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, Partial("sum"), keeps=_linear_kinds(x, dtype))


def _linear_kinds(x: TensorMeta, dtype: Any) -> tuple[str, ...]:
    """The pending reductions that a sum keeps: those of the dtype in which it adds."""
    exact = dtype is None or dtype == x.dtype or (dtype.is_floating_point and x.dtype.is_floating_point)
    return ("sum", "avg") if exact and x.dtype != torch.bool else ()


@register_sharding(aten.count_nonzero.dim_IntList)
def count_dims(x: TensorMeta, dim: Dims) -> list[Any]:
    return reduction_strategies(x, dim, False, Partial("sum"))


@register_sharding(aten.count_nonzero.default)
def count(x: TensorMeta, dim: int | None = None) -> list[Any]:
    return reduction_strategies(x, dim, False, Partial("sum"))


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


# In two steps: one row for each rank, then the same reduction of the rows


@register_sharding([aten.prod.default])
def prod(x: TensorMeta, *, dtype: Any = None) -> list[Any]:
    return reduction_strategies(x, None, False, None)


@register_sharding(aten.prod.dim_int)
def prod_along(x: TensorMeta, dim: int, keepdim: bool = False, *, dtype: Any = None) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, None)


@register_handler(aten.prod.default)
def _prod(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    def reduce(local: Tensor) -> Tensor:
        return local.prod(**kwargs).reshape((1,) * local.ndim)

    rows = _reduce_in_rows(args[0], None, reduce, "prod")
    return NotImplemented if rows is NotImplemented else aten.prod.default(rows)


@register_handler(aten.prod.dim_int)
def _prod_along(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    dim, keepdim = _dim_and_keepdim(args, kwargs)
    rows = _reduce_in_rows(args[0], dim, lambda t: t.prod(dim, True, dtype=kwargs.get("dtype")), "prod")
    return NotImplemented if rows is NotImplemented else aten.prod.dim_int(rows, dim, keepdim)


@register_sharding(aten.logsumexp.default)
def logsumexp(x: TensorMeta, dim: Dims, keepdim: bool = False) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, None)


@register_handler(aten.logsumexp.default)
def _logsumexp(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    dim, keepdim = _dim_and_keepdim(args, kwargs)
    dims = all_dims(dim, args[0].ndim)
    rows = _reduce_in_rows(args[0], dims, lambda t: torch.logsumexp(t, dims, True), "logsumexp")
    return NotImplemented if rows is NotImplemented else aten.logsumexp.default(rows, dims, keepdim)


@register_sharding(aten.linalg_vector_norm.default)
def vector_norm(
    x: TensorMeta, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, None)


@register_handler(aten.linalg_vector_norm.default)
def _vector_norm(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    """The norm of the ranks' norms; of counts of non-zero elements, their sum."""
    given = arguments_by_name(aten.linalg_vector_norm.default, args, kwargs)
    x, order, keepdim, dtype = given["self"], given["ord"], given["keepdim"], given["dtype"]
    dims = all_dims(given["dim"], x.ndim)

    def reduce(local: Tensor) -> Tensor:
        empty = local.numel() == 0 and (order < 0 or order == math.inf)
        norm = torch.linalg.vector_norm
        return (
            _constant_rows(local, dims, 0.0 if order > 0 else math.inf)
            if empty
            else norm(local, order, dims, True, dtype=dtype)
        )

    rows = _reduce_in_rows(x, dims, reduce, "vector_norm")
    if rows is NotImplemented:
        return rows
    if order == 0:
        return aten.sum.dim_IntList(rows, dims, keepdim)
    return aten.linalg_vector_norm.default(rows, order, dims, keepdim)


@register_handler(torch.norm, Tensor.norm)
def _norm_function(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
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


@register_handler(aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def _norm_operator(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    given = arguments_by_name(aten.norm.ScalarOpt_dim, args, kwargs)
    order = 2 if given["p"] is None else given["p"]
    return aten.linalg_vector_norm.default(given["self"], order, given["dim"], bool(given["keepdim"]))


def _constant_rows(local: Tensor, dims: tuple[int, ...], value: float) -> Tensor:
    """Rows of one value, for a rank that has nothing along the dims."""
    kind: torch.dtype = local.dtype.to_real()
    shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
    return torch.full(shape, value, dtype=kind, device=local.device) + local.sum(dims, True).abs().to(kind)


def _dim_and_keepdim(args: Args, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return dim, args[2] if len(args) > 2 else kwargs.get("keepdim", False)


def _reduce_in_rows(x: Any, dim: Dims, reduce: Callable[[Tensor], Tensor], name: str) -> Any:
    """One row for each rank along the dims, or NotImplemented where none of the dims is cut."""
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    dims = all_dims(dim, x.ndim)
    return gather_rank_rows(resolve_partial(x, name), dims, reduce, name) if cutting_axes(x, dims) else NotImplemented


@register_handler(aten.dist.default)
def _dist(types: Sequence[type], args: Args, kwargs: dict[str, Any], comm: Comm) -> Any:
    given = arguments_by_name(aten.dist.default, args, kwargs)
    return aten.linalg_vector_norm.default(aten.sub.Tensor(given["self"], given["other"]), given["p"])


def _trace_part(view: LocalView, x: Tensor) -> Tensor:
    """The part of the diagonal that crosses this rank's block."""
    return x.diagonal(view.interval(0, 0)[0] - view.interval(0, 1)[0]).sum()


@register_sharding(aten.trace.default)
def trace(x: TensorMeta) -> list[Any]:
    return reduction_strategies(x, None, False, Partial("sum"), keeps=_linear_kinds(x, None), local=_trace_part)
