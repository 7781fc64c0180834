"""Reading stored boxes into tensors: checked, then copied into place.

1. Large reads are copied from mapped pages, brought in many at a time: one copy, as fast as reading straight into place
   and faster where that is not aligned. Pages that come one by one as they are touched cost twice as much.
2. Others are read a window at a time into one small buffer, which stays in the processor's cache, and parts go from
   there to where they belong. Parts that lie near each other in a file share a window, whatever tensors they are of.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.checkpoint.host_memory import as_array, is_plain
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.leaves import torch_dtype
from shardwise.checkpoint.read_plan import GAP_BYTES, Read, Step, blocks_of, steps_of
from shardwise.checkpoint.store import CARRIERS, Store
from shardwise.checkpoint.threads import MOST_THREADS, runs, spread, threads_for
from shardwise.tensor.execute import view_of

WINDOW_BYTES = 1 << 20
LARGE_BYTES = 1 << 20
_DENSE = 8  # pages are brought in ahead where at least one byte of so many is wanted
_ALIGNMENT = 64

Mapped: TypeAlias = tuple[TensorEntry, Read, Tensor]
Job: TypeAlias = tuple[TensorEntry, Sequence[Read], Sequence[Tensor]]
Place: TypeAlias = npt.NDArray[Any] | Tensor
Region: TypeAlias = tuple[slice | EllipsisType, ...]
Part: TypeAlias = tuple[int, int, Step, TensorEntry, Place]  # the file, the first byte in it, and what goes where


def verify_reads(store: Store, tensor: TensorEntry, reads: Sequence[Read]) -> None:
    """Check every block that these reads touch."""
    for read in reads:
        store.verify(tensor, read.box, *blocks_of(read, tensor, store.index.block_bytes))


def copy_reads(store: Store, tensor: TensorEntry, reads: Sequence[Read], targets: Sequence[Tensor]) -> None:
    """Fill the local tensors of one stored tensor."""
    copy_all(store, [(tensor, reads, targets)])


def copy_all(store: Store, jobs: Iterable[Job], ranks: int = 1) -> None:
    """Fill the local tensors of many stored tensors, file by file; as many ranks do so at once."""
    window = min(WINDOW_BYTES, store.step_bytes // MOST_THREADS)
    mapped: list[Mapped] = []
    parts = sorted(_parts(store, jobs, window, mapped), key=itemgetter(0, 1))
    sizes = [part[2].span for part in parts]
    on_host = all(isinstance(part[4], np.ndarray) for part in parts)
    threads = threads_for(sum(sizes), ranks) if on_host else 1
    spread(lambda some: _copy_parts(store, some, window), runs(parts, sizes, threads))
    sizes = [read.there.numel * tensor.dtype.itemsize for tensor, read, _ in mapped]
    on_host = all(is_plain(target) for _, _, target in mapped)
    threads = threads_for(sum(sizes), ranks) if on_host else 1
    spread(lambda some: _copy_all_mapped(store, some), runs(mapped, sizes, threads))


def _copy_parts(store: Store, parts: Sequence[Part], window: int) -> None:
    memory = np.empty(window + 3 * _ALIGNMENT, np.uint8)  # gaps between parts are read with them
    buffer = memory[-memory.ctypes.data % _ALIGNMENT :]  # the system copies to lines of the cache three times as fast
    for number, of_file in groupby(parts, key=itemgetter(0)):
        with store.opened(number) as handle:
            _pour(handle, list(of_file), buffer, window)


def _parts(store: Store, jobs: Iterable[Job], window: int, mapped: list[Mapped]) -> Iterator[Part]:
    """All steps, placed; reads that are no steps are noted. Tensors that are cut alike share their plans."""
    known: dict[tuple[int, int], tuple[list[Step], list[Read]]] = {}
    for tensor, reads, targets in jobs:
        key = (id(reads), tensor.dtype.itemsize)
        if key not in known:
            known[key] = _planned(store, tensor, reads, window)
        steps, others = known[key]
        files, begins = tensor.files, tensor.begins
        places = [_place(target, tensor) for target in targets]
        for step in steps:
            yield files[step.box], begins[step.box] + step.start, step, tensor, places[step.slot]
        mapped += [(tensor, read, targets[read.slot]) for read in others]


def _planned(store: Store, tensor: TensorEntry, reads: Sequence[Read], window: int) -> tuple[list[Step], list[Read]]:
    """The steps of the reads, and those reads that are copied from mapped pages: large ones, and rows far apart."""
    steps: list[Step] = []
    others: list[Read] = []
    for read in reads:
        large = store.fetches and read.there.numel * tensor.dtype.itemsize >= LARGE_BYTES
        found = None if large else steps_of(read, tensor.cut.extents[read.box][0], tensor.dtype.itemsize, window)
        if found is None:
            others.append(read)
        else:
            steps += found
    return steps, others


def _pour(handle: int, parts: Sequence[Part], buffer: npt.NDArray[np.uint8], window: int) -> None:
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
        _read_into(handle, buffer.data[: high - low], low)
        for _, begin, step, tensor, place in parts[first:after]:
            carrier = CARRIERS[tensor.dtype.itemsize]
            source: npt.NDArray[Any] = np.ndarray(step.sizes, carrier, buffer, begin - low, step.strides)
            if isinstance(place, np.ndarray):
                np.copyto(place[step.here], source)
            else:
                place[step.here].copy_(_staged(source, torch_dtype(tensor.dtype)))
        first = after


def _read_into(handle: int, place: memoryview, begin: int) -> None:
    while len(place):
        count = os.preadv(handle, [place], begin)
        if not count:
            raise OSError(errno.EIO, f"it was cut while it was read: no byte {begin}")
        place, begin = place[count:], begin + count


def _place(target: Tensor, tensor: TensorEntry) -> Place:
    """Where bytes go: the memory of the tensor itself, or the tensor, if they have to be moved or converted."""
    return as_array(target) if target.dtype == torch_dtype(tensor.dtype) and is_plain(target) else target


def _copy_all_mapped(store: Store, reads: Sequence[Mapped]) -> None:
    for tensor, read, local in reads:
        _copy_mapped(store, tensor, read, local)


def _copy_mapped(store: Store, tensor: TensorEntry, read: Read, local: Tensor) -> None:
    whole = store.piece(tensor, read.box)
    source, target = whole[read.there.slices], view_of(local, read.here)
    place, file, begin = _place(target, tensor), tensor.files[read.box], tensor.begins[read.box]
    for rows in _mapped_steps(source, store.step_bytes):
        part = source[rows]
        if part.nbytes * _DENSE >= _span(part):
            low = begin + _address(part) - _address(whole)
            store.fetch(file, low, low + _span(part))
        if isinstance(place, np.ndarray):
            np.copyto(place[rows], part)
        else:
            place[rows].copy_(_staged(part, torch_dtype(tensor.dtype)))
        store.touch(_span(part))


def _mapped_steps(source: npt.NDArray[Any], step_bytes: int) -> Iterator[Region]:
    """Cut an array along its first dims into parts that span about this many bytes of the file."""
    if _span(source) <= step_bytes or source.ndim == 0:
        yield (...,)
        return
    row = _span(source) // len(source)
    count = max(1, step_bytes // max(1, row))
    for start in range(0, len(source), count):
        rows = slice(start, start + count)
        if count > 1:
            yield (rows, ...)
        else:
            yield from ((rows, *rest) for rest in _mapped_steps(source[start], step_bytes))


def _span(source: npt.NDArray[Any]) -> int:
    """The bytes of the file between the first and the last element of a part: a narrow one touches the pages of all."""
    if not source.ndim or not source.size:
        return source.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(source.shape, source.strides, strict=True))
    return int(reach) + source.itemsize


def _address(array: npt.NDArray[Any]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def _staged(part: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A copy of a part in host memory, as a tensor."""
    buffer = torch.empty(part.shape, dtype=dtype)
    np.copyto(as_array(buffer), part)
    return buffer
