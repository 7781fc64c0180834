"""Files of torch.save as an index, read by the rules of `weights_only`: nothing is called, tensors stay in place.

1. The file is an archive. Its pickle describes the state; each storage is a record of its own, with its CRC-32.
2. A tensor is a view of a storage: an offset, sizes and strides. It is read from there like from any other file, a part
   at a time; tensors that share a storage, such as tied weights, share its bytes.
3. Numbers, texts, lists, tuples and dicts are values. What else the list of allowed names lets through (a device, a
   dtype) is opaque; every other name in the pickle is an error.

A folder with `pytorch_model.bin`, or with several such files and their index, is read as well.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.base import FilePlan, Format, SaveRequest, digest_files
from shardwise.checkpoint.formats.dcp.pickle import PickledTensor, read_pickle
from shardwise.checkpoint.formats.dcp.zip import ORDER, PICKLE, ByteRange, Record, read_archive, read_record
from shardwise.checkpoint.formats.huggingface import parse_weight_map
from shardwise.checkpoint.index import (
    CRC,
    MAX_DEPTH,
    MAX_NUMBER,
    FileEntry,
    Index,
    Json,
    StoredCut,
    StridedView,
    TensorEntry,
    check_name_bytes,
    row_major_strides,
)
from shardwise.checkpoint.storage.base import FileReader, ReadableFolder

FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_SINGLE, _SEVERAL = "pytorch_model.bin", "pytorch_model.bin.index.json"
_WHOLE = 1 << 62  # checksums are those of whole records
_MAX_RECORDS = 1 << 20
_MIN_NODES = 10_000
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # how files of torch before 1.6 begin


class TorchFileFormat(Format):
    """Whole tensors in archives of torch.save; only read."""

    name = "torch"
    title = "torch.save"
    index_names = (_SEVERAL, _SINGLE)
    suffixes = ()
    writable = False
    has_layouts = False

    def accepts_file(self, name: str) -> bool:
        return name.endswith(FILE_SUFFIXES)

    def title_of(self, index_name: str) -> str:
        return "torch.save file" if index_name.endswith(FILE_SUFFIXES) else self.title

    def read_index(self, folder: ReadableFolder, index_name: str) -> tuple[Index, str]:
        if index_name == _SEVERAL:
            return _read_several(folder, folder.read(index_name))
        found = _read_file(folder, index_name, 0)
        tree = {"dict": []} if found.tree is _SKIPPED else found.tree
        index = Index([found.entry], found.tensors, tree, _WHOLE, tuple(found.opaque))
        return index, _digest(folder, [index_name], found.pickled)

    def plan_files(self, request: SaveRequest) -> FilePlan:
        raise CheckpointError("files of torch.save are read, not written; choose another format")


def _digest(folder: ReadableFolder, names: list[str], pickled: bytes) -> str:
    return checksum(pickled + json.dumps(digest_files(folder, names)).encode())


def _read_several(folder: ReadableFolder, data: bytes) -> tuple[Index, str]:
    """The index of a model in several files, each with a part of its state dict."""
    weight_map = parse_weight_map(folder.path, data, ".bin")
    numbers = {name: number for number, name in enumerate(sorted(set(weight_map.values())))}
    parts = [_read_file(folder, name, number) for name, number in numbers.items()]
    missing = next((key for key, name in weight_map.items() if key not in parts[numbers[name]].tensors), None)
    if missing is not None:
        place = folder.path / weight_map[missing]
        raise CheckpointError(f"{place}: tensor {missing[:300]!r} is not in this file, where the index says it is")
    tensors = {key: parts[numbers[name]].tensors[key] for key, name in weight_map.items()}
    tree = {"dict": [[name, {"tensor": name}] for name in tensors]}
    index = Index([part.entry for part in parts], tensors, tree, _WHOLE)
    return index, _digest(folder, list(numbers), data + b"".join(part.pickled for part in parts))


_SKIPPED = object()  # an entry that is neither a tensor nor a plain value


def _read_file(folder: ReadableFolder, name: str, number: int) -> _TorchFile:
    told = str(folder.path / name)
    try:
        return _TorchFile(folder.reader(name), name, told, number)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{told}: damaged: {type(error).__name__}: {str(error)[:200]}") from error


class _TorchFile:
    """One pass over a file: its tensors by name, its tree, and the names of what is opaque."""

    def __init__(self, file: FileReader, name: str, told: str, number: int) -> None:
        start = file.read(0, min(file.size, len(_OLD))).tobytes()
        if start == _OLD:
            raise CheckpointError(f"{told}: a file of torch before 1.6; load it with torch and save it again")
        if start[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{told}: not a file of torch.save")
        whole = ByteRange(file, 0, file.size)
        self.entry = FileEntry(name, file.size, 0, None)
        self.tensors: dict[str, TensorEntry] = {}
        self.opaque: list[str] = []
        self._told, self._number = told, number
        self._records = read_archive(whole, told, _MAX_RECORDS)
        if PICKLE not in self._records:
            raise CheckpointError(f"{told}: an archive without {PICKLE}, not one of torch.save")
        self._has_sums = self._records[PICKLE].crc != 0  # torch can leave them out; then all are 0
        self.pickled = self._read_small(whole, self._records[PICKLE])
        if ORDER in self._records and self._read_small(whole, self._records[ORDER]) != b"little":
            raise CheckpointError(f"{told}: its bytes are not in this machine's order")
        self._left = _MIN_NODES + len(self.pickled)
        self.tree = self._node(read_pickle(self.pickled, told), ())
        if self.tree is not _SKIPPED:
            check_name_bytes(self.tree, file.size, told)

    def _read_small(self, whole: ByteRange, record: Record) -> bytes:
        if self._has_sums:
            return read_record(whole, record, self._told)
        unchecked = whole.read(record.begin, min(record.size, 1 << 26))
        return read_record(whole, Record(record.begin, record.size, zlib.crc32(unchecked)), self._told)

    def _node(self, value: Any, path: tuple[str, ...]) -> Json:
        """A node of the tree; what holds itself, or repeats a few entries again and again, is an error."""
        self._left -= 1
        if self._left < 0 or len(path) > MAX_DEPTH:
            raise CheckpointError(f"{self._told}: its state is nested too deeply, or grows when it is written out")
        name = ".".join(path)
        if isinstance(value, PickledTensor):
            if name in self.tensors:
                raise CheckpointError(f"{self._told}: two tensors are called {name[:300]!r}")
            self.tensors[name] = self._tensor(name, value)
            return {"tensor": name}
        if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
            pairs = [[key, self._node(child, (*path, str(key)))] for key, child in value.items()]
            return {"dict": [pair for pair in pairs if pair[1] is not _SKIPPED]}
        if isinstance(value, list | tuple):
            items = [self._node(child, (*path, str(i))) for i, child in enumerate(value)]
            items = [None if item is _SKIPPED else item for item in items]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        self.opaque.append(name)
        return _SKIPPED

    def _tensor(self, name: str, found: PickledTensor) -> TensorEntry:
        told = f"{self._told}: tensor {name[:300]!r}"
        record = self._records.get(f"data/{found.storage.key}")
        numbers = (found.offset, *found.sizes, *found.strides)
        if record is None or len(found.sizes) != len(found.strides):
            raise CheckpointError(f"{told}: its storage is missing, or its strides are")
        if not all(type(n) is int and 0 <= n <= MAX_NUMBER for n in numbers):
            raise CheckpointError(f"{told}: sizes and strides that are none: {str(numbers)[:200]}")
        itemsize, count = found.dtype.itemsize, math.prod(found.sizes)
        last = found.offset + sum((n - 1) * s for n, s in zip(found.sizes, found.strides, strict=True))
        if count and (last + 1) * itemsize > record.size:
            raise CheckpointError(
                f"{told}: it ends at byte {(last + 1) * itemsize} of a storage of {record.size} bytes"
            )
        if count * itemsize > record.size:
            raise CheckpointError(f"{told}: its elements share bytes (an expanded tensor); save it with .contiguous()")
        rows = 1 if count else 0
        sizes = np.array([found.sizes] * rows, np.int64).reshape(rows, len(found.sizes))
        cut = StoredCut(found.sizes, np.zeros_like(sizes), sizes)
        sums = f"{CRC}{record.crc:08x}" if self._has_sums else ""
        plain = count * itemsize == record.size and found.strides == row_major_strides(found.sizes)
        views = None if plain else [StridedView(found.offset, found.strides, record.size)] * rows
        return TensorEntry(name, found.dtype, cut, [self._number] * rows, [record.begin] * rows, [sums] * rows, views)
