"""The format of shardwise: safetensors files of the boxes that each rank holds, and one JSON index with checksums.

Reading trusts nothing: names of files are plain names, boxes tile the shape, ranges are in their files and do not
overlap. Work and memory grow with the length of the index, never with a number written in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from shardwise.checkpoint.files import CheckpointError, ReadableFolder
from shardwise.checkpoint.formats.base import (
    MAX_FILE_BYTES,
    BoxAssignment,
    FileItem,
    Format,
    Holder,
    ItemSums,
    PlannedFile,
    SaveRequest,
    pack_into_files,
)
from shardwise.checkpoint.formats.huggingface import SafetensorsPlan
from shardwise.checkpoint.index import (
    MAX_DIMS,
    MAX_NUMBER,
    SUM_DIGITS,
    FileEntry,
    Index,
    StoredCut,
    TensorEntry,
    check_name_bytes,
    check_ranges,
    checksum,
)
from shardwise.geometry import LayoutError, find_dtype
from shardwise.geometry.layout import check_coverage
from shardwise.geometry.mesh import IntArray

INDEX_NAME = "shardwise.index.json"
_FORMAT = "shardwise"
_VERSION = 1
_KEYS = {"format", "version", "checksum", "block_bytes", "files", "cuts", "tensors", "tree", "index_sum"}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")
_SUM_KEY = ',"index_sum":"'  # the last entry of an index: the checksum of all that comes before it
_SUMS = re.compile(f"(?:[0-9a-f]{{{SUM_DIGITS}}})*")


class ShardwiseFormat(Format):
    """Boxes as they are in the memory of the ranks, with checksums of every block."""

    name = "shardwise"
    title = "shardwise"
    index_names = (INDEX_NAME,)
    suffixes = (".safetensors",)
    has_copies = True

    writer_name = re.compile(r"(?:[0-9a-f]+-)?rank(\d{1,9})-\d+\.safetensors")

    def read_index(self, folder: ReadableFolder, index_name: str) -> tuple[Index, str]:
        data = folder.read(index_name)
        return parse_index(data, str(folder.path / index_name)), checksum(data)

    def plan_files(self, request: SaveRequest) -> ShardwisePlan:
        return ShardwisePlan(request)


class ShardwisePlan(SafetensorsPlan):
    """The files of each rank: boxes that it holds, the widest elements first."""

    def __init__(self, request: SaveRequest) -> None:
        super().__init__()
        self.tensors, self.left_out, self._tree = request.tensors, request.unreadable, request.tree
        self._max_file_bytes = MAX_FILE_BYTES if request.max_file_bytes is None else request.max_file_bytes
        self._assigned, self._prefix = BoxAssignment(request.tensors, request.ranks), request.prefix
        self.cuts, self.ranks = self._assigned.cuts, self._assigned.ranks
        self._files: dict[int, list[PlannedFile]] = {}

    def key_of(self, tensor: int, box: int) -> str:
        return self.tensors[tensor].name + self.cuts[tensor].labels[box]

    def files_of(self, rank: int) -> Sequence[PlannedFile]:
        if rank not in self._assigned.writers:
            return []
        if rank not in self._files:
            boxes = list(self._assigned.parts_of(rank))
            sizes = [(self.tensors[t].dtype.itemsize, self.bytes_of(FileItem(t, box, 0))) for t, box in boxes]
            self._files[rank] = [
                self.plan_file(f"{self._prefix}rank{rank:05d}-{number:05d}.safetensors", [boxes[i] for i in chosen])
                for number, chosen in enumerate(pack_into_files(sizes, self._max_file_bytes))
            ]
        return self._files[rank]

    def holder_of(self, item: FileItem, rank: int) -> Holder | None:
        return self._assigned.parts_of(rank)[item.tensor, item.box]

    def make_index(self, written: Sequence[tuple[PlannedFile, Sequence[ItemSums]]]) -> tuple[str, bytes] | None:
        columns: list[tuple[list[int], list[int], list[str]]] = [
            ([-1] * len(cut), [0] * len(cut), [""] * len(cut)) for cut in self.cuts
        ]
        for number, (file, found) in enumerate(written):
            for (tensor, box, begin), (sums, _) in zip(file.items, found, strict=True):
                numbers, begins, all_sums = columns[tensor]
                numbers[box], begins[box], all_sums[box] = number, begin, sums
        if any(-1 in numbers for numbers, _, _ in columns):
            raise CheckpointError("a box of a tensor was written by no rank")
        files = [FileEntry(file.name, file.bytes, file.data_start, file.header_sum) for file, _ in written]
        tensors = {
            t.name: TensorEntry(t.name, t.dtype, cut, *column)
            for t, cut, column in zip(self.tensors, self.cuts, columns, strict=True)
        }
        return INDEX_NAME, index_to_bytes(Index(files, tensors, self._tree))


def index_to_bytes(index: Index) -> bytes:
    """The index as it is stored."""
    cuts: dict[int, int] = {}
    for entry in index.tensors.values():
        cuts.setdefault(id(entry.cut), len(cuts))
    by_number = {cuts[id(e.cut)]: e.cut for e in index.tensors.values()}
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "checksum": "xxh3-64",
        "block_bytes": index.block_bytes,
        "files": [[f.name, f.bytes, f.data_start, f.header_sum] for f in index.files],
        "cuts": [
            {"shape": cut.shape, "offsets": cut.offsets.tolist(), "sizes": cut.sizes.tolist(), "spec": cut.spec}
            for _, cut in sorted(by_number.items(), key=itemgetter(0))
        ],
        "tensors": {
            e.name: [e.dtype.torch_name, cuts[id(e.cut)], list(e.files), list(e.begins), list(e.sums)]
            for e in index.tensors.values()
        },
        "tree": index.tree,
    }
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return data + f'{_SUM_KEY}{checksum(data)}"}}'.encode()


def parse_index(data: bytes, name: str) -> Index:
    """The index from its stored form; `name` is the file, for errors."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not JSON: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{name}: not the index of a shardwise checkpoint")
    if content.get("version") != _VERSION:
        raise CheckpointError(
            f"{name}: version {str(content.get('version'))[:20]} of the format; this shardwise reads version {_VERSION}"
        )
    _check_index_sum(data, content, name)
    try:
        check_name_bytes(content["tree"], len(data), name)
        return _IndexParser(content, name).index()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{name}: the index is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _check_index_sum(data: bytes, content: dict[str, Any], name: str) -> None:
    """Raise unless an index has the checksum that it names; indexes of earlier releases name none."""
    unknown = sorted(content.keys() - _KEYS)
    if unknown:
        raise CheckpointError(f"{name}: the index is damaged: it has an unknown entry {unknown[0][:40]!r}")
    if "index_sum" not in content:
        return
    body, key, rest = data.rpartition(_SUM_KEY.encode())
    if not key or rest != f'{checksum(body)}"}}'.encode():
        raise CheckpointError(f"{name}: the index is damaged: its checksum differs")


class _IndexParser:
    """One pass over the content of an index; errors name the file."""

    def __init__(self, content: dict[str, Any], name: str) -> None:
        self.content, self.name = content, name

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {text}")

    def index(self) -> Index:
        block_bytes = self.content["block_bytes"]
        if type(block_bytes) is not int or not 1 << 10 <= block_bytes <= 1 << 30:
            raise self.error(f"blocks of {str(block_bytes)[:30]} bytes; they must have 1 KiB to 1 GiB")
        files = [self.file(entry) for entry in self.content["files"]]
        if len({f.name for f in files}) != len(files):
            raise self.error("a file is listed twice")
        cuts = [self.cut(entry) for entry in self.content["cuts"]]
        tensors = {name: self.tensor(name, entry, cuts) for name, entry in self.content["tensors"].items()}
        check_ranges(tensors, files, block_bytes, self.name)
        index = Index(files, tensors, self.content["tree"], block_bytes)
        self.check_tree(index)
        return index

    def check_tree(self, index: Index) -> None:
        try:
            unknown = [t for _, t, _ in index.leaves if t is not None and t not in index.tensors]
        except CheckpointError as error:
            raise self.error(str(error)) from error
        if unknown:
            raise self.error(f"the tree names tensor {unknown[0][:300]!r}, which is not stored")

    def file(self, entry: Any) -> FileEntry:
        name, size, data_start, header_sum = entry
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise self.error(f"{str(name)[:200]!r} is not a file name in the checkpoint's folder; nothing is read")
        if not (type(size) is type(data_start) is int and 8 <= data_start <= size <= MAX_NUMBER):
            raise self.error(f"{name}: {size} bytes with data from byte {data_start} on are invalid")
        if not isinstance(header_sum, str):
            raise self.error(f"{name}: the header has no checksum")
        return FileEntry(name, size, data_start, header_sum)

    def cut(self, entry: Any) -> StoredCut:
        if not isinstance(entry["shape"], list) or len(entry["shape"]) > MAX_DIMS:
            raise self.error(f"a shape has more than {MAX_DIMS} dims, or is none")
        shape = tuple(entry["shape"])
        if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > MAX_NUMBER:
            raise self.error(f"the shape {str(shape)[:200]} is invalid")
        if any(n > MAX_NUMBER for n in shape):
            raise self.error(f"the shape {str(shape)[:200]} is too large")
        offsets, sizes = (self.columns(entry[key], len(shape)) for key in ("offsets", "sizes"))
        if len(offsets) != len(sizes):
            raise self.error(f"{len(offsets)} offsets and {len(sizes)} sizes of boxes")
        cut = StoredCut(shape, offsets, sizes, entry.get("spec"))
        try:
            check_coverage(shape, offsets, sizes, lambda row: f"the box {cut.box(row)}", "boxes")
        except LayoutError as error:
            raise self.error(f"the boxes of {self.users_of(entry)} do not tile it: {error}") from error
        return cut

    def columns(self, rows: Any, ndim: int) -> IntArray:
        rows_of_ints = isinstance(rows, list) and not (set(map(type, rows)) - {list} or set(map(len, rows)) - {ndim})
        numbers = list(chain.from_iterable(rows)) if rows_of_ints else []
        if not rows_of_ints or set(map(type, numbers)) - {int} or any(abs(n) >= 2**63 for n in numbers):
            raise self.error(f"the boxes of a tensor of {ndim} dims are not rows of {ndim} ints")
        array = np.array(numbers, np.int64).reshape(len(rows), ndim)
        if ((array < 0) | (array > MAX_NUMBER)).any():
            raise self.error("a box has negative or absurd numbers")
        return array

    def users_of(self, cut: Any) -> str:
        number = self.content["cuts"].index(cut)
        names = [name for name, entry in self.content["tensors"].items() if entry[1] == number]
        return f"tensor {names[0][:300]!r}" if names else "a tensor"

    def tensor(self, name: str, entry: Any, cuts: Sequence[StoredCut]) -> TensorEntry:
        dtype_name, number, files, begins, sums = entry
        if type(number) is not int or not 0 <= number < len(cuts):
            raise self.error(f"tensor {name[:300]!r}: there is no cut {str(number)[:30]}; there are {len(cuts)}")
        if not isinstance(dtype_name, str):
            raise self.error(f"tensor {name[:300]!r}: its dtype is not a name")
        try:
            dtype = find_dtype(dtype_name)
        except LayoutError as error:
            raise self.error(f"tensor {name[:300]!r}: {error}") from error
        if math.prod(cuts[number].shape) * dtype.itemsize > MAX_NUMBER:
            raise self.error(f"tensor {name[:300]!r}: {dtype_name}{list(cuts[number].shape)} is too large")
        if not (isinstance(files, list) and isinstance(begins, list) and isinstance(sums, list)) or not (
            len(files) == len(begins) == len(sums) == len(cuts[number])
        ):
            raise self.error(
                f"tensor {name[:300]!r}: {len(cuts[number])} boxes, but other numbers of files, places or sums"
            )
        if not (set(map(type, sums)) <= {str} and _SUMS.fullmatch("".join(sums))):
            raise self.error(f"tensor {name[:300]!r}: its checksums are not rows of {SUM_DIGITS} hexadecimal digits")
        return TensorEntry(name, dtype, cuts[number], files, begins, sums)
