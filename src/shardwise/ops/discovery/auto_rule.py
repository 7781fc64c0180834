"""A rule that discovers its strategies by experiment, when it first sees a new kind of arguments.

Large lengths are replaced by small ones, equal by equal, as long as no integer argument may mean a length or an index;
by multiples of 8 where the operator does not take the small ones. Integers are indices that are valid everywhere, or
where the operator calls them offsets, boundaries that divide the first tensor's rows.
Nothing depends on a rank or on data, so all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwise._log import package_logger
from shardwise.ops.discovery.search import UNIT, Findings, find_strategies, limit_integers, line_up_placements
from shardwise.ops.discovery.trial import is_boundary_name
from shardwise.ops.engine.registry import Strategy, TensorMeta
from shardwise.ops.engine.schema import OperatorCall, split_call

log = package_logger(__name__)
SMALLEST_LENGTH = 6


class AutoRule:
    """The rule of an operator whose strategies are discovered and remembered, by its other arguments and shapes."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self._known: dict[Hashable, list[tuple[list[Any], list[Any]]]] = {}

    def __repr__(self) -> str:
        return f"AutoRule({self.op})"

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """The strategies for these arguments, tensors passed as TensorMeta."""
        small = _shrink_lengths([*args, *kwargs.values()])
        call = self._call(args, kwargs, small)
        known = self._known.get(_rule_key(call))
        return known if known is not None else self._discover(call, args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any], lengths: dict[int, int]) -> OperatorCall:
        index_limit = min(
            (lengths.get(n, n) for m in _iterate_metas([*args, *kwargs.values()]) for n in m.shape), default=1
        )
        names = [a.name for a in self.op._schema.arguments]
        rows = next((lengths.get(n, n) for m in _iterate_metas([*args]) for n in m.shape[:1]), 1)

        def make(name: str, value: Any) -> Any:
            if isinstance(value, TensorMeta) and is_boundary_name(name) and _is_list(value):
                return torch.linspace(0, rows, value.shape[0] + 1, dtype=torch.float64, device="cpu").to(value.dtype)[
                    1:
                ]
            return _make_template(value, lengths, index_limit)

        made = [make(name, a) for name, a in zip(names, args, strict=False)]
        return split_call(self.op, made, {k: make(k, v) for k, v in kwargs.items()})

    def _discover(
        self, call: OperatorCall, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[list[Any], list[Any]]]:
        whole = self._call(args, kwargs, {})
        tried = [call, self._call(args, kwargs, _shrink_lengths([*args, *kwargs.values()], UNIT)), whole]
        moves = [_stay, _move_call_to_gpu] if torch.cuda.is_available() else [_stay]
        problem: ValueError | None = None
        for move, one in product(moves, tried):
            try:
                return self.remember(call, find_strategies(move(one)))
            except ValueError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def remember(self, call: OperatorCall, findings: Findings) -> list[tuple[list[Any], list[Any]]]:
        """Keep what was found for calls of this kind."""
        found = [as_pair(call, s) for s in findings.strategies]
        self._known[_rule_key(call)] = found
        log.info(
            "%s on %s: found %s",
            self.op,
            [tuple(t.shape) for t in call.tensors],
            "; ".join(map(format_strategy, findings.strategies)),
        )
        return found


def as_pair(call: OperatorCall, strategy: Strategy) -> tuple[list[Any], list[Any]]:
    """A strategy as a rule writes it: output placements, and input placements lined up with the arguments."""
    return list(strategy.outputs), line_up_placements(call, strategy.inputs)


def format_strategy(strategy: Strategy) -> str:
    """A strategy on one line.

    >>> from shardwise.geometry import Partial, Replicate, Shard
    >>> format_strategy(Strategy((Partial("sum"),), (Shard(1), Replicate())))
    'S(1), R -> P(sum)'
    """
    inputs, outputs = (", ".join(map(format_placement_brief, p)) for p in (strategy.inputs, strategy.outputs))
    return f"{inputs} -> {outputs or 'nothing'}"


def format_placement_brief(placement: Any) -> str:
    """A placement in the notation's words; "-" for None."""
    if placement is None:
        return "-"
    return repr(placement).replace("Shard", "S").replace("Replicate()", "R").replace("Partial", "P").replace("'", "")


def _stay(call: OperatorCall) -> OperatorCall:
    return call


def _move_call_to_gpu(call: OperatorCall) -> OperatorCall:
    """The same call on the GPU, for operators that run nowhere else."""
    return limit_integers(replace(call, tensors=tuple(t.cuda() for t in call.tensors)))


def _rule_key(call: OperatorCall) -> Hashable:
    return call.key, tuple((tuple(t.shape), t.dtype) for t in call.tensors)


def _iterate_metas(values: Sequence[Any]) -> Iterator[TensorMeta]:
    for value in values:
        if isinstance(value, TensorMeta):
            yield value
        elif isinstance(value, list | tuple):
            yield from _iterate_metas(value)


def _iterate_integers(values: Sequence[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _iterate_integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


def _is_list(value: TensorMeta) -> bool:
    """Whether this is a list of integers."""
    return value.ndim == 1 and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _shrink_lengths(values: Sequence[Any], unit: int = 1) -> dict[int, int]:
    """A small length for each large one, multiples of a unit; none if an integer argument could reveal the difference.

    With a unit there are at least 4 of it in each length, so that parts of it can be uneven.
    """
    lengths = sorted({n for m in _iterate_metas(values) for n in m.shape if n > SMALLEST_LENGTH})
    if any(abs(i) >= SMALLEST_LENGTH for i in _iterate_integers(values)):
        return {}
    if unit == 1:
        return {length: min(length, SMALLEST_LENGTH + number) for number, length in enumerate(lengths)}
    return {length: (4 + number) * unit for number, length in enumerate(lengths)}


def _make_template(value: Any, lengths: dict[int, int], index_limit: int) -> Any:
    """A tensor to try the operator on: integers in it are valid indices of every dim."""
    if isinstance(value, list | tuple):
        return type(value)(_make_template(v, lengths, index_limit) for v in value)
    if not isinstance(value, TensorMeta):
        return value
    shape = [lengths.get(n, n) for n in value.shape]
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        return torch.zeros(shape, dtype=value.dtype, device="cpu")
    numbers: Tensor = torch.arange(torch.Size(shape).numel(), device="cpu") % max(1, index_limit)
    return numbers.reshape(shape).to(value.dtype)
