"""A rule that finds its strategies by trying, when it is first asked about arguments of a new kind.

Large lengths are replaced by small ones, equal by equal, as long as no integer argument may mean a length or an index.
Nothing depends on a rank or on data, so all ranks find the same.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.ops.discovery.search import Findings, find_strategies, lined_up
from shardwise.ops.engine.registry import Strategy, TensorMeta
from shardwise.ops.engine.schema import Call, take_apart

log = logging.getLogger("shardwise.ops")
SMALLEST = 6


class AutoRule:
    """The rule of an operator whose strategies are discovered and remembered, by its other arguments and shapes."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self._known: dict[Hashable, list[tuple[list[Any], list[Any]]]] = {}

    def __repr__(self) -> str:
        return f"AutoRule({self.op})"

    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """The strategies for these arguments, tensors given as TensorMeta."""
        small = _shrunk_lengths([*args, *kwargs.values()])
        call = self._call(args, kwargs, small)
        known = self._known.get(_key(call))
        return known if known is not None else self._discovered(call, args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any], lengths: dict[int, int]) -> Call:
        index_limit = min((lengths.get(n, n) for m in _metas([*args, *kwargs.values()]) for n in m.shape), default=1)
        made = [_template(a, lengths, index_limit) for a in args]
        return take_apart(self.op, made, {k: _template(v, lengths, index_limit) for k, v in kwargs.items()})

    def _discovered(self, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[list[Any], list[Any]]]:
        whole = self._call(args, kwargs, {})
        tried = [call, whole]
        tried += [_on_gpu(c) for c in tried] if torch.cuda.is_available() else []
        problem: ValueError | None = None
        for one in tried:
            try:
                return self.remember(call, find_strategies(one))
            except ValueError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def remember(self, call: Call, findings: Findings) -> list[tuple[list[Any], list[Any]]]:
        """Keep what was found for calls of this kind."""
        found = [as_pair(call, s) for s in findings.strategies]
        self._known[_key(call)] = found
        log.info(
            "%s on %s: found %s",
            self.op,
            [tuple(t.shape) for t in call.tensors],
            "; ".join(map(brief, findings.strategies)),
        )
        return found


def as_pair(call: Call, strategy: Strategy) -> tuple[list[Any], list[Any]]:
    """A strategy as a rule writes it: output placements, and input placements lined up with the arguments."""
    return list(strategy.outputs), lined_up(call, strategy.inputs)


def brief(strategy: Strategy) -> str:
    """A strategy on one line.

    >>> from shardwise.geometry import Partial, Replicate, Shard
    >>> brief(Strategy((Partial("sum"),), (Shard(1), Replicate())))
    'S(1), R -> P(sum)'
    """
    return f"{', '.join(map(short, strategy.inputs))} -> {', '.join(map(short, strategy.outputs)) or 'nothing'}"


def short(placement: Any) -> str:
    """A placement in the notation's words; "-" for None."""
    if placement is None:
        return "-"
    return repr(placement).replace("Shard", "S").replace("Replicate()", "R").replace("Partial", "P").replace("'", "")


def _on_gpu(call: Call) -> Call:
    """The same call on the GPU, for operators that run nowhere else."""
    return replace(call, tensors=tuple(t.cuda() for t in call.tensors))


def _key(call: Call) -> Hashable:
    return call.key, tuple((tuple(t.shape), t.dtype) for t in call.tensors)


def _metas(values: Sequence[Any]) -> Iterator[TensorMeta]:
    for value in values:
        if isinstance(value, TensorMeta):
            yield value
        elif isinstance(value, list | tuple):
            yield from _metas(value)


def _integers(values: Sequence[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _integers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


def _shrunk_lengths(values: Sequence[Any]) -> dict[int, int]:
    """A small length for each large one; none if an integer argument could tell the difference."""
    lengths = sorted({n for m in _metas(values) for n in m.shape if n > SMALLEST})
    if any(abs(i) >= SMALLEST for i in _integers(values)):
        return {}
    return {length: min(length, SMALLEST + number) for number, length in enumerate(lengths)}


def _template(value: Any, lengths: dict[int, int], index_limit: int) -> Any:
    """A tensor to try the operator on: integers in it are valid indices of every dim."""
    if isinstance(value, list | tuple):
        return type(value)(_template(v, lengths, index_limit) for v in value)
    if not isinstance(value, TensorMeta):
        return value
    shape = [lengths.get(n, n) for n in value.shape]
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        return torch.zeros(shape, dtype=value.dtype)
    numbers: Tensor = torch.arange(torch.Size(shape).numel()) % max(1, index_limit)
    return numbers.reshape(shape).to(value.dtype)
