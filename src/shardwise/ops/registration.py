"""How is a rule registered? Built-in ones and users' own use the same decorator; `rule.py` says what a rule is.

A rule that discovers its strategies by experiment, when it first sees a new kind of arguments.

Large lengths are replaced by small ones, equal by equal, as long as no integer argument may mean a length or an index;
by multiples of 8 where the operator does not take the small ones. Integers are indices that are valid everywhere, or
where the operator calls them offsets, boundaries that divide the first tensor's rows.
Nothing depends on a rank or on data, so all ranks find the same.

Discovered strategies as a rule in Python, short enough to read, ready to paste.

1. Strategies that differ only in which dim is sharded become one loop, where they cover what one condition covers:
   all dims, or all but (or before, after, only) the operator's `dim` argument. For that the operator is tried with
   every value of `dim`.
2. What fits no loop is listed as it was found; for other arguments than the sample's the rule then replicates.

No rule yet? Find one by trying the operator out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from shardwise._progress import Progress
from shardwise._text import package_logger
from shardwise._torch import present_ops
from shardwise.geometry import Placement, Shard
from shardwise.ops.discovery import (
    UNDECIDED,
    UNIT,
    Findings,
    find_strategies,
    is_boundary_name,
    limit_integers,
    line_up_placements,
    make_runnable,
)
from shardwise.ops.dtensor_rules import register_dtensor_rule, remove_dtensor_rule
from shardwise.ops.rule import (
    OperatorCall,
    OperatorCode,
    Slot,
    Steps,
    Strategy,
    TensorMeta,
    find_rule,
    resolve_op,
    set_rule,
    split_call,
)

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


R = TypeVar("R", bound=OperatorCode)
OperatorLike: TypeAlias = Callable[..., Any]  # torch.ops.aten.mm.default, or what torch.library.custom_op returned


@overload
def register_sharding(
    op: OperatorLike | Sequence[OperatorLike], *, override: bool = False, dtensor: bool = False
) -> Callable[[R], R]: ...


@overload
def register_sharding(
    op: OperatorLike | Sequence[OperatorLike],
    rule: Literal["auto"] | OperatorCode,
    *,
    override: bool = False,
    dtensor: bool = False,
) -> OperatorCode: ...


def register_sharding(
    op: OperatorLike | Sequence[OperatorLike],
    rule: Literal["auto"] | OperatorCode | None = None,
    *,
    override: bool = False,
    dtensor: bool = False,
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
    ops = tuple(resolve_op(one) for one in present_ops(op if isinstance(op, list | tuple) else (op,)))
    if rule is None:
        return lambda given: register_sharding(ops, given, override=override, dtensor=dtensor)
    for one in ops:
        if find_rule(one) is not None and not override:
            raise ValueError(f"{one} has a rule already; pass override=True to replace it")
    for one in ops:
        known = AutoRule(one) if rule == "auto" else rule
        set_rule(one, known)
        if dtensor and not isinstance(known, Steps):
            register_dtensor_rule(one, known)
    return find_rule(ops[0]) if rule == "auto" else rule


@contextmanager
def sharding_rule(op: OperatorLike, rule: OperatorCode, *, dtensor: bool = False) -> Iterator[None]:
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
        if dtensor and not isinstance(rule, Steps):
            register_dtensor_rule(op, rule)
        yield
    finally:
        set_rule(op, before)
        if dtensor:
            remove_dtensor_rule(op)


def remove_sharding(op: OperatorLike | Sequence[OperatorLike]) -> None:
    """Remove the rule of an operator, for torch's DTensor too; what DTensor had before comes back.

    >>> import torch
    >>> from shardwise.geometry import Replicate
    >>> @torch.library.custom_op("example::same", mutates_args=())
    ... def same(x: torch.Tensor) -> torch.Tensor:
    ...     return x.clone()
    >>> op = torch.ops.example.same.default
    >>> rule = register_sharding(op, lambda x: [([Replicate()], [Replicate()])])
    >>> remove_sharding(op)
    >>> find_rule(op) is None
    True
    """
    op = resolve_op(op)
    if set_rule(op, None) is None:
        raise ValueError(f"{op} has no rule to remove")
    remove_dtensor_rule(op)


CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    "": lambda d, dim: True,
    "d != {dim}": lambda d, dim: d != dim,
    "d < {dim}": lambda d, dim: d < dim,
    "d > {dim}": lambda d, dim: d > dim,
    "d == {dim}": lambda d, dim: d == dim,
}
SHIFTS: dict[str, Callable[[int, int], int]] = {
    "d": lambda d, dim: d,
    "d - (d > {dim})": lambda d, dim: d - (d > dim),
    "d + (d >= {dim})": lambda d, dim: d + (d >= dim),
}
DIM = "dim"


_ANY = Shard(-99)  # means "split along d" in a pattern


def rule_source(call: OperatorCall, strategies: Sequence[Strategy], notes: Sequence[str] = ()) -> str:
    """The source of a rule that returns these strategies."""
    names = _parameters(call)
    shown = [n.partition("=")[0] for n in names if n != "*"]
    lines = list(_rule_body(call, strategies, shown))
    comments = [f"# {note}" for note in notes]
    used = [w for w in ("Partial", "Replicate", "Shard") if any(f"{w}(" in line for line in lines)]
    return "\n".join(
        [
            f"from shardwise import {', '.join([*used, 'register_sharding'])}",
            "",
            "",
            *comments,
            f"@register_sharding({_op_name(call.op)})",
            f"def {_rule_name(call.op)}({', '.join(names)}):",
            *(f"    {line}" for line in lines),
            "",
        ]
    )


def _rule_body(call: OperatorCall, strategies: Sequence[Strategy], names: Sequence[str]) -> Iterator[str]:
    by_dim = _strategies_by_dim(call, strategies)
    loops, said = _make_loops(call, by_dim, names)
    rest = [s for s in strategies if (s.inputs, s.outputs) not in said]
    always = said | {(s.inputs, s.outputs) for s in rest}
    general = None not in by_dim and all((s.inputs, s.outputs) in always for found in by_dim.values() for s in found)
    first, *others = [_pair_code(call, s, names) for s in rest]
    if not general and (other := _other_arguments(call, names)):
        yield f"if {other}:  # not tried"
        yield f"    return [{first}]"
    if not others and loops:
        yield f"found = [{first}]"
    else:
        yield "found = ["
        yield from (f"    {pair}," for pair in (first, *others))
        yield "]"
    yield from (f"found += {loop}" for loop in loops)
    yield "return found"


def _strategies_by_dim(call: OperatorCall, strategies: Sequence[Strategy]) -> dict[int | None, Sequence[Strategy]]:
    """Strategies for every value of the operator's `dim`; {None: those passed} if it has none."""
    where = _dim_argument(call)
    ndim = call.tensors[0].ndim
    if where is None or ndim == 0:
        return {None: strategies}
    try:
        found: dict[int | None, Sequence[Strategy]] = {v: _find_with_dim(call, where, v) for v in range(ndim)}
        counted_from_the_end = _find_with_dim(call, where, -1)
    except ValueError:
        return {None: strategies}
    return found if counted_from_the_end == found[ndim - 1] else {None: strategies}


def _find_with_dim(call: OperatorCall, where: int | str, value: int) -> Sequence[Strategy]:
    args, kwargs = list(call.args), dict(call.kwargs)
    if isinstance(where, int):
        args[where] = value
    else:
        kwargs[where] = value
    return find_strategies(OperatorCall(call.op, tuple(args), kwargs, call.tensors)).strategies


def _dim_argument(call: OperatorCall) -> int | str | None:
    """Where the `dim` of a call is: a position, or the name if it is passed by keyword or omitted."""
    schema = getattr(call.op, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == DIM:
            value = call.args[index] if index < len(call.args) else call.kwargs.get(DIM, argument.default_value)
            return None if not isinstance(value, int) else index if index < len(call.args) else DIM
    return None


def _make_loops(
    call: OperatorCall, by_dim: Mapping[int | None, Sequence[Strategy]], names: Sequence[str]
) -> tuple[list[str], set[Any]]:
    """Loops, and the inputs and outputs of the strategies that they generate."""
    groups: dict[tuple[Any, ...], dict[tuple[int, int], Strategy]] = defaultdict(dict)
    for value, listed in by_dim.items():
        for strategy in listed:
            dims = {p.dim for p in strategy.inputs if isinstance(p, Shard)}
            if len(dims) == 1:
                groups[_inputs_pattern(strategy)][(dims.pop(), -1 if value is None else value)] = strategy
    loops: list[str] = []
    said: set[Any] = set()
    for pattern, members in groups.items():
        for chosen in _split_members(members):
            loop = _make_loop(call, pattern, chosen, by_dim, names)
            if loop is not None:
                loops.append(loop)
                said |= {(s.inputs, s.outputs) for s in chosen.values()}
    return loops, said


def _split_members(members: Mapping[tuple[int, int], Strategy]) -> Iterator[dict[tuple[int, int], Strategy]]:
    """Members with sharded outputs, and each kind of other outputs, apart."""
    kinds: dict[tuple[Any, ...], dict[tuple[int, int], Strategy]] = defaultdict(dict)
    for key, strategy in members.items():
        kinds[tuple(_ANY if isinstance(p, Shard) else p for p in strategy.outputs)][key] = strategy
    yield from kinds.values()


def _inputs_pattern(strategy: Strategy) -> tuple[Placement | None, ...]:
    return tuple(_ANY if isinstance(p, Shard) else p for p in strategy.inputs)


def _make_loop(
    call: OperatorCall,
    pattern: Sequence[Placement | None],
    members: Mapping[tuple[int, int], Strategy],
    by_dim: Mapping[int | None, Sequence[Strategy]],
    names: Sequence[str],
) -> str | None:
    """One comprehension that generates exactly these strategies, or None."""
    lead = next(i for i, p in enumerate(pattern) if p is _ANY)
    ndim = call.tensors[lead].ndim
    values = [-1 if v is None else v for v in by_dim]
    condition = next((c for c, f in CONDITIONS.items() if _covers(f, members, ndim, values)), None)
    shifts = _find_shifts(list(members.items()))
    tensor = _parameter_name(call, lead, names)
    if condition is None or shifts is None or tensor is None or (ndim < 2 and not condition):
        return None
    strategy = next(iter(members.values()))
    dim = f"{DIM} % {tensor}.ndim"
    outputs = [s.format(dim=dim) if s is not None else None for s in shifts]
    shown = [
        f"Shard({o})" if o is not None else _placement_code(p) for o, p in zip(outputs, strategy.outputs, strict=True)
    ]
    inputs = ["Shard(d)" if p is _ANY else _placement_code(p) for p in pattern]
    where = f" if {condition.format(dim=dim)}" if condition else ""
    return f"[([{', '.join(shown)}], {_line_up_texts(call, inputs, names)}) for d in range({tensor}.ndim){where}]"


def _covers(
    condition: Callable[[int, int], bool], members: Mapping[tuple[int, int], Strategy], ndim: int, values: Sequence[int]
) -> bool:
    return set(members) == {(d, v) for d, v in product(range(ndim), values) if condition(d, v)}


def _find_shifts(members: Sequence[tuple[tuple[int, int], Strategy]]) -> list[str | None] | None:
    """For each output how its dim follows from `d`, or None where it is not sharded."""
    found: list[str | None] = []
    for index, first in enumerate(members[0][1].outputs):
        if not isinstance(first, Shard):
            found.append(None)
            continue
        fits = [
            text
            for text, shift in SHIFTS.items()
            if all(
                isinstance(p := s.outputs[index], Shard) and p.dim == shift(d, v if v >= 0 else 99)
                for (d, v), s in members
            )
        ]
        if not fits:
            return None
        found.append(fits[0])
    return found


def _pair_code(call: OperatorCall, strategy: Strategy, names: Sequence[str]) -> str:
    inputs = _line_up_texts(call, [_placement_code(p) for p in strategy.inputs], names)
    return f"([{', '.join(map(_placement_code, strategy.outputs))}], {inputs})"


def _placement_code(placement: Placement | None) -> str:
    return repr(placement).replace("'", '"')


def _line_up_texts(call: OperatorCall, texts: Sequence[str], names: Sequence[str]) -> str:
    """Texts of placements lined up with the arguments, as a list in Python; lists of tensors may be of any length."""
    keys = [*names[: len(call.args)], *call.kwargs]
    shown = []
    for name, value in zip(keys, line_up_placements(call, texts), strict=True):
        alike = isinstance(value, list) and len(set(value)) == 1
        listed = f"[{value[0]}] * len({name})" if alike else f"[{', '.join(map(str, value))}]" if value else "[]"
        shown.append(listed if isinstance(value, list) else str(value))
    return f"[{', '.join(shown)}]"


def _parameters(call: OperatorCall) -> list[str]:
    """The rule's parameters: the operator's own, named as in its schema."""
    schema = getattr(call.op, "_schema", None)
    if schema is None:
        return [f"arg{i}" for i in range(len(call.args))] + [f"{k}=None" for k in call.kwargs]
    names: list[str] = []
    for argument in schema.arguments:
        if argument.kwarg_only and "*" not in names:
            names.append("*")
        default = f"={_default_code(argument)}" if argument.has_default_value() else ""
        names.append(_clean_name(argument.name) + default)
    return names


def _default_code(argument: Any) -> str:
    value = argument.default_value
    return repr(value) if isinstance(value, int | float | bool | str) else "None"


def _clean_name(name: str) -> str:
    return "x" if name == "self" else name


def _parameter_name(call: OperatorCall, tensor: int, names: Sequence[str]) -> str | None:
    """The parameter that holds a tensor, or whose first element it is."""
    keys = [_clean_name(k) for k in call.kwargs]
    arguments = [*zip(names, call.args, strict=False), *zip(keys, call.kwargs.values(), strict=True)]
    whole = next((n for n, value in arguments if value == Slot(tensor)), None)
    listed = (n for n, value in arguments if isinstance(value, list | tuple) and value and value[0] == Slot(tensor))
    return whole or next((f"{n}[0]" for n in listed), None)


def _other_arguments(call: OperatorCall, names: Sequence[str]) -> str:
    """The condition that an argument on which strategies may depend has another value than in the sample."""
    given = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    return " or ".join(f"{n} != {v!r}" for n, v in given if _is_choice(v))


def _is_choice(value: Any) -> bool:
    return isinstance(value, int | str) or (isinstance(value, list) and all(isinstance(v, int) for v in value))


def _op_name(op: Any) -> str:
    return f"torch.ops.{op}" if hasattr(op, "_schema") else getattr(op, "__qualname__", repr(op))


def _rule_name(op: Any) -> str:
    name = op._schema.name.split("::")[-1] if hasattr(op, "_schema") else getattr(op, "__name__", "op")
    return f"{name.strip('_')}_rule"


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
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes), f"  not decided: {UNDECIDED}"])


def discover_sharding(
    op: OperatorLike, *sample_args: Any, progress: Progress = None, **sample_kwargs: Any
) -> DiscoveryReport:
    """Find the strategies of an operator by trying: cut sample inputs in parts and see what the results make up.

    The samples set shapes, dtypes and the range of integers; values are drawn at random. Dims of equal length are split
    together, so use different lengths, of 4 or more, for unrelated dims. Samples on a device are copied to host memory,
    unless the operator does not run there. `progress`: by default a bar on a terminal; True and False say so, and a
    function is called with the number of layouts tried and of all.

    >>> import torch
    >>> discover_sharding(torch.ops.aten.mm.default, torch.zeros(4, 6), torch.zeros(6, 5))
    aten.mm.default on (4, 6), (6, 5):
      R, R -> R
      S(1), S(0) -> P(sum)
      S(0), R -> S(0)
      R, S(1) -> S(1)
      R, P(sum) -> P(sum)
      P(sum), R -> P(sum)
      not decided: what differs by less than 1e-9 of the largest value, and values or lengths of other kinds than ...
    """
    op = resolve_op(op)
    call = make_runnable(split_call(op, sample_args, sample_kwargs))
    findings = find_strategies(call, progress)
    rule = AutoRule(op)
    rule.remember(call, findings)
    return DiscoveryReport(op, call, findings.strategies, findings.notes, rule)
