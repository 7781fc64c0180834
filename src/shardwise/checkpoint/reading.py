"""Reading stored boxes into tensors: which parts of which boxes, checked, then copied straight into place.

A `Read` takes a region of a stored box to a region of a local tensor. Where dtype and device allow, bytes go from the
mapped file into the destination; else through a buffer of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.checkpoint.index import Cut, TensorEntry
from shardwise.checkpoint.leaves import torch_dtype
from shardwise.checkpoint.store import CARRIERS, Store
from shardwise.geometry import Box, Layout
from shardwise.geometry.mesh import IntArray
from shardwise.tensor.execute import view_of
from shardwise.transfer.intersect import overlaps_with_boxes

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class Read:
    """A region `there` of stored box number `box`, to go to the region `here` of local tensor number `slot`."""

    box: int
    there: Box
    slot: int
    here: Box


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


def verify_reads(store: Store, tensor: TensorEntry, reads: Sequence[Read]) -> None:
    """Check every block that these reads touch."""
    for read in reads:
        store.verify(tensor, read.box, *blocks_of(read, tensor, store.index.block_bytes))


def copy_reads(store: Store, tensor: TensorEntry, reads: Sequence[Read], targets: Sequence[Tensor]) -> None:
    """Fill local tensors."""
    for read in reads:
        source = store.piece(tensor, read.box)
        if read.there.sizes != source.shape:
            source = source[read.there.slices]
        _copy(store, tensor, source, view_of(targets[read.slot], read.here))


def _copy(store: Store, tensor: TensorEntry, source: npt.NDArray[Any], target: Tensor) -> None:
    straight = target.device.type == "cpu" and target.dtype == torch_dtype(tensor.dtype) and not target.is_conj()
    for rows in _steps(source, store.step_bytes):
        part, place = (source[rows], target[rows]) if rows else (source, target)
        if straight:
            np.copyto(_as_array(place), part)
        else:
            place.copy_(_staged(part, torch_dtype(tensor.dtype)))
        store.touch(_span(part))


def _steps(source: npt.NDArray[Any], step_bytes: int) -> Iterator[tuple[slice, ...]]:
    """Cut an array along its first dims into parts that span about this many bytes of the file."""
    if _span(source) <= step_bytes or source.ndim == 0:
        yield ()
        return
    row = _span(source) // len(source)
    count = max(1, step_bytes // max(1, row))
    for start in range(0, len(source), count):
        rows = slice(start, start + count)
        if count > 1:
            yield (rows,)
        else:
            yield from ((rows, *rest) for rest in _steps(source[start], step_bytes))


def _span(source: npt.NDArray[Any]) -> int:
    """The bytes of the file between the first and the last element of a part: a narrow one touches the pages of all."""
    return source.strides[0] * source.shape[0] if source.ndim and source.size else source.nbytes


def _as_array(target: Tensor) -> npt.NDArray[Any]:
    carrier = _CARRIERS[target.dtype.itemsize]
    if target.dtype != carrier:
        target = target.view(carrier)
    array: npt.NDArray[Any] = target.numpy()
    return array.view(CARRIERS[target.dtype.itemsize])


def _staged(part: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A copy of a part in host memory, as a tensor."""
    buffer = torch.empty(part.shape, dtype=dtype)
    np.copyto(_as_array(buffer), part)
    return buffer
