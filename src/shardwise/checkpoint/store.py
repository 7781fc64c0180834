"""The files of a checkpoint, mapped into memory when they are first needed.

Bytes are only mapped, so reading a slice reads its pages and nothing else. A file is mapped after its length was
compared with what the index says. Pages that have been read are released whenever they add up to the limit, and files
beyond the first few hundred are unmapped again, so that a process may read a checkpoint of thousands of ranks.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.checksums import SUM_DIGITS, checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import PinnedFolder
from shardwise.checkpoint.folders import absolute_path, find_checkpoint
from shardwise.checkpoint.formats.base import Format
from shardwise.checkpoint.formats.table import FORMATS, describe_expected, detect_format
from shardwise.checkpoint.index import CRC, TensorEntry

DEFAULT_BUFFER_BYTES = 256 << 20
_MAX_MAPPED = 256
_MAX_TRIES = 100
_WORTH_FETCHING = 256 << 10
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14; Python has no name for it
CARRIERS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}


class Store:
    """An index and the folder that its files are in, both pinned: what is read belongs to one save.

    `digest` differs as soon as the index, or a file that has no checksums, does.
    """

    def __init__(self, pinned: PinnedFolder, format: Format, index_name: str, max_buffer_bytes: int) -> None:
        self.pinned, self.format, self.folder = pinned, format, pinned.path
        self.format_title = format.title_of(index_name)
        self._index_name = index_name
        with pinned.open(index_name):  # an error of the system names the file
            self._identity = pinned.identity(index_name)
        self.index, self.digest = format.read_index(pinned, index_name)
        self._all_pinned = self._pin_files()
        self._limit = max(max_buffer_bytes, mmap.PAGESIZE)
        self._maps: dict[int, tuple[mmap.mmap, npt.NDArray[np.uint8]]] = {}
        self._touched = 0
        self._fetches = sys.platform == "linux"
        self._lock = threading.Lock()

    def _pin_files(self) -> bool:
        """Keep the files open, as far as that many may be; whether that was all of them."""
        try:
            for file in self.index.files[: _max_pinned()]:
                self.pinned.pin(file.name)
        except OSError:  # reported when the file is read, if ever
            return False
        return len(self.index.files) <= _max_pinned()

    def is_stale(self) -> bool:
        """Whether another save has taken the place of this one, or has written to it, so that reading may fail."""
        return self.pinned.is_replaced() or self._is_overwritten()

    def is_consistent(self) -> bool:
        """Whether the index and all files belong to one save, and will as long as this is open."""
        return not self._is_overwritten() if self._all_pinned else not self.is_stale()

    def _is_overwritten(self) -> bool:
        """Whether the index is another file by now; one that was removed with its folder does not count."""
        try:
            return self.pinned.identity(self._index_name) != self._identity
        except OSError:
            return False

    def data(self, number: int) -> npt.NDArray[np.uint8]:
        """All bytes of a file."""
        found = self._maps.get(number)
        if found is None:
            with self._lock:
                found = self._maps.get(number) or self._map(number)
                while len(self._maps) >= _MAX_MAPPED:  # what still uses an older one keeps it until it is done
                    self._maps.pop(next(iter(self._maps)))
                self._maps[number] = found
        return found[1]

    def _map(self, number: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
        with self.open_data_file(number) as handle:
            mapped = mmap.mmap(handle, self.index.files[number].bytes, access=mmap.ACCESS_READ)
        return mapped, np.frombuffer(mapped, np.uint8)

    @contextmanager
    def open_data_file(self, number: int) -> Iterator[int]:
        """A file that is open for reading, after a look at its length; system errors name the file."""
        file = self.index.files[number]
        with self.pinned.open(file.name) as handle:
            size = os.fstat(handle).st_size
            if size != file.bytes:
                raise CheckpointError(
                    f"{self.folder / file.name}: {size} bytes; the index says {file.bytes}: it is truncated or not "
                    "from this save"
                )
            yield handle

    def map_box(self, tensor: TensorEntry, number: int) -> npt.NDArray[Any]:
        """A stored box as an array; elements are unsigned numbers of the dtype's width, since NumPy lacks some."""
        carrier = CARRIERS[tensor.dtype.itemsize]
        sizes, count = tensor.cut.extents[number]
        begin = tensor.begins[number]
        data = self.data(tensor.files[number])[begin : begin + count * carrier.itemsize]
        return data.view(carrier).reshape(sizes)

    def fetch(self, number: int, low: int, high: int) -> None:
        """Bring the pages of a run of bytes of a file in at once; one by one they cost more than what they hold."""
        self.data(number)
        held = self._maps.get(number)
        if not self._fetches or held is None or high - low < _WORTH_FETCHING:
            return
        first = low - low % mmap.PAGESIZE
        try:
            held[0].madvise(_POPULATE_READ, first, high - first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise CheckpointError(f"{self.folder / self.index.files[number].name}: {error.strerror}") from error
            self._fetches = False  # an older system: pages come when they are read

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
        if sys.platform != "linux":
            return
        with self._lock:
            for mapped, _ in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    @property
    def step_bytes(self) -> int:
        """The most bytes to read between two calls of `touch`."""
        return max(mmap.PAGESIZE, self._limit // 4)

    def verify_header(self, number: int) -> None:
        """Raise unless the start of a file is what was written."""
        file = self.index.files[number]
        if file.header_sum is not None and checksum(self.data(number)[: file.data_start].data) != file.header_sum:
            raise CheckpointError(f"{self.folder / file.name}: the header is damaged: its checksum differs")

    def verify(self, tensor: TensorEntry, number: int, first: int, last: int) -> None:
        """Raise unless the blocks `first` to `last` (exclusive) of a stored box have the checksums of the index."""
        sums = tensor.sums[number]
        if not sums:
            return
        if sums.startswith(CRC):
            self._verify_crc(tensor, number, sums)
            return
        data, size = self.data(tensor.files[number]), tensor.cut.extents[number][1] * tensor.dtype.itemsize
        start, step = tensor.begins[number], self.index.block_bytes
        for block in range(first, last):
            low, high = block * step, min((block + 1) * step, size)
            self.fetch(tensor.files[number], start + low, start + high)
            if checksum(data[start + low : start + high].data) != sums[block * SUM_DIGITS : (block + 1) * SUM_DIGITS]:
                raise CheckpointError(
                    f"{self.folder / self.index.files[tensor.files[number]].name}: tensor {tensor.name!r}: bytes "
                    f"{start + low} to {start + high} are damaged: their checksum differs"
                )
            self.touch(high - low)

    def _verify_crc(self, tensor: TensorEntry, number: int, expected: str) -> None:
        data, size = self.data(tensor.files[number]), tensor.cut.extents[number][1] * tensor.dtype.itemsize
        start, crc = tensor.begins[number], 0
        for low in range(0, size, self.step_bytes):
            part = data[start + low : start + min(size, low + self.step_bytes)]
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
            self._maps.clear()
        self.pinned.close()


def _max_pinned() -> int:
    """How many files one checkpoint keeps open: ranks of one process share its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_MAPPED, soft // 8) if soft != resource.RLIM_INFINITY else _MAX_MAPPED


def open_store(path: str | os.PathLike[str], max_buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> Store:
    """The checkpoint at a path: a folder of any known format, or one file.

    If a save replaces it while its index is read, this starts over with what it was replaced by.
    """
    whole = absolute_path(path)
    for _ in range(_MAX_TRIES):
        store = _try_open(whole, max_buffer_bytes)
        if store is not None:
            return store
    raise CheckpointError(f"{whole}: it was replaced {_MAX_TRIES} times while it was opened; try again later")


def _try_open(whole: Path, max_buffer_bytes: int) -> Store | None:
    """The checkpoint, or None if it was replaced meanwhile."""
    place = find_checkpoint(whole)
    try:
        pinned = PinnedFolder(place.parent if place.is_file() else place)
    except CheckpointError:
        if place.exists():
            raise
        return None
    try:
        store = Store(pinned, *_find_index(pinned, place), max_buffer_bytes)
        if store.is_consistent():
            return store
    except CheckpointError:
        if not pinned.is_replaced():
            pinned.close()
            raise
    pinned.close()
    return None


def _find_index(pinned: PinnedFolder, place: Path) -> tuple[Format, str]:
    """The format of what is at a place, and the name of its index."""
    if pinned.path != place:
        found = next(((known, place.name) for known in FORMATS if known.accepts_file(place.name)), None)
    else:
        found = detect_format(pinned)
    if found is None:
        raise CheckpointError(f"{place}: not a checkpoint; expected {describe_expected()}")
    return found
