"""How do results reach standard output? As a table of text, or as one JSON document and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from shardwise.view import Line, line

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def print_json(data: Any) -> None:
    """Print plain data as one JSON document.

    >>> print_json({"step": 3, "loss": float("nan")})
    {"step": 3, "loss": {"float": "nan"}}
    """
    print(json.dumps(_finite(data), allow_nan=False))


def _finite(data: Any) -> Any:
    """The same with floats that JSON has no way to write as in the index of a checkpoint."""
    if isinstance(data, float) and not math.isfinite(data):
        return {"float": str(data)}
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


def printable(text: str) -> str:
    """A text from a file, fit for a terminal: what could steer it is written as an escape.

    >>> print(printable("model.w"), printable("red\\x1b[31m"))
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
    texts = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    cells = [
        [f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in texts
    ]
    return [line("  ".join(row)) for row in cells]
