"""Plans in files: TOML or JSON, and YAML where PyYAML is installed.

mesh = "dp=2,tp=4"
input_plan = "dp: S(0)"

[lengths]
q = 4096

[parameters]
"blocks.*.attn.qkv.weight" = "tp: S(0) groups(q,1024,1024)"
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.nn.model_plan import ModelPlan, to_toml
from shardwise.nn.patterns import PlanError, read_mesh

try:
    import yaml  # type: ignore[import-untyped,unused-ignore]  # stubs are a package of their own
except ImportError:
    _yaml: ModuleType | None = None
else:
    _yaml = yaml

FIELDS: dict[str, tuple[type, ...]] = {
    "mesh": (str,),
    "axis": (str,),
    "input_plan": (str,),
    "output_plan": (str,),
    "reshard_after_forward": (bool, list),
    "prefetch_bytes": (int,),
    "gather_dtype": (str, dict),
    "lengths": (dict,),
    "parameters": (dict,),
}


OPTIONAL = tuple(name for name in FIELDS if name not in ("mesh", "parameters"))


def plan_to_data(plan: ModelPlan) -> dict[str, Any]:
    """A plan as plain data.

    >>> from shardwise.geometry import Mesh
    >>> plan_to_data(ModelPlan(Mesh.of(tp=4), {"up.weight": "S(0)"}))
    {'mesh': 'tp=4', 'parameters': {'up.weight': 'S(0)'}}
    """
    return plan.to_data()


def plan_from_data(data: Mapping[str, Any], source: str = "the plan") -> ModelPlan:
    """A plan from plain data; unknown and misshapen fields are errors.

    >>> plan_from_data({"mesh": "tp=4", "parameters": {"up.weight": "S(0)"}}).mesh
    Mesh(tp=4)
    """
    unknown = sorted(set(data) - set(FIELDS))
    if unknown:
        raise PlanError(f"{source}: no field {unknown[0]!r}; a plan has {', '.join(FIELDS)}")
    for name, kinds in FIELDS.items():
        if name in data and not isinstance(data[name], kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise PlanError(f"{source}: {name} is a {wanted}, got {type(data[name]).__name__}")
    if "mesh" not in data or "parameters" not in data:
        raise PlanError(f"{source}: a plan has at least mesh and parameters, got {', '.join(data) or 'nothing'}")
    _check_values(data, source)
    rest = {name: data[name] for name in OPTIONAL if name in data}
    return ModelPlan(read_mesh(data["mesh"]), data["parameters"], **rest)


def _check_values(data: Mapping[str, Any], source: str) -> None:
    for field, kind in (("parameters", str), ("lengths", int)):
        for name, value in data.get(field, {}).items():
            if not isinstance(name, str):
                raise PlanError(f"{source}: {field} needs strings as names, got {name!r}; put it in quotes")
            if not isinstance(value, kind):
                raise PlanError(f"{source}: {field} {name!r} is a {kind.__name__}, got {type(value).__name__}")


def save_plan(plan: ModelPlan, path: str | Path) -> None:
    """Write a plan to a .toml, .json or .yaml file.

    >>> import tempfile
    >>> from shardwise.geometry import Mesh
    >>> path = f"{tempfile.mkdtemp()}/plan.toml"
    >>> save_plan(ModelPlan(Mesh.of(tp=4), {"up.weight": "S(0)"}), path)
    >>> print(Path(path).read_text().strip())
    mesh = "tp=4"
    <BLANKLINE>
    [parameters]
    "up.weight" = "S(0)"
    """
    path, data = Path(path), plan_to_data(plan)
    kind = _plan_file_kind(path)
    if kind == "json":
        path.write_text(json.dumps(data, indent=2) + "\n")
    elif kind == "toml":
        path.write_text(to_toml(data))
    else:
        path.write_text(_import_yaml(path).safe_dump(data, sort_keys=False))


def load_plan(path: str | os.PathLike[str]) -> ModelPlan:
    """Read a plan from a .toml, .json or .yaml file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "plan.toml"
    >>> _ = path.write_text('mesh = "dp=2,tp=4"\\n[parameters]\\n"up.weight" = "tp: S(0)"\\n')
    >>> load_plan(path).mesh
    Mesh(dp=2,tp=4)
    """
    path = Path(path)
    kind, text = _plan_file_kind(path), path.read_text()
    try:
        data = _parse_yaml(path, text) if kind == "yaml" else (json if kind == "json" else tomllib).loads(text)
    except ValueError as error:
        raise PlanError(f"{path.name} is not valid {kind.upper()}: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path.name}: a plan is a table with the fields {', '.join(FIELDS)}")
    return plan_from_data(data, path.name)


def _plan_file_kind(path: Path) -> str:
    kind = {".toml": "toml", ".json": "json", ".yaml": "yaml", ".yml": "yaml"}.get(path.suffix.lower())
    if kind is None:
        raise PlanError(f"{path.name}: a plan's file ends in .toml, .json or .yaml")
    return kind


def _import_yaml(path: Path) -> Any:
    if _yaml is None:
        raise PlanError(
            f"{path.name}: YAML needs the package PyYAML, which is not installed; install shardwise[yaml], or use .toml"
        )
    return _yaml


def _parse_yaml(path: Path, text: str) -> Any:
    module = _import_yaml(path)
    try:
        return module.safe_load(text)
    except module.YAMLError as error:
        raise ValueError(str(error)) from error
