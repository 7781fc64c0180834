"""Pointwise operators: any dim may be sharded, as long as all operands are cut alike. Known from torch's own tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.engine.irregular import reduce_pieces
from shardwise.ops.engine.registry import Strategy, TensorMeta
from shardwise.ops.engine.schema import OperatorCall
from shardwise.tensor.autograd import tape_inputs
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import move_to
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

# Operators through which a pending sum stays pending, and which of their operands are pending together.
ALL_PENDING = {"aten::add", "aten::sub", "aten::add_", "aten::sub_"}
ONE_PENDING = {"aten::mul", "aten::mul_"}
FIRST_PENDING = {
    "aten::neg",
    "aten::neg_",
    "aten::div",
    "aten::div_",
    "aten::clone",
    "aten::_to_copy",
    "aten::positive",
    "aten::real",
    "aten::imag",
    "aten::conj",
}


def is_pointwise(op: Any) -> bool:
    """Whether torch tags the operator as pointwise and it draws no random numbers."""
    tags = getattr(op, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def pointwise_rule(op: Any, metas: Sequence[TensorMeta]) -> list[Strategy] | None:
    """The strategies of a pointwise operator, or None if it is not one."""
    if not is_pointwise(op):
        return None
    rounds = op._schema.overload_name.endswith("_mode")
    return pointwise_strategies(metas, "" if rounds else op._schema.name)


def pointwise_strategies(metas: Sequence[TensorMeta], name: str = "") -> list[Strategy]:
    """All replicated, each broadcast dim sharded, and pending sums where the operator is linear in them."""
    shape = _broadcast_shape(metas)
    replicated: tuple[Placement, ...] = (Replicate(),) * len(metas)
    found = [Strategy((Replicate(),), replicated)]
    for dim, length in enumerate(shape):
        inputs = tuple(_aligned_dim(m, dim, len(shape), length) for m in metas)
        if any(isinstance(p, Shard) for p in inputs):
            found.append(Strategy((Shard(dim),), inputs))
    return found + _pending_strategies(metas, name)


def _broadcast_shape(metas: Sequence[TensorMeta]) -> tuple[int, ...]:
    """The common shape; nothing is computed where there is one shape only."""
    shapes = {m.shape for m in metas if m.shape}
    if len(shapes) < 2:
        return next(iter(shapes), ())
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # untyped in torch


def _aligned_dim(meta: TensorMeta, dim: int, ndim: int, length: int) -> Placement:
    own = dim - (ndim - meta.ndim)
    return Shard(own) if own >= 0 and meta.shape[own] == length else Replicate()


def _pending_strategies(metas: Sequence[TensorMeta], name: str) -> list[Strategy]:
    kinds = sorted({p.op for m in metas for p in m.placements if isinstance(p, Partial)})
    found = []
    for kind in (k for k in kinds if k in ("sum", "avg")):
        partial = Partial(kind)
        if name in ALL_PENDING and len(metas) == 2:  # a number next to the tensor would be added once by each rank
            found.append(Strategy((partial,), (partial,) * len(metas)))
        if name in FIRST_PENDING or name in ONE_PENDING:
            found.append(Strategy((partial,), (partial, *(Replicate() for _ in metas[1:]))))
        if name in ONE_PENDING and len(metas) == 2 and not name.endswith("_"):  # a tensor written to keeps its layout
            found.append(Strategy((partial,), (Replicate(), partial)))
    return found


def compute_irregular_pointwise(call: OperatorCall, tensors: Sequence[ShardedTensor], comm: Comm) -> Any:
    """A pointwise operator on layouts without a mesh: piece by piece, all operands in the layout of the largest."""
    reduced = reduce_pieces(call, tensors)
    if reduced is not NotImplemented:
        return reduced
    lead = max(tensors, key=lambda t: (is_mesh_free(t), t.numel()))
    same_shape = all(t.shape == lead.shape or t.numel() == 1 for t in tensors)
    if not is_pointwise(call.op) or not same_shape:
        raise UnsupportedOpError(
            f"{call.op}: tensors in irregular pieces ({lead.sharding.spec!r}) support pointwise operators on equal "
            "shapes, copies and reductions of the whole tensor; redistribute to a mesh or chunk layout for others"
        )
    held = [_align_pieces(t, lead) for t in tensors]
    if not lead.local_parts:
        return _compute_on_nothing(call, lead, [pieces[0] for pieces in held], comm, tensors[0])
    results = []
    for slot in range(len(lead.local_parts)):
        args, kwargs = call.fill_slots([pieces[slot] for pieces in held])
        results.append(call.op(*args, **kwargs))
    if results and results[0] is held[0][0] and not torch.is_grad_enabled():
        return tensors[0]
    return wrap(lead.sharding, tuple(results), comm, dtype=lead.dtype)


def is_mesh_free(tensor: ShardedTensor) -> bool:
    """Whether the tensor's layout has no product form with one local tensor per rank."""
    return not tensor.sharding.is_regular


def _compute_on_nothing(
    call: OperatorCall, lead: ShardedTensor, stands: Sequence[Any], comm: Comm, first: ShardedTensor
) -> Any:
    """The result on a rank that holds nothing: the operator on no elements sets the dtype and stays on the tape."""
    args, kwargs = call.fill_slots(stands)
    result = call.op(*args, **kwargs)
    if result is stands[0] and not torch.is_grad_enabled():
        return first
    return wrap(lead.sharding, (), comm, dtype=result.dtype, anchor=result if result.requires_grad else None)


def _align_pieces(tensor: ShardedTensor, lead: ShardedTensor) -> Sequence[Any]:
    if tensor.shape != lead.shape:
        return [tensor.local_parts[0]] * max(1, len(lead.local_parts))
    locals_, anchor = move_to(tensor, lead.sharding, "pointwise")
    return locals_ or tape_inputs((), anchor, tensor.dtype, tensor.device)
