"""Does every public name show how it is used? The API reference is made of docstrings; doctests run them."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise._lazy import read_stub

ROOT = Path(shardwise.__file__).parent
SHOWN = ["nn", "checkpoint", "compat", "testing", "planner", "sync"]
PACKAGES = [*SHOWN, "ops", "comm", "compiler"]
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def public_names(package: str) -> dict[str, Any]:
    """The public names of a package: those that it lists, and what a star import leaves out, as `open`."""
    module = import_module(package)
    listed = vars(module)["__dir__"]() if "__dir__" in vars(module) else module.__all__
    return {name: getattr(module, name) for name in listed}


def has_example(value: object) -> bool:
    return ">>> " in (inspect.getdoc(value) or "")


@pytest.mark.parametrize("package", ["shardwise", *(f"shardwise.{name}" for name in PACKAGES)])
def test_every_public_name_has_an_example(package: str) -> None:
    documented = {n: v for n, v in public_names(package).items() if inspect.isclass(v) or inspect.isroutine(v)}
    assert len(documented) > 1
    assert [name for name, value in documented.items() if not has_example(value)] == []


def test_every_method_of_a_sharded_tensor_has_an_example() -> None:
    """Its own, and those that torch's tensors lack; the others do what torch says. Slots are shown by the class."""
    tensor = shardwise.ShardedTensor
    ours = [c for c in tensor.__mro__ if c.__module__.startswith("shardwise")]
    own = {n: v for c in reversed(ours) for n, v in vars(c).items() if c is tensor or not hasattr(torch.Tensor, n)}
    shown = {n: v for n, v in own.items() if not n.startswith("_") and n not in tensor.__slots__}
    assert len(shown) > 20
    assert [n for n, value in shown.items() if not has_example(value)] == []


def test_names_that_need_transformers_have_an_example() -> None:
    for name, (module, own) in read_stub(ROOT / "hf" / "__init__.pyi", "shardwise.hf").items():
        tree = ast.parse((ROOT / "hf" / f"{module.rpartition('.')[2]}.py").read_text())
        (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == own]
        assert ">>> " in (ast.get_docstring(found) or ""), name


def test_a_name_without_an_example_is_noticed() -> None:
    def plain() -> None:
        """Do nothing."""

    def shown() -> None:
        """Do nothing.

        >>> shown()
        """

    assert (has_example(plain), has_example(shown)) == (False, True)


def reference_names() -> set[str]:
    """The names that the reference shows, with the module that each page says it is in."""
    found = set()
    for page in sorted(REFERENCE.glob("*.rst")):
        module = ""
        for row in page.read_text().splitlines():
            kind, _, rest = row.partition(":: ")
            module = rest if kind == ".. currentmodule" else module
            if kind.startswith(".. auto"):
                found.add(f"{module}.{rest}")
    return found


@pytest.mark.parametrize("package", ["shardwise", *(f"shardwise.{name}" for name in SHOWN)])
def test_every_public_name_is_in_the_reference(package: str) -> None:
    shown = reference_names()
    at_the_top = set(map(id, public_names("shardwise").values()))
    for name, value in public_names(package).items():
        if inspect.isclass(value) or inspect.isroutine(value):
            elsewhere = package != "shardwise" and id(value) in at_the_top
            assert elsewhere or f"{package}.{name}" in shown, f"docs/reference does not show {package}.{name}"
