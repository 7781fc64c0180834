"""What is an operator's call, what is a rule, what does it see, what does it answer, and which operator has which one?

A call is taken apart: its tensors in order, and a key of everything else (`OperatorCall`). Its schema and tags say what
it writes to, and what torch knows of it.

A rule takes the operator's own arguments, tensors replaced by `TensorMeta`, and returns one of two things:

1. acceptable strategies: pairs of output placements and input placements, for one axis of the mesh. The engine moves
   the inputs, computes on the local tensors, and wraps the results;
2. `Steps`: the call is computed by a function of ShardedTensors, by other operators and moves.

An operator for which it is always the second has `Steps` in place of a rule. One table answers which code an operator
runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardwise._cache import cached, clear_on_change
from shardwise._torch import OpOverload, OpOverloadPacket
from shardwise.geometry import Layout, LayoutError, Partial, Placement, Replicate, Shard

_TORCHS_OWN = ("aten", "prims", "torch_nn")


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator: `args` and `kwargs` with tensors replaced by `Slot(i)`, and the tensors."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    passed: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the arguments as they were, until tensors change

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the tensors."""
        return self.fill_slots(self.tensors) if self.passed is None else self.passed

    @property
    def key(self) -> Hashable:
        """All of the call but its tensors."""
        named = tuple((name, _argument_key(value)) for name, value in self.kwargs.items())
        return self.op, tuple(_argument_key(value) for value in self.args), named

    @property
    def written(self) -> tuple[int, ...]:
        """The numbers of the tensors that the operator writes to, ascending."""
        names = written_slots(self.op)
        if not names:
            return ()
        schema = self.op._schema  # type: ignore[attr-defined]  # operators have one
        by_name = dict(zip([a.name for a in schema.arguments], self.args, strict=False)) | dict(self.kwargs)
        values = [by_name.get(name) for name in names]
        flat = [v for value in values for v in (value if isinstance(value, list | tuple) else [value])]
        return tuple(sorted({v.index for v in flat if isinstance(v, Slot)}))

    def with_tensors(self, tensors: Sequence[Tensor]) -> OperatorCall:
        """The same call of other tensors."""
        return OperatorCall(self.op, self.args, self.kwargs, tuple(tensors))

    def fill_slots(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other values in place of the tensors."""
        return tuple(_fill_value_slots(a, values) for a in self.args), {
            k: _fill_value_slots(v, values) for k, v in self.kwargs.items()
        }


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for tensor number `index` of a call."""

    index: int


def split_call(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OperatorCall:
    """Separate the tensors of a call, also those in lists, from everything else."""
    tensors: list[Tensor] = []
    new_args = tuple(_replace_by_slots(a, tensors) for a in args)
    new_kwargs = {name: _replace_by_slots(value, tensors) for name, value in kwargs.items()}
    return OperatorCall(op, new_args, new_kwargs, tuple(tensors), (tuple(args), dict(kwargs)))


def _replace_by_slots(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, list | tuple):
        return type(value)(_replace_by_slots(v, tensors) for v in value) if type(value) in (list, tuple) else value
    return value


def _argument_key(value: Any) -> Hashable:
    """A key for any argument: its type counts, so that 1, 1.0 and True differ."""
    if isinstance(value, list | tuple):
        return (list, *(_argument_key(v) for v in value))
    if isinstance(value, dict):
        return (dict, *((k, _argument_key(v)) for k, v in value.items()))
    if isinstance(value, torch.Generator):
        return (torch.Generator, id(value))
    try:
        hash(value)
    except TypeError:
        return (type(value), repr(value))
    return (type(value), value)


def key_without_numbers(call: OperatorCall) -> Hashable:
    """The key of a call, in which floats count only as usual or not: not finite, or zero.

    >>> x = torch.ones(2)
    >>> calls = [split_call(torch.ops.aten.mul.Tensor, (x, number), {}) for number in (0.1, 0.2, 0.0)]
    >>> [key_without_numbers(call) == key_without_numbers(calls[0]) for call in calls]
    [True, True, False]
    """
    named = tuple((name, _number_kind(value)) for name, value in call.kwargs.items())
    return call.op, tuple(_number_kind(value) for value in call.args), named


def _number_kind(value: Any) -> Hashable:
    return (float, value != 0 and math.isfinite(value)) if type(value) is float else _argument_key(value)


def _fill_value_slots(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, Slot):
        return values[value.index]
    if type(value) in (list, tuple):
        return type(value)(_fill_value_slots(v, values) for v in value)
    return value


@cached()
def written_slots(op: Any) -> tuple[str, ...]:
    """The names of the arguments that an operator writes to.

    >>> written_slots(torch.ops.aten.add_.Tensor), written_slots(torch.ops.aten.add.out)
    (('self',), ('out',))
    """
    schema = getattr(op, "_schema", None)
    if schema is None:
        return ()
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


_NO_DIMS = ("diag_embed", "diag_embed_copy", "::tile")  # the `dims` of tile are how often it repeats


@cached()
def _dim_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that are dims of an operator's first tensor."""
    schema = getattr(op, "_schema", None)
    if schema is None or schema.name.endswith("_backward") or not schema.arguments:
        return ()
    first = str(schema.arguments[0].type)
    named = [(i, a.name) for i, a in enumerate(schema.arguments) if a.name in ("dim", "dims", "dim0", "dim1")]
    known = first in ("Tensor", "List[Tensor]") and not schema.name.endswith(_NO_DIMS)
    return tuple(named) if known else ()


def check_dims(call: OperatorCall) -> None:
    """Raise torch's errors for dims that the tensor has not, or that come twice; rules may count modulo its dims.

    >>> check_dims(split_call(torch.ops.aten.softmax.int, (torch.ones(2, 3), 2), {}))
    Traceback (most recent call last):
    ...
    IndexError: Dimension out of range (expected to be in range of [-2, 1], but got 2)
    """
    for place, name in _dim_arguments(call.op):
        value: Any = call.args[place] if place < len(call.args) else call.kwargs.get(name)
        listed = list(value) if isinstance(value, list | tuple) else [value]
        dims = [dim for dim in listed if isinstance(dim, int)]  # others are defaults and names
        if not dims or not call.tensors:
            continue
        of = call.tensors if isinstance(call.args[0], list | tuple) else call.tensors[:1]
        ndim = max(1, max(t.ndim for t in of) + (name_of(call.op).split(".")[1] in _MAKE_A_DIM))
        wrong = [dim for dim in dims if not -ndim <= dim < ndim]
        if wrong:
            span = f"[{-ndim}, {ndim - 1}]"
            raise IndexError(f"Dimension out of range (expected to be in range of {span}, but got {wrong[0]})")
        twice = [dim for dim in dims if [d % ndim for d in dims].count(dim % ndim) > 1]
        if twice and name == "dim" and "fft" not in name_of(call.op):
            raise RuntimeError(f"dim {twice[0] % ndim} appears multiple times in the list of dims")


_MAKE_A_DIM = ("unsqueeze", "unsqueeze_", "unsqueeze_copy", "stack")


@cached()
def has_tag(op: Any, tag: torch.Tag) -> bool:
    """Whether torch tags an operator so; remembered, since comparing tags takes long."""
    return tag in getattr(op, "tags", ())


@cached()
def name_of(op: Any) -> str:
    """The name of an operator; remembered, since torch puts it together each time."""
    return str(op)


@cached()
def is_pointwise(op: Any) -> bool:
    """Whether torch tags the operator as pointwise and it draws no random numbers.

    Torch leaves out some that write to their argument (`mish_`, `threshold_`): those are what the others are; and 2.11
    leaves out `leaky_relu`.

    >>> is_pointwise(torch.ops.aten.mish_.default), is_pointwise(torch.ops.aten.rrelu.default)
    (True, False)
    """
    others = [one for one in (op, find_functional(op)) if one is not None]
    tags = {tag for one in others for tag in getattr(one, "tags", ())}
    is_tagged = torch.Tag.pointwise in tags or torch.ops.aten.leaky_relu.default in others
    return is_tagged and torch.Tag.nondeterministic_seeded not in tags


@cached()
def find_functional(op: Any) -> Any:
    """The operator that computes what one of torch's own writes to its first argument, or None.

    It takes the same arguments, sometimes in another order: that of `polygamma` differs from the method's.

    >>> find_functional(torch.ops.aten.mish_.default)
    <OpOverload(op='aten.mish', overload='default')>
    """
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or not written_slots(op):
        return None
    name = schema.name.removeprefix("aten::")
    if not name.endswith("_"):
        return None
    plain = f"__{name[3:]}" if name.startswith("__i") else name[:-1]  # __iand__ writes what __and__ returns
    packet = getattr(torch.ops.aten, plain, None)
    wanted = {(a.name, str(a.type)) for a in schema.arguments}
    for overload in packet.overloads() if packet is not None else ():
        other = getattr(packet, overload)
        if {(a.name, str(a.type)) for a in other._schema.arguments} == wanted and not written_slots(other):
            return other
    return getattr(packet, schema.overload_name or "default", None)


@cached()
def is_pure(op: Any) -> bool:
    """Whether an operator of torch's own only reads its arguments and returns new tensors that follow from them.

    >>> is_pure(torch.ops.aten.histc.default), is_pure(torch.ops.aten.squeeze.default)
    (True, False)
    """
    schema = getattr(op, "_schema", None)
    if schema is None or schema.name.partition("::")[0] not in _TORCHS_OWN:
        return False
    aliases = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    return not aliases and bool(schema.returns) and torch.Tag.nondeterministic_seeded not in op.tags


def resolve_op(op: Any) -> Any:
    """The operator named by its overload, its name if there is one overload, or a custom operator's definition.

    >>> resolve_op(torch.ops.aten.relu)
    <OpOverload(op='aten.relu', overload='default')>
    """
    op = getattr(op, "_opoverload", op)
    if isinstance(op, OpOverloadPacket):
        listed: list[str] = op.overloads()
        names = [n for n in listed if "out" not in n]
        if len(names) != 1:
            raise ValueError(f"{op} has the overloads {', '.join(listed)}; name one, as in {op}.{names[0]}")
        return getattr(op, names[0])
    if not isinstance(op, OpOverload):
        raise TypeError(
            f"{op!r} is not a torch operator; pass one such as torch.ops.aten.mm.default, or the function that "
            "torch.library.custom_op returned"
        )
    return op


def to_native_placement(placement: Any) -> Placement | None:
    """One of our placements, from ours or torch's; None stays None."""
    if placement is None or isinstance(placement, Shard | Replicate | Partial):
        return placement
    kind = type(placement).__name__
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "Replicate":
        return Replicate()
    if kind == "Partial":
        return Partial(placement.reduce_op)
    raise LayoutError(f"a rule returns Shard, Replicate or Partial (ours or torch's) or None, got {placement!r}")


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
    `name`: `explain` shows it, and it may be preferred by it. `cost`: what it costs along an axis besides moving its
    inputs and results, in bytes that a rank receives; a strategy with a cost is never taken without comparing.

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
    name: str = ""
    cost: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """An operator computed in several steps: `run` takes its arguments, ShardedTensors among them, and returns results.

    It may call any operator and may communicate, in an order that depends on layouts and arguments alone, so that all
    ranks take the same steps. Gradients are those of its steps. `in_place`: they do to the local tensors of the first
    argument what the operator itself would do to them, and nothing else. `takes_copies`: tensors may have copies.

    >>> steps = Steps(lambda x, y: (x - y).abs().amax())
    >>> steps.run(torch.tensor([1.0, -4.0]), torch.zeros(2)).item()
    4.0
    """

    run: Callable[..., Any]
    in_place: bool = False
    takes_copies: bool = False


R = TypeVar("R", bound=Callable[..., Any])
Rule: TypeAlias = Callable[..., Sequence[Any] | Steps]
OperatorCode: TypeAlias = Rule | Steps

_FORM = "a rule returns a list of pairs ([output placements], [input placements]), None for non-tensors"
_operators: dict[Any, OperatorCode] = {}
_ignoring_lengths: set[OperatorCode] = set()
_taking_copies: set[OperatorCode] = set()
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


def takes_copies(rule: R) -> R:
    """Mark a rule whose strategies from splits to splits are right where several ranks have the same part.

    The operator then computes the same on each of them. To all other rules tensors are shown without copies.
    """
    _taking_copies.add(rule)
    return rule


def rule_takes_copies(rule: OperatorCode) -> bool:
    """Whether a rule is marked so, or steps are."""
    return rule.takes_copies if isinstance(rule, Steps) else rule in _taking_copies


def composite_of(inner: Any) -> Callable[[R], R]:
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
