"""What can a program reach by name? Modules, optimizers and tensors, and the numbers and containers that it reads.

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
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

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
