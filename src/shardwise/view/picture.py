"""What is there to draw of a layout? A model of tiles between cuts, free of characters and colours.

1. The pieces that hold something are cut along all dims but the last two: each combination of cuts is a panel.
2. In a panel, rows and columns are between consecutive cuts of the last two dims, however long they are.
3. A tile is one box: the rows and columns it spans, and who holds it. Replicas share a tile, and so do pending addends.
4. Only so many panels, rows and columns are kept; the model counts what it leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np

from shardwise.geometry import Box, Layout, Piece, Reduction
from shardwise.geometry.mesh import IntArray

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
