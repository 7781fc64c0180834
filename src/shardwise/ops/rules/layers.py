"""Convolutions and pooling: batch or channels sharded. Sharded input channels leave a pending sum.

Normalisation over the last dims and over groups of channels. Where a normalised dim is sharded its statistics are
added up over the ranks first, which moves two numbers for each row.

Batch normalisation: statistics of a sharded batch are those of the whole batch, alike on every rank.

While training, the mean and the variance of each channel are added up over the ranks, and running statistics are
moved by these. Otherwise each element is scaled on its own.

Variances and standard deviations: over sharded dims the mean, then the mean of squared distances to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import EnableTorchFunction, aten
from shardwise.geometry import Layout, MeshSpec, Partial, Placement, Replicate, Shard
from shardwise.ops.implicit_replication import MixedTensorsError, replicate
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta, composite_of, ignores_lengths, takes_copies
from shardwise.ops.rules.reduction import Dims, reduction_strategies
from shardwise.ops.rules.view import pending_kinds
from shardwise.ops.unshard import vary_along
from shardwise.ops.views import (
    LocalView,
    all_dims,
    cutting_axes,
    empty_result_like,
    fill_empty,
    mesh_view,
    put_on_tape,
    redistribute_to,
    replace_placements,
    resolve_partial,
)
from shardwise.tensor.parts import accumulation_dtype
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


@register_sharding(aten.convolution.default)
def convolution(
    x: TensorMeta,
    weight: TensorMeta,
    bias: TensorMeta | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> list[Any]:
    whole, partial = Replicate(), Partial("sum")
    ways: list[tuple[Placement, Placement, Placement, Placement]] = [
        (whole, whole, whole, whole),
        (Shard(0), Shard(0), whole, whole),
    ]
    if groups == 1 and x.shape[1]:
        outs, ins = (Shard(1), Shard(0)) if transposed else (Shard(0), Shard(1))
        ways += [(Shard(1), whole, outs, Shard(0)), (partial, Shard(1), ins, partial)]
    ways += [(partial, partial, whole, partial), (partial, whole, partial, partial)]
    given = [(out, (a, w) if bias is None else (a, w, b)) for out, a, w, b in ways]
    return [Strategy((out,), inputs, local_if_empty=_convolve) for out, inputs in given]


def _convolve(view: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The local convolution; where this rank has no channels or no images, one of zeros, which is cut away again."""
    transposed, groups = rest[3], rest[5]
    if x.numel() and weight.numel():
        return aten.convolution.default(x, weight, bias, *rest)  # type: ignore[no-any-return]  # untyped in torch
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if all(map(all, view.shapes[:2])):
        filled = (fill_empty(x), fill_empty(weight), None if bias is None else fill_empty(bias))
        return aten.convolution.default(*filled, *rest)[: x.shape[0], :channels]  # type: ignore[no-any-return]
    kernel = [1, 1, *weight.shape[2:]]
    probe = torch.empty(1, 1, *x.shape[2:], device="meta")
    spatial = aten.convolution.default(probe, torch.empty(kernel, device="meta"), None, *rest[:5], 1).shape[2:]
    if not view.shapes[0][1]:
        channels = 0  # as torch says of images without channels
    zeros = x.new_zeros((x.shape[0], channels, *spatial))
    if bias is None:
        return put_on_tape(zeros, x, weight)
    return put_on_tape(zeros + bias[:channels].reshape(1, -1, *([1] * len(spatial))), x, weight, bias)


def _register_pool(op: Any, dims: int, *, linear: bool, outputs: int = 1) -> None:
    """Register a rule for an operator over the last dims: all dims before may be sharded."""

    def local(view: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(x, *args, **kwargs) if x.numel() else _pool_nothing(op, dims, x, *args, **kwargs)

    @register_sharding(op)
    def rule(x: TensorMeta, *args: Any, **kwargs: Any) -> list[Strategy]:
        exact = linear and (x.dtype.is_floating_point or x.dtype.is_complex)  # means of integers are rounded
        pending = [p for p in pending_kinds(x) if exact and p.op in ("sum", "avg")]
        ways: list[Placement] = [Replicate(), *(Shard(d) for d in range(x.ndim - dims)), *pending]
        return [Strategy((way,) * outputs, (way,), local_if_empty=local) for way in ways]


def _pool_nothing(op: Any, dims: int, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The result for a rank without images or channels: torch takes batches without images only."""
    result = op(x.reshape(0, 1, *x.shape[-dims:]), *args, **kwargs)
    lead = x.shape[: x.ndim - dims]
    several = isinstance(result, list | tuple)
    shaped = [r.reshape(*lead, *r.shape[-dims:]) for r in (result if several else (result,))]
    return tuple(shaped) if several else shaped[0]


for _op, _dims in (
    (aten.avg_pool2d.default, 2),
    (aten._adaptive_avg_pool2d.default, 2),
    (aten.upsample_nearest2d.default, 2),
    (aten.upsample_bilinear2d.default, 2),
    (aten.avg_pool3d.default, 3),
    (aten._adaptive_avg_pool3d.default, 3),
):
    _register_pool(_op, _dims, linear=True)
for _op, _dims in (
    (aten.max_pool2d_with_indices.default, 2),
    (aten.adaptive_max_pool2d.default, 2),
    (aten.max_pool3d_with_indices.default, 3),
):
    _register_pool(_op, _dims, linear=False, outputs=2)


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
@takes_copies
def native_layer_norm(
    x: TensorMeta, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> list[Strategy] | Steps:
    if cutting_axes(x.layout, _normalised_dims(x, normalized_shape)):
        return Steps(_layer_norm_over_ranks)
    return _leading_dim_strategies(x, normalized_shape, 3, (weight, bias))


@register_sharding(aten.layer_norm.default)
@composite_of(aten.native_layer_norm.default)
@ignores_lengths
@takes_copies
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
@takes_copies
def fused_rms_norm(x: TensorMeta, normalized_shape: Sequence[int], weight: Any, eps: Any) -> list[Strategy] | Steps:
    if cutting_axes(x.layout, _normalised_dims(x, normalized_shape)):
        return Steps(_rms_norm_over_ranks)
    return _leading_dim_strategies(x, normalized_shape, 2, (weight,))


@register_sharding(aten.rms_norm.default)
@takes_copies
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
    """The same on a rank's examples and on its groups; where it has none, on one of them, which is cut away again."""
    n, c = x.shape[0], x.shape[1]
    if x.numel():
        return aten.native_group_norm.default(x.contiguous(), weight, bias, n, c, hxw, c // per_group, eps)
    groups = c // per_group if per_group else group
    if not per_group or not hxw:
        nothing = x.new_zeros((n, groups))
        return empty_result_like(x, weight, bias), nothing, nothing
    filled = _spread_values(fill_empty(x.reshape(n, c, hxw), 1, per_group, 1))
    given = [None if t is None else fill_empty(t, per_group) for t in (weight, bias)]
    counts = filled.shape[0], filled.shape[1], hxw, filled.shape[1] // per_group
    out, mean, scale = aten.native_group_norm.default(filled, *given, *counts, eps)
    return out[:n, :c].reshape(x.shape), mean[:n, :groups], scale[:n, :groups]


def _spread_values(zeros: Tensor) -> Tensor:
    """Values that have a variance, in place of zeros: gradients through nothing are then zeros, and not undefined."""
    return zeros + (torch.arange(zeros.numel(), device=zeros.device) % 2).to(zeros.dtype).reshape(zeros.shape)


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
    view = LocalView(comm, (x.sharding,), (tuple(x.shape),))
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
    lengths = cuts[0][1].lengths(shape[1], spec.mesh.shape[cuts[0][0]])
    return (cuts[0][0], lengths) if all(length % per_group == 0 for length in lengths) else None


def _native_norm_part(view: LocalView, x: Tensor, *args: Any) -> Any:
    """torch's own; on a rank without elements, where its backward pass divides by their number, of some filled in."""
    if x.numel():
        return aten.native_batch_norm.default(x, *args)
    weight, bias, mean, variance = (None if t is None else fill_empty(t) for t in args[:4])
    if variance is not None and not args[3].numel():
        variance = variance + 1
    filled = _spread_values(fill_empty(x))
    out, average, scale = aten.native_batch_norm.default(filled, weight, bias, mean, variance, *args[4:])
    saved = slice(x.shape[1])
    return out[tuple(map(slice, x.shape))], average[saved], scale[saved]


@register_sharding(aten.native_batch_norm.default)
def native_batch_norm(
    x: TensorMeta, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> list[Strategy]:
    """Channels may be sharded; other dims where the statistics are given."""
    given = [value for value in (weight, bias, mean, variance) if value is not None]
    whole: tuple[Placement, ...] = tuple(Replicate() for _ in given)
    stats: Placement = Shard(0) if training else Replicate()
    found = [Strategy((Replicate(),) * 3, (Replicate(), *whole))]
    if training:
        return [
            *found,
            Strategy(
                (Shard(1), stats, stats), (Shard(1), *(Shard(0) for _ in given)), local_if_empty=_native_norm_part
            ),
        ]
    for dim in range(x.ndim):
        others = tuple(Shard(0) for _ in given) if dim == 1 else whole
        found.append(Strategy((Shard(dim), stats, stats), (Shard(dim), *others), local_if_empty=_native_norm_part))
    return found


def _normalise_batch(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalise by the statistics of the whole batch, or by running ones; plain running ones count as replicated."""
    if not isinstance(input, ShardedTensor):
        raise MixedTensorsError("batch_norm of a plain tensor with sharded statistics or weights; shard the input too")
    with EnableTorchFunction():
        wide: Any = resolve_partial(input, "batch_norm").to(accumulation_dtype(input.dtype))
        if training:
            average, variance = _compute_statistics(wide, running_mean, running_var, momentum)
        else:
            average, variance = (
                _reshape_to_channels(_replicate_plain(t, input), input.ndim) for t in (running_mean, running_var)
            )
        out = (wide - average) * (variance + eps).rsqrt()
        out = out if weight is None else out * _reshape_to_channels(weight, input.ndim)
        out = out if bias is None else out + _reshape_to_channels(bias, input.ndim)
        return out.to(input.dtype)


register_sharding(aten.batch_norm.default, Steps(_normalise_batch))


def _compute_statistics(x: Any, running_mean: Any, running_var: Any, momentum: float) -> tuple[Any, Any]:
    """Mean and variance of each channel over the whole batch; running ones are moved towards them."""
    dims = tuple(d for d in range(x.ndim) if d != 1)
    count = math.prod(x.shape[d] for d in dims)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    average, variance = compute_moments(x, dims, "batch_norm")
    if running_mean is not None:
        _track(_replicate_plain(running_mean, x), average.detach().sum(dims), momentum)
    if running_var is not None:
        _track(_replicate_plain(running_var, x), variance.detach().sum(dims) * (count / (count - 1)), momentum)
    return average, variance


def _replicate_plain(values: Tensor, like: ShardedTensor) -> ShardedTensor:
    return values if isinstance(values, ShardedTensor) else replicate(values, like)


def _reshape_to_channels(values: Tensor, ndim: int) -> Tensor:
    return values.reshape([-1 if d == 1 else 1 for d in range(ndim)])


def _track(running: ShardedTensor, found: Any, momentum: float) -> None:
    """Move a running statistic towards the one found, in place, on every rank alike."""
    moved = redistribute_to(found, running.sharding, "batch_norm")
    with torch.no_grad():
        for own, local in zip(running.local_parts, moved.local_parts, strict=True):
            own.mul_(1 - momentum).add_(local.to(running.dtype), alpha=momentum)
