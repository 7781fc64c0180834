"""`shardwise show`: draw a layout."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from shardwise.cli.output import AsJson, print_json, shorten_title, terminal_width
from shardwise.geometry import TensorType, layout_to_json, parse_layout
from shardwise.view import Line, draw_layout, draw_ranks, line, print_lines

LayoutText = Annotated[str, typer.Argument(metavar="LAYOUT", help="A tensor and its layout, in the notation.")]


def show(layout: LayoutText, as_json: AsJson = False) -> None:
    """Draw which rank holds which part of a tensor, and how many bytes each rank holds.

    \b
    Example:
      shardwise show "f32[8,6] on dp=2,tp=2: S(0), S(1)"
    """
    tensor = parse_layout(layout)
    if as_json:
        print_json(tensor_to_json(tensor))
    else:
        print_lines(tensor_lines(tensor, terminal_width()), sys.stdout)


def tensor_lines(tensor: TensorType, width: int) -> list[Line]:
    """A tensor's notation, the picture of its layout, and what each rank holds."""
    title = line(shorten_title(str(tensor)))
    return [title, line(), *draw_layout(tensor.layout, width), line(), *draw_ranks(tensor)]


def tensor_to_json(tensor: TensorType) -> dict[str, Any]:
    """The layout and the numbers of each rank as plain data."""
    layout = tensor.layout
    elements = layout.elements_per_rank()
    ranks = [
        {
            "rank": rank,
            "elements": elements[rank],
            "bytes": elements[rank] * tensor.itemsize,
            "local_shapes": [list(shape) for shape in layout.local_shapes(rank)],
            "pieces": [{"offsets": p.box.offsets, "sizes": p.box.sizes} for p in layout.pieces_of(rank)],
        }
        for rank in layout.ranks
    ]
    return {
        "notation": str(tensor),
        "dtype": tensor.dtype,
        "itemsize": tensor.itemsize,
        "layout": layout_to_json(layout),
        "pending": None if layout.pending is None else str(layout.pending),
        "bytes": layout.numel * tensor.itemsize,
        "ranks": ranks,
    }
