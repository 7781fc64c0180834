"""`shardwise.draw`: a picture of a tensor, a layout or a transfer in the terminal."""

from __future__ import annotations

import shutil
import sys
from typing import Any, TextIO

from shardwise.geometry import Layout, TensorType, parse_layout, shorten_layout
from shardwise.transfer import Transfer
from shardwise.view.draw import Line, draw_layout, line, print_lines

LEAST_WIDTH = 40


def draw(value: Any, *, width: int | None = None, file: TextIO | None = None) -> None:
    """Print a picture: of a ShardedTensor, a Layout, a text in the notation, or a Transfer (what it moves).

    `width` is that of the terminal if it is not passed. Drawing a tensor needs no other rank.

    >>> import shardwise
    >>> shardwise.draw("f32[4,6] on tp=3: S(1)", width=60)
    f32[4,6] on tp=3: S(1)
    dim 0 (4) down, dim 1 (6) across
             2           2           2
       ┌───────────┬───────────┬───────────┐
       │           │           │           │
     4 │     0     │     1     │     2     │
       │           │           │           │
       └───────────┴───────────┴───────────┘
    """
    known = width or max(LEAST_WIDTH, shutil.get_terminal_size().columns)
    print_lines(_lines_of(value, known), file or sys.stdout)


def _lines_of(value: Any, width: int) -> list[Line]:
    if isinstance(value, str):
        value = parse_layout(value)
    if isinstance(value, Transfer):
        return [line(text) for text in str(value).split("\n")]
    if isinstance(value, TensorType):
        return [line(str(value)), *draw_layout(value.layout, width)]
    if isinstance(value, Layout):
        return [line(shorten_layout(value)), *draw_layout(value, width)]
    layout = getattr(value, "sharding", None)
    if not isinstance(layout, Layout):
        raise TypeError(
            f"draw takes a ShardedTensor, a Layout, a Transfer or a text such as 'f32[8,6] on tp=2: S(0)'; got "
            f"{type(value).__name__}"
        )
    return [line(shorten_layout(layout, str(value.dtype))), *draw_layout(layout, width)]
