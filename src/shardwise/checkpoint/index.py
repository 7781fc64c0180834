"""The layout a tensor was saved with, from the index, with a bound on how much a few numbers may blow up to.

What is in a checkpoint, and where? The index as a value, and its JSON with every number checked.

1. Tensors that are cut alike share one `StoredCut`: a shape, the boxes that tile it, and the spec it was saved with.
2. A tensor names its cut and its dtype, and for each box the file, the first byte and the checksums of its blocks.
3. Reading trusts nothing: names of files are plain names, boxes tile the shape, ranges are in their files and do not
   overlap. Work and memory grow with the length of the index, never with a number written in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.checkpoint.checksums import BLOCK_BYTES, SUM_DIGITS
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.safetensors_header import MAX_NUMBER
from shardwise.checkpoint.tree import Json, Scalar, iterate_leaves
from shardwise.geometry import Box, DType, EnumerableSpec, Layout, LayoutError, Piece, find_dtype
from shardwise.geometry.coverage import check_coverage
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.serialize import layout_from_json

_MAX_CUTS = 1 << 22


def stored_layout(entry: TensorEntry) -> Layout:
    """The layout of a stored tensor; without a spec it is whole on rank 0."""
    spec = entry.cut.spec
    if spec is None:
        return EnumerableSpec([Piece(Box.whole(entry.shape), 0)]).layout(entry.shape)
    try:
        _check_cut_count(spec, entry.shape)
        return layout_from_json({"shape": list(entry.shape), "spec": spec})
    except (LayoutError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"tensor {entry.name!r}: its layout in the index is damaged: {error}") from error


def _check_cut_count(spec: Any, shape: tuple[int, ...]) -> None:
    """Block-cyclic shards have as many cuts as the dim has blocks, whatever the length of the index."""
    for placement in spec.get("placements") or ():
        block = placement.get("block")
        if block is not None and shape[placement["dim"]] // max(1, block) > _MAX_CUTS:
            raise CheckpointError(f"blocks of {block} make more than {_MAX_CUTS} cuts")
    for split in spec.get("splits") or ():
        if isinstance(split, int) and split > _MAX_CUTS:
            raise CheckpointError(f"more than {_MAX_CUTS} cuts of one dim")


INDEX_NAME = "shardwise.index.json"
FORMAT = "shardwise"
VERSION = 1
MAX_INDEX_BYTES = 1 << 28
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")
_SUMS = re.compile(f"(?:[0-9a-f]{{{SUM_DIGITS}}})*")


@dataclass(frozen=True, eq=False)
class StoredCut:
    """How tensors of one shape are cut into stored boxes; `spec` is the spec they were saved with, in JSON."""

    shape: tuple[int, ...]
    offsets: IntArray
    sizes: IntArray
    spec: Json = None

    def __len__(self) -> int:
        return len(self.offsets)

    def box(self, number: int) -> Box:
        """One of the boxes."""
        return Box(tuple(self.offsets[number].tolist()), tuple(self.sizes[number].tolist()))

    @cached_property
    def elements(self) -> IntArray:
        """The number of elements of each box."""
        return np.asarray(self.sizes.prod(axis=1, dtype=np.int64))

    @cached_property
    def labels(self) -> list[str]:
        """What distinguishes the boxes of a tensor in the keys of a file; empty where there is one."""
        return [""] if len(self) == 1 else [str(self.box(number)) for number in range(len(self))]

    @cached_property
    def extents(self) -> list[tuple[tuple[int, ...], int]]:
        """The sizes of each box and their product."""
        return [(tuple(sizes), count) for sizes, count in zip(self.sizes.tolist(), self.elements.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file: its name, its length, where its data begin, and the checksum of what is before them (or None)."""

    name: str
    bytes: int
    data_start: int
    header_sum: str | None


@dataclass(frozen=True, eq=False, slots=True)
class TensorEntry:
    """A tensor: for each box of its cut the number of the file, the first byte in it, and checksums ("" for none)."""

    name: str
    dtype: DType
    cut: StoredCut
    files: Sequence[int]
    begins: Sequence[int]
    sums: Sequence[str]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cut.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Index:
    """Everything a checkpoint says about itself; `tree` is the nested state, tensors named.

    `opaque` are names of entries of other formats that cannot be read.
    """

    files: Sequence[FileEntry]
    tensors: Mapping[str, TensorEntry]
    tree: Json
    block_bytes: int = BLOCK_BYTES
    opaque: tuple[str, ...] = ()

    @cached_property
    def leaves(self) -> list[tuple[str, str | None, Scalar]]:
        """The (name, tensor or None, value) of every leaf of the tree."""
        return list(iterate_leaves(self.tree))

    def to_bytes(self) -> bytes:
        """The index as it is stored."""
        cuts: dict[int, int] = {}
        for entry in self.tensors.values():
            cuts.setdefault(id(entry.cut), len(cuts))
        by_number = {cuts[id(e.cut)]: e.cut for e in self.tensors.values()}
        content = {
            "format": FORMAT,
            "version": VERSION,
            "checksum": "xxh3-64",
            "block_bytes": self.block_bytes,
            "files": [[f.name, f.bytes, f.data_start, f.header_sum] for f in self.files],
            "cuts": [_cut_json(by_number[number]) for number in range(len(by_number))],
            "tensors": {
                e.name: [e.dtype.torch_name, cuts[id(e.cut)], list(e.files), list(e.begins), list(e.sums)]
                for e in self.tensors.values()
            },
            "tree": self.tree,
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def stored_values(index: Index) -> dict[str, Scalar]:
    """The values of a checkpoint that are not tensors, by name."""
    return {name: value for name, tensor, value in index.leaves if tensor is None}


def stored_names(index: Index) -> dict[str, str]:
    """The names by which tensors are found: where the tree has them, and as they are stored."""
    named = {name: tensor for name, tensor, _ in index.leaves if tensor is not None}
    return {**{name: name for name in index.tensors}, **named}


def _cut_json(cut: StoredCut) -> Json:
    return {"shape": cut.shape, "offsets": cut.offsets.tolist(), "sizes": cut.sizes.tolist(), "spec": cut.spec}


def parse_index(data: bytes, name: str) -> Index:
    """The index from its stored form; `name` is the file, for errors."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not JSON: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{name}: not the index of a shardwise checkpoint")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{name}: version {str(content.get('version'))[:20]} of the format; this shardwise reads version {VERSION}"
        )
    try:
        return _IndexParser(content, name).index()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{name}: the index is damaged: {type(error).__name__}: {str(error)[:200]}") from error


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
            raise self.error(f"the tree names tensor {unknown[0]!r}, which is not stored")

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
        shape = tuple(entry["shape"])
        if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) > MAX_NUMBER or len(shape) > 64:
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
        array = np.array(rows if rows else np.zeros((0, ndim), np.int64))
        if not isinstance(rows, list) or array.dtype.kind != "i" or array.shape != (len(rows), ndim):
            if not (ndim == 0 and array.shape == (len(rows), 0)):
                raise self.error(f"the boxes of a tensor of {ndim} dims are not rows of {ndim} ints")
            array = np.zeros((len(rows), 0), np.int64)
        if ((array < 0) | (array > MAX_NUMBER)).any():
            raise self.error("a box has negative or absurd numbers")
        return array.astype(np.int64)

    def users_of(self, cut: Any) -> str:
        number = self.content["cuts"].index(cut)
        names = [name for name, entry in self.content["tensors"].items() if entry[1] == number]
        return f"tensor {names[0]!r}" if names else "a tensor"

    def tensor(self, name: str, entry: Any, cuts: Sequence[StoredCut]) -> TensorEntry:
        dtype_name, number, files, begins, sums = entry
        if type(number) is not int or not 0 <= number < len(cuts):
            raise self.error(f"tensor {name!r}: there is no cut {str(number)[:30]}; there are {len(cuts)}")
        if not isinstance(dtype_name, str):
            raise self.error(f"tensor {name!r}: its dtype is not a name")
        try:
            dtype = find_dtype(dtype_name)
        except LayoutError as error:
            raise self.error(f"tensor {name!r}: {error}") from error
        if math.prod(cuts[number].shape) * dtype.itemsize > MAX_NUMBER:
            raise self.error(f"tensor {name!r}: {dtype_name}{list(cuts[number].shape)} is too large")
        if not (isinstance(files, list) and isinstance(begins, list) and isinstance(sums, list)) or not (
            len(files) == len(begins) == len(sums) == len(cuts[number])
        ):
            raise self.error(f"tensor {name!r}: {len(cuts[number])} boxes, but not as many files, places and checksums")
        if not (set(map(type, sums)) <= {str} and _SUMS.fullmatch("".join(sums))):
            raise self.error(f"tensor {name!r}: its checksums are not rows of {SUM_DIGITS} hexadecimal digits")
        return TensorEntry(name, dtype, cuts[number], files, begins, sums)


def check_ranges(
    tensors: Mapping[str, TensorEntry], files: Sequence[FileEntry], block_bytes: int, name: str, with_sums: bool = True
) -> None:
    """Raise unless all stored boxes are inside the data of their files, without overlap, with all checksums."""
    entries = list(tensors.values())
    owners = np.repeat(np.arange(len(entries)), [len(e.cut) for e in entries])
    numbers = _flatten_column([n for e in entries for n in e.files], entries, name)
    begins = _flatten_column([n for e in entries for n in e.begins], entries, name)
    sizes = np.concatenate([e.cut.elements * e.dtype.itemsize for e in entries]) if entries else np.zeros(0, np.int64)
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(files)):
        raise CheckpointError(f"{name}: a tensor names a file that is not listed; there are {len(files)}")
    starts = np.array([f.data_start for f in files], np.int64)[numbers]
    ends = np.array([f.bytes for f in files], np.int64)[numbers]
    bad = np.flatnonzero((begins < starts) | (begins > ends) | (sizes > ends - begins))
    if len(bad):
        row, entry = int(bad[0]), entries[owners[bad[0]]]
        raise CheckpointError(
            f"{name}: tensor {entry.name!r}: bytes {begins[row]} to {begins[row] + sizes[row]} are outside the data "
            f"of {files[numbers[row]].name}, which are the bytes {starts[row]} to {ends[row]}"
        )
    _check_no_overlap(entries, owners, numbers, begins, sizes, files, name)
    lengths = np.array([len(s) for e in entries for s in e.sums], np.int64)
    wrong = np.flatnonzero(lengths != -(-sizes // block_bytes) * SUM_DIGITS)
    if with_sums and len(wrong):
        raise CheckpointError(f"{name}: tensor {entries[owners[wrong[0]]].name!r}: it lacks checksums, or has too many")


def _flatten_column(numbers: list[Any], entries: Sequence[TensorEntry], name: str) -> IntArray:
    array = np.array(numbers) if numbers else np.zeros(0, np.int64)
    if array.dtype.kind != "i" or array.ndim != 1 or (len(array) and not 0 <= array.min() <= array.max() <= MAX_NUMBER):
        raise CheckpointError(f"{name}: some places of the {len(entries)} tensors are not byte offsets")
    return array


def _check_no_overlap(
    entries: Sequence[TensorEntry],
    owners: IntArray,
    numbers: IntArray,
    begins: IntArray,
    sizes: IntArray,
    files: Sequence[FileEntry],
    name: str,
) -> None:
    order = np.lexsort((sizes, begins, numbers))
    same = numbers[order][1:] == numbers[order][:-1]
    crossed = np.flatnonzero(same & (begins[order][1:] < (begins + sizes)[order][:-1]))
    if len(crossed):
        one, other = (entries[owners[order[crossed[0] + i]]].name for i in (0, 1))
        place = files[numbers[order[crossed[0]]]].name
        raise CheckpointError(f"{name}: tensors {one!r} and {other!r} overlap in {place}")
