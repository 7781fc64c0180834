"""In which segments are the files of a new checkpoint written?

A segment is a part of a file that is copied, synced and recorded as one unit: some items, or some blocks of a large
one. Segments do not depend on the number of workers, so an interrupted run is taken up by any number of them.

Which layout does each tensor get when a checkpoint is resharded? From a plan, from one text, or the one it has.

One layout for all tensors has to define what happens to those it does not fit:

1. A tensor without the dim that an axis splits is replicated along that axis.
2. A tensor that still does not fit (sizes or groups that do not add up to its length, another grid, other pieces) is
   replicated on all ranks of the layout.

Which files are copied along with a model's tensors? Its configuration and tokenizer, so that it can be loaded.

They are small, and copied as they are; only the dtype in `config.json` follows that of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from shardwise.checkpoint.files import CheckpointError, ReadableFolder
from shardwise.checkpoint.formats.base import FilePlan, Format, ItemSums, PlannedFile
from shardwise.checkpoint.index import BLOCK_BYTES, Index, TensorEntry, checksum, combine_crc, stored_layout
from shardwise.geometry import (
    Box,
    DType,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingSpec,
    parse_placements,
    parse_spec,
)

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


AXIS = "ranks"


class LayoutPlan(Protocol):
    """The interface of a plan by pattern, such as `shardwise.nn.ModelPlan`."""

    def specs_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, ShardingSpec]:
        """The spec of every tensor, by name."""


@dataclass(frozen=True)
class ChosenLayouts:
    """The layout of every tensor, and the names of those that one layout for all did not fit."""

    layouts: Mapping[str, Layout]
    unfit: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for layout in set(self.layouts.values()) for rank in layout.ranks}))


def choose_layouts(
    index: Index, plan: LayoutPlan | None, layout: ShardingSpec | str | None, ranks: int | None
) -> ChosenLayouts:
    """The layouts that the arguments ask for, checked against all tensors of a checkpoint."""
    shapes = {name: entry.shape for name, entry in index.tensors.items()}
    if plan is not None and layout is not None:
        raise CheckpointError("both a plan and a layout were passed; pass one of them")
    if plan is not None:
        chosen = ChosenLayouts({name: spec.layout(shapes[name]) for name, spec in plan.specs_of(shapes).items()})
    elif layout is not None:
        chosen = fit_layouts(spec_for(layout, ranks), shapes)
        if shapes and len(chosen.unfit) == len(shapes):
            longest = max(shapes.values(), key=len)
            raise CheckpointError(
                f"the layout {layout} fits none of the {len(shapes)} tensors, which have up to {len(longest)} dims, as "
                f"in {list(longest)}; choose another one"
            )
    elif ranks is not None:
        raise CheckpointError(f"{ranks} ranks, but no layout for them; pass one such as 'S(0)'")
    else:
        return ChosenLayouts({name: stored_layout(entry) for name, entry in index.tensors.items()})
    if ranks is not None and chosen.layouts and len(chosen.ranks) != ranks:
        raise CheckpointError(
            f"{ranks} ranks were requested, but the {'plan' if layout is None else f'layout {layout}'} covers "
            f"{len(chosen.ranks)}; omit the number of ranks, or make both agree"
        )
    return chosen


def spec_for(layout: ShardingSpec | str, ranks: int | None) -> ShardingSpec:
    """The spec of a layout's text: a rule of the notation, or one placement for a number of ranks.

    >>> spec_for("S(0)", 4), spec_for("on dp=2,tp=2: R, S(1)", None)
    (MeshSpec(ranks=4, (Shard(0),)), MeshSpec(dp=2,tp=2, (Replicate(), Shard(1))))
    """
    if isinstance(layout, ShardingSpec):
        spec = layout
    elif layout.lstrip().startswith(("on ", "as ", "@")):
        spec = parse_spec(layout)
    else:
        placements = parse_placements(layout)
        if ranks is None or len(placements) != 1:
            raise CheckpointError(
                f"the layout {layout!r} does not say which ranks it is for; pass the number of ranks with a single "
                "placement, or write the mesh, as in 'on dp=2,tp=4: R, S(0)'"
            )
        spec = MeshSpec(Mesh.of(**{AXIS: ranks}), placements)
    if spec.reduction() is not None:
        raise CheckpointError(f"the layout {layout} leaves a reduction pending; a checkpoint stores reduced tensors")
    return spec


def fit_layouts(spec: ShardingSpec, shapes: Mapping[str, tuple[int, ...]]) -> ChosenLayouts:
    """One spec for all tensors; those that it does not fit are replicated, as the module docstring says."""
    known: dict[tuple[int, ...], tuple[Layout, bool]] = {}
    for shape in shapes.values():
        if shape not in known:
            known[shape] = _fit_layout(spec, shape)
    unfit = tuple(name for name, shape in shapes.items() if not known[shape][1])
    return ChosenLayouts({name: known[shape][0] for name, shape in shapes.items()}, unfit)


def _fit_layout(spec: ShardingSpec, shape: tuple[int, ...]) -> tuple[Layout, bool]:
    try:
        return spec.layout(shape), True
    except LayoutError:
        if isinstance(spec, MeshSpec):
            kept = [_drop_missing_dim(p, len(shape)) for p in spec.placements]
            return _layout_or_copies(
                MeshSpec(spec.mesh, kept, spec.order), shape, spec.mesh.ranks.reshape(-1).tolist()
            ), False
        return _replicated_layout(_ranks_of(spec), shape), False


def _layout_or_copies(spec: MeshSpec, shape: tuple[int, ...], ranks: Iterable[int]) -> Layout:
    try:
        return spec.layout(shape)
    except LayoutError:
        return _replicated_layout(ranks, shape)


def _drop_missing_dim(placement: Placement, ndim: int) -> Placement:
    missing = isinstance(placement, Shard) and not -ndim <= placement.dim < ndim
    assert not isinstance(placement, Partial), "specs with a pending reduction are refused before"
    return Replicate() if missing else placement


def _replicated_layout(ranks: Iterable[int], shape: tuple[int, ...]) -> Layout:
    return MeshSpec(Mesh((AXIS,), list(ranks)), (Replicate(),)).layout(shape)


def _ranks_of(spec: ShardingSpec) -> list[int]:
    """The ranks of a chunk, grid or enumerable spec."""
    ranks = getattr(spec, "ranks", None)
    if ranks is None:
        raise CheckpointError(f"the layout {spec!r} fits only some tensors; pass a plan that says which")
    return [int(rank) for rank in np.unique(np.asarray(ranks))]


_CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")
_MAX_FILE_BYTES = 1 << 26


def read_companions(folder: ReadableFolder, format: Format, dtype: DType | None, required: bool) -> dict[str, bytes]:
    """The files of a folder that a format has beside its tensors; an error if some are `required` and there is none."""
    found = {name: folder.read(name, _MAX_FILE_BYTES) for name in format.companions if folder.has(name)}
    if required and _CONFIG not in found:
        raise CheckpointError(f"{folder.path}: it has no {_CONFIG}; pass the folder that has the model's")
    if dtype is not None and _CONFIG in found:
        found[_CONFIG] = _set_config_dtype(found[_CONFIG], dtype)
    return found


def _set_config_dtype(data: bytes, dtype: DType) -> bytes:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return data  # copied as it is: whoever loads the model will say so
    keys = [key for key in _DTYPE_KEYS if isinstance(config, dict) and isinstance(config.get(key), str)]
    if not keys:
        return data
    return json.dumps({**config, **dict.fromkeys(keys, dtype.torch_name)}, indent=2).encode() + b"\n"


def digest_companions(files: dict[str, bytes]) -> list[list[str]]:
    """What identifies the files, for a run that is resumed."""
    return [[name, checksum(data)] for name, data in sorted(files.items())]
