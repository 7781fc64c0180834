"""Discovered strategies as a rule in Python, short enough to read, ready to paste.

1. Strategies that differ only in which dim is sharded become one loop, where they cover what one condition covers:
   all dims, or all but (or before, after, only) the operator's `dim` argument. For that the operator is tried with
   every value of `dim`.
2. What fits no loop is listed as it was found; for other arguments than the sample's the rule then replicates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from shardwise.geometry import Placement, Shard
from shardwise.ops.discovery.search import find_strategies, line_up_placements
from shardwise.ops.engine.registry import Strategy
from shardwise.ops.engine.schema import OperatorCall, Slot

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
    return find_strategies(OperatorCall(call.op, tuple(args), kwargs, call.tensors, call.key)).strategies


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
