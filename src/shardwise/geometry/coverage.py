"""Do these boxes cover the tensor exactly once? An exact answer in O(n log n), for any number of dims.

Write +1 or -1 at each corner of each box (the sign alternates from corner to neighbouring corner). The signs at all
corners of all boxes together determine how often each point is covered, and determine it uniquely. So:

1. the boxes tile the tensor exactly if, and only if, their summed corner signs equal those of the whole tensor;
2. if not, the difference at the first corner (in row-major order) where the sums differ is the error there: at that
   very point the boxes cover once too often, or not at all;
3. one pass over the boxes then names the two that overlap there, or the largest uncovered box that starts there.

Dims that no box cuts are left out, so the cost is n * 2^(cut dims) * log n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwise.geometry.box import Box
from shardwise.geometry.errors import LayoutError
from shardwise.geometry.mesh import IntArray

_KEY_LIMIT = 2**62


def check_coverage(
    shape: Sequence[int], offsets: IntArray, sizes: IntArray, describe: Callable[[int], str], what: str = "pieces"
) -> None:
    """Raise a LayoutError that names the culprits unless the boxes tile a tensor of this shape exactly.

    >>> check_coverage((4,), np.array([[0], [1]]), np.array([[2], [3]]), lambda i: f"piece {i}")
    Traceback (most recent call last):
    ...
    shardwise.geometry.errors.LayoutError: pieces of a tensor of shape (4,) overlap in [1:2]: piece 0 and piece 1
    """
    _check_bounds(shape, offsets, sizes, describe)
    point = first_miscovered_point(shape, offsets, sizes)
    if point is None:
        return
    inside = np.flatnonzero(((offsets <= point) & (point < offsets + sizes)).all(axis=1))
    if len(inside) > 1:
        a, b = int(inside[0]), int(inside[1])
        shared = Box(offsets[a], sizes[a]).intersect(Box(offsets[b], sizes[b]))
        raise LayoutError(
            f"{what} of a tensor of shape {tuple(shape)} overlap in {shared}: {describe(a)} and {describe(b)}"
        )
    gap = _uncovered_box(shape, offsets, sizes, point)
    raise LayoutError(f"no piece covers {gap} of a tensor of shape {tuple(shape)}; add one, or enlarge its neighbour")


def _check_bounds(shape: Sequence[int], offsets: IntArray, sizes: IntArray, describe: Callable[[int], str]) -> None:
    if offsets.shape[1] != len(shape):
        raise LayoutError(
            f"{describe(0)} has {offsets.shape[1]} dims; the tensor's shape {tuple(shape)} has {len(shape)}"
        )
    bad = np.flatnonzero(((offsets < 0) | (sizes < 0) | (offsets + sizes > np.asarray(shape, np.int64))).any(axis=1))
    if len(bad):
        raise LayoutError(f"{describe(int(bad[0]))} is outside the tensor's shape {tuple(shape)}")


def first_miscovered_point(shape: Sequence[int], offsets: IntArray, sizes: IntArray) -> IntArray | None:
    """The first point, in row-major order, that the boxes do not cover exactly once; None if there is none.

    >>> first_miscovered_point((4, 2), np.array([[0, 0]]), np.array([[3, 2]])).tolist()
    [3, 0]
    """
    limits = np.asarray(shape, np.int64)
    if not (limits > 0).all():
        return None
    filled = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[filled], sizes[filled]
    cut = np.flatnonzero(((offsets != 0) | (sizes != limits)).any(axis=0)) if len(offsets) else np.arange(len(shape))
    starts = np.concatenate([offsets[:, cut], np.zeros((1, len(cut)), np.int64)])
    ends = np.concatenate([(offsets + sizes)[:, cut], limits[None, cut]])
    weights = np.ones(len(starts), np.int64)
    weights[-1] = -1
    corner = _first_nonzero_corner(starts, ends, weights)
    if corner is None:
        return None
    point = np.zeros(len(shape), np.int64)
    point[cut] = corner
    return point


def _first_nonzero_corner(starts: IntArray, ends: IntArray, weights: IntArray) -> IntArray | None:
    """The first corner at which the signed, weighted corner counts do not cancel."""
    grids, low, high = _compress(starts, ends)
    keys, signs = np.zeros((1, len(starts)), np.int64), weights[None, :]
    for d, grid in enumerate(grids):
        if int(keys.max()) >= _KEY_LIMIT // len(grid):
            keys = np.unique(keys, return_inverse=True)[1].reshape(keys.shape)
        keys = keys * len(grid)
        keys, signs = np.concatenate([keys + low[:, d], keys + high[:, d]]), np.concatenate([signs, -signs])
    order = np.argsort(keys, axis=None)
    flat_keys, flat_signs = keys.reshape(-1)[order], signs.reshape(-1)[order]
    first = np.flatnonzero(np.concatenate([[True], flat_keys[1:] != flat_keys[:-1]]))
    sums = np.add.reduceat(flat_signs, first)
    wrong = np.flatnonzero(sums)
    if len(wrong) == 0:
        return None
    corner, box = divmod(int(order[first[wrong[0]]]), len(starts))
    return np.array([(ends if corner >> d & 1 else starts)[box, d] for d in range(len(grids))], np.int64)


def _compress(starts: IntArray, ends: IntArray) -> tuple[list[IntArray], IntArray, IntArray]:
    """Replace coordinates by their rank among the distinct ones, so that a corner fits in one int64."""
    grids, low, high = [], [], []
    for d in range(starts.shape[1]):
        grid, inverse = np.unique(np.concatenate([starts[:, d], ends[:, d]]), return_inverse=True)
        grids.append(grid)
        low.append(inverse[: len(starts)])
        high.append(inverse[len(starts) :])
    if not grids:
        empty = np.zeros((len(starts), 0), np.int64)
        return [], empty, empty
    return grids, np.stack(low, axis=1), np.stack(high, axis=1)


def _uncovered_box(shape: Sequence[int], offsets: IntArray, sizes: IntArray, point: IntArray) -> Box:
    """The box that starts at an uncovered point, grown along each dim, last dim first, until it meets a piece."""
    start, end = point.copy(), point + 1
    for d in reversed(range(len(shape))):
        others = [i for i in range(len(shape)) if i != d]
        meets = ((offsets[:, others] < end[others]) & (start[others] < (offsets + sizes)[:, others])).all(axis=1)
        ahead = offsets[meets & (offsets[:, d] > point[d]) & (sizes > 0).all(axis=1), d]
        end[d] = ahead.min() if len(ahead) else shape[d]
    return Box(tuple(start.tolist()), tuple((end - start).tolist()))
