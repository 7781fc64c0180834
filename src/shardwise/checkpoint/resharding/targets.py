"""The formats in which a resharded checkpoint is written: which files, with what in them, and which index.

A target is planned from layouts alone. When all items are copied, it provides the bytes between them and the index.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.checkpoint import folders
from shardwise.checkpoint.assign import MAX_FILE_BYTES, CutPlan, TensorToSave, assign_boxes, pack_into_files
from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.safetensors_header import CODES, header_bytes, safetensors_code_and_shape
from shardwise.checkpoint.index import INDEX_NAME, FileEntry, Index, StoredCut, TensorEntry, stored_values
from shardwise.checkpoint.resharding.plan import FileItem, TargetFile
from shardwise.checkpoint.tree import Json
from shardwise.geometry import Box

MAX_HF_FILE_BYTES = 5_000_000_000
ItemSums: TypeAlias = Mapping[tuple[int, int], Sequence[tuple[str, int, int]]]


class Target(ABC):
    """A checkpoint to write. `crc`: items need their CRC-32. `left_out`: names of entries that are not written."""

    files: Sequence[TargetFile]
    crc = False
    left_out: tuple[str, ...] = ()

    @abstractmethod
    def between(self, file: int, found: ItemSums) -> list[tuple[int, bytes]]:
        """What a file contains besides its items: bytes, and where they begin."""

    @abstractmethod
    def index(self, found: ItemSums) -> tuple[str, bytes] | None:
        """The name and content of the file that is written last, if there is one."""


@dataclass(frozen=True, slots=True)
class TargetBox:
    """A stored box of a tensor: the tensor's number, the box's number in its cut, and the box."""

    tensor: int
    number: int
    box: Box


@dataclass(frozen=True, slots=True)
class RankBoxes:
    """The boxes that one rank writes."""

    rank: int
    boxes: Sequence[TargetBox]


def assign_target_boxes(tensors: Sequence[TensorToSave]) -> tuple[list[StoredCut], list[RankBoxes]]:
    """How every tensor is cut, and which boxes each rank writes: as a save from these ranks would."""
    ranks = sorted({rank for layout in {t.layout for t in tensors} for rank in layout.ranks})
    plans: list[CutPlan] = []
    shares = []
    for rank in ranks or [0]:
        plans, parts = assign_boxes(tensors, rank)
        shares.append(RankBoxes(rank, [TargetBox(p.tensor, p.box, plans[p.tensor].cut.box(p.box)) for p in parts]))
    return [plan.cut for plan in plans], shares


class ShardwiseTarget(Target):
    """A shardwise folder: the files of each rank, and an index with checksums."""

    def __init__(
        self,
        tensors: Sequence[TensorToSave],
        tree: Json,
        left_out: tuple[str, ...] = (),
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._tensors, self._tree, self.left_out = tensors, tree, left_out
        self._cuts, shares = assign_target_boxes(tensors)
        self._boxes: list[list[TargetBox]] = []
        self._headers: list[bytes] = []
        files: list[TargetFile] = []
        for share in shares:
            sizes = [(tensors[b.tensor].dtype.itemsize, self._nbytes(b)) for b in share.boxes]
            for number, chosen in enumerate(pack_into_files(sizes, max_file_bytes)):
                boxes = [share.boxes[i] for i in chosen]
                files.append(self._file(f"rank{share.rank:05d}-{number:05d}.safetensors", boxes))
        self.files = files

    def _nbytes(self, box: TargetBox) -> int:
        return box.box.numel * self._tensors[box.tensor].dtype.itemsize

    def _file(self, name: str, boxes: list[TargetBox]) -> TargetFile:
        entries = {
            self._key(b): (*safetensors_code_and_shape(self._tensors[b.tensor].dtype, b.box.sizes), self._nbytes(b))
            for b in boxes
        }
        header = header_bytes(entries, len(boxes))
        self._boxes.append(boxes)
        self._headers.append(header)
        items, position = [], len(header)
        for box in boxes:
            items.append(FileItem(self._tensors[box.tensor].name, box.box, position, self._nbytes(box)))
            position += self._nbytes(box)
        return TargetFile(name, position, items)

    def _key(self, box: TargetBox) -> str:
        name = self._tensors[box.tensor].name
        return name if len(self._cuts[box.tensor]) == 1 else f"{name}{box.box}"

    def between(self, file: int, found: ItemSums) -> list[tuple[int, bytes]]:
        return [(0, self._headers[file])]

    def index(self, found: ItemSums) -> tuple[str, bytes] | None:
        columns = [([0] * len(cut), [0] * len(cut), [""] * len(cut)) for cut in self._cuts]
        for number, (boxes, file) in enumerate(zip(self._boxes, self.files, strict=True)):
            for place, (box, item) in enumerate(zip(boxes, file.items, strict=True)):
                files, begins, sums = columns[box.tensor]
                files[box.number], begins[box.number] = number, item.begin
                sums[box.number] = "".join(text for text, *_ in found.get((number, place), ()))
        entries = [
            FileEntry(f.name, f.bytes, len(header), checksum(header))
            for f, header in zip(self.files, self._headers, strict=True)
        ]
        tensors = {
            t.name: TensorEntry(t.name, t.dtype, cut, *column)
            for t, cut, column in zip(self._tensors, self._cuts, columns, strict=True)
        }
        return INDEX_NAME, Index(entries, tensors, self._tree).to_bytes()


class HuggingFaceTarget(Target):
    """A Hugging Face folder: every tensor whole, values that are not tensors skipped."""

    def __init__(self, source: Index, max_file_bytes: int = MAX_HF_FILE_BYTES) -> None:
        self.left_out = (*stored_values(source), *source.opaque)
        entries = list(source.tensors.values())
        for entry in entries:
            if entry.dtype.torch_name not in CODES:
                raise CheckpointError(f"tensor {entry.name!r}: safetensors has no {entry.dtype}; use another format")
        groups = pack_into_files(
            [(e.dtype.itemsize, e.nbytes) for e in entries], max_file_bytes, widest_first=False
        ) or [[]]
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        self._headers: list[bytes] = []
        self.files = [
            self._file(name if len(groups) > 1 else folders.HF_SINGLE_NAME, [entries[i] for i in group])
            for name, group in zip(names, groups, strict=True)
        ]

    def _file(self, name: str, entries: Sequence[TensorEntry]) -> TargetFile:
        ordered = sorted(entries, key=lambda e: -e.dtype.itemsize)
        header = header_bytes({e.name: (CODES[e.dtype.torch_name], list(e.shape), e.nbytes) for e in ordered})
        self._headers.append(header)
        items, position = [], len(header)
        for entry in ordered:
            items.append(FileItem(entry.name, Box.whole(entry.shape), position, entry.nbytes))
            position += entry.nbytes
        return TargetFile(name, position, items)

    def between(self, file: int, found: ItemSums) -> list[tuple[int, bytes]]:
        return [(0, self._headers[file])]

    def index(self, found: ItemSums) -> tuple[str, bytes] | None:
        if len(self.files) == 1:
            return None
        weight_map = {item.tensor: file.name for file in self.files for item in file.items}
        total = sum(item.nbytes for file in self.files for item in file.items)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return folders.HF_INDEX_NAME, json.dumps(content, indent=2).encode()
