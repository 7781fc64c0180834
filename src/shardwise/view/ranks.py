"""What does each rank hold, in numbers? A table that stays short however many ranks there are."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.geometry import TensorType
from shardwise.transfer.report import format_bytes
from shardwise.view.lines import Line, TextRun, line

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
