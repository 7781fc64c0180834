"""How do gradients follow a move? By duality: the backward of A -> B is dual(B) -> dual(A).

Local tensors are on the tape, not the ShardedTensor. A move is one node over this rank's local tensors. A rank that
holds nothing takes part through an anchor, a tensor without elements, so that every rank's backward pass meets the
same moves in the same order.

In forward mode the local tensors have tangents. A move is linear, so tangents make the same move. While dual numbers
are in use, ranks first agree on whether there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from shardwise._torch import forward_ad, is_dispatch_mode_on, is_dual_level
from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Partial, Replicate
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.moving.debug_modes import remember_debug_modes
from shardwise.tensor.moving.move_operator import MoveRecord, call_move_operator
from shardwise.tensor.recorder import find_recorder, recorders
from shardwise.tensor.user_line import user_line


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


class StartedMove(Protocol):
    """A move that was started before it was needed."""

    def take(self) -> tuple[Tensor, ...] | None:
        """Its result, the first time; None later."""
        ...


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
    out_dtype: torch.dtype | None = None  # of the results, if it is another one
    started: StartedMove | None = field(default=None, compare=False)

    @property
    def changes_nothing(self) -> bool:
        """Whether every rank ends with what it began with."""
        return self.src == self.dst and self.scale == (1, 1) and self.out_dtype in (None, self.dtype)

    def record(self, device: torch.device | None = None) -> MoveRecord:
        """The move without what it has to do with gradients."""
        return MoveRecord(
            self.src,
            self.dst,
            self.comm,
            self.dtype,
            self.label,
            self.max_buffer_bytes,
            self.scale,
            self.out_dtype,
            None if device == self.comm.device else device,
        )

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


Mover: TypeAlias = Callable[[LayoutMove, tuple[Tensor, ...]], tuple[Tensor, ...]]


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
    moved = _move_plain(link, held, inputs[0].device)
    return moved or (torch.empty(0, dtype=link.out_dtype or link.dtype, device=inputs[0].device),)


def move_gradients(link: LayoutMove, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run a move in a backward pass; it is recorded only where second derivatives are needed."""
    if torch.is_grad_enabled():
        return move_on_tape(link, grads)
    if link.changes_nothing:
        return grads
    return _move_duals(_apply_move, link, grads) if is_dual_level() else _apply_move(link, grads)


NO_TANGENT = "_no_tangent"  # in the attributes of a ShardedTensor that was detached while dual numbers are in use


def is_differentiated(tensor: Tensor) -> bool:
    """Whether what is computed from a tensor is recorded, or has a tangent."""
    if is_dual_level() and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return NO_TANGENT not in tensor.__dict__
    return torch.is_grad_enabled() and tensor.requires_grad


def split_dual(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The value of a tensor and its tangent, zeros if it has none; both are recorded, or none of them."""
    primal, tangent = forward_ad.unpack_dual(tensor)
    if tangent is None:
        tangent = torch.zeros_like(primal)
    if torch.is_grad_enabled() and primal.requires_grad and not tangent.requires_grad:
        never = torch.zeros((), dtype=torch.bool, device=primal.device)
        tangent = torch.where(never, primal, tangent)  # every rank's backward pass then meets the same moves
    return primal, tangent


def any_rank_has_tangents(tensors: Sequence[Tensor], comm: Comm, label: str) -> bool:
    """Whether some local tensor of some rank has a tangent; every rank asks."""
    known = any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    everyone: Comm = getattr(comm, "real", comm)  # of a rank that takes part without data
    return b"1" in everyone.all_gather_bytes(b"1" if known else b"0", label=f"{label} (tangents)")


def on_duals(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply a linear function to the value and to the tangent of a tensor, if there are tangents."""
    if not is_dual_level() or forward_ad.unpack_dual(tensor).tangent is None:
        return function(tensor)
    primal, tangent = split_dual(tensor)
    made: Tensor = forward_ad.make_dual(function(primal), function(tangent))
    return made


def _move_duals(move: Mover, link: LayoutMove, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Carry out a move of values and tangents."""
    if not (link.dtype.is_floating_point or link.dtype.is_complex):
        return move(link, inputs)
    if not any_rank_has_tangents(inputs, link.comm, link.label):
        return move(link, inputs)
    dual_layout(link.src), dual_layout(link.dst)  # a pending maximum is not linear
    pairs = [split_dual(t) for t in inputs]
    values, tangents = (move(link, tuple(pair[i] for pair in pairs)) for i in (0, 1))
    return tuple(map(forward_ad.make_dual, values, tangents))


def move_locals(
    link: LayoutMove, locals_: tuple[Tensor, ...], device: torch.device | None = None
) -> tuple[Tensor, ...]:
    """Carry out a move on local tensors, without a tape; where a program is traced, as an operator.

    `device`: where the tensor is, for ranks that have none of it; by default the comm's.
    """
    if is_dual_level():
        return _move_duals(partial(_move_plain, device=device), link, locals_)
    return _move_plain(link, locals_, device)


def _move_plain(
    link: LayoutMove, locals_: tuple[Tensor, ...], device: torch.device | None = None
) -> tuple[Tensor, ...]:
    if link.started is not None and (moved := link.started.take()) is not None:
        return moved
    record = link.record(None if locals_ else device)
    held = tuple(t.detach() for t in locals_)
    if not is_dispatch_mode_on():
        return record.run(held)
    with remember_debug_modes():
        return call_move_operator(record, held)


def move_on_tape(link: LayoutMove, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Carry out a move with its backward recorded; `inputs` as `tape_inputs` gives them."""
    return _move_duals(_move_recorded, link, inputs) if is_dual_level() else _move_recorded(link, inputs)


def _move_recorded(link: LayoutMove, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = _MoveFunction.apply(link, *inputs)  # type: ignore[no-untyped-call]  # untyped in torch
    if recorders and (recorder := find_recorder(link.comm)) is not None:
        recorder.watch_backward(outputs, inputs, user_line())
    return outputs


class _MovedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: LayoutMove, tensor: Tensor) -> Tensor:
        ctx.link = link
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *move_gradients(ctx.link, (grads[0].contiguous(),))


def with_moved_gradient(link: LayoutMove, tensor: Tensor) -> Tensor:
    """The same local tensor; the gradients that reach the result make a move before they reach the tensor."""
    return on_duals(lambda t: _MovedGradient.apply(link, t), tensor)  # type: ignore[no-untyped-call]  # untyped in torch


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
