"""Where are pending reductions done? On ranks that hold an addend and, if there is one, need the result.

Each region is reduced on one rank, which receives the other addends; then the result goes to whoever else needs it.
Regions that several ranks could reduce are cut in even parts, so that all take their share (an all-reduce becomes a
reduce-scatter and an all-gather). This moves addends - 1 messages per element, and then only what is needed: the
lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.specs import EnumerableSpec
from shardwise.geometry.splits import bounds, chunk_sizes
from shardwise.transfer.choose import owners_of
from shardwise.transfer.intersect import Overlaps, overlaps_with_layout


def has_replicas(layout: Layout) -> bool:
    """Whether some box of the layout is held by several ranks with the same values."""
    return bool((owners_of(layout).counts > 1).any())


def regions(src: Layout, dst: Layout) -> tuple[Overlaps, IntArray]:
    """The regions where destination cells meet source cells, and the first table row of each destination cell."""
    first = np.unique(dst.table.cells, return_index=True)[1]
    return overlaps_with_layout(dst.table.offsets[first], dst.table.sizes[first], src), first


def reducing_layout(src: Layout, dst: Layout) -> Layout:
    """The layout in which each region lies on the ranks that reduce it."""
    found, first = regions(src, dst)
    offsets, sizes, ranks = [], [], []
    for row, start, size in zip(range(len(found.boxes)), found.starts, found.sizes, strict=True):
        reducers = _reducers(src, dst, int(found.cells[row]), int(dst.table.cells[first[found.boxes[row]]]))
        for rank, begin, extent in _shares(start, size, reducers):
            offsets.append(begin)
            sizes.append(extent)
            ranks.append(rank)
    columns = (len(ranks), src.ndim)
    return EnumerableSpec.from_arrays(
        np.array(offsets, np.int64).reshape(columns),
        np.array(sizes, np.int64).reshape(columns),
        np.array(ranks, np.int64),
    ).layout(src.shape)


def _holders(layout: Layout, cell: int, addend: int | None) -> IntArray:
    """The ranks that hold a cell: any addend of it, or one."""
    if layout.cells is None:
        return np.unique(layout.table.ranks[layout.table.cells == cell])
    owners = layout.cells.owners.reshape(-1, layout.cells.addends, layout.cells.replicas)[cell]
    return np.unique(owners if addend is None else owners[addend])


def _reducers(src: Layout, dst: Layout, src_cell: int, dst_cell: int) -> IntArray:
    holders = _holders(src, src_cell, None)
    wanted = np.intersect1d(holders, _holders(dst, dst_cell, 0), assume_unique=True)
    return wanted if len(wanted) else holders


def _shares(start: IntArray, size: IntArray, ranks: IntArray) -> Iterator[tuple[int, list[int], list[int]]]:
    """Cut a region in even parts along the first dim that is long enough, else along the longest."""
    if len(size) == 0 or len(ranks) == 1:
        yield int(ranks[0]), start.tolist(), size.tolist()
        return
    long_enough = np.flatnonzero(size >= len(ranks))
    dim = int(long_enough[0]) if len(long_enough) else int(size.argmax())
    cuts = chunk_sizes(int(size[dim]), len(ranks))
    for rank, offset, length in zip(ranks.tolist(), bounds(cuts), cuts, strict=False):
        if length:
            begin, extent = start.copy(), size.copy()
            begin[dim] += offset
            extent[dim] = length
            yield rank, begin.tolist(), extent.tolist()


def reduction_lower_bound(src: Layout, dst: Layout) -> int:
    """The fewest elements that must move to resolve what is pending in `src` into `dst`.

    For each element: one message less than it has addends, and one for each rank that needs the result, less one if
    such a rank holds an addend.
    """
    found, first = regions(src, dst)
    addends = 1 if src.cells is None else src.cells.addends
    total = 0
    for row, size in zip(range(len(found.boxes)), found.sizes, strict=True):
        needing = _holders(dst, int(dst.table.cells[first[found.boxes[row]]]), 0)
        meets = len(np.intersect1d(_holders(src, int(found.cells[row]), None), needing)) > 0
        total += int(size.prod()) * (addends - 1 + len(needing) - meets)
    return total
