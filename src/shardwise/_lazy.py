"""Names of a package that are imported on first use, listed once: in the package's stub, `__init__.pyi`.

Type checkers and editors read the stub; this module reads the same lines when the package is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise._version import SUPPORTED_TORCH


def read_stub(stub: Path) -> dict[str, str]:
    """Return the module of each name that a stub imports, in the order of the names."""
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    found = {alias.name: str(node.module) for node in imports for alias in node.names}
    return dict(sorted(found.items()))


def attach_stub(
    package: str, file: str, first: str = "", unless: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    The module `first` is imported before every name, except for names of the modules in `unless`.
    """
    module_of = read_stub(Path(file).with_suffix(".pyi"))

    def load(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        before = [first] if first and module not in unless else []
        value = _import_name([*before, module], name, package)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: list(module_of), list(module_of)


def _import_name(modules: Sequence[str], name: str, package: str) -> Any:
    """Import modules, and return a name of the last one; an AttributeError inside them is not hidden by `import`."""
    try:
        return getattr([import_module(module) for module in modules][-1], name)
    except AttributeError as error:
        raise ImportError(
            f"{package}.{name} cannot be loaded: {error}; shardwise supports {SUPPORTED_TORCH}", name=name
        ) from error
