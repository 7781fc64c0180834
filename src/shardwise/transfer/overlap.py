"""Which boxes meet which? Vectorised intersections, no loop over pairs.

1. Boxes against a product of cuts: along each dim a box meets a run of cells; multiply the runs out. O(result).
2. Boxes against boxes: lay a grid over the tensor whose cells are about as large as the boxes, intersect both sides
   with it as in 1, join on the grid cell, and keep each pair in the one cell where its intersection begins. A few boxes
   are compared with each other directly.

Transfers, reads of a checkpoint, resharding and comparing all start from the `Overlaps` that are found here. Which
boxes are one run of memory, or long ones, is found here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.geometry.box import Box
from shardwise.geometry.layout import Cells, DimCuts, Layout, cuts_from_sizes
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import chunk_sizes

_FEW_PAIRS = 1 << 12


@dataclass(frozen=True, slots=True)
class BoxOverlap:
    """The region in which box number `box` meets cell number `cell`: where it is in the box, and where in the cell."""

    box: int
    cell: int
    here: Box
    there: Box


@dataclass(frozen=True, eq=False, slots=True)
class Overlaps:
    """Columns: box number `boxes[i]` meets cell number `cells[i]` in the region `starts[i]`, `sizes[i]`."""

    boxes: IntArray
    cells: IntArray
    starts: IntArray
    sizes: IntArray

    def take(self, rows: IntArray) -> Overlaps:
        return Overlaps(self.boxes[rows], self.cells[rows], self.starts[rows], self.sizes[rows])

    def swapped(self) -> Overlaps:
        """The same pairs seen from the other side, in order of the new boxes, then of the new cells."""
        order = np.lexsort((self.boxes, self.cells))
        return Overlaps(self.cells[order], self.boxes[order], self.starts[order], self.sizes[order])

    def regions(
        self,
        origins: IntArray,
        cell_origins: IntArray,
        names: IntArray | None = None,
        cell_names: IntArray | None = None,
    ) -> list[BoxOverlap]:
        """One by one, each counted from the origin of its box and of its cell; both may go by other numbers.

        >>> box, length, cells, lengths = (np.array(rows) for rows in ([[0]], [[3]], [[0], [2]], [[2], [2]]))
        >>> [str(met.there) for met in overlaps_with_boxes((4,), box, length, cells, lengths).regions(box, cells)]
        ['[0:2]', '[0:1]']
        """
        boxes = self.boxes if names is None else names[self.boxes]
        cells = self.cells if cell_names is None else cell_names[self.cells]
        here, there = self.starts - origins[self.boxes], self.starts - cell_origins[self.cells]
        return [
            BoxOverlap(box, cell, Box(tuple(h), tuple(s)), Box(tuple(t), tuple(s)))
            for box, cell, h, t, s in zip(*(c.tolist() for c in (boxes, cells, here, there, self.sizes)), strict=True)
        ]


def concatenate_overlaps(a: Overlaps, b: Overlaps) -> Overlaps:
    """Both lists, one after the other."""
    return Overlaps(
        np.concatenate([a.boxes, b.boxes]),
        np.concatenate([a.cells, b.cells]),
        np.concatenate([a.starts, b.starts]),
        np.concatenate([a.sizes, b.sizes]),
    )


def expand_runs(counts: Sequence[IntArray]) -> tuple[IntArray, list[IntArray]]:
    """Multiply out per-item runs: item i becomes prod_d counts[d][i] rows; returns the item and the digits of each row.

    >>> items, (rows, columns) = expand_runs([np.array([1, 2]), np.array([2, 1])])
    >>> items.tolist(), rows.tolist(), columns.tolist()
    ([0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 0])
    """
    total = np.ones(len(counts[0]), np.int64)
    for count in counts:
        total = total * count
    items = np.repeat(np.arange(len(total)), total)
    within = np.arange(len(items)) - np.repeat(np.cumsum(total) - total, total)
    digits: list[IntArray] = []
    for count in reversed(counts):
        if (count <= 1).all():
            digits.append(np.broadcast_to(np.int64(0), items.shape))
            continue
        within, digit = np.divmod(within, count[items])
        digits.append(digit)
    return items, digits[::-1]


def overlaps_with_cells(offsets: IntArray, sizes: IntArray, cells: Cells) -> Overlaps:
    """The cells that each box meets, in order of boxes, then of cells."""
    if len(cells.dims) == 0:
        boxes = np.arange(len(offsets))
        return Overlaps(boxes, np.zeros(len(offsets), np.int64), offsets, sizes)
    runs = [dim_runs(offsets[:, d], sizes[:, d], cut) for d, cut in enumerate(cells.dims)]
    boxes, digits = expand_runs([run[1] for run in runs])
    flat = boxes
    starts = np.empty((len(boxes), len(runs)), np.int64)
    lengths = np.empty_like(starts)
    for d, ((low, _, filled), digit, cut) in enumerate(zip(runs, digits, cells.dims, strict=True)):
        cell = np.take(filled, np.take(low, boxes) + digit)
        flat = flat * cut.count + cell if d else cell
        begin = np.maximum(np.take(offsets[:, d], boxes), np.take(cut.starts, cell))
        end = np.minimum(np.take(offsets[:, d] + sizes[:, d], boxes), np.take(cut.starts + cut.lengths, cell))
        starts[:, d] = begin
        np.subtract(end, begin, out=lengths[:, d])
    return Overlaps(boxes, flat, starts, lengths)


def run_lengths(offsets: IntArray, sizes: IntArray, cells: Cells) -> IntArray:
    """How many cells each box meets, without listing them.

    >>> from shardwise.geometry.layout import cuts_from_sizes
    >>> halves = Cells((cuts_from_sizes((2, 2)), cuts_from_sizes((3,))), np.zeros((2, 1, 1, 1), np.int64), None)
    >>> run_lengths(np.array([[0, 0], [2, 1]]), np.array([[4, 3], [1, 1]]), halves).tolist()
    [2, 1]
    """
    total = np.ones(len(offsets), np.int64)
    for d, cut in enumerate(cells.dims):
        total *= dim_runs(offsets[:, d], sizes[:, d], cut)[1]
    return total


def dim_runs(offsets: IntArray, sizes: IntArray, cut: DimCuts) -> tuple[IntArray, IntArray, IntArray]:
    """The first non-empty cell each interval meets, how many it meets, and the numbers of the non-empty cells."""
    filled = np.flatnonzero(cut.lengths)
    begins = cut.starts[filled]
    low = np.searchsorted(begins, offsets, side="right") - 1
    high = np.searchsorted(begins, offsets + sizes, side="left")
    return low, np.where(sizes > 0, high - low, 0), filled


def overlaps_with_boxes(
    shape: Sequence[int], offsets: IntArray, sizes: IntArray, cell_offsets: IntArray, cell_sizes: IntArray
) -> Overlaps:
    """The same against a list of boxes without a product form."""
    if len(offsets) * len(cell_offsets) <= _FEW_PAIRS:
        starts = np.maximum(offsets[:, None], cell_offsets)
        sizes = np.minimum((offsets + sizes)[:, None], cell_offsets + cell_sizes) - starts
        boxes, cells = np.nonzero((sizes > 0).all(axis=2))
        return Overlaps(boxes, cells, starts[boxes, cells], sizes[boxes, cells])
    bins = _bins(shape, np.concatenate([sizes, cell_sizes]))
    left = overlaps_with_cells(offsets, sizes, bins)
    right = overlaps_with_cells(cell_offsets, cell_sizes, bins)
    order = np.argsort(right.cells, kind="stable")
    low = np.searchsorted(right.cells[order], left.cells, side="left")
    high = np.searchsorted(right.cells[order], left.cells, side="right")
    pairs, (turn,) = expand_runs([high - low])
    matched = order[low[pairs] + turn]
    boxes, cells = left.boxes[pairs], right.boxes[matched]
    starts = np.maximum(offsets[boxes], cell_offsets[cells])
    ends = np.minimum(offsets[boxes] + sizes[boxes], cell_offsets[cells] + cell_sizes[cells])
    begins_here = (starts >= left.starts[pairs]) & (starts < left.starts[pairs] + left.sizes[pairs])
    keep = np.flatnonzero(((starts < ends) & begins_here).all(axis=1))
    keep = keep[np.lexsort((cells[keep], boxes[keep]))]
    return Overlaps(boxes[keep], cells[keep], starts[keep], (ends - starts)[keep])


def _bins(shape: Sequence[int], sizes: IntArray) -> Cells:
    """A grid whose cells are about as large as the boxes are on average."""
    means = np.maximum(sizes.mean(axis=0), 1.0) if len(sizes) else np.ones(len(shape))
    counts = [max(1, min(len(sizes), round(length / mean))) for length, mean in zip(shape, means, strict=True)]
    dims = tuple(cuts_from_sizes(chunk_sizes(length, n)) for length, n in zip(shape, counts, strict=True))
    return Cells(dims, np.zeros((*counts, 1, 1), np.int64), None)


def overlaps_with_layout(offsets: IntArray, sizes: IntArray, layout: Layout) -> Overlaps:
    """Which cells (distinct boxes) of a layout each of these boxes meets."""
    if layout.cells is not None:
        return overlaps_with_cells(offsets, sizes, layout.cells)
    table = layout.table
    first = np.unique(table.cells, return_index=True)[1]
    return overlaps_with_boxes(layout.shape, offsets, sizes, table.offsets[first], table.sizes[first])


def are_long_runs(layout: Layout, rows: IntArray, sizes: IntArray, least: int) -> npt.NDArray[np.bool_]:
    """Whether boxes of these sizes are each one run of memory in the local tensor of a table's row.

    Or, unless `least` is 0, of runs of at least so many elements.
    """
    table = layout.table
    _, tensor = np.unique(np.stack([table.ranks, table.slots], axis=1), axis=0, return_inverse=True)
    tensor = tensor.reshape(-1)
    shapes = np.zeros((int(tensor.max(initial=-1)) + 1, table.sizes.shape[1]), np.int64)
    np.maximum.at(shapes, tensor, table.local_offsets + table.sizes)
    run = np.ones(len(sizes), np.int64)
    going_on = np.ones(len(sizes), bool)
    for dim in reversed(range(sizes.shape[1])):
        run[going_on] *= sizes[going_on, dim]
        going_on &= sizes[:, dim] == shapes[tensor[rows], dim]
    are_long: npt.NDArray[np.bool_] = (run == sizes.prod(axis=1)) | ((run >= least) & (least > 0))
    return are_long
