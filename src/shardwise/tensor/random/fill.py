"""Random numbers that do not depend on the layout: an element's value is a function of stream, shape and index alone.

1. All dims but the first are cut in tiles, by the global shape alone. A tile with the whole first dim is a *ribbon*.
2. Each ribbon is a sequence of its own: 128 bits mixed from (seed, count of the tensor, number of the ribbon) are the
   start of the generator PCG64-DXSM, which can jump to any position.
3. Along the ribbon the rows of the first dim follow each other in *units* of a fixed number of rows, so that a rank can
   enter a ribbon at any unit. It draws the units that meet its boxes and cuts out what it holds.
4. Numbers are drawn on the CPU, where they are the same for every device.

A box draws too much only where it cuts a tile or a unit: fewer than 128 elements at each end of a ribbon's rows, and in
each later dim fewer than a tile's edge at each end (64 or 128 for a matrix with many rows).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.geometry import Box, Layout, LayoutError
from shardwise.tensor.random.distributions import BLOCK, SCRATCH, Distribution, RawNumbers
from shardwise.tensor.random.streams import Stream

ROW_ELEMENTS = 128  # of a ribbon, where the first dim is long: wide enough to copy well, narrow enough to cut
RIBBON_ELEMENTS = 1 << 14  # at least, where the tensor has them: a ribbon costs some microseconds to enter
BATCH_ELEMENTS = 1 << 17  # computed at a time: they stay in the cache
STAGED_ELEMENTS = 1 << 24  # drawn at a time for a tensor on another device
UNIT_ELEMENTS = 4 * BLOCK  # at most, unless a single row has more
INCREMENT = 0x5851F42D4C957F2D14057B7EF767814F  # of the generator's steps: any odd number


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the index space of a shape is cut: the edges of the tiles of all dims but the first.

    >>> Tiling.of((4096, 4096)).edges, Tiling.of((512, 512, 3, 3)).edges, Tiling.of((2, 10**6)).edges
    ((128,), (8, 3, 3), (8192,))
    """

    shape: tuple[int, ...]
    edges: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int]) -> Tiling:
        """The tiling of a shape; a 0-dim tensor is tiled as one row."""
        return _cached_tiling(tuple(shape) or (1,))

    def ribbons(self, box: Box) -> Iterator[Ribbon]:
        """The ribbons that a box meets, each with what it meets of their tile."""
        spans = list(zip(self.edges, box.offsets[1:], box.ends[1:], strict=True))
        counts = [-(-length // edge) for length, edge in zip(self.shape[1:], self.edges, strict=True)]
        for tile in itertools.product(*(range(low // edge, -(-high // edge)) for edge, low, high in spans)):
            number = 0
            for index, count in zip(tile, counts, strict=True):
                number = number * count + index
            starts = [index * edge for index, edge in zip(tile, self.edges, strict=True)]
            ends = [min(s + e, n) for s, e, n in zip(starts, self.edges, self.shape[1:], strict=True)]
            cut = [
                slice(max(low, s) - s, min(high, e) - s)
                for s, e, (_, low, high) in zip(starts, ends, spans, strict=True)
            ]
            into = [
                slice(max(s, low) - low, min(e, high) - low)
                for s, e, (_, low, high) in zip(starts, ends, spans, strict=True)
            ]
            yield Ribbon(number, tuple(e - s for s, e in zip(starts, ends, strict=True)), tuple(cut), tuple(into))


@lru_cache(maxsize=4096)
def _cached_tiling(shape: tuple[int, ...]) -> Tiling:
    budget = max(ROW_ELEMENTS, RIBBON_ELEMENTS // max(shape[0], 1))
    edges = [1] * (len(shape) - 1)
    while True:
        growing = [d for d, edge in enumerate(edges) if edge < shape[1 + d]]
        dim = min(growing, key=lambda d: (edges[d] // 8 if d == len(edges) - 1 else edges[d], -d), default=None)
        if dim is None:
            break
        wider = min(2 * edges[dim], shape[1 + dim])
        if math.prod(edges) // edges[dim] * wider > budget:
            break
        edges[dim] = wider
    return Tiling(shape, tuple(edges))


@dataclass(frozen=True, slots=True)
class Ribbon:
    """One ribbon: its number, the sizes of its tile, what of the tile is wanted, and where in the box that goes."""

    number: int
    sizes: tuple[int, ...]
    cut: tuple[slice, ...]
    into: tuple[slice, ...]


@lru_cache(maxsize=4096)
def unit_of(row: int) -> tuple[int, int]:
    """The rows of a unit and the numbers drawn for it, which are whole blocks, for rows of `row` elements.

    >>> unit_of(128), unit_of(1), unit_of(48)
    ((1, 128), (32, 32), (2, 96))
    """
    most = max(1, UNIT_ELEMENTS // row)
    rows = min(range(1, most + 1), key=lambda n: (-(-n * row // BLOCK) / (n * row), n))
    return rows, -(-rows * row // BLOCK) * BLOCK


class NumberSource:
    """Draws the raw numbers of one stream at any place."""

    def __init__(self, stream: Stream, numbers: RawNumbers) -> None:
        self._stream = stream
        self._numbers = numbers
        self._bits = np.random.PCG64DXSM(0)
        self._generator = np.random.Generator(self._bits)

    def draw(self, ribbon: int, position: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with the numbers of a ribbon from a position on, which is a multiple of the block."""
        words = struct.pack("<QQQQ", self._stream.seed, self._stream.count, self._numbers.lane, ribbon)
        start = int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "little")
        self._bits.state = {
            "bit_generator": "PCG64DXSM",
            "state": {"state": start, "inc": INCREMENT},
            "has_uint32": 0,
            "uinteger": 0,
        }
        if position:
            self._bits.advance(position // self._numbers.per_step)
        self._numbers.fill(self._generator, out)


@dataclass(frozen=True, slots=True)
class _RibbonRows:
    """Some rows of a ribbon: from where and how much is drawn, what of it is skipped, and where the rest goes."""

    ribbon: Ribbon
    position: int
    count: int
    unit: tuple[int, int]
    skip: int
    rows: slice


def fill_box(target: Tensor, shape: Sequence[int], box: Box, stream: Stream, values: Distribution) -> None:
    """Write the values of a box of a tensor of this shape into `target`, in place.

    >>> from shardwise.tensor.random.distributions import uniform
    >>> whole, part = torch.empty(4, 6), torch.empty(2, 3)
    >>> fill_box(whole, (4, 6), Box.whole((4, 6)), Stream(1), uniform(0, 1, torch.float32))
    >>> fill_box(part, (4, 6), Box((1, 2), (2, 3)), Stream(1), uniform(0, 1, torch.float32))
    >>> torch.equal(whole[1:3, 2:5], part)
    True
    """
    if box.numel == 0 or target.is_meta:
        return
    if target.is_complex():
        real = Box((*box.offsets, 0), (*box.sizes, 2))
        return fill_box(torch.view_as_real(target), (*shape, 2), real, stream, values)
    if box.ndim == 0:
        return fill_box(target.view(1), (1,), Box((0,), (1,)), stream, values)
    if not target.is_cpu:
        return _fill_staged(target, shape, box, stream, values)
    source = NumberSource(stream, values.numbers)
    buffers = BatchBuffers(values)
    for parts in _batch_rows(Tiling.of(shape), box):
        _fill_batch(target, parts, source, buffers)
    return None


class BatchBuffers:
    """Memory for the numbers and the intermediate results of a batch, used again by the next one."""

    def __init__(self, values: Distribution) -> None:
        self._values = values
        self._memory: npt.NDArray[Any] = np.empty((1 + SCRATCH, 0), values.numbers.dtype)

    def numbers(self, count: int) -> npt.NDArray[Any]:
        """Room for the raw numbers of a batch."""
        if self._memory.shape[1] < count:
            self._memory = np.empty((1 + SCRATCH, count), self._values.numbers.dtype)
        return self._memory[0, :count]

    def values(self, count: int) -> Tensor:
        """The values made from the numbers of a batch."""
        memory = torch.from_numpy(self._memory[:, :count])
        return self._values.compute(memory[0], memory[1:])


def _fill_batch(target: Tensor, parts: Sequence[_RibbonRows], source: NumberSource, buffers: BatchBuffers) -> None:
    ends = list(itertools.accumulate(part.count for part in parts))
    raw = buffers.numbers(ends[-1])
    for part, end in zip(parts, ends, strict=True):
        source.draw(part.ribbon.number, part.position, raw[end - part.count : end])
    computed = buffers.values(ends[-1])
    for part, end in zip(parts, ends, strict=True):
        _place_rows(target, part, computed[end - part.count : end])


def _fill_staged(target: Tensor, shape: Sequence[int], box: Box, stream: Stream, values: Distribution) -> None:
    """Draw on the CPU and copy, some rows at a time."""
    step = max(1, STAGED_ELEMENTS * box.sizes[0] // box.numel)
    for start in range(0, box.sizes[0], step):
        rows = min(step, box.sizes[0] - start)
        part = Box((box.offsets[0] + start, *box.offsets[1:]), (rows, *box.sizes[1:]))
        staged = torch.empty(part.sizes, dtype=target.dtype, device="cpu")
        fill_box(staged, shape, part, stream, values)
        target[start : start + rows].copy_(staged)


def _batch_rows(tiling: Tiling, box: Box) -> Iterator[list[_RibbonRows]]:
    """What is drawn and computed at a time."""
    batch: list[_RibbonRows] = []
    drawn = 0
    for part in _ribbon_rows(tiling, box):
        batch.append(part)
        drawn += part.count
        if drawn >= BATCH_ELEMENTS:
            yield batch
            batch, drawn = [], 0
    if batch:
        yield batch


def _ribbon_rows(tiling: Tiling, box: Box) -> Iterator[_RibbonRows]:
    """The rows of the ribbons that a box meets, in runs of at most a batch."""
    low, high = box.offsets[0], box.ends[0]
    for ribbon in tiling.ribbons(box):
        rows, width = unit = unit_of(math.prod(ribbon.sizes))
        step = max(1, BATCH_ELEMENTS // width)
        for first in range(low // rows, -(-high // rows), step):
            start, end = max(low, first * rows), min(high, (first + step) * rows)
            units = -(-end // rows) - first
            place = slice(start - low, end - low)
            yield _RibbonRows(ribbon, first * width, units * width, unit, start - first * rows, place)


def _place_rows(target: Tensor, part: _RibbonRows, drawn: Tensor) -> None:
    """Cut what is wanted out of the drawn units and copy it to its place."""
    rows, width = part.unit
    row = math.prod(part.ribbon.sizes)
    whole = drawn if rows * row == width else drawn.view(-1, width)[:, : rows * row]
    lines = whole.reshape(-1, *part.ribbon.sizes)
    count = part.rows.stop - part.rows.start
    target[(part.rows, *part.ribbon.into)].copy_(lines[(slice(part.skip, part.skip + count), *part.ribbon.cut)])


def fill_locals(layout: Layout, rank: int, locals_: Sequence[Tensor], stream: Stream, values: Distribution) -> None:
    """Write a rank's part of the values of a tensor into its local tensors, in place.

    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor.random.distributions import normal
    >>> def local(spec, rank):
    ...     layout = spec.layout((6, 4))
    ...     tensors = [torch.empty(s) for s in layout.local_shapes(rank)]
    ...     fill_locals(layout, rank, tensors, Stream(5), normal(0, 1, torch.float32))
    ...     return tensors[0]
    >>> whole = local(ChunkSpec(0, ranks=1), rank=0)
    >>> torch.equal(local(ChunkSpec(1, ranks=2), rank=1), whole[:, 2:])
    True
    """
    own = layout.table.take(layout.rows_of(rank))
    columns = (own.offsets.tolist(), own.sizes.tolist(), own.slots.tolist(), own.local_offsets.tolist())
    for offsets, sizes, slot, local_offsets in zip(*columns, strict=True):
        inside = tuple(slice(o, o + s) for o, s in zip(local_offsets, sizes, strict=True))
        fill_box(locals_[slot][inside], layout.shape, Box(tuple(offsets), tuple(sizes)), stream, values)


def check_not_pending(layout: Layout, what: str) -> None:
    """Raise unless every local tensor of a layout holds values."""
    if layout.pending is not None:
        raise LayoutError(
            f"{what} on a tensor with a pending {layout.pending}: its local tensors are addends, which have no random "
            "value of their own; use Shard or Replicate instead of Partial, or redistribute the tensor first"
        )
