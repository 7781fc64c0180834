"""Is everything that a graph depends on as it was when it was traced, and has tracing itself changed something?

Which calls may run the same graphs? Those of one kind: layouts, dtypes, strides, modes, attributes of modules, and all
that the program read from outside (`reads`). A call is compared with a kind in steps, cheapest first: a key of the
arguments and torch's modes, which finds candidates; what modules and optimizers have besides values; what was read; the
storages that the program writes to, which no other tensor may share; the local tensors, in C++. Where no kind fits, the
facts of the call are compared with those of a kind, to say what is different.

What a trace changes besides tensors in place (an attribute that was set, a list that was appended to, an optimizer's
first state) cannot be part of a graph. It is described, and everything is put back as it was.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from itertools import chain
from operator import attrgetter, call, is_, itemgetter, methodcaller
from pathlib import PurePath
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise._torch import (
    TensorGuards,
    autocast_device_types,
    default_device,
    global_module_hooks,
    global_step_hooks,
    gradient_hooks,
    is_any_autocast_enabled,
)
from shardwise._tree import flatten_nest
from shardwise.compiler.reads import MISSING, SIMPLE, Reads, describe_change, is_same
from shardwise.compiler.state import ProgramState, takes_rate
from shardwise.geometry import Layout
from shardwise.ops.implicit_replication import takes_any_mesh
from shardwise.tensor.move import describe_tensor
from shardwise.tensor.sharded_tensor import ShardedTensor

_VALUES = methodcaller("values")
FIRST_STATE = "the first state"
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}


class SideEffects:
    """What the modules and optimizers of a program have, to put it back."""

    def __init__(self, state: ProgramState) -> None:
        own = (vars(tensor) for tensor in state.sharded)
        self._undo = [*_watch_modules(state), *_watch_optimizers(state)]
        self._undo += [_watch_dict(held, "an attribute of a tensor: ", own_attributes) for held in own]

    def undo(self) -> str | None:
        """Put everything back; say what was changed first, or None."""
        found = [text for text in (undo() for undo in self._undo) if text is not None]
        return found[0] if found else None


def _watch_dict(held: Any, where: str, part: Callable[[Any], Any] = dict) -> Callable[[], str | None]:
    before = part(held)

    def undo() -> str | None:
        names = {**before, **part(held)}
        changed = [n for n in names if not is_same(held.get(n, MISSING), before.get(n, MISSING))]
        for name in changed:
            held.pop(name, None)
        held.update({n: before[n] for n in changed if n in before})
        return f"{where}{changed[0] if isinstance(changed[0], str) else ''}" if changed else None

    return undo


def _watch_modules(state: ProgramState) -> Iterator[Callable[[], str | None]]:
    for module in state.modules:
        yield _watch_dict(module.__dict__, f"{type(module).__name__}.")
        for held in _held_by(module):
            yield _watch_dict(held, f"{type(module).__name__}.")


def _watch_optimizers(state: ProgramState) -> Iterator[Callable[[], str | None]]:
    for optimizer in state.optimizers:
        name = type(optimizer).__name__
        yield _watch_dict(optimizer.state, f"{FIRST_STATE} of {name}")
        for held in list(optimizer.state.values()):
            yield _watch_dict(held, f"the state of {name}: " if held else f"{FIRST_STATE} of {name}: ")
        for group in optimizer.param_groups:
            yield _watch_dict(group, f"the options of {name}: ")


class AttributeWatch:
    """What modules and optimizers have besides values of tensors, to see whether it changes."""

    def __init__(self, state: ProgramState) -> None:
        self._state = state
        self._attributes = [module.__dict__ for module in state.modules]
        self._before = [dict(module.__dict__) for module in state.modules]
        self._kinds = [*map(type, state.modules)]
        self._held = [*global_module_hooks(), *(held for module in state.modules for held in _held_by(module))]
        for optimizer in state.optimizers:
            self._held += [
                *global_step_hooks(),
                optimizer._optimizer_step_pre_hooks,
                optimizer._optimizer_step_post_hooks,
            ]
        self._objects = [value for held in self._held for value in held.values()]
        self._groups = [_group_values(optimizer) for optimizer in state.optimizers]
        self._optimized = [[*_optimizer_objects(optimizer)] for optimizer in state.optimizers]
        self._tensors = [vars(tensor) for tensor in (*state.sharded, *(slot.tensor for slot in state.plain))]
        self._noted = [*map(own_attributes, self._tensors)]
        self._lengths = [*map(len, self._tensors)]
        self._marked = [(held, noted) for held, noted in zip(self._tensors, self._noted, strict=True) if noted]
        own = [["training", *(before.keys() - _MODULE_ATTRIBUTES - {"training"})] for before in self._before]
        self._own = [itemgetter(*names, names[0]) for names in own]  # of two names or more: a tuple
        self._values = [*chain.from_iterable(map(call, self._own, self._before))]

    def is_unchanged(self) -> bool:
        """Whether everything is as it was; cheap, since every call of a compiled program asks."""
        if sum(map(len, self._held)) != len(self._objects) or not all(
            map(is_, chain.from_iterable(map(_VALUES, self._held)), self._objects)
        ):
            return False
        if not all(map(_same_items, self._attributes, self._before)):
            return False
        if [*map(len, self._tensors)] != self._lengths:
            if [*map(own_attributes, self._tensors)] != self._noted:
                return False
            self._lengths = [*map(len, self._tensors)]
        if not all(_same_values(own_attributes(held).values(), [*noted.values()]) for held, noted in self._marked):
            return False
        modules = self._state.modules
        if not all(map(is_, map(_attributes_of, modules), self._attributes)) or not all(
            map(is_, map(type, modules), self._kinds)
        ):
            return False
        if not all(map(is_, chain.from_iterable(map(call, self._own, self._attributes)), self._values)):
            now = [*chain.from_iterable(map(call, self._own, self._attributes))]
            if not all(map(is_same, now, self._values)):
                return False
            self._values = now
        return all(
            _same_values(_group_values(optimizer), groups) and _same_values(_optimizer_objects(optimizer), objects)
            for optimizer, groups, objects in zip(self._state.optimizers, self._groups, self._optimized, strict=True)
        )

    def difference(self) -> str | None:
        """An attribute of a module that is not as it was, in words, or None."""
        for module, before in zip(self._state.modules, self._before, strict=True):
            for name in {**before, **module.__dict__}:
                now, then = module.__dict__.get(name, MISSING), before.get(name, MISSING)
                if not is_same(now, then):
                    return describe_change(f"{type(module).__name__}.{name}", now, then)
        return (
            None if self.is_unchanged() else "an attribute or a hook of a module, or an option of an optimizer changed"
        )


_attributes_of = attrgetter("__dict__")
_FIELDS = frozenset(("sharding", "local_parts", "comm"))


def own_attributes(held: dict[str, Any]) -> dict[str, Any]:
    """What a program has set on a tensor, of the tensor's `__dict__`."""
    return {name: value for name, value in held.items() if name[:1] != "_" and name not in _FIELDS}


def _same_values(found: Any, wanted: list[object]) -> bool:
    now = [*found]
    return len(now) == len(wanted) and all(map(is_same, now, wanted))


def _held_by(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """The dicts of a module whose objects a graph depends on."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return module._parameters, module._buffers, module._modules, *hooks


def _same_items(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dicts have equal items; objects are compared by identity first, as dicts do."""
    try:
        return one == other
    except (RuntimeError, ValueError, TypeError):  # tensors or arrays that are not the same object
        return False


def _optimizer_objects(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """The parameters of an optimizer, its state, and those of its options that are tensors."""
    for group in optimizer.param_groups:
        yield from group["params"]
        yield from (value for value in group.values() if isinstance(value, Tensor))
    yield from chain.from_iterable(map(_VALUES, optimizer.state.values()))


def _group_values(optimizer: torch.optim.Optimizer) -> list[object]:
    """The options of an optimizer's groups; those that are inputs of the graph are left out."""
    inputs = {"params", "lr"} if takes_rate(optimizer) else {"params"}
    return [
        part
        for group in optimizer.param_groups
        for option in group.items()
        if option[0] not in inputs and not isinstance(option[1], Tensor)
        for part in option
    ]


def mode_key() -> tuple[Any, ...]:
    """Torch's modes that a graph depends on."""
    casts = _autocast_modes() if is_any_autocast_enabled() else ()
    gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *gradients, torch.get_default_dtype(), default_device(), casts, _flags()


def _flags() -> tuple[Any, ...]:
    """Flags of torch that code may ask for."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return deterministic, torch.is_anomaly_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads()


def _autocast_modes() -> tuple[Any, ...]:
    return tuple((d, torch.get_autocast_dtype(d)) for d in autocast_device_types if torch.is_autocast_enabled(d))


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of the arguments and how they are nested; None for plain positional arguments."""
    if not kwargs and all(isinstance(a, Tensor) or type(a) in SIMPLE for a in args):
        return list(args), None
    return flatten_nest((args, kwargs))


def describe_unfit(leaves: Sequence[Any]) -> str | None:
    """What cannot be compared from call to call, or None: an argument that is neither a tensor nor a plain value."""
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if own_attributes(leaf.__dict__):
                return f"argument {number} is a tensor with attributes of its own; pass them as arguments"
        elif _value_key(leaf) is None:
            kind = type(leaf).__name__
            return f"argument {number} is a {kind}; pass tensors, numbers and strings, or lists, dicts of them"
    return None


_BY_VALUE = (int, bool, str, bytes, type(None), range, type(Ellipsis), torch.dtype, torch.device, torch.layout)
_BY_TEXT = (torch.memory_format, np.dtype, Decimal, Fraction, PurePath, date, time, timedelta)


def _value_key(value: Any) -> Any:
    """A key that two values share if no program can tell them apart, or None where that is not known.

    >>> _value_key((1, 0.0)) == _value_key((1, -0.0)), _value_key((1,)) == _value_key((True,))
    (False, False)
    """
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind is tuple or kind is torch.Size or kind is slice:
        return _key_of_parts(kind, (value.start, value.stop, value.step) if kind is slice else value)
    if kind is frozenset:
        parts = {_value_key(part) for part in value}
        return None if None in parts else (kind, frozenset(parts))
    if isinstance(value, Enum | type | FunctionType):
        is_hashed = getattr(kind, "__hash__", None) is not None
        return (kind, id(value), value) if is_hashed else None  # kept, so that no other has its id
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if is_dataclass(value) and kind.__dataclass_params__.frozen and not hasattr(kind, "__slots__"):
        return _key_of_parts(kind, (*vars(value), *vars(value).values()))
    return (kind, str(value)) if isinstance(value, _BY_TEXT) else None


def _key_of_parts(kind: type, parts: Iterable[Any]) -> Any:
    found = [_value_key(part) for part in parts]
    return None if None in found else (kind, *found)


def _kinds_of_keys(value: Any) -> Iterator[type]:
    """The classes of the keys of dicts that are not strings: of equal keys, 1 and True, code sees which it was."""
    if isinstance(value, dict):
        yield from (type(key) for key in value if type(key) is not str)
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _kinds_of_keys(part)


def argument_key(leaves: Sequence[Any], structure: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """What finds the kinds that a call may be of."""
    key: list[Any] = [structure, *_kinds_of_keys(args)]
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            key += (type(leaf), id(leaf.sharding), takes_any_mesh(leaf))
        elif isinstance(leaf, Tensor):
            key.append(type(leaf))
        else:
            key.append(_value_key(leaf))
    return tuple(key)


def describe_argument(value: Any) -> str:
    """An argument in the words of `explain()`."""
    if isinstance(value, ShardedTensor):
        found = describe_tensor(value.dtype, value.sharding)
    elif isinstance(value, Tensor):
        found = f"{value.dtype}{list(value.shape)}, strides {value.stride()}"
    else:
        return repr(value)
    return found + (", requires grad" if value.requires_grad else "")


def describe_call(leaves: Sequence[Any], state: ProgramState, gradients: Sequence[bool]) -> dict[str, str]:
    """The facts about a call that decide its kind, by name."""
    grad, inference, dtype, device, casts, flags = mode_key()
    facts = {f"argument {i}": describe_argument(leaf) for i, leaf in enumerate(leaves)}
    facts |= {"grad mode": str(grad), "inference mode": str(inference), "default dtype": str(dtype)}
    facts["default device"] = str(device)
    facts["deterministic, anomaly mode, precision, threads"] = ", ".join(map(str, flags))
    facts["autocast"] = ", ".join(f"{device} to {to}" for device, to in casts) or "off"
    facts["gradients at the start"] = f"{sum(gradients)} of {len(gradients)}"
    for i, module in enumerate(state.modules):
        name = f"{type(module).__name__} (module {i})"
        facts |= {f"{k} of {name}": repr(v) for k, v in module.__dict__.items() if isinstance(v, SIMPLE)}
    for optimizer in state.optimizers:
        for i, group in enumerate(optimizer.param_groups):
            found = {k: repr(v) for k, v in group.items() if isinstance(v, SIMPLE)}
            facts |= {f"{k} of group {i} of {type(optimizer).__name__}": v for k, v in found.items()}
    facts |= {f"state tensor {i}": describe_argument(t) for i, t in enumerate(state.sharded)}
    facts |= {f"plain state tensor {i}": describe_argument(s.tensor) for i, s in enumerate(state.plain)}
    return facts


def explain_difference(now: dict[str, str], before: dict[str, str]) -> str:
    """What is different about a call, or nothing where these facts are the same.

    >>> explain_difference({"grad mode": "False"}, {"grad mode": "True"})
    'grad mode is False, was True'
    """
    both = now.keys() & before.keys()
    named = [name for name in (*now, *before) if name in both or not name.startswith("name ")]
    names = [name for name in named if now.get(name) != before.get(name)]
    found = [f"{n} is {now.get(n, 'missing')}, was {before.get(n, 'missing')}" for n in dict.fromkeys(names)]
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


class KindGuard:
    """What must be as it was when a kind was traced."""

    def __init__(
        self, state: ProgramState, flat: Sequence[Tensor], layouts: Sequence[Layout], *, in_step: bool = True
    ) -> None:
        self.watch = AttributeWatch(state)
        self.reads = Reads()
        self.memory: MemoryWatch | None = None
        self.shares_memory = False  # whether calls of this kind have a tensor in the memory of one that is written to
        self.asks_gradients = False  # whether the program may ask for the gradient of a tensor
        self.always = False  # whether calls with other values are of this kind as well: it has no graph and gets none
        self._state, self._in_step = state, in_step
        self._shardings = [t.sharding for t in state.sharded]
        self._layouts = tuple(layouts)  # keys have their identities: they stay alive
        self._count = len(flat)
        self._own_count = len(state.local_tensors()) if in_step else 0
        self._hooks = self._count_hooks(flat)
        self._has_gradients = self.argument_has_gradient(flat)
        self._repeats = _find_repeats(flat)
        distinct = _leave_out(flat, self._repeats)
        self._tensors = TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None) if flat else None

    def holds(self, flat: Sequence[Tensor]) -> bool:
        """Whether a call on these local tensors is of this kind."""
        if self.always:
            return True
        if len(flat) != self._count or not all(map(is_, (t.sharding for t in self._state.sharded), self._shardings)):
            return False
        if not self.watch.is_unchanged() or not self.reads.holds():
            return False
        if self._own_count and self._count_hooks(flat) != self._hooks:
            return False
        if self.asks_gradients and self.argument_has_gradient(flat) != self._has_gradients:
            return False
        if self._tensors is None:
            return True
        if not self._repeats:
            fits = bool(self._tensors.check(*flat))  # which notices tensors that are there twice
        else:
            fits = _find_repeats(flat) == self._repeats and bool(self._tensors.check(*_leave_out(flat, self._repeats)))
        return fits and (self.memory is None or (self.memory.find(flat) is not None) == self.shares_memory)

    def _count_hooks(self, flat: Sequence[Tensor]) -> list[int]:
        """How many hooks the gradients of a step's parameters have: its graph calls those that it was traced with."""
        return [*map(len, filter(None, chain.from_iterable(map(gradient_hooks, flat[: self._own_count]))))]

    def argument_has_gradient(self, flat: Sequence[Tensor]) -> bool:
        """Whether a tensor, a leaf of the tape, has a gradient that is no input of the graph."""
        own = {id(tensor) for tensor in self._state.local_tensors()} if self._in_step else ()
        return any(t.requires_grad and t.is_leaf and t.grad is not None for t in flat if id(t) not in own)

    def difference(self) -> str | None:
        """What is not as it was besides the arguments, in words, or None."""
        return self.reads.difference() or self.watch.difference()


class MemoryWatch:
    """Which tensors of a call share memory with one that the program writes to: a graph reads all of them first."""

    def __init__(self, flat: Sequence[Tensor], writes: frozenset[int]) -> None:
        self._writes = writes
        self._sizes = np.array([bytes_spanned(tensor) for tensor in flat], np.int64)
        self._places = np.flatnonzero(self._sizes)
        self._sizes = self._sizes[self._places]
        self._is_looked_at = bool(writes) and all(tensor.device.type != "meta" for tensor in flat)

    def find(self, flat: Sequence[Tensor]) -> tuple[int, int] | None:
        """The places of a tensor that is written to and of another one in its memory, or None."""
        if not self._is_looked_at:
            return None
        begins = np.fromiter(map(_data_pointer, flat), np.int64, len(flat))[self._places]
        order = begins.argsort(kind="stable")
        begins, ends = begins[order], (begins + self._sizes)[order]
        if (ends[:-1] <= begins[1:]).all():
            return None
        places, active = self._places[order].tolist(), list[tuple[int, int]]()
        for place, begin, end in zip(places, begins.tolist(), ends.tolist(), strict=True):
            active = [(other, limit) for other, limit in active if limit > begin]
            for other, _ in active:
                if flat[place] is not flat[other] and (place in self._writes or other in self._writes):
                    return (place, other) if place in self._writes else (other, place)
            active.append((place, end))
        return None


_data_pointer = methodcaller("data_ptr")


def bytes_spanned(tensor: Tensor) -> int:
    """The bytes from the first element of a tensor to its last one."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _find_repeats(flat: Sequence[Tensor]) -> dict[int, int]:
    """The places of tensors that are there a second time, as where the same batch is passed as ids and as labels."""
    if len(set(map(id, flat))) == len(flat):
        return {}
    first: dict[int, int] = {}
    return {i: first[id(t)] for i, t in enumerate(flat) if first.setdefault(id(t), i) != i}


def _leave_out(flat: Sequence[Tensor], places: dict[int, int]) -> list[Tensor]:
    return [t for i, t in enumerate(flat) if i not in places]
