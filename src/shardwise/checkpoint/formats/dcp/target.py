"""Writing a folder that `torch.distributed.checkpoint.load` reads: archives in `.distcp` files, and `.metadata`.

Every archive begins at a multiple of 64 bytes. Its length is known before a byte of its tensor is, so items are copied
in any order; the headers around them, which hold their CRC-32, are written at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from shardwise.checkpoint.assign import TensorToSave
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.folders import DCP_NAME
from shardwise.checkpoint.formats.dcp.pickle import (
    FILESYSTEM,
    METADATA,
    STORAGES,
    PickleCall,
    PickleName,
    PickleObject,
    PicklePairs,
    PickleReference,
    write_pickle,
)
from shardwise.checkpoint.formats.dcp.zip import ALIGNMENT, ORDER, PICKLE, VERSION, combine_crc, write_archive
from shardwise.checkpoint.resharding.plan import FileItem, TargetFile
from shardwise.checkpoint.resharding.targets import ItemSums, Target, TargetBox, assign_target_boxes
from shardwise.checkpoint.tree import Json, build_state
from shardwise.geometry import Box, DType

TreePath = tuple[str | int, ...]
_COMMON_RECORDS = {ORDER: b"little", VERSION: b"3\n"}


class DcpTarget(Target):
    """A folder of torch.distributed.checkpoint: one file for each rank; values that are not tensors in the first."""

    crc = True

    def __init__(self, tensors: Sequence[TensorToSave], tree: Json, left_out: tuple[str, ...] = ()) -> None:
        self._tensors, self.left_out = tensors, left_out
        self._paths, values = _flatten_tree(tree)
        missing = [t.name for t in tensors if t.name not in self._paths]
        if missing:
            raise CheckpointError(f"tensor {missing[0]!r} is stored, but has no place in the state; use another format")
        self._cuts, shares = assign_target_boxes(tensors)
        self._values: list[tuple[str, int, bytes]] = []
        self._boxes: list[list[TargetBox]] = []
        files = []
        for share in shares:
            position = self._lay_values(values) if not self._boxes else 0
            if share.boxes or position:
                files.append(self._file(f"__{share.rank}_0.distcp", share.boxes, position))
        self.files = files

    def _lay_values(self, values: dict[str, Any]) -> int:
        position = 0
        for name, value in values.items():
            archive, _ = write_archive({PICKLE: write_pickle(value), **_COMMON_RECORDS}, None)
            self._values.append((name, position, archive))
            position = _align_up(position + len(archive))
        return position

    def _file(self, name: str, boxes: Sequence[TargetBox], position: int) -> TargetFile:
        items = []
        end = position
        for box in boxes:
            tensor = self._tensors[box.tensor]
            nbytes = box.box.numel * tensor.dtype.itemsize
            before, after = _archive_envelope(tensor.dtype, box.box.sizes, 0)
            items.append(FileItem(tensor.name, box.box, position + len(before), nbytes))
            end = position + len(before) + nbytes + len(after)
            position = _align_up(end)
        self._boxes.append(list(boxes))
        return TargetFile(name, end, items)

    def between(self, file: int, found: ItemSums) -> list[tuple[int, bytes]]:
        parts = [(position, archive) for _, position, archive in self._values] if file == 0 else []
        for number, (box, item) in enumerate(zip(self._boxes[file], self.files[file].items, strict=True)):
            before, after = _archive_envelope(
                self._tensors[box.tensor].dtype, box.box.sizes, _combine_range_crcs(found[file, number])
            )
            parts += [(item.begin - len(before), before), (item.begin + item.nbytes, after)]
        return parts

    def index(self, found: ItemSums) -> tuple[str, bytes] | None:
        chunks: list[list[Any]] = [[] for _ in self._tensors]
        places: list[tuple[Any, Any]] = []
        if self._values:
            places += [
                (_metadata_index(name, None, None), _storage_info(self.files[0].name, *at))
                for name, *at in self._value_places()
            ]
        for boxes, file in zip(self._boxes, self.files, strict=True):
            for box, item in zip(boxes, file.items, strict=True):
                tensor = self._tensors[box.tensor]
                before, after = _archive_envelope(tensor.dtype, box.box.sizes, 0)
                length = len(before) + item.nbytes + len(after)
                places.append(
                    (
                        _metadata_index(tensor.name, box.box.offsets, len(chunks[box.tensor])),
                        _storage_info(file.name, item.begin - len(before), length),
                    )
                )
                chunks[box.tensor].append(_chunk_metadata(box.box))
        described: dict[str, Any] = {
            t.name: _tensor_metadata(t, parts) for t, parts in zip(self._tensors, chunks, strict=True)
        } | {name: PickleObject(PickleName(METADATA, "BytesStorageMetadata"), {}) for name, *_ in self._values}
        return DCP_NAME, write_pickle(_make_dcp_metadata(described, self._paths, PicklePairs(places)))

    def _value_places(self) -> Iterator[tuple[str, int, int]]:
        return ((name, position, len(archive)) for name, position, archive in self._values)


def _align_up(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _combine_range_crcs(ranges: Sequence[tuple[str, int, int]]) -> int:
    """The CRC-32 of an item from those of its ranges."""
    whole = ranges[0][1]
    for _, crc, length in ranges[1:]:
        whole = combine_crc(whole, crc, length)
    return whole


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
        PickleName(METADATA, "StorageMeta"), {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
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
