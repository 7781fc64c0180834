"""Convolutions and pooling: batch or channels sharded. Sharded input channels leave a pending sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import aten
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.engine.registry import Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.rules.index import zeros_on_tape
from shardwise.ops.rules.view import pending_kinds


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
    if groups == 1:
        outs, ins = (Shard(1), Shard(0)) if transposed else (Shard(0), Shard(1))
        ways += [(Shard(1), whole, outs, Shard(0)), (partial, Shard(1), ins, partial)]
    ways += [(partial, partial, whole, partial), (partial, whole, partial, partial)]
    given = [(out, (a, w) if bias is None else (a, w, b)) for out, a, w, b in ways]
    return [Strategy((out,), inputs, local_if_empty=_convolve) for out, inputs in given]


def _convolve(view: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """The local convolution; where this rank holds no channels or no images, zeros of the right shape and the bias."""
    transposed, groups = rest[3], rest[5]
    if x.numel() and weight.numel():
        return aten.convolution.default(x, weight, bias, *rest)  # type: ignore[no-any-return]  # untyped in torch
    kernel = [1, 1, *weight.shape[2:]]
    probe = torch.empty(1, 1, *x.shape[2:], device="meta")
    spatial = aten.convolution.default(probe, torch.empty(kernel, device="meta"), None, *rest[:5], 1).shape[2:]
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    empty = zeros_on_tape(x, (x.shape[0], channels, *spatial)) + zeros_on_tape(weight, ())
    return empty if bias is None else empty + bias.reshape(1, -1, *([1] * len(spatial)))


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
