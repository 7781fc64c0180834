"""Rules of matrix products, from one description of each: which letters are rows, columns, batches and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.rules import Strategy, TensorMeta, register_sharding

aten = torch.ops.aten


def product_strategies(formula: str, pending: Sequence[TensorMeta] = ()) -> list[Strategy]:
    """Strategies of a product written as in einsum: "mk,kn->mn".

    A letter may be sharded wherever it stands; a letter that is summed over leaves a pending sum.

    >>> [s.outputs for s in product_strategies("mk,kn->mn")]
    [(Replicate(),), (Shard(0),), (Partial('sum'),), (Shard(1),), (Partial('sum'),), (Partial('sum'),)]
    """
    left, out = formula.split("->")
    operands = left.split(",")
    found = [Strategy((Replicate(),), (Replicate(),) * len(operands))]
    for letter in dict.fromkeys("".join(operands)):
        inputs = tuple(_shard_of(letter, names) for names in operands)
        result: Placement = Shard(out.index(letter)) if letter in out else Partial("sum")
        found.append(Strategy((result,), inputs))
    for index in range(len(operands)):
        pended = tuple(Partial("sum") if i == index else Replicate() for i in range(len(operands)))
        found.append(Strategy((Partial("sum"),), pended))
    return found


def _shard_of(letter: str, names: str) -> Placement:
    return Shard(names.index(letter)) if letter in names else Replicate()


@register_sharding(aten.mm.default)
def mm(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("mk,kn->mn")


@register_sharding(aten.bmm.default)
def bmm(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("bmk,bkn->bmn")


@register_sharding(aten.mv.default)
def mv(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("mk,k->m")


@register_sharding(aten.dot.default)
def dot(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("k,k->")


def _with_bias(bias: TensorMeta, formula: str) -> list[Strategy]:
    """A product plus a tensor that broadcasts to it: the bias is cut as the result is, and pending where that is."""
    ndim = len(formula.split("->")[1])
    return [
        Strategy(s.outputs, (_bias_placement(bias, s.outputs[0], ndim), *s.inputs)) for s in product_strategies(formula)
    ]


def _bias_placement(bias: TensorMeta, result: Placement | None, ndim: int) -> Placement:
    if isinstance(result, Shard):
        own = result.dim - (ndim - bias.ndim)
        return Shard(own) if own >= 0 and bias.shape[own] != 1 else Replicate()
    return result or Replicate()


@register_sharding(aten.addmm.default)
def addmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta, *, beta: float = 1, alpha: float = 1) -> list[Any]:
    return _with_bias(bias, "mk,kn->mn")


@register_sharding(aten.baddbmm.default)
def baddbmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta, *, beta: float = 1, alpha: float = 1) -> list[Any]:
    return _with_bias(bias, "bmk,bkn->bmn")
