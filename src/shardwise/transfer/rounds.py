"""How does a transfer stay within a buffer limit? By rounds: boxes are cut small and shared out over them.

With at most `degree` messages in and out of a rank, each message of a round may hold `limit / degree` bytes.

1. Cut every box into parts of at most a quarter of that.
2. Along each edge, deal the parts to rounds by the bytes before them; a round starts every three quarters.

Both sides of an edge compute the same rounds from the edge's own boxes. To count the rounds, parts
are not listed: what comes before the last part of an edge decides.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwise.geometry.box import LayoutError
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.overlap import expand_runs
from shardwise.transfer.senders import Routes, StepOutline, box_volumes, constant_column, overlapping_pairs

_MOST_SIZES = 1 << 16


class BufferTooSmallError(LayoutError):
    """A buffer limit under which not one element fits in each message; `needed` is the least that works."""

    def __init__(self, limit: int, degree: int, itemsize: int) -> None:
        self.needed = degree * itemsize
        super().__init__(
            f"max_buffer_bytes={limit} is too small: a rank exchanges up to {degree} messages at a time with elements "
            f"of {itemsize} bytes; pass at least {self.needed} bytes"
        )


def split_in_rounds(routes: Routes, degree: int, itemsize: int, limit: int) -> Routes:
    """The same moves split into rounds so that a rank's messages of one round add up to at most `limit` bytes."""
    per_message, part = _message_sizes(degree, itemsize, limit)
    cut = _cut_boxes(routes, part)
    return _assign_rounds(cut, per_message - part + 1)


def _message_sizes(degree: int, itemsize: int, limit: int) -> tuple[int, int]:
    """The most elements of a message, and of a part."""
    per_message = limit // max(1, degree * itemsize)
    if per_message < 1:
        raise BufferTooSmallError(limit, degree, itemsize)
    return per_message, max(1, per_message // 4)


def _cut_boxes(routes: Routes, limit: int) -> Routes:
    """Cut boxes of more than `limit` elements, keeping rows of the last dims whole where they fit."""
    if len(routes) == 0 or int(routes.elements().max()) <= limit:
        return routes
    part = _part_sizes(routes.sizes, limit)
    counts = -(-routes.sizes // part)
    items, digits = expand_runs([counts[:, d] for d in range(counts.shape[1])])
    shift = np.stack(digits, axis=1) * part[items]
    taken = routes.take(items)
    sizes = np.minimum(part[items], taken.sizes - shift)
    return replace(taken, starts=taken.starts + shift, sizes=sizes)


def _part_sizes(sizes: IntArray, limit: int) -> IntArray:
    """The sizes of the parts into which boxes are cut; the last ones of a box may be smaller."""
    part = np.empty_like(sizes)
    left = np.full(len(sizes), limit, np.int64)
    for d in reversed(range(sizes.shape[1])):
        part[:, d] = np.minimum(sizes[:, d], left)
        left = np.maximum(1, left // np.maximum(1, part[:, d]))
    return part


def _assign_rounds(routes: Routes, step: int) -> Routes:
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
    sends = out * dst.cells.addends * dst.cells.replicas * most_cells(src)
    receives = into * terms * most_cells(dst)
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


def most_cells(layout: Layout) -> int:
    """The most pieces that a rank holds."""
    return int(np.unique(layout.table.ranks, return_counts=True)[1].max())


def count_rounds(routes: Routes, degree: int, itemsize: int, limit: int) -> int:
    """The number of rounds into which `split_in_rounds` would split these moves, which are sorted by edge."""
    per_message, most = _message_sizes(degree, itemsize, limit)
    if len(routes) == 0:
        return 0
    new = (np.diff(routes.src_ranks) != 0) | (np.diff(routes.dst_ranks) != 0)
    first = np.concatenate([[0], np.flatnonzero(new) + 1])
    last = np.append(first[1:], len(routes)) - 1
    sizes = routes.sizes[last]
    part = _part_sizes(sizes, most)
    before_last_part = np.add.reduceat(routes.elements(), first) - box_volumes(sizes - (-(-sizes // part) - 1) * part)
    return int(before_last_part.max()) // (per_message - most + 1) + 1


def _boxes_of_sizes(sizes: IntArray) -> Routes:
    """Moves of these sizes, each along an edge of its own."""
    column, zero = np.arange(len(sizes)), constant_column(0, len(sizes))
    return Routes(column, column, column, column, np.zeros_like(sizes), sizes, zero, zero)


def bound_rounds(outline: StepOutline, degree: int, itemsize: int, limit: int) -> int:
    """The same for a step whose moves are not listed; at most so many, if ranks hold several pieces."""
    boxes = _distinct_boxes(outline)
    rounds = count_rounds(boxes, degree, itemsize, limit)
    per_edge = most_cells(outline.src) * most_cells(outline.dst)
    if per_edge == 1 or rounds == 0:
        return rounds
    held = min(max(layout.elements_per_rank().values()) for layout in (outline.src, outline.dst))
    per_message, part = _message_sizes(degree, itemsize, limit)
    return min(per_edge * int(boxes.elements().max()), held) // (per_message - part + 1) + 1


def _distinct_boxes(outline: StepOutline) -> Routes:
    """Moves of the distinct sizes that boxes between ranks have; if these are very many, of the largest."""
    src, dst = outline.src, outline.dst
    assert src.cells is not None and dst.cells is not None
    lengths: list[IntArray] = []
    counts = np.full(1, int(outline.term_counts.sum()) * dst.cells.replicas)
    for a, b in zip(src.cells.dims, dst.cells.dims, strict=True):
        cuts = np.unique(np.concatenate([a.starts, a.starts + a.lengths, b.starts, b.starts + b.lengths]))
        length, count = np.unique(np.diff(cuts), return_counts=True)
        lengths.append(length)
        counts = np.multiply.outer(counts, count)
    if counts.size > _MOST_SIZES:
        return _boxes_of_sizes(np.array([[length.max() for length in lengths]]))
    sizes = np.stack([grid.reshape(-1) for grid in np.meshgrid(*lengths, indexing="ij")], axis=1)
    _, index, number = np.unique(
        np.concatenate([sizes, *_copied_sizes(outline)]), axis=0, return_index=True, return_counts=True
    )
    return _boxes_of_sizes(sizes[index[counts.reshape(-1)[index] > number - 1]])


def _copied_sizes(outline: StepOutline) -> list[IntArray]:
    """The sizes of the boxes that are copied within a rank."""
    src, dst = outline.src.table, outline.dst.table
    sizes = []
    for x, y, _ in overlapping_pairs(outline, src.ranks, dst.ranks):
        a, b = src.take(x), dst.take(y)
        sizes.append(np.minimum(a.offsets + a.sizes, b.offsets + b.sizes) - np.maximum(a.offsets, b.offsets))
    return sizes
