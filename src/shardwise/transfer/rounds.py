"""How does a transfer stay within a buffer? Boxes are cut small and shared out over rounds.

With at most `degree` messages in and out of a rank, each message of a round may hold `limit / degree` bytes.

1. Cut every box into parts of at most a quarter of that.
2. Along each edge, deal the parts to rounds by the bytes before them; a round starts every three quarters.

Both sides of an edge compute the same rounds from the edge's own boxes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwise.geometry.errors import LayoutError
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.intersect import expand_runs
from shardwise.transfer.routes import Routes


class BufferTooSmallError(LayoutError):
    """A buffer limit under which not one element fits in each message; `needed` is the least that works."""

    def __init__(self, limit: int, degree: int, itemsize: int) -> None:
        self.needed = degree * itemsize
        super().__init__(
            f"max_buffer_bytes={limit} is too small: a rank exchanges up to {degree} messages at a time with elements "
            f"of {itemsize} bytes; give at least {self.needed} bytes"
        )


def split_in_rounds(routes: Routes, degree: int, itemsize: int, limit: int) -> Routes:
    """The same moves cut and dealt to rounds so that a rank's messages of one round add up to at most `limit` bytes."""
    per_message = limit // max(1, degree * itemsize)
    if per_message < 1:
        raise BufferTooSmallError(limit, degree, itemsize)
    part = max(1, per_message // 4)
    cut = _cut(routes, part)
    return _deal(cut, per_message - part + 1)


def _cut(routes: Routes, limit: int) -> Routes:
    """Cut boxes of more than `limit` elements, keeping rows of the last dims whole where they fit."""
    if len(routes) == 0 or int(routes.elements().max()) <= limit:
        return routes
    part = np.empty_like(routes.sizes)
    left = np.full(len(routes), limit, np.int64)
    for d in reversed(range(routes.sizes.shape[1])):
        part[:, d] = np.minimum(routes.sizes[:, d], left)
        left = np.maximum(1, left // np.maximum(1, part[:, d]))
    counts = -(-routes.sizes // part)
    items, digits = expand_runs([counts[:, d] for d in range(counts.shape[1])])
    shift = np.stack(digits, axis=1) * part[items]
    taken = routes.take(items)
    sizes = np.minimum(part[items], taken.sizes - shift)
    return replace(taken, starts=taken.starts + shift, sizes=sizes)


def _deal(routes: Routes, step: int) -> Routes:
    """Number the rounds along each edge; the routes are sorted by edge already."""
    elements = routes.elements()
    before = np.cumsum(elements) - elements
    new_edge = (np.diff(routes.src_ranks) != 0) | (np.diff(routes.dst_ranks) != 0)
    first = np.concatenate([[0], np.flatnonzero(new_edge) + 1]) if len(routes) else np.zeros(0, np.int64)
    edge = np.concatenate([[0], np.cumsum(new_edge)]) if len(routes) else np.zeros(0, np.int64)
    rounds = (before - before[first][edge]) // step if len(routes) else before
    return replace(routes, rounds=rounds)


def degree_bound(src: Layout, dst: Layout, terms: int) -> int | None:
    """An upper bound of the messages in and out of a rank between two regular layouts, from their cuts alone."""
    if src.cells is None or dst.cells is None:
        return None
    out, into = 1, 1
    for a, b in zip(src.cells.dims, dst.cells.dims, strict=True):
        out *= _most_met(a.starts, a.lengths, b.starts, b.lengths)
        into *= _most_met(b.starts, b.lengths, a.starts, a.lengths)
    sends = out * dst.cells.addends * dst.cells.replicas * _most_cells(src)
    receives = into * terms * _most_cells(dst)
    return min(sends, _most_peers(src, dst)) + min(receives, _most_peers(dst, src))


def _most_peers(ours: Layout, theirs: Layout) -> int:
    """How many other ranks of the second layout a rank of the first may meet: one less if it is always one of them."""
    return len(theirs.ranks) - bool(np.isin(ours.ranks, theirs.ranks).all())


def _most_met(starts: IntArray, lengths: IntArray, other_starts: IntArray, other_lengths: IntArray) -> int:
    begins = other_starts[other_lengths > 0]
    filled = lengths > 0
    low = np.searchsorted(begins, starts[filled], side="right")
    high = np.searchsorted(begins, (starts + lengths)[filled], side="left")
    return int((high - low + 1).max(initial=1))


def _most_cells(layout: Layout) -> int:
    return int(np.unique(layout.table.ranks, return_counts=True)[1].max())
