"""Which rank writes which boxes, and which of them share a file? A function of the layouts alone, without torch.

1. Each distinct box of a tensor is stored once. A box that one rank holds is written by it.
2. A large box with copies is cut into as many parts as it has copies, and each holder writes one.
3. Small boxes with copies go, largest first, to the holder that writes least so far.

So every rank finds the same answer without asking, and so does a process that only rewrites a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.index import StoredCut
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
    return CutPlan(_make_cut(layout, boxes), fixed, shared, load)


def _make_cut(layout: Layout, boxes: Sequence[Box]) -> StoredCut:
    size = (len(boxes), layout.ndim)
    offsets = np.array([b.offsets for b in boxes], np.int64).reshape(size)
    sizes = np.array([b.sizes for b in boxes], np.int64).reshape(size)
    return StoredCut(layout.shape, offsets, sizes, layout_to_json(layout)["spec"])


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


def assign_boxes(tensors: Sequence[TensorToSave], rank: int) -> tuple[list[CutPlan], list[BoxToWrite]]:
    """The plan of every tensor, and the boxes that this rank writes."""
    kinds = [(tensor.layout, tensor.dtype.itemsize) for tensor in tensors]
    counts = Counter(kinds)
    known = {kind: plan_cut(*kind) for kind in counts}  # one object for each kind: threads may have made one twice
    plans = [known[kind] for kind in kinds]
    load: Counter[int] = Counter()
    for (layout, itemsize), count in counts.items():
        load.update({writer: n * itemsize * count for writer, n in known[layout, itemsize].load.items()})
    parts = [BoxToWrite(i, box, holder) for i, plan in enumerate(plans) for box, holder in plan.fixed.get(rank, ())]
    shared = [
        (holders[0].here.numel * tensor.dtype.itemsize, number, box, holders)
        for number, (tensor, plan) in enumerate(zip(tensors, plans, strict=True))
        for box, holders in plan.shared
    ]
    for size, number, box, holders in sorted(shared, key=lambda s: (-s[0], s[1], s[2])):
        chosen = min(holders, key=lambda h: (load[h.rank], h.rank))
        load[chosen.rank] += size
        if chosen.rank == rank:
            parts.append(BoxToWrite(number, box, chosen))
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
