"""The public names by which a rule is registered: for ShardedTensor, and where it is wanted for torch's DTensor too.

Registration into DTensor's tables is opt-in, since it reaches into private tables of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

from shardwise.compat.dtensor.rules import register_dtensor_rule, remove_dtensor_rule
from shardwise.compat.dtensor.spec_view import TorchRule
from shardwise.ops.engine import rules
from shardwise.ops.engine.registry import OperatorCode, Rule, Steps, find_rule
from shardwise.ops.engine.schema import resolve_op

R = TypeVar("R", bound=OperatorCode)
T = TypeVar("T", bound=Rule)


@overload
def register_sharding(op: Any, *, override: bool = False, dtensor: bool = False) -> Callable[[R], R]: ...


@overload
def register_sharding(
    op: Any, rule: Literal["auto"] | OperatorCode, *, override: bool = False, dtensor: bool = False
) -> OperatorCode: ...


def register_sharding(
    op: Any, rule: Literal["auto"] | OperatorCode | None = None, *, override: bool = False, dtensor: bool = False
) -> Any:
    """Register the rule of an operator, or of several; with `dtensor=True` for torch's DTensor too.

    As a decorator: the function takes the operator's arguments and returns a sequence of `(output placements, input
    placements)` for one mesh axis, with `None` for arguments that are not tensors. Placements are ours or torch's.
    A rule may also return `Steps(function)`: then this call is computed by the function, from other operators.

    `register_sharding(op, Steps(function))` computes every call so. `register_sharding(op, "auto")` discovers
    strategies when the operator first sees new kinds of arguments.

    >>> import torch
    >>> from shardwise.geometry import Replicate, Shard
    >>> @torch.library.custom_op("example::thrice", mutates_args=())
    ... def thrice(x: torch.Tensor) -> torch.Tensor:
    ...     return 3 * x
    >>> @register_sharding(torch.ops.example.thrice.default)
    ... def rule(x):
    ...     return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]
    >>> find_rule(torch.ops.example.thrice.default) is rule
    True
    >>> remove_sharding(torch.ops.example.thrice.default)
    """
    ops = [resolve_op(one) for one in (op if isinstance(op, list | tuple) else (op,))]
    if rule is None:
        return lambda given: register_sharding(ops, given, override=override, dtensor=dtensor)
    made = rules.register_sharding(ops, rule, override=override)
    for one in ops:
        known = find_rule(one)
        if dtensor and known is not None and not isinstance(known, Steps):
            register_dtensor_rule(one, known)
    return made


def register_torch_sharding(op: Any) -> Callable[[T], T]:
    """Do what torch's own `register_sharding` does, for DTensor and for ShardedTensor.

    A built-in rule is replaced, and rules are shown what torch documents: a `DTensorSpec` for each tensor.

    >>> import torch
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> @torch.library.custom_op("example::fourfold", mutates_args=())
    ... def fourfold(x: torch.Tensor) -> torch.Tensor:
    ...     return 4 * x
    >>> @register_torch_sharding(torch.ops.example.fourfold.default)
    ... def rule(x):
    ...     return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]
    >>> remove_sharding(torch.ops.example.fourfold.default)
    """

    def decorator(rule: T) -> T:
        register_sharding(op, TorchRule(rule), override=True, dtensor=True)
        return rule

    return decorator


@contextmanager
def sharding_rule(op: Any, rule: OperatorCode, *, dtensor: bool = False) -> Iterator[None]:
    """Use a rule inside a `with` block only; the previous one comes back.

    >>> import torch
    >>> from shardwise.geometry import Replicate
    >>> rows = torch.ops.aten.argsort.default
    >>> with sharding_rule(rows, lambda x, *args: [([Replicate()], [Replicate()])]):
    ...     find_rule(rows) is not None
    True
    """
    with rules.sharding_rule(op, rule):
        if dtensor and not isinstance(rule, Steps):
            register_dtensor_rule(resolve_op(op), rule)
        try:
            yield
        finally:
            if dtensor:
                remove_dtensor_rule(resolve_op(op))


def remove_sharding(op: Any) -> None:
    """Remove the rule of an operator, for torch's DTensor too; what DTensor had before comes back.

    >>> import torch
    >>> from shardwise.geometry import Replicate
    >>> @torch.library.custom_op("example::same_a", mutates_args=())
    ... def same(x: torch.Tensor) -> torch.Tensor:
    ...     return x.clone()
    >>> op = torch.ops.example.same_a.default
    >>> rule = register_sharding(op, lambda x: [([Replicate()], [Replicate()])])
    >>> remove_sharding(op)
    >>> find_rule(op) is None
    True
    """
    rules.remove_sharding(op)
    remove_dtensor_rule(resolve_op(op))
