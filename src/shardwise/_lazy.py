"""Names of a package that are imported on first use, listed once: in the package's stub, `__init__.pyi`.

Type checkers and editors read the stub; this module reads the same lines when the package is imported.

Pickles name the module of each class: `MOVED` has the modules that classes were in before, so that old pickles load.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise._version import SUPPORTED_TORCH

MOVED = {
    "shardwise.checkpoint.errors": "shardwise.checkpoint.files",
    "shardwise.geometry.dtypes": "shardwise.geometry.notation",
    "shardwise.geometry.errors": "shardwise.geometry.box",
    "shardwise.geometry.notation.read": "shardwise.geometry.notation",
    "shardwise.nn.balanced": "shardwise.nn.plan_costs",
    "shardwise.nn.model_plan": "shardwise.nn.plan",
    "shardwise.nn.patterns": "shardwise.nn.plan",
    "shardwise.nn.plan_table": "shardwise.nn.plan_costs",
}


class MovedModule(ModuleType):
    """The earlier name of a module; the names in it are looked up in the present one, which is loaded then.

    >>> import pickle
    >>> pickle.loads(b"cshardwise.geometry.errors\\nLayoutError\\n.")
    <class 'shardwise.geometry.box.LayoutError'>
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # tools that walk over all modules ask for files and paths
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(MOVED[self.__name__]), name)


def keep_moved_modules() -> None:
    """Let the earlier names of modules be imported; loads nothing."""
    for name in MOVED:
        sys.modules.setdefault(name, MovedModule(name))


def read_stub(stub: Path, package: str) -> dict[str, tuple[str, str | None]]:
    """Return the module of each name that a stub imports and the name there, in order; None for a module of its own."""
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    found: dict[str, tuple[str, str | None]] = {}
    for module, alias in ((str(node.module), alias) for node in imports for alias in node.names):
        inside = module == package
        found[alias.asname or alias.name] = (f"{package}.{alias.name}", None) if inside else (module, alias.name)
    return dict(sorted(found.items()))


def attach_stub(
    package: str, file: str, first: str = "", unless: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    The module `first` is imported before every name, except for names of the modules in `unless`.
    """
    origins = read_stub(Path(file).with_suffix(".pyi"), package)

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own = origins[name]
        before = [first] if first and module not in unless else []
        value = _import_name([*before, module], own, f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    # `from shardwise import *` must hide neither a module of the caller's, such as torch's nn, nor a built-in (open).
    names = [name for name, (_, own) in origins.items() if own is not None and not hasattr(builtins, name)]
    return load, lambda: list(origins), names


def _import_name(modules: Sequence[str], name: str | None, asked: str) -> Any:
    """Import modules, and return the last one or a name of it; an AttributeError inside is not hidden by `import`."""
    try:
        last = [import_module(module) for module in modules][-1]
        return last if name is None else getattr(last, name)
    except AttributeError as error:
        raise ImportError(
            f"{asked} cannot be loaded: {error}; shardwise supports {SUPPORTED_TORCH}", name=name
        ) from error
