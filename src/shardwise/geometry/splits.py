"""How is one dim cut? All arithmetic on 1-D splits, shared by every spec.

A part is a tuple of intervals `(start, stop)`, in the order in which they lie in the holder's local tensor. Splitting a
part among n ranks:

1. cut the part at group boundaries, if the placement declares groups;
2. share out each group's rows: as torch.chunk does, by given sizes, or block by block;
3. a rank's new part is the concatenation of what it got from each group, without empty intervals unless all are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from shardwise.geometry.errors import LayoutError
from shardwise.geometry.placements import Shard

Interval: TypeAlias = tuple[int, int]
Part: TypeAlias = tuple[Interval, ...]


def chunk_sizes(length: int, count: int) -> tuple[int, ...]:
    """The lengths that `torch.chunk` gives, with zeros for the chunks it leaves out.

    >>> chunk_sizes(10, 4), chunk_sizes(5, 4), chunk_sizes(2, 4)
    ((3, 3, 3, 1), (2, 2, 1, 0), (1, 1, 0, 0))
    """
    step = -(-length // count)
    return tuple(min(step, max(0, length - i * step)) for i in range(count))


def bounds(sizes: Sequence[int]) -> list[int]:
    """Where the parts of these sizes begin and end: `[0, s0, s0+s1, ...]`."""
    return list(accumulate(sizes, initial=0))


def split_part(part: Part, shard: Shard, count: int, axis: str) -> list[Part]:
    """Split what one rank holds of a dim among the `count` ranks of an axis.

    >>> split_part(((0, 10),), Shard(0), 4, "tp")
    [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]
    >>> split_part(((0, 8),), Shard(0, groups=(4, 2, 2)), 2, "tp")
    [((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8))]
    >>> split_part(((0, 8),), Shard(0, block=2), 2, "tp")
    [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    """
    parts: list[list[Interval]] = [[] for _ in range(count)]
    for group in _cut_at_groups(part, shard):
        for index, start, stop in _share_out(_length(group), shard, count, axis):
            parts[index].extend(_rows(group, start, stop))
    return [_tidy(p, part) for p in parts]


def _length(part: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in part)


def _cut_at_groups(part: Part, shard: Shard) -> list[Part]:
    if shard.groups is None:
        return [part]
    edges = bounds(shard.groups)
    cut = [tuple((max(a, s), min(b, e)) for s, e in part if max(a, s) < min(b, e)) for a, b in pairwise(edges)]
    return [c for c in cut if c]


def _share_out(length: int, shard: Shard, count: int, axis: str) -> list[tuple[int, int, int]]:
    """(rank index, first row, last row + 1) of every run of rows, in order."""
    if shard.block is not None:
        starts = range(0, length, shard.block)
        return [(i % count, s, min(s + shard.block, length)) for i, s in enumerate(starts)]
    sizes = chunk_sizes(length, count) if shard.sizes is None else shard.sizes
    if len(sizes) != count or sum(sizes) != length:
        raise LayoutError(
            f"dim {shard.dim} of length {length} is split in sizes {sizes} over axis {axis!r} of {count} ranks; "
            f"give {count} sizes that add up to {length}"
        )
    edges = bounds(sizes)
    return [(i, edges[i], edges[i + 1]) for i in range(count)]


def _rows(part: Part, start: int, stop: int) -> list[Interval]:
    """Rows `start` to `stop` of the concatenation of a part's intervals; an empty range gives an empty interval."""
    if len(part) == 1:
        return [(part[0][0] + start, part[0][0] + stop)]
    rows: list[Interval] = []
    position = 0
    for first, last in part:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            rows.append((first + low - position, first + high - position))
        position += last - first
    return rows


def _tidy(intervals: list[Interval], whole: Part) -> Part:
    """Join intervals that touch, drop empty ones, but keep one so that every rank holds something."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    if joined:
        return tuple(joined)
    at = intervals[0][0] if intervals else (whole[-1][1] if whole else 0)
    return ((at, at),)
