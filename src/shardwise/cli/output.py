"""How do results reach standard output? As a table of text, or as one JSON document and nothing else.

Sizes and times are written for people. Options that several commands take are here, too.
Bars of progress are those of `shardwise._progress`.

How does a command end? With an exit status; an error is one red line, without a traceback.

0: done, or yes. 1: the answer is no (different, broken, wrong). 2: the request is invalid or cannot be read.
130: interrupted. 141: the reader of the output went away.

With `--json` an error is the one JSON document on standard output. `cli/main.py` ends commands this way.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.checkpoint.files import CheckpointError
from shardwise.geometry import LayoutError, NotationError
from shardwise.view import Line, line, replace_unencodable, wants_colour

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LONGEST_TITLE = 300


def parse_bytes(text: str) -> int:
    """A number of bytes from a text with a unit.

    >>> parse_bytes("64MB"), parse_bytes("1.5 GiB"), parse_bytes("100")
    (64000000, 1610612736, 100)
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", text)
    factor = {**UNITS, **BINARY_UNITS}.get(match[2].upper()) if match else None
    count = int(float(match[1]) * factor) if match and factor else 0
    if count < 1:
        raise LayoutError(f"{text!r} is not a number of bytes; write for example 64MB, 1.5GiB or 4096")
    return count


def format_seconds(seconds: float) -> str:
    """A time with a fitting unit.

    >>> format_seconds(0), format_seconds(1.25e-5), format_seconds(0.5), format_seconds(90)
    ('0 us', '12.5 us', '500.0 ms', '90.0 s')
    """
    if seconds == 0:
        return "0 us"
    unit, factor = next(((u, f) for u, f in (("us", 1e6), ("ms", 1e3)) if seconds * f < 1000), ("s", 1.0))
    return f"{seconds * factor:.1f} {unit}"


def format_count(count: int, what: str) -> str:
    """A number of things.

    >>> format_count(1, "rank"), format_count(2, "file")
    ('1 rank', '2 files')
    """
    return f"{count} {what}{'s' * (count != 1)}"


def terminal_width() -> int:
    """The width to draw in: the terminal's (or that of COLUMNS), within reason."""
    return min(160, max(40, shutil.get_terminal_size().columns))


def shorten_title(text: str) -> str:
    """A title that stays readable: a layout of a thousand pieces is cut off."""
    return text if len(text) <= LONGEST_TITLE else f"{text[:LONGEST_TITLE]}…"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan: .toml, .json or .yaml.")]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Sequences that each rank passes to the model.")]
SequenceLength = Annotated[int, typer.Option(min=1, metavar="N", help="Length of a sequence.")]
Optimizer = Annotated[str, typer.Option(metavar="NAME", help="adamw, adamw-fp32, adamw8bit, sgd, momentum and others")]
DtypeText = Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="Of the parameters, such as bf16.")]
DeviceName = Annotated[str, typer.Option("--device", metavar="NAME", help="h100, h200, a100, b200 or mi300x.")]


def print_json(data: Any) -> None:
    """Print plain data as one JSON document.

    >>> print_json({"step": 3, "loss": float("nan")})
    {"step": 3, "loss": {"float": "nan"}}
    """
    print(json.dumps(_replace_nonfinite(data), allow_nan=False))


def _replace_nonfinite(data: Any) -> Any:
    """The same, with floats that JSON cannot express written as in the index of a checkpoint."""
    if isinstance(data, float) and not math.isfinite(data):
        return {"float": str(data)}
    if isinstance(data, dict):
        return {key: _replace_nonfinite(value) for key, value in data.items()}
    return [_replace_nonfinite(value) for value in data] if isinstance(data, list | tuple) else data


def escape_for_terminal(text: str) -> str:
    """A text from a file, fit for a terminal: what could steer it is written as an escape.

    >>> print(escape_for_terminal("model.w"), escape_for_terminal("red\\x1b[31m"))
    model.w red\\x1b[31m
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[Line]:
    """A table whose first `left` columns are aligned to the left and the others to the right.

    >>> from shardwise.view import plain_text
    >>> print(plain_text(table_lines(("name", "bytes"), [("w", "96 B"), ("norm.b", "8 B")])))
    name    bytes
    w        96 B
    norm.b    8 B
    """
    texts = [[escape_for_terminal(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    cells = [
        [f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in texts
    ]
    return [line("  ".join(row)) for row in cells]


BEFORE, AROUND = 50, 76
NO, UNUSABLE, INTERRUPTED, NO_READER = 1, 2, 130, 141
REPORTED = (LayoutError, CheckpointError, OSError)  # in one line, without a traceback


def discard_output() -> None:
    """Let what is still to be written go nowhere, or Python complains when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def message_of(error: Exception) -> str:
    """The message to print; an error of the system without its number.

    >>> message_of(PermissionError(13, "Permission denied", "runs/ckpt"))
    'runs/ckpt: Permission denied'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def report_error(error: Exception, as_json: bool) -> None:
    """Print what went wrong: one line on the error stream, or one JSON document on standard output."""
    if as_json:
        try:
            print_json({"error": error_to_json(error)})
            sys.stdout.flush()
            return
        except OSError:  # a full disk: there is no place for the document
            discard_output()
    print_error(error)


def error_to_json(error: Exception) -> dict[str, Any]:
    """An error as plain data.

    >>> error_to_json(LayoutError("a host has at least one rank"))
    {'message': 'a host has at least one rank', 'status': 2}
    """
    message = message_of(error)
    if not isinstance(error, NotationError):
        return {"message": message, "status": UNUSABLE}
    first = message.partition("\n")[0]
    return {"message": first, "status": UNUSABLE, "text": error.text, "position": error.position}


def print_error(error: Exception) -> None:
    """Print what went wrong to the error stream; a mistake in the notation is pointed at."""
    first, *rest = (escape_for_terminal(text) for text in message_of(error).split("\n"))
    if isinstance(error, NotationError):
        rest = pointer_lines(error.text, error.position)
    red, normal = ("\x1b[31m", "\x1b[0m") if wants_colour(sys.stderr) else ("", "")
    text = "\n".join([f"{red}error: {first}{normal}", *rest])
    print(replace_unencodable(text, sys.stderr.encoding), file=sys.stderr)


def pointer_lines(text: str, position: int) -> list[str]:
    """The part of a text around a position, and a mark below it.

    >>> print(*pointer_lines("f32[8 on tp=4", 6), sep="\\n")
      f32[8 on tp=4
            ^
    """
    text, position = escape_for_terminal(text), len(escape_for_terminal(text[:position]))
    start = max(0, position - BEFORE) if len(text) > AROUND else 0
    shown = ("…" if start else "") + text[start : start + AROUND]
    shown += "…" if start + AROUND < len(text) else ""
    return [f"  {shown}", " " * (2 + position - start + (start > 0)) + "^"]
