"""Is everything that a graph depends on as it was when it was traced, and has tracing itself changed something?

1. A graph has the attributes of modules, the options of optimizers, and the numbers and containers that the program
   reads by name as constants. Each call of a compiled program compares them: by identity, numbers and strings by value.
2. What a trace changes besides tensors in place (an attribute that was set, a list that was appended to, an optimizer's
   first state) cannot be part of a graph. It is described, and everything is put back as it was.

Which calls may run the same graphs? Those of one kind: layouts, dtypes, strides, modes, attributes of modules.

A call is compared with a kind in three steps, cheapest first: a key of the arguments and torch's modes, which finds
candidates; what modules and optimizers have besides values; the local tensors, in C++. Where no kind fits, the facts of
the call are compared with those of a kind, to say what is different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_, methodcaller
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import TensorGuards, autocast_device_types, is_any_autocast_enabled
from shardwise._tree import flatten_nest
from shardwise.compiler.state import SIMPLE, ProgramState, Reachable, takes_rate
from shardwise.geometry import Layout
from shardwise.ops.implicit_replication import takes_any_mesh
from shardwise.tensor.move import describe_tensor
from shardwise.tensor.sharded_tensor import ShardedTensor

_VALUES, _MISSING = methodcaller("values"), object()
_MUTABLE = (list, set, dict)
FIRST_STATE = "the first state"


class NameWatch:
    """The values that a program reads by name, and the containers and objects behind them."""

    def __init__(self, reachable: Reachable) -> None:
        self._reachable = reachable
        self._cells = [(name, cell, _read_cell(cell)) for name, cell in reachable.cells.values()]
        self._dicts = [(h, {n: h.get(n, _MISSING) for n in names}) for h, names in reachable.globals.values()]
        self._dicts += [(held, {n: held[n] for n in reachable.names & held.keys()}) for _, held in reachable.holders]
        self._containers = [(value, _copy(value)) for _, value in reachable.containers if isinstance(value, _MUTABLE)]

    def is_unchanged(self) -> bool:
        """Whether the program would read the same values; cheap, since every call of a compiled program asks."""
        for held, wanted in self._dicts:
            for name, value in wanted.items():
                now = held.get(name, _MISSING)
                if now is not value and not _is_same_simple(now, value):
                    return False
        for _, cell, value in self._cells:
            now = _read_cell(cell)
            if now is not value and not _is_same_simple(now, value):
                return False
        return all(_has_same_entries(now, copied) for now, copied in self._containers)

    def facts(self) -> dict[str, str]:
        """The numbers and strings among the values, by name, in the words of `explain()`."""
        found = {name: value for name, _, value in self._cells}
        for held, names in self._reachable.globals.values():
            found |= {name: held[name] for name in names & held.keys()}
        for path, held in self._reachable.holders:
            found |= {f"{path}.{name}": held[name] for name in self._reachable.names & held.keys()}
        return {f"name {name}": repr(value) for name, value in found.items() if isinstance(value, SIMPLE)}


class SideEffects:
    """What the names, containers, objects, modules and optimizers of a program have, to put it back."""

    def __init__(self, state: ProgramState) -> None:
        self._undo = [*_watch_names(state.reachable), *_watch_modules(state), *_watch_optimizers(state)]

    def undo(self) -> str | None:
        """Put everything back; say what was changed first, or None."""
        found = [text for text in (undo() for undo in self._undo) if text is not None]
        return found[0] if found else None


def _watch_names(reachable: Reachable) -> Iterator[Callable[[], str | None]]:
    for name, cell in reachable.cells.values():
        yield _watch_cell(name, cell)
    for held, names in reachable.globals.values():
        yield _watch_dict(held, "the name ", names)
    for path, held in reachable.holders:
        yield _watch_dict(held, f"{path}.")
    for path, value in reachable.containers:
        if isinstance(value, _MUTABLE):
            yield _watch_container(value, path)


def _watch_cell(name: str, cell: Any) -> Callable[[], str | None]:
    before = _read_cell(cell)

    def undo() -> str | None:
        if _read_cell(cell) is before:
            return None
        if before is not _MISSING:
            cell.cell_contents = before
        return f"the name {name}"

    return undo


def _watch_dict(held: Any, where: str, names: set[str] | None = None) -> Callable[[], str | None]:
    """Watch the entries of a dict; those of some names only where others are not the program's."""
    before = {n: held[n] for n in held.keys() & names} if names is not None else dict(held)

    def undo() -> str | None:
        now = held if names is None else {n: held[n] for n in held.keys() & names}
        changed = [n for n in {**before, **now} if not _is_same(now.get(n, _MISSING), before.get(n, _MISSING))]
        for name in changed:
            held.pop(name, None)
        held.update({n: before[n] for n in changed if n in before})
        return f"{where}{changed[0] if isinstance(changed[0], str) else ''}" if changed else None

    return undo


def _watch_container(value: Any, path: str) -> Callable[[], str | None]:
    before = _copy(value)

    def undo() -> str | None:
        if _has_same_entries(value, before):
            return None
        value.clear()
        value.extend(before) if isinstance(value, list) else value.update(before)
        return f"{path}, a {type(value).__name__}"

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
        self._modules = [(module, dict(module.__dict__)) for module in state.modules]
        self._held = [held for module in state.modules for held in _held_by(module)]
        self._objects = [value for held in self._held for value in held.values()]
        self._groups = [_group_values(optimizer) for optimizer in state.optimizers]
        self._optimized = [[*_optimizer_objects(optimizer)] for optimizer in state.optimizers]
        self.names = NameWatch(state.reachable)

    def is_unchanged(self) -> bool:
        """Whether everything is as it was; cheap, since every call of a compiled program asks."""
        if sum(map(len, self._held)) != len(self._objects) or not all(
            map(is_, chain.from_iterable(map(_VALUES, self._held)), self._objects)
        ):
            return False
        for module, attributes in self._modules:
            if not _same_items(module.__dict__, attributes):
                return False
        return self.names.is_unchanged() and all(
            _group_values(optimizer) == groups and _has_same_objects(_optimizer_objects(optimizer), objects)
            for optimizer, groups, objects in zip(self._state.optimizers, self._groups, self._optimized, strict=True)
        )


def _read_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned
        return _MISSING


def _is_same_simple(one: object, other: object) -> bool:
    return type(one) is type(other) and isinstance(one, SIMPLE) and one == other


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, or equal and no tensors."""
    if one is other or isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return _same_items({"": one}, {"": other})


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _has_same_entries(one: Any, other: Any) -> bool:
    """Whether two containers of a kind have the same objects, or equal numbers and strings."""
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        pairs = ((value, other.get(key, _MISSING)) for key, value in one.items())
        return all(a is b or _is_same_simple(a, b) for a, b in pairs)
    return all(a is b or _is_same_simple(a, b) for a, b in zip(one, other, strict=True))


def _has_same_objects(found: Iterator[object], wanted: list[object]) -> bool:
    now = list(found)
    return len(now) == len(wanted) and all(a is b or _is_same_simple(a, b) for a, b in zip(now, wanted, strict=True))


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


def _group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of an optimizer's groups; those that are inputs of the graph are left out."""
    inputs = {"params", "lr"} if takes_rate(optimizer) else {"params"}
    return [
        {name: value for name, value in group.items() if name not in inputs and not isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]


LEAVES = (Tensor, *SIMPLE)


def mode_key() -> tuple[Any, ...]:
    """Torch's modes that a graph depends on."""
    casts = _autocast_modes() if is_any_autocast_enabled() else ()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), casts


def _autocast_modes() -> tuple[Any, ...]:
    return tuple((d, torch.get_autocast_dtype(d)) for d in autocast_device_types if torch.is_autocast_enabled(d))


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of the arguments and how they are nested; None for plain positional arguments."""
    if not kwargs and all(isinstance(a, LEAVES) for a in args):
        return list(args), None
    return flatten_nest((args, kwargs))


def describe_unfit(leaves: Sequence[Any]) -> str | None:
    """What cannot be compared from call to call, or None: an argument that is neither a tensor nor a plain value."""
    for number, leaf in enumerate(leaves):
        kind: Any = type(leaf)
        if isinstance(leaf, (*LEAVES, type, FunctionType)) or (kind.__hash__ and kind.__eq__ is not object.__eq__):
            continue
        return f"argument {number} is a {kind.__name__}; pass tensors, numbers and strings, or lists, dicts of them"
    return None


def argument_key(leaves: Sequence[Any], structure: Any) -> tuple[Any, ...]:
    """What finds the kinds that a call may be of."""
    key: list[Any] = [structure]
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            key += (type(leaf), id(leaf.sharding), takes_any_mesh(leaf))
        elif isinstance(leaf, Tensor):
            key.append(Tensor)
        else:
            key += (type(leaf), leaf)
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


def describe_call(
    leaves: Sequence[Any], state: ProgramState, names: dict[str, str], gradients: Sequence[bool]
) -> dict[str, str]:
    """The facts about a call that decide its kind, by name."""
    grad, inference, dtype, casts = mode_key()
    facts = {f"argument {i}": describe_argument(leaf) for i, leaf in enumerate(leaves)}
    facts |= {"grad mode": str(grad), "inference mode": str(inference), "default dtype": str(dtype)}
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
    return facts | names


def explain_difference(now: dict[str, str], before: dict[str, str]) -> str:
    """What is different about a call.

    >>> explain_difference({"grad mode": "False"}, {"grad mode": "True"})
    'grad mode is False, was True'
    """
    names = [name for name in (*now, *before) if now.get(name) != before.get(name)]
    found = [f"{n} is {now.get(n, 'missing')}, was {before.get(n, 'missing')}" for n in dict.fromkeys(names)]
    if not found:
        return "an attribute or a hook of a module, a name that the function uses, or the strides of a tensor changed"
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


class KindGuard:
    """What must be as it was when a kind was traced."""

    def __init__(self, state: ProgramState, flat: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        self.watch = AttributeWatch(state)
        self.always = False  # whether calls with other values are of this kind as well: it has no graph and gets none
        self._state = state
        self._shardings = [t.sharding for t in state.sharded]
        self._layouts = tuple(layouts)  # keys have their identities: they stay alive
        self._count = len(flat)
        self._repeats = _find_repeats(flat)
        distinct = _leave_out(flat, self._repeats)
        self._tensors = TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None) if flat else None

    def holds(self, flat: Sequence[Tensor]) -> bool:
        """Whether a call on these local tensors is of this kind."""
        if self.always:
            return True
        if len(flat) != self._count or not all(map(is_, (t.sharding for t in self._state.sharded), self._shardings)):
            return False
        if not self.watch.is_unchanged():
            return False
        if self._tensors is None:
            return True
        if not self._repeats:
            return bool(self._tensors.check(*flat))  # which notices tensors that are there twice
        return _find_repeats(flat) == self._repeats and bool(self._tensors.check(*_leave_out(flat, self._repeats)))


def _find_repeats(flat: Sequence[Tensor]) -> dict[int, int]:
    """The places of tensors that are there a second time, as where the same batch is passed as ids and as labels."""
    if len(set(map(id, flat))) == len(flat):
        return {}
    first: dict[int, int] = {}
    return {i: first[id(t)] for i, t in enumerate(flat) if first.setdefault(id(t), i) != i}


def _leave_out(flat: Sequence[Tensor], places: dict[int, int]) -> list[Tensor]:
    return [t for i, t in enumerate(flat) if i not in places]
