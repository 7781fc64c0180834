"""Which parts of which stored boxes does a rank need, and in which steps are they read? Pure arithmetic.

1. A `Read` takes a region of a stored box to a region of a local tensor.
2. A `Step` is as much of a read as one call of the system brings: rows with small gaps between them are read with the
   gaps, since that costs less than a call for each; rows far apart are read one by one.
3. Short rows far apart (a narrow column of a wide tensor) are no steps: they are copied out of the mapped file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import EllipsisType

from shardwise.checkpoint.index import Cut, TensorEntry
from shardwise.geometry import Box, Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.intersect import overlaps_with_boxes

GAP_BYTES = 16 << 10
LONG_ROW_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Read:
    """A region `there` of stored box number `box`, to go to the region `here` of local tensor number `slot`."""

    box: int
    there: Box
    slot: int
    here: Box


@dataclass(frozen=True, slots=True)
class Step:
    """`span` bytes from byte `start` of a stored box on; as an array of `sizes` and `strides` they go to `here`."""

    box: int
    start: int
    span: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    slot: int
    here: tuple[slice | EllipsisType, ...]


def reads_for(cut: Cut, layout: Layout, rank: int) -> list[Read]:
    """What a rank reads to fill its local tensors of a layout: every element once."""
    own = layout.table.take(layout.rows_of(rank))
    return reads_of_boxes(cut, own.offsets, own.sizes, own.slots, own.local_offsets)


def reads_of_boxes(cut: Cut, offsets: IntArray, sizes: IntArray, slots: IntArray, local: IntArray) -> list[Read]:
    """What is read to fill boxes of the tensor, each of which lies at `local` in local tensor number `slots`."""
    if not len(cut) or not len(offsets):
        return []
    found = overlaps_with_boxes(cut.shape, offsets, sizes, cut.offsets, cut.sizes)
    there = found.starts - cut.offsets[found.cells]
    here = found.starts - offsets[found.boxes] + local[found.boxes]
    columns = (found.cells, there, slots[found.boxes], here, found.sizes)
    return [
        Read(box, Box(tuple(t), tuple(s)), slot, Box(tuple(h), tuple(s)))
        for box, t, slot, h, s in zip(*(c.tolist() for c in columns), strict=True)
    ]


def blocks_of(read: Read, tensor: TensorEntry, block_bytes: int) -> tuple[int, int]:
    """The first block that a read touches, and the one after the last."""
    sizes, _ = tensor.cut.extents[read.box]
    first = last = 0
    for size, offset, length in zip(sizes, read.there.offsets, read.there.sizes, strict=True):
        first, last = first * size + offset, last * size + offset + length - 1
    itemsize = tensor.dtype.itemsize
    return first * itemsize // block_bytes, ((last + 1) * itemsize - 1) // block_bytes + 1


def steps_of(read: Read, stored: Sequence[int], itemsize: int, window_bytes: int) -> list[Step] | None:
    """The steps of a read of a box of sizes `stored`, none longer than the window; None for short rows far apart.

    >>> read = Read(0, Box((0, 2), (3, 2)), 0, Box((0, 0), (3, 2)))
    >>> [(step.start, step.span) for step in steps_of(read, (3, 4), 4, 1 << 20)]
    [(8, 40)]
    >>> [(step.start, step.span, step.sizes) for step in steps_of(read, (3, 4), 4, 30)]
    [(8, 24, (2, 2)), (40, 8, (1, 2))]
    >>> steps_of(Read(0, Box((0, 0), (3, 2)), 0, Box((0, 0), (3, 2))), (3, 1 << 20), 4, 1 << 20) is None
    True
    """
    sizes, ndim = read.there.sizes, read.there.ndim
    if 0 in sizes:
        return []
    strides, rows = [itemsize] * ndim, [itemsize] * (ndim + 1)
    for dim in range(ndim - 1, -1, -1):
        strides[dim] = strides[dim + 1] * stored[dim + 1] if dim + 1 < ndim else itemsize
        rows[dim] = (sizes[dim] - 1) * strides[dim] + rows[dim + 1]
    far = [d for d in range(ndim) if sizes[d] > 1 and strides[d] - rows[d + 1] > GAP_BYTES]
    if any(rows[d + 1] < LONG_ROW_BYTES for d in far):
        return None
    return list(_cut_up(read, tuple(strides), rows, max(far, default=0), window_bytes))


def _cut_up(read: Read, strides: tuple[int, ...], rows: Sequence[int], dim: int, window_bytes: int) -> Iterator[Step]:
    """Steps of some indices of one dim and single indices of the dims before it; `rows[d]` is the span of dims d on."""
    sizes, ndim = read.there.sizes, read.there.ndim
    start = sum(o * s for o, s in zip(read.there.offsets, strides, strict=True))
    if not ndim:
        yield Step(read.box, start, rows[0], (), (), read.slot, (...,))
        return
    while rows[dim + 1] > window_bytes and dim + 1 < ndim:
        dim += 1
    far = strides[dim] - rows[dim + 1] > GAP_BYTES
    count = 1 if far else max(1, (window_bytes - rows[dim + 1]) // strides[dim] + 1)
    for outer in product(*map(range, sizes[:dim])):
        for row in range(0, sizes[dim], count):
            length = min(count, sizes[dim] - row)
            first = (*outer, row, *(0 for _ in sizes[dim + 1 :]))
            extent = (*(1 for _ in outer), length, *sizes[dim + 1 :])
            here = [slice(o + f, o + f + e) for o, f, e in zip(read.here.offsets, first, extent, strict=True)]
            at = start + sum(f * s for f, s in zip(first, strides, strict=True))
            span = (length - 1) * strides[dim] + rows[dim + 1]
            yield Step(read.box, at, span, extent, strides, read.slot, (*here, ...))
