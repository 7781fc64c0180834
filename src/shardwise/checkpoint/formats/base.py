"""What is a checkpoint format? The protocol that a format implements, and the plan of the files that it writes.

A format is one class: it detects its folders, reads their index, and plans the files of a new one. `save`, `load`,
`open`, `reshard` and the commands know formats only through it. To add one, subclass `Format` in a file of its own and
put an instance in `formats/table.py`; `tests/local/test_checkpoint_format.py` does so with a format of 60 lines.

A `FilePlan` follows from layouts alone. It says which files each rank writes and which boxes are where in them; when
the bytes of all boxes of a file are there, it provides what surrounds them, and at the end the index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from shardwise.checkpoint.assign import Holder, TensorToSave, assign_boxes
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import Index, Json, StoredCut
from shardwise.checkpoint.storage.base import ReadableFolder
from shardwise.geometry import Box

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
    cuts: list[StoredCut] = field(default_factory=list)
    _parts: dict[int, Mapping[tuple[int, int], Holder]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranks = sorted({r for layout in {t.layout for t in self.tensors} for r in layout.ranks}) or self.ranks[:1]
        self.parts_of(self.ranks[0])

    def parts_of(self, rank: int) -> Mapping[tuple[int, int], Holder]:
        """The (tensor, box) that a rank writes, each with where the rank has it."""
        if rank not in self._parts:
            plans, parts = assign_boxes(self.tensors, rank)
            self.cuts = self.cuts or [plan.cut for plan in plans]
            self._parts[rank] = {(part.tensor, part.box): part.holder for part in parts}
        return self._parts[rank]


class Format(ABC):
    """A checkpoint format.

    - `name`: as it is asked for, such as "hf"; `title`: in words.
    - `index_names`: the files by one of which a folder is recognised, and which are written last.
    - `suffixes`: how the names of its other files end; a folder with other files is never replaced.
    - `writable`: whether checkpoints are written in it, or only read.
    - `companions`: the names of files beside the tensors that are copied along, such as "config.json".
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
        return None

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
