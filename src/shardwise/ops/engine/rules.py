"""How is a rule registered? Built-in ones and users' own use the same decorator; `registry.py` says what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

from shardwise._torch import present_ops
from shardwise.ops.discovery.auto_rule import AutoRule
from shardwise.ops.engine.registry import OperatorCode, find_rule, set_rule
from shardwise.ops.engine.schema import resolve_op

R = TypeVar("R", bound=OperatorCode)


@overload
def register_sharding(op: Any, *, override: bool = False) -> Callable[[R], R]: ...


@overload
def register_sharding(op: Any, rule: Literal["auto"] | OperatorCode, *, override: bool = False) -> OperatorCode: ...


def register_sharding(op: Any, rule: Literal["auto"] | OperatorCode | None = None, *, override: bool = False) -> Any:
    """Register the rule of an operator, or of several.

    As a decorator: the function takes the operator's arguments and returns a sequence of `(output placements, input
    placements)` for one mesh axis, with `None` for arguments that are not tensors. Placements are ours or torch's.
    A rule may also return `Steps(function)`: then this call is computed by the function, from other operators.

    `register_sharding(op, Steps(function))` computes every call so. `register_sharding(op, "auto")` discovers
    strategies when the operator first sees new kinds of arguments.

    >>> import torch
    >>> from shardwise.geometry import Replicate, Shard
    >>> @torch.library.custom_op("example::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return 2 * x
    >>> @register_sharding(torch.ops.example.twice.default)
    ... def rule(x):
    ...     return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]
    >>> find_rule(torch.ops.example.twice.default) is rule
    True
    >>> remove_sharding(torch.ops.example.twice.default)
    """
    ops = tuple(resolve_op(one) for one in present_ops(op if isinstance(op, list | tuple) else (op,)))
    if rule is None:
        return lambda given: _register_rule(ops, given, override)
    if rule == "auto":
        for one in ops:
            _register_rule((one,), AutoRule(one), override)
        return find_rule(ops[0])
    return _register_rule(ops, rule, override)


def _register_rule(ops: tuple[Any, ...], rule: R, override: bool) -> R:
    for one in ops:
        if find_rule(one) is not None and not override:
            raise ValueError(f"{one} has a rule already; pass override=True to replace it")
    for one in ops:
        set_rule(one, rule)
    return rule


@contextmanager
def sharding_rule(op: Any, rule: OperatorCode) -> Iterator[None]:
    """Use a rule inside a `with` block only; the previous one comes back.

    >>> import torch
    >>> from shardwise.geometry import Replicate
    >>> rows = torch.ops.aten.argsort.default
    >>> with sharding_rule(rows, lambda x, *args: [([Replicate()], [Replicate()])]):
    ...     find_rule(rows) is not None
    True
    """
    op = resolve_op(op)
    before = set_rule(op, rule)
    try:
        yield
    finally:
        set_rule(op, before)


def remove_sharding(op: Any) -> None:
    """Remove the rule of an operator.

    >>> import torch
    >>> from shardwise.geometry import Replicate
    >>> @torch.library.custom_op("example::same_b", mutates_args=())
    ... def same(x: torch.Tensor) -> torch.Tensor:
    ...     return x.clone()
    >>> op = torch.ops.example.same_b.default
    >>> rule = register_sharding(op, lambda x: [([Replicate()], [Replicate()])])
    >>> remove_sharding(op)
    >>> find_rule(op) is None
    True
    """
    op = resolve_op(op)
    if set_rule(op, None) is None:
        raise ValueError(f"{op} has no rule to remove")
