"""An operator call taken apart: its tensors in order, and a key of everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise._cache import cached
from shardwise._torch import OpOverload, OpOverloadPacket

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

    Torch leaves out some that write to their argument (`mish_`, `threshold_`): those are what the others are.

    >>> is_pointwise(torch.ops.aten.mish_.default), is_pointwise(torch.ops.aten.rrelu.default)
    (True, False)
    """
    tags = set(getattr(op, "tags", ()))
    if torch.Tag.pointwise not in tags and (other := find_functional(op)) is not None:
        tags |= set(other.tags)
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


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
