"""Hugging Face folders: every tensor whole in one safetensors file, an index where there are several; no checksums.

Tensors are put into files in order, up to the requested size; files are distributed over the ranks. A single
safetensors file is a checkpoint as well.

Safetensors files: headers written, and read with every number checked; the plan of a format that uses them.

A file is 8 bytes (the header's length, little-endian), the header (JSON, padded with spaces), then the tensors' bytes
without gaps. The header maps each key to a dtype, a shape and a range of those bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.files import CheckpointError, Location, ReadableFolder, require
from shardwise.checkpoint.formats.base import (
    FileItem,
    FilePlan,
    Format,
    ItemSums,
    PlannedFile,
    SaveRequest,
    digest_files,
    pack_into_files,
)
from shardwise.checkpoint.index import (
    MAX_DIMS,
    MAX_NUMBER,
    FileEntry,
    Index,
    StoredCut,
    TensorEntry,
    checksum,
    iterate_leaves,
)
from shardwise.geometry import DType, find_dtype

MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64
_PREFIX = 8
_SHOWN = 300
_METADATA = "__metadata__"
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_DTYPES = {code: find_dtype(name) for name, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a safetensors file: `begin` counts from the start of the file."""

    dtype: DType
    shape: tuple[int, ...]
    begin: int


def safetensors_code_and_shape(dtype: DType, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The code and shape under which a tensor is stored; dtypes that safetensors has no code for are bytes there.

    >>> safetensors_code_and_shape(find_dtype("bf16"), (2, 3)), safetensors_code_and_shape(find_dtype("c128"), (2, 3))
    (('BF16', [2, 3]), ('U8', [96]))
    """
    code = CODES.get(dtype.torch_name)
    return ("U8", [math.prod(shape) * dtype.itemsize]) if code is None else (code, list(shape))


def header_bytes(entries: Mapping[str, tuple[str, list[int], int]], count: int | None = None) -> bytes:
    """The start of a file that holds these (code, shape, bytes) entries in this order, without gaps.

    With `count`, raise unless there are as many: two tensors had the same key.

    >>> header_bytes({"x": ("F32", [2], 8)})[8:].decode().rstrip()
    '{"__metadata__":{"format":"pt"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    """
    if _METADATA in entries:
        raise CheckpointError(f"a tensor is called {_METADATA}, which safetensors reserves; rename it")
    if count is not None and len(entries) != count:
        raise CheckpointError(
            "a tensor is named like a part of another, such as 'w[0:2]' next to a 'w' whose part [0:2] is stored; "
            "rename one of them"
        )
    content: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for key, (code, shape, size) in entries.items():
        content[key] = {"dtype": code, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _PREFIX) % _ALIGNMENT)
    return len(text).to_bytes(_PREFIX, "little") + text


def header_size(start: bytes, file_bytes: int, name: str) -> int:
    """The length of a file's start up to its data, from the file's first 8 bytes."""
    length = int.from_bytes(start[:_PREFIX], "little")
    if len(start) < _PREFIX or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - _PREFIX):
        raise CheckpointError(
            f"{name}: a file of {file_bytes} bytes that claims a header of {length} bytes is not a safetensors file; "
            "it is truncated, damaged, or something else"
        )
    return _PREFIX + length


def parse_header(start: bytes, file_bytes: int, name: str) -> dict[str, HeaderEntry]:
    """The tensors of a file, from its start as far as `header_size` says; every number is checked.

    >>> parse_header(header_bytes({"x": ("F32", [2], 8)}), 136, "a file")["x"].shape
    (2,)
    """
    data_start = len(start)
    shapes: dict[Any, Any] = {}

    def shrink(pairs: list[tuple[str, Any]]) -> Any:
        """An entry as soon as it is read, in little memory: equal shapes and dtypes are one object."""
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key appears twice")
        if found.keys() != _ENTRY_KEYS or not isinstance(found["shape"], list) or len(found["shape"]) > MAX_DIMS:
            return found
        code, shape, (begin, end) = found["dtype"], tuple(found["shape"]), found["data_offsets"]
        return shapes.setdefault(code, code), shapes.setdefault(shape, shape), begin, end

    try:
        content = json.loads(start[_PREFIX:], object_pairs_hook=shrink)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name}: the header is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: the header is a {type(content).__name__}, it should be an object")
    content.pop(_METADATA, None)
    entries = {key: _parse_header_entry(key, value, data_start, file_bytes, name) for key, value in content.items()}
    _check_no_gaps(entries, data_start, file_bytes, name)
    return entries


def _parse_header_entry(key: str, value: Any, data_start: int, file_bytes: int, name: str) -> HeaderEntry:
    where = f"{name}: tensor {key[:_SHOWN]!r}"
    try:
        require(isinstance(value, tuple), "no entry")
        code, shape, begin, end = value
        numbers = all(type(n) is int and 0 <= n <= MAX_NUMBER for n in (*shape, begin, end))
        require(numbers and isinstance(code, str), "no numbers")
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{where}: its entry has no valid dtype, shape and data_offsets") from None
    if code not in _DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {code[:20]!r}; known: {', '.join(_DTYPES)}")
    size = math.prod(shape) * _DTYPES[code].itemsize
    if end - begin != size or data_start + end > file_bytes:
        raise CheckpointError(
            f"{where}: {code}{list(shape)} takes {size} bytes; its range is {begin}:{end} of the "
            f"{file_bytes - data_start} bytes of data in the file"
        )
    return HeaderEntry(_DTYPES[code], shape, data_start + begin)


def _check_no_gaps(entries: Mapping[str, HeaderEntry], data_start: int, file_bytes: int, name: str) -> None:
    position = data_start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, math.prod(item[1].shape))):
        if entry.begin != position:
            what = "overlaps another" if entry.begin < position else "leaves a gap before it"
            raise CheckpointError(f"{name}: tensor {key[:_SHOWN]!r} begins at byte {entry.begin} and {what}")
        position += math.prod(entry.shape) * entry.dtype.itemsize
    if position != file_bytes:
        raise CheckpointError(f"{name}: its tensors end at byte {position}; the file has {file_bytes} bytes")


def read_header(folder: ReadableFolder, name: str) -> tuple[FileEntry, dict[str, HeaderEntry], bytes]:
    """A safetensors file as an entry, its tensors, and the bytes of its header."""
    path = str(folder.path / name)
    file = folder.reader(name)
    size = file.size
    length = header_size(file.read(0, min(size, _PREFIX)).tobytes(), size, path)
    start = file.read(0, length).tobytes()
    return FileEntry(name, size, len(start), checksum(start)), parse_header(start, size, path), start


class SafetensorsPlan(FilePlan):
    """Files that are safetensors files, with a header of their own before the items."""

    def __init__(self) -> None:
        self._headers: dict[str, bytes] = {}

    def key_of(self, tensor: int, box: int) -> str:
        """The key of a box in its file."""
        return self.tensors[tensor].name

    def plan_file(self, name: str, boxes: Sequence[tuple[int, int]]) -> PlannedFile:
        """A file of these (tensor, box) in this order."""
        entries: dict[str, tuple[str, list[int], int]] = {}
        for tensor, box in boxes:
            dtype, (sizes, count) = self.tensors[tensor].dtype, self.cuts[tensor].extents[box]
            entries[self.key_of(tensor, box)] = (*safetensors_code_and_shape(dtype, sizes), count * dtype.itemsize)
        self._headers[name] = header = header_bytes(entries, len(boxes))
        items, position = [], len(header)
        for (tensor, box), (_, _, nbytes) in zip(boxes, entries.values(), strict=True):
            items.append(FileItem(tensor, box, position))
            position += nbytes
        return PlannedFile(name, position, items, len(header), checksum(header))

    def finish_file(self, file: PlannedFile, sums: Sequence[ItemSums]) -> list[tuple[int, bytes]]:
        return [(0, self._headers[file.name])]


HF_INDEX_NAME = "model.safetensors.index.json"
HF_SINGLE_NAME = "model.safetensors"
HF_MAX_FILE_BYTES = 5_000_000_000
HF_COMPANIONS = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
)


class HuggingFaceFormat(Format):
    """Whole tensors in `model.safetensors`, or in numbered files with an index."""

    name = "hf"
    title = "Hugging Face"
    index_names = (HF_INDEX_NAME, HF_SINGLE_NAME)
    suffixes = (".safetensors",)
    companions = HF_COMPANIONS
    model_only = True
    has_values = False
    has_layouts = False

    def is_complete(self, folder: ReadableFolder) -> bool:
        """With an index, which is written last; a single file has its whole length."""
        found = self.detect(folder)
        if found != HF_SINGLE_NAME:
            return found is not None
        try:
            read_header(folder, found)
        except CheckpointError:
            return False
        return True

    def accepts_file(self, name: str) -> bool:
        return name.endswith(self.suffixes)

    def title_of(self, index_name: str) -> str:
        return self.title if index_name in self.index_names else "safetensors file"

    def read_index(self, folder: ReadableFolder, index_name: str) -> tuple[Index, str]:
        if index_name == HF_INDEX_NAME:
            return _read_folder_index(folder, folder.read(index_name))
        file, entries, start = read_header(folder, index_name)
        index = _make_hf_index([file], {key: (0, entry) for key, entry in entries.items()})
        return index, _digest(folder, index, start)

    def plan_files(self, request: SaveRequest) -> HuggingFacePlan:
        return HuggingFacePlan(request)


class HuggingFacePlan(SafetensorsPlan):
    """Files of whole tensors, each written by one of the ranks; values that are not tensors are left out."""

    gathers = True

    def __init__(self, request: SaveRequest) -> None:
        super().__init__()
        self.tensors, self.ranks, self._prefix = request.tensors, tuple(request.ranks), request.prefix
        values = tuple(name for name, tensor, _ in iterate_leaves(request.tree) if tensor is None)
        self.left_out = (*values, *request.unreadable)
        for tensor in self.tensors:
            if tensor.dtype.torch_name not in CODES:
                raise CheckpointError(f"tensor {tensor.name!r}: safetensors has no {tensor.dtype}; use another format")
        cuts: dict[tuple[int, ...], StoredCut] = {}
        self.cuts = [cuts.setdefault(t.layout.shape, _whole_cut(t.layout.shape, keep_empty=True)) for t in self.tensors]
        self._files = self._plan(HF_MAX_FILE_BYTES if request.max_file_bytes is None else request.max_file_bytes)

    def _plan(self, max_file_bytes: int) -> list[PlannedFile]:
        sizes = [(t.dtype.itemsize, t.nbytes) for t in self.tensors]
        groups = pack_into_files(sizes, max_file_bytes, widest_first=False) or [[]]
        names = [f"{self._prefix}model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        single = len(groups) == 1 and not self._prefix
        return [
            self.plan_file(HF_SINGLE_NAME if single else name, [(i, 0) for i in self._aligned(group)])
            for name, group in zip(names, groups, strict=True)
        ]

    def _aligned(self, group: Sequence[int]) -> list[int]:
        """Within a file the widest elements come first, so that all are aligned."""
        return sorted(group, key=lambda i: -self.tensors[i].dtype.itemsize)

    def files_of(self, rank: int) -> Sequence[PlannedFile]:
        return self._files[self.ranks.index(rank) :: len(self.ranks)]

    def all_files(self) -> list[PlannedFile]:
        return self._files

    def make_index(self, written: Sequence[tuple[PlannedFile, Sequence[ItemSums]]]) -> tuple[str, bytes] | None:
        if len(written) == 1 and not self._prefix:
            return None
        weight_map = {self.tensors[item.tensor].name: file.name for file, _ in written for item in file.items}
        total = sum(self.bytes_of(item) for file, _ in written for item in file.items)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return HF_INDEX_NAME, json.dumps(content, indent=2).encode()


def _read_folder_index(folder: ReadableFolder, data: bytes) -> tuple[Index, str]:
    weight_map = parse_weight_map(folder.path, data, ".safetensors")
    numbers = {name: number for number, name in enumerate(sorted(set(weight_map.values())))}
    found = [read_header(folder, name) for name in numbers]
    tensors: dict[str, tuple[int, HeaderEntry]] = {}
    for key, name in weight_map.items():
        number = numbers[name]
        if key not in found[number][1]:
            raise CheckpointError(
                f"{folder.path / name}: tensor {key!r} is not in this file, where the index says it is"
            )
        tensors[key] = (number, found[number][1][key])
    index = _make_hf_index([file for file, _, _ in found], tensors)
    return index, _digest(folder, index, data + b"".join(start for _, _, start in found))


def _digest(folder: ReadableFolder, index: Index, headers: bytes) -> str:
    """Two saves of one model have the same headers, so times count as well."""
    return checksum(headers + json.dumps(digest_files(folder, [file.name for file in index.files])).encode())


def parse_weight_map(folder: Location, data: bytes, suffix: str) -> dict[str, str]:
    """Which file has which tensor, from the index of a model in several files."""
    try:
        weight_map = json.loads(data)["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError):
        weight_map = None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{folder}: its index has no weight_map from tensors to files")
    for name in set(weight_map.values()):
        if Path(name).name != name or not name.endswith(suffix):
            raise CheckpointError(f"{folder}: {name[:200]!r} is not a file name in this folder; nothing is read")
    return weight_map


def _make_hf_index(files: Sequence[FileEntry], tensors: Mapping[str, tuple[int, HeaderEntry]]) -> Index:
    cuts: dict[tuple[int, ...], StoredCut] = {}
    numbers, none, no_sums = [(number,) for number in range(len(files))], (), ("",)  # shared: there may be very many
    entries: dict[str, TensorEntry] = {}
    for name, (file, entry) in tensors.items():
        cut = cuts.get(entry.shape) or cuts.setdefault(entry.shape, _whole_cut(entry.shape))
        place = (numbers[file], (entry.begin,), no_sums) if len(cut) else (none, none, none)
        entries[name] = TensorEntry(name, entry.dtype, cut, *place)
    return Index(files, entries, {"dict": [[name, {"tensor": name}] for name in entries]})


def _whole_cut(shape: tuple[int, ...], keep_empty: bool = False) -> StoredCut:
    rows = 0 if 0 in shape and not keep_empty else 1
    sizes = np.array([shape] * rows, np.int64).reshape(rows, len(shape))
    return StoredCut(shape, np.zeros_like(sizes), sizes)
