"""Joining and repeating: cat, stack, repeat, pad, diagonals.

Tensors that are cut alike along the dim they are joined along keep their cuts: the result is cut in groups, one for
each tensor. Nothing is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise._torch import aten
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.engine.registry import Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding
from shardwise.ops.rules.view import pending_kinds, renumber_dims


@register_sharding(aten.cat.default)
def cat(tensors: Sequence[TensorMeta], dim: int = 0) -> list[Any]:
    ndim = max(t.ndim for t in tensors)
    at = dim % max(1, ndim)
    found = [_same_cut_strategy(Replicate(), Replicate(), len(tensors))]
    if any(t.ndim != ndim for t in tensors):
        return found + _strategies_beside_nothing(tensors, ndim)
    found += [_same_cut_strategy(Shard(d), Shard(d), len(tensors)) for d in range(ndim) if d != at]
    found += [_same_cut_strategy(p, p, len(tensors)) for p in _joint_pending_kinds(tensors)]
    cuts = [p for t in tensors for p in t.placements if isinstance(p, Shard) and p.dim == at]
    if cuts and all(p.is_plain for p in cuts):
        found.append(_same_cut_strategy(Shard(at, groups=tuple(t.shape[at] for t in tensors)), Shard(at), len(tensors)))
    return found


def _strategies_beside_nothing(tensors: Sequence[TensorMeta], ndim: int) -> list[Strategy]:
    """One tensor beside tensors of shape (0,), which torch skips: it is cut as it is (a cache that is still empty)."""
    full = [t for t in tensors if t.shape != (0,)]
    if len(full) != 1:
        return []
    cuts: list[Placement] = [Shard(d) for d in range(ndim)]
    return [Strategy((p,), tuple(p if t is full[0] else Replicate() for t in tensors)) for p in cuts]


def _joint_pending_kinds(tensors: Sequence[TensorMeta]) -> list[Partial]:
    """The pending reductions in which tensors are joined: each can be put in such a form, with its gradient."""
    if len({t.dtype for t in tensors}) > 1:
        return []
    taped = any(t.requires_grad for t in tensors)
    return [p for p in pending_kinds(*tensors) if not taped or p.op in ("sum", "avg")]


def _same_cut_strategy(out: Placement, given: Placement, count: int) -> Strategy:
    return Strategy((out,), (given,) * count)


@register_sharding(aten.stack.default)
def stack(tensors: Sequence[TensorMeta], dim: int = 0) -> list[Any]:
    ndim = tensors[0].ndim
    at = dim % (ndim + 1)
    found = [_same_cut_strategy(Replicate(), Replicate(), len(tensors))]
    found += [_same_cut_strategy(Shard(d + (d >= at)), Shard(d), len(tensors)) for d in range(ndim)]
    return found + [_same_cut_strategy(p, p, len(tensors)) for p in _joint_pending_kinds(tensors)]


@register_sharding(aten.repeat.default)
def repeat(x: TensorMeta, repeats: Sequence[int]) -> list[Any]:
    added = len(repeats) - x.ndim
    return renumber_dims(x, [d + added if repeats[d + added] == 1 else None for d in range(x.ndim)])


@register_sharding(aten.constant_pad_nd.default)
def pad(x: TensorMeta, pad: Sequence[int], value: float = 0) -> list[Any]:
    first = x.ndim - len(pad) // 2
    grown = {x.ndim - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]}
    found = renumber_dims(x, [None if d in grown else d for d in range(x.ndim)])
    return found if value == 0 or first == x.ndim else [s for s in found if not isinstance(s.inputs[0], Partial)]


@register_sharding(aten.diagonal_scatter.default)
def diagonal_scatter(x: TensorMeta, src: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Any]:
    """The two dims of the diagonal are whole; the others are the first dims of what is written."""
    rest = [d for d in range(x.ndim) if d not in (dim1 % x.ndim, dim2 % x.ndim)]
    return [
        Strategy((Replicate(),), (Replicate(), Replicate())),
        *(Strategy((Shard(d),), (Shard(d), Shard(own))) for own, d in enumerate(rest)),
    ]


@register_sharding(aten.diagonal.default)
def diagonal(x: TensorMeta, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Any]:
    gone = {dim1 % x.ndim, dim2 % x.ndim}
    rest = [d for d in range(x.ndim) if d not in gone]
    return renumber_dims(x, [rest.index(d) if d in rest else None for d in range(x.ndim)])
