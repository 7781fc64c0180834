"""What is in a checkpoint, and where? The index as a value, whatever the format, and the tree of the nested state.

1. Tensors that are cut alike share one `StoredCut`: a shape, the boxes that tile it, and the spec it was saved with.
2. A tensor names its cut and its dtype, and for each box the file, the first byte and the checksums of its blocks.
3. The name of a leaf of the tree is its path joined by dots: `{"model": {"w": x}, "steps": [1, 2]}` has the tensor
   `model.w` and the values `steps.0` and `steps.1`. In JSON, scalars and lists are unchanged; everything else is an
   object with one key that says what it is.

Checksums of stored bytes: XXH3 (64 bits) of every block of 4 MiB, so that a slice is checked without the rest.

XXH3 keeps up with memory (about 10 GB/s a core), where `zlib.crc32` gives 0.6 to 1 and would cost more than writing.
It detects accidents; it does not protect against someone who forges the index as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from shardwise.checkpoint.files import CheckpointError, require
from shardwise.geometry import Box, DType, EnumerableSpec, Layout, LayoutError, Piece
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.serialize import layout_from_json

BLOCK_BYTES = 4 << 20
SUM_DIGITS = 16


def checksum(data: memoryview | bytes) -> str:
    """The checksum of some bytes as 16 hexadecimal digits.

    >>> checksum(b"")
    '2d06800538d394c2'
    """
    return xxhash.xxh3_64_hexdigest(data)


def block_count(size: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many blocks this many bytes are.

    >>> block_count(0), block_count(1), block_count(BLOCK_BYTES + 1)
    (0, 1, 2)
    """
    return -(-size // block_bytes)


def split_into_blocks(data: memoryview, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """Cut bytes into blocks."""
    for start in range(0, len(data), block_bytes):
        yield data[start : start + block_bytes]


class BlockSums:
    """The checksums of the blocks of bytes that come in parts of any length.

    >>> sums = BlockSums()
    >>> sums.update(memoryview(b"ab"))
    >>> sums.update(memoryview(b"c"))
    >>> sums.text() == checksum(b"abc")
    True
    """

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open: xxhash.xxh3_64 | None = None
        self._room = BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        if self._open is None and len(data) <= BLOCK_BYTES:
            self._begin(data)
            return
        while len(data):
            part, data = data[: self._room], data[self._room :]
            self._begin(part)

    def _begin(self, part: memoryview) -> None:
        if self._open is None:
            self._open = xxhash.xxh3_64()
        self._open.update(part)
        self._room -= len(part)
        if self._room == 0:
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open.hexdigest())
        self._open, self._room = None, BLOCK_BYTES

    def text(self) -> str:
        """The checksums of all blocks, one after another."""
        self._close()
        return "".join(self._done)


def combine_crc(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes one after another, from theirs and the length of the second.

    >>> import zlib
    >>> combine_crc(zlib.crc32(b"shard"), zlib.crc32(b"wise"), 4) == zlib.crc32(b"shardwise")
    True
    """
    odd = [0xEDB88320, *(1 << n for n in range(31))]  # the effect of one zero bit on the register
    power = _square_matrix(_square_matrix(_square_matrix(odd)))  # of one zero byte
    while length:
        if length & 1:
            first = _apply_matrix(power, first)
        power, length = _square_matrix(power), length >> 1
    return first ^ second


def _apply_matrix(matrix: list[int], vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector, row = vector >> 1, row + 1
    return total


def _square_matrix(matrix: list[int]) -> list[int]:
    return [_apply_matrix(matrix, row) for row in matrix]


Json: TypeAlias = Any
Scalar: TypeAlias = bool | int | float | str | None
MAX_DEPTH = 100
_PLAIN = (int, float, str, bool, type(None))
MAX_NUMBER = 2**62
MAX_DIMS = 64
CRC = "crc32:"  # a checksum that begins so is the CRC-32 of a whole stored box
_FREE_PIECES, _PIECES_PER_BOX = 1 << 18, 64
_FREE_NAME_BYTES, _NAME_BYTES_PER_BYTE = 1 << 20, 8


def stored_layout(entry: TensorEntry) -> Layout:
    """The layout of a stored tensor; without a spec it is whole on rank 0."""
    spec = entry.cut.spec
    if spec is None:
        return EnumerableSpec([Piece(Box.whole(entry.shape), 0)]).layout(entry.shape)
    try:
        _check_spec_size(spec, entry)
        return layout_from_json({"shape": list(entry.shape), "spec": spec})
    except (LayoutError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        text = f"tensor {entry.name[:300]!r}: its layout in the index is damaged: {str(error)[:300]}"
        raise CheckpointError(text) from error


def _check_spec_size(spec: Any, entry: TensorEntry) -> None:
    """Raise unless a spec makes about as many pieces as its length and the number of stored boxes allow.

    Ranks are always listed one by one. Block-cyclic shards have as many cuts as the dim has blocks, and as many boxes.
    """
    ranks = _count_ints(spec["mesh"]["ranks"] if spec["kind"] == "mesh" else spec.get("ranks", []))
    cuts = 1
    for placement in spec.get("placements") or ():
        block = placement.get("block")
        cuts *= 1 if block is None else -(-entry.shape[placement["dim"]] // max(1, block))
    for split in spec.get("splits") or ():
        require(not isinstance(split, int) or split <= ranks, f"{split} parts of a dim on {ranks} ranks")
    require(cuts * ranks <= _FREE_PIECES + _PIECES_PER_BOX * len(entry.cut), f"{cuts} blocks on {ranks} ranks")


def _count_ints(node: Any) -> int:
    """How many ints are in nested lists; anything else in them is an error."""
    require(isinstance(node, list), "ranks are not listed")
    if node and isinstance(node[0], list):
        return sum(map(_count_ints, node))
    require(not set(map(type, node)) - {int}, "ranks are not ints")
    return len(node)


def check_name_bytes(tree: Json, index_bytes: int, name: str) -> None:
    """Raise if the names of all leaves together are much longer than the index: each repeats those of its parents."""
    left = _FREE_NAME_BYTES + _NAME_BYTES_PER_BYTE * index_bytes
    open_nodes: list[tuple[Iterator[Any], int]] = [(iter([("", tree)]), 0)]  # of containers, one inside the other
    while open_nodes:
        children, length = open_nodes[-1]
        for key, node in children:
            below = length + 1 + (len(key) if isinstance(key, str) else 8)
            try:
                inner = (
                    None if isinstance(node, dict) and "tensor" in node else tree_children(node, len(open_nodes) - 1)
                )
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error
            if inner is not None:
                open_nodes.append((iter(inner), below))
                break
            left -= below - 1
            if left < 0:
                raise CheckpointError(f"{name}: the names in the state are much longer than the index")
        else:
            open_nodes.pop()


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


class StridedView(NamedTuple):
    """Where the elements of a box are in a run of `run_bytes`: the first is number `start`; strides are in elements."""

    start: int
    strides: tuple[int, ...]
    run_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class TensorEntry:
    """A tensor: for each box of its cut the number of the file, the first byte in it, and checksums ("" for none).

    Each box is a run of bytes, row by row; or `views` says for each box where its elements are in the run.
    Checksums are those of the whole run.
    """

    name: str
    dtype: DType
    cut: StoredCut
    files: Sequence[int]
    begins: Sequence[int]
    sums: Sequence[str]
    views: Sequence[StridedView] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cut.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view_of(self, number: int) -> StridedView:
        """Where the elements of a box are in its run of bytes."""
        if self.views is not None:
            return self.views[number]
        sizes, count = self.cut.extents[number]
        return StridedView(0, row_major_strides(sizes), count * self.dtype.itemsize)

    def run_bytes(self, number: int) -> int:
        """The length of the run of bytes that a box is in."""
        if self.views is not None:
            return self.views[number].run_bytes
        return self.cut.extents[number][1] * self.dtype.itemsize

    def touched_blocks(self, number: int, region: Box, block_bytes: int) -> tuple[int, int]:
        """The first block of the run of a box that a region of it touches, and the one after the last."""
        start, strides, _ = self.view_of(number)
        first = start + sum(o * s for o, s in zip(region.offsets, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(region.sizes, strides, strict=True))
        itemsize = self.dtype.itemsize
        return first * itemsize // block_bytes, ((last + 1) * itemsize - 1) // block_bytes + 1


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a box that is stored row by row.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, count = [], 1
    for size in reversed(sizes):
        strides.append(count)
        count *= size
    return tuple(reversed(strides))


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

    @property
    def leaves(self) -> Iterator[tuple[str, str | None, Scalar]]:
        """The (name, tensor or None, value) of every leaf of the tree; a long list of numbers is not held twice."""
        return iterate_leaves(self.tree)

    @property
    def values(self) -> Iterator[tuple[str, Scalar]]:
        """The names and values of what is not a tensor."""
        return ((name, value) for name, tensor, value in self.leaves if tensor is None)


def stored_names(index: Index) -> dict[str, str]:
    """The names by which tensors are found: where the tree has them, and as they are stored."""
    named = {name: tensor for name, tensor, _ in index.leaves if tensor is not None}
    return {**{name: name for name in index.tensors}, **named}


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
    if set(map(type, numbers)) - {int} or (numbers and not 0 <= min(numbers) <= max(numbers) <= MAX_NUMBER):
        raise CheckpointError(f"{name}: some places of the {len(entries)} tensors are not byte offsets")
    return np.array(numbers, np.int64)


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


def iterate_leaves(tree: Json) -> Iterator[tuple[str, str | None, Scalar]]:
    """The (name, tensor or None, value) of every leaf of a tree in JSON, checked.

    >>> list(iterate_leaves({"dict": [["a", [1, {"tensor": "w"}]]]}))
    [('a.0', None, 1), ('a.1', 'w', None)]
    """
    yield from _iterate_node_leaves(tree, "", 0)


def _iterate_node_leaves(node: Json, name: str, depth: int) -> Iterator[tuple[str, str | None, Scalar]]:
    if isinstance(node, dict) and "tensor" in node:
        if len(node) != 1 or not isinstance(node["tensor"], str):
            raise CheckpointError(f"the tree of the index has a tensor without a name at {name[:300]!r}")
        yield name, node["tensor"], None
    elif (children := tree_children(node, depth)) is not None:
        for key, child in children:
            below = f"{name}.{key}" if depth else str(key)
            if type(child) in _PLAIN:  # most of them, without a call for each
                yield below, None, child
            else:
                yield from _iterate_node_leaves(child, below, depth + 1)
    else:
        yield name, None, _parse_tree_scalar(node, (name,))


def tree_children(node: Json, depth: int) -> Iterable[tuple[str | int, Json]] | None:
    """The children of a container, or None for a leaf."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"the tree of the index is nested deeper than {MAX_DEPTH} levels")
    items = node.get("tuple") if isinstance(node, dict) else node
    if isinstance(items, list):
        return enumerate(items)
    if isinstance(node, dict) and isinstance(node.get("dict"), list):
        pairs: list[Any] = node["dict"]
        if all(isinstance(p, list) and len(p) == 2 and type(p[0]) in (str, int) for p in pairs):
            return pairs
        raise CheckpointError("the tree of the index has keys that are not strings or ints")
    return None


def _parse_tree_scalar(node: Json, path: tuple[str, ...]) -> Scalar:
    if isinstance(node, dict):
        if list(node) == ["float"] and node["float"] in ("nan", "inf", "-inf"):
            return float(node["float"])
        raise CheckpointError(f"the tree of the index has an unknown kind {list(node)[:3]} at {'.'.join(path)[:300]!r}")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise CheckpointError(f"the tree of the index has a {type(node).__name__} at {'.'.join(path)[:300]!r}")


def build_state(tree: Json, tensor: Callable[[str], Any]) -> Any:
    """The nested state of a tree in JSON, with what `tensor` returns for each name.

    >>> build_state({"dict": [["a", {"tuple": [1, {"tensor": "w"}]}]]}, str.upper)
    {'a': (1, 'W')}
    """
    return build_tree(tree, lambda _, name: tensor(name))


def build_tree(node: Json, tensor: Callable[[tuple[str, ...], str], Any], path: tuple[str, ...] = ()) -> Any:
    """The same with what `tensor` returns for the path and the name of each tensor."""
    if isinstance(node, dict) and "tensor" in node:
        return tensor(path, node["tensor"])
    children = tree_children(node, len(path))
    if children is None:
        return _parse_tree_scalar(node, path)
    built = [(key, build_tree(child, tensor, (*path, str(key)))) for key, child in children]
    if isinstance(node, dict) and "dict" in node:
        return dict(built)
    values = [value for _, value in built]
    return tuple(values) if isinstance(node, dict) else values
