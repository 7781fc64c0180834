"""The files of a checkpoint, mapped into memory when they are first needed.

Bytes are only mapped, so reading a slice reads its pages and nothing else. A file is mapped after its length was
compared with what the index says. Pages that have been read are released whenever they add up to the limit, and files
beyond the first few hundred are unmapped again, so that a process may read a checkpoint of thousands of ranks.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.checksums import SUM_DIGITS, checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.base import Format
from shardwise.checkpoint.formats.table import FORMATS, describe_expected, detect_format
from shardwise.checkpoint.index import CRC, TensorEntry
from shardwise.checkpoint.storage.base import FileReader, ReadableFolder
from shardwise.checkpoint.storage.place import FolderVanished, Place, find_place, open_folder

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
