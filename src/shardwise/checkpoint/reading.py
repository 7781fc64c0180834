"""Reading stored boxes into tensors: checked, then copied into place.

1. Large reads are copied from mapped pages, prefetched in bulk: one copy, as fast as reading straight into place
   and faster where that is not aligned. Pages that come one by one as they are touched cost twice as much.
2. Others are read a window at a time into one small buffer, which stays in the processor's cache, and parts go from
   there to where they belong. Nearby parts of a file share a window, whichever tensors they belong to.

Where a machine has more cores than ranks, several threads of a rank work on the bytes.

Which parts of which stored boxes a rank needs, and in which steps they are read, is pure arithmetic:

1. A `BoxRead` takes a region of a stored box to a region of a local tensor.
2. A `ReadStep` is as much of a read as one system call returns: rows with small gaps between them are read with the
   gaps, since that costs less than a call for each; rows far apart are read one by one.
3. Short rows far apart (a narrow column of a wide tensor) are not steps: they are copied from the mapped file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, product
from operator import itemgetter
from types import EllipsisType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.checkpoint.index import StoredCut, TensorEntry
from shardwise.checkpoint.state import torch_dtype
from shardwise.checkpoint.storage.base import FileReader
from shardwise.checkpoint.store import CARRIERS, Store
from shardwise.checkpoint.writing import as_array, is_plain
from shardwise.geometry import Box, Layout
from shardwise.geometry.mesh import IntArray
from shardwise.tensor.moving.execute import view_box
from shardwise.transfer.intersect import overlaps_with_boxes

_WORTH_BYTES = 32 << 20
MOST_THREADS = 4
T = TypeVar("T")


def threads_for(nbytes: int, ranks: int) -> int:
    """How many threads of this rank work on that many bytes; all ranks may be on this machine.

    >>> threads_for(1000, ranks=1)
    1
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if nbytes < _WORTH_BYTES else max(1, min(MOST_THREADS, cores // ranks))


def split_evenly(items: Sequence[T], sizes: Sequence[int], count: int) -> list[Sequence[T]]:
    """Cut a sequence into at most this many runs of about equal size, none of them empty.

    >>> split_evenly("abcd", [1, 1, 1, 3], 2), split_evenly("ab", [5, 5], 3), split_evenly("", [], 2)
    (['abc', 'd'], ['a', 'b'], [])
    """
    total, done, start = sum(sizes), 0, 0
    found: list[Sequence[T]] = []
    for number, size in enumerate(sizes):
        done += size
        if number + 1 == len(items) or done * count >= total * (len(found) + 1):
            found.append(items[start : number + 1])
            start = number + 1
    return found


def run_in_threads(work: Callable[[Sequence[T]], None], parts: Sequence[Sequence[T]]) -> None:
    """Do the work on every part, each in a thread of its own; raise what the first that failed raised."""
    if len(parts) == 1:
        work(parts[0])
    elif parts:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(work, parts))


GAP_BYTES = 16 << 10
LONG_ROW_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class BoxRead:
    """A region `there` of stored box number `box`, to go to the region `here` of local tensor number `slot`."""

    box: int
    there: Box
    slot: int
    here: Box


@dataclass(frozen=True, slots=True)
class ReadStep:
    """`span` bytes from byte `start` of a stored box on; as an array of `sizes` and `strides` they go to `here`."""

    box: int
    start: int
    span: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    slot: int
    here: tuple[slice | EllipsisType, ...]


def plan_reads(cut: StoredCut, layout: Layout, rank: int) -> list[BoxRead]:
    """What a rank reads to fill its local tensors of a layout: every element once."""
    own = layout.table.take(layout.rows_of(rank))
    return plan_box_reads(cut, own.offsets, own.sizes, own.slots, own.local_offsets)


def plan_box_reads(
    cut: StoredCut, offsets: IntArray, sizes: IntArray, slots: IntArray, local: IntArray
) -> list[BoxRead]:
    """What is read to fill boxes of the tensor, each of which is at `local` in local tensor number `slots`."""
    if not len(cut) or not len(offsets):
        return []
    found = overlaps_with_boxes(cut.shape, offsets, sizes, cut.offsets, cut.sizes)
    there = found.starts - cut.offsets[found.cells]
    here = found.starts - offsets[found.boxes] + local[found.boxes]
    columns = (found.cells, there, slots[found.boxes], here, found.sizes)
    return [
        BoxRead(box, Box(tuple(t), tuple(s)), slot, Box(tuple(h), tuple(s)))
        for box, t, slot, h, s in zip(*(c.tolist() for c in columns), strict=True)
    ]


def touched_blocks(read: BoxRead, tensor: TensorEntry, block_bytes: int) -> tuple[int, int]:
    """The first block that a read touches, and the one after the last."""
    return tensor.touched_blocks(read.box, read.there.offsets, read.there.sizes, block_bytes)


def split_read(read: BoxRead, stored: Sequence[int], itemsize: int, window_bytes: int) -> list[ReadStep] | None:
    """The steps of a read of a box of sizes `stored`, none longer than the window; None for short rows far apart.

    >>> read = BoxRead(0, Box((0, 2), (3, 2)), 0, Box((0, 0), (3, 2)))
    >>> [(step.start, step.span) for step in split_read(read, (3, 4), 4, 1 << 20)]
    [(8, 40)]
    >>> [(step.start, step.span, step.sizes) for step in split_read(read, (3, 4), 4, 30)]
    [(8, 24, (2, 2)), (40, 8, (1, 2))]
    >>> split_read(BoxRead(0, Box((0, 0), (3, 2)), 0, Box((0, 0), (3, 2))), (3, 1 << 20), 4, 1 << 20) is None
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
    return list(_split_rows(read, tuple(strides), rows, max(far, default=0), window_bytes))


def _split_rows(
    read: BoxRead, strides: tuple[int, ...], rows: Sequence[int], dim: int, window_bytes: int
) -> Iterator[ReadStep]:
    """Steps of some indices of one dim and single indices of the dims before it; `rows[d]` is the span of dims d on."""
    sizes, ndim = read.there.sizes, read.there.ndim
    start = sum(o * s for o, s in zip(read.there.offsets, strides, strict=True))
    if not ndim:
        yield ReadStep(read.box, start, rows[0], (), (), read.slot, (...,))
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
            yield ReadStep(read.box, at, span, extent, strides, read.slot, (*here, ...))


WINDOW_BYTES = 1 << 20
LARGE_BYTES = 1 << 20
_DENSE_RATIO = 8  # pages are prefetched where at least one in this many bytes is needed
_ALIGNMENT = 64

MappedRead: TypeAlias = tuple[TensorEntry, BoxRead, Tensor]
TensorReads: TypeAlias = tuple[TensorEntry, Sequence[BoxRead], Sequence[Tensor]]
CopyTarget: TypeAlias = npt.NDArray[Any] | Tensor
PlacedStep: TypeAlias = tuple[
    int, int, ReadStep, TensorEntry, CopyTarget
]  # the file, the first byte in it, and what goes where


def verify_reads(store: Store, tensor: TensorEntry, reads: Sequence[BoxRead]) -> None:
    """Check every block that these reads touch."""
    for read in reads:
        store.verify(tensor, read.box, *touched_blocks(read, tensor, store.index.block_bytes))


def copy_reads(store: Store, tensor: TensorEntry, reads: Sequence[BoxRead], targets: Sequence[Tensor]) -> None:
    """Fill the local tensors of one stored tensor."""
    copy_tensors(store, [(tensor, reads, targets)])


def copy_tensors(store: Store, jobs: Iterable[TensorReads], ranks: int = 1) -> None:
    """Fill the local tensors of many stored tensors, file by file; as many ranks do so at once."""
    window = min(WINDOW_BYTES, store.step_bytes // MOST_THREADS)
    mapped: list[MappedRead] = []
    parts = sorted(_place_steps(store, jobs, window, mapped), key=itemgetter(0, 1))
    sizes = [part[2].span for part in parts]
    on_host = all(isinstance(part[4], np.ndarray) for part in parts)
    threads = threads_for(sum(sizes), ranks) if on_host else 1
    run_in_threads(lambda some: _copy_placed_steps(store, some, window), split_evenly(parts, sizes, threads))
    sizes = [read.there.numel * tensor.dtype.itemsize for tensor, read, _ in mapped]
    on_host = all(is_plain(target) for _, _, target in mapped)
    threads = threads_for(sum(sizes), ranks) if on_host else 1
    run_in_threads(lambda some: _copy_all_mapped(store, some), split_evenly(mapped, sizes, threads))


def _copy_placed_steps(store: Store, parts: Sequence[PlacedStep], window: int) -> None:
    memory = np.empty(window + 3 * _ALIGNMENT, np.uint8)  # gaps between parts are read with them
    buffer = memory[-memory.ctypes.data % _ALIGNMENT :]  # the system copies to lines of the cache three times as fast
    for number, of_file in groupby(parts, key=itemgetter(0)):
        _copy_file_steps(store.reader(number), list(of_file), buffer, window)


def _place_steps(
    store: Store, jobs: Iterable[TensorReads], window: int, mapped: list[MappedRead]
) -> Iterator[PlacedStep]:
    """All steps, placed; reads that are not steps are noted. Tensors that are split alike share their plans."""
    known: dict[tuple[int, int], tuple[list[ReadStep], list[BoxRead]]] = {}
    for tensor, reads, targets in jobs:
        key = (id(reads), tensor.dtype.itemsize)
        if key not in known:
            known[key] = _plan_tensor_reads(store, tensor, reads, window)
        steps, others = known[key]
        files, begins = tensor.files, tensor.begins
        places = [_choose_copy_target(target, tensor) for target in targets]
        for step in steps:
            yield files[step.box], begins[step.box] + step.start, step, tensor, places[step.slot]
        mapped += [(tensor, read, targets[read.slot]) for read in others]


def _plan_tensor_reads(
    store: Store, tensor: TensorEntry, reads: Sequence[BoxRead], window: int
) -> tuple[list[ReadStep], list[BoxRead]]:
    """The steps of the reads, and those reads that are copied from mapped pages: large ones, and rows far apart."""
    steps: list[ReadStep] = []
    others: list[BoxRead] = []
    for read in reads:
        large = store.fetches and read.there.numel * tensor.dtype.itemsize >= LARGE_BYTES
        stored = tensor.cut.extents[read.box][0]
        mapped = large or tensor.views is not None
        found = None if mapped else split_read(read, stored, tensor.dtype.itemsize, window)
        if found is None:
            others.append(read)
        else:
            steps += found
    return steps, others


def _copy_file_steps(file: FileReader, parts: Sequence[PlacedStep], buffer: npt.NDArray[np.uint8], window: int) -> None:
    """Read the parts of one file, which are in the order of their first bytes, and put them in their places."""
    first = 0
    while first < len(parts):
        low = parts[first][1]
        high = low + parts[first][2].span
        after = first + 1
        while after < len(parts) and parts[after][1] <= high + GAP_BYTES:
            end = max(high, parts[after][1] + parts[after][2].span)
            if end > low + window:
                break
            high, after = end, after + 1
        low -= low % _ALIGNMENT
        file.read_into(buffer.data[: high - low], low)
        for _, begin, step, tensor, place in parts[first:after]:
            carrier = CARRIERS[tensor.dtype.itemsize]
            source: npt.NDArray[Any] = np.ndarray(step.sizes, carrier, buffer, begin - low, step.strides)
            if isinstance(place, np.ndarray):
                np.copyto(place[step.here], source)
            else:
                place[step.here].copy_(_stage_on_host(source, torch_dtype(tensor.dtype)))
        first = after


def _choose_copy_target(target: Tensor, tensor: TensorEntry) -> CopyTarget:
    """Where bytes go: the memory of the tensor itself, or the tensor, if they have to be moved or converted."""
    return as_array(target) if target.dtype == torch_dtype(tensor.dtype) and is_plain(target) else target


def _copy_all_mapped(store: Store, reads: Sequence[MappedRead]) -> None:
    for tensor, read, local in reads:
        _copy_mapped(store, tensor, read, local)


def _copy_mapped(store: Store, tensor: TensorEntry, read: BoxRead, local: Tensor) -> None:
    source = store.region(tensor, read.box).narrow(read.there.offsets, read.there.sizes)
    place = _choose_copy_target(view_box(local, read.here), tensor)
    for slices in source.split(store.step_bytes):
        part = source.part(slices)
        rows: Any = (*slices, ...)
        if part.nbytes * _DENSE_RATIO >= part.span:
            store.fetch(part)
        if isinstance(place, np.ndarray):
            np.copyto(place[rows], part.load())
        else:
            place[rows].copy_(_stage_on_host(part.load(), torch_dtype(tensor.dtype)))
        store.touch(part.span)


def _stage_on_host(part: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A copy of a part in host memory, as a tensor."""
    buffer = torch.empty(part.shape, dtype=dtype, device="cpu")
    np.copyto(as_array(buffer), part)
    return buffer
