"""`shardwise check-rule`: is the rule of an operator correct?

Sample arguments of an operator are written on one line:

f32[8,6]          a tensor
i64[5]<8          a tensor of integers from 0 to 7
1  0.5  true  none  "mean"
[1, 2]  [f32[4], f32[4]]
keepdim=true      a keyword argument
"""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.output import NO, AsJson, print_json
from shardwise.geometry import LayoutError, find_dtype
from shardwise.geometry.notation import Scanner

WORDS = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
NUMBER = re.compile(r"[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d+)")
TEXT = re.compile(r"'([^']*)'|\"([^\"]*)\"")


@dataclass(frozen=True, slots=True)
class Sample:
    """A tensor to be made: its dtype, its shape, and for integers where they end."""

    dtype: str
    shape: tuple[int, ...]
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """The arguments of a call, by position and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def parse_samples(text: str) -> Samples:
    """Read sample arguments.

    >>> parse_samples("f32[8,6], 1, keepdim=true")
    Samples(args=(Sample(dtype='f32', shape=(8, 6), limit=None), 1), kwargs={'keepdim': True})
    """
    scanner = Scanner(text)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    while scanner.rest:
        name = _parse_argument_name(scanner)
        if name is not None:
            kwargs[name] = _parse_value(scanner)
        elif kwargs:
            scanner.fail("an argument without a name after one with a name")
        else:
            args.append(_parse_value(scanner))
        if scanner.rest:
            scanner.expect(",", "between arguments")
    return Samples(tuple(args), kwargs)


def _parse_argument_name(scanner: Scanner) -> str | None:
    """The name of a keyword argument, read with its sign; None if there is none."""
    word = scanner.peek_word()
    if not word or not scanner.rest[len(word) :].lstrip().startswith("="):
        return None
    scanner.take(word)
    scanner.take("=")
    return word


def _parse_value(scanner: Scanner) -> Any:
    if scanner.take("["):
        return scanner.items(lambda: _parse_value(scanner), "]", "in a list")
    for pattern in (NUMBER, TEXT):
        found = pattern.match(scanner.rest)
        if found is not None:
            scanner.take(found.group())
            return _parse_number(found.group()) if pattern is NUMBER else found.group(1) or found.group(2) or ""
    word = scanner.peek_word()
    if word in WORDS and scanner.take(word):
        return WORDS[word]
    return _parse_tensor_sample(scanner)


def _parse_number(text: str) -> int | float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _parse_tensor_sample(scanner: Scanner) -> Sample:
    at = scanner.at
    dtype = scanner.word()
    with scanner.errors_at(at):
        find_dtype(dtype)
    scanner.expect("[", f"after {dtype}, as in {dtype}[8,6]")
    shape = scanner.items(lambda: scanner.integer("the length of a dim"), "]", "in a shape")
    limit = scanner.integer("where the integers end") if scanner.take("<") else None
    return Sample(dtype, tuple(shape), limit)


Operator = Annotated[
    str, typer.Argument(metavar="OPERATOR", help="package.module:op, or torch's own name: aten.mm.default.")
]
SampleText = Annotated[str, typer.Option("--sample", help='Arguments to try: "f32[8,6], i64[5]<8, 1, keepdim=true".')]
Complete = Annotated[bool, typer.Option("--complete", help="Fail for missing strategies too.")]


def check_rule(op: Operator, sample: SampleText, as_json: AsJson = False, complete: Complete = False) -> None:
    """Check the sharding rule of an operator against the operator itself, gradients included.

    Exit status 0: every strategy is correct; 1: some are wrong; 2: the check could not run.

    \b
    Example:
      shardwise check-rule aten.mm.default --sample "f32[8,6], f32[6,5]"
    """
    asked = parse_samples(sample)
    with redirect_stdout(sys.stderr):  # a module of the user's may print while it is loaded
        checked = run_rule_check(find_operator(op), asked)
    if as_json:
        print_json(rule_check_to_json(checked))
    else:
        print(checked)
    if not checked.ok or (complete and checked.missing):
        raise typer.Exit(NO)


def run_rule_check(target: Any, asked: Samples) -> Any:
    """The result of trying the rule of an operator on sample arguments."""
    from shardwise.ops.check_rule import check_sharding  # loads torch

    try:
        return check_sharding(
            target, *map(_make_argument, asked.args), **{k: _make_argument(v) for k, v in asked.kwargs.items()}
        )
    except (ValueError, TypeError, RuntimeError) as error:  # no operator; or samples that do not fit in memory
        raise LayoutError(str(error).partition("\n")[0]) from error


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


def _make_argument(value: Any) -> Any:
    """A sample as an argument: tensors are made, integers in them counted up to the limit."""
    if isinstance(value, list):
        return [_make_argument(v) for v in value]
    if not isinstance(value, Sample):
        return value
    import torch

    dtype = getattr(torch, find_dtype(value.dtype).torch_name)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return torch.zeros(value.shape, dtype=dtype, device="cpu")
    numbers = torch.arange(torch.Size(value.shape).numel(), device="cpu") % (value.limit or 2)
    return numbers.reshape(value.shape).to(dtype)


def rule_check_to_json(checked: Any) -> dict[str, Any]:
    """A check's result as plain data."""
    from shardwise.ops.registration import format_strategy

    wrong = [
        {
            "strategy": format_strategy(w.strategy),
            "ranks": w.ranks,
            "cut": w.cut,
            "problem": w.problem,
            "error": w.error,
        }
        for w in checked.wrong
    ]
    return {
        "operator": str(checked.op),
        "ok": checked.ok,
        "gradients": checked.gradients,
        "strategies": [format_strategy(s) for s in checked.strategies],
        "wrong": wrong,
        "missing": [format_strategy(s) for s in checked.missing],
    }
