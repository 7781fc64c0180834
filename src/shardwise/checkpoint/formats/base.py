"""What is a checkpoint format? The protocol that a format implements, and the plan of the files that it writes.

A format is one class: it detects its folders, reads their index, and plans the files of a new one. `save`, `load`,
`open`, `reshard` and the commands know formats only through it. To add one, subclass `Format` in a file of its own and
put an instance in `formats/__init__.py`; `tests/checkpoint/test_format.py` does so with a format of 60 lines.

A `FilePlan` follows from layouts alone. It says which files each rank writes and which boxes are where in them; when
the bytes of all boxes of a file are there, it provides what surrounds them, and at the end the index.

Which rank writes which boxes, and which of them share a file? A function of the layouts alone, without torch.

1. Each distinct box of a tensor is stored once. A box that one rank holds is written by it.
2. A large box with copies is cut into as many parts as it has copies, and each holder writes one.
3. Small boxes with copies go, largest first, to the holder that writes least so far.

So every rank finds the same answer without asking, and so does a process that only rewrites a checkpoint.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from shardwise.checkpoint.files import CheckpointError, PositionedFile, ReadableFolder
from shardwise.checkpoint.index import BlockSums, Index, Json, StoredCut, checksum
from shardwise.geometry import Box, DType, Layout
from shardwise.geometry.placements import chunk_sizes
from shardwise.geometry.serialize import layout_to_json

MAX_FILE_BYTES = 16 << 30
SHARED_BOX_BYTES = 8 << 20


@dataclass(frozen=True, eq=False, slots=True)
class TensorToSave:
    """A tensor that the ranks save together."""

    name: str
    dtype: DType
    layout: Layout

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that holds a stored box: in which of its local tensors, and where in it."""

    rank: int
    slot: int
    here: Box


@dataclass(frozen=True, eq=False, slots=True)
class CutPlan:
    """The stored boxes of a layout: those that one rank writes, by rank, and those that several could."""

    cut: StoredCut
    fixed: Mapping[int, Sequence[tuple[int, Holder]]]
    shared: Sequence[tuple[int, Sequence[Holder]]]
    load: Mapping[int, int]


class BoxToWrite(NamedTuple):
    """A box to write: the number of the tensor, of the box in its cut, and where this rank has it."""

    tensor: int
    box: int
    holder: Holder


@lru_cache(maxsize=1024)
def plan_cut(layout: Layout, itemsize: int) -> CutPlan:
    """How tensors of this layout are cut, and who can write what.

    >>> from shardwise.geometry import ChunkSpec
    >>> plan = plan_cut(ChunkSpec(0, 2).layout((4, 2)), 4)
    >>> plan.cut.offsets.tolist(), sorted(plan.fixed)
    ([[0, 0], [2, 0]], [0, 1])
    """
    boxes: list[Box] = []
    fixed: dict[int, list[tuple[int, Holder]]] = {}
    shared: list[tuple[int, Sequence[Holder]]] = []
    for box, holders in _distinct_boxes(layout):
        if len(holders) == 1 or box.numel * itemsize >= SHARED_BOX_BYTES:
            for part, holder in _divide_box(box, holders):
                fixed.setdefault(holder.rank, []).append((len(boxes), holder))
                boxes.append(part)
        else:
            shared.append((len(boxes), holders))
            boxes.append(box)
    load = {rank: sum(holder.here.numel for _, holder in parts) for rank, parts in fixed.items()}
    size = (len(boxes), layout.ndim)
    offsets = np.array([b.offsets for b in boxes], np.int64).reshape(size)
    sizes = np.array([b.sizes for b in boxes], np.int64).reshape(size)
    return CutPlan(StoredCut(layout.shape, offsets, sizes, layout_to_json(layout)["spec"]), fixed, shared, load)


def _distinct_boxes(layout: Layout) -> list[tuple[Box, list[Holder]]]:
    """The distinct boxes of a layout that are not empty, each with its holders in order of rank."""
    table = layout.table
    found: dict[int, tuple[Box, list[Holder]]] = {}
    columns = (table.cells, table.offsets, table.sizes, table.local_offsets, table.ranks, table.slots)
    order = np.lexsort((table.ranks, table.cells))
    for cell, offsets, sizes, here, rank, slot in zip(*(c[order].tolist() for c in columns), strict=True):
        if 0 in sizes:
            continue
        box = Box(tuple(offsets), tuple(sizes))
        found.setdefault(cell, (box, []))[1].append(Holder(rank, slot, Box(tuple(here), tuple(sizes))))
    return list(found.values())


def _divide_box(box: Box, holders: Sequence[Holder]) -> list[tuple[Box, Holder]]:
    """The parts of a box, cut along its first dim that can be cut, one for each holder as far as they go."""
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or len(holders) == 1:
        return [(box, holders[0])]
    shares, start = [], 0
    for holder, length in zip(holders, chunk_sizes(box.sizes[dim], len(holders)), strict=True):
        if length:
            part = _narrow_box(box, dim, start, length)
            shares.append((part, Holder(holder.rank, holder.slot, _narrow_box(holder.here, dim, start, length))))
        start += length
    return shares


def _narrow_box(box: Box, dim: int, start: int, length: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = offsets[dim] + start, length
    return Box(tuple(offsets), tuple(sizes))


def assign_boxes(tensors: Sequence[TensorToSave]) -> tuple[list[CutPlan], dict[int, list[BoxToWrite]]]:
    """The plan of every tensor, and for each rank those of the boxes with several holders that it writes."""
    kinds = [(tensor.layout, tensor.dtype.itemsize) for tensor in tensors]
    counts = Counter(kinds)
    known = {kind: plan_cut(*kind) for kind in counts}  # one object for each kind: threads may have made one twice
    plans = [known[kind] for kind in kinds]
    load: Counter[int] = Counter()
    for (layout, itemsize), count in counts.items():
        load.update({writer: n * itemsize * count for writer, n in known[layout, itemsize].load.items()})
    parts: dict[int, list[BoxToWrite]] = {}
    shared = [
        (holders[0].here.numel * tensor.dtype.itemsize, number, box, holders)
        for number, (tensor, plan) in enumerate(zip(tensors, plans, strict=True))
        for box, holders in plan.shared
    ]
    for size, number, box, holders in sorted(shared, key=lambda s: (-s[0], s[1], s[2])):
        chosen = min(holders, key=lambda h: (load[h.rank], h.rank))
        load[chosen.rank] += size
        parts.setdefault(chosen.rank, []).append(BoxToWrite(number, box, chosen))
    return plans, parts


def pack_into_files(
    sizes: Sequence[tuple[int, int]], max_file_bytes: int, widest_first: bool = True
) -> list[list[int]]:
    """The numbers of what is in each file, from (width of an element, bytes) of each.

    >>> pack_into_files([(2, 8), (4, 8), (4, 4)], 14)
    [[1, 2], [0]]
    """
    files: list[list[int]] = []
    room = 0
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i][0] if widest_first else 0):
        if not files or sizes[number][1] > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(number)
        room -= sizes[number][1]
    return files


ItemSums: TypeAlias = tuple[str, int]  # the checksums of the blocks of an item, joined, and its CRC-32 if asked for


class FileItem(NamedTuple):
    """A box of a tensor, by their numbers in the plan, whose bytes begin at `begin` in its file."""

    tensor: int
    box: int
    begin: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to write: its length, and the items in it in ascending order; what surrounds them is written last.

    `data_start` and `header_sum`: where the items begin and the checksum of what comes before, if that is known.
    """

    name: str
    bytes: int
    items: Sequence[FileItem]
    data_start: int = 0
    header_sum: str | None = None


@dataclass(frozen=True)
class SaveRequest:
    """What is to be stored, by which ranks. `unreadable` entries of the source are left out; so may others be.

    `prefix`: what the names of all files but the index begin with; then there is an index, also of one file.
    """

    tensors: Sequence[TensorToSave]
    tree: Json
    ranks: Sequence[int]
    max_file_bytes: int | None = None
    unreadable: tuple[str, ...] = ()
    prefix: str = ""


def write_item(
    output: PositionedFile,
    position: int,
    parts: memoryview | Iterable[memoryview],
    with_crc: bool,
    lasting: bool = False,
) -> ItemSums:
    """Write the bytes of an item, or of some of its blocks; each part is hashed right before it is written.

    One part of at most a block, as those of a thousand small tensors, may be passed as it is.
    """
    if isinstance(parts, memoryview):
        output.write(position, parts, lasting)
        return checksum(parts), zlib.crc32(parts) if with_crc else 0
    sums, crc = BlockSums(), 0
    for part in parts:
        sums.update(part)
        crc = zlib.crc32(part, crc) if with_crc else 0
        output.write(position, part, lasting)
        position += len(part)
    return sums.text(), crc


class FilePlan(ABC):
    """The files of a checkpoint to write.

    `cuts`: the stored boxes of each tensor. `crc`: items need their CRC-32. `left_out`: entries that are not written.
    `gathers`: items are whole tensors, which are gathered on the rank that writes them; else `holder_of` finds them.
    """

    tensors: Sequence[TensorToSave]
    cuts: Sequence[StoredCut]
    ranks: Sequence[int]
    crc = False
    gathers = False
    left_out: tuple[str, ...] = ()

    @abstractmethod
    def files_of(self, rank: int) -> Sequence[PlannedFile]:
        """The files that a rank writes."""

    @abstractmethod
    def finish_file(self, file: PlannedFile, sums: Sequence[ItemSums]) -> list[tuple[int, bytes]]:
        """What a file contains besides its items: bytes, and where they begin."""

    @abstractmethod
    def make_index(self, written: Sequence[tuple[PlannedFile, Sequence[ItemSums]]]) -> tuple[str, bytes] | None:
        """The name and content of the file that is written last, if there is one."""

    def holder_of(self, item: FileItem, rank: int) -> Holder | None:
        """Where the writing rank has an item in its memory; None only where items are gathered."""
        return None

    def all_files(self) -> list[PlannedFile]:
        """The files of all ranks."""
        return [file for rank in self.ranks for file in self.files_of(rank)]

    def box_of(self, item: FileItem) -> Box:
        """The box of an item."""
        return self.cuts[item.tensor].box(item.box)

    def bytes_of(self, item: FileItem) -> int:
        """The length of an item."""
        return self.cuts[item.tensor].extents[item.box][1] * self.tensors[item.tensor].dtype.itemsize


@dataclass(eq=False)
class BoxAssignment:
    """How tensors are cut into boxes of which every one is in the memory of the rank that writes it."""

    tensors: Sequence[TensorToSave]
    ranks: Sequence[int]
    _parts: dict[int, Mapping[tuple[int, int], Holder]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = sorted({r for layout in {t.layout for t in self.tensors} for r in layout.ranks}) or self.ranks[:1]
        self.writers = frozenset(self.ranks)
        plans, self._shared = assign_boxes(self.tensors)
        self.cuts = [plan.cut for plan in plans]
        alike: dict[int, tuple[CutPlan, list[int]]] = {}
        for number, plan in enumerate(plans):
            alike.setdefault(id(plan), (plan, []))[1].append(number)
        self._alike = list(alike.values())

    def parts_of(self, rank: int) -> Mapping[tuple[int, int], Holder]:
        """The (tensor, box) that a rank writes, each with where the rank has it."""
        if rank not in self._parts:
            own = [
                (number, box, holder)
                for plan, numbers in self._alike
                if (fixed := plan.fixed.get(rank))
                for number in numbers
                for box, holder in fixed
            ]
            parts = [*sorted(own, key=itemgetter(0)), *self._shared.get(rank, ())]
            self._parts[rank] = {(number, box): holder for number, box, holder in parts}
        return self._parts[rank]


class Format(ABC):
    """A checkpoint format.

    - `name`: as it is asked for, such as "hf"; `title`: in words.
    - `index_names`: the files by one of which a folder is recognised, and which are written last.
    - `suffixes`: how the names of its other files end; a folder with other files is never replaced.
    - `writable`: whether checkpoints are written in it, or only read.
    - `companions`: the names of files beside the tensors that are copied along, such as "config.json".
    - `writer_name`: what the names of the files of a rank are like, with its number, if they say so.
    - `model_only`: it stores the tensors of a model, not what a training run has besides.
    - `has_values`, `has_layouts`, `has_copies`: whether it stores values that are not tensors, which rank stored what,
      and which ranks had copies of it.
    """

    name: str
    title: str
    index_names: tuple[str, ...]
    suffixes: tuple[str, ...]
    writable = True
    companions: tuple[str, ...] = ()
    writer_name: re.Pattern[str] | None = None
    model_only = False
    has_values = True
    has_layouts = True
    has_copies = False

    def detect(self, folder: ReadableFolder) -> str | None:
        """The name of the index in a folder of this format, or None for other folders."""
        return next((name for name in self.index_names if folder.has(name)), None)

    def is_complete(self, folder: ReadableFolder) -> bool:
        """Whether a folder has everything that a save in this format writes; the index comes last."""
        return self.detect(folder) is not None

    def accepts_file(self, name: str) -> bool:
        """Whether a single file of this name may be a checkpoint."""
        return False

    def title_of(self, index_name: str) -> str:
        """The format in words, for a checkpoint that has this index."""
        return self.title

    def writer_of(self, file_name: str) -> int | None:
        """The rank that wrote a file, if its name says so."""
        found = None if self.writer_name is None else self.writer_name.fullmatch(file_name)
        return int(found[1]) if found else None

    @abstractmethod
    def read_index(self, folder: ReadableFolder, index_name: str) -> tuple[Index, str]:
        """The index of a folder (or of the single file `index_name` in it), and a digest of what it describes."""

    @abstractmethod
    def plan_files(self, request: SaveRequest) -> FilePlan:
        """The files to write; raise for what the format cannot store."""


def digest_files(folder: ReadableFolder, names: Sequence[str]) -> list[list[str | int]]:
    """The length and time of files, for the digest of an index that has no checksums of them."""
    try:
        return [[name, *folder.version(name)] for name in names]
    except OSError as error:
        raise CheckpointError(f"{folder.path / str(error.filename)}: cannot be read: {error.strerror}") from error
