"""How do results reach standard output? As a table of text, or as one JSON document and nothing else.

Sizes and times are written for people. The progress of work on many bytes (share, rate, time left) goes to the error
stream, where that is a terminal.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from shardwise.geometry import LayoutError
from shardwise.view import Line, line

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


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` bytes is done; the function it yields is called for each part.

    >>> with byte_progress("reading", 100) as advance:
    ...     advance(60)
    """
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        show(done, total)

    with total_progress(title, total) as show:
        yield advance


@contextmanager
def total_progress(title: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show how much is done; the function it yields is called with the bytes done and the total bytes.

    >>> with total_progress("writing") as show:
    ...     show(60, 100)
    """
    if not sys.stderr.isatty() or total == 0:
        yield lambda done, total: None
        return
    from rich.console import Console  # a quarter of the start-up time, so only where there is a bar to show
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)
