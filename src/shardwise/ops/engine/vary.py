"""Replicated values in varying computations: identity forward, one reduction backward.

Where an operation differs from rank to rank along an axis, the gradients that its replicated inputs get are addends.
`vary` passes such a tensor on and sums its gradients over the axis in the backward pass. It is done once for a tensor
and its axes, however often the tensor is used; once more after the local tensor was changed in place, as an optimizer
that works on local tensors does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.geometry import Layout, MeshSpec, Partial
from shardwise.tensor.autograd import LayoutMove, dual_layout, move_gradients, on_duals
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.sharded_tensor import ShardedTensor


class _Vary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: LayoutMove, tensor: Tensor) -> Tensor:
        ctx.link = link
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *move_gradients(ctx.link, (grads[0].contiguous(),))


def vary_along(tensor: ShardedTensor, layout: Layout, axes: Sequence[int]) -> Tensor:
    """The local tensor of a tensor that is replicated along these axes, its gradient summed over them."""
    local = tensor.local_parts[0]
    if not axes or not local.requires_grad or not torch.is_grad_enabled():
        return local
    cache: dict[tuple[int, ...], tuple[Tensor, int, Tensor]] = tensor.__dict__.setdefault("_varied", {})
    key = tuple(axes)
    known = cache.get(key)
    if known is None or known[0] is not local or known[1] != local._version:
        link = _gradient_move(tensor, layout, key)
        out = on_duals(lambda t: _Vary.apply(link, t), local)  # type: ignore[no-untyped-call]  # untyped in torch
        known = cache[key] = (local, local._version, out)
    return known[2]


def _gradient_move(tensor: ShardedTensor, layout: Layout, axes: tuple[int, ...]) -> LayoutMove:
    """The move from local gradients, pending along the axes, to the gradient's layout."""
    known = _pending_layouts(layout)
    src = known.get(axes)
    if src is None:
        src = known[axes] = _make_pending(dual_layout(layout), axes)
    return LayoutMove(src, dual_layout(layout), tensor.comm, tensor.dtype, "gradient of a replicated tensor")


@cache_by_identity
def _pending_layouts(layout: Layout) -> dict[tuple[int, ...], Layout]:
    """The layouts of local gradients by the axes along which they are pending, as far as they were asked for."""
    return {}


def _make_pending(gradient: Layout, axes: tuple[int, ...]) -> Layout:
    spec = gradient.spec
    assert isinstance(spec, MeshSpec)
    pending = [Partial("sum") if a in axes else p for a, p in enumerate(spec.placements)]
    return MeshSpec(spec.mesh, pending, spec.order).layout(gradient.shape)
