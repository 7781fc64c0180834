"""Folders of torch.distributed.checkpoint as an index, read without torch and without running what is in a pickle.

1. `.metadata` says how each tensor is cut, and which bytes of which file hold each part. Written by shardwise, it has a
   checksum of itself.
2. Each part is an archive of torch.save. The tensor's bytes are in it unchanged, so a slice is read from them like
   from any other file. Their CRC-32 is their checksum.
3. A part that is not stored row by row (a transposed one, say) becomes as many boxes as it has rows in storage.
4. Everything that is not a tensor is a separate pickle. Plain values are read; anything else is listed as opaque.

Folders of torch.distributed.checkpoint, written so that `torch.distributed.checkpoint.load` reads them.

Every archive begins at a multiple of 64 bytes. Its length is known before a byte of its tensor is, so items are copied
in any order; the headers around them, which hold their CRC-32, are written at the end. Then comes `.metadata`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from shardwise.checkpoint.files import CheckpointError, FileReader, ReadableFolder, require
from shardwise.checkpoint.formats.base import (
    BoxAssignment,
    FileItem,
    FilePlan,
    Format,
    Holder,
    ItemSums,
    PlannedFile,
    SaveRequest,
    TensorToSave,
    digest_files,
)
from shardwise.checkpoint.formats.torch_file import (
    ALIGNMENT,
    FILESYSTEM,
    METADATA,
    ORDER,
    PICKLE,
    STORAGES,
    VERSION,
    ByteRange,
    PickleCall,
    PickledTensor,
    PickleName,
    PickleObject,
    PicklePairs,
    PickleReference,
    Record,
    UnpickledObject,
    read_archive,
    read_pickle,
    read_record,
    write_archive,
    write_pickle,
)
from shardwise.checkpoint.index import (
    CRC,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_NUMBER,
    SUM_DIGITS,
    FileEntry,
    Index,
    Json,
    StoredCut,
    TensorEntry,
    build_state,
    check_name_bytes,
    check_ranges,
    checksum,
    row_major_strides,
)
from shardwise.geometry import Box, DType, LayoutError, Piece, infer_spec
from shardwise.geometry.layout import check_coverage

WHOLE = 1 << 62
UNSEALED = "shardwise-sum:" + "0" * SUM_DIGITS
_SEAL = re.compile(rb"shardwise-sum:[0-9a-f]{16}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
_RANK = re.compile(r"(?:[0-9a-f]+-)?__(\d{1,9})_")
_MAX_ROWS = 1 << 20
_MIN_NODES = 10_000
_REMEMBERED, _SMALL_PICKLE_BYTES = 256, 4096
StoredPlace = tuple[str, int, int]


def read_dcp_index(pinned: ReadableFolder, data: bytes) -> tuple[Index, str]:
    """The index of a folder whose `.metadata` is `data`, and a digest of it."""
    folder = pinned.path
    if _SEAL.search(data) and seal_metadata(data) != data:
        raise CheckpointError(f"{folder}/.metadata: damaged: its checksum differs")
    try:
        index = _DcpIndexReader(pinned, data).index()
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{folder}/.metadata: damaged: {type(error).__name__}: {str(error)[:200]}") from error
    return index, checksum(data + json.dumps(digest_files(pinned, [f.name for f in index.files])).encode())


def seal_metadata(data: bytes) -> bytes:
    """The same `.metadata` with a checksum of itself in place of its id, which torch does not look at.

    >>> sealed = seal_metadata(b"..." + UNSEALED.encode() + b"...")
    >>> sealed != seal_metadata(sealed.replace(b".", b"!")), sealed == seal_metadata(sealed)
    (True, True)
    """
    plain = _SEAL.sub(UNSEALED.encode(), data)
    return plain.replace(UNSEALED.encode(), UNSEALED.replace("0" * SUM_DIGITS, checksum(plain)).encode())


class _OpenFiles:
    """The files of a folder, open while the index is read."""

    def __init__(self, folder: ReadableFolder) -> None:
        self._pinned, self._folder = folder, folder.path
        self._readers: dict[str, tuple[int, FileReader]] = {}
        self.bytes = 0

    def item(self, place: StoredPlace) -> tuple[int, ByteRange]:
        """The number of the file of an item, and the item's bytes."""
        name, offset, length = place
        if name not in self._readers:
            self._readers[name] = (len(self._readers), self._open(name))
            self.bytes += self._readers[name][1].size
        number, file = self._readers[name]
        if not 0 <= offset <= offset + length <= file.size:
            raise CheckpointError(
                f"{self._folder / name}: an item spans bytes {offset} to {offset + length}, but the file has "
                f"{file.size}: it is truncated"
            )
        return number, ByteRange(file, offset, length)

    def _open(self, name: str) -> FileReader:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{self._folder}: {name[:200]!r} is not a file name in this folder; nothing is read")
        file = self._pinned.reader(name)
        if not file.size:
            raise CheckpointError(f"{self._folder / name}: cannot be read: the file is empty")
        return file

    def entries(self) -> list[FileEntry]:
        return [FileEntry(name, file.size, 0, None) for name, (_, file) in self._readers.items()]


class _DcpIndexReader:
    """One pass over the metadata; errors name the tensor."""

    def __init__(self, pinned: ReadableFolder, data: bytes) -> None:
        self.folder, self.files, self.metadata_bytes = pinned.path, _OpenFiles(pinned), len(data)
        self.state = _require_state(read_pickle(data, f"{pinned.path}/.metadata"), "Metadata")
        self.places = dict(_iterate_storage_places(self.state["storage_data"]))
        self._cuts: dict[Any, StoredCut] = {}
        self._described: dict[bytes, Any] = {}
        self._stored = self._rows = 0

    def index(self) -> Index:
        tensors: dict[str, TensorEntry] = {}
        values: dict[str, Json] = {}
        opaque: list[str] = []
        for name, entry in self.state["state_dict_metadata"].items():
            require(isinstance(name, str) and isinstance(entry, UnpickledObject), "an entry without a name")
            if entry.kind == "TensorStorageMetadata":
                tensors[name] = self.tensor(name, entry.state)
            else:
                data = self.pickled_value(name)
                try:
                    values[name] = _TreeNodeEncoder(len(data)).node(read_pickle(data, name))
                except CheckpointError:  # not a plain value
                    opaque.append(name)
        check_ranges(tensors, self.files.entries(), WHOLE, str(self.folder), with_sums=False)
        leaves = {**{name: {"tensor": name} for name in tensors}, **values}
        tree = _build_nested_tree(leaves, self.state.get("planner_data")) or {
            "dict": [[n, node] for n, node in leaves.items()]
        }
        check_name_bytes(tree, self.files.bytes + self.metadata_bytes, str(self.folder))
        return Index(self.files.entries(), tensors, tree, WHOLE, tuple(opaque))

    def pickled_value(self, name: str) -> bytes:
        """The pickle of something that is not a tensor, checked against its CRC-32."""
        place = self.places[name, None]
        _, item = self.files.item(place)
        where = f"{self.folder / place[0]}: value {name[:200]!r}"
        records = read_archive(item, where)
        if PICKLE not in records:
            raise CheckpointError(f"{where}: its archive has no {PICKLE}")
        return read_record(item, records[PICKLE], where)

    def tensor(self, name: str, state: Any) -> TensorEntry:
        dtype, shape = _require_state(state["properties"], "TensorProperties")[0], _require_sizes(state["size"])
        require(isinstance(dtype, DType) and math.prod(shape) * dtype.itemsize <= MAX_NUMBER, "absurdly large")
        chunks = dict.fromkeys(
            (_require_sizes(c["offsets"]), _require_sizes(c["sizes"]))
            for c in map(_require_chunk_state, state["chunks"])
        )
        rows: list[tuple[Box, int, int, int, str]] = []
        for offsets, sizes in (chunk for chunk in chunks if 0 not in chunk[1]):
            rows += self.chunk(name, dtype, Box(offsets, sizes))
        cut = self.cut(name, shape, [row[0] for row in rows], [row[1] for row in rows])
        return TensorEntry(name, dtype, cut, [r[2] for r in rows], [r[3] for r in rows], [r[4] for r in rows])

    def chunk(self, name: str, dtype: DType, box: Box) -> list[tuple[Box, int, int, int, str]]:
        """The stored boxes of a chunk: each with its rank, file, first byte and checksum."""
        place = self.places.get((name, box.offsets)) or self.places.get((name, None))
        if place is None:
            raise CheckpointError(f"{self.folder}: tensor {name!r}: no file contains its part {box}")
        number, item = self.files.item(place)
        where = f"{self.folder / place[0]}: tensor {name!r}"
        records = read_archive(item, where)
        found = self.described(read_record(item, records[PICKLE], where), where) if PICKLE in records else None
        if not isinstance(found, PickledTensor) or found.sizes != box.sizes or found.dtype != dtype:
            raise CheckpointError(f"{where}: its part {box} is not stored as {dtype}{list(box.sizes)}")
        data = records.get(f"data/{found.storage.key}")
        data = self.check_data(
            found, data, where, read_record(item, records[ORDER], where) if ORDER in records else b"little"
        )
        self.count_bytes(box.numel * dtype.itemsize, where)
        begin = place[1] + data.begin + found.offset * dtype.itemsize
        rank = int(match[1]) if (match := _RANK.match(place[0])) else 0
        if found.strides == row_major_strides(box.sizes) or box.numel == 1:
            crc = f"{CRC}{data.crc:08x}" if data.size == box.numel * dtype.itemsize else ""
            return [(box, rank, number, begin, crc)]
        inner = _inner_dims(box, found.strides)
        self.count_rows(box.numel // math.prod(box.sizes[d] for d in inner), where)
        rows = list(_split_into_rows(box, found.strides, inner))
        return [(row, rank, number, begin + start * dtype.itemsize, "") for row, start in rows]

    def described(self, pickled: bytes, where: str) -> Any:
        """What a part's pickle says; those of parts that are alike have the same bytes and are read once."""
        if len(pickled) > _SMALL_PICKLE_BYTES:
            return read_pickle(pickled, where)
        if pickled not in self._described:
            if len(self._described) >= _REMEMBERED:
                self._described.clear()
            self._described[pickled] = read_pickle(pickled, where)
        return self._described[pickled]

    def count_bytes(self, nbytes: int, where: str) -> None:
        """Raise if the tensors so far are larger than their files: some of them share bytes."""
        self._stored += nbytes
        if self._stored > self.files.bytes:
            raise CheckpointError(f"{where}: its {nbytes} bytes overlap others: the files do not have that many")

    def count_rows(self, rows: int, where: str) -> None:
        """Raise if too many boxes come of parts that are stored in another order."""
        self._rows += rows
        if self._rows > _MAX_ROWS:
            raise CheckpointError(
                f"{where}: it is not stored row by row, and with others like it makes more than {_MAX_ROWS} boxes; "
                "save it with .contiguous()"
            )

    def check_data(self, found: PickledTensor, data: Record | None, where: str, order: bytes) -> Record:
        last = found.offset + sum((n - 1) * s for n, s in zip(found.sizes, found.strides, strict=True))
        numbers = (found.offset, *found.sizes, *found.strides)
        sane = all(type(n) is int and 0 <= n <= MAX_NUMBER for n in numbers)
        if data is None or not sane or (last + 1) * found.dtype.itemsize > data.size or order != b"little":
            raise CheckpointError(f"{where}: some of its bytes are missing, or not in this machine's byte order")
        return data

    def cut(self, name: str, shape: tuple[int, ...], boxes: Sequence[Box], ranks: Sequence[int]) -> StoredCut:
        key = (shape, tuple(boxes), tuple(ranks))
        if key not in self._cuts:
            size = (len(boxes), len(shape))
            offsets = np.array([b.offsets for b in boxes], np.int64).reshape(size)
            sizes = np.array([b.sizes for b in boxes], np.int64).reshape(size)
            try:
                check_coverage(shape, offsets, sizes, lambda row: f"the box {boxes[row]}", "boxes")
            except LayoutError as error:
                raise CheckpointError(f"{self.folder}: the parts of tensor {name!r} do not tile it: {error}") from error
            pieces = [Piece(box, rank) for box, rank in zip(boxes, ranks, strict=True)]
            self._cuts[key] = StoredCut(shape, offsets, sizes, infer_spec(shape, pieces).to_json() if pieces else None)
        return self._cuts[key]


def _require_state(made: Any, kind: str) -> Any:
    require(isinstance(made, UnpickledObject) and made.kind == kind, f"no {kind}")
    return made.state


def _require_chunk_state(made: Any) -> Any:
    return _require_state(made, "ChunkStorageMetadata")


def _require_sizes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, tuple) or len(given) > MAX_DIMS or set(map(type, given)) - {int}:
        raise ValueError("no sizes")
    require(all(0 <= n <= MAX_NUMBER for n in given), "no sizes")
    return given


def _iterate_storage_places(
    storage_data: Mapping[Any, Any],
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], StoredPlace]]:
    """From (name, offsets or None) to the file, the first byte and the length of what is stored for it."""
    for key, info in storage_data.items():
        index, place = _require_state(key, "MetadataIndex"), _require_state(info, "_StorageInfo")
        require(isinstance(index, dict) and isinstance(place, dict) and isinstance(index["fqn"], str), "no place")
        if place.get("transform_descriptors"):
            raise CheckpointError(
                f"{index['fqn'][:200]!r} is stored with an extension, which is not read; save it without extensions"
            )
        name, offset, length = (place[k] for k in ("relative_path", "offset", "length"))
        require(isinstance(name, str) and type(offset) is type(length) is int, "no place")
        require(0 <= offset <= MAX_NUMBER and 0 <= length <= MAX_NUMBER, "no place")
        offsets = index.get("offset")
        yield (index["fqn"], None if offsets is None else _require_sizes(offsets)), (name, offset, length)


def _inner_dims(box: Box, strides: Sequence[int]) -> list[int]:
    """The dims along which a part that is stored in another order is row-major."""
    inner: list[int] = []
    expected = 1
    for dim in sorted(range(box.ndim), key=lambda d: (strides[d], -d)):
        if box.sizes[dim] > 1 and strides[dim] == expected and (not inner or dim < inner[-1]):
            inner.append(dim)
            expected *= box.sizes[dim]
    return inner


def _split_into_rows(box: Box, strides: Sequence[int], inner: Sequence[int]) -> Iterator[tuple[Box, int]]:
    """A part that is stored in another order, as boxes that are stored row by row, each with its first element."""
    outer = [d for d in range(box.ndim) if d not in inner]
    for at in product(*(range(box.sizes[d]) for d in outer)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        for dim, place in zip(outer, at, strict=True):
            offsets[dim], sizes[dim] = offsets[dim] + place, 1
        yield Box(tuple(offsets), tuple(sizes)), sum(p * strides[d] for d, p in zip(outer, at, strict=True))


class _TreeNodeEncoder:
    """Plain values as nodes of the tree, no more of them than a pickle of this length can hold without repetition."""

    def __init__(self, nbytes: int) -> None:
        self._left = _MIN_NODES + nbytes

    def node(self, value: Any, depth: int = 0) -> Json:
        """A node; what is not a plain value, holds itself, or repeats a few entries again and again is an error."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise CheckpointError("a value is nested too deeply, or grows when it is written out")
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            items = [self.node(v, depth + 1) for v in value]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
            return {"dict": [[key, self.node(v, depth + 1)] for key, v in value.items()]}
        raise CheckpointError(f"a {type(value).__name__} is not a plain value")


@dataclass(frozen=True)
class _NodeLeaf:
    node: Json


def _build_nested_tree(leaves: Mapping[str, Json], paths: Any) -> Json | None:
    """The tree whose leaves have these paths, or None if the paths make none."""
    if not isinstance(paths, dict) or not all(_is_tree_path(paths.get(name)) for name in leaves):
        return None
    root: dict[str | int, Any] = {}
    for name, node in leaves.items():
        *way, last = paths[name]
        at: Any = root
        for step in way:
            at = at.setdefault(step, {})
            if isinstance(at, _NodeLeaf):
                return None
        if last in at:
            return None
        at[last] = _NodeLeaf(node)
    return _branch_to_json(root)


def _is_tree_path(path: Any) -> bool:
    plain = isinstance(path, tuple) and 0 < len(path) <= MAX_DEPTH + 1
    return plain and not set(map(type, path)) - {str, int}


def _branch_to_json(found: Any) -> Json:
    if isinstance(found, _NodeLeaf):
        return found.node
    if found and all(type(key) is int and 0 <= key <= 2 * len(found) + 16 for key in found):  # gaps are opaque entries
        return [_branch_to_json(found[i]) if i in found else None for i in range(max(found) + 1)]
    return {"dict": [[key, _branch_to_json(child)] for key, child in found.items()]}


DCP_NAME = ".metadata"
TreePath = tuple[str | int, ...]
_COMMON_RECORDS = {ORDER: b"little", VERSION: b"3\n"}


class DcpFormat(Format):
    """Archives of torch.save in `.distcp` files, and a pickle that says what is where."""

    name = "dcp"
    title = "torch.distributed.checkpoint"
    index_names = (DCP_NAME,)
    suffixes = (".distcp",)

    writer_name = re.compile(r"(?:[0-9a-f]+-)?__(\d{1,9})_\d+\.distcp")

    def read_index(self, folder: ReadableFolder, index_name: str) -> tuple[Index, str]:
        return read_dcp_index(folder, folder.read(index_name))

    def plan_files(self, request: SaveRequest) -> DcpPlan:
        return DcpPlan(request)


class DcpPlan(FilePlan):
    """One file for each rank; values that are not tensors are in the first."""

    crc = True

    def __init__(self, request: SaveRequest) -> None:
        if request.max_file_bytes is not None:
            raise CheckpointError("a folder of torch.distributed.checkpoint has one file for each rank; omit the limit")
        self.tensors, self.left_out, self._prefix = request.tensors, request.unreadable, request.prefix
        self._paths, values = _flatten_tree(request.tree)
        missing = [t.name for t in self.tensors if t.name not in self._paths]
        if missing:
            raise CheckpointError(f"tensor {missing[0]!r} is stored, but has no place in the state; use another format")
        self._assigned = BoxAssignment(request.tensors, request.ranks)
        self.cuts, self.ranks = self._assigned.cuts, self._assigned.ranks
        self._values: list[tuple[str, int, bytes]] = []
        self._values_end = self._place_values(values)
        self._files: dict[int, list[PlannedFile]] = {}

    def _place_values(self, values: dict[str, Any]) -> int:
        position = 0
        for name, value in values.items():
            archive, _ = write_archive({PICKLE: write_pickle(value), **_COMMON_RECORDS}, None)
            self._values.append((name, position, archive))
            position = _align_up(position + len(archive))
        return position

    def files_of(self, rank: int) -> Sequence[PlannedFile]:
        if rank not in self._assigned.writers:
            return []
        if rank not in self._files:
            position = self._values_end if rank == self.ranks[0] else 0
            boxes = list(self._assigned.parts_of(rank))
            self._files[rank] = [self._plan_file(self._file_name(rank), boxes, position)] if boxes or position else []
        return self._files[rank]

    def _plan_file(self, name: str, boxes: Sequence[tuple[int, int]], position: int) -> PlannedFile:
        items = []
        end = position
        for tensor, box in boxes:
            before, after = self._envelope(tensor, box, 0)
            items.append(FileItem(tensor, box, position + len(before)))
            end = items[-1].begin + self.bytes_of(items[-1]) + len(after)
            position = _align_up(end)
        return PlannedFile(name, end, items)

    def _envelope(self, tensor: int, box: int, crc: int) -> tuple[bytes, bytes]:
        return _archive_envelope(self.tensors[tensor].dtype, self.cuts[tensor].extents[box][0], crc)

    def holder_of(self, item: FileItem, rank: int) -> Holder | None:
        return self._assigned.parts_of(rank)[item.tensor, item.box]

    def finish_file(self, file: PlannedFile, sums: Sequence[ItemSums]) -> list[tuple[int, bytes]]:
        parts = [(position, archive) for _, position, archive in self._values] if self._has_values(file) else []
        for item, (_, crc) in zip(file.items, sums, strict=True):
            before, after = self._envelope(item.tensor, item.box, crc)
            parts += [(item.begin - len(before), before), (item.begin + self.bytes_of(item), after)]
        return parts

    def _file_name(self, rank: int) -> str:
        return f"{self._prefix}__{rank}_0.distcp"

    def _has_values(self, file: PlannedFile) -> bool:
        return file.name == self._file_name(self.ranks[0])

    def make_index(self, written: Sequence[tuple[PlannedFile, Sequence[ItemSums]]]) -> tuple[str, bytes] | None:
        chunks: list[list[Any]] = [[] for _ in self.tensors]
        places: list[tuple[Any, Any]] = [
            (_metadata_index(name, None, None), _storage_info(self._file_name(self.ranks[0]), position, len(archive)))
            for name, position, archive in self._values
        ]
        for file, _ in written:
            for item in file.items:
                name, box = self.tensors[item.tensor].name, self.box_of(item)
                before, after = self._envelope(item.tensor, item.box, 0)
                length = len(before) + self.bytes_of(item) + len(after)
                index = _metadata_index(name, box.offsets, len(chunks[item.tensor]))
                places.append((index, _storage_info(file.name, item.begin - len(before), length)))
                chunks[item.tensor].append(_chunk_metadata(box))
        described: dict[str, Any] = {
            t.name: _tensor_metadata(t, parts) for t, parts in zip(self.tensors, chunks, strict=True)
        } | {name: PickleObject(PickleName(METADATA, "BytesStorageMetadata"), {}) for name, *_ in self._values}
        return DCP_NAME, seal_metadata(write_pickle(_make_dcp_metadata(described, self._paths, PicklePairs(places))))


def _align_up(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=4096)
def _archive_envelope(dtype: DType, sizes: tuple[int, ...], crc: int) -> tuple[bytes, bytes]:
    """What is around the bytes of a tensor in an archive of torch.save."""
    strides, numel = [], 1
    for size in reversed(sizes):
        strides.append(numel)
        numel *= size
    known = STORAGES.get(dtype.torch_name)
    storage = PickleName("torch", known) if known else PickleName("torch.storage", "UntypedStorage")
    length = numel if known else numel * dtype.itemsize
    held = PickleReference(("storage", storage, "0", "cpu", length))
    args: tuple[Any, ...] = (
        held,
        0,
        sizes,
        tuple(reversed(strides)),
        False,
        PickleCall(PickleName("collections", "OrderedDict"), ()),
    )
    function = "_rebuild_tensor_v2" if known else "_rebuild_tensor_v3"
    args += () if known else (PickleName("torch", dtype.torch_name),)
    pickled = write_pickle(PickleCall(PickleName("torch._utils", function), args))
    return write_archive({PICKLE: pickled, **_COMMON_RECORDS}, numel * dtype.itemsize, crc)


def _pickle_size(numbers: Sequence[int]) -> PickleCall:
    return PickleCall(PickleName("torch", "Size"), (tuple(numbers),))


def _chunk_metadata(box: Box) -> PickleObject:
    return PickleObject(
        PickleName(METADATA, "ChunkStorageMetadata"),
        {"offsets": _pickle_size(box.offsets), "sizes": _pickle_size(box.sizes)},
    )


def _tensor_metadata(tensor: TensorToSave, chunks: list[Any]) -> PickleObject:
    strided = PickleCall(PickleName("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = PickleCall(PickleName(METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (PickleName("torch", tensor.dtype.torch_name), strided, False, contiguous, False)
    state = {
        "properties": PickleObject(PickleName(METADATA, "TensorProperties"), properties),
        "size": _pickle_size(tensor.layout.shape),
        "chunks": chunks,
    }
    return PickleObject(PickleName(METADATA, "TensorStorageMetadata"), state)


def _metadata_index(name: str, offsets: Sequence[int] | None, number: int | None) -> PickleObject:
    state = {"fqn": name, "index": number} | ({} if offsets is None else {"offset": _pickle_size(offsets)})
    return PickleObject(PickleName(METADATA, "MetadataIndex"), state)


def _storage_info(file: str, offset: int, length: int) -> PickleObject:
    return PickleObject(
        PickleName(FILESYSTEM, "_StorageInfo"), {"relative_path": file, "offset": offset, "length": length}
    )


def _make_dcp_metadata(described: dict[str, Any], paths: dict[str, TreePath], places: Any) -> PickleObject:
    meta = PickleObject(
        PickleName(METADATA, "StorageMeta"),
        {"checkpoint_id": None, "save_id": UNSEALED, "load_id": None, "modules": []},
    )
    state = {
        "state_dict_metadata": described,
        "planner_data": paths,
        "storage_data": places,
        "storage_meta": meta,
        "version": "1.0.0",
    }
    return PickleObject(PickleName(METADATA, "Metadata"), state)


def _flatten_tree(tree: Json) -> tuple[dict[str, TreePath], dict[str, Any]]:
    """The path of every entry as torch's planner names them, and the values that are not tensors.

    Dicts are taken apart, and lists that hold tensors or dicts; a list or tuple of plain values is one value.

    >>> _flatten_tree({"dict": [["a", {"tensor": "a"}], ["b", [1, 2]], ["c", {"dict": [["d", 3]]}]]})
    ({'a': ('a',), 'b': ('b',), 'c.d': ('c', 'd')}, {'b': [1, 2], 'c.d': 3})
    """
    if not (isinstance(tree, dict) and "dict" in tree):
        raise CheckpointError("torch.distributed.checkpoint stores dicts; this state is not a dict, use another format")
    paths: dict[str, TreePath] = {}
    values: dict[str, Any] = {}

    def visit(node: Json, path: TreePath) -> None:
        children = _flattened_children(node)
        if children is not None:
            for key, child in children:
                visit(child, (*path, key))
            return
        name = node["tensor"] if isinstance(node, dict) and "tensor" in node else ".".join(map(str, path))
        paths[name] = path
        if not (isinstance(node, dict) and "tensor" in node):
            values[name] = build_state(node, str)

    visit(tree, ())
    return paths, values


def _flattened_children(node: Json) -> list[tuple[str | int, Json]] | None:
    """What a node is taken apart into, or None for what is stored as one value."""
    if isinstance(node, dict) and "dict" in node:
        return [(str(key), child) for key, child in node["dict"]]
    items = node.get("tuple") if isinstance(node, dict) else node
    if isinstance(items, list) and any(_is_flattened(child) for child in items):
        return list(enumerate(items))
    return None


def _is_flattened(node: Json) -> bool:
    return (isinstance(node, dict) and "tensor" in node) or _flattened_children(node) is not None
