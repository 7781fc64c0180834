"""Where are pending reductions computed, if their results go to several ranks?

On ranks that have an addend and, if there is one, need the result. Each region, where a source cell meets a destination
cell, is reduced on one rank, which receives the other addends; then the result goes to whoever else needs it. Regions
that several ranks could reduce are cut in even parts, so that all take their share (an all-reduce becomes a
reduce-scatter and an all-gather). This moves addends - 1 messages per element, and then only what is needed: the lower
bound.

Where this makes too many parts, whole regions are dealt to the ranks in turn, and cut only if a source cell has
fewer regions than ranks that could reduce them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import bounds, chunk_sizes
from shardwise.geometry.specs import EnumerableSpec, GridSpec
from shardwise.transfer.choose import index_owners
from shardwise.transfer.intersect import Overlaps, overlaps_with_layout
from shardwise.transfer.routes import box_volumes
from shardwise.transfer.totals import StepOutline, count_addends, overlapping_pairs

CUT_REGIONS = 1 << 15  # more parts than these are not made by cutting every region for all that could reduce it
IRREGULAR_PARTS = 1 << 13  # nor more than these, if they make no grid: only regular layouts have plans without a list


def has_replicas(layout: Layout) -> bool:
    """Whether some box of the layout is held by several ranks with the same values."""
    return bool((index_owners(layout).counts > 1).any())


def overlap_regions(src: Layout, dst: Layout) -> tuple[Overlaps, IntArray]:
    """The regions where destination cells meet source cells, and the first table row of each destination cell."""
    first = np.unique(dst.table.cells, return_index=True)[1]
    return overlaps_with_layout(dst.table.offsets[first], dst.table.sizes[first], src), first


def reduction_layout(src: Layout, dst: Layout) -> Layout:
    """The layout in which each region is on the ranks that reduce it: a grid where the regions make one."""
    found, first = overlap_regions(src, dst)
    parts = 0  # of regular layouts
    if src.cells is not None and dst.cells is not None:
        parts = len(found.cells) * src.cells.addends * src.cells.replicas
    if parts > CUT_REGIONS:
        return deal_regions(src, dst, found).layout(src.shape)
    needing = {box: _holders(dst, int(dst.table.cells[first[box]]), 0) for box in set(found.boxes.tolist())}
    reducers = [
        _reducers(src, cell, needing[box]) for cell, box in zip(found.cells.tolist(), found.boxes.tolist(), strict=True)
    ]
    grid = _grid_of_regions(found.starts, found.sizes, reducers)
    if grid is None and parts > IRREGULAR_PARTS:
        grid = deal_regions(src, dst, found)
    if grid is not None:
        return grid.layout(src.shape)
    offsets, sizes, ranks = [], [], []
    for start, size, members in zip(found.starts, found.sizes, reducers, strict=True):
        for rank, begin, extent in _split_region(start, size, members):
            offsets.append(begin)
            sizes.append(extent)
            ranks.append(rank)
    columns = (len(ranks), src.ndim)
    return EnumerableSpec.from_arrays(
        np.array(offsets, np.int64).reshape(columns),
        np.array(sizes, np.int64).reshape(columns),
        np.array(ranks, np.int64),
    ).layout(src.shape)


def deal_regions(src: Layout, dst: Layout, found: Overlaps) -> GridSpec:
    """The regions of two regular layouts as a grid, each region, or the same number of parts of each, on one rank."""
    assert src.cells is not None
    holders = src.cells.addends * src.cells.replicas
    common = _ranks_in_both(src, dst, found)
    count = np.diff(common.starts)
    able = np.where(count > 0, count, holders)
    turn, regions = _turns_within(found.cells)
    parts, dim = _common_parts(found.sizes, int((-(-able // regions)).min()) if len(able) else 1)
    owners = []
    for part in range(parts):
        place = (turn * parts + part) % able
        own = np.take(common.ranks, np.take(common.starts, np.arange(len(able))) + place, mode="clip")
        owners.append(np.where(count > 0, own, src.table.ranks[found.cells * holders + place]))
    at = [np.unique(found.starts[:, d], return_index=True)[1] for d in range(src.ndim)]
    splits = [found.sizes[rows, d].tolist() for d, rows in enumerate(at)]
    table = np.stack(owners, axis=1)[np.lexsort(found.starts.T[::-1])].reshape(*map(len, splits), parts)
    splits[dim] = [length for whole in splits[dim] for length in chunk_sizes(whole, parts)]
    return GridSpec(splits, np.moveaxis(table, -1, dim + 1).reshape([len(split) for split in splits]))


def _turns_within(cells: IntArray) -> tuple[IntArray, IntArray]:
    """For each region its turn among those of the same source cell, and how many there are."""
    order = np.argsort(cells, kind="stable")
    first = np.searchsorted(cells[order], cells, side="left")
    turn = np.empty_like(cells)
    turn[order] = np.arange(len(cells))
    return turn - first, np.searchsorted(cells[order], cells, side="right") - first


def _common_parts(sizes: IntArray, wanted: int) -> tuple[int, int]:
    """The parts in which every region can be cut, at most as many as wanted, and the dim that has the most."""
    found = [min(_count_parts(n, wanted) for n in np.unique(sizes[:, d]).tolist()) for d in range(sizes.shape[1])]
    parts = max(found, default=0)
    return (parts, found.index(parts)) if parts > 1 else (1, 0)


class _RanksOfRegions(NamedTuple):
    """The ranks of region i are ranks[starts[i]:starts[i + 1]]."""

    ranks: IntArray
    starts: IntArray


def _ranks_in_both(src: Layout, dst: Layout, found: Overlaps) -> _RanksOfRegions:
    """For each region the ranks that hold an addend of it and need the result."""
    every = StepOutline(src, dst, [range(count_addends(src))], None, (1, 1))
    width = int(src.table.cells.max(initial=0)) + 1
    regions = found.boxes * width + found.cells
    order = np.argsort(regions, kind="stable")
    at, ranks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for a, b, _ in overlapping_pairs(every, src.table.ranks, dst.table.ranks):
        at.append(order[np.searchsorted(regions[order], dst.table.cells[b] * width + src.table.cells[a])])
        ranks.append(dst.table.ranks[b])
    pairs = np.unique(np.stack([np.concatenate(at), np.concatenate(ranks)], axis=1), axis=0)
    starts = np.searchsorted(pairs[:, 0], np.arange(len(regions) + 1))
    return _RanksOfRegions(pairs[:, 1], starts)


def _grid_of_regions(starts: IntArray, sizes: IntArray, reducers: Sequence[IntArray]) -> GridSpec | None:
    """The regions, each cut for its reducers, as a grid; None if they are cut in different numbers or dims."""
    count = len(reducers[0]) if reducers else 0
    if not count or starts.shape[1] == 0 or any(len(members) != count for members in reducers):
        return None
    at = [np.unique(starts[:, d], return_index=True) for d in range(starts.shape[1])]
    dims = {_split_dim(size, count) for size in np.unique(sizes, axis=0)}
    if math.prod(len(begins) for begins, _ in at) != len(starts) or len(dims) > 1:
        return None
    (dim,) = dims
    splits = [sizes[rows, d].tolist() for d, (_, rows) in enumerate(at)]
    cut = [chunk_sizes(length, count) for length in splits[dim]]
    if min(map(min, cut)) == 0:
        return None
    order = np.lexsort(starts.T[::-1])
    owners = np.array(reducers)[order].reshape(*(len(begins) for begins, _ in at), count)
    splits[dim] = [length for part in cut for length in part]
    return GridSpec(splits, np.moveaxis(owners, -1, dim + 1).reshape([len(split) for split in splits]))


def _split_dim(size: IntArray, count: int) -> int:
    """The dim along which a region is cut for so many ranks: the first that has a part for each, else the longest."""
    enough = [d for d, length in enumerate(size.tolist()) if _count_parts(length, count) == count]
    return enough[0] if enough else int(size.argmax())


def _count_parts(length: int, wanted: int) -> int:
    """How many parts have elements if a length is cut for `wanted` ranks.

    >>> _count_parts(4000, 2048)
    2000
    """
    return -(-length // -(-length // wanted)) if length else 0


def _holders(layout: Layout, cell: int, addend: int | None) -> IntArray:
    """The ranks that hold a cell: any addend of it, or one."""
    if layout.cells is None:
        return np.unique(layout.table.ranks[layout.table.cells == cell])
    owners = layout.cells.owners.reshape(-1, layout.cells.addends, layout.cells.replicas)[cell]
    return np.unique(owners if addend is None else owners[addend])


def _reducers(src: Layout, src_cell: int, needing: IntArray) -> IntArray:
    """The ranks that reduce a region: those that hold an addend and need the result, else all that hold one."""
    holders = _holders(src, src_cell, None)
    place = np.minimum(np.searchsorted(needing, holders), len(needing) - 1)
    wanted = holders[needing[place] == holders] if len(needing) else needing
    return wanted if len(wanted) else holders


def _split_region(start: IntArray, size: IntArray, ranks: IntArray) -> Iterator[tuple[int, list[int], list[int]]]:
    """Cut a region in even parts."""
    if len(size) == 0 or len(ranks) == 1:
        yield int(ranks[0]), start.tolist(), size.tolist()
        return
    dim = _split_dim(size, len(ranks))
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
    needing = dst.table.take(np.flatnonzero(dst.table.addends == 0))
    volumes, addends = box_volumes(needing.sizes), count_addends(src)
    _, first = np.unique(needing.cells, return_index=True)
    total = int(volumes[first].sum()) * (addends - 1) + int(volumes.sum())
    return total - _elements_that_meet(src, dst)


def _elements_that_meet(src: Layout, dst: Layout) -> int:
    """The elements of which a rank that needs the result holds an addend, each once."""
    every = StepOutline(src, dst, [range(count_addends(src))], None, (1, 1))
    width = int(src.table.cells.max(initial=0)) + 1
    met: dict[int, int] = {}
    for a, b, volumes in overlapping_pairs(every, src.table.ranks, dst.table.ranks):
        regions, first = np.unique(dst.table.cells[b] * width + src.table.cells[a], return_index=True)
        met.update(zip(regions.tolist(), volumes[first].tolist(), strict=True))
    return sum(met.values())
