"""Rules of matrix products, from one description of each: which letters are rows, columns, batches and sums.

`linear` and `matmul` are operators of their own: no dims are merged, so inner dims may be split in any way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise._torch import aten, decompose
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta, ignores_lengths
from shardwise.ops.engine.rules import register_sharding


def product_strategies(formula: str, pending: Sequence[TensorMeta] = ()) -> list[Strategy]:
    """Strategies of a product written as in einsum: "mk,kn->mn".

    A letter may be sharded wherever it appears; a letter that is summed over leaves a pending sum.

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
@ignores_lengths
def mm(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("mk,kn->mn")


@register_sharding(aten.bmm.default)
@ignores_lengths
def bmm(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("bmk,bkn->bmn")


@register_sharding(aten.mv.default)
@ignores_lengths
def mv(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("mk,k->m")


@register_sharding(aten.dot.default)
def dot(a: TensorMeta, b: TensorMeta) -> list[Any]:
    return product_strategies("k,k->")


def _bias_strategies(bias: TensorMeta, formula: str) -> list[Strategy]:
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
@ignores_lengths
def addmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta, *, beta: float = 1, alpha: float = 1) -> list[Any]:
    return _bias_strategies(bias, "mk,kn->mn")


@register_sharding(aten.baddbmm.default)
@ignores_lengths
def baddbmm(bias: TensorMeta, a: TensorMeta, b: TensorMeta, *, beta: float = 1, alpha: float = 1) -> list[Any]:
    return _bias_strategies(bias, "bmk,bkn->bmn")


LETTERS = "abcdefghij"


@register_sharding(aten.linear.default)
@ignores_lengths
def linear(x: TensorMeta, weight: TensorMeta, bias: TensorMeta | None = None) -> list[Any]:
    rows = LETTERS[: x.ndim - 1]
    out = "n" if weight.ndim == 2 else ""
    strategies = product_strategies(f"{rows}k,{out}k->{rows}{out}")
    if bias is None:
        return strategies
    return [
        Strategy(s.outputs, (*s.inputs, _linear_bias_placement(s.outputs[0], bias, x.ndim - 1))) for s in strategies
    ]


def _linear_bias_placement(result: Placement | None, bias: TensorMeta, last: int) -> Placement:
    """The bias is cut where the last dim of the result is, and pending where the result is."""
    if isinstance(result, Shard):
        return Shard(0) if result.dim == last and bias.ndim and bias.shape[0] != 1 else Replicate()
    return result or Replicate()


@register_sharding(aten.matmul.default)
@ignores_lengths
def matmul(a: TensorMeta, b: TensorMeta) -> list[Any]:
    """Products of the last two dims, the others broadcast: a dim of length 1 is whole wherever the other is cut."""
    batch = LETTERS[: max(a.ndim, b.ndim, 2) - 2]
    left = _letters(a, batch, "mk" if a.ndim > 1 else "k")
    right = _letters(b, batch, "kn" if b.ndim > 1 else "k")
    ends = ("m" if a.ndim > 1 else "") + ("n" if b.ndim > 1 else "")
    strategies = product_strategies(f"{left},{right}->{batch}{ends}")
    return [_replicate_ones(s, (a, b)) for s in strategies if _is_cut(s, (a, b))]


def _letters(x: TensorMeta, batch: str, matrix: str) -> str:
    own = max(0, x.ndim - 2)
    return batch[len(batch) - own :] + matrix


def _is_cut(strategy: Strategy, metas: Sequence[TensorMeta]) -> bool:
    """Whether a cut batch dim is longer than 1 in one of the operands."""
    dims = [(p.dim, m) for p, m in zip(strategy.inputs, metas, strict=True) if isinstance(p, Shard)]
    return not dims or any(m.shape[d] != 1 or d >= m.ndim - 2 for d, m in dims)


def _replicate_ones(strategy: Strategy, metas: Sequence[TensorMeta]) -> Strategy:
    """The strategy with batch dims of length 1 replicated."""
    inputs = tuple(
        Replicate() if isinstance(p, Shard) and p.dim < m.ndim - 2 and m.shape[p.dim] == 1 else p
        for p, m in zip(strategy.inputs, metas, strict=True)
    )
    return Strategy(strategy.outputs, inputs)


@register_sharding(aten.einsum.default)
@ignores_lengths
def einsum(equation: str, tensors: Sequence[TensorMeta], *, path: Sequence[int] | None = None) -> list[Any] | Steps:
    """A product of several tensors by its own formula; diagonals, dots and dims that broadcast are broken down."""
    formula = _write_formula(equation)
    operands = formula.split("->")[0].split(",")
    lengths: dict[str, int] = {}
    plain = "." not in formula and len(tensors) > 1
    plain &= [len({*names}) for names in operands] == [t.ndim for t in tensors]
    for names, tensor in zip(operands, tensors, strict=True) if plain else ():
        plain &= all(lengths.setdefault(letter, n) == n for letter, n in zip(names, tensor.shape, strict=True))
    return product_strategies(formula) if plain else Steps(_break_einsum_down)


def _write_formula(equation: str) -> str:
    """The equation with its result written out: the letters that appear once, in order.

    >>> _write_formula("ij, jk"), _write_formula("ij,jk->ki")
    ('ij,jk->ik', 'ij,jk->ki')
    """
    formula = equation.replace(" ", "")
    if "->" in formula:
        return formula
    return f"{formula}->" + "".join(sorted(c for c in {*formula} - {","} if formula.count(c) == 1))


def _break_einsum_down(equation: str, tensors: Any, **options: Any) -> Any:
    return decompose(aten.einsum.default, (equation, tensors), options)


def _add_products(x: Any, one: Any, other: Any, *, beta: complex = 1, alpha: complex = 1) -> Any:
    """The sum of the products of all pairs of matrices, added to a tensor; one that is not added is not looked at."""
    total = aten.bmm.default(one, other).sum(0)
    scaled = total if alpha == 1 else total * alpha
    return scaled if beta == 0 else (x if beta == 1 else x * beta) + scaled


register_sharding(aten.addbmm.default, Steps(_add_products))


@register_sharding(aten._pdist_forward.default)
def pair_distances(x: TensorMeta, p: float = 2) -> list[Strategy]:
    """Every row meets every other: they are wanted whole."""
    return [Strategy((Replicate(),), (Replicate(),))]
