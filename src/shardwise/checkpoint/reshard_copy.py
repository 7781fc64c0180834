"""Copying the segments of a reshard: bytes from the mapped source into one file, with checksums both ways.

1. A block of the target is a run of elements of a box; it meets some boxes of the source. A block that is in one run
   of the source is hashed and written from there; else its parts are put together in a buffer.
2. Every block of the source is checked by whoever needs it first. `VerifiedBlocks` tells all workers which have been.
3. One worker copies in this process. More are processes that run this module: segments come in as lines of JSON, their
   checksums go out as lines of JSON. A worker never imports torch: moving bytes needs none. It ends when its input
   does, so a parent that was killed leaves no worker behind.

In which segments are the files of a new checkpoint written?

A segment is a part of a file that is copied, synced and recorded as one unit: some items, or some blocks of a large
one. Segments do not depend on the number of workers, so an interrupted run is taken up by any number of them.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from shardwise.checkpoint.convert import Conversion
from shardwise.checkpoint.files import CheckpointError, PositionedFile
from shardwise.checkpoint.formats.base import FilePlan, ItemSums, PlannedFile, write_item
from shardwise.checkpoint.index import (
    BLOCK_BYTES,
    SUM_DIGITS,
    Index,
    Json,
    TensorEntry,
    block_count,
    checksum,
    combine_crc,
)
from shardwise.checkpoint.store import (
    CARRIERS,
    Store,
    convert_elements,
    converted_dtype,
    copy_region,
    open_store,
    plan_reads,
)
from shardwise.geometry import Box, DType, find_dtype
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.overlap import BoxOverlap, overlaps_with_boxes

SEGMENT_BYTES = 8 * BLOCK_BYTES
RangeSums: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ItemRange:
    """The bytes `low` to `high` of an item, which begin at `begin` in the file."""

    item: int
    tensor: str
    box: Box
    begin: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring ranges of one file that are copied together."""

    file: int
    name: str
    ranges: tuple[ItemRange, ...]

    @property
    def nbytes(self) -> int:
        return sum(r.high - r.low for r in self.ranges)


def plan_segments(plan: FilePlan, index: Index, by_file: bool = False) -> list[Segment]:
    """All segments, in the order in which the source stores what they begin with.

    Files that need the same part of the source then ask for it one after another, while it is in memory. With
    `by_file` one file after another is completed.
    """
    found = [s for number, file in enumerate(plan.all_files()) for s in _split_into_segments(plan, number, file)]
    widths = {tensor.name: tensor.dtype.itemsize for tensor in plan.tensors}

    def place(segment: Segment) -> tuple[int, int, int]:
        first = segment.ranges[0]
        return *_find_source_place(index.tensors[first.tensor], first, widths[first.tensor]), segment.file

    return found if by_file else sorted(found, key=place)


def _split_into_segments(plan: FilePlan, number: int, file: PlannedFile) -> Iterator[Segment]:
    gathered: list[ItemRange] = []
    size = 0
    for part in _split_into_ranges(plan, file):
        if gathered and size + part.high - part.low > SEGMENT_BYTES:
            yield Segment(number, file.name, tuple(gathered))
            gathered, size = [], 0
        gathered.append(part)
        size += part.high - part.low
    if gathered:
        yield Segment(number, file.name, tuple(gathered))


def _split_into_ranges(plan: FilePlan, file: PlannedFile) -> Iterator[ItemRange]:
    for number, item in enumerate(file.items):
        name, box, nbytes = plan.tensors[item.tensor].name, plan.box_of(item), plan.bytes_of(item)
        for low in range(0, nbytes, SEGMENT_BYTES):
            yield ItemRange(number, name, box, item.begin + low, low, min(nbytes, low + SEGMENT_BYTES))


def _find_source_place(entry: TensorEntry, part: ItemRange, itemsize: int) -> tuple[int, int]:
    """The file of the source, and the place in it, that holds the first element of a range, about."""
    first = part.low // itemsize
    at = [o + i for o, i in zip(part.box.offsets, unravel_offset(first, part.box.sizes), strict=True)]
    inside = ((entry.cut.offsets <= at) & (at < entry.cut.offsets + entry.cut.sizes)).all(axis=1)
    number = int(inside.argmax())
    start, strides, _ = entry.view_of(number)
    row = start + sum((a - o) * s for a, o, s in zip(at, entry.cut.offsets[number].tolist(), strides, strict=True))
    return entry.files[number], entry.begins[number] + row * entry.dtype.itemsize


def unravel_offset(place: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of an element, from its number in row-major order.

    >>> unravel_offset(7, (2, 3, 4))
    (0, 1, 3)
    """
    found: list[int] = []
    for size in reversed(sizes):
        place, digit = divmod(place, size)
        found.append(digit)
    return tuple(reversed(found))


def split_into_boxes(sizes: Sequence[int], first: int, last: int) -> Iterator[Box]:
    """The elements `first` to `last` of a box in row-major order, as boxes in that order.

    >>> [str(box) for box in split_into_boxes((3, 4), 2, 9)]
    ['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:1]']
    """
    if first >= last:
        return
    if not sizes:
        yield Box((), ())
        return
    row = 1
    for size in sizes[1:]:
        row *= size
    top, bottom = -(-first // row), last // row
    if top > bottom:  # within one row
        yield from _split_row(sizes, bottom, first - bottom * row, last - bottom * row)
        return
    if first < top * row:
        yield from _split_row(sizes, top - 1, first - (top - 1) * row, row)
    if top < bottom:
        yield Box((top, *(0 for _ in sizes[1:])), (bottom - top, *sizes[1:]))
    yield from _split_row(sizes, bottom, 0, last - bottom * row)


def _split_row(sizes: Sequence[int], number: int, first: int, last: int) -> Iterator[Box]:
    for box in split_into_boxes(sizes[1:], first, last):
        yield Box((number, *box.offsets), (1, *box.sizes))


def join_sums(
    plan: FilePlan, file: PlannedFile, segments: Sequence[Segment], done: Mapping[int, Sequence[RangeSums]]
) -> list[ItemSums]:
    """The checksums and the CRC-32 of the items of a file, from those of the ranges of all its segments, by number."""
    found: list[list[tuple[int, str, int, int]]] = [[] for _ in file.items]
    for number, results in done.items():
        for part, (text, crc) in zip(segments[number].ranges, results, strict=True):
            found[part.item].append((part.low, text, crc, part.high - part.low))
    joined = []
    for ranges in map(sorted, found):
        total = ranges[0][2] if ranges else 0
        for _, _, crc, length in ranges[1:] if plan.crc else ():
            total = combine_crc(total, crc, length)
        joined.append(("".join(text for _, text, _, _ in ranges), total))
    return joined


PROCESS_BYTES = 48 << 20
_LEAST, _MOST = 16 << 20, 64 << 20
_WORKER = "shardwise.checkpoint.reshard_copy"
_MAX_CACHED_READS = 1 << 16
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
        self._near: dict[tuple[int, Box], IntArray] = {}
        self._reads: dict[tuple[int, Box, int, int], tuple[list[Box], list[BoxOverlap]]] = {}
        self._cached_reads = 0

    def copy_or_keep(self, segment: Segment, known: Sequence[RangeSums] | None) -> tuple[list[RangeSums], bool]:
        """The checksums of the blocks of each range of a segment and its CRC-32, once it is copied and synced.

        A segment that is `known`, as an earlier run has copied it, is kept if it is as it was; True says so.
        """
        if known is not None and self.is_unchanged(segment, known):
            return list(known), True
        with PositionedFile(self._folder / segment.name) as output:
            return [self._copy_range(part, output) for part in segment.ranges], False

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
        wanted = converted_dtype(entry.dtype, self._dtype)
        read = self._read if wanted == entry.dtype else self._read_converted
        step = BLOCK_BYTES if entry.views is None else self._scattered_bytes
        parts = (
            read(entry, part.box, low // wanted.itemsize, min(part.high, low + step) // wanted.itemsize)
            for low in range(part.low, part.high, step)
        )
        small = 0 < part.high - part.low <= BLOCK_BYTES
        return write_item(output, part.begin, next(parts) if small else parts, self._crc)

    def _read_converted(self, entry: TensorEntry, box: Box, first: int, last: int) -> memoryview:
        """The elements `first` to `last` of a box in another type."""
        assert self._dtype is not None
        step, width = _CONVERT_BYTES // entry.dtype.itemsize, self._dtype.itemsize
        for start in range(first, last, step):
            stop = min(last, start + step)
            stored = np.frombuffer(self._read(entry, box, start, stop), CARRIERS[entry.dtype.itemsize])
            place = self._converted[(start - first) * width : (stop - first) * width]
            place.view(CARRIERS[width])[:] = convert_elements(stored, entry.dtype, self._dtype)
        return self._converted.data[: (last - first) * width]

    def _read(self, entry: TensorEntry, box: Box, first: int, last: int) -> memoryview:
        """The elements `first` to `last` of a box, checked, in the source itself or in the buffer."""
        store, itemsize = self._store, entry.dtype.itemsize
        runs, reads = self._plan(entry, box, first, last)
        if self._marks is not None:
            for read in reads:
                blocks = entry.touched_blocks(read.cell, read.there, store.index.block_bytes)
                self._marks.verify(store, entry, read.cell, *blocks)
        if len(reads) == 1:
            region = store.region(entry, reads[0].cell).narrow(reads[0].there.offsets, reads[0].there.sizes)
            if region.span == region.nbytes and (straight := region.load()).flags.c_contiguous:
                store.touch(straight.nbytes)
                return straight.reshape(-1).view(np.uint8).data
        flat = self._buffer[: (last - first) * itemsize].view(CARRIERS[itemsize])
        targets, position = [], 0
        for run in runs:
            targets.append(flat[position : position + run.numel].reshape(run.sizes))
            position += run.numel
        for read in reads:
            copy_region(store, entry, read, targets[read.box])
        return self._buffer.data[: (last - first) * itemsize]

    def _plan(self, entry: TensorEntry, box: Box, first: int, last: int) -> tuple[list[Box], list[BoxOverlap]]:
        """Elements of a box as boxes, and what is read to fill them; found once for tensors that are cut alike."""
        key = (id(entry.cut), box, first, last)
        if key not in self._reads:
            if self._cached_reads > _MAX_CACHED_READS:
                self._near.clear()
                self._reads.clear()
                self._cached_reads = 0
            origin, sizes = (np.array([n], np.int64).reshape(1, box.ndim) for n in (box.offsets, box.sizes))
            if key[:2] not in self._near:  # very many stored boxes are compared once, not for every block
                met = overlaps_with_boxes(entry.shape, origin, sizes, entry.cut.offsets, entry.cut.sizes)
                self._near[key[:2]] = met.cells
            runs = list(split_into_boxes(box.sizes, first, last))
            columns = ([run.offsets for run in runs], [run.sizes for run in runs])
            offsets, sizes = (np.array(rows, np.int64).reshape(len(runs), box.ndim) for rows in columns)
            zeros, cells = np.zeros_like(offsets), self._near[key[:2]]
            reads = plan_reads(entry.cut, offsets + origin, sizes, np.arange(len(runs)), zeros, cells)
            self._reads[key] = runs, reads
            self._cached_reads += len(reads) + len(cells)
        return self._reads[key]


@dataclass(frozen=True)
class CopyJob:
    """What all workers receive: where from, where to, and how. Without `marks` the source is not checked."""

    source: str
    digest: str
    folder: str
    marks: str | None
    crc: bool
    conversion: Json
    dtype: str | None
    limit: int

    def copier(self, store: Store) -> Copier:
        """What copies the segments from an opened source, whose index is that of what is written."""
        marks = None if self.marks is None else VerifiedBlocks(store.index, Path(self.marks))
        dtype = None if self.dtype is None else find_dtype(self.dtype)
        return Copier(store, Path(self.folder), marks, self.crc, dtype)


@dataclass(frozen=True, slots=True)
class CopiedSegment:
    """A segment that is in place: its number, its checksums, and whether an earlier run had put it there."""

    number: int
    sums: list[RangeSums]
    kept: bool


def divide_memory(limit: int, workers: int) -> tuple[int, int]:
    """How many workers fit a limit on memory, interpreters included, and what each may use for buffers and pages.

    >>> divide_memory(256 << 20, 8), divide_memory(32 << 20, 8), divide_memory(8 << 30, 8)
    ((3, 22369621), (1, 16777216), (8, 67108864))
    """
    while workers > 1 and limit - (workers + 1) * PROCESS_BYTES < workers * _LEAST:
        workers -= 1
    processes = workers + 1 if workers > 1 else 1
    return workers, min(_MOST, max(_LEAST, (limit - processes * PROCESS_BYTES) // workers))


def copy_in_this_process(
    store: Store, job: CopyJob, segments: Sequence[Segment], known: Mapping[int, Sequence[RangeSums]]
) -> Generator[CopiedSegment, None, None]:
    """Copy all segments in this process."""
    copier = job.copier(store)
    for number, segment in enumerate(segments):
        yield CopiedSegment(number, *copier.copy_or_keep(segment, known.get(number)))


def copy_in_processes(
    job: CopyJob, segments: Sequence[Segment], known: Mapping[int, Sequence[RangeSums]], workers: int
) -> Generator[CopiedSegment, None, None]:
    """Copy all segments in worker processes, in any order; all have ended when this does."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[CopiedSegment | BaseException | None] = queue.SimpleQueue()
    for number in range(len(segments)):
        todo.put(number)
    processes = [_start_worker(job) for _ in range(workers)]
    threads = [
        threading.Thread(target=_feed_worker, args=(process, segments, known, todo, done), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        running = workers
        while running:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            running -= found is None
            if found is not None:
                yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was buffered for a worker that has ended
                    pipe.close()


def _start_worker(job: CopyJob) -> subprocess.Popen[bytes]:
    """A worker in a session of its own: Ctrl-C reaches this process alone, which stops its workers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(vars(job)).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        pass  # it has ended already; the first request will say so
    return process


def _feed_worker(
    process: subprocess.Popen[bytes],
    segments: Sequence[Segment],
    known: Mapping[int, Sequence[RangeSums]],
    todo: queue.SimpleQueue[int],
    done: queue.SimpleQueue[CopiedSegment | BaseException | None],
) -> None:
    """Send one worker segment after segment until there are no more."""
    try:
        while True:
            number = todo.get_nowait()
            done.put(_request_segment(process, number, segments[number], known.get(number)))
    except queue.Empty:
        done.put(None)
    except BaseException as error:
        done.put(error)


def _request_segment(
    process: subprocess.Popen[bytes], number: int, segment: Segment, known: Sequence[RangeSums] | None
) -> CopiedSegment:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(task_json(segment, known)).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        line = b""
    if not line.endswith(b"\n"):
        raise CheckpointError(
            f"a worker ended with exit status {process.wait()} while it wrote {segment.name}; what was done is kept: "
            "run the same again to continue"
        )
    reply = json.loads(line)
    if "error" in reply:
        raise CheckpointError(reply["error"])
    sums, kept = reply["result"]
    return CopiedSegment(number, [(text, crc) for text, crc in sums], kept)


def task_json(segment: Segment, known: Sequence[RangeSums] | None) -> list[Any]:
    """A segment, and what is known of it from an earlier run, as plain data.

    >>> part = ItemRange(0, "w", Box((0,), (4,)), 64, 0, 16)
    >>> task_json(Segment(2, "a.safetensors", (part,)), None)
    [2, 'a.safetensors', [[0, 'w', [0], [4], 64, 0, 16]], None]
    """
    ranges = [
        [r.item, r.tensor, list(r.box.offsets), list(r.box.sizes), r.begin, r.low, r.high] for r in segment.ranges
    ]
    return [segment.file, segment.name, ranges, known]


def task_from_json(data: Any) -> tuple[Segment, list[RangeSums] | None]:
    """The segment that `task_json` wrote, and what is known of it.

    >>> part = ItemRange(0, "w", Box((0,), (4,)), 64, 0, 16)
    >>> task_from_json(task_json(Segment(2, "a.safetensors", (part,)), None))[0].ranges == (part,)
    True
    """
    file, name, ranges, known = data
    parts = tuple(ItemRange(i, t, Box(tuple(o), tuple(s)), b, low, high) for i, t, o, s, b, low, high in ranges)
    return Segment(file, name, parts), known and [(text, crc) for text, crc in known]


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more; the first line says what all of them are about."""
    job = CopyJob(**json.loads(requests.readline()))
    store = open_store(job.source, job.limit)
    if store.digest != job.digest:
        error = {"error": f"{store.folder} was changed while it was read; start over"}
        replies.write(json.dumps(error).encode() + b"\n")
        return
    store.index = Conversion.from_json(job.conversion).apply(store.index)
    copier = job.copier(store)
    for line in requests:
        try:
            reply: dict[str, Any] = {"result": copier.copy_or_keep(*task_from_json(json.loads(line)))}
        except (ValueError, OSError) as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
