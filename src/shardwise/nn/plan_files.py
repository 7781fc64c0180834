"""Plans in files: TOML or JSON, and YAML where PyYAML is installed.

mesh = "dp=2,tp=4"
input_plan = "dp: S(0)"

[lengths]
q = 4096

[parameters]
"blocks.*.attn.qkv.weight" = "tp: S(0) groups(q,1024,1024)"

Unknown fields, fields of another kind and keys that appear twice are errors that name the file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise._text import parse_json, parse_text, public, to_toml
from shardwise.geometry import LayoutError
from shardwise.geometry.state_map import TensorShape
from shardwise.nn.plan import ModelPlan, PlanError, read_mesh

try:
    import yaml  # type: ignore[import-untyped,unused-ignore]  # stubs are a package of their own
except ImportError:
    _yaml: ModuleType | None = None
else:
    _yaml = yaml

FIELDS: dict[str, tuple[type, ...]] = {
    "mesh": (str,),
    "axis": (str,),
    "input_plan": (str, dict),
    "output_plan": (str,),
    "reshard_after_forward": (bool, list),
    "prefetch_bytes": (int,),
    "recompute": (bool, list),
    "gather_dtype": (str, dict),
    "lengths": (dict,),
    "pad_inputs": (dict,),
    "activations": (str, dict),
    "stages": (str, int, dict),
    "attention": (str,),
    "parameters": (dict,),
    "shapes": (dict,),
}


OPTIONAL = tuple(name for name in FIELDS if name not in ("mesh", "parameters", "shapes"))
_RANGE = re.compile(r"\{(\d+)-(\d+)\}")
_TYPE = re.compile(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*")
_MOST_SHAPES = 1_000_000


@public
def plan_to_data(plan: ModelPlan) -> dict[str, Any]:
    """A plan as plain data.

    >>> from shardwise.geometry import Mesh
    >>> plan_to_data(ModelPlan(Mesh.of(tp=4), {"up.weight": "S(0)"}))
    {'mesh': 'tp=4', 'parameters': {'up.weight': 'S(0)'}}
    """
    return plan.to_data()


@public
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
    for part, kind in (("parameters", str), ("lengths", int), ("shapes", str)):
        for name, value in data.get(part, {}).items():
            if not isinstance(name, str):
                raise PlanError(f"{source}: {part} needs strings as names, got {name!r}; put it in quotes")
            if not isinstance(value, kind):
                raise PlanError(f"{source}: {part} {name!r} is a {kind.__name__}, got {type(value).__name__}")


@public
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
    kind = plan_file_kind(path)
    if kind == "json":
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    elif kind == "toml":
        path.write_text(to_toml(data), encoding="utf-8")
    else:
        path.write_text(_import_yaml(path).safe_dump(data, sort_keys=False), encoding="utf-8")


@public
def load_plan(path: str | os.PathLike[str]) -> ModelPlan:
    """Read a plan from a .toml, .json or .yaml file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "plan.toml"
    >>> _ = path.write_text('mesh = "dp=2,tp=4"\\n[parameters]\\n"up.weight" = "tp: S(0)"\\n')
    >>> load_plan(path).mesh
    Mesh(dp=2,tp=4)
    """
    return plan_from_data(_read_data(Path(path)), Path(path).name)


def read_shapes(path: str | os.PathLike[str]) -> dict[str, TensorShape] | None:
    """The tensors that a plan's file lists as `shapes`, for estimates without a model; None if it lists none.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "plan.toml"
    >>> _ = path.write_text('mesh = "tp=4"\\n[parameters]\\n[shapes]\\n"layers.{0-1}.up" = "bf16[8,4]"\\n')
    >>> print(read_shapes(path))
    {'layers.0.up': TensorShape(shape=(8, 4), dtype='bf16'), 'layers.1.up': TensorShape(shape=(8, 4), dtype='bf16')}
    """
    path = Path(path)
    data = _read_data(path)
    plan_from_data(data, path.name)
    found: dict[str, TensorShape] = {}
    for pattern, text in data.get("shapes", {}).items():
        matched = _TYPE.fullmatch(text)
        if matched is None:
            raise PlanError(f"{path.name}: shapes {pattern!r} is a type and a shape, as in bf16[8,4]; got {text!r}")
        sizes = [int(size) for size in matched[2].split(",") if size.strip()]
        try:
            kind = TensorShape.of(sizes, matched[1])
        except LayoutError as error:
            raise PlanError(f"{path.name}: shapes {pattern!r}: {error}") from error
        for name in _expand_ranges(pattern):
            found[name] = kind
            if len(found) > _MOST_SHAPES:
                raise PlanError(f"{path.name}: shapes lists more than {_MOST_SHAPES:,} tensors")
    return found or None


def _expand_ranges(pattern: str) -> Iterator[str]:
    """A name for each number of each range such as {0-31}."""
    matched = _RANGE.search(pattern)
    if matched is None:
        yield pattern
        return
    for number in range(int(matched[1]), int(matched[2]) + 1):
        yield from _expand_ranges(f"{pattern[: matched.start()]}{number}{pattern[matched.end() :]}")


def _read_data(path: Path) -> dict[str, Any]:
    kind = plan_file_kind(path)
    try:
        text = path.read_text(encoding="utf-8")
        if kind == "yaml":
            data = _parse_yaml(path, text)
        else:
            data = parse_json(text, unique_keys=True) if kind == "json" else parse_text(tomllib.loads, text)
    except ValueError as error:
        raise PlanError(f"{path.name} is not valid {kind.upper()}: {error}") from None
    if not isinstance(data, dict):
        raise PlanError(f"{path.name}: a plan is a table with the fields {', '.join(FIELDS)}")
    return data


def plan_file_kind(path: Path) -> str:
    """What a plan's file has, by its name: toml, json or yaml.

    >>> plan_file_kind(Path("plan.yml"))
    'yaml'
    """
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
        _check_yaml_keys(parse_text(lambda given: module.compose(given, Loader=module.SafeLoader), text))
        return parse_text(module.safe_load, text)
    except module.YAMLError as error:
        raise ValueError(str(error)) from None


def _check_yaml_keys(root: Any) -> None:
    """Raise for a key that a mapping has twice, of which YAML's own reader takes the last."""
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        pairs = [pair for pair in node.value if isinstance(pair, tuple)]
        keys = [(key.tag, key.value) for key, _ in pairs if isinstance(key.value, str)]
        if len(set(keys)) < len(keys):
            raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[1][:100]!r} appears twice")
        todo += [part for pair in pairs for part in pair] if pairs else node.value
