"""Rules of reductions: along a sharded dim the local results are still to be combined, along others they are whole.

A sum stays pending as a sum, `all` as a minimum, `any` as a maximum. What does not combine like that (products,
norms, variances) takes two steps: `split_reduction_rule`.

Largest and smallest values, and where they are.

Over whole dims each rank has its answer. Over a sharded dim:

1. the ranks' extremes are combined: a pending maximum where no gradient is needed, else at once;
2. where positions are asked, the ranks that hold the extreme offer theirs and the first one wins;
3. gradients go where the dense operator sends them: to the chosen position, or in equal parts to all that are equal.

Rules of what needs a dim in its order: running sums, sorting. Any other dim may be sharded.

A sharded dim is gathered, or the tensor is split along another dim, whichever moves less; running sums along a
sharded dim need the totals of the ranks before, and nothing else.

Softmax over a whole dim is computed by each rank alone; over a sharded dim it takes two small reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import TORCH_RELEASE, aten, forward_ad, is_dual_level
from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta, composite_of, ignores_lengths, takes_copies
from shardwise.ops.unshard import vary_along
from shardwise.ops.views import (
    LocalView,
    all_dims,
    cutting_axes,
    gather_rank_rows,
    global_rows,
    is_in_one_run,
    mesh_spec_of,
    mesh_view,
    put_on_tape,
    replace_placements,
    resolve_partial,
)
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.execute import reduction_identity
from shardwise.tensor.move import is_differentiated, split_dual
from shardwise.tensor.parts import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

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
@takes_copies
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
@takes_copies
def mean_dims(x: TensorMeta, dim: Dims, keepdim: bool = False, *, dtype: Any = None) -> list[Any]:
    _check_mean(x, dtype)
    return reduction_strategies(x, dim, keepdim, Partial("sum"), keeps=_linear_kinds(x, dtype), local=_local_mean_part)


@register_sharding(aten.all.default)
def all_of(x: TensorMeta) -> list[Any]:
    return reduction_strategies(x, None, False, Partial("min"))


@register_sharding([aten.all.dim, aten.all.dims])
def all_along(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Any]:
    return _keep_dims(x) if dim == [] else reduction_strategies(x, dim, keepdim, Partial("min"))


@register_sharding(aten.any.default)
def any_of(x: TensorMeta) -> list[Any]:
    return reduction_strategies(x, None, False, Partial("max"))


@register_sharding([aten.any.dim, aten.any.dims])
def any_along(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Any]:
    return _keep_dims(x) if dim == [] else reduction_strategies(x, dim, keepdim, Partial("max"))


def _keep_dims(x: TensorMeta) -> list[Any]:
    """Of all and any alone an empty list of dims means none of them: each element by itself."""
    kept: list[Placement] = [Replicate(), *map(Shard, range(x.ndim))]
    return [Strategy((p,), (p,)) for p in kept]


register_sharding(aten._is_all_true.default, Steps(aten.all.default))
register_sharding(aten._is_any_true.default, Steps(aten.any.default))


# In two steps: one row for each rank, then the same reduction of the rows


def split_reduction_rule(
    x: TensorMeta, dim: Dims, keepdim: bool, over_ranks: Callable[..., Any]
) -> list[Strategy] | Steps:
    """Each rank by itself along dims that are whole on every rank; in steps along a dim that is cut."""
    cut = cutting_axes(x.layout, all_dims(dim, x.ndim))
    return Steps(over_ranks) if cut else reduction_strategies(x, dim, keepdim, None)


def _gather_rows(x: ShardedTensor, dims: tuple[int, ...], reduce: Callable[[Tensor], Tensor], name: str) -> Any:
    """One row for each rank along the dims, on every rank."""
    return gather_rank_rows(resolve_partial(x, name), dims, reduce, name)


def _keep_on_tape(op: Any) -> Callable[..., Any]:
    """The local function of an operator whose gradient is on the tape for some values and not for others in torch."""

    def local(view: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return put_on_tape(op(x, *args, **kwargs), x)

    return local


def _prod_rule(op: Any, x: TensorMeta, dim: Dims, keepdim: bool, over_ranks: Any) -> list[Strategy] | Steps:
    found = split_reduction_rule(x, dim, keepdim, over_ranks)
    if isinstance(found, Steps) or not x.requires_grad:
        return found
    return [replace(s, local=_keep_on_tape(op)) for s in found]


@register_sharding(aten.prod.default)
def prod(x: TensorMeta, *, dtype: Any = None) -> list[Strategy] | Steps:
    return _prod_rule(aten.prod.default, x, None, False, _prod_over_ranks)


def _prod_over_ranks(x: ShardedTensor, *, dtype: Any = None) -> Any:
    dims = all_dims(None, x.ndim)

    def reduce(local: Tensor) -> Tensor:
        return put_on_tape(local.prod(dtype=dtype), local).reshape((1,) * local.ndim)

    return _multiply_rows(_gather_rows(x, dims, reduce, "prod"), dims).reshape(())


def _multiply_rows(rows: Any, dims: Sequence[int]) -> Any:
    """The product along some dims, each left with length 1; gradients do not divide by rows, which may be infinite."""
    for dim in dims:
        while (length := rows.shape[dim]) > 1:
            half = length // 2
            product = rows.narrow(dim, 0, half) * rows.narrow(dim, half, half)
            rows = torch.cat([product, rows.narrow(dim, 2 * half, 1)], dim) if length % 2 else product
    return rows


@register_sharding(aten.prod.dim_int)
def prod_along(x: TensorMeta, dim: int, keepdim: bool = False, *, dtype: Any = None) -> list[Strategy] | Steps:
    return _prod_rule(aten.prod.dim_int, x, dim, keepdim, _prod_along_ranks)


def _prod_along_ranks(x: ShardedTensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    def reduce(local: Tensor) -> Tensor:
        return put_on_tape(local.prod(dim, True, dtype=dtype), local)

    dims = all_dims(dim, x.ndim)
    found = _multiply_rows(_gather_rows(x, dims, reduce, "prod"), dims)
    return found if keepdim else found.sum(dims, dtype=found.dtype)


@register_sharding(aten.logsumexp.default)
def logsumexp(x: TensorMeta, dim: Dims, keepdim: bool = False) -> list[Strategy] | Steps:
    return split_reduction_rule(x, dim, keepdim, _logsumexp_over_ranks)


def _logsumexp_over_ranks(x: ShardedTensor, dim: Dims, keepdim: bool = False) -> Any:
    """The sum of exponentials less the largest value; where that is infinite nothing is subtracted, as torch does."""
    dims = all_dims(dim, x.ndim)
    kind = x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype()
    wide: Any = resolve_partial(x, "logsumexp").to(accumulation_dtype(kind))
    if x.numel() == 0:
        return (wide.sum(dims, keepdim) - math.inf).to(kind)
    largest = resolve_partial(
        aten.amax.default(wide.detach().real if kind.is_complex else wide.detach(), dims, True), "logsumexp"
    )
    largest = aten.masked_fill.Scalar(largest, largest.isinf(), 0.0)
    total = resolve_partial((wide - largest).exp().sum(dims, True), "logsumexp")
    result = (total.log() + largest).to(kind)
    return result if keepdim or not x.ndim else aten.squeeze.dims(result, dims)


@register_sharding(aten.linalg_vector_norm.default)
def vector_norm(
    x: TensorMeta, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> list[Strategy] | Steps:
    if ord < 0 or math.isinf(ord):
        check_not_empty(x, dim, f"norm of order {ord:g}")
    found = split_reduction_rule(x, dim, keepdim, _vector_norm_over_ranks)
    if isinstance(found, Steps):
        return found
    counted = any(d < 0 for d in (dim if isinstance(dim, Sequence) else (dim or 0,)))
    local = _norm_along if counted and TORCH_RELEASE < (2, 13) else None
    return [replace(s, local=local, local_if_empty=_norm_along) for s in found]


def _norm_along(
    view: Any, x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """Torch takes negative dims of tensors without elements for the last one; on `meta`, 2.12 keeps such dims."""
    return aten.linalg_vector_norm.default(x, ord, all_dims(dim, x.ndim), keepdim, dtype=dtype)  # type: ignore[no-any-return]


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
    if ord > 0 and is_differentiated(x):
        return _norm_by_sums(x, ord, dims, keepdim, dtype)

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
    op = "max" if ord > 0 else "min"
    if is_differentiated(size):
        return _extreme_with_gradient(op, size, dims, keepdim, nan_counts=True)
    return _reduce_extreme(size, dims, keepdim, op)


def _norm_by_sums(x: Any, ord: float, dims: tuple[int, ...], keepdim: bool, dtype: Any) -> Any:
    """The norm as a root of a sum of powers: its gradient is that of the whole norm, also beside infinities and zeros.

    That of a norm of norms is not a number for all that is on the rank of an infinite element. Even powers need no
    magnitude, whose gradient at zero is zero: so gradients of gradients are those of the whole norm, too.
    """
    kind = x.dtype if dtype is None else dtype
    held = resolve_partial(x, "vector_norm").to(accumulation_dtype(kind))
    size = held if ord % 2 == 0 and not kind.is_complex else held.abs()
    powers = size if ord == 1 else size**ord if ord > 1 else _power_but_of_zero(size, ord)
    total = resolve_partial(aten.sum.dim_IntList(powers, dims, keepdim), "vector_norm")
    return (total if ord == 1 else _power_but_of_zero(total, 1 / ord)).to(kind.to_real())


def _power_but_of_zero(x: Any, exponent: float) -> Any:
    """A power whose gradient is 0 where the base is 0."""
    zero = x == 0
    return aten.masked_fill.Scalar(aten.masked_fill.Scalar(x, zero, 1.0) ** exponent, zero, 0.0)


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
    if out is not None:
        raise UnsupportedOpError(
            "torch.norm of a ShardedTensor with an out tensor: call it without, then out.copy_(...)"
        )
    if p == "nuc":
        pair = (-2, -1) if dim is None else dim
        return torch.linalg.matrix_norm(x, "nuc", pair, keepdim, dtype=dtype)
    return torch.linalg.vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


def _norm_by_vector_norm(x: Any, p: Any = 2, dim: Dims = None, keepdim: bool = False) -> Any:
    return aten.linalg_vector_norm.default(x, 2 if p is None else p, dim, keepdim)


def _dist_by_norm(x: Any, other: Any, p: float = 2) -> Any:
    return aten.linalg_vector_norm.default(aten.sub.Tensor(x, other), p)


register_sharding([aten.norm.Scalar, aten.norm.ScalarOpt_dim], Steps(_norm_by_vector_norm))
register_sharding(aten.dist.default, Steps(_dist_by_norm))


def _trace_part(view: LocalView, x: Tensor) -> Tensor:
    """The part of the diagonal that crosses this rank's block.

    Gradients of torch's trace are not differentiated again without values, as ranks that hold nothing do.
    """
    return x.diagonal(view.interval(0, 0)[0] - view.interval(0, 1)[0]).sum()


@register_sharding(aten.trace.default)
def trace(x: TensorMeta) -> list[Any]:
    if x.ndim != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {x.ndim}")
    over = Partial("sum") if all(is_in_one_run(x.layout, dim) for dim in range(x.ndim)) else None
    found = reduction_strategies(x, None, False, over, keeps=_linear_kinds(x, None))
    return [replace(s, local=_trace_part) for s in found]


NO_POSITION = torch.iinfo(torch.int64).max


def local_extreme(x: Tensor, dims: tuple[int, ...], keepdim: bool, op: str) -> Tensor:
    """The extreme of a rank's part; what changes nothing where it has none."""
    if x.numel() or all(x.shape[d] for d in dims):
        return x.amax(dims, keepdim) if op == "max" else x.amin(dims, keepdim)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return torch.full(shape, reduction_identity(op, x.dtype), dtype=x.dtype, device=x.device)


def _amax_part(view: LocalView, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return local_extreme(x, all_dims(dim, x.ndim), keepdim, "max")


def _amin_part(view: LocalView, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return local_extreme(x, all_dims(dim, x.ndim), keepdim, "min")


def _extreme_rule(
    x: TensorMeta, dim: Dims, keepdim: bool, op: str, local: Any, nan_counts: bool = False
) -> list[Strategy] | Steps:
    """Pending where it is not differentiated: gradients need the extreme of all ranks."""
    if x.dtype.is_complex:
        raise NotImplementedError(f"complex numbers ({x.dtype}) have no {op}imum; take that of x.abs() or x.real")
    check_not_empty(x, dim, f"{op}imum")
    pending = any(isinstance(p, Partial) for p in x.placements)
    if x.requires_grad and (pending or cutting_axes(x.layout, all_dims(dim, x.ndim))):
        return Steps(partial(_extreme_with_gradient, op, nan_counts=nan_counts))
    return reduction_strategies(x, dim, keepdim, Partial(op), keeps=(op,), local=local)


@register_sharding(aten.amax.default)
def amax(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Strategy] | Steps:
    return _extreme_rule(x, dim, keepdim, "max", _amax_part)


@register_sharding(aten.amin.default)
def amin(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Strategy] | Steps:
    return _extreme_rule(x, dim, keepdim, "min", _amin_part)


@register_sharding(aten.max.default)
def max_of_all(x: TensorMeta) -> list[Strategy] | Steps:
    return _extreme_rule(x, None, False, "max", _amax_part, nan_counts=True)


@register_sharding(aten.min.default)
def min_of_all(x: TensorMeta) -> list[Strategy] | Steps:
    return _extreme_rule(x, None, False, "min", _amin_part, nan_counts=True)


@register_sharding([aten.median.dim, aten.nanmedian.dim, aten.mode.default])
def median_along_dim(x: TensorMeta, dim: int = -1, keepdim: bool = False) -> list[Strategy]:
    check_not_empty(x, dim, "median or mode")
    return reduction_strategies(x, dim, keepdim, None, outputs=2)


@register_sharding(aten.max.dim)
def max_along_dim(x: TensorMeta, dim: int, keepdim: bool = False) -> list[Strategy] | Steps:
    return _with_position_rule(x, dim, keepdim, "max")


@register_sharding(aten.min.dim)
def min_along_dim(x: TensorMeta, dim: int, keepdim: bool = False) -> list[Strategy] | Steps:
    return _with_position_rule(x, dim, keepdim, "min")


def _with_position_rule(x: TensorMeta, dim: int, keepdim: bool, op: str) -> list[Strategy] | Steps:
    check_not_empty(x, dim, f"{op}imum")
    if cutting_axes(x.layout, all_dims(dim, x.ndim)):
        return Steps(partial(_value_and_position, op))
    return reduction_strategies(x, dim, keepdim, None, outputs=2)


@register_sharding(aten.kthvalue.default)
def kthvalue(x: TensorMeta, k: int, dim: int = -1, keepdim: bool = False) -> list[Any]:
    check_not_empty(x, dim, "kthvalue")
    return reduction_strategies(x, dim, keepdim, None, outputs=2)


@register_sharding([aten.median.default, aten.nanmedian.default])
def minmax_of_all(x: TensorMeta) -> list[Any]:
    return reduction_strategies(x, None, False, None)


@register_sharding(aten.argmax.default)
def argmax(x: TensorMeta, dim: int | None = None, keepdim: bool = False) -> list[Strategy] | Steps:
    return _position_rule(x, dim, keepdim, "max")


@register_sharding(aten.argmin.default)
def argmin(x: TensorMeta, dim: int | None = None, keepdim: bool = False) -> list[Strategy] | Steps:
    return _position_rule(x, dim, keepdim, "min")


def _position_rule(x: TensorMeta, dim: int | None, keepdim: bool, op: str) -> list[Strategy] | Steps:
    if cutting_axes(x.layout, all_dims(dim, x.ndim)) and x.numel():
        return Steps(partial(_position, op))
    return reduction_strategies(x, dim, keepdim, None)


def _min_and_max(x: ShardedTensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    dims = all_dims(dim, x.ndim)
    return aten.amin.default(x, dims, keepdim), aten.amax.default(x, dims, keepdim)


register_sharding(aten.aminmax.default, Steps(_min_and_max))


# Gradients of values over sharded dims


class _ShareGradient(torch.autograd.Function):
    """Returns `value`; its gradient goes to `x` in the passed shares, which is local.

    A gradient that is differentiated again is a product of sharded tensors: what flows back to the gradient of the
    value is summed over the ranks that have shares.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, share: Tensor, wraps: tuple[Any, Any]) -> Tensor:
        ctx.save_for_backward(share)
        ctx.wraps = wraps
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        share = ctx.saved_tensors[0]
        if torch.is_grad_enabled():
            of_value, of_x = ctx.wraps
            return aten.mul.Tensor(of_value(grads[0]), of_x(share)).local_parts[0], None, None, None
        return grads[0] * share, None, None, None


def _wrap_local(sharding: Layout, comm: Comm, local: Tensor) -> ShardedTensor:
    return wrap(sharding, (local,), comm)


def _attach_gradient(
    x: ShardedTensor, value: ShardedTensor, share: Tensor, dims: tuple[int, ...], name: str
) -> ShardedTensor:
    """The value, which is alike on the ranks that share it, on the tape of `x`; in forward mode with its tangent."""
    given, tangent = split_dual(x.local_parts[0]) if is_dual_level() else (x.local_parts[0], None)
    wraps = tuple(partial(_wrap_local, t.sharding, x.comm) for t in (value, x))
    local: Tensor = _ShareGradient.apply(given, value.local_parts[0], share, wraps)  # type: ignore[no-untyped-call]  # untyped in torch
    if tangent is not None:
        shared = aten.sum.dim_IntList(wrap(x.sharding, (tangent * share,), x.comm), dims, True)
        local = forward_ad.make_dual(local, resolve_partial(shared, name).local_parts[0])
    return wrap(value.sharding, (local,), x.comm)


def _equals_best(own: Tensor, best: Tensor) -> Tensor:
    """Where a rank's values are the best ones; not-a-number is the best if there is one."""
    return (own == best) | ((own != own) & (best != best))


def _squeeze_dims(tensor: ShardedTensor, dims: Sequence[int], keepdim: bool) -> ShardedTensor:
    """The tensor without dims of length 1, unless they are kept; no axis cuts them."""
    spec = mesh_spec_of(tensor)
    if keepdim or spec is None:
        return tensor
    shape = [n for d, n in enumerate(tensor.shape) if d not in dims]
    left = [
        p.along(p.dim - sum(d < p.dim for d in dims)) if isinstance(p, Shard) else p
        for p in (Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in spec.placements)
    ]
    local = tensor.local_parts[0].squeeze(tuple(dims)) if dims else tensor.local_parts[0]
    return wrap(MeshSpec(spec.mesh, left, spec.order).layout(shape), (local,), tensor.comm)


def _reduce_extreme(x: Any, dims: tuple[int, ...], keepdim: bool, op: str) -> Any:
    return (aten.amax if op == "max" else aten.amin).default(x, dims, keepdim)


def _extreme_with_gradient(
    op: str, x: Any, dim: Dims = None, keepdim: bool = False, *, nan_counts: bool = False
) -> Any:
    """The extreme of a tensor that needs gradients; those of equal elements get equal shares.

    `nan_counts`: elements that are not a number are equal, as for `max()` and norms; for `amax` they are not.
    """
    dims, name = all_dims(dim, x.ndim), f"a{op}"
    x = resolve_partial(x, name)
    if not cutting_axes(x.sharding, dims):
        whole = aten.max if op == "max" else aten.min
        return whole.default(x) if nan_counts else _reduce_extreme(x, dims, keepdim, op)
    plain = x.detach()
    value = resolve_partial(_reduce_extreme(plain, dims, True, op), name)
    own, best = plain.local_parts[0], value.local_parts[0]
    equal = _equals_best(own, best) if nan_counts else own == best
    alike = resolve_partial(aten.sum.dim_IntList(wrap(x.sharding, (equal,), x.comm), dims, True), name)
    share = equal.to(x.dtype) / alike.local_parts[0]
    return _squeeze_dims(_attach_gradient(x, value, share, dims, name), dims, keepdim)


# Positions over sharded dims


def _dim_rows(x: ShardedTensor, dim: int) -> Tensor:
    rows = global_rows(x.sharding, x.comm.rank, dim, x.device)
    return rows.reshape([-1 if d == dim else 1 for d in range(x.ndim)])


def _flat_positions(x: ShardedTensor, dims: Sequence[int]) -> Tensor:
    """The number of each local element among the elements along `dims`, counted in the whole tensor."""
    total = torch.zeros((1,) * x.ndim, dtype=torch.int64, device=x.device)
    for dim in dims:
        total = total * x.shape[dim] + _dim_rows(x, dim)
    return total


def _find_extremes(x: ShardedTensor, dims: tuple[int, ...], op: str, name: str) -> tuple[ShardedTensor, ShardedTensor]:
    """The extremes and the positions of the first of them, dims kept, replicated along the axes that cut the dims."""
    plain, axes = x.detach(), cutting_axes(x.sharding, dims)
    value = resolve_partial(_reduce_extreme(plain, dims, True, op), name)
    spec = mesh_spec_of(value)
    assert spec is not None
    own, best = plain.local_parts[0], value.local_parts[0]
    offers = torch.where(_equals_best(own, best), _flat_positions(x, dims), NO_POSITION)
    first = local_extreme(offers, dims, True, "min")
    pending = replace_placements(spec, axes, Partial("min")).layout(tuple(value.shape))
    return value, resolve_partial(wrap(pending, (first,), x.comm), name)


def _value_and_position(op: str, x: Any, dim: int, keepdim: bool = False) -> tuple[ShardedTensor, ShardedTensor]:
    dims, x = all_dims(dim, x.ndim), resolve_partial(x, op)
    value, where = _find_extremes(x, dims, op, op)
    if is_differentiated(x):
        chosen = (_dim_rows(x, dims[0]) == where.local_parts[0]).to(x.dtype)
        value = _attach_gradient(x, value, chosen, dims, op)
    return _squeeze_dims(value, dims, keepdim), _squeeze_dims(where, dims, keepdim)


def _position(op: str, x: Any, dim: int | None = None, keepdim: bool = False) -> ShardedTensor:
    dims, name = all_dims(dim, x.ndim), f"arg{op}"
    return _squeeze_dims(_find_extremes(resolve_partial(x, name), dims, op, name)[1], dims, keepdim)


# Values between others


def _quantile_rule(compute: Any) -> Any:
    """Composite in torch, with plain numbers in between: so it has a rule of its own. The dim is whole."""

    def rule(
        x: TensorMeta, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> list[Strategy]:
        given = (Replicate(),) if isinstance(q, TensorMeta) else ()
        found = [Strategy((Replicate(),), (Replicate(), *given))]
        if dim is None or not x.ndim:
            return found
        at, first = dim % x.ndim, int(isinstance(q, TensorMeta) and q.ndim == 1)
        local = partial(_quantile_of_part, compute, x.numel())
        for d in (d for d in range(x.ndim) if d != at):
            cut = Shard(first + d - (d > at and not keepdim))
            found.append(Strategy((cut,), (Shard(d), *given), local_if_empty=local))
        return found

    return rule


def _quantile_of_part(
    compute: Any, numel: int, view: LocalView, x: Tensor, q: Any, dim: int, keepdim: bool = False, **named: Any
) -> Any:
    """Torch refuses a tensor without elements: also where only a rank has none."""
    if x.numel() or not numel:
        return compute(x, q, dim, keepdim, **named)
    filled = compute(x.new_zeros([max(1, n) for n in x.shape]), q, dim, keepdim, **named)
    lost, at = next(d for d, n in enumerate(x.shape) if n == 0), dim % x.ndim
    first = filled.ndim - x.ndim + (not keepdim)
    return filled.narrow(first + lost - (lost > at and not keepdim), 0, 0) + x.sum()


register_sharding([aten.quantile.scalar, aten.quantile.default])(_quantile_rule(torch.quantile))
register_sharding([aten.nanquantile.scalar, aten.nanquantile.default])(_quantile_rule(torch.nanquantile))


def empty_on_tape(op: Any) -> Callable[..., Any]:
    """The local function of an operator whose gradient of nothing is on no tape in torch."""

    def local(view: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = op(x, *args, **kwargs)
        return result if x.numel() else put_on_tape(result.detach(), x)

    return local


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
    found = other_dim_strategies(x, dim)
    if x.ndim and x.shape[dim] == 1:  # the gradient is that of a copy, of whatever elements
        return found
    return [replace(s, local_if_empty=empty_on_tape(aten.cumprod.default)) for s in found]


@register_sharding(aten.logcumsumexp.default)
def logcumsumexp(x: TensorMeta, dim: int) -> list[Any]:
    if x.dtype.is_complex and x.requires_grad and 0 in x.layout.elements_per_rank().values():
        raise RuntimeError("logcumsumexp of complex numbers has no gradient in torch; detach() the tensor")
    found = other_dim_strategies(x, dim)
    return [replace(s, local_if_empty=empty_on_tape(aten.logcumsumexp.default)) for s in found]


def _running_minmax_rule(op: Any) -> Callable[..., Any]:
    def local(view: Any, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Of nothing torch returns the input as the gradient."""
        values, positions = op(x, dim)
        return (values if x.numel() else x.clone()), positions

    def rule(x: TensorMeta, dim: int) -> list[Any]:
        return [replace(s, local_if_empty=local) for s in other_dim_strategies(x, dim, outputs=2)]

    return rule


for _op in (aten.cummax.default, aten.cummin.default):
    register_sharding(_op)(_running_minmax_rule(_op))


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
@takes_copies
def softmax(x: TensorMeta, dim: int, half_to_float: bool) -> list[Strategy] | Steps:
    return _softmax_rule(x, dim, _softmax_over_ranks)


@register_sharding(aten._log_softmax.default)
@ignores_lengths
@takes_copies
def log_softmax(x: TensorMeta, dim: int, half_to_float: bool) -> list[Strategy] | Steps:
    return _softmax_rule(x, dim, _log_softmax_over_ranks)


@register_sharding([aten._softmax_backward_data.default, aten._log_softmax_backward_data.default])
def softmax_gradient(grad: TensorMeta, output: TensorMeta, dim: int, dtype: Any) -> list[Strategy]:
    return [Strategy(s.outputs, s.inputs * 2) for s in other_dim_strategies(output, dim)]


@register_sharding(aten.renorm.default)
def renorm(x: TensorMeta, p: float, dim: int, maxnorm: float) -> list[Strategy]:
    """The rows along a dim are scaled down, each by its own norm."""
    cut = Shard(dim % max(x.ndim, 1))
    return [Strategy((Replicate(),), (Replicate(),)), Strategy((cut,), (cut,))]


@register_sharding(aten.softmax.int)
@composite_of(aten._softmax.default)
@ignores_lengths
@takes_copies
def softmax_as(x: TensorMeta, dim: int, dtype: Any = None) -> list[Strategy] | Steps:
    """As an operator of its own, which is called more often than the one that torch makes of it."""
    return _softmax_rule(x, dim, lambda x, dim, dtype=None: aten._softmax.default(_cast(x, dtype), dim, False))


@register_sharding(aten.log_softmax.int)
@composite_of(aten._log_softmax.default)
@ignores_lengths
@takes_copies
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
