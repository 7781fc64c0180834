"""How is a picture of a layout drawn with characters?

Every row and column of a panel gets a height and a width that grow with its length; tiles are drawn on a canvas between
the borders; a border is left out where both of its sides belong to the same tile. The table of
what each rank has stays short however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

from shardwise.geometry import Layout, TensorType
from shardwise.geometry.mesh import format_ranks
from shardwise.transfer.report import format_bytes
from shardwise.view.lines import Line, TextRun, line
from shardwise.view.picture import Holders, Limits, Panel, Picture, Tile, picture_of

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
    >>> from shardwise.view.lines import plain_text
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
    >>> from shardwise.view.lines import plain_text
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
