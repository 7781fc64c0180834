"""What is there to draw of a layout, and how is it drawn with characters?

First a model of tiles between cuts, free of characters and colours:

1. The pieces that hold something are cut along all dims but the last two: each combination of cuts is a panel.
2. In a panel, rows and columns are between consecutive cuts of the last two dims, however long they are.
3. A tile is one box: the rows and columns it spans, and who holds it. Replicas share a tile, and so do pending addends.
4. Only so many panels, rows and columns are kept; the model counts what it leaves out.

Every row and column of a panel gets a height and a width that grow with its length; tiles are drawn on a canvas between
the borders; a border is left out where both of its sides belong to the same tile. The table of
what each rank has stays short however many ranks there are.

How do drawn lines reach a terminal? Lines are runs of text, each with the rank whose colour it has.

Small pictures for notebooks: a layout as tiles, a transfer as a matrix of ranks, and tables.

Each is one piece of HTML with an inline SVG and no script. Texts are escaped by the XML writer. Lines and texts have
the colour of the page around them, so that light and dark pages both show them; labels of tiles are dark or light.

`shardwise.draw`: a picture of a tensor, a layout or a transfer in the terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, product
from typing import Any, Protocol, TextIO, TypeAlias
from xml.etree.ElementTree import Element, SubElement, tostring

import numpy as np

from shardwise._text import count_of, public
from shardwise.geometry import Box, Layout, Piece, Reduction, TensorType, parse_layout, shorten_layout
from shardwise.geometry.mesh import IntArray, format_ranks
from shardwise.geometry.notation import read_spec
from shardwise.transfer import Transfer
from shardwise.transfer.transfer import format_bytes

Span: TypeAlias = tuple[int, int]
Holders: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A box in a panel: the half-open ranges of rows and columns it spans, and its holders.

    `holders` has one entry for each pending addend (one entry if nothing is pending): the ranks that hold it.
    """

    rows: Span
    columns: Span
    holders: Holders


@dataclass(frozen=True, slots=True)
class Panel:
    """A slice of the tensor along its last two dims: the lengths between its cuts, and its tiles.

    `dims` is the number of dims drawn; a tensor with fewer than two has a row, or a row and a column, of length 1.
    """

    dims: int
    slice_of: tuple[Span, ...]
    row_sizes: tuple[int, ...]
    column_sizes: tuple[int, ...]
    tiles: tuple[Tile, ...]
    hidden_rows: int = 0
    hidden_columns: int = 0


@dataclass(frozen=True, slots=True)
class Picture:
    """All that a drawing of a layout shows."""

    shape: tuple[int, ...]
    panels: tuple[Panel, ...]
    hidden_panels: int
    empty: tuple[Piece, ...]
    hidden_empty: int
    pending: Reduction | None


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a layout a picture keeps."""

    panels: int = 6
    rows: int = 12
    columns: int = 8
    empty: int = 8


def picture_of(layout: Layout, limits: Limits | None = None) -> Picture:
    """The model of a layout's drawing.

    >>> from shardwise.geometry import parse_layout
    >>> [panel] = picture_of(parse_layout("f32[8,6] on dp=2,tp=2: S(0), R").layout).panels
    >>> panel.row_sizes, panel.column_sizes, panel.tiles[0]
    ((4, 4), (6,), Tile(rows=(0, 1), columns=(0, 1), holders=((0, 1),)))
    """
    limits = limits or Limits()
    table = layout.table
    filled = np.flatnonzero((table.sizes > 0).all(axis=1))
    empty = np.flatnonzero((table.sizes == 0).any(axis=1))
    slices = [_intervals(table.offsets[filled, d], table.sizes[filled, d]) for d in range(layout.ndim - 2)]
    total = int(np.prod([len(s) for s in slices], dtype=np.int64)) if len(filled) else 0
    chosen = [c for c, _ in zip(product(*slices), range(min(total, limits.panels)), strict=False)]
    return Picture(
        shape=layout.shape,
        panels=tuple(_panel(layout, filled, c, limits) for c in chosen),
        hidden_panels=total - len(chosen),
        empty=table.take(empty[: limits.empty]).pieces(),
        hidden_empty=max(0, len(empty) - limits.empty),
        pending=layout.pending,
    )


def _intervals(offsets: IntArray, sizes: IntArray) -> list[Span]:
    """The ranges between consecutive cuts, the cuts being all starts and ends."""
    cuts = np.unique(np.concatenate([offsets, offsets + sizes])).tolist()
    return list(pairwise(cuts))


def _panel(layout: Layout, rows: IntArray, slice_of: tuple[Span, ...], limits: Limits) -> Panel:
    table = layout.table
    for dim, (start, _) in enumerate(slice_of):
        offsets, sizes = table.offsets[rows, dim], table.sizes[rows, dim]
        rows = rows[(offsets <= start) & (start < offsets + sizes)]
    down, hidden_rows = _cuts(layout, rows, layout.ndim - 2, limits.rows)
    across, hidden_columns = _cuts(layout, rows, layout.ndim - 1, limits.columns)
    for dim, cuts in ((layout.ndim - 2, down), (layout.ndim - 1, across)):
        rows = rows if dim < 0 else rows[table.offsets[rows, dim] < cuts[-1]]
    tiles = _tiles(layout, rows, down, across)
    dims = min(2, layout.ndim)
    return Panel(dims, slice_of, _lengths(down), _lengths(across), tiles, hidden_rows, hidden_columns)


def _cuts(layout: Layout, rows: IntArray, dim: int, limit: int) -> tuple[list[int], int]:
    """The first cuts of a dim among these pieces, and how many ranges are left out; a missing dim has length 1."""
    if dim < 0:
        return [0, 1], 0
    offsets, sizes = layout.table.offsets[rows, dim], layout.table.sizes[rows, dim]
    cuts = np.unique(np.concatenate([offsets, offsets + sizes])).tolist()
    return cuts[: limit + 1], max(0, len(cuts) - 1 - limit)


def _lengths(cuts: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(cuts))


def _tiles(layout: Layout, rows: IntArray, down: list[int], across: list[int]) -> tuple[Tile, ...]:
    """One tile for each distinct box, in row-major order."""
    table = layout.table.take(rows)
    holders: dict[Box, dict[int, list[int]]] = {}
    for piece, addend in zip(table.pieces(), table.addends.tolist(), strict=True):
        holders.setdefault(piece.box, {}).setdefault(addend, []).append(piece.rank)
    tiles = [
        Tile(
            _span(box, layout.ndim - 2, down),
            _span(box, layout.ndim - 1, across),
            tuple(tuple(sorted(ranks)) for _, ranks in sorted(by_addend.items())),
        )
        for box, by_addend in holders.items()
    ]
    return tuple(sorted(tiles, key=lambda t: (t.rows[0], t.columns[0])))


def _span(box: Box, dim: int, cuts: list[int]) -> Span:
    """The ranges between cuts that a box covers, as far as they are kept."""
    if dim < 0:
        return 0, 1
    first, last = np.searchsorted(cuts, (box.offsets[dim], min(box.offsets[dim] + box.sizes[dim], cuts[-1])))
    return int(first), int(last)


# Those of `shardwise view` (page/front/parts/colours.js): Okabe and Ito's for up to 8 ranks, a ramp for more.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c8c8c")
RAMP = ("#472d7b", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6dcd59", "#b4de2c", "#fde725")
DARK, LIGHT = "#10161d", "#ffffff"
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
    colour = PALETTE[rank % len(PALETTE)]
    return f"{'black' if ink_on(colour) == DARK else 'white'} on {colour}"


def rank_colour(rank: int, count: int) -> str:
    """The colour of a rank among `count` of them.

    >>> rank_colour(1, 4), rank_colour(0, 64), rank_colour(63, 64)
    ('#e69f00', '#472d7b', '#fde725')
    """
    if count <= len(PALETTE):
        return PALETTE[rank % len(PALETTE)]
    place = min(rank, count - 1) / (count - 1) * (len(RAMP) - 1)
    low = min(len(RAMP) - 2, int(place))
    mixed = [a + (b - a) * (place - low) for a, b in zip(_channels(RAMP[low]), _channels(RAMP[low + 1]), strict=True)]
    return "#" + "".join(f"{round(value):02x}" for value in mixed)


def ink_on(colour: str) -> str:
    """Dark or light, whichever is easier to read on a colour."""
    red, green, blue = ((value / 255) ** 2.2 for value in _channels(colour))
    return DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.24 else LIGHT


def _channels(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


# Which arms (up, down, left, right) meet in a point of a border.
CROSSINGS = {
    (0, 0, 0, 0): " ",
    (1, 1, 0, 0): "│",
    (0, 0, 1, 1): "─",
    (0, 1, 0, 1): "┌",
    (0, 1, 1, 0): "┐",
    (1, 0, 0, 1): "└",
    (1, 0, 1, 0): "┘",
    (1, 1, 0, 1): "├",
    (1, 1, 1, 0): "┤",
    (0, 1, 1, 1): "┬",
    (1, 0, 1, 1): "┴",
    (1, 1, 1, 1): "┼",
}
WIDEST, TALLEST, FEW_ROWS, LONGEST_LABEL = 11, 3, 4, 24


def draw_layout(layout: Layout, width: int = 80) -> list[Line]:
    """Draw a layout within a width.

    >>> from shardwise.geometry import parse_layout
    >>> from shardwise.view import plain_text
    >>> print(plain_text(draw_layout(parse_layout("f32[10] on tp=4: S(0)").layout)))
    dim 0 (10) across
            3           3           3       1
      ┌───────────┬───────────┬───────────┬────┐
      │     0     │     1     │     2     │ 3  │
      └───────────┴───────────┴───────────┴────┘
    """
    return draw_picture(picture_of(layout, Limits(columns=max(1, (width - 12) // 8))), width)


def draw_picture(picture: Picture, width: int = 80) -> list[Line]:
    """Draw a picture: what its dims are, its panels, then what the panels do not show."""
    lines = [line(_caption(picture.shape))] if picture.panels else [line("no elements")]
    for panel in picture.panels:
        lines += [line(_title(panel))] if panel.slice_of else []
        lines += draw_panel(panel, width)
    if picture.hidden_panels:
        lines.append(line(f"and {picture.hidden_panels} more slices"))
    if picture.pending is not None:
        lines.append(line(f"pending: {picture.pending}; 0+1 in a tile: rank 0 and rank 1 each hold an addend"))
    if picture.empty:
        more = f" and {picture.hidden_empty} more" if picture.hidden_empty else ""
        lines.append(line(f"empty: {', '.join(f'rank {p.rank} {p.box}' for p in picture.empty)}{more}"))
    return lines


def _caption(shape: Sequence[int]) -> str:
    if not shape:
        return "one element, no dims"
    last = len(shape) - 1
    down = f"dim {last - 1} ({shape[-2]}) down, " if last else ""
    return f"{down}dim {last} ({shape[-1]}) across"


def _title(panel: Panel) -> str:
    return "[" + ", ".join([f"{a}:{b}" for a, b in panel.slice_of] + [":", ":"]) + "]"


def draw_panel(panel: Panel, width: int = 80) -> list[Line]:
    """Draw a panel with the lengths of its rows and columns at its borders."""
    margin = max(len(str(s)) for s in panel.row_sizes) + 2 if panel.dims == 2 else 2
    share = max(4, (width - margin - 1) // len(panel.column_sizes))
    labels = [label(tile.holders, min(LONGEST_LABEL, share - 3)) for tile in panel.tiles]
    widths = _widths(panel, labels, share - 1)
    tallest = TALLEST if len(panel.row_sizes) <= FEW_ROWS and panel.dims == 2 else 1
    heights = [max(1, round(tallest * s / max(panel.row_sizes))) for s in panel.row_sizes]
    canvas = _Canvas(widths, heights)
    for tile, text in zip(panel.tiles, labels, strict=True):
        canvas.fill(tile, text)
    header = " " * margin + "".join(f" {s:^{w}}" for s, w in zip(panel.column_sizes, widths, strict=True))
    drawn = [(TextRun(" " * margin), *runs) for runs in canvas.lines()]
    if panel.dims == 2:
        for size, top, height in zip(panel.row_sizes, canvas.tops, heights, strict=True):
            at = top + (height + 1) // 2
            drawn[at] = (TextRun(f"{size:>{margin - 1}} "), *drawn[at][1:])
    return [*([line(header)] if panel.dims else []), *drawn, *_hidden(panel)]


def _hidden(panel: Panel) -> list[Line]:
    counts = [(panel.hidden_rows, "rows"), (panel.hidden_columns, "columns")]
    texts = [f"{count} more {what} of tiles" for count, what in counts if count]
    return [line(f"not drawn: {' and '.join(texts)}")] if texts else []


def label(holders: Holders, limit: int) -> str:
    """The ranks that hold a tile: replicas with commas, pending addends with a plus, cut off at a limit.

    >>> label(((0, 1, 2, 5),), 20), label(((0,), (1,)), 20), label(((0, 2), (1, 3)), 20)
    ('0-2,5', '0+1', '(0,2)+(1,3)')
    >>> label((tuple(range(0, 99, 3)),), 9)
    '0,3,6,9,…'
    """
    texts = [format_ranks(ranks) for ranks in holders]
    if len(texts) > 1:
        texts = [f"({t})" if len(ranks) > 1 else t for t, ranks in zip(texts, holders, strict=True)]
    text = "+".join(texts)
    if len(text) <= limit:
        return text
    cut = max(text.rfind(c, 0, limit - 1) for c in ",+-")
    return f"{text[: cut + 1]}…" if cut > 0 else "…"


def _widths(panel: Panel, labels: Sequence[str], widest: int) -> list[int]:
    """A width for each column: in proportion to its length, but enough for its number and the labels in it."""
    longest = max(panel.column_sizes)
    unit = min(WIDEST, widest)
    widths = [max(3, round(unit * s / longest), len(str(s))) for s in panel.column_sizes]
    for tile, text in zip(panel.tiles, labels, strict=True):
        first, last = tile.columns
        room = sum(widths[first:last]) + (last - first - 1)
        widths[last - 1] += max(0, len(text) + 2 - room)
    return widths


class _Canvas:
    """Characters and tile numbers of a panel, borders included."""

    def __init__(self, widths: Sequence[int], heights: Sequence[int]) -> None:
        self.lefts = list(accumulate((w + 1 for w in widths), initial=0))
        self.tops = list(accumulate((h + 1 for h in heights), initial=0))[:-1]
        self.bottom = sum(heights) + len(heights)
        self.ranks: list[list[int | None]] = [[None] * (self.lefts[-1] + 1) for _ in range(self.bottom + 1)]
        self.owners = [[0] * (self.lefts[-1] + 3) for _ in range(self.bottom + 3)]
        self.chars = [[" "] * (self.lefts[-1] + 1) for _ in range(self.bottom + 1)]
        self.count = 0

    def fill(self, tile: Tile, text: str) -> None:
        """Fill the inside of a tile and write its label in the middle."""
        self.count += 1
        edges = [*self.tops, self.bottom]
        top, bottom = edges[tile.rows[0]], edges[tile.rows[1]]
        left, right = self.lefts[tile.columns[0]], self.lefts[tile.columns[1]]
        for y in range(top + 1, bottom):
            for x in range(left + 1, right):
                self.owners[y + 1][x + 1] = self.count
                self.ranks[y][x] = tile.holders[0][0]
        row, start = top + (bottom - top) // 2, left + 1 + (right - left - 1 - len(text)) // 2
        self.chars[row][start : start + len(text)] = text

    def lines(self) -> list[Line]:
        """The canvas with its borders drawn, one line of runs for each row."""
        for y in range(self.bottom + 1):
            for x in range(self.lefts[-1] + 1):
                if not self.owners[y + 1][x + 1]:
                    self.chars[y][x] = self._border(y, x)
        return [
            tuple(
                TextRun("".join(c for c, _ in run), rank)
                for rank, run in groupby(zip(chars, ranks, strict=True), key=lambda pair: pair[1])
            )
            for chars, ranks in zip(self.chars, self.ranks, strict=True)
        ]

    def _border(self, y: int, x: int) -> str:
        on_column, on_row = x in self.lefts, y in self.tops or y == self.bottom
        if on_column and on_row:
            above, below = self._differs(y - 1, x, 0, 1), self._differs(y + 1, x, 0, 1)
            before, after = self._differs(y, x - 1, 1, 0), self._differs(y, x + 1, 1, 0)
            return CROSSINGS[int(above), int(below), int(before), int(after)]
        return "│" if on_column else "─"

    def _differs(self, y: int, x: int, dy: int, dx: int) -> bool:
        """Whether the two sides of the border element at (y, x) belong to different tiles."""
        owners = self.owners
        return owners[y + 1 - dy][x + 1 - dx] != owners[y + 1 + dy][x + 1 + dx]


FIRST, LAST, LONGEST_SHAPES = 10, 4, 40


def draw_ranks(tensor: TensorType) -> list[Line]:
    """The local tensors and bytes of each rank, the middle left out where there are many, and the sum.

    >>> from shardwise.geometry import parse_layout
    >>> from shardwise.view import plain_text
    >>> print(plain_text(draw_ranks(parse_layout("f32[10,2] on tp=4: S(0)"))))
    rank  local tensors  elements  bytes
       0         (3, 2)         6   24 B
       1         (3, 2)         6   24 B
       2         (3, 2)         6   24 B
       3         (1, 2)         2    8 B
    the tensor has 80 B; 4 ranks hold 80 B, from 8 B to 24 B each
    """
    layout = tensor.layout
    elements = layout.elements_per_rank()
    shown = list(layout.ranks)
    skipped = max(0, len(shown) - FIRST - LAST)
    if skipped > 1:
        shown = shown[:FIRST] + shown[-LAST:]
    rows = [
        (str(r), _shapes(layout.local_shapes(r)), str(elements[r]), format_bytes(elements[r] * tensor.itemsize))
        for r in shown
    ]
    lines = draw_table(("rank", "local tensors", "elements", "bytes"), rows, ranks=shown)
    if skipped > 1:
        lines.insert(1 + FIRST, line(f"   …  {skipped} more ranks"))
    return [*lines, line(_total(tensor, list(elements.values())))]


def draw_table(header: Sequence[str], rows: Sequence[Sequence[str]], ranks: Sequence[int | None] = ()) -> list[Line]:
    """A table with right-aligned columns; with `ranks`, the first column of each row has that rank's colour."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    texts = [[f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)] for row in (header, *rows)]
    colours = [None, *(ranks or [None] * len(rows))]
    return [
        (TextRun(row[0], rank), TextRun("  " + "  ".join(row[1:]))) for row, rank in zip(texts, colours, strict=True)
    ]


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    text = ", ".join(map(str, shapes))
    return text if len(text) <= LONGEST_SHAPES else f"{len(shapes)} tensors, the first {shapes[0]}"


def _total(tensor: TensorType, elements: Sequence[int]) -> str:
    total, held = (format_bytes(count * tensor.itemsize) for count in (tensor.layout.numel, sum(elements)))
    if not elements:
        return f"the tensor has {total}; no rank holds a piece"
    low, high = (format_bytes(count * tensor.itemsize) for count in (min(elements), max(elements)))
    spread = f"{low} each" if low == high else f"from {low} to {high} each"
    count = len(elements)
    return f"the tensor has {total}; {count} rank{'s hold' if count > 1 else ' holds'} {held}, {spread}"


WIDTH, HEIGHT, LEAST, MARGIN, LETTER = 360.0, 180.0, 14.0, 44.0, 7.0
MOST_RANKS, MOST_ROWS, LONGEST_TITLE = 32, 40, 200
TEXT = {"fill": "currentColor", "font-size": "12", "font-family": "monospace"}


def layout_html(layout: Layout, dtype: str | None = None) -> str:
    """A layout in the notation and as tiles to scale, with the ranks that hold each."""
    page = _start(shorten_layout(layout, dtype))
    picture = picture_of(layout, Limits(panels=4, rows=16, columns=16))
    for panel in picture.panels:
        if panel.slice_of:
            _add_text(page, "[" + ", ".join(f"{a}:{b}" for a, b in panel.slice_of) + ", :, :]")
        page.append(_draw_tiles(panel, 1 + max(layout.ranks, default=0)))
    if picture.hidden_panels:
        _add_text(page, f"and {picture.hidden_panels} more slices")
    if picture.pending is not None:
        _add_text(page, f"pending: {picture.pending}")
    return _finish(page)


def transfer_html(transfer: Transfer) -> str:
    """What a transfer moves, and a matrix of who sends to whom where the ranks are few."""
    src, dst = (shorten_layout(layout) for layout in (transfer.src, transfer.dst))
    page = _start(f"{src} → {dst}")
    moved, bound = format_bytes(transfer.moved_bytes), format_bytes(transfer.lower_bound_bytes)
    collective = "" if transfer.collective is None else f"; {transfer.collective}"
    _add_text(page, f"moves {moved} (lower bound {bound}) in {count_of(transfer.rounds, 'round')}{collective}")
    count = 1 + max((*transfer.src.ranks, *transfer.dst.ranks), default=0)
    if transfer.is_listed and count <= MOST_RANKS:
        page.append(_draw_matrix(transfer, count))
    return _finish(page)


def table_html(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a title; of many rows the first ones."""
    page = _start(_shorten(title))
    table = SubElement(page, "table")
    for cells, kind in ((head, "th"), *((row, "td") for row in rows[:MOST_ROWS])):
        line = SubElement(table, "tr")
        for cell in cells:
            SubElement(line, kind, {"style": "text-align: left"}).text = cell
    if len(rows) > MOST_ROWS:
        _add_text(page, f"and {len(rows) - MOST_ROWS} more rows")
    return _finish(page)


def _start(title: str) -> Element:
    page = Element("div")
    SubElement(page, "code").text = title
    return page


def _add_text(page: Element, text: str) -> None:
    SubElement(page, "div").text = text


def _finish(page: Element) -> str:
    return tostring(page, encoding="unicode", method="html")


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_TITLE else f"{text[:LONGEST_TITLE]}…"


def _draw_tiles(panel: Panel, count: int) -> Element:
    """One rectangle for each tile between the cuts, with the lengths at the borders."""
    lefts, tops = _place(panel.column_sizes, WIDTH), _place(panel.row_sizes, HEIGHT if panel.dims == 2 else 2 * LEAST)
    svg = _make_svg(MARGIN + lefts[-1] + 2, 18 + tops[-1] + 2)
    for tile in panel.tiles:
        x, y = MARGIN + lefts[tile.columns[0]], 18 + tops[tile.rows[0]]
        width, height = lefts[tile.columns[1]] - lefts[tile.columns[0]], tops[tile.rows[1]] - tops[tile.rows[0]]
        colour = rank_colour(tile.holders[0][0], count)
        _add_box(svg, x, y, width, height, {"fill": colour, "stroke": "currentColor"})
        text = label(tile.holders, max(1, int(width / LETTER)))
        _write(svg, x + width / 2, y + height / 2 + 4, text, {"fill": ink_on(colour), "text-anchor": "middle"})
    if panel.dims == 2:
        for size, top, bottom in zip(panel.row_sizes, tops, tops[1:], strict=False):
            _write(svg, MARGIN - 4, 22 + (top + bottom) / 2, str(size), {"text-anchor": "end"})
    if panel.dims:
        for size, left, right in zip(panel.column_sizes, lefts, lefts[1:], strict=False):
            _write(svg, MARGIN + (left + right) / 2, 12, str(size), {"text-anchor": "middle"})
    return svg


def _place(sizes: Sequence[int], length: float) -> list[float]:
    """Where each run of a dim begins, in proportion to its length but wide enough to be seen."""
    total = max(1, sum(sizes))
    return list(accumulate((max(LEAST, length * size / total) for size in sizes), initial=0.0))


def _draw_matrix(transfer: Transfer, count: int) -> Element:
    """A square for each pair of ranks that exchange something, the darker the more bytes."""
    step = max(8.0, min(20.0, 240 / count))
    svg = _make_svg(MARGIN + count * step + 2, 18 + count * step + 2)
    most = max(transfer.bytes_by_edge.values(), default=1)
    _write(svg, MARGIN, 12, "to", {})
    _write(svg, MARGIN - 4, 18 + step, "from", {"text-anchor": "end"})
    frame = {"fill": "none", "stroke": "currentColor", "stroke-opacity": "0.4"}
    _add_box(svg, MARGIN, 18, count * step, count * step, frame)
    for (source, target), nbytes in transfer.bytes_by_edge.items():
        style = {"fill": "#0072b2", "fill-opacity": f"{0.25 + 0.75 * nbytes / most:.2f}"}
        box = _add_box(svg, MARGIN + target * step, 18 + source * step, step, step, style)
        SubElement(box, "title").text = f"rank {source} sends {format_bytes(nbytes)} to rank {target}"
    return svg


def _make_svg(width: float, height: float) -> Element:
    size = {"width": f"{width:.0f}", "height": f"{height:.0f}", "viewBox": f"0 0 {width:.0f} {height:.0f}"}
    return Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "style": "display: block", **size})


def _add_box(svg: Element, x: float, y: float, width: float, height: float, style: dict[str, str]) -> Element:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    return SubElement(svg, "rect", {**place, **style})


def _write(svg: Element, x: float, y: float, text: str, style: dict[str, str]) -> None:
    SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **TEXT, **style}).text = text


LEAST_WIDTH = 40


class HasLayout(Protocol):
    """What can be drawn as well: a ShardedTensor, by its layout and its dtype."""

    sharding: Layout


@public
def draw(
    value: HasLayout | Layout | TensorType | Transfer | str, *, width: int | None = None, file: TextIO | None = None
) -> None:
    """Print a picture of a ShardedTensor, a Layout, a text in the notation, or a Transfer.

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
        value = read_spec(value, None, ()) if value.lstrip().startswith("[") else parse_layout(value)
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
