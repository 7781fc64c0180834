"""In which segments are the files of a new checkpoint written?

A segment is a part of a file that is copied, synced and recorded as one unit: some items, or some blocks of a large
one. Segments do not depend on the number of workers, so an interrupted run is taken up by any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.checkpoint.checksums import BLOCK_BYTES, combine_crc
from shardwise.checkpoint.formats.base import FilePlan, ItemSums, PlannedFile
from shardwise.checkpoint.index import Index, TensorEntry
from shardwise.geometry import Box

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
    plan: FilePlan, segments: Sequence[Segment], done: Mapping[int, Sequence[RangeSums]]
) -> list[tuple[PlannedFile, list[ItemSums]]]:
    """For each file the checksums and the CRC-32 of its items, from those of their ranges; `done` is by segment."""
    by_file: dict[int, dict[int, Sequence[RangeSums]]] = {}
    for number, results in done.items():
        by_file.setdefault(segments[number].file, {})[number] = results
    return [
        (file, join_file_sums(plan, file, segments, by_file.get(number, {})))
        for number, file in enumerate(plan.all_files())
    ]


def join_file_sums(
    plan: FilePlan, file: PlannedFile, segments: Sequence[Segment], done: Mapping[int, Sequence[RangeSums]]
) -> list[ItemSums]:
    """The checksums and the CRC-32 of the items of one file, of which all segments are in `done`."""
    found: dict[int, list[tuple[int, str, int, int]]] = {}
    for number, results in done.items():
        for part, (text, crc) in zip(segments[number].ranges, results, strict=True):
            found.setdefault(part.item, []).append((part.low, text, crc, part.high - part.low))
    return [_join_ranges(sorted(found.get(item, ())), plan.crc) for item in range(len(file.items))]


def _join_ranges(ranges: Sequence[tuple[int, str, int, int]], with_crc: bool) -> ItemSums:
    crc = ranges[0][2] if ranges else 0
    for _, _, part, length in ranges[1:] if with_crc else ():
        crc = combine_crc(crc, part, length)
    return "".join(text for _, text, _, _ in ranges), crc
