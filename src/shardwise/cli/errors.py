"""How do errors reach the user of a command? As one red line and exit status 2, without a traceback."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from shardwise.geometry import LayoutError, NotationError
from shardwise.view.lines import fitting, wants_colour

BEFORE, AROUND = 50, 76


class Commands(TyperGroup):
    """The group of all commands; it turns the library's errors into messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LayoutError as error:
            print_error(error)
            raise typer.Exit(2) from error


def print_error(error: LayoutError) -> None:
    """Print what went wrong to the error stream; a mistake in the notation is pointed at."""
    first, *rest = str(error).split("\n")
    if isinstance(error, NotationError):
        rest = pointer_lines(error.text, error.position)
    red, normal = ("\x1b[31m", "\x1b[0m") if wants_colour(sys.stderr) else ("", "")
    text = "\n".join([f"{red}error: {first}{normal}", *rest])
    print(fitting(text, sys.stderr.encoding), file=sys.stderr)


def pointer_lines(text: str, position: int) -> list[str]:
    """The part of a text around a position, and a mark below it.

    >>> print(*pointer_lines("f32[8 on tp=4", 6), sep="\\n")
      f32[8 on tp=4
            ^
    """
    start = max(0, position - BEFORE) if len(text) > AROUND else 0
    shown = ("…" if start else "") + text[start : start + AROUND]
    shown += "…" if start + AROUND < len(text) else ""
    return [f"  {shown}", " " * (2 + position - start + (start > 0)) + "^"]
