"""Which tensors does a program use besides its arguments? Those of its modules and optimizers.

1. Modules, optimizers and ShardedTensors are found in what is compiled (see `reachable`).
2. ShardedTensors keep their identity: for a trace other local tensors are put in them. Plain tensors are replaced in
   the dicts and lists that hold them.
3. Afterwards everything is as before.

What can a program reach by name? Modules, optimizers and tensors, and the numbers and containers that it reads.

1. Code is read for names: those of a function's closure, the globals that it loads, and all attributes that it
   mentions. Helper functions and methods of the user's that are mentioned are read as well, until nothing new is found.
2. Values of these names are followed: into lists, dicts and sets, and into those attributes of objects that the code
   mentions. What is not mentioned is not looked at, so that a counter beside the program means nothing.
3. Code of libraries is read for the attributes that it mentions only: their own globals do not change.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise._torch import has_accumulate_hooks
from shardwise.comm import Comm
from shardwise.comm.stand_in import CommTrace, NotTraceableError
from shardwise.tensor.sharded_tensor import ShardedTensor

SIMPLE = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
CONTAINERS = (list, tuple, set, frozenset, dict)
_ENDS = (*SIMPLE, ModuleType, type, BuiltinFunctionType)
_DEPTH, _LONGEST, _ROUNDS = 6, 256, 6
_PACKAGE, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")} | {_PACKAGE, _TORCH})
_FOLLOWED = ("torch.optim.", "torch.amp.")  # of torch's objects: schedulers and scalers, which change as they run
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)


class Reachable:
    """What was found: state (`objects`), and where the names and values are that a program reads."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.mentioned: set[str] = set()
        self.objects: list[object] = []
        self.cells: dict[int, tuple[str, CellType]] = {}
        self.globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.containers: list[tuple[str, Any]] = []
        self.holders: list[tuple[str, dict[str, Any]]] = []
        self._seen: dict[int, object] = {}

    def visit(self, value: Any, path: str, depth: int = 0) -> None:
        """Follow a value that has this name."""
        if isinstance(value, _ENDS) or id(value) in self._seen or depth > _DEPTH:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor | torch.optim.Optimizer):
            if not isinstance(value, Tensor) or isinstance(value, ShardedTensor):
                self.objects.append(value)
        elif isinstance(value, nn.Module):
            self._visit_module(value, depth)
        elif isinstance(value, FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, MethodType):
            self.visit(value.__self__, type(value.__self__).__name__, depth)
            self.visit(value.__func__, path, depth)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self.visit(part, path, depth)
        elif isinstance(value, CONTAINERS):
            self._visit_container(value, path, depth)
        elif hasattr(value, "__dict__") and _is_followed(type(value)):
            self._visit_object(value, path, depth)

    def _visit_module(self, module: nn.Module, depth: int) -> None:
        self.objects.append(module)
        for part in module.modules():
            self._seen[id(part)] = part
            kind = type(part)
            self._visit_methods(kind, {"forward"}, depth)
            for name, value in part.__dict__.items():
                if (name in self.names and name not in _MODULE_ATTRIBUTES) or name == "forward":
                    self.visit(value, f"{kind.__name__}.{name}", depth + 1)
            for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
                self.visit(hook, f"a hook of {kind.__name__}", depth + 1)

    def _visit_object(self, value: Any, path: str, depth: int) -> None:
        held = vars(value)
        self.holders.append((path, held))
        self._visit_methods(type(value), {"__call__"}, depth)
        for name in self.names & held.keys():
            self.visit(held[name], f"{path}.{name}", depth + 1)

    def _visit_methods(self, kind: type, names: set[str], depth: int) -> None:
        if id(kind) in self._seen or kind.__module__.startswith("torch."):
            return
        self._seen[id(kind)] = kind
        for name in names | self.names:
            found = getattr(kind, name, None)
            found = found.fget if isinstance(found, property) else found
            if isinstance(found, FunctionType):
                self.visit(found, name, depth + 1)

    def _visit_container(self, value: Any, path: str, depth: int) -> None:
        if len(value) > _LONGEST:
            return
        self.containers.append((path, value))
        for part in value.values() if isinstance(value, dict) else value:
            self.visit(part, f"an entry of {path}", depth + 1)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        code = function.__code__
        if code.co_filename.startswith(_PACKAGE):
            return
        own = not code.co_filename.startswith(_LIBRARIES)
        if not code.co_filename.startswith(_TORCH):
            self.mentioned |= _mentioned_names(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if own:
                self.cells[id(cell)] = name, cell
            try:
                self.visit(cell.cell_contents, name, depth + 1)
            except ValueError:  # not assigned yet
                continue
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(value, "a default value", depth + 1)
        if own:
            named = function.__globals__
            used = _used_globals(code)
            self.globals.setdefault(id(named), (named, set()))[1].update(used)
            for name in sorted(used & named.keys()):
                self.visit(named[name], name, depth + 1)


def find_reachable(target: Any, more: Iterable[object] = ()) -> Reachable:
    """Follow what a module, a function, a method or another object that can be called reaches."""
    owner = getattr(target, "__self__", None)
    direct = list(vars(owner).values()) if owner is not None and hasattr(owner, "__dict__") else []
    more, names = list(more), frozenset[str]()
    for _ in range(_ROUNDS):
        found = Reachable(names)
        for value in (target, inspect.unwrap(target)):
            found.visit(value, getattr(value, "__name__", type(value).__name__))
        for value in (*direct, *more):
            if isinstance(value, nn.Module | torch.optim.Optimizer | ShardedTensor):
                found.visit(value, type(value).__name__)
        if found.mentioned <= names:
            break
        names |= found.mentioned
    return found


def _is_followed(kind: type) -> bool:
    module = f"{kind.__module__}."
    return module.startswith(_FOLLOWED) or not module.startswith(("torch.", "shardwise.", "builtins."))


@lru_cache(maxsize=4096)
def _mentioned_names(code: CodeType) -> frozenset[str]:
    """The names of attributes and globals in some code."""
    return frozenset(name for part in _all_code(code) for name in part.co_names)


@lru_cache(maxsize=4096)
def _used_globals(code: CodeType) -> frozenset[str]:
    """The names of globals that some code reads or sets: not those of attributes, nor of what Python has built in."""
    found = (i for part in _all_code(code) for i in dis.get_instructions(part))
    names = {str(i.argval) for i in found if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")}
    return frozenset(names - vars(builtins).keys())


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_code(constant)


Container: TypeAlias = MutableMapping[Any, Any] | MutableSequence[Any]
NOT_AGAIN = "which a graph would not do again"
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

    def has_put(self, tensor: Tensor) -> bool:
        """Whether all places still hold a tensor."""
        return all(container[key] is tensor for container, key in self.places)


@dataclass(eq=False)
class ProgramState:
    """The modules and optimizers of a program, and their tensors, each once."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    reachable: Reachable
    sharded: list[ShardedTensor] = field(default_factory=list)
    plain: list[PlainSlot] = field(default_factory=list)

    @property
    def comm(self) -> Comm | None:
        """The comm of the state's tensors."""
        return self.sharded[0].comm if self.sharded else None

    def rated_groups(self) -> list[dict[str, Any]]:
        """The groups of optimizers whose learning rate, a number, can be an input of the graph."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups if takes_rate(optimizer)]
        return list(filter(has_number_rate, groups))

    def local_tensors(self) -> list[Tensor]:
        """This rank's tensors of the state, in one order."""
        found = [local for tensor in self.sharded for local in tensor.local_parts]
        return found + [slot.tensor for slot in self.plain]


def has_number_rate(group: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a group is a number; one that is a tensor is part of the state."""
    return isinstance(group.get("lr"), float | int)


def takes_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer computes with a learning rate that is a tensor, without reading its value."""
    return isinstance(optimizer, torch.optim.SGD) or all("capturable" in group for group in optimizer.param_groups)


def collect_state(target: Callable[..., Any], more: Sequence[object] = ()) -> ProgramState:
    """The state of a module or function; `more` are modules and optimizers that cannot be found in it."""
    reachable = find_reachable(target, more)
    roots = reachable.objects
    modules = list(dict.fromkeys(m for root in roots if isinstance(root, nn.Module) for m in root.modules()))
    optimizers = list(dict.fromkeys(root for root in roots if isinstance(root, torch.optim.Optimizer)))
    state = ProgramState(modules, optimizers, reachable)
    for container, key, tensor in (*_module_places(modules), *_optimizer_places(optimizers)):
        _add_tensor(state, container, key, tensor)
    for root in roots:
        if isinstance(root, ShardedTensor):
            _add_tensor(state, [], 0, root)
    return state


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
        put = [slot.places[0][0][slot.places[0][1]] for slot in state.plain]
        yield
        if not all(slot.has_put(tensor) for slot, tensor in zip(state.plain, put, strict=True)):
            raise NotTraceableError(f"it sets a plain parameter, buffer or state of an optimizer, {NOT_AGAIN}")
    finally:
        for tensor, (parts, comm, cached) in zip(state.sharded, before, strict=True):
            for name in CACHED:
                tensor.__dict__.pop(name, None)
            tensor.local_parts, tensor.comm = parts, comm
            tensor.__dict__.update(cached)
        for slot in state.plain:
            _replace_plain(state, slot, slot.places[0][0][slot.places[0][1]], slot.tensor)


@contextmanager
def computing_with_tensors(state: ProgramState, rates: Sequence[Tensor]) -> Iterator[None]:
    """Let optimizers compute with steps and learning rates that are tensors, as they do for CUDA graphs."""
    wanted: list[tuple[dict[str, Any], dict[str, Any]]] = []
    rate = iter(rates)
    for optimizer in filter(takes_rate, state.optimizers):
        for group in optimizer.param_groups:
            options: dict[str, Any] = (
                {"capturable": True} if "capturable" in group else {"foreach": True, "fused": None}
            )
            if has_number_rate(group):
                options["lr"] = next(rate)
            wanted.append((group, options))
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


def check_traceable(state: ProgramState, in_step: bool) -> None:
    """Raise if something about the state cannot be part of a graph."""
    for tensor in state.sharded:
        if not tensor.local_parts:
            raise NotTraceableError(f"rank {tensor.comm.rank} has no part of a tensor of the program: {tensor!r}")
    if in_step and any(t._backward_hooks or has_accumulate_hooks(t) for t in state.local_tensors()):
        raise NotTraceableError("parameters have hooks for their gradients, which a whole training step would not call")
