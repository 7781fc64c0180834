"""Pointwise operators: any dim may be sharded, as long as all operands are cut alike. Known from torch's own tag."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from typing import Any

import torch

from shardwise._torch import aten
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Strategy, TensorMeta, is_pointwise, takes_copies

# Operators through which a pending sum stays pending, and which of their operands are pending together. Not by a tensor
# that is divided by, nor by a number that is 0 or not finite: addends of both signs would become zeros or infinities of
# both signs, and their sum has the wrong sign or is not a number.
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


UNTAGGED = (  # by torch; some have decompositions with other gradients or values at ties, infinities and nan
    aten.hardswish.default,
    aten.hardswish_.default,
    aten.complex.default,
    aten.polar.default,
    aten.floor_divide.default,
    aten.floor_divide_.Tensor,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.hardsigmoid_backward.default,
    aten.softplus_backward.default,
    aten.log_sigmoid.default,  # made of operators whose second gradient at 0 is another
)


@register_sharding(list(UNTAGGED))
@takes_copies
def untagged_rule(*args: Any, **kwargs: Any) -> list[Strategy]:
    return pointwise_strategies([v for v in (*args, *kwargs.values()) if isinstance(v, TensorMeta)])


@register_sharding([aten.isin.Tensor_Tensor, aten.bucketize.Tensor])
def membership_rule(elements: TensorMeta, among: TensorMeta, **options: bool) -> list[Strategy]:
    """Pointwise in the elements; the others are whole. The decompositions take a nan for the end, or read values."""
    return [Strategy(s.outputs, (*s.inputs, Replicate())) for s in pointwise_strategies([elements])]


def pointwise_rule(op: Any, metas: Sequence[TensorMeta], arguments: Sequence[Any] = ()) -> list[Strategy] | None:
    """The strategies of a pointwise operator, or None if it is not one; `arguments` has its numbers among others."""
    if not is_pointwise(op):
        return None
    outs = sum(a.is_out for a in op._schema.arguments)
    return pointwise_strategies(metas, op._schema.name if _is_linear(op, len(metas) - outs, arguments) else "", outs)


def _is_linear(op: Any, given: int, arguments: Sequence[Any]) -> bool:
    """Whether the operator may keep sums pending with these numbers, and so many tensors that are not written."""
    if op._schema.overload_name.endswith("_mode"):  # these round
        return False
    if op._schema.name.startswith("aten::div") and given > 1:
        return False
    numbers = [n for n in arguments if isinstance(n, int | float | complex) and not isinstance(n, bool)]
    return all(cmath.isfinite(n) and n != 0 for n in numbers)


def pointwise_strategies(metas: Sequence[TensorMeta], name: str = "", outs: int = 0) -> list[Strategy]:
    """All replicated, each broadcast dim sharded, and pending sums where the operator is linear in them.

    The last `outs` tensors are written to.
    """
    shape = _broadcast_shape(metas)
    replicated: tuple[Placement, ...] = (Replicate(),) * len(metas)
    found = [Strategy((Replicate(),), replicated)]
    for dim, length in enumerate(shape):
        inputs = tuple(_aligned_dim(m, dim, len(shape), length) for m in metas)
        if any(isinstance(p, Shard) for p in inputs):
            found.append(Strategy((Shard(dim),), inputs))
    return found + _pending_strategies(metas, name, outs)


def _broadcast_shape(metas: Sequence[TensorMeta]) -> tuple[int, ...]:
    """The common shape; nothing is computed where there is one shape only."""
    shapes = {m.shape for m in metas if m.shape}
    if len(shapes) < 2:
        return next(iter(shapes), ())
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # untyped in torch


def _aligned_dim(meta: TensorMeta, dim: int, ndim: int, length: int) -> Placement:
    own = dim - (ndim - meta.ndim)
    return Shard(own) if own >= 0 and meta.shape[own] == length else Replicate()


def _pending_strategies(metas: Sequence[TensorMeta], name: str, outs: int) -> list[Strategy]:
    kinds = sorted({p.op for m in metas for p in m.placements if isinstance(p, Partial)})
    found, given = [], len(metas) - outs
    for kind in (k for k in kinds if k in ("sum", "avg")):
        partial = Partial(kind)
        written = (partial,) * outs
        if name in ALL_PENDING and given == 2:  # a number next to the tensor would be added once by each rank
            found.append(Strategy((partial,), (partial,) * len(metas)))
        if name in FIRST_PENDING or name in ONE_PENDING:
            found.append(Strategy((partial,), (partial, *(Replicate() for _ in range(given - 1)), *written)))
        if name in ONE_PENDING and given == 2 and not name.endswith("_"):  # a tensor written to keeps its layout
            found.append(Strategy((partial,), (Replicate(), partial, *written)))
    return found
