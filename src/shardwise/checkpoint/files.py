"""Files and folders of checkpoints: what readers and formats need of a place, and how a local disk provides it.

`FileReader`, `ReadableFolder` and `SaveFolder` are all that the rest of the package knows of a place; the classes for
URLs are in `remote.py`. What is wrong with what is stored is a `CheckpointError`. Nothing here loads torch.

Reading: a folder is opened once, and the files in it relative to that, so that a save that puts another folder in its
place changes nothing for whoever reads. A pipe under the name of a file stops nobody.

Writing: small parts that are neighbours are collected, and what was written is synced when a file is closed.

One at a time: whoever writes to a path (a save, a reshard, `clean`) holds its lock, which names the owner. The system
releases a lock on a local disk when its owner dies. Elsewhere the owner touches the lock every few seconds, and one
that is not touched for a while is taken over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import socket
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

MAX_INDEX_BYTES = 1 << 28


class CheckpointError(ValueError):
    """A checkpoint that is broken, or lacks what was requested; the message names the file and the tensor.

    >>> issubclass(CheckpointError, ValueError)
    True
    """


def require(condition: object, problem: str) -> None:
    """Raise a ValueError unless something holds of what was read; unlike `assert`, always.

    >>> require(1 > 2, "no order")
    Traceback (most recent call last):
    ...
    ValueError: no order
    """
    if not condition:
        raise ValueError(problem)


def run_or_describe_error(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of some work, or what went wrong, to report to the other ranks."""
    try:
        return work(), None
    except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
        plain = isinstance(error, ValueError)
        return None, str(error) if plain else f"{type(error).__name__}: {error}"


@contextmanager
def add_path_to_error(path: Path) -> Iterator[None]:
    """Add the name of the file to an error of the system that has none.

    >>> import errno, os
    >>> with add_path_to_error(Path("ckpt/a.safetensors")):
    ...     raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    Traceback (most recent call last):
    ...
    OSError: [Errno 28] No space left on device: 'ckpt/a.safetensors'
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class Location(Protocol):
    """Where a folder is: a `pathlib.Path`, or the path of a URL."""

    @property
    def name(self) -> str: ...

    def __truediv__(self, name: str) -> Self: ...


class FileReader(ABC):
    """A file that is open for reading; `size` is its length."""

    size: int

    @abstractmethod
    def read(self, low: int, high: int) -> npt.NDArray[np.uint8]:
        """The bytes `low` to `high`; a view where they are in memory already. Keep the range small."""

    @abstractmethod
    def read_into(self, place: memoryview, begin: int) -> None:
        """Fill memory with the bytes from `begin` on."""

    def fetch(self, low: int, high: int) -> bool:
        """Bring bytes in ahead of their use, where that helps; False if this system cannot."""
        return False

    @abstractmethod
    def release(self) -> None:
        """Drop from memory what can be read again."""


class BytesReader(FileReader):
    """Bytes in memory, read like a file."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.size = len(self._data)

    def read(self, low: int, high: int) -> npt.NDArray[np.uint8]:
        return self._data[low:high]

    def read_into(self, place: memoryview, begin: int) -> None:
        place[:] = self._data[begin : begin + len(place)].data

    def release(self) -> None:
        return None


class ReadableFolder(ABC):
    """A folder that is open for reading. What is read belongs to one save, or `is_replaced` says that it may not.

    `pins`: files that were opened stay readable and unchanged whatever happens to the folder.
    """

    path: Location
    pins: bool

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is an ordinary file of this name."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of everything in the folder."""

    @abstractmethod
    def version(self, name: str) -> list[str | int]:
        """What is different as soon as a file is another one, or was written to: its length comes first."""

    def identity(self, name: str) -> list[str | int]:
        """The same, and where possible different also in a copy of the folder."""
        return self.version(name)

    @abstractmethod
    def is_replaced(self) -> bool:
        """Whether the path of this folder names another one by now, or none."""

    def has_changed_files(self) -> bool:
        """Whether files that were opened are others by now, so that what was read of them may be of both."""
        return False

    @abstractmethod
    def pin(self, name: str) -> None:
        """Open a file and keep it open, where that keeps it as it is."""

    @abstractmethod
    def read(self, name: str, limit: int = MAX_INDEX_BYTES) -> bytes:
        """The content of a file, unless it is absurdly long."""

    @abstractmethod
    def reader(self, name: str) -> FileReader:
        """A file, opened."""

    @abstractmethod
    def close(self) -> None:
        """Close the folder and all its files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class SaveFolder(ABC):
    """The folder of a running save, in which nothing is a checkpoint before the commit.

    Files are written in the local folder `work`, then delivered; all of them make it `complete`, and it is committed.
    Small files tell other processes how far one is. The token distinguishes saves to one path.
    `prefix`: what the names of its data files begin with, so that those of the checkpoint that is replaced stay.
    `poll_seconds`: how often to look for small files.
    """

    path: Location
    token: str
    work: Path
    prefix: str = ""
    lock_token: str | None = None  # of the lock, if it is not that of the save
    last_files: Mapping[str, int] = MappingProxyType({})  # names and lengths of what was written after the data files
    poll_seconds = 0.01

    @abstractmethod
    def make(self) -> None:
        """Take the lock, see that a checkpoint may be written here, and make it: the first rank, before the others."""

    @abstractmethod
    def find(self) -> None:
        """Raise unless this process can write to what the first rank has made."""

    def forget_replaced(self, name: str) -> None:
        """A file of this name is about to be written: what caches the one that it replaces may be given back."""
        return None

    @abstractmethod
    def deliver(self, name: str) -> None:
        """A file in `work` is complete: bring it to where it belongs."""

    @abstractmethod
    def size_of(self, name: str) -> int:
        """The length of a file that was delivered."""

    @abstractmethod
    def write_note(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    @abstractmethod
    def read_note(self, name: str) -> bytes | None:
        """Read a small file; None where there is none."""

    @abstractmethod
    def remove_note(self, name: str) -> None:
        """Remove a small file."""

    def complete(
        self, written: Mapping[str, int], index: tuple[str, bytes] | None, beside: Mapping[str, bytes] | None = None
    ) -> None:
        """All files are delivered: see that they have their lengths, then write the files beside them and the index.

        The index, its name and content if the format has one, is not seen before the commit.
        """
        self._check_files(written)
        self.write_index(index, beside or {})
        self._written = written

    def _check_files(self, written: Mapping[str, int]) -> None:
        for name, nbytes in written.items():
            try:
                size = self.size_of(name)
            except FileNotFoundError:
                raise CheckpointError(f"{self.path / name}: it was removed while the checkpoint was written") from None
            if size != nbytes:
                raise CheckpointError(f"{self.path / name}: {nbytes} bytes were written, {size} are in the folder")

    @abstractmethod
    def write_index(self, index: tuple[str, bytes] | None, beside: Mapping[str, bytes]) -> None:
        """Write the last files."""

    def commit(self, in_background: bool) -> None:
        """Put the new checkpoint in place, if all that is its own is still there, and let the next save begin.

        What it replaces is removed, in the background where that is possible.
        """
        try:
            try:
                lock = OWN_LOCKS.get(self.lock_token or self.token)
                if lock is None or not lock.is_held():
                    raise CheckpointError(
                        f"{self.path}: another save has taken its lock; the checkpoint stays as it is"
                    )
                self._check_files({**self._written, **self.last_files})
            except BaseException:
                self.remove()
                raise
            self.put_in_place(in_background)
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Let go of the lock, if this process holds it."""
        lock = OWN_LOCKS.get(self.lock_token or self.token)
        if lock is not None:
            lock.release()

    @abstractmethod
    def put_in_place(self, in_background: bool) -> None:
        """The step after which the new checkpoint is the one that is found."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what this process has for it; the checkpoint stays."""

    @abstractmethod
    def is_gone(self) -> bool:
        """Whether the save has ended: it was committed or given up."""

    @abstractmethod
    def remove(self) -> None:
        """Give the save up: remove all that it has written, which is not a checkpoint."""


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
            return stat.S_ISREG(self._stat(name).st_mode)
        except OSError:
            return False

    def names(self) -> list[str]:
        """The names of everything in the folder."""
        return os.listdir(self._handle)

    def version(self, name: str) -> list[str | int]:
        """What is different as soon as a file is another one, or was written to; copies of a folder are alike."""
        found = self._stat(name)
        return [found.st_size, found.st_mtime_ns]

    def identity(self, name: str) -> list[str | int]:
        """What is different as soon as a file is another one, also in a copy of the folder."""
        found = self._stat(name)
        return [found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns]

    def _stat(self, name: str) -> os.stat_result:
        _check_file_name(name)
        return os.stat(name, dir_fd=self._handle)

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
        _check_file_name(name)
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


def _check_file_name(name: str) -> None:
    """Raise an error of the system unless a name that was read can be that of a file in a folder."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or b"\0" in encoded or os.sep in name or name in (".", ".."):
        raise OSError(errno.EINVAL, "Not a file name", name)


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


BEAT_SECONDS = 5.0
DEAD_SECONDS = 16.0  # three beats may be late
_RETRY_SECONDS = 0.3  # how long one who only looks may hold a lock
_CLEAN_SECONDS = 600.0
CLEANING = "clean"
Owner: TypeAlias = dict[str, Any]
OWN_LOCKS: dict[str, SaveLock] = {}  # those that this process holds, by token


def find_machine() -> str:
    """What processes that see each other's numbers have in common: one start of one system, one namespace."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class SaveLock(ABC):
    """The lock of whoever writes to a path; subclasses say where it is kept. `what`: "save", "reshard" or "clean"."""

    def __init__(self, path: Location, what: str, token: str) -> None:
        self.path, self.what, self.token = path, what, token
        self._beats = 0
        self._ended = threading.Event()

    @abstractmethod
    def acquire(self) -> None:
        """Take the lock, or raise a CheckpointError that names its owner."""

    @abstractmethod
    def is_held(self) -> bool:
        """Whether it is still ours."""

    @abstractmethod
    def release(self) -> None:
        """Let the next one have it; nothing the second time."""

    @abstractmethod
    def beat(self) -> None:
        """Show that the owner is alive."""

    def describe(self, state: str = "") -> bytes:
        """The content of a lock."""
        host, machine = socket.gethostname(), find_machine()
        owner = {"what": self.what, "host": host, "machine": machine, "pid": os.getpid(), "token": self.token}
        return json.dumps({**owner, "beats": self._beats, "state": state}).encode()

    def hold(self) -> None:
        """Note that it is ours, and show so from now on."""
        OWN_LOCKS[self.token] = self
        threading.Thread(target=self._show, name="shardwise lock", daemon=True).start()

    def let_go(self) -> None:
        """Note that it is not ours any more."""
        OWN_LOCKS.pop(self.token, None)
        self._ended.set()

    def _show(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._beats += 1
            with suppress(OSError, CheckpointError):  # the next one may come through
                self.beat()

    def held_by(self, owner: Owner) -> CheckpointError:
        """The error for one who comes second."""
        what, who = str(owner.get("what", "save"))[:20], f"process {owner.get('pid')} on {str(owner.get('host'))[:100]}"
        return CheckpointError(
            f"{self.path}: another {what} to it is running ({who}); wait for it, stop it, or choose another path"
        )


def parse_owner(data: bytes | None) -> Owner | None:
    """The owner that a lock names; None for no lock, or none that says who."""
    try:
        found = json.loads(data or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("token"), str) else None


def is_alive(owner: Owner, look: Callable[[], object]) -> bool:
    """Whether the owner of a lock lives: its process is there, or what `look` returns changes within a few beats."""
    if owner.get("machine") == find_machine() and type(owner.get("pid")) is int:
        if owner["pid"] == os.getpid():
            return owner["token"] in OWN_LOCKS
        try:
            os.kill(owner["pid"], 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True  # it belongs to another user
        return True
    before, deadline = look(), time.monotonic() + DEAD_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(0.5, DEAD_SECONDS / 8))
        if look() != before:
            return look() is not None
    return False


class FolderLock(SaveLock):
    """The lock of a local folder `ckpt`: the file `.ckpt.lock` next to it, which is removed with the lock."""

    path: Path

    def __init__(self, path: Path, what: str, token: str) -> None:
        super().__init__(path, what, token)
        self.file = path.with_name(f".{path.name}.lock")
        self._handle = -1

    def acquire(self) -> None:
        deadline = time.monotonic() + _RETRY_SECONDS
        while (owner := self._try()) is not None:
            patience = _CLEAN_SECONDS if owner.get("what") == CLEANING != self.what else 0.0
            if time.monotonic() > deadline + patience:
                raise self.held_by(owner)
            time.sleep(0.02)
        self.hold()

    def _try(self) -> Owner | None:
        """Take it; or return who has it."""
        handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            owner = self._find_owner(handle)
            if owner is not None:
                return owner
            if not self._is_file(handle):
                return {}  # its owner has just removed it
            data = self.describe()
            os.ftruncate(handle, 0)
            os.pwrite(handle, data, 0)
            if parse_owner(self._look()[0]) != parse_owner(data):
                return parse_owner(self._look()[0]) or {}
            self._handle, handle = handle, -1
            return None
        finally:
            if handle >= 0:
                os.close(handle)

    def _look(self) -> tuple[bytes | None, int]:
        try:
            return self.file.read_bytes(), self.file.stat().st_mtime_ns
        except OSError:
            return None, 0

    def _is_file(self, handle: int) -> bool:
        try:
            named, ours = os.stat(self.file), os.fstat(handle)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)

    def beat(self) -> None:
        if self._handle >= 0:
            os.utime(self._handle)

    def is_held(self) -> bool:
        owner = parse_owner(self._look()[0])
        return self._handle >= 0 and self._is_file(self._handle) and owner is not None and owner["token"] == self.token

    def release(self) -> None:
        if self._handle < 0:
            return
        if self.is_held():
            self.file.unlink(missing_ok=True)
        self.let_go()
        handle, self._handle = self._handle, -1
        os.close(handle)

    def _find_owner(self, handle: int) -> Owner | None:
        """Who holds the lock of an open file; if nobody does, the file is locked."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            return parse_owner(os.pread(handle, 4096, 0)) or {}
        except OSError:
            locked = False  # a file system without locks: what is written in the file is all there is
        owner = parse_owner(os.pread(handle, 4096, 0))
        if owner is None or (locked and owner.get("machine") == find_machine()):
            return None  # a process of this machine would hold it
        return owner if is_alive(owner, self._look) else None

    def find_owner(self) -> Owner | None:
        """Who holds the lock now; it is not taken."""
        try:
            handle = os.open(self.file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return self._find_owner(handle)
        finally:
            os.close(handle)
