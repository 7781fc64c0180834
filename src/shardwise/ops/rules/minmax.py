"""Largest and smallest values, and where they are.

Over whole dims each rank has its answer. Over a sharded dim:

1. the ranks' extremes are combined: a pending maximum where no gradient is needed, else at once;
2. where positions are asked, the ranks that hold the extreme offer theirs and the first one wins;
3. gradients go where the dense operator sends them: to the chosen position, or in equal parts to all that are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten, forward_ad, is_dual_level
from shardwise.geometry import MeshSpec, Partial, Replicate, Shard
from shardwise.ops.engine.local_view import LocalView
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import (
    all_dims,
    cutting_axes,
    global_rows,
    mesh_spec_of,
    replace_placements,
    resolve_partial,
)
from shardwise.ops.rules.reduction import Dims, check_not_empty, reduction_strategies
from shardwise.tensor.moving.autograd import is_differentiated, split_dual
from shardwise.tensor.moving.reductions import reduction_identity
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

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


def _extreme_rule(x: TensorMeta, dim: Dims, keepdim: bool, op: str, local: Any) -> list[Strategy] | Steps:
    """Pending where it is not differentiated: gradients need the extreme of all ranks."""
    if x.dtype.is_complex:
        raise NotImplementedError(f"complex numbers ({x.dtype}) have no {op}imum; take that of x.abs() or x.real")
    check_not_empty(x, dim, f"{op}imum")
    pending = any(isinstance(p, Partial) for p in x.placements)
    if x.requires_grad and (pending or cutting_axes(x.layout, all_dims(dim, x.ndim))):
        return Steps(partial(_extreme_with_gradient, op))
    return reduction_strategies(x, dim, keepdim, Partial(op), keeps=(op,), local=local)


@register_sharding([aten.amax.default, aten.max.default])
def amax(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Strategy] | Steps:
    return _extreme_rule(x, dim, keepdim, "max", _amax_part)


@register_sharding([aten.amin.default, aten.min.default])
def amin(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Strategy] | Steps:
    return _extreme_rule(x, dim, keepdim, "min", _amin_part)


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
    if cutting_axes(x.layout, all_dims(dim, x.ndim)):
        return Steps(partial(_value_and_position, op))
    return reduction_strategies(x, dim, keepdim, None, outputs=2)


@register_sharding(aten.kthvalue.default)
def kthvalue(x: TensorMeta, k: int, dim: int = -1, keepdim: bool = False) -> list[Any]:
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
    """Returns `value`; its gradient goes to `x` in the passed shares. All of it is local."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.saved_tensors[0], None, None


def _attach_gradient(
    x: ShardedTensor, value: ShardedTensor, share: Tensor, dims: tuple[int, ...], name: str
) -> ShardedTensor:
    """The value, which is alike on the ranks that share it, on the tape of `x`; in forward mode with its tangent."""
    given, tangent = split_dual(x.local_parts[0]) if is_dual_level() else (x.local_parts[0], None)
    local: Tensor = _ShareGradient.apply(given, value.local_parts[0], share)  # type: ignore[no-untyped-call]  # untyped in torch
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


def _extreme_with_gradient(op: str, x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    """The extreme of a tensor that needs gradients; those of equal elements get equal shares."""
    dims, name = all_dims(dim, x.ndim), f"a{op}"
    x = resolve_partial(x, name)
    if not cutting_axes(x.sharding, dims):
        return _reduce_extreme(x, dims, keepdim, op)
    plain = x.detach()
    value = resolve_partial(_reduce_extreme(plain, dims, True, op), name)
    equal = plain.local_parts[0] == value.local_parts[0]
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
