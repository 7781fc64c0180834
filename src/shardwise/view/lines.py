"""How do drawn lines reach a terminal? Lines are runs of text, each with the rank whose colour it has."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO, TypeAlias

PALETTE = (
    "#8dd3c7",
    "#ffffb3",
    "#bebada",
    "#fb8072",
    "#80b1d3",
    "#fdb462",
    "#b3de69",
    "#fccde5",
    "#d9d9d9",
    "#bc80bd",
    "#ccebc5",
    "#ffed6f",
)
PLAINER = str.maketrans("│─┌┐└┘├┤┬┴┼…", "|-+++++++++~")


@dataclass(frozen=True, slots=True)
class TextRun:
    """A run of text and the rank whose colour is behind it, or None."""

    text: str
    rank: int | None = None


Line: TypeAlias = tuple[TextRun, ...]


def line(text: str = "") -> Line:
    """A line without colour."""
    return (TextRun(text),)


def plain_text(lines: Iterable[Line]) -> str:
    """The lines without colour; blanks at line ends are cut off.

    >>> plain_text([(TextRun(" 0 ", rank=0), TextRun("|")), line("x  ")])
    ' 0 |\\nx'
    """
    return "\n".join("".join(run.text for run in runs).rstrip() for runs in lines)


def wants_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colours; NO_COLOR and FORCE_COLOR decide where they are set."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def print_lines(lines: Sequence[Line], stream: TextIO) -> None:
    """Print lines, in colour where the stream takes it, in ASCII where its encoding has nothing better."""
    if wants_colour(stream):
        _print_colours(lines, stream)
    else:
        stream.write(replace_unencodable(plain_text(lines), stream.encoding) + "\n")


def replace_unencodable(text: str, encoding: str | None) -> str:
    """The text, with plainer characters where the encoding lacks those of the drawing; None: a stream of any text."""
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(PLAINER).encode("ascii", "replace").decode("ascii")
    return text


def _print_colours(lines: Sequence[Line], stream: TextIO) -> None:
    # Loading rich takes a quarter of a command's start-up time: only where there are colours to show.
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, force_terminal=True, highlight=False, soft_wrap=True)
    for runs in lines:
        spans = [
            (replace_unencodable(r.text, stream.encoding), "" if r.rank is None else colour_of(r.rank)) for r in runs
        ]
        console.print(Text.assemble(*spans))


def colour_of(rank: int) -> str:
    """The style in which a rank's tiles are drawn: the same in every picture."""
    return f"black on {PALETTE[rank % len(PALETTE)]}"
