"""L5: pictures of layouts. A model first, then characters, then colours; never imports torch."""

from shardwise.view.draw import (
    Line,
    TextRun,
    draw_layout,
    draw_panel,
    draw_picture,
    draw_ranks,
    draw_table,
    line,
    plain_text,
    print_lines,
)
from shardwise.view.picture import Limits, Panel, Picture, Tile, picture_of

__all__ = [
    "Limits",
    "Line",
    "Panel",
    "Picture",
    "TextRun",
    "Tile",
    "draw_layout",
    "draw_panel",
    "draw_picture",
    "draw_ranks",
    "draw_table",
    "line",
    "picture_of",
    "plain_text",
    "print_lines",
]
