"""What is a rule, what does it see, what does it answer, and which operator has which one?

A rule takes the operator's own arguments, tensors replaced by `TensorMeta`, and returns one of two things:

1. acceptable strategies: pairs of output placements and input placements, for one axis of the mesh. The engine moves
   the inputs, computes on the local tensors, and wraps the results;
2. `Steps`: the call is computed by a function of ShardedTensors, by other operators and moves.

An operator for which it is always the second has `Steps` in place of a rule. One table answers which code an operator
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch

from shardwise._cache import clear_on_change
from shardwise.geometry import Layout, LayoutError, Partial, Placement, Replicate, Shard
from shardwise.ops.call import Slot
from shardwise.ops.placement_cost import to_native_placement


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a rule sees of a tensor: no data. `requires_grad`: the call will be differentiated with respect to it.

    >>> import shardwise
    >>> layout = shardwise.parse_layout("f32[8,4] on tp=2: S(0)").layout
    >>> TensorMeta((8, 4), torch.float32, layout, (shardwise.Shard(0),)).ndim
    2
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    placements: tuple[Placement, ...]
    requires_grad: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.layout.numel


@dataclass(frozen=True, slots=True)
class Strategy:
    """One strategy on one axis: a placement for each output and for each input tensor.

    `local` computes the local results in place of the operator; it is called as `local(view, *args, **kwargs)` with a
    `LocalView` and the local arguments. `local_if_empty` takes its place where some rank's part of an input has no
    elements: for operators whose kernels cannot take such tensors. `finish` takes the results as ShardedTensors, before
    the caller gets them, and returns what the caller gets; it may communicate.
    `axes` are the numbers of the mesh axes for which it is right; None: for all.

    >>> from shardwise.geometry import Partial, Shard
    >>> inner = Strategy((Partial(),), (Shard(1), Shard(0)))  # a product whose inner dim is split leaves addends
    >>> inner.outputs
    (Partial('sum'),)
    """

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement | None, ...]
    local: Callable[..., Any] | None = None
    local_if_empty: Callable[..., Any] | None = None
    finish: Callable[[Any], Any] | None = None
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """An operator computed in several steps: `run` takes its arguments, ShardedTensors among them, and returns results.

    It may call any operator and may communicate, in an order that depends on layouts and arguments alone, so that all
    ranks take the same steps. Gradients are those of its steps. `in_place`: they do to the local tensors of the first
    argument what the operator itself would do to them, and nothing else.

    >>> steps = Steps(lambda x, y: (x - y).abs().amax())
    >>> steps.run(torch.tensor([1.0, -4.0]), torch.zeros(2)).item()
    4.0
    """

    run: Callable[..., Any]
    in_place: bool = False


R = TypeVar("R", bound=Callable[..., Any])
Rule: TypeAlias = Callable[..., Sequence[Any] | Steps]
OperatorCode: TypeAlias = Rule | Steps

_FORM = "a rule returns a list of pairs ([output placements], [input placements]), None for non-tensors"
_operators: dict[Any, OperatorCode] = {}
_ignoring_lengths: set[OperatorCode] = set()
_standing_for: dict[OperatorCode, tuple[Any, OperatorCode]] = {}


def ignores_lengths(rule: R) -> R:
    """Mark a rule that asks about the lengths of dims only whether they are equal, 0 or 1.

    What is chosen of its answer at one shape, if nothing has to be moved, is then chosen at all such shapes.
    """
    _ignoring_lengths.add(rule)
    return rule


def rule_ignores_lengths(rule: OperatorCode) -> bool:
    """Whether a rule is marked so."""
    return rule in _ignoring_lengths


def stands_for(inner: Any) -> Callable[[R], R]:
    """Mark the rule of an operator that torch makes another one of: it holds while that one has its present rule.

    With a rule of the user for `_softmax`, `softmax` has to be broken down, so that the rule is asked.
    """

    def mark(rule: R) -> R:
        _standing_for[rule] = inner, _operators[inner]
        return rule

    return mark


def find_rule(op: Any) -> OperatorCode | None:
    """The rule of an operator, or its steps, or None."""
    rule = _operators.get(op)
    if rule is None or rule not in _standing_for:
        return rule
    inner, known = _standing_for[rule]
    return rule if _operators.get(inner) is known else None


def registered_ops() -> tuple[Any, ...]:
    """All operators that have a rule or steps."""
    return tuple(_operators)


def set_rule(op: Any, rule: OperatorCode | None) -> OperatorCode | None:
    """Give an operator a rule, or take it away; the one it had before."""
    before = _operators.pop(op, None)
    if rule is not None:
        _operators[op] = rule
    clear_on_change()
    return before


def ask_rule(
    rule: Rule, metas: tuple[Sequence[Any], dict[str, Any]], slots: tuple[Sequence[Any], dict[str, Any]], tensors: int
) -> list[Strategy] | Steps:
    """A rule's answer to a call: its arguments with metas and with slots for tensors, of which there are so many."""
    answer = rule(*metas[0], **metas[1])
    return answer if isinstance(answer, Steps) else normalise_strategies(answer, *slots, tensors)


def normalise_strategies(
    given: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any], tensors: int
) -> list[Strategy]:
    """A rule's strategies with one placement for each tensor of the call, in order."""
    if not isinstance(given, list | tuple):
        raise LayoutError(f"{_FORM}, got {type(given).__name__}")
    return [_normalise_strategy(one, args, kwargs, tensors) for one in given]


def _normalise_strategy(given: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: int) -> Strategy:
    if not isinstance(given, Strategy):
        _check_form(given)
        given = Strategy(*given)
    placed = tuple(_line_up_inputs(given.inputs, [*args, *kwargs.values()], tensors))
    outputs = tuple(to_native_placement(p) for p in _flatten_arguments(given.outputs))
    made: Strategy = replace(given, outputs=outputs, inputs=placed)
    for placement in (*made.outputs, *made.inputs):
        if isinstance(placement, Shard) and placement.dim < 0:
            raise LayoutError(f"a rule returns Shard({placement.dim}); count dims from the front: Shard(x.ndim - 1)")
    return made


def _check_form(given: Any) -> None:
    lists = isinstance(given, list | tuple) and len(given) in (2, 3)
    if not lists or not all(isinstance(part, list | tuple) for part in given[:2]):
        raise LayoutError(f"{_FORM}, got {given!r} among them")


def _flatten_arguments(values: Any) -> Iterator[Any]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flatten_arguments(value)
    else:
        yield values


def _line_up_inputs(inputs: Sequence[Any], arguments: Sequence[Any], tensors: int) -> Iterator[Placement | None]:
    """Line placements up with tensors: by argument position, or directly when there is one for each tensor."""
    if len(inputs) == tensors and all(isinstance(p, Shard | Replicate | Partial) for p in inputs):
        yield from inputs  # either way
        return
    flat = list(_flatten_arguments(list(inputs)))
    if not _is_by_argument(inputs, arguments) and len([p for p in flat if p is not None]) == tensors:
        yield from (to_native_placement(p) for p in flat if p is not None)
        return
    padded = [*inputs, *([None] * (len(arguments) - len(inputs)))]
    for placement, argument in zip(padded, arguments, strict=False):
        slots = _find_slots(argument)
        listed = (
            list(_flatten_arguments(placement)) if isinstance(placement, list | tuple) else [placement] * len(slots)
        )
        if len(listed) != len(slots):
            raise LayoutError(f"a rule returns {len(listed)} placements for an argument with {len(slots)} tensors")
        for one in listed:
            yield to_native_placement(one) or Replicate()


def _is_by_argument(inputs: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """Whether there is one entry for each argument: then those without tensors have none."""
    if len(inputs) != len(arguments):
        return False
    return all(p is None or _find_slots(a) for p, a in zip(inputs, arguments, strict=True))


def _find_slots(argument: Any) -> list[Slot]:
    return [leaf for leaf in _flatten_arguments([argument]) if isinstance(leaf, Slot)]
