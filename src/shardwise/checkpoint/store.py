"""The bytes of a checkpoint: files mapped when they are first needed, checked, and copied to where they belong.

Bytes are only mapped, so reading a slice reads its pages and nothing else. A file is mapped after its length was
compared with what the index says. Pages that have been read are released whenever they add up to the limit, and files
beyond the first few hundred are unmapped again, so that a process may read a checkpoint of thousands of ranks.

Stored elements become numbers that NumPy can compute with: floats of any width float64, complex numbers complex128,
integers int64 or uint64. Floats of 8 bits are looked up in a table of their 256 values. Conversions round as torch's
do: to the nearest, ties to even; what is too large becomes infinite, NaN stays NaN.

Copying: `plan_reads` finds the regions of stored boxes that fill boxes of the target, whoever asks for them.

1. Large reads are copied from mapped pages, prefetched in bulk: one copy, as fast as reading straight into place and
   faster where that is not aligned. Pages that come one by one as they are touched cost twice as much. So are short
   rows far apart (a narrow column of a wide tensor), and regions with strides of their own.
2. Others are cut into steps, as much as one system call returns: rows with small gaps between them are read with the
   gaps, rows far apart one by one. Steps near each other in a file, of whichever tensors, share a window of it, which
   is read into one small buffer that stays in the processor's cache.

Where a machine has more cores than ranks, several threads of a rank work on the bytes.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from operator import itemgetter
from types import EllipsisType
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.commit import FolderVanished, Place, find_place, open_folder
from shardwise.checkpoint.files import CheckpointError, FileReader, ReadableFolder
from shardwise.checkpoint.formats import FORMATS, describe_expected, detect_format
from shardwise.checkpoint.formats.base import Format
from shardwise.checkpoint.index import CRC, SUM_DIGITS, StoredCut, TensorEntry, checksum
from shardwise.geometry import DType, LayoutError, find_dtype
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.overlap import BoxOverlap, overlaps_with_boxes

DEFAULT_BUFFER_BYTES = 256 << 20
_MAX_MAPPED = 256
_MAX_TRIES = 100
CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}


CASTABLE = ("float64", "float32", "float16", "bfloat16")
_NATIVE = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "u1",
    "complex128": "<c16",
    "complex64": "<c8",
}
_WIDE = {"f": np.float64, "c": np.complex128, "i": np.int64, "u": np.uint64}
_EXPONENT_BITS = {"float8_e4m3fn": 4, "float8_e4m3fnuz": 4, "float8_e5m2": 5, "float8_e5m2fnuz": 5}


def decode_numbers(bits: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """A row of stored elements, given as unsigned numbers of their width, as float64, complex128, int64 or uint64.

    >>> from shardwise.geometry import find_dtype
    >>> decode_numbers(np.array([0x3F80, 0xC000], np.uint16), find_dtype("bf16")).tolist()
    [1.0, -2.0]
    """
    with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaNs
        return _decode_bits(np.ascontiguousarray(bits), dtype)


def _decode_bits(bits: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    name = dtype.torch_name
    if name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if name == "complex32":
        parts = bits.view(np.float16).reshape(-1, 2).astype(np.float64)
        return np.asarray(parts[:, 0] + 1j * parts[:, 1])
    if name.startswith("float8"):
        return np.asarray(decode_float8_codes(name)[bits])
    if name not in _NATIVE:
        raise CheckpointError(f"elements of type {dtype} are not single numbers; they are only compared bit by bit")
    native = bits.view(_NATIVE[name])
    return native.astype(_WIDE[native.dtype.kind])


def has_numbers(dtype: DType) -> bool:
    """Whether the elements of a type are single numbers: one of the pairs of 4-bit floats is not."""
    return not dtype.torch_name.startswith("float4")


@cache
def decode_float8_codes(name: str) -> npt.NDArray[np.float64]:
    """The values of all 256 codes of an 8-bit float.

    >>> decode_float8_codes("float8_e5m2")[[0x3C, 0x7C, 0x7F]].tolist()
    [1.0, inf, nan]
    """
    codes = np.arange(256)
    if name == "float8_e8m0fnu":
        return np.asarray(np.where(codes == 255, np.nan, 2.0 ** (codes - 127)), np.float64)
    width = _EXPONENT_BITS[name]
    fraction_bits, unsigned_zero = 7 - width, name.endswith("uz")
    bias = 2 ** (width - 1) - (0 if unsigned_zero else 1)
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, fraction = (codes & 127) >> fraction_bits, codes & (2**fraction_bits - 1)
    part = fraction / 2**fraction_bits
    size = np.where(exponent == 0, part * 2.0 ** (1 - bias), (1 + part) * 2.0 ** (exponent - bias))
    values: npt.NDArray[np.float64] = sign * size
    if unsigned_zero:
        values[128] = np.nan
    elif name == "float8_e4m3fn":
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[exponent == 2**width - 1] = np.nan
        values[[0x7C, 0xFC]] = [np.inf, -np.inf]
    return values


def find_cast_dtype(name: str) -> DType:
    """The element type to convert to; an error for types that nothing is converted to.

    >>> find_cast_dtype("bf16").torch_name
    'bfloat16'
    """
    try:
        found = find_dtype(name)
    except LayoutError as error:
        raise CheckpointError(str(error)) from error
    if found.torch_name not in CASTABLE:
        known = ", ".join(find_dtype(known).name for known in CASTABLE)
        raise CheckpointError(f"elements are not converted to {found}; pass one of {known}")
    return found


def converted_dtype(stored: DType, wanted: DType | None) -> DType:
    """The element type of a tensor after a conversion; only floats of 16 bits or more are converted.

    >>> bf16 = find_dtype("bf16")
    >>> [converted_dtype(find_dtype(name), bf16).name for name in ("f32", "i64", "f8e4m3fn", "c64")]
    ['bf16', 'i64', 'f8e4m3fn', 'c64']
    """
    return wanted if wanted is not None and stored.torch_name in CASTABLE else stored


def convert_elements(bits: npt.NDArray[Any], stored: DType, wanted: DType) -> npt.NDArray[Any]:
    """A row of floats, given as unsigned numbers of their width, as floats of another type in the same form.

    >>> stored = np.array([1.0, -2.5], np.float32).view(np.uint32)
    >>> [hex(n) for n in convert_elements(stored, find_dtype("f32"), find_dtype("bf16")).tolist()]
    ['0x3f80', '0xc020']
    """
    with np.errstate(all="ignore"):
        if wanted.torch_name == "bfloat16":
            return _round_to_bfloat16(_decode_float32(bits, stored))
        kind = np.dtype(_NATIVE[wanted.torch_name])
        if stored.torch_name == "bfloat16":
            numbers: npt.NDArray[Any] = _decode_float32(bits, stored)
        else:
            numbers = bits.view(_NATIVE[stored.torch_name])
        if stored.torch_name == "float64" and wanted.torch_name == "float16":
            numbers = numbers.astype(np.float32)  # as torch: rounded twice
        return numbers.astype(kind).view(f"<u{kind.itemsize}")


def _decode_float32(bits: npt.NDArray[Any], stored: DType) -> npt.NDArray[np.float32]:
    if stored.torch_name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(_NATIVE[stored.torch_name]).astype(np.float32)


def _round_to_bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = numbers.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    rounded[np.isnan(numbers)] = 0x7FC0
    return rounded


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """A box of elements in a file, before it is read: the first byte, and sizes and strides (in bytes)."""

    file: FileReader
    begin: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    carrier: np.dtype[Any]

    @property
    def span(self) -> int:
        """The bytes of the file from the first to the last element: a narrow region touches the pages of all."""
        if 0 in self.sizes:
            return 0
        return sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) + self.carrier.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.carrier.itemsize

    def narrow(self, offsets: Sequence[int], sizes: Sequence[int]) -> StoredRegion:
        """A region of this one."""
        begin = self.begin + sum(o * s for o, s in zip(offsets, self.strides, strict=True))
        return StoredRegion(self.file, begin, tuple(sizes), self.strides, self.carrier)

    def load(self) -> npt.NDArray[Any]:
        """The elements, as unsigned numbers of the dtype's width, since NumPy lacks some types; often a view."""
        data = self.file.read(self.begin, self.begin + self.span)
        return np.ndarray(self.sizes, self.carrier, data.data, 0, self.strides)

    def fetch(self) -> None:
        """Bring the bytes in ahead of their use."""
        self.file.fetch(self.begin, self.begin + self.span)

    def split(self, span_bytes: int) -> Iterator[tuple[slice, ...]]:
        """Cut it into parts of about this span, each as the slices of it; along the dim with the largest stride first.

        So each part is a run of the file, also where the first dim of the region is not the outermost in the file.
        """
        dims = [d for d, n in enumerate(self.sizes) if n > 1]
        if self.span <= span_bytes or not dims:
            yield tuple(slice(0, n) for n in self.sizes)
            return
        dim = max(dims, key=lambda d: self.strides[d])
        length, stride = self.sizes[dim], self.strides[dim]
        inner = self.span - (length - 1) * stride
        count = max(1, (span_bytes - inner) // stride + 1) if inner <= span_bytes else 1
        before, after = self.sizes[:dim], self.sizes[dim + 1 :]
        for start in range(0, length, count):
            taken = slice(start, min(length, start + count))
            part = self.narrow((0,) * len(self.sizes), (*before, taken.stop - start, *after))
            for slices in part.split(max(span_bytes, inner) if count > 1 else span_bytes):
                yield (*slices[:dim], taken, *slices[dim + 1 :])

    def part(self, slices: Sequence[slice]) -> StoredRegion:
        """The part that `split` cut."""
        return self.narrow([s.start for s in slices], [s.stop - s.start for s in slices])


class Store:
    """An index and the folder that its files are in, both pinned: what is read belongs to one save.

    `digest` differs as soon as the index, or a file that has no checksums, does.
    """

    def __init__(self, pinned: ReadableFolder, format: Format, index_name: str, max_buffer_bytes: int) -> None:
        self.pinned, self.format, self.folder = pinned, format, pinned.path
        self.format_title = format.title_of(index_name)
        self._index_name = index_name
        self._identity = self._identify_index()
        self.index, self.digest = format.read_index(pinned, index_name)
        self._all_pinned = self._pin_files()
        self._limit = max(max_buffer_bytes, mmap.PAGESIZE)
        self._readers: dict[int, FileReader] = {}
        self._touched = 0
        self._fetches = True
        self._lock = threading.Lock()

    def _identify_index(self) -> list[str | int]:
        try:
            return self.pinned.identity(self._index_name)
        except OSError as error:
            raise CheckpointError(f"{self.folder / self._index_name}: cannot be read: {error.strerror}") from error

    def _pin_files(self) -> bool:
        """Keep the files open, as far as that many may be; whether that was all of them."""
        try:
            for file in self.index.files[: _max_pinned()]:
                self.pinned.pin(file.name)
        except OSError:  # reported when the file is read, if ever
            return False
        return self.pinned.pins and len(self.index.files) <= _max_pinned()

    def is_stale(self) -> bool:
        """Whether another save has taken the place of this one, or has written to it, so that reading may fail."""
        return self.pinned.is_replaced() or self._is_overwritten()

    def is_consistent(self) -> bool:
        """Whether the index and all files belong to one save, and will as long as this is open."""
        return not self._is_overwritten() if self._all_pinned else not self.is_stale()

    def _is_overwritten(self) -> bool:
        """Whether the index is another file by now; one that was removed with a pinned folder does not count."""
        try:
            return self.pinned.identity(self._index_name) != self._identity
        except OSError:
            return not self.pinned.pins

    def reader(self, number: int) -> FileReader:
        """A file, after a look at its length; system errors name the file."""
        found = self._readers.get(number)
        if found is None:
            with self._lock:
                found = self._readers.get(number) or self._open_reader(number)
                while len(self._readers) >= _MAX_MAPPED:  # what still uses an older one keeps it until it is done
                    self._readers.pop(next(iter(self._readers)))
                self._readers[number] = found
        return found

    def _open_reader(self, number: int) -> FileReader:
        file = self.index.files[number]
        found = self.pinned.reader(file.name)
        if found.size != file.bytes:
            raise CheckpointError(
                f"{self.folder / file.name}: {found.size} bytes; the index says {file.bytes}: it is truncated or not "
                "from this save"
            )
        return found

    def region(self, tensor: TensorEntry, number: int) -> StoredRegion:
        """A stored box of a tensor, before it is read."""
        carrier = CARRIERS[tensor.dtype.itemsize]
        start, strides, _ = tensor.view_of(number)
        begin = tensor.begins[number] + start * carrier.itemsize
        steps = tuple(s * carrier.itemsize for s in strides)
        return StoredRegion(self.reader(tensor.files[number]), begin, tensor.cut.extents[number][0], steps, carrier)

    def fetch(self, region: StoredRegion) -> None:
        """Bring the bytes of a region in at once; page by page they cost more than what they hold."""
        if self._fetches:
            self._fetches = region.file.fetch(region.begin, region.begin + region.span)

    @property
    def fetches(self) -> bool:
        """Whether pages can be prefetched in bulk."""
        return self._fetches

    def touch(self, size: int) -> None:
        """Say that this many mapped bytes have been read; pages are released at the limit."""
        self._touched += size
        if self._touched >= self._limit // 2:
            self.release_pages()

    def release_pages(self) -> None:
        """Drop the mapped pages from this process; the system may keep them."""
        self._touched = 0
        with self._lock:
            for reader in self._readers.values():
                reader.release()

    @property
    def max_buffer_bytes(self) -> int:
        """The limit on memory for pages and buffers."""
        return self._limit

    @property
    def step_bytes(self) -> int:
        """The most bytes to read between two calls of `touch`."""
        return max(mmap.PAGESIZE, self._limit // 4)

    def verify_header(self, number: int) -> None:
        """Raise unless the start of a file is what was written."""
        file = self.index.files[number]
        start = self.reader(number).read(0, file.data_start)
        if file.header_sum is not None and checksum(start.data) != file.header_sum:
            raise CheckpointError(f"{self.folder / file.name}: the header is damaged: its checksum differs")

    def verify(self, tensor: TensorEntry, number: int, first: int, last: int) -> None:
        """Raise unless the blocks `first` to `last` (exclusive) of a stored box have the checksums of the index."""
        sums = tensor.sums[number]
        if not sums:
            return
        if sums.startswith(CRC):
            self._verify_crc(tensor, number, sums)
            return
        file, size = self.reader(tensor.files[number]), tensor.run_bytes(number)
        start, step = tensor.begins[number], self.index.block_bytes
        for block in range(first, last):
            low, high = start + block * step, start + min((block + 1) * step, size)
            file.fetch(low, high)
            if checksum(file.read(low, high).data) != sums[block * SUM_DIGITS : (block + 1) * SUM_DIGITS]:
                raise CheckpointError(
                    f"{self.folder / self.index.files[tensor.files[number]].name}: tensor {tensor.name!r}: bytes "
                    f"{low} to {high} are damaged: their checksum differs"
                )
            self.touch(high - low)

    def _verify_crc(self, tensor: TensorEntry, number: int, expected: str) -> None:
        file, size = self.reader(tensor.files[number]), tensor.run_bytes(number)
        start, crc = tensor.begins[number], 0
        for low in range(start, start + size, self.step_bytes):
            part = file.read(low, min(start + size, low + self.step_bytes))
            crc = zlib.crc32(part.data, crc)
            self.touch(len(part))
        if f"{CRC}{crc:08x}" != expected:
            raise CheckpointError(
                f"{self.folder / self.index.files[tensor.files[number]].name}: tensor {tensor.name!r}: bytes {start} "
                f"to {start + size} are damaged: their CRC-32 differs"
            )

    def close(self) -> None:
        """Unmap and close all files."""
        with self._lock:
            self._readers.clear()
        self.pinned.close()


def _max_pinned() -> int:
    """How many files one checkpoint keeps open: ranks of one process share its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_MAPPED, soft // 8) if soft != resource.RLIM_INFINITY else _MAX_MAPPED


def open_store(path: str | os.PathLike[str], max_buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> Store:
    """The checkpoint at a path: a folder of any known format, or one file.

    If a save replaces it while its index is read, this starts over with what it was replaced by.
    """
    place = find_place(path)
    for _ in range(_MAX_TRIES):
        store = _try_open(place, max_buffer_bytes)
        if store is not None:
            return store
    raise CheckpointError(f"{place}: it was replaced {_MAX_TRIES} times while it was opened; try again later")


def _try_open(place: Place, max_buffer_bytes: int) -> Store | None:
    """The checkpoint, or None if it was replaced meanwhile."""
    try:
        pinned, file_name = open_folder(place, max_buffer_bytes)
    except FolderVanished:
        return None
    try:
        store = Store(pinned, *find_index(pinned, file_name), max_buffer_bytes)
        if store.is_consistent():
            return store
    except CheckpointError:
        if not pinned.is_replaced():
            pinned.close()
            raise
    pinned.close()
    return None


def find_index(pinned: ReadableFolder, file_name: str | None) -> tuple[Format, str]:
    """The format of a folder, or of the single file in it, and the name of its index."""
    if file_name is not None:
        found = next(((known, file_name) for known in FORMATS if known.accepts_file(file_name)), None)
    else:
        found = detect_format(pinned)
    if found is None:
        what = pinned.path if file_name is None else pinned.path / file_name
        raise CheckpointError(f"{what}: not a checkpoint; expected {describe_expected()}")
    return found


_WORTH_BYTES = 32 << 20  # of work for each thread
MOST_THREADS = 4
GAP_BYTES = 16 << 10
LONG_ROW_BYTES = 64 << 10
WINDOW_BYTES = 1 << 20
LARGE_BYTES = 1 << 20
_DENSE_RATIO = 8  # pages are prefetched where at least one in this many bytes is needed
_ALIGNMENT = 64
T = TypeVar("T")


class CopyTarget(Protocol):
    """What elements are copied into: an array of their width, or what takes such arrays and converts them."""

    def __getitem__(self, place: Any, /) -> Any: ...

    def __setitem__(self, place: Any, part: npt.NDArray[Any], /) -> None: ...


TensorReads: TypeAlias = tuple[TensorEntry, Sequence[BoxOverlap], Sequence[CopyTarget]]
PlacedStep: TypeAlias = tuple[int, int, "ReadStep", TensorEntry, CopyTarget]  # file, first byte in it, what goes where


@dataclass(frozen=True, slots=True)
class ReadStep:
    """`span` bytes from byte `start` of stored box `cell` on: an array of `sizes` and `strides`, to go to `here`."""

    cell: int
    start: int
    span: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    slot: int
    here: tuple[slice | EllipsisType, ...]


def plan_reads(
    cut: StoredCut, offsets: IntArray, sizes: IntArray, slots: IntArray, local: IntArray, cells: IntArray | None = None
) -> list[BoxOverlap]:
    """What is read to fill boxes of a tensor, each of which is at `local` in target number `slots`.

    The cells are the stored boxes, or some of them; the boxes are the targets.
    """
    if not len(cut) or not len(offsets):
        return []
    stored, lengths = (cut.offsets, cut.sizes) if cells is None else (cut.offsets[cells], cut.sizes[cells])
    met = overlaps_with_boxes(cut.shape, offsets, sizes, stored, lengths)
    return met.regions(offsets - local, stored, slots, cells)


def split_read(read: BoxOverlap, stored: Sequence[int], itemsize: int, window_bytes: int) -> list[ReadStep] | None:
    """The steps of a read of a box of sizes `stored`, none longer than the window; None for short rows far apart.

    >>> from shardwise.geometry import Box
    >>> read = BoxOverlap(0, 0, Box((0, 0), (3, 2)), Box((0, 2), (3, 2)))
    >>> [(step.start, step.span) for step in split_read(read, (3, 4), 4, 1 << 20)]
    [(8, 40)]
    >>> [(step.start, step.span, step.sizes) for step in split_read(read, (3, 4), 4, 30)]
    [(8, 24, (2, 2)), (40, 8, (1, 2))]
    >>> split_read(BoxOverlap(0, 0, Box((0, 0), (3, 2)), Box((0, 0), (3, 2))), (3, 1 << 20), 4, 1 << 20) is None
    True
    """
    sizes, ndim = read.there.sizes, read.there.ndim
    if 0 in sizes:
        return []
    strides, rows = [itemsize] * ndim, [itemsize] * (ndim + 1)  # `rows[d]` is the span of dims d on
    for dim in range(ndim - 1, -1, -1):
        strides[dim] = strides[dim + 1] * stored[dim + 1] if dim + 1 < ndim else itemsize
        rows[dim] = (sizes[dim] - 1) * strides[dim] + rows[dim + 1]
    far = [d for d in range(ndim) if sizes[d] > 1 and strides[d] - rows[d + 1] > GAP_BYTES]
    if any(rows[d + 1] < LONG_ROW_BYTES for d in far):
        return None
    start = sum(o * s for o, s in zip(read.there.offsets, strides, strict=True))
    if not ndim:
        return [ReadStep(read.cell, start, rows[0], (), (), read.box, (...,))]
    dim = max(far, default=0)  # steps are some indices of this dim, and single ones of the dims before it
    while rows[dim + 1] > window_bytes and dim + 1 < ndim:
        dim += 1
    gap = strides[dim] - rows[dim + 1]
    count = 1 if gap > GAP_BYTES else max(1, (window_bytes - rows[dim + 1]) // strides[dim] + 1)
    steps = []
    for outer in product(*map(range, sizes[:dim])):
        for row in range(0, sizes[dim], count):
            length = min(count, sizes[dim] - row)
            first = (*outer, row, *(0 for _ in sizes[dim + 1 :]))
            extent = (*(1 for _ in outer), length, *sizes[dim + 1 :])
            here = [slice(o + f, o + f + e) for o, f, e in zip(read.here.offsets, first, extent, strict=True)]
            at = start + sum(f * s for f, s in zip(first, strides, strict=True))
            span = (length - 1) * strides[dim] + rows[dim + 1]
            steps.append(ReadStep(read.cell, at, span, extent, tuple(strides), read.box, (*here, ...)))
    return steps


def copy_reads(
    store: Store, jobs: Iterable[TensorReads], ranks: int = 1, advance: Callable[[int], None] | None = None
) -> None:
    """Fill the targets of many stored tensors, file by file; as many ranks do so at once.

    `advance` is called with the bytes of each part that was copied, from several threads.
    """
    window = min(WINDOW_BYTES, store.step_bytes // MOST_THREADS)
    mapped: list[tuple[TensorEntry, BoxOverlap, CopyTarget]] = []
    parts = sorted(_place_steps(store, jobs, window, mapped), key=itemgetter(0, 1))

    def copy_steps(some: Sequence[PlacedStep]) -> None:
        memory = np.empty(window + 3 * _ALIGNMENT, np.uint8)  # gaps between parts are read with them
        buffer = memory[-memory.ctypes.data % _ALIGNMENT :]  # lines of the cache: the system copies three times as fast
        for number, of_file in groupby(some, key=itemgetter(0)):
            _copy_file_steps(store.reader(number), list(of_file), buffer, window, advance)

    def copy_mapped(some: Sequence[tuple[TensorEntry, BoxOverlap, CopyTarget]]) -> None:
        for tensor, read, target in some:
            copy_region(store, tensor, read, target)
            if advance is not None:
                advance(read.there.numel * tensor.dtype.itemsize)

    on_host = all(isinstance(part[4], np.ndarray) for part in parts)
    run_in_threads(copy_steps, parts, [part[2].span for part in parts], ranks if on_host else None)
    sizes = [read.there.numel * tensor.dtype.itemsize for tensor, read, _ in mapped]
    on_host = all(isinstance(target, np.ndarray) for _, _, target in mapped)
    run_in_threads(copy_mapped, mapped, sizes, ranks if on_host else None)


def _place_steps(
    store: Store, jobs: Iterable[TensorReads], window: int, mapped: list[tuple[TensorEntry, BoxOverlap, CopyTarget]]
) -> Iterator[PlacedStep]:
    """All steps, placed. Large reads, and rows far apart, are noted: they are copied from mapped pages.

    Tensors that are split alike share their plans.
    """
    known: dict[tuple[int, int], tuple[list[ReadStep], list[BoxOverlap]]] = {}
    for tensor, reads, targets in jobs:
        itemsize = tensor.dtype.itemsize
        if (id(reads), itemsize) not in known:
            steps: list[ReadStep] = []
            others: list[BoxOverlap] = []
            for read in reads:
                large = store.fetches and read.there.numel * itemsize >= LARGE_BYTES
                stored = tensor.cut.extents[read.cell][0]
                found = None if large or tensor.views is not None else split_read(read, stored, itemsize, window)
                others += [read] if found is None else []
                steps += found or []
            known[id(reads), itemsize] = steps, others
        steps, others = known[id(reads), itemsize]
        files, begins = tensor.files, tensor.begins
        for step in steps:
            yield files[step.cell], begins[step.cell] + step.start, step, tensor, targets[step.slot]
        mapped += [(tensor, read, targets[read.box]) for read in others]


def _copy_file_steps(
    file: FileReader,
    parts: Sequence[PlacedStep],
    buffer: npt.NDArray[np.uint8],
    window: int,
    advance: Callable[[int], None] | None,
) -> None:
    """Read the parts of one file, which are in the order of their first bytes, and put them in their places."""
    first = 0
    while first < len(parts):
        low = parts[first][1]
        high = low + parts[first][2].span
        after = first + 1
        while after < len(parts) and parts[after][1] <= high + GAP_BYTES:
            end = max(high, parts[after][1] + parts[after][2].span)
            if end > low + window:
                break
            high, after = end, after + 1
        low -= low % _ALIGNMENT
        file.read_into(buffer.data[: high - low], low)
        for _, begin, step, tensor, place in parts[first:after]:
            carrier = CARRIERS[tensor.dtype.itemsize]
            place[step.here] = np.ndarray(step.sizes, carrier, buffer, begin - low, step.strides)
        if advance is not None:
            advance(sum(math.prod(part[2].sizes) * part[3].dtype.itemsize for part in parts[first:after]))
        first = after


def copy_region(store: Store, tensor: TensorEntry, read: BoxOverlap, target: CopyTarget) -> None:
    """Copy one read from mapped pages, in steps that touch a bounded part of the file each."""
    source = store.region(tensor, read.cell).narrow(read.there.offsets, read.there.sizes)
    place = target[(*read.here.slices, ...)]
    for slices in source.split(store.step_bytes):
        part = source.part(slices)
        if part.nbytes * _DENSE_RATIO >= part.span:
            store.fetch(part)
        place[(*slices, ...)] = part.load()
        store.touch(part.span)


def split_evenly(items: Sequence[T], sizes: Sequence[int], count: int) -> list[Sequence[T]]:
    """Cut a sequence into at most this many runs of about equal size, none of them empty.

    >>> split_evenly("abcd", [1, 1, 1, 3], 2), split_evenly("ab", [5, 5], 3), split_evenly("", [], 2)
    (['abc', 'd'], ['a', 'b'], [])
    """
    total, done, start = sum(sizes), 0, 0
    found: list[Sequence[T]] = []
    for number, size in enumerate(sizes):
        done += size
        if number + 1 == len(items) or done * count >= total * (len(found) + 1):
            found.append(items[start : number + 1])
            start = number + 1
    return found


def run_in_threads(
    work: Callable[[Sequence[T]], None], items: Sequence[T], sizes: Sequence[int], ranks: int | None
) -> None:
    """Do the work on all items, in as many threads as their bytes are worth where so many ranks are on this machine.

    With None for ranks, in this thread. Raises what the first that failed raised.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1 if ranks is None or sum(sizes) < _WORTH_BYTES else max(1, min(MOST_THREADS, cores // ranks))
    parts = split_evenly(items, sizes, threads)
    if len(parts) == 1:
        work(parts[0])
    elif parts:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(work, parts))
