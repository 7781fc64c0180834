"""No rule yet? Find one by trying the operator out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.ops.discovery.auto_rule import AutoRule, format_strategy
from shardwise.ops.discovery.rule_source import rule_source
from shardwise.ops.discovery.search import find_strategies, make_runnable
from shardwise.ops.engine.registry import Strategy
from shardwise.ops.engine.schema import OperatorCall, resolve_op, split_call


@dataclass(frozen=True, slots=True, repr=False)
class DiscoveryReport:
    """The strategies that an operator was seen to have, as values, as a rule, and as Python to paste."""

    op: Any
    call: OperatorCall
    strategies: tuple[Strategy, ...]
    notes: tuple[str, ...]
    rule: AutoRule

    def source(self) -> str:
        """A rule in Python; dims are written relative to the operator's `dim` argument where it has one.

        >>> import torch
        >>> x = torch.zeros(4, 3)
        >>> print(discover_sharding(torch.ops.aten._softmax.default, x, 1, False).source())
        from shardwise import Replicate, Shard, register_sharding
        <BLANKLINE>
        <BLANKLINE>
        @register_sharding(torch.ops.aten._softmax.default)
        def softmax_rule(x, dim, half_to_float):
            found = [([Replicate()], [Replicate(), None, None])]
            found += [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim % x.ndim]
            return found
        <BLANKLINE>
        """
        return rule_source(self.call, self.strategies, self.notes)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(t.shape)) for t in self.call.tensors)
        lines = [f"{self.op} on {shapes}:", *(f"  {format_strategy(s)}" for s in self.strategies)]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def discover_sharding(op: Any, *sample_args: Any, **sample_kwargs: Any) -> DiscoveryReport:
    """Find the strategies of an operator by trying: cut sample inputs in parts and see what the results make up.

    The samples set shapes, dtypes and the range of integers; values are drawn at random. Dims of equal length are split
    together, so use different lengths, of 4 or more, for unrelated dims. Samples on a device are copied to host memory,
    unless the operator does not run there.

    >>> import torch
    >>> discover_sharding(torch.ops.aten.mm.default, torch.zeros(4, 6), torch.zeros(6, 5))
    aten.mm.default on (4, 6), (6, 5):
      R, R -> R
      S(1), S(0) -> P(sum)
      S(0), R -> S(0)
      R, S(1) -> S(1)
      R, P(sum) -> P(sum)
      P(sum), R -> P(sum)
    """
    op = resolve_op(op)
    call = make_runnable(split_call(op, sample_args, sample_kwargs))
    findings = find_strategies(call)
    rule = AutoRule(op)
    rule.remember(call, findings)
    return DiscoveryReport(op, call, findings.strategies, findings.notes, rule)
