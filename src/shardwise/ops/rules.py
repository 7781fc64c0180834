"""Rules: how an operator may be computed on one mesh axis. Built-in ones and users' own use the same decorator.

A rule takes the operator's own arguments, tensors replaced by `TensorMeta`, and returns acceptable strategies: pairs
of output placements and input placements, for one axis of the mesh. The engine makes the choice for each axis of the
mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from shardwise.geometry import Layout, LayoutError, Placement, Replicate
from shardwise.ops.placing import native
from shardwise.ops.schema import Slot
from shardwise.tensor import generation

Rule: TypeAlias = Callable[..., Sequence[Any]]
R = TypeVar("R", bound=Rule)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a rule sees of a tensor: no data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    placements: tuple[Placement, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.layout.numel


@dataclass(frozen=True, slots=True)
class Strategy:
    """One acceptable way on one axis: a placement for each output and for each tensor that goes in.

    `local` computes the local results in place of the operator; it is called as `local(view, *args, **kwargs)` with a
    `LocalView` and the local arguments.
    """

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement | None, ...]
    local: Callable[..., Any] | None = None


_rules: dict[Any, Rule] = {}


def register_sharding(op: Any, *, override: bool = False) -> Callable[[R], R]:
    """Register the rule of an operator, or of several; torch's contract, for ShardedTensor.

    The decorated function takes the operator's arguments and returns a sequence of `(output placements, input
    placements)` for one mesh axis, with `None` for arguments that are not tensors. Placements are ours or torch's.
    """
    ops = tuple(op) if isinstance(op, list | tuple) else (op,)

    def register(rule: R) -> R:
        for one in ops:
            if one in _rules and not override:
                raise ValueError(f"{one} has a rule already; pass override=True to replace it")
        for one in ops:
            _rules[one] = rule
        generation.advance()
        return rule

    return register


def find_rule(op: Any) -> Rule | None:
    """The rule of an operator, or None."""
    return _rules.get(op)


def registered_ops() -> tuple[Any, ...]:
    """All operators that have a rule."""
    return tuple(_rules)


@contextmanager
def sharding_rule(op: Any, rule: Rule) -> Iterator[None]:
    """Use a rule inside a `with` block only; the previous one comes back."""
    before = _rules.get(op)
    _rules[op] = rule
    generation.advance()
    try:
        yield
    finally:
        if before is None:
            _rules.pop(op, None)
        else:
            _rules[op] = before
        generation.advance()


def remove_sharding(op: Any) -> None:
    """Remove the rule of an operator."""
    if _rules.pop(op, None) is None:
        raise ValueError(f"{op} has no rule to remove")
    generation.advance()


def normalised(given: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: int) -> list[Strategy]:
    """A rule's answer with one placement for each tensor of the call, in order."""
    return [_normal(one, args, kwargs, tensors) for one in given]


def _normal(given: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: int) -> Strategy:
    if isinstance(given, Strategy):
        outputs, inputs, local = given.outputs, given.inputs, given.local
    else:
        outputs, inputs, local = given[0], given[1], (given[2] if len(given) > 2 else None)
    placed = tuple(_spread(inputs, [*args, *kwargs.values()], tensors))
    return Strategy(tuple(native(p) for p in _flat(outputs)), placed, local)


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values


def _spread(inputs: Sequence[Any], arguments: Sequence[Any], tensors: int) -> Iterator[Placement | None]:
    """Line placements up with tensors: by argument position, or directly when there is one for each tensor."""
    flat = list(_flat(list(inputs)))
    if len(inputs) != len(arguments) and len([p for p in flat if p is not None]) == tensors:
        yield from (native(p) for p in flat if p is not None)
        return
    padded = [*inputs, *([None] * (len(arguments) - len(inputs)))]
    for placement, argument in zip(padded, arguments, strict=False):
        slots = [
            leaf
            for leaf in _flat(argument if isinstance(argument, list | tuple) else [argument])
            if isinstance(leaf, Slot)
        ]
        listed = list(_flat(placement)) if isinstance(placement, list | tuple) else [placement] * len(slots)
        if len(listed) != len(slots):
            raise LayoutError(f"a rule gives {len(listed)} placements for an argument with {len(slots)} tensors")
        for one in listed:
            yield native(one) or Replicate()
