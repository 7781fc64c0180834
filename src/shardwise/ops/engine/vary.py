"""Replicated values in varying computations: identity forward, one reduction backward.

Where an operation differs from rank to rank along an axis, the gradients that its replicated inputs get are addends.
`vary` passes such a tensor on and sums its gradients over the axis in the backward pass. It is done once for a tensor
and its axes, however often the tensor is used; once more after the local tensor was changed in place, as an optimizer
that works on local tensors does, or was given other memory.

A tensor that was moved to be replicated, as a sharded parameter is gathered, and then varies, is one node on the tape:
its gradients are summed and cut by one move, which takes half the bytes of a sum everywhere that is cut afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import is_dual_level, storage_identity
from shardwise.comm.traced import is_tracing
from shardwise.geometry import Layout, MeshSpec, Partial
from shardwise.ops.engine.gathers.gather_again import find_gather, label_again, note_gather
from shardwise.ops.engine.gathers.gather_order import find_parameter, is_cast
from shardwise.ops.engine.gathers.prefetch import current_prefetcher
from shardwise.ops.engine.summed import find_sum, keep_sum
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.move import move_to
from shardwise.tensor.moving.autograd import LayoutMove, dual_layout, move_gradients, with_moved_gradient
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_SOURCE = "_moved_from"


class _MoveAndVary(torch.autograd.Function):
    """From the tensors before a move to its result; gradients are summed and moved back at once."""

    @staticmethod
    def forward(ctx: Any, link: LayoutMove, moved: Tensor, *sources: Tensor) -> Tensor:
        ctx.link, ctx.prefetcher = link, current_prefetcher()
        return moved.view_as(moved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        if ctx.prefetcher is not None and ctx.prefetcher.sum_later(ctx.next_functions, ctx.link, grad):
            return None, None, *(None for _ in ctx.next_functions[1:])
        return None, None, *move_gradients(ctx.link, (grad,))


def move_input(tensor: ShardedTensor, layout: Layout, label: str) -> ShardedTensor:
    """A tensor in the layout in which an operator wants it; from which one it was moved is noted."""
    pending = tensor.sharding.pending is not None
    if pending and (summed := find_sum(tensor, layout)) is not None:
        return summed if summed.sharding == layout else move_input(summed, layout, label)
    traced = is_tracing()
    gather = None if traced else find_gather(tensor, layout, label)
    prefetcher = None if gather is None else current_prefetcher()
    started = None if gather is None or prefetcher is None else prefetcher.ask(gather)
    label = label_again(tensor, label) if traced else label
    locals_, anchor = move_to(tensor, layout, label, started=started)
    moved = wrap(layout, locals_, tensor.comm, dtype=tensor.dtype, anchor=anchor)
    moved.__dict__[_SOURCE] = tensor
    if gather is not None:
        note_gather(moved, tensor, gather)
    if pending:
        keep_sum(tensor, moved)
    return moved


def vary_along(tensor: ShardedTensor, layout: Layout, axes: Sequence[int]) -> Tensor:
    """The local tensor of a tensor that is replicated along these axes, its gradient summed over them."""
    local = tensor.local_parts[0]
    if not axes or not local.requires_grad or not torch.is_grad_enabled():
        return local
    cache: dict[tuple[int, ...], tuple[Tensor, tuple[int, int], Tensor]] = tensor.__dict__.setdefault("_varied", {})
    key = tuple(axes)
    known = cache.get(key)
    state = local._version, 0 if is_tracing() else storage_identity(local.untyped_storage())  # `data` may be replaced
    if known is None or known[0] is not local or known[1] != state:
        out = _record_varying(tensor, local, layout, key)
        known = cache[key] = (local, state, out)
    return known[2]


def _record_varying(tensor: ShardedTensor, local: Tensor, layout: Layout, axes: tuple[int, ...]) -> Tensor:
    link = _gradient_move(tensor, layout, axes)
    source: ShardedTensor | None = tensor.__dict__.get(_SOURCE)
    if is_dual_level() or (source is not None and source.sharding.pending is not None):
        return with_moved_gradient(link, local)
    if source is not None:
        back = LayoutMove(source.sharding, layout, tensor.comm, tensor.dtype, "parameter").backward()
        link = replace(link, dst=back.dst, scale=back.scale, label="gradient of a moved tensor")
    elif not is_cast(tensor):
        return with_moved_gradient(link, local)
    before = tensor if source is None else source
    if is_cast(before) and (parameter := find_parameter(before)) is not None:  # the cast is part of the move
        before, link = parameter, replace(link, out_dtype=parameter.dtype)
    return _MoveAndVary.apply(link, local.detach(), *before._tape_tensors())  # type: ignore[no-untyped-call, no-any-return]


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
