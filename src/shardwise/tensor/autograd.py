"""How do gradients follow a move? By duality: the backward of A -> B is dual(B) -> dual(A).

Local tensors are on the tape, not the ShardedTensor. A move is one node over this rank's local tensors. A rank that
holds nothing takes part through an anchor, a tensor without elements, so that every rank's backward pass meets the
same moves in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import is_dispatch_mode_on
from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Partial, Replicate
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.move_operator import MoveRecord, call_move_operator


@cache_by_identity
def dual_layout(layout: Layout) -> Layout:
    """The layout of a gradient: Shard stays Shard, Replicate stays Replicate, Partial becomes Replicate."""
    if layout.pending is None:
        return layout
    spec = layout.spec
    if not isinstance(spec, MeshSpec) or layout.pending.op != "sum":
        raise ValueError(
            f"no gradient passes through a pending {layout.pending.op}; redistribute to Shard or Replicate under "
            "torch.no_grad(), or use a pending sum or avg"
        )
    placements = [Replicate() if isinstance(p, Partial) else p for p in spec.placements]
    return MeshSpec(spec.mesh, placements, spec.order).layout(layout.shape)


@dataclass(frozen=True, slots=True)
class LayoutMove:
    """One move between two layouts; `scale` is an extra factor for the values of local tensors."""

    src: Layout
    dst: Layout
    comm: Comm
    dtype: torch.dtype
    label: str
    max_buffer_bytes: int | None = None
    scale: tuple[int, int] = (1, 1)
    forward: LayoutMove | None = None

    @property
    def changes_nothing(self) -> bool:
        """Whether every rank ends with what it began with."""
        return self.src == self.dst and self.scale == (1, 1)

    def backward(self) -> LayoutMove:
        """The move that the gradients make; the gradients of gradients make the first one again, as it is linear.

        The gradient of a pending sum is equal on all ranks, but each rank uses it by itself: what comes back to it are
        addends.
        """
        if self.forward is not None:
            return self.forward
        over = self.dst.pending.divisor if self.dst.pending else 1
        under = self.src.pending.divisor if self.src.pending else 1
        label = f"{self.label} (backward)"
        scale = (self.scale[0] * over, self.scale[1] * under)
        return LayoutMove(
            dual_layout(self.dst),
            dual_layout(self.src),
            self.comm,
            self.dtype,
            label,
            self.max_buffer_bytes,
            scale,
            self,
        )


def tape_inputs(
    locals_: Sequence[Tensor], anchor: Tensor | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """The tensors that represent this rank on the tape: its local tensors, or its anchor."""
    if locals_:
        return tuple(locals_)
    return (anchor if anchor is not None else torch.empty(0, dtype=dtype, device=device),)


class _MoveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: LayoutMove, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        return _apply_move(link, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *move_gradients(ctx.link.backward(), grads)


def _apply_move(link: LayoutMove, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    held = inputs if link.src.local_shapes(link.comm.rank) else ()
    moved = move_locals(link, tuple(t.detach() for t in held))
    return moved or (torch.empty(0, dtype=link.dtype, device=inputs[0].device),)


def move_gradients(link: LayoutMove, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run a move in a backward pass; it is recorded only where second derivatives are needed."""
    if torch.is_grad_enabled():
        return move_on_tape(link, grads)
    return grads if link.changes_nothing else _apply_move(link, grads)


def move_locals(link: LayoutMove, locals_: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Carry out a move on plain local tensors, without a tape; where a program is traced, as an operator."""
    record = MoveRecord(link.src, link.dst, link.comm, link.dtype, link.label, link.max_buffer_bytes, link.scale)
    return call_move_operator(record, locals_) if is_dispatch_mode_on() else record.run(locals_)


def move_on_tape(link: LayoutMove, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Carry out a move with its backward recorded; `inputs` as `tape_inputs` gives them."""
    outputs: tuple[Tensor, ...] = _MoveFunction.apply(link, *inputs)  # type: ignore[no-untyped-call]  # untyped in torch
    return outputs


def gradient_of_whole(layout: Layout, grads: tuple[Tensor, ...], comm: Comm) -> tuple[Tensor, ...]:
    """The gradients of a rank's local tensors as those of the whole tensor in its dual layout, for further derivatives.

    Of a pending sum all ranks have the same gradient, each for its own addend. Taken as one replicated tensor, what
    comes back to it is one gradient and not one for each rank.
    """
    if layout.pending is None or not any(g.requires_grad for g in grads):
        return grads
    link = LayoutMove(dual_layout(layout), _with_plain_sums(layout), comm, grads[0].dtype, "gradient of a pending sum")
    return move_on_tape(link.backward(), grads)


def gradient_of_addends(layout: Layout, grads: tuple[Tensor, ...], comm: Comm) -> tuple[Tensor, ...]:
    """The reverse: the gradient of a whole tensor as that of each rank's addend."""
    if layout.pending is None or not any(g.requires_grad for g in grads):
        return grads
    link = LayoutMove(_with_plain_sums(layout), dual_layout(layout), comm, grads[0].dtype, "gradient of a pending sum")
    return move_on_tape(link.backward(), grads)


@cache_by_identity
def _with_plain_sums(layout: Layout) -> Layout:
    """The layout with plain sums for its pending reductions."""
    spec = layout.spec
    assert isinstance(spec, MeshSpec)
    placements = [Partial("sum") if isinstance(p, Partial) else p for p in spec.placements]
    return MeshSpec(spec.mesh, placements, spec.order).layout(layout.shape)
