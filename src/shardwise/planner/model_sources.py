"""Where does a model come from? A function that makes it, or a `config.json` of Hugging Face; on the meta device."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.nn.plan import PlanError
from shardwise.planner.rehearsal import Inputs


class ModelSource(NamedTuple):
    """A model on the meta device, and the arguments of its forward pass if the factory returned them."""

    model: nn.Module
    inputs: Inputs | None = None


def load_model(source: str) -> ModelSource:
    """The model of a factory `package.module:function`, or of a `config.json` (or the folder that it is in).

    A factory is called on the meta device and returns a module, or a module and the arguments of a forward pass.

    >>> load_model("torch.nn:Identity").model
    Identity()
    """
    path = Path(source)
    if path.suffix == ".json" or path.is_dir():
        return ModelSource(load_config_model(path / "config.json" if path.is_dir() else path))
    module, colon, name = source.partition(":")
    if not colon or not module or not name:
        raise PlanError(
            f"{source!r} is neither a factory such as package.module:function nor a config.json; a factory is called "
            "without arguments and returns a module"
        )
    return _call_factory(source, _find_factory(module, name))


def _find_factory(module: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise PlanError(f"the module {module} of the factory {module}:{name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # of any kind: it is code of the user's
        raise PlanError(
            f"the module {module} of the factory {module}:{name} raises {type(error).__name__} when imported: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise PlanError(f"the module {module} has no {name}; a factory is a function without arguments")
        found = getattr(found, part)
    return found


def _call_factory(source: str, factory: Any) -> ModelSource:
    try:
        with torch.device("meta"):
            made = factory()
    except (Exception, SystemExit) as error:  # of any kind: it is code of the user's
        raise PlanError(
            f"{source} raised {type(error).__name__}: {error}; a factory is called without arguments, on the meta "
            "device, where tensors have no values"
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"{source} returned {type(model).__name__}; a factory returns a module, or a module and the arguments of a "
            "forward pass"
        )
    if inputs is not None and not isinstance(inputs, tuple | dict):
        inputs = (inputs,)
    return ModelSource(model, inputs)


def load_config_model(path: Path) -> nn.Module:
    """The model that a `config.json` of Hugging Face describes, by its `architectures`; no code of its folder."""
    data, transformers = _read_config(path), _import_transformers(path)
    fields = {name: value for name, value in data.items() if name != "auto_map"}
    try:
        kinds = [getattr(transformers, str(name), None) for name in data.get("architectures") or ()]
        config = transformers.AutoConfig.for_model(**fields)
        with torch.device("meta"):
            kind = next((found for found in kinds if found is not None), None)
            make = transformers.AutoModelForCausalLM.from_config if kind is None else kind
            made: nn.Module = make(config)
    except Exception as error:  # of any kind: the file may have anything in it
        raise PlanError(f"{path}: transformers cannot make a model of it: {_describe_cause(error)}") from error
    return made


def _describe_cause(error: BaseException) -> str:
    """What an error was raised for first: a failed import hides that behind errors of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise PlanError(f"{path} is not a config of a model: it has no model_type")
    return data


def _import_transformers(path: Path) -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise PlanError(
            f"{path}: a config.json is read by the package transformers, which is not installed; install "
            "shardwise[hf], or pass a factory such as package.module:function"
        ) from error
