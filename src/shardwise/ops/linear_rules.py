"""`linear` and `matmul` as operators of their own: no dims are merged, so inner dims may be cut in any way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import Comm
from shardwise.geometry import Placement, Replicate, Shard
from shardwise.ops.engine import call_op
from shardwise.ops.matmul_rules import product_strategies
from shardwise.ops.rules import Strategy, TensorMeta, register_sharding
from shardwise.tensor.dispatch import handler

aten = torch.ops.aten
LETTERS = "abcdefghij"


@register_sharding(aten.linear.default)
def linear(x: TensorMeta, weight: TensorMeta, bias: TensorMeta | None = None) -> list[Any]:
    rows = LETTERS[: x.ndim - 1]
    out = "n" if weight.ndim == 2 else ""
    strategies = product_strategies(f"{rows}k,{out}k->{rows}{out}")
    if bias is None:
        return strategies
    return [Strategy(s.outputs, (*s.inputs, _of_bias(s.outputs[0], bias, x.ndim - 1))) for s in strategies]


def _of_bias(result: Placement | None, bias: TensorMeta, last: int) -> Placement:
    """The bias is cut where the last dim of the result is, and pending where the result is."""
    if isinstance(result, Shard):
        return Shard(0) if result.dim == last and bias.ndim and bias.shape[0] != 1 else Replicate()
    return result or Replicate()


@register_sharding(aten.matmul.default)
def matmul(a: TensorMeta, b: TensorMeta) -> list[Any]:
    """Products of the last two dims, the others broadcast: a dim of length 1 is whole wherever the other is cut."""
    batch = LETTERS[: max(a.ndim, b.ndim, 2) - 2]
    left = _letters(a, batch, "mk" if a.ndim > 1 else "k")
    right = _letters(b, batch, "kn" if b.ndim > 1 else "k")
    ends = ("m" if a.ndim > 1 else "") + ("n" if b.ndim > 1 else "")
    strategies = product_strategies(f"{left},{right}->{batch}{ends}")
    return [_whole_ones(s, (a, b)) for s in strategies if _is_cut(s, (a, b))]


def _letters(x: TensorMeta, batch: str, matrix: str) -> str:
    own = max(0, x.ndim - 2)
    return batch[len(batch) - own :] + matrix


def _is_cut(strategy: Strategy, metas: Sequence[TensorMeta]) -> bool:
    """Whether a cut batch dim is longer than 1 in one of the operands."""
    dims = [(p.dim, m) for p, m in zip(strategy.inputs, metas, strict=True) if isinstance(p, Shard)]
    return not dims or any(m.shape[d] != 1 or d >= m.ndim - 2 for d, m in dims)


def _whole_ones(strategy: Strategy, metas: Sequence[TensorMeta]) -> Strategy:
    """The strategy with batch dims of length 1 replicated."""
    inputs = tuple(
        Replicate() if isinstance(p, Shard) and p.dim < m.ndim - 2 and m.shape[p.dim] == 1 else p
        for p, m in zip(strategy.inputs, metas, strict=True)
    )
    return Strategy(strategy.outputs, inputs)


def _as_operator(op: Any, names: Sequence[str], *functions: Callable[..., Any]) -> None:
    """Let torch functions be this operator; arguments given by name are put in their places."""

    @handler(*functions)
    def call(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
        return call_op(op, types, tuple(given), {})


_as_operator(aten.linear.default, ("input", "weight", "bias"), F.linear)
_as_operator(aten.matmul.default, ("input", "other"), torch.matmul, Tensor.matmul, Tensor.__matmul__)


@handler(Tensor.__rmatmul__)
def _rmatmul(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    return call_op(aten.matmul.default, types, (args[1], args[0]), {})
