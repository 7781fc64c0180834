"""Do these shards tile the tensor? torch's two questions, answered in O(n log n) by the layout's own check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from shardwise.geometry.coverage import first_miscovered_point
from shardwise.geometry.mesh import IntArray
from shardwise.tensor.shards import ShardMetadata

Columns: TypeAlias = tuple[IntArray, IntArray]


def columns_of(shards: Sequence[ShardMetadata], shape: Sequence[int] | None = None) -> Columns:
    """Return offsets and sizes as arrays of shape (shards, ndim); offsets of empty shards are kept inside `shape`.

    >>> offsets, sizes = columns_of([ShardMetadata([0], [2]), ShardMetadata([4], [0])], shape=(2,))
    >>> offsets.tolist(), sizes.tolist()
    ([[0], [2]], [[2], [0]])
    """
    rows = (len(shards), len(shards[0].shard_sizes) if shards else 0)
    offsets = np.array([s.shard_offsets for s in shards], np.int64).reshape(rows)
    sizes = np.array([s.shard_sizes for s in shards], np.int64).reshape(rows)
    if shape is not None and len(shape) == rows[1]:
        empty = (sizes == 0).any(axis=1, keepdims=True)
        offsets = np.where(empty, np.minimum(offsets, np.asarray(shape, np.int64) - sizes), offsets)
    return offsets, sizes


def check_same_ndim(shards: Sequence[ShardMetadata]) -> None:
    """Raise unless all shards have the same number of dims."""
    ndims = [len(shard.shard_offsets) for shard in shards]
    for ndim in ndims:
        if ndim != ndims[0]:
            raise ValueError(
                f"Found inconsistent ranks for shards: {ndims[0]} and {ndim} dims; shards of one tensor have the same"
            )


def pair_overlaps(shard1: ShardMetadata, shard2: ShardMetadata) -> bool:
    """Return whether two shards share an element.

    >>> pair_overlaps(ShardMetadata([0], [3]), ShardMetadata([2], [2]))
    True
    """
    starts = map(max, shard1.shard_offsets, shard2.shard_offsets)
    ends = map(min, _ends(shard1), _ends(shard2))
    return all(start < end for start, end in zip(starts, ends, strict=True))


def _ends(shard: ShardMetadata) -> list[int]:
    return [offset + size for offset, size in zip(shard.shard_offsets, shard.shard_sizes, strict=True)]


def check_no_overlap(shards: Sequence[ShardMetadata]) -> None:
    """Raise a ValueError that names two shards if any two share an element; gaps are allowed.

    >>> check_no_overlap([ShardMetadata([0], [3]), ShardMetadata([2], [2])])
    Traceback (most recent call last):
    ...
    ValueError: Shards ShardMetadata(shard_offsets=[0], ...) and ShardMetadata(shard_offsets=[2], ...) overlap
    """
    pair = find_overlap(*columns_of(shards)) if len(shards) > 1 else None
    if pair is not None:
        raise ValueError(f"Shards {shards[pair[0]]} and {shards[pair[1]]} overlap")


def find_overlap(offsets: IntArray, sizes: IntArray) -> tuple[int, int] | None:
    """Return two boxes that share an element, or None.

    Boxes one after another along a dim, and boxes that tile their hull, as those of a tensor do, are seen to be free of
    overlaps at once. Otherwise a sweep along a dim compares each box with those that are open when it starts.
    """
    filled = np.flatnonzero((sizes > 0).all(axis=1))
    if len(filled) < 2:
        return None
    starts, ends = offsets[filled], (offsets + sizes)[filled]
    if any(_is_disjoint_in_order(starts[:, d], ends[:, d]) for d in range(starts.shape[1])):
        return None
    low, hull = starts.min(axis=0), ends.max(axis=0) - starts.min(axis=0)
    point = first_miscovered_point(hull.tolist(), starts - low, sizes[filled])
    if point is None:
        return None
    here = np.flatnonzero(((starts - low <= point) & (point < ends - low)).all(axis=1))
    found = (here[0], here[1]) if len(here) > 1 else _sweep(starts, ends)
    return None if found is None else (int(filled[found[0]]), int(filled[found[1]]))


def _is_disjoint_in_order(starts: IntArray, ends: IntArray) -> bool:
    order = np.argsort(starts)
    return bool((ends[order[:-1]] <= starts[order[1:]]).all())


def _sweep(starts: IntArray, ends: IntArray) -> tuple[int, int] | None:
    """Compare each box with the ones still open at its start, all at once in NumPy, in order of the starts."""
    axis = int(np.argmax([len(np.unique(starts[:, d])) for d in range(starts.shape[1])]))
    order = np.argsort(starts[:, axis], kind="stable")
    live = np.empty(0, np.int64)
    for row in order:
        live = live[ends[live, axis] > starts[row, axis]]
        meets = ((starts[live] < ends[row]) & (starts[row] < ends[live])).all(axis=1)
        if meets.any():
            return int(live[np.argmax(meets)]), int(row)
        live = np.append(live, row)
    return None


def check_tiles(shards_metadata: Sequence[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Raise a ValueError unless shards that do not overlap are inside a tensor of this shape and cover all of it.

    >>> check_tiles([ShardMetadata([0], [3])], (4,))
    Traceback (most recent call last):
    ...
    ValueError: Total volume of shards: 3 does not match tensor volume: 4, in other words all the individual shards ...
    """
    shards, shape = shards_metadata, tensor_dims
    check_same_ndim(shards)
    offsets, sizes = columns_of(shards, shape)
    if not shards or offsets.shape[1] != len(shape):
        raise ValueError(f"Rank of tensor is {len(shape)}, but shards rank is {offsets.shape[1]}")
    outside = np.argwhere(offsets + sizes > np.asarray(shape, np.int64))
    if len(outside):
        row, dim = outside[0].tolist()
        raise ValueError(
            f"Shard offset {offsets[row, dim]} and length {sizes[row, dim]} exceeds tensor dim: {shape[dim]} "
            f"for shard {shards[row]}"
        )
    _check_volume(sizes, shape)


def _check_volume(sizes: IntArray, shape: Sequence[int]) -> None:
    total, whole = sum(math.prod(row) for row in sizes.tolist()), math.prod(shape)
    if total != whole:
        raise ValueError(
            f"Total volume of shards: {total} does not match tensor volume: {whole}, in other words "
            "all the individual shards do not cover the entire tensor"
        )
