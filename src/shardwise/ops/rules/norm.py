"""Normalisation over the last dims and over groups of channels. Where a normalised dim is sharded its statistics are
added up over the ranks first, which moves two numbers for each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import aten, autograd_on_locals
from shardwise.comm import Comm
from shardwise.geometry import MeshSpec, Placement, Replicate, Shard
from shardwise.ops.engine.dispatcher import LocalView
from shardwise.ops.engine.placement_cost import mesh_view
from shardwise.ops.engine.rules import Strategy, TensorMeta, register_sharding
from shardwise.ops.engine.two_step import (
    cutting_axes,
    empty_result_like,
    redistribute_to,
    replace_placements,
    resolve_partial,
)
from shardwise.ops.engine.vary import vary_along
from shardwise.ops.rules.reduction import Args
from shardwise.ops.rules.variance import compute_moments
from shardwise.tensor.dispatch import register_handler
from shardwise.tensor.reductions import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

Types = Sequence[type]
Kwargs = dict[str, Any]


def _leading_dim_strategies(
    x: TensorMeta, normalized_shape: Sequence[int], outputs: int, extra: Sequence[Any]
) -> list[Strategy]:
    """Any dim before the normalised ones may be sharded; weight and bias are whole."""
    others: tuple[Placement, ...] = tuple(Replicate() for value in extra if value is not None)
    placements: list[Placement] = [Replicate(), *(Shard(d) for d in range(x.ndim - len(normalized_shape)))]
    return [Strategy((p,) * outputs, (p, *others)) for p in placements]


@register_sharding(aten.native_layer_norm.default)
def layer_norm(x: TensorMeta, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> list[Any]:
    return _leading_dim_strategies(x, normalized_shape, 3, (weight, bias))


@register_sharding(aten._fused_rms_norm.default)
def fused_rms_norm(x: TensorMeta, normalized_shape: Sequence[int], weight: Any, eps: Any) -> list[Any]:
    return _leading_dim_strategies(x, normalized_shape, 2, (weight,))


def _normalised_dims(x: ShardedTensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.ndim - len(shape), x.ndim))


@register_handler(aten.native_layer_norm.default)
def _layer_norm(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    x, shape, weight, bias, eps = args
    dims = _normalised_dims(x, shape)
    if not cutting_axes(x, dims):
        return NotImplemented
    wide = _to_wide_dtype(x, "layer_norm")
    average, square = compute_moments(wide, dims, "layer_norm")
    with autograd_on_locals():
        scale = (square + eps).rsqrt()
        out = (wide - average) * scale
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
        return out.to(x.dtype), average, scale


def _to_wide_dtype(x: Any, name: str) -> ShardedTensor:
    """The tensor without pending reductions, in the dtype used for sums."""
    with autograd_on_locals():
        known = resolve_partial(x, name)
        return known.to(accumulation_dtype(x.dtype))


@register_handler(F.rms_norm, torch.rms_norm)
def _rms_norm(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    made = _compute_rms_norm(*args, **kwargs)
    return made if made is NotImplemented else made[0]


@register_handler(aten._fused_rms_norm.default)
def _fused_rms_norm(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _compute_rms_norm(*args, **kwargs)


def _compute_rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """The result and what it was scaled by.

    torch adds to a mean in place, which is pending where the dim is sharded; here it is added up first.
    """
    if not isinstance(input, ShardedTensor) or not cutting_axes(input, _normalised_dims(input, normalized_shape)):
        return NotImplemented
    wide: Any = _to_wide_dtype(input, "rms_norm")
    with autograd_on_locals():
        square = resolve_partial((wide * wide).mean(_normalised_dims(input, normalized_shape), True), "rms_norm")
        scale = (square + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
        out = wide * scale
        return (out if weight is None else out * weight).to(input.dtype), scale


# Groups of channels


def _group_norm_part(
    per_group: int, view: LocalView, x: Tensor, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float
) -> Any:
    """The same on a rank's examples and on its groups."""
    n, c = x.shape[0], x.shape[1]
    if x.numel() == 0:
        nothing = x.new_zeros((n, c // per_group))
        return empty_result_like(x, weight, bias), nothing, nothing
    return aten.native_group_norm.default(x.contiguous(), weight, bias, n, c, hxw, c // per_group, eps)


@register_sharding(aten.native_group_norm.default)
def group_norm(
    x: TensorMeta, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float
) -> list[Strategy]:
    local = partial(_group_norm_part, c // group)
    others: tuple[Placement, ...] = tuple(Replicate() for value in (weight, bias) if value is not None)
    placements: list[Placement] = [Replicate(), Shard(0)]
    return [Strategy((p,) * 3, (p, *others), local) for p in placements]


@register_handler(aten.native_group_norm.default)
def _group_norm(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    """Where every rank has whole groups of channels, they stay where they are."""
    x, weight, bias, n, c, hxw, group, eps = args
    cut = _find_whole_groups(x, c // group)
    if cut is None or not all(t is None or isinstance(t, ShardedTensor) for t in (weight, bias)):
        return NotImplemented
    spec, (axis, lengths) = mesh_view(x.sharding), cut
    assert spec is not None
    own_weight, own_bias = (None if t is None else _local_channels(t, spec, axis, lengths) for t in (weight, bias))
    with autograd_on_locals():
        view = LocalView(comm.rank, (x.sharding,), (tuple(x.shape),))
        out, mean, scale = _group_norm_part(
            c // group, view, x.local_parts[0], own_weight, own_bias, n, c, hxw, group, eps
        )
    groups = replace_placements(spec, (axis,), Shard(1, sizes=tuple(length // (c // group) for length in lengths)))
    stats = groups.layout((n, group))
    return wrap(x.sharding, (out,), comm), wrap(stats, (mean,), comm), wrap(stats, (scale,), comm)


def _local_channels(values: ShardedTensor, spec: MeshSpec, axis: int, lengths: tuple[int, ...]) -> Tensor:
    """This rank's channels of a weight, which varies along the axes that cut the batch."""
    whole: list[Placement] = [Replicate()] * spec.mesh.ndim
    whole[axis] = Shard(0, sizes=lengths)
    held = redistribute_to(values, MeshSpec(spec.mesh, whole).layout(tuple(values.shape)), "group_norm")
    varying = [a for a, p in enumerate(spec.placements) if isinstance(p, Shard) and a != axis]
    with autograd_on_locals():
        return vary_along(held, held.sharding, varying)


def _find_whole_groups(x: ShardedTensor, per_group: int) -> tuple[int, tuple[int, ...]] | None:
    """The one axis that cuts the channels and their lengths, if every rank has whole groups and whole examples."""
    spec = mesh_view(x.sharding)
    if spec is None or x.sharding.pending is not None or cutting_axes(x, range(2, x.ndim)):
        return None
    cuts = [(a, p) for a, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim == 1]
    if len(cuts) != 1 or cuts[0][1].groups or cuts[0][1].block:
        return None
    ranks, sizes = spec.mesh.shape[cuts[0][0]], cuts[0][1].sizes
    step = math.ceil(x.shape[1] / ranks)
    lengths = sizes or tuple(max(0, min(step, x.shape[1] - step * rank)) for rank in range(ranks))
    return (cuts[0][0], lengths) if all(length % per_group == 0 for length in lengths) else None
