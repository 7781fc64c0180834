"""Folders of torch.distributed.checkpoint, written so that `torch.distributed.checkpoint.load` reads them.

Every archive begins at a multiple of 64 bytes. Its length is known before a byte of its tensor is, so items are copied
in any order; the headers around them, which hold their CRC-32, are written at the end. Then comes `.metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shardwise.checkpoint.assign import Holder, TensorToSave
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.base import (
    BoxAssignment,
    FileItem,
    FilePlan,
    Format,
    ItemSums,
    PlannedFile,
    SaveRequest,
)
from shardwise.checkpoint.formats.dcp.folder import UNSEALED, read_dcp_index, seal_metadata
from shardwise.checkpoint.formats.dcp.pickle import FILESYSTEM, METADATA, STORAGES
from shardwise.checkpoint.formats.dcp.pickle_writer import (
    PickleCall,
    PickleName,
    PickleObject,
    PicklePairs,
    PickleReference,
    write_pickle,
)
from shardwise.checkpoint.formats.dcp.zip import ALIGNMENT, ORDER, PICKLE, VERSION, write_archive
from shardwise.checkpoint.index import Index, Json, build_state
from shardwise.checkpoint.storage.base import ReadableFolder
from shardwise.geometry import Box, DType

DCP_NAME = ".metadata"
TreePath = tuple[str | int, ...]
_COMMON_RECORDS = {ORDER: b"little", VERSION: b"3\n"}
_WRITER = re.compile(r"(?:[0-9a-f]+-)?__(\d{1,9})_\d+\.distcp")


class DcpFormat(Format):
    """Archives of torch.save in `.distcp` files, and a pickle that says what is where."""

    name = "dcp"
    title = "torch.distributed.checkpoint"
    index_names = (DCP_NAME,)
    suffixes = (".distcp",)

    def writer_of(self, file_name: str) -> int | None:
        found = _WRITER.fullmatch(file_name)
        return int(found[1]) if found else None

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
        if rank not in self.ranks:
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
