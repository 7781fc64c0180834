"""`shardwise check-rule`: is the rule of an operator right?"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.samples import Sample, parse_samples
from shardwise.geometry import LayoutError, find_dtype

Operator = Annotated[
    str, typer.Argument(metavar="OPERATOR", help="package.module:op, or torch's own name: aten.mm.default.")
]
Samples = Annotated[str, typer.Option("--sample", help='Arguments to try: "f32[8,6], i64[5]<8, 1, keepdim=true".')]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Complete = Annotated[bool, typer.Option("--complete", help="Fail for missing strategies too.")]


def check_rule(op: Operator, sample: Samples, as_json: AsJson = False, complete: Complete = False) -> None:
    """Check the sharding rule of an operator against the operator itself, gradients included.

    Exit status 0: every strategy is right; 1: some are wrong; 2: the check could not be made.

    \b
    Example:
      shardwise check-rule aten.mm.default --sample "f32[8,6], f32[6,5]"
    """
    asked = parse_samples(sample)
    target = find_operator(op)
    from shardwise.ops.check import check_sharding  # loads torch

    try:
        checked = check_sharding(target, *map(_made, asked.args), **{k: _made(v) for k, v in asked.kwargs.items()})
    except ValueError as error:
        raise LayoutError(str(error)) from error
    print(json.dumps(to_json(checked)) if as_json else checked)
    if not checked.ok or (complete and checked.missing):
        raise typer.Exit(1)


def find_operator(name: str) -> Any:
    """The operator of a name: `package.module:attribute`, or one of torch's own."""
    module, colon, path = name.partition(":")
    if not colon:
        module, path = "torch", "ops." + name.removeprefix("torch.").removeprefix("ops.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module("shardwise.ops")
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise LayoutError(
            f"no operator {name!r}: {error}; write package.module:op, or torch's name as in aten.mm.default"
        ) from error
    finally:
        sys.path.pop(0)
    return found


def _made(value: Any) -> Any:
    """A sample as an argument: tensors are made, integers in them counted up to the limit."""
    if isinstance(value, list):
        return [_made(v) for v in value]
    if not isinstance(value, Sample):
        return value
    import torch

    dtype = getattr(torch, find_dtype(value.dtype).torch_name)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return torch.zeros(value.shape, dtype=dtype)
    numbers = torch.arange(torch.Size(value.shape).numel()) % (value.limit or 2)
    return numbers.reshape(value.shape).to(dtype)


def to_json(checked: Any) -> dict[str, Any]:
    """A check's result as plain data."""
    from shardwise.ops.auto_rule import brief

    wrong = [
        {"strategy": brief(w.strategy), "ranks": w.ranks, "cut": w.cut, "problem": w.problem, "error": w.error}
        for w in checked.wrong
    ]
    return {
        "operator": str(checked.op),
        "ok": checked.ok,
        "gradients": checked.gradients,
        "strategies": [brief(s) for s in checked.strategies],
        "wrong": wrong,
        "missing": [brief(s) for s in checked.missing],
    }
