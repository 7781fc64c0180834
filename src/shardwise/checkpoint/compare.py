"""Do two stored tensors have the same values? Whatever their formats, layouts and worlds, in bounded memory.

1. The stored boxes of one meet those of the other in regions, each of which is in one file on either side.
2. A region is read in parts that touch few pages. Equal bits are equal elements; nothing else is done with them.
3. The elements whose bits differ are turned into numbers: how many differ, and by how much.

Elements are equal if their bits are, or if both are NaN. With tolerances they are also equal if they are near.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.converting.elements import decode_numbers, has_numbers
from shardwise.checkpoint.index import StoredCut, TensorEntry
from shardwise.checkpoint.store import Store, StoredRegion
from shardwise.geometry import Box, DType
from shardwise.transfer.intersect import overlaps_with_boxes

PART_BYTES = 4 << 20
_PART_ELEMENTS = 1 << 18
ArrayPair: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart equal elements may be: |a - b| <= atol + rtol * |b|. Nothing at all by default."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def exact(self) -> bool:
        return self.atol == self.rtol == 0


EXACT = Tolerance()


@dataclass(frozen=True, slots=True)
class Difference:
    """How many elements differ, the largest |a - b| and the largest |a - b| / |b|; NaN is infinitely far from numbers.

    >>> Difference(1, 0.5, 0.1) + Difference(2, 0.25, 0.2)
    Difference(count=3, max_abs=0.5, max_rel=0.2)
    """

    count: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def __add__(self, other: Difference) -> Difference:
        absolute, relative = max(self.max_abs, other.max_abs), max(self.max_rel, other.max_rel)
        return Difference(self.count + other.count, absolute, relative)


@dataclass(frozen=True, eq=False, slots=True)
class ComparedTensor:
    """A tensor of a checkpoint: its entry in the index, and the files."""

    store: Store
    entry: TensorEntry


def compare_stored(
    a: ComparedTensor,
    b: ComparedTensor,
    tolerance: Tolerance = EXACT,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Difference:
    """Compare two tensors of one shape; `on_bytes` is called with the bytes of the first read so far."""
    kinds = (a.entry.dtype, b.entry.dtype)
    found = Difference()
    for left, right in _iterate_pairs(a, b):
        found += _compare_pair((left.load(), right.load()), kinds, tolerance)
        on_bytes(left.nbytes)
        a.store.touch(left.span)
        b.store.touch(right.span)
    return found


def _iterate_pairs(a: ComparedTensor, b: ComparedTensor) -> Iterator[tuple[StoredRegion, StoredRegion]]:
    """The same elements of both, part by part, each of which spans few bytes of its file."""
    for box, cell, here, there in _overlapping_regions(a.entry.cut, b.entry.cut):
        left, right = a.store.region(a.entry, box).part(here), b.store.region(b.entry, cell).part(there)
        for slices in left.split(PART_BYTES):
            some_left, some_right = left.part(slices), right.part(slices)
            yield from ((some_left.part(s), some_right.part(s)) for s in some_right.split(PART_BYTES))


@lru_cache(maxsize=64)
def _overlapping_regions(
    cut: StoredCut, other: StoredCut
) -> list[tuple[int, int, tuple[slice, ...], tuple[slice, ...]]]:
    """Where the boxes of two cuts meet: their numbers, and the region in each. Tensors that are cut alike share it."""
    if not len(cut) or not len(other):
        return []
    met = overlaps_with_boxes(cut.shape, cut.offsets, cut.sizes, other.offsets, other.sizes)
    columns = (met.boxes, met.cells, met.starts - cut.offsets[met.boxes], met.starts - other.offsets[met.cells])
    return [
        (box, cell, Box(tuple(here), tuple(sizes)).slices, Box(tuple(there), tuple(sizes)).slices)
        for box, cell, here, there, sizes in zip(*(c.tolist() for c in (*columns, met.sizes)), strict=True)
    ]


def _compare_pair(pair: ArrayPair, kinds: tuple[DType, DType], near: Tolerance) -> Difference:
    left, right = pair
    if kinds[0] == kinds[1]:
        apart = _view_as_bits(left) != _view_as_bits(right)
        if not apart.any():
            return Difference()
        left, right = left[apart], right[apart]
    left, right = left.reshape(-1), right.reshape(-1)
    found = Difference()
    for start in range(0, len(left), _PART_ELEMENTS):
        part = slice(start, start + _PART_ELEMENTS)
        found += _compare_values(left[part], right[part], kinds, near)
    return found


def _view_as_bits(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Elements as something that is equal if, and only if, its bits are; 16 bytes are carried as complex numbers."""
    return part.view([("real", "<u8"), ("imag", "<u8")]) if part.dtype.kind == "c" else part


def _compare_values(
    left: npt.NDArray[Any], right: npt.NDArray[Any], kinds: tuple[DType, DType], near: Tolerance
) -> Difference:
    """Compare elements that may differ; those of one type are known to have different bits."""
    if not all(map(has_numbers, kinds)):
        return Difference(len(left), np.inf, np.inf)
    a, b = decode_numbers(left, kinds[0]), decode_numbers(right, kinds[1])
    with np.errstate(all="ignore"):
        distance = _absolute_difference(a, b)
        size = np.abs(b.astype(np.float64) if b.dtype.kind in "iu" else b)
        same = np.isnan(a) & np.isnan(b)
        if kinds[0] != kinds[1] or not near.exact:
            same |= (a == b) | (distance <= near.atol + near.rtol * size)
        distance, size = distance[~same], size[~same]
        distance[np.isnan(distance)] = np.inf
        relative = distance / size
        relative[np.isnan(relative)] = np.inf
        relative[distance == 0] = 0
    if not len(distance):
        return Difference()
    return Difference(len(distance), float(distance.max()), float(relative.max()))


def _absolute_difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """|a - b|; that of two integers is found without overflow."""
    if a.dtype != b.dtype:
        a, b = (n.astype(np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64) for n in (a, b))
    if a.dtype.kind in "iu":
        left, right = a.view(np.uint64), b.view(np.uint64)
        return np.where(a > b, left - right, right - left).astype(np.float64)
    return np.asarray(np.abs(a - b))
