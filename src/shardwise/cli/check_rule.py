"""`shardwise check-rule`: is the rule of an operator right?"""

from __future__ import annotations

import importlib
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.errors import NO
from shardwise.cli.output import AsJson, print_json
from shardwise.cli.samples import Sample, Samples, parse_samples
from shardwise.geometry import LayoutError, find_dtype

Operator = Annotated[
    str, typer.Argument(metavar="OPERATOR", help="package.module:op, or torch's own name: aten.mm.default.")
]
SampleText = Annotated[str, typer.Option("--sample", help='Arguments to try: "f32[8,6], i64[5]<8, 1, keepdim=true".')]
Complete = Annotated[bool, typer.Option("--complete", help="Fail for missing strategies too.")]


def check_rule(op: Operator, sample: SampleText, as_json: AsJson = False, complete: Complete = False) -> None:
    """Check the sharding rule of an operator against the operator itself, gradients included.

    Exit status 0: every strategy is right; 1: some are wrong; 2: the check could not be made.

    \b
    Example:
      shardwise check-rule aten.mm.default --sample "f32[8,6], f32[6,5]"
    """
    asked = parse_samples(sample)
    with redirect_stdout(sys.stderr):  # a module of the user's may print while it is loaded
        checked = checked_rule(find_operator(op), asked)
    if as_json:
        print_json(to_json(checked))
    else:
        print(checked)
    if not checked.ok or (complete and checked.missing):
        raise typer.Exit(NO)


def checked_rule(target: Any, asked: Samples) -> Any:
    """The result of trying the rule of an operator on sample arguments."""
    from shardwise.ops.check import check_sharding  # loads torch

    try:
        return check_sharding(target, *map(_made, asked.args), **{k: _made(v) for k, v in asked.kwargs.items()})
    except ValueError as error:
        raise LayoutError(str(error)) from error


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
