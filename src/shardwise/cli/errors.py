"""How does a command end? With an exit status; an error is one red line, without a traceback.

0: done, or yes. 1: the answer is no (different, broken, wrong). 2: the request is invalid or cannot be read.
130: interrupted. 141: the reader of the output went away.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from shardwise.checkpoint.errors import CheckpointError
from shardwise.geometry import LayoutError, NotationError
from shardwise.view.lines import replace_unencodable, wants_colour

BEFORE, AROUND = 50, 76
NO, UNUSABLE, INTERRUPTED, NO_READER = 1, 2, 130, 141


class Commands(TyperGroup):
    """The group of all commands; it turns the library's errors into messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _discard_output()
            raise typer.Exit(NO_READER) from None
        except (LayoutError, CheckpointError, OSError) as error:
            print_error(error)
            raise typer.Exit(UNUSABLE) from error


def _discard_output() -> None:
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


def print_error(error: Exception) -> None:
    """Print what went wrong to the error stream; a mistake in the notation is pointed at."""
    first, *rest = message_of(error).split("\n")
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
    start = max(0, position - BEFORE) if len(text) > AROUND else 0
    shown = ("…" if start else "") + text[start : start + AROUND]
    shown += "…" if start + AROUND < len(text) else ""
    return [f"  {shown}", " " * (2 + position - start + (start > 0)) + "^"]
