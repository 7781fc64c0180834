"""Put `shardwise.compat._shard` in the place of `torch.distributed._shard`, for code that imports torch's path.

1. `sys.modules` gets our modules under torch's names, so that later imports find them; torch's own are set aside.
2. Modules that imported torch's classes and functions before hold them under names of their own. Every attribute of a
   module of the chosen packages that *is* such an object is set to ours of the same name.
3. Every change is written down and undone by `uninstall()`. Modules that were first imported in between hold our
   objects: those are set to torch's then.

torch's package is looked up in `sys.modules`, never imported, except to restore it in modules of step 3.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, TracebackType
from typing import Any

TORCH = "torch.distributed._shard"
OURS = "shardwise.compat._shard"
PACKAGES = ("torch", "torchrec")
_ABSENT = object()


@dataclass(frozen=True)
class _Change:
    """One name that was replaced, and its previous value."""

    names: MutableMapping[str, Any]
    name: str
    before: object

    def undo(self) -> None:
        if self.before is _ABSENT:
            self.names.pop(self.name, None)
        else:
            self.names[self.name] = self.before


@dataclass(eq=False)
class _Patch:
    """All changes of one installation, and how many calls of `install()` are not yet at their end."""

    packages: tuple[str, ...]
    changes: list[_Change] = field(default_factory=list)
    holders: int = 0

    def set(self, names: MutableMapping[str, Any], name: str, value: object) -> None:
        self.changes.append(_Change(names, name, names.get(name, _ABSENT)))
        names[name] = value

    def remove(self, names: MutableMapping[str, Any], name: str) -> None:
        self.changes.append(_Change(names, name, names.pop(name, _ABSENT)))

    def undo(self) -> None:
        for change in reversed(self.changes):
            change.undo()
        self.changes.clear()


_lock = threading.RLock()
_installed: list[_Patch] = []


class Installation:
    """What `install()` returns: leave it alone, or use it in a `with` block that undoes it at the end.

    Where there are several, in threads or one inside another, the end of the last one undoes it.

    >>> from shardwise import compat
    >>> with compat.install():
    ...     from torch.distributed._shard.sharded_tensor import ShardedTensor
    >>> ShardedTensor.__module__.startswith("shardwise")
    True
    """

    def __init__(self, patch: _Patch) -> None:
        self._patch = patch

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with _lock:
            self._patch.holders -= 1
            if self._patch in _installed and not self._patch.holders:
                uninstall()


def install(packages: Sequence[str] = PACKAGES) -> Installation:
    """Let code that imports `torch.distributed._shard` get Shardwise: FSDP, torch.distributed.checkpoint, TorchRec.

    `packages` are those whose loaded modules are searched for names that were imported before. A second call changes
    nothing. Tensors made before stay what they are.

    >>> import importlib
    >>> with install():
    ...     importlib.import_module("torch.distributed._shard.sharded_tensor").ShardedTensor.__module__
    'shardwise.compat.sharded_tensor'
    """
    if isinstance(packages, str):
        raise TypeError(f"install takes a list of packages, got the string {packages!r}; pass [{packages!r}]")
    with _lock:
        if not _installed:
            _installed.append(_apply_patch(_Patch(tuple(packages))))
        _installed[0].holders += 1
        return Installation(_installed[0])


def _apply_patch(patch: _Patch) -> _Patch:
    mirrors = mirror_modules()
    torchs = {name: module for name, module in sys.modules.items() if _is_inside_package(name, TORCH)}
    swaps = {id(theirs): ours for theirs, ours in _pairs(torchs, mirrors)}
    for names, name, value in _attributes(patch.packages):
        if id(value) in swaps:
            patch.set(names, name, swaps[id(value)])
    for name in torchs:
        patch.remove(sys.modules, name)
    for name, module in mirrors.items():
        patch.set(sys.modules, name, module)
    parent, _, last = TORCH.rpartition(".")
    patch.set(vars(importlib.import_module(parent)), last, mirrors[TORCH])
    return patch


def uninstall() -> None:
    """Undo `install()`; without one, do nothing.

    >>> uninstall()
    """
    with _lock:
        if _installed:
            patch = _installed.pop()
            patch.undo()
            _restore_torch_names(patch.packages)


def mirror_modules() -> dict[str, ModuleType]:
    """Return our modules by the names of torch's modules that they replace."""
    root = importlib.import_module(OURS)
    return {TORCH: root, **{f"{TORCH}.{path}": module for path, module in root.MODULES.items()}}


def _pairs(torchs: Mapping[str, ModuleType], mirrors: Mapping[str, ModuleType]) -> Iterator[tuple[object, object]]:
    """Yield torch's modules, classes and functions, each with ours."""
    for name, module in torchs.items():
        if name in mirrors:
            yield module, mirrors[name]
            for attribute, ours in _public(mirrors[name]):
                theirs = vars(module).get(attribute)
                if isinstance(theirs, type | FunctionType) and _is_inside_package(theirs.__module__, TORCH):
                    yield theirs, ours


def _public(module: ModuleType) -> list[tuple[str, object]]:
    return [(name, getattr(module, name)) for name in module.__all__]


def _attributes(packages: Sequence[str]) -> list[tuple[dict[str, Any], str, object]]:
    """Return the attributes of all loaded modules of some packages, torch's own shard package left out."""
    modules = {
        id(module): module
        for name, module in list(sys.modules.items())
        if hasattr(module, "__dict__")
        and any(_is_inside_package(name, p) for p in packages)
        and not _is_inside_package(name, TORCH)
    }
    return [(vars(module), name, value) for module in modules.values() for name, value in list(vars(module).items())]


def _restore_torch_names(packages: Sequence[str]) -> None:
    """Set to torch's what modules that were imported in between hold of ours."""
    origins: dict[int, list[tuple[str, str | None]]] = {}
    for name, module in mirror_modules().items():
        origins.setdefault(id(module), []).append((name, None))
        for attribute, ours in _public(module):
            if isinstance(ours, type | FunctionType):
                origins.setdefault(id(ours), []).append((name, attribute))
    for names, name, value in _attributes(packages):
        if id(value) in origins:
            places = origins[id(value)]
            place, part = next((p for p in places if p[1] == name), places[0])
            theirs = importlib.import_module(place)
            names[name] = theirs if part is None else getattr(theirs, part)


def _is_inside_package(name: str | None, package: str) -> bool:
    return name is not None and (name == package or name.startswith(package + "."))
