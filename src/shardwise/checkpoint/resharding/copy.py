"""Copying a segment: bytes from the mapped source into one file, a block at a time, with checksums both ways.

1. A block of the target is a run of elements of a box; it meets some boxes of the source. A block that is in one run
   of the source is hashed and written from there; else its parts are put together in a buffer.
2. Every block of the source is checked by whoever needs it first. `VerifiedBlocks` tells all workers which have been.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.checksums import BLOCK_BYTES, SUM_DIGITS, block_count, checksum
from shardwise.checkpoint.converting.elements import convert_elements, converted_dtype
from shardwise.checkpoint.files import PositionedFile
from shardwise.checkpoint.index import Index, TensorEntry
from shardwise.checkpoint.resharding.plan import SEGMENT_BYTES, ItemRange, RangeSums, Segment, split_into_boxes
from shardwise.checkpoint.store import CARRIERS, Store, StoredRegion
from shardwise.geometry import Box, DType
from shardwise.geometry.mesh import IntArray

_MAX_CACHED_OVERLAPS = 4096
_CONVERT_BYTES = 1 << 20  # converted at once: NumPy needs several times as much


class VerifiedBlocks:
    """Which blocks of a checkpoint have been checked: one byte each, in a file that all workers map."""

    def __init__(self, index: Index, path: Path) -> None:
        self._first: dict[tuple[int, int], int] = {}
        total = 0
        for entry in index.tensors.values():
            for number, run in enumerate(zip(entry.files, entry.begins, strict=True)):
                if run not in self._first:  # several tensors may be made of one run of bytes
                    self._first[run] = total
                    total += block_count(entry.run_bytes(number), index.block_bytes)
        self._map = self._mapped(path, max(1, total))

    def _mapped(self, path: Path, size: int) -> mmap.mmap:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(handle).st_size != size:
                os.ftruncate(handle, size)
            return mmap.mmap(handle, size)
        finally:
            os.close(handle)

    def verify(self, store: Store, tensor: TensorEntry, box: int, first: int, last: int) -> None:
        """Check those of some blocks of a stored box that nobody has checked."""
        base = self._first[tensor.files[box], tensor.begins[box]]
        for block in range(first, last):
            if not self._map[base + block]:
                store.verify(tensor, box, block, block + 1)
                self._map[base + block] = 1

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


class Copier:
    """Copies segments of a checkpoint into the files of a folder. `crc`: find the CRC-32 of each range as well.

    `dtype`: floats are converted to this type.
    """

    def __init__(
        self, store: Store, folder: Path, marks: VerifiedBlocks | None, crc: bool, dtype: DType | None = None
    ) -> None:
        self._store, self._folder, self._marks, self._crc, self._dtype = store, folder, marks, crc, dtype
        # Elements that are far apart in the source are put together many at once: each time the source is passed over.
        self._scattered_bytes = max(1, min(SEGMENT_BYTES, store.max_buffer_bytes // 2) // BLOCK_BYTES) * BLOCK_BYTES
        views = any(entry.views is not None for entry in store.index.tensors.values())
        largest = self._scattered_bytes if views else BLOCK_BYTES
        self._buffer = np.empty(largest, np.uint8)
        self._converted = np.empty(largest if dtype is not None else 0, np.uint8)
        self._overlaps: dict[tuple[int, Box], Overlap] = {}

    def copy(self, segment: Segment) -> list[RangeSums]:
        """Copy a segment and sync it; return the checksums of the blocks of each range, and its CRC-32."""
        with PositionedFile(self._folder / segment.name) as output:
            return [self._copy_range(part, output) for part in segment.ranges]

    def is_unchanged(self, segment: Segment, known: Sequence[RangeSums]) -> bool:
        """Whether a segment that was copied before is still as it was."""
        try:
            handle = os.open(self._folder / segment.name, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return all(self._is_range_unchanged(handle, p, s) for p, (s, _) in zip(segment.ranges, known, strict=True))
        finally:
            os.close(handle)

    def _is_range_unchanged(self, handle: int, part: ItemRange, sums: str) -> bool:
        for number, low in enumerate(range(part.low, part.high, BLOCK_BYTES)):
            view = self._buffer.data[: min(BLOCK_BYTES, part.high - low)]
            read = os.preadv(handle, [view], part.begin + low - part.low)
            if read != len(view) or checksum(view) != sums[number * SUM_DIGITS : (number + 1) * SUM_DIGITS]:
                return False
        return True

    def _copy_range(self, part: ItemRange, output: PositionedFile) -> RangeSums:
        entry = self._store.index.tensors[part.tensor]
        meets, wanted = self._meeting(entry, part.box), converted_dtype(entry.dtype, self._dtype)
        read = self._block if wanted == entry.dtype else self._converted_block
        step = BLOCK_BYTES if entry.views is None else self._scattered_bytes
        sums, crc = [], 0
        for low in range(part.low, part.high, step):
            data = read(entry, meets, low // wanted.itemsize, min(part.high, low + step) // wanted.itemsize)
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                sums.append(checksum(block))
                if self._crc:
                    crc = zlib.crc32(block, crc)
                output.write(part.begin + low + start - part.low, block)
        return "".join(sums), crc

    def _meeting(self, entry: TensorEntry, box: Box) -> Overlap:
        """Which boxes of the source a box meets; found once for tensors that are cut alike."""
        key = (id(entry.cut), box)
        if key not in self._overlaps:
            if len(self._overlaps) >= _MAX_CACHED_OVERLAPS:
                self._overlaps.clear()
            self._overlaps[key] = Overlap(entry, box)
        return self._overlaps[key]

    def _converted_block(self, entry: TensorEntry, meets: Overlap, first: int, last: int) -> memoryview:
        """The elements `first` to `last` of a box in another type."""
        assert self._dtype is not None
        step, width = _CONVERT_BYTES // entry.dtype.itemsize, self._dtype.itemsize
        for start in range(first, last, step):
            stop = min(last, start + step)
            stored = np.frombuffer(self._block(entry, meets, start, stop), CARRIERS[entry.dtype.itemsize])
            place = self._converted[(start - first) * width : (stop - first) * width]
            place.view(CARRIERS[width])[:] = convert_elements(stored, entry.dtype, self._dtype)
        return self._converted.data[: (last - first) * width]

    def _block(self, entry: TensorEntry, meets: Overlap, first: int, last: int) -> memoryview:
        """The elements `first` to `last` of a box, in the source itself or in the buffer."""
        itemsize = entry.dtype.itemsize
        found = meets.between(first, last)
        if len(found) == 1 and len(found[0][1]) == 1:
            region = self._source(entry, int(found[0][1][0]), found[0][2][0], found[0][3][0])
            if region.span == region.nbytes and (straight := region.load()).flags.c_contiguous:
                self._store.touch(straight.nbytes)
                return straight.reshape(-1).view(np.uint8).data
        flat = self._buffer[: (last - first) * itemsize].view(CARRIERS[itemsize])
        position = 0
        for run, cells, starts, sizes in found:
            target = flat[position : position + run.numel].reshape(run.sizes)
            position += run.numel
            begin = meets.offsets + np.array(run.offsets, np.int64)
            for cell, start, size in zip(cells.tolist(), starts, sizes, strict=True):
                self._fill(_box_view(target, start - begin, size), self._source(entry, cell, start, size))
        return self._buffer.data[: (last - first) * itemsize]

    def _source(self, entry: TensorEntry, cell: int, start: IntArray, size: IntArray) -> StoredRegion:
        """A part of a stored box, checked."""
        there, sizes = (start - entry.cut.offsets[cell]).tolist(), size.tolist()
        if self._marks is not None:
            blocks = entry.touched_blocks(cell, there, sizes, self._store.index.block_bytes)
            self._marks.verify(self._store, entry, cell, *blocks)
        return self._store.region(entry, cell).narrow(there, sizes)

    def _fill(self, target: npt.NDArray[Any], source: StoredRegion) -> None:
        """Copy in steps that touch a bounded part of the file each."""
        for slices in source.split(self._store.step_bytes):
            part = source.part(slices)
            place: Any = (*slices, ...)
            np.copyto(target[place], part.load())
            self._store.touch(part.span)


def _box_view(array: npt.NDArray[Any], start: IntArray, size: IntArray) -> npt.NDArray[Any]:
    """A box of an array, as a view."""
    place: Any = (*(slice(a, a + n) for a, n in zip(start.tolist(), size.tolist(), strict=True)), ...)
    part: npt.NDArray[Any] = array[place]
    return part


class Overlap:
    """The boxes of the source that a box of the target meets."""

    def __init__(self, entry: TensorEntry, box: Box) -> None:
        self.offsets: IntArray = np.array(box.offsets, np.int64)
        self._sizes = box.sizes
        self._low, self._high = entry.cut.offsets, entry.cut.offsets + entry.cut.sizes
        self._cells: IntArray = np.arange(len(entry.cut))
        self._cells, *_ = self._parts(Box((0,) * box.ndim, box.sizes))
        self._low, self._high = self._low[self._cells], self._high[self._cells]
        self._last: tuple[tuple[int, int], list[tuple[Box, IntArray, IntArray, IntArray]]] = ((0, 0), [])

    def between(self, first: int, last: int) -> list[tuple[Box, IntArray, IntArray, IntArray]]:
        """Elements `first` to `last` of the box as runs: each with the stored boxes it meets, where, and how far."""
        if self._last[0] != (first, last):
            found = [(run, *self._parts(run)) for run in split_into_boxes(self._sizes, first, last)]
            self._last = ((first, last), found)
        return self._last[1]

    def _parts(self, run: Box) -> tuple[IntArray, IntArray, IntArray]:
        begin = self.offsets + np.array(run.offsets, np.int64)
        low = np.maximum(self._low, begin)
        sizes = np.minimum(self._high, begin + np.array(run.sizes, np.int64)) - low
        rows = np.flatnonzero((sizes > 0).all(axis=1))
        return self._cells[rows], low[rows], sizes[rows]
