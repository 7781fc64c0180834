"""Files of a checkpoint: opened once and kept, or written so that they last.

Reading: a folder is opened once, and the files in it relative to that, so that a save that puts another folder in its
place changes nothing for whoever reads. A pipe under the name of a file stops nobody.

Writing: small parts that are neighbours are collected, and what was written is synced when a file is closed.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.errors import CheckpointError, add_path_to_error
from shardwise.checkpoint.storage.base import MAX_INDEX_BYTES, FileReader, ReadableFolder

_COLLECT_BYTES = 1 << 20
_WORTH_FETCHING = 256 << 10
_WORTH_DROPPING = 16 << 20
LARGE_PAGE_BYTES = 2 << 20
_MOST_PARTS = 64
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14; Python has no name for it


class PinnedFolder(ReadableFolder):
    """A folder that is open for reading: its files stay the same, whatever its name refers to later.

    Files that were pinned stay readable even when the folder is removed.
    """

    path: Path
    pins = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()

    def has(self, name: str) -> bool:
        """Whether there is an ordinary file of this name."""
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=self._handle).st_mode)
        except OSError:
            return False

    def names(self) -> list[str]:
        """The names of everything in the folder."""
        return os.listdir(self._handle)

    def version(self, name: str) -> list[str | int]:
        """What is different as soon as a file is another one, or was written to; copies of a folder are alike."""
        found = os.stat(name, dir_fd=self._handle)
        return [found.st_size, found.st_mtime_ns]

    def identity(self, name: str) -> list[str | int]:
        """What is different as soon as a file is another one, also in a copy of the folder."""
        found = os.stat(name, dir_fd=self._handle)
        return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns]

    def is_replaced(self) -> bool:
        """Whether the path of this folder names another one by now, or none."""
        try:
            now, then = os.stat(self.path), os.fstat(self._handle)
        except OSError:
            return True
        return (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino)

    def pin(self, name: str) -> None:
        """Open a file and keep it open."""
        with self._lock:
            if name not in self._files:
                self._files[name] = self._open(name)

    @contextmanager
    def open(self, name: str) -> Iterator[int]:
        """A file that is open for reading; an error of the system names the file."""
        try:
            with self._lock:
                pinned = self._files.get(name)
            handle = self._open(name) if pinned is None else pinned
            try:
                yield handle
            finally:
                if pinned is None:
                    os.close(handle)
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: cannot be read: {error.strerror}") from error

    def _open(self, name: str) -> int:
        if os.sep in name or name in ("", ".", ".."):
            raise OSError(errno.EINVAL, "Not a file name", name)
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK, dir_fd=self._handle)
        mode = os.fstat(handle).st_mode
        if stat.S_ISREG(mode):
            return handle
        os.close(handle)
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(kind, os.strerror(kind) if kind == errno.EISDIR else "Not an ordinary file", name)

    def read(self, name: str, limit: int = MAX_INDEX_BYTES) -> bytes:
        """The content of a file, unless it is absurdly long."""
        with self.open(name) as handle:
            size = os.fstat(handle).st_size
            if size > limit:
                raise CheckpointError(f"{self.path / name}: {size} bytes; no more than {limit} are read")
            return read_exactly(handle, size, 0)

    def reader(self, name: str) -> MappedFile:
        """A file, mapped into memory."""
        return MappedFile(self, name)

    def close(self) -> None:
        """Close the folder and all its files."""
        with self._lock:
            handles = [*self._files.values(), self._handle] if self._handle >= 0 else []
            self._files.clear()
            self._handle = -1
        for handle in handles:
            os.close(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", -1) >= 0:
            self.close()


class MappedFile(FileReader):
    """A file of a pinned folder, mapped into memory: reading a slice reads its pages and nothing else."""

    def __init__(self, folder: PinnedFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._map: mmap.mmap | None = None
        with folder.open(name) as handle:
            self.size = os.fstat(handle).st_size
            if self.size:
                self._map = mmap.mmap(handle, self.size, access=mmap.ACCESS_READ)
        self._data = np.empty(0, np.uint8) if self._map is None else np.frombuffer(self._map, np.uint8)

    def read(self, low: int, high: int) -> npt.NDArray[np.uint8]:
        return self._data[low:high]

    def read_into(self, place: memoryview, begin: int) -> None:
        with self._folder.open(self._name) as handle:
            while len(place):
                count = os.preadv(handle, [place], begin)
                if not count:
                    raise OSError(errno.EIO, f"it was truncated while it was read: no byte {begin}")
                place, begin = place[count:], begin + count

    def fetch(self, low: int, high: int) -> bool:
        """Bring the pages of a run of bytes in at once; one by one they cost more than what they hold."""
        if sys.platform != "linux" or self._map is None:
            return False
        first = low - low % mmap.PAGESIZE
        try:
            if high - low >= _WORTH_FETCHING:
                self._map.madvise(_POPULATE_READ, first, high - first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise CheckpointError(f"{self._folder.path / self._name}: {error.strerror}") from error
            return False  # an older system: pages come when they are read
        return True

    def release(self) -> None:
        if self._map is not None and sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED)


def read_exactly(handle: int, size: int, begin: int) -> bytes:
    """Bytes of an open file; fewer, where it ends before."""
    parts = []
    while size:
        data = os.pread(handle, size, begin)
        if not data:
            break
        parts.append(data)
        size, begin = size - len(data), begin + len(data)
    return b"".join(parts)


class PositionedFile:
    """A file that is written in places; neighbouring small parts are collected; synced when it is closed without error.

    Large parts are written up to where a large page of the file ends, the rest with what follows. So the system caches
    the file in large pages, which are mapped at a twentieth of the cost of small ones when it is read. With `create` it
    is a new file.
    """

    def __init__(self, path: Path, create: bool = False) -> None:
        self._path = path
        self._handle = os.open(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if create else 0), 0o644)
        self._parts: list[bytearray | memoryview] = []
        self._begin = self._size = 0

    def write(self, position: int, data: memoryview | bytes, lasting: bool = False) -> None:
        """Write bytes at a place; `lasting`: their memory stays as it is until the file is closed."""
        if position != self._begin + self._size or (len(data) < _COLLECT_BYTES < self._size + len(data)):
            self._flush()
            self._begin = position
        if len(data) < _COLLECT_BYTES:
            self._collect(data)
            return
        self._parts.append(memoryview(data))
        self._size += len(data)
        end = self._begin + self._size
        self._flush(end - end % LARGE_PAGE_BYTES if lasting else end)

    def _collect(self, data: memoryview | bytes) -> None:
        if not self._parts or not isinstance(self._parts[-1], bytearray):
            self._parts.append(bytearray())
        self._parts[-1] += data  # type: ignore[operator]  # a bytearray
        self._size += len(data)

    def _flush(self, end: int | None = None) -> None:
        """Write what is collected, up to a place."""
        end = self._begin + self._size if end is None else end
        with add_path_to_error(self._path):
            while self._begin < end:
                room, parts = end - self._begin, []
                for part in self._parts[:_MOST_PARTS]:
                    parts.append(memoryview(part)[:room])
                    room -= len(parts[-1])
                written = _write_parts(self._handle, parts, self._begin)
                del parts  # a bytearray of which there is a view cannot grow
                self._drop(written)

    def _drop(self, count: int) -> None:
        """Forget as many bytes, which are written."""
        self._begin, self._size = self._begin + count, self._size - count
        while count:
            first = self._parts[0]
            if len(first) > count:
                self._parts[0] = memoryview(first)[count:]
                return
            count -= len(self._parts.pop(0))

    def close(self, sync: bool = True) -> None:
        """Write what was collected and make it last, unless it is given up; nothing the second time."""
        if self._handle < 0:
            return
        try:
            if sync:
                self._flush()
                with add_path_to_error(self._path):
                    os.fsync(self._handle)
        finally:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(sync=kind is None)


def _write_parts(handle: int, parts: Sequence[memoryview], position: int) -> int:
    """Write parts one after another, with one call where the system can; return how many bytes were written."""
    if hasattr(os, "pwritev"):
        return os.pwritev(handle, parts, position)
    return os.pwrite(handle, parts[0], position)


def drop_from_cache(path: Path) -> None:
    """Let the system take a file out of its cache, where it can; the file stays.

    Memory that the system has just freed is written to faster than memory that it never used, by up to five times where
    the machine is a virtual one.
    """
    try:
        if not hasattr(os, "posix_fadvise") or os.stat(path).st_size < _WORTH_DROPPING:
            return
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return  # there is no such file, or it is not ours to read
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return  # a file system that does not know how
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with add_path_to_error(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it that are missing, so that they last."""
    missing = [folder, *folder.parents]
    missing = missing[: next((i for i, path in enumerate(missing) if path.is_dir()), len(missing))]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    half = path.with_name(path.name + ".half")
    handle = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with add_path_to_error(path):
            left = memoryview(data)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(half, path)
