"""Small pictures for notebooks: a layout as tiles, a transfer as a matrix of ranks, and tables.

Each is one piece of HTML with an inline SVG and no script. Texts are escaped by the XML writer. Lines and texts have
the colour of the page around them, so that light and dark pages both show them; tiles are light, with dark labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from xml.etree.ElementTree import Element, SubElement, tostring

from shardwise.geometry import Layout, shorten_layout
from shardwise.transfer import Transfer
from shardwise.transfer.report import format_bytes
from shardwise.view.draw import label
from shardwise.view.lines import PALETTE
from shardwise.view.picture import Limits, Panel, picture_of

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
        page.append(_draw_tiles(panel))
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
    _add_text(page, f"moves {moved} (lower bound {bound}) in {transfer.rounds} rounds{collective}")
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


def _draw_tiles(panel: Panel) -> Element:
    """One rectangle for each tile between the cuts, with the lengths at the borders."""
    lefts, tops = _place(panel.column_sizes, WIDTH), _place(panel.row_sizes, HEIGHT if panel.dims == 2 else 2 * LEAST)
    svg = _make_svg(MARGIN + lefts[-1] + 2, 18 + tops[-1] + 2)
    for tile in panel.tiles:
        x, y = MARGIN + lefts[tile.columns[0]], 18 + tops[tile.rows[0]]
        width, height = lefts[tile.columns[1]] - lefts[tile.columns[0]], tops[tile.rows[1]] - tops[tile.rows[0]]
        colour = PALETTE[tile.holders[0][0] % len(PALETTE)]
        _add_box(svg, x, y, width, height, {"fill": colour, "stroke": "currentColor"})
        text = label(tile.holders, max(1, int(width / LETTER)))
        _write(svg, x + width / 2, y + height / 2 + 4, text, {"fill": "#111", "text-anchor": "middle"})
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
