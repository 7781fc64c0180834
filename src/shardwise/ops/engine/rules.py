"""Rules: how an operator may be computed on one mesh axis. Built-in ones and users' own use the same decorator.

What a rule sees and answers is in `registry.py`. The engine makes the choice for each axis of the mesh. A rule of a
user's own is registered for torch's DTensor too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

from shardwise._torch import present_ops
from shardwise.ops import dtensor_rules
from shardwise.ops.discovery.auto_rule import AutoRule
from shardwise.ops.engine.registry import (
    Rule,
    Strategy,
    TensorMeta,
    find_rule,
    normalise_strategies,
    registered_ops,
    set_rule,
)
from shardwise.ops.engine.schema import resolve_op

R = TypeVar("R", bound=Rule)

__all__ = [
    "Rule",
    "Strategy",
    "TensorMeta",
    "find_rule",
    "normalise_strategies",
    "register_sharding",
    "registered_ops",
    "remove_sharding",
    "sharding_rule",
]


@overload
def register_sharding(op: Any, *, override: bool = False, dtensor: bool | None = None) -> Callable[[R], R]: ...


@overload
def register_sharding(
    op: Any, rule: Literal["auto"] | Rule, *, override: bool = False, dtensor: bool | None = None
) -> Rule: ...


def register_sharding(
    op: Any, rule: Literal["auto"] | Rule | None = None, *, override: bool = False, dtensor: bool | None = None
) -> Any:
    """Register the rule of an operator, or of several; torch's contract, for ShardedTensor and for torch's DTensor.

    As a decorator: the function takes the operator's arguments and returns a sequence of `(output placements, input
    placements)` for one mesh axis, with `None` for arguments that are not tensors. Placements are ours or torch's.
    `register_sharding(op, "auto")` discovers strategies when the operator first sees new kinds of arguments.

    `dtensor=False` leaves torch's DTensor alone; so do the package's own rules.

    >>> import torch
    >>> from shardwise.geometry import Replicate, Shard
    >>> @torch.library.custom_op("example::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return 2 * x
    >>> @register_sharding(torch.ops.example.twice.default, dtensor=False)
    ... def rule(x):
    ...     return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]
    >>> find_rule(torch.ops.example.twice.default) is rule
    True
    >>> remove_sharding(torch.ops.example.twice.default)
    """
    ops = tuple(resolve_op(one) for one in present_ops(op if isinstance(op, list | tuple) else (op,)))
    if rule is None:
        return lambda given: _register_rule(ops, given, override, dtensor)
    if rule == "auto":
        for one in ops:
            _register_rule((one,), AutoRule(one), override, dtensor)
        return find_rule(ops[0])
    return _register_rule(ops, rule, override, dtensor)


def _register_rule(ops: tuple[Any, ...], rule: R, override: bool, dtensor: bool | None) -> R:
    for one in ops:
        if find_rule(one) is not None and not override:
            raise ValueError(f"{one} has a rule already; pass override=True to replace it")
    if dtensor is None:
        dtensor = not getattr(rule, "__module__", "").startswith("shardwise.ops.") or isinstance(rule, AutoRule)
    for one in ops:
        set_rule(one, rule)
        if dtensor:
            dtensor_rules.register_dtensor_rule(one, rule)
    return rule


@contextmanager
def sharding_rule(op: Any, rule: Rule, *, dtensor: bool = False) -> Iterator[None]:
    """Use a rule inside a `with` block only; the previous one comes back."""
    op = resolve_op(op)
    before = set_rule(op, rule)
    if dtensor:
        dtensor_rules.register_dtensor_rule(op, rule)
    try:
        yield
    finally:
        set_rule(op, before)
        if dtensor:
            dtensor_rules.remove_dtensor_rule(op)


def remove_sharding(op: Any) -> None:
    """Remove the rule of an operator, for torch's DTensor too; what DTensor had before comes back."""
    op = resolve_op(op)
    if set_rule(op, None) is None:
        raise ValueError(f"{op} has no rule to remove")
    dtensor_rules.remove_dtensor_rule(op)
