"""Normalisation over the last dims and over groups of channels. Where a normalised dim is sharded its statistics are
added up over the ranks first, which moves two numbers for each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.geometry import Layout, MeshSpec, Placement, Replicate, Shard
from shardwise.ops.engine.choice.placement_cost import mesh_view
from shardwise.ops.engine.local_view import LocalView
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta, ignores_lengths, stands_for
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.engine.two_step import (
    cutting_axes,
    empty_result_like,
    redistribute_to,
    replace_placements,
    resolve_partial,
)
from shardwise.ops.engine.vary import vary_along
from shardwise.ops.rules.variance import compute_moments
from shardwise.tensor.moving.reductions import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


def _leading_dim_strategies(
    x: TensorMeta, normalized_shape: Sequence[int], outputs: int, extra: Sequence[Any]
) -> list[Strategy]:
    """Any dim before the normalised ones may be sharded; weight and bias are whole."""
    others: tuple[Placement, ...] = tuple(Replicate() for value in extra if value is not None)
    placements: list[Placement] = [Replicate(), *(Shard(d) for d in range(x.ndim - len(normalized_shape)))]
    return [Strategy((p,) * outputs, (p, *others)) for p in placements]


def _normalised_dims(x: TensorMeta | ShardedTensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.ndim - len(shape), x.ndim))


@register_sharding(aten.native_layer_norm.default)
@ignores_lengths
def native_layer_norm(
    x: TensorMeta, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> list[Strategy] | Steps:
    if cutting_axes(x.layout, _normalised_dims(x, normalized_shape)):
        return Steps(_layer_norm_over_ranks)
    return _leading_dim_strategies(x, normalized_shape, 3, (weight, bias))


@register_sharding(aten.layer_norm.default)
@stands_for(aten.native_layer_norm.default)
@ignores_lengths
def layer_norm(
    x: TensorMeta,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> list[Strategy] | Steps:
    """As an operator of its own, which is called more often than the one that torch makes of it."""
    if cutting_axes(x.layout, _normalised_dims(x, normalized_shape)):
        return Steps(_layer_norm_result)
    return _leading_dim_strategies(x, normalized_shape, 1, (weight, bias))


def _layer_norm_result(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Any:
    return _layer_norm_over_ranks(x, shape, weight, bias, eps)[0]


def _layer_norm_over_ranks(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> tuple[Any, ...]:
    wide = _to_wide_dtype(x, "layer_norm")
    average, square = compute_moments(wide, _normalised_dims(x, shape), "layer_norm")
    scale = (square + eps).rsqrt()
    out = (wide - average) * scale
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    kept = _statistics_dtype(x, weight, bias)
    return out.to(x.dtype), average.to(kept), scale.to(kept)


def _statistics_dtype(x: Any, *others: Any) -> torch.dtype:
    """The dtype of a mean that torch returns: on CPUs that of the tensors, where all have the same one."""
    same = all(t is None or t.dtype == x.dtype for t in others)
    dtype: torch.dtype = x.dtype if same and x.device.type == "cpu" else accumulation_dtype(x.dtype)
    return dtype


def _to_wide_dtype(x: Any, name: str) -> ShardedTensor:
    """The tensor without pending reductions, in the dtype used for sums."""
    return resolve_partial(x, name).to(accumulation_dtype(x.dtype))


@register_sharding(aten._fused_rms_norm.default)
@ignores_lengths
def fused_rms_norm(x: TensorMeta, normalized_shape: Sequence[int], weight: Any, eps: Any) -> list[Strategy] | Steps:
    if cutting_axes(x.layout, _normalised_dims(x, normalized_shape)):
        return Steps(_rms_norm_over_ranks)
    return _leading_dim_strategies(x, normalized_shape, 2, (weight,))


@register_sharding(aten.rms_norm.default)
def rms_norm(
    x: TensorMeta, normalized_shape: Sequence[int], weight: Any = None, eps: Any = None
) -> list[Strategy] | Steps:
    """As an operator of its own: torch adds to a mean in place, which is pending where the dim is sharded."""
    if cutting_axes(x.layout, _normalised_dims(x, normalized_shape)):
        return Steps(lambda *args: _rms_norm_over_ranks(*args)[0])
    return _leading_dim_strategies(x, normalized_shape, 1, (weight,))


def _rms_norm_over_ranks(
    x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> tuple[Any, Any]:
    """The result and what it was scaled by."""
    wide: Any = _to_wide_dtype(x, "rms_norm")
    square = resolve_partial((wide * wide).mean(_normalised_dims(x, normalized_shape), True), "rms_norm")
    scale = (square + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    out = wide * scale
    return (out if weight is None else out * weight).to(x.dtype), scale


# Groups of channels


def _group_norm_part(
    per_group: int, view: LocalView, x: Tensor, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float
) -> Any:
    """The same on a rank's examples and on its groups."""
    n, c = x.shape[0], x.shape[1]
    if x.numel() == 0:
        nothing = x.new_zeros((n, c // per_group if per_group else group))
        return empty_result_like(x, weight, bias), nothing, nothing
    return aten.native_group_norm.default(x.contiguous(), weight, bias, n, c, hxw, c // per_group, eps)


@register_sharding(aten.native_group_norm.default)
def group_norm(
    x: TensorMeta, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float
) -> list[Strategy] | Steps:
    if _find_whole_groups(x.layout, c // group) is not None:
        return Steps(_group_norm_of_whole_groups)
    local = partial(_group_norm_part, c // group)
    others: tuple[Placement, ...] = tuple(Replicate() for value in (weight, bias) if value is not None)
    placements: list[Placement] = [Replicate(), Shard(0)]
    return [Strategy((p,) * 3, (p, *others), local) for p in placements]


def _group_norm_of_whole_groups(
    x: ShardedTensor, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[ShardedTensor, ...]:
    """Where every rank has whole groups of channels, they stay where they are."""
    cut, spec, comm = _find_whole_groups(x.sharding, c // group), mesh_view(x.sharding), x.comm
    assert spec is not None and cut is not None
    axis, lengths = cut
    own_weight, own_bias = (None if t is None else _local_channels(t, spec, axis, lengths) for t in (weight, bias))
    view = LocalView(comm.rank, (x.sharding,), (tuple(x.shape),))
    out, mean, scale = _group_norm_part(c // group, view, x.local_parts[0], own_weight, own_bias, n, c, hxw, group, eps)
    groups = replace_placements(spec, (axis,), Shard(1, sizes=tuple(length // (c // group) for length in lengths)))
    stats = groups.layout((n, group))
    return wrap(x.sharding, (out,), comm), wrap(stats, (mean,), comm), wrap(stats, (scale,), comm)


def _local_channels(values: ShardedTensor, spec: MeshSpec, axis: int, lengths: tuple[int, ...]) -> Tensor:
    """This rank's channels of a weight, which varies along the axes that cut the batch."""
    whole: list[Placement] = [Replicate()] * spec.mesh.ndim
    whole[axis] = Shard(0, sizes=lengths)
    held = redistribute_to(values, MeshSpec(spec.mesh, whole).layout(tuple(values.shape)), "group_norm")
    varying = [a for a, p in enumerate(spec.placements) if isinstance(p, Shard) and a != axis]
    return vary_along(held, held.sharding, varying)


def _find_whole_groups(layout: Layout, per_group: int) -> tuple[int, tuple[int, ...]] | None:
    """The one axis that cuts the channels and their lengths, if every rank has whole groups and whole examples."""
    spec, shape = mesh_view(layout), layout.shape
    if per_group == 0 or spec is None or layout.pending is not None or cutting_axes(layout, range(2, len(shape))):
        return None
    cuts = [(a, p) for a, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim == 1]
    if len(cuts) != 1 or not cuts[0][1].is_in_runs:
        return None
    ranks, sizes = spec.mesh.shape[cuts[0][0]], cuts[0][1].sizes
    step = math.ceil(shape[1] / ranks)
    lengths = sizes or tuple(max(0, min(step, shape[1] - step * rank)) for rank in range(ranks))
    return (cuts[0][0], lengths) if all(length % per_group == 0 for length in lengths) else None
