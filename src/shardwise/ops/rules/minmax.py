"""Largest and smallest values, and where they are.

Over whole dims each rank has its answer. Over a sharded dim:

1. the ranks' extremes are combined: a pending maximum where no gradient is needed, else at once;
2. where positions are asked, the ranks that hold the extreme offer theirs and the first one wins;
3. gradients go where the dense operator sends them: to the chosen position, or in equal parts to all that are equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten, autograd_on_locals
from shardwise.comm import Comm
from shardwise.geometry import MeshSpec, Partial, Replicate, Shard
from shardwise.ops.engine.dispatcher import LocalView
from shardwise.ops.engine.rules import TensorMeta, register_sharding
from shardwise.ops.engine.two_step import (
    all_dims,
    arguments_by_name,
    cutting_axes,
    global_rows,
    mesh_spec_of,
    replace_placements,
    resolve_partial,
)
from shardwise.ops.rules.reduction import Args, Dims, reduction_strategies
from shardwise.tensor.dispatch import register_handler
from shardwise.tensor.reductions import reduction_identity
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

Types = Sequence[type]
Kwargs = dict[str, Any]
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


@register_sharding([aten.amax.default, aten.max.default])
def amax(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, Partial("max"), keeps=("max",), local=_amax_part)


@register_sharding([aten.amin.default, aten.min.default])
def amin(x: TensorMeta, dim: Dims = None, keepdim: bool = False) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, Partial("min"), keeps=("min",), local=_amin_part)


@register_sharding([aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default])
def minmax_along_dim(x: TensorMeta, dim: int = -1, keepdim: bool = False) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, None, outputs=2)


@register_sharding(aten.kthvalue.default)
def kthvalue(x: TensorMeta, k: int, dim: int = -1, keepdim: bool = False) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, None, outputs=2)


@register_sharding([aten.median.default, aten.nanmedian.default])
def minmax_of_all(x: TensorMeta) -> list[Any]:
    return reduction_strategies(x, None, False, None)


@register_sharding([aten.argmax.default, aten.argmin.default])
def arg_minmax(x: TensorMeta, dim: int | None = None, keepdim: bool = False) -> list[Any]:
    return reduction_strategies(x, dim, keepdim, None)


@register_handler(aten.aminmax.default)
def _aminmax(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    dims, keepdim = all_dims(kwargs.get("dim"), args[0].ndim), kwargs.get("keepdim", False)
    return aten.amin.default(args[0], dims, keepdim), aten.amax.default(args[0], dims, keepdim)


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


def _attach_gradient(x: ShardedTensor, value: ShardedTensor, share: Tensor) -> ShardedTensor:
    """The value, which is alike on the ranks that share it, on the tape of `x`."""
    with autograd_on_locals():
        local: Tensor = _ShareGradient.apply(x.local_parts[0], value.local_parts[0], share)  # type: ignore[no-untyped-call]  # untyped in torch
    return wrap(value.sharding, (local,), x.comm)


def _equals_best(own: Tensor, best: Tensor) -> Tensor:
    """Where a rank's values are the best ones; not-a-number is the best if there is one."""
    with autograd_on_locals():
        return (own == best) | ((own != own) & (best != best))


def _squeeze_dims(tensor: ShardedTensor, dims: Sequence[int], keepdim: bool) -> ShardedTensor:
    """The tensor without dims of length 1, unless they are kept; no axis cuts them."""
    spec = mesh_spec_of(tensor)
    if keepdim or spec is None:
        return tensor
    shape = [n for d, n in enumerate(tensor.shape) if d not in dims]
    left = [
        Shard(p.dim - sum(d < p.dim for d in dims), p.sizes, p.groups, p.block) if isinstance(p, Shard) else p
        for p in (Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in spec.placements)
    ]
    with autograd_on_locals():
        local = tensor.local_parts[0].squeeze(tuple(dims)) if dims else tensor.local_parts[0]
    return wrap(MeshSpec(spec.mesh, left, spec.order).layout(shape), (local,), tensor.comm)


def _parse_arguments(args: Args, kwargs: Kwargs) -> tuple[ShardedTensor, tuple[int, ...], bool]:
    """The tensor, the dims and whether they are kept, of any operator here."""
    given = arguments_by_name(aten.amax.default, args, kwargs)
    return given["self"], all_dims(given["dim"], given["self"].ndim), bool(given["keepdim"])


def _reduce_extreme(args: Args, kwargs: Kwargs, op: str) -> Any:
    """The extreme over sharded dims of a tensor that needs gradients; NotImplemented otherwise."""
    x, dims, keepdim = _parse_arguments(args, kwargs)
    name = f"a{op}"
    if not (x.requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    if not cutting_axes(x, dims):
        known = resolve_partial(x, name)
        return NotImplemented if known is x else (aten.amax if op == "max" else aten.amin).default(known, dims, keepdim)
    x = resolve_partial(x, name)
    plain = x.detach()
    value = resolve_partial((aten.amax if op == "max" else aten.amin).default(plain, dims, True), name)
    with autograd_on_locals():
        equal = plain.local_parts[0] == value.local_parts[0]
    alike = resolve_partial(aten.sum.dim_IntList(wrap(x.sharding, (equal,), x.comm), dims, True), name)
    with autograd_on_locals():
        share = equal.to(x.dtype) / alike.local_parts[0]
    return _squeeze_dims(_attach_gradient(x, value, share), dims, keepdim)


@register_handler(aten.amax.default, aten.max.default)
def _amax(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _reduce_extreme(args, kwargs, "max")


@register_handler(aten.amin.default, aten.min.default)
def _amin(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _reduce_extreme(args, kwargs, "min")


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
    x = resolve_partial(x, name)
    plain, axes = x.detach(), cutting_axes(x, dims)
    value = resolve_partial((aten.amax if op == "max" else aten.amin).default(plain, dims, True), name)
    spec = mesh_spec_of(value)
    assert spec is not None
    with autograd_on_locals():
        own, best = plain.local_parts[0], value.local_parts[0]
        offers = torch.where(_equals_best(own, best), _flat_positions(x, dims), NO_POSITION)
        first = local_extreme(offers, dims, True, "min")
    pending = replace_placements(spec, axes, Partial("min")).layout(tuple(value.shape))
    return value, resolve_partial(wrap(pending, (first,), x.comm), name)


def _find_value_and_position(args: Args, kwargs: Kwargs, op: str) -> Any:
    x, dims, keepdim = _parse_arguments(args, kwargs)
    if not cutting_axes(x, dims):
        return NotImplemented
    x = resolve_partial(x, op)
    value, where = _find_extremes(x, dims, op, op)
    if x.requires_grad and torch.is_grad_enabled():
        with autograd_on_locals():
            chosen = (_dim_rows(x, dims[0]) == where.local_parts[0]).to(x.dtype)
        value = _attach_gradient(x, value, chosen)
    return _squeeze_dims(value, dims, keepdim), _squeeze_dims(where, dims, keepdim)


@register_handler(aten.max.dim)
def _max_dim(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _find_value_and_position(args, kwargs, "max")


@register_handler(aten.min.dim)
def _min_dim(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _find_value_and_position(args, kwargs, "min")


def _find_position(args: Args, kwargs: Kwargs, op: str) -> Any:
    x, dims, keepdim = _parse_arguments(args, kwargs)
    if not cutting_axes(x, dims) or math.prod(x.shape) == 0:
        return NotImplemented
    return _squeeze_dims(_find_extremes(x, dims, op, f"arg{op}")[1], dims, keepdim)


@register_handler(aten.argmax.default)
def _argmax(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _find_position(args, kwargs, "max")


@register_handler(aten.argmin.default)
def _argmin(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _find_position(args, kwargs, "min")
