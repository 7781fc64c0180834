"""Pointwise operators: any dim may be sharded, as long as all operands are cut alike. Known from torch's own tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.engine.registry import Strategy, TensorMeta
from shardwise.ops.engine.schema import is_pointwise

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
