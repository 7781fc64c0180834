"""Which tensors does a program use besides its arguments? Those of its modules and optimizers.

1. Modules and optimizers are found in what is compiled: the module itself, a function's closure, its globals by the
   names that it uses, and the attributes of the object of a method.
2. ShardedTensors keep their identity: for a trace other local tensors are put in them. Plain tensors are replaced in
   the dicts and lists that hold them.
3. Afterwards everything is as before. What a trace has changed besides tensors in place (an attribute that was set, a
   parameter that was replaced) cannot be part of a graph, and is reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, methodcaller
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.comm import Comm
from shardwise.comm.traced import CommTrace, NotTraceableError
from shardwise.tensor.sharded_tensor import ShardedTensor

Container: TypeAlias = MutableMapping[Any, Any] | MutableSequence[Any]
CACHED = ("_varied", "_known_gradient", "_shards", "_described")  # what a ShardedTensor remembers of its local tensors


@dataclass(eq=False)
class PlainSlot:
    """A plain tensor of the program's state, and all places that hold it."""

    tensor: Tensor
    places: list[tuple[Container, Any]] = field(default_factory=list)

    def put(self, tensor: Tensor) -> None:
        """Let all places hold another tensor."""
        for container, key in self.places:
            container[key] = tensor


@dataclass(eq=False)
class ProgramState:
    """The modules and optimizers of a program, and their tensors, each once."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    sharded: list[ShardedTensor] = field(default_factory=list)
    plain: list[PlainSlot] = field(default_factory=list)

    @property
    def comm(self) -> Comm | None:
        """The comm of the state's tensors."""
        return self.sharded[0].comm if self.sharded else None

    def rated_groups(self) -> list[dict[str, Any]]:
        """The groups of optimizers whose learning rate, a number, can be an input of the graph."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups if _takes_rate(optimizer)]
        return [group for group in groups if isinstance(group.get("lr"), float | int)]

    def local_tensors(self) -> list[Tensor]:
        """This rank's tensors of the state, in one order."""
        found = [local for tensor in self.sharded for local in tensor.local_parts]
        return found + [slot.tensor for slot in self.plain]


def _takes_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer computes with a learning rate that is a tensor, without reading its value."""
    return isinstance(optimizer, torch.optim.SGD) or all("capturable" in group for group in optimizer.param_groups)


def collect_state(target: Callable[..., Any], more: Sequence[object] = ()) -> ProgramState:
    """The state of a module or function; `more` are modules and optimizers that cannot be found in it."""
    roots = [*_objects_of(target), *more]
    modules = list(dict.fromkeys(m for root in roots if isinstance(root, nn.Module) for m in root.modules()))
    optimizers = list(dict.fromkeys(root for root in roots if isinstance(root, torch.optim.Optimizer)))
    state = ProgramState(modules, optimizers)
    for container, key, tensor in (*_module_places(modules), *_optimizer_places(optimizers)):
        _add_tensor(state, container, key, tensor)
    for root in roots:
        if isinstance(root, ShardedTensor):
            _add_tensor(state, [], 0, root)
    return state


def _objects_of(target: Any) -> Iterator[object]:
    """What a program can reach by name."""
    if isinstance(target, nn.Module):
        yield target
        return
    owner = getattr(target, "__self__", None)
    if owner is not None and not inspect.ismodule(owner):
        yield owner
        yield from getattr(owner, "__dict__", {}).values()
    function = inspect.unwrap(getattr(target, "__func__", target))
    code = getattr(function, "__code__", None)
    if code is None:
        yield from getattr(target, "__dict__", {}).values()
        return
    yield from (value for _, value in closure_values(function))


def closure_values(function: Any) -> list[tuple[str, object]]:
    """The values that a function's free names and global names have now, by name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    found: list[tuple[str, object]] = []
    for name, cell in cells:
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    named = function.__globals__
    return found + [(name, named[name]) for name in code.co_names if name in named]


def _module_places(modules: Iterable[nn.Module]) -> Iterator[tuple[Container, Any, Tensor]]:
    for module in modules:
        for held in (module._parameters, module._buffers):
            yield from ((held, name, tensor) for name, tensor in held.items() if tensor is not None)


def _optimizer_places(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[Container, Any, Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from ((group["params"], i, tensor) for i, tensor in enumerate(group["params"]))
            yield from ((group, name, value) for name, value in group.items() if isinstance(value, Tensor))
        for held in optimizer.state.values():
            yield from ((held, name, value) for name, value in held.items() if isinstance(value, Tensor))


def _add_tensor(state: ProgramState, container: Container, key: Any, tensor: Tensor) -> None:
    if isinstance(tensor, ShardedTensor):
        if not any(tensor is known for known in state.sharded):
            state.sharded.append(tensor)
        return
    slot = next((slot for slot in state.plain if slot.tensor is tensor), None)
    if slot is None:
        slot = PlainSlot(tensor)
        state.plain.append(slot)
    slot.places.append((container, key))


@contextmanager
def swap_tensors(state: ProgramState, tensors: Sequence[Tensor], trace: CommTrace) -> Iterator[None]:
    """Let the state have other local tensors, those of a trace, inside a `with` block."""
    given = iter(tensors)
    before = [(t.local_parts, t.comm, {k: t.__dict__.pop(k) for k in CACHED if k in t.__dict__}) for t in state.sharded]
    try:
        for tensor, (parts, comm, _) in zip(state.sharded, before, strict=True):
            tensor.local_parts = tuple(next(given) for _ in parts)
            tensor.comm = trace.twin_of(comm)
        for slot in state.plain:
            _replace_plain(state, slot, slot.tensor, next(given))
        yield
    finally:
        for tensor, (parts, comm, cached) in zip(state.sharded, before, strict=True):
            for name in CACHED:
                tensor.__dict__.pop(name, None)
            tensor.local_parts, tensor.comm = parts, comm
            tensor.__dict__.update(cached)
        for slot in state.plain:
            _replace_plain(state, slot, slot.places[0][0][slot.places[0][1]], slot.tensor)


@contextmanager
def computing_with_tensors(state: ProgramState, rates: Tensor) -> Iterator[None]:
    """Let optimizers compute with steps and learning rates that are tensors, as they do for CUDA graphs."""
    wanted: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group, rate in zip(state.rated_groups(), rates, strict=True):
        by_tensors = {"capturable": True} if "capturable" in group else {"foreach": True, "fused": None}
        wanted.append((group, {"lr": rate, **by_tensors}))
    before = [{name: group[name] for name in options} for group, options in wanted]
    try:
        for group, options in wanted:
            group.update(options)
        yield
    finally:
        for (group, _), options in zip(wanted, before, strict=True):
            group.update(options)


def _replace_plain(state: ProgramState, slot: PlainSlot, old: Tensor, new: Tensor) -> None:
    """Put another tensor in the places of a plain one; optimizers find a parameter's state by the parameter."""
    slot.put(new)
    for optimizer in state.optimizers:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


class AttributeWatch:
    """What modules and optimizers have besides values of tensors, to see whether it changes."""

    def __init__(self, state: ProgramState) -> None:
        self._state = state
        self._modules = [(module, dict(module.__dict__)) for module in state.modules]
        self._held = [held for module in state.modules for held in _held_by(module)]
        self._objects = [value for held in self._held for value in held.values()]
        self._groups = [_group_values(optimizer) for optimizer in state.optimizers]
        self._sizes = [sum(map(len, optimizer.state.values())) for optimizer in state.optimizers]

    def is_unchanged(self) -> bool:
        """Whether everything is as it was; cheap, since every call of a compiled program asks."""
        if sum(map(len, self._held)) != len(self._objects) or not all(
            map(is_, chain.from_iterable(map(_VALUES, self._held)), self._objects)
        ):
            return False
        for module, attributes in self._modules:
            if not _same_items(module.__dict__, attributes):
                return False
        return not self._state.optimizers or self._changed_optimizer() is None

    def describe_change(self) -> str | None:
        """What is not as it was, or None."""
        for module, attributes in self._modules:
            now = module.__dict__
            for name in {*now, *attributes}:
                if not _is_same_value(now.get(name), attributes.get(name)) or (name in now) != (name in attributes):
                    return f"{type(module).__name__}.{name}"
        objects = [value for held in self._held for value in held.values()]
        if len(objects) != len(self._objects) or not all(map(is_, objects, self._objects)):
            return "a parameter, buffer, submodule or hook of a module"
        return self._changed_optimizer()

    def _changed_optimizer(self) -> str | None:
        for optimizer, groups, size in zip(self._state.optimizers, self._groups, self._sizes, strict=True):
            now = _group_values(optimizer)
            if now != groups:
                names = [k for a, b in zip(now, groups, strict=False) for k in {*a, *b} if a.get(k) != b.get(k)]
                return f"{', '.join(sorted(set(names))) or 'the groups'} of {type(optimizer).__name__}"
            if sum(map(len, optimizer.state.values())) != size:
                return f"the state of {type(optimizer).__name__}"
        return None

    def restore_attributes(self) -> None:
        """Put the attributes of modules back."""
        for module, attributes in self._modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)


_VALUES = methodcaller("values")


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


def _is_same_value(one: Any, other: Any) -> bool:
    return one is other or _same_items({"": one}, {"": other})


def _group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of an optimizer's groups; those that are inputs of the graph are left out."""
    inputs = {"params", "lr"} if _takes_rate(optimizer) else {"params"}
    return [
        {name: value for name, value in group.items() if name not in inputs and not isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]


def check_traceable(state: ProgramState, in_step: bool) -> None:
    """Raise if something about the state cannot be part of a graph."""
    for tensor in state.sharded:
        if not tensor.local_parts:
            raise NotTraceableError(f"rank {tensor.comm.rank} has no part of a tensor of the program: {tensor!r}")
    if in_step and any(t._backward_hooks for t in state.local_tensors()):
        raise NotTraceableError("parameters have backward hooks, which a whole training step would not call")
