"""Checkpoints behind a URL: folders that are read, and saves.

Reading: nothing is pinned by a store, so versions are compared: an index or a file that has changed is noticed.

Writing: a store cannot rename a folder. So the data files of a save have names that begin with its token, and are new;
the index, which names them, comes last and is the commit. Then the files of the checkpoint that was replaced are
removed: its index first, if it has another name. A save that is killed leaves files that no index names, which the next
save removes.

Places behind a URL (`s3://`, `gs://`, `hf://`, `memory://`): what is there, read and written through fsspec.

Whatever a driver raises becomes an error that names the URL. Listings are never taken from a cache.

Ranges of files behind a URL: read in aligned chunks, several at a time, in bounded memory.

What is read in order is fetched ahead; the chunks used last are kept, up to a limit.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.files import (
    DEAD_SECONDS,
    MAX_INDEX_BYTES,
    OWN_LOCKS,
    CheckpointError,
    FileReader,
    ReadableFolder,
    SaveFolder,
    SaveLock,
    is_alive,
    parse_owner,
)
from shardwise.checkpoint.formats import FORMATS, is_checkpoint_file
from shardwise.checkpoint.index import checksum

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
_COLLAPSED_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/[^/]")
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs"}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL; `file://` is a local path.

    >>> is_url("s3://bucket/ckpt"), is_url("runs/ckpt"), is_url("file:///runs/ckpt")
    (True, False, False)
    """
    text = os.fspath(path)
    found = _URL.fullmatch(text)
    if found is None and not isinstance(path, str) and _COLLAPSED_URL.match(text):
        raise CheckpointError(f"{text!r} is a URL that was made a path, which removed a slash; pass it as a string")
    return found is not None and found[1].lower() not in ("file", "local")


@contextmanager
def name_driver_errors(place: object, doing: str) -> Iterator[None]:
    """Raise a CheckpointError that names the URL, whatever a driver raises; a missing file stays what it is."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:  # drivers raise classes of their own libraries
        raise CheckpointError(f"{place}: cannot be {doing}: {type(error).__name__}: {str(error)[:300]}") from error


@dataclass(frozen=True)
class RemotePath:
    """A place behind a URL.

    >>> place = RemotePath.parse("memory://runs/ckpt/")
    >>> str(place / "a.safetensors"), place.name, str(place.parent)
    ('memory://runs/ckpt/a.safetensors', 'ckpt', 'memory://runs')
    """

    url: str

    @classmethod
    def parse(cls, text: str) -> RemotePath:
        """The place of a URL, with a driver that is installed."""
        place = cls(text.rstrip("/"))
        found = _URL.fullmatch(place.url)
        if found is None or not found[2].strip("/"):
            raise CheckpointError(f"{text!r} is not a valid checkpoint name; pass a folder in the store")
        if "::" in text:
            raise CheckpointError(f"{text!r}: URLs within URLs are not supported; pass a plain one")
        _ = place.fs
        return place

    @cached_property
    def fs(self) -> Any:
        """The file system of fsspec; listings are never taken from a cache."""
        import fsspec  # type: ignore[import-untyped]  # a third of a second, only where there is a URL; no stubs

        scheme = self.url.partition("://")[0]
        try:
            return fsspec.core.url_to_fs(self.url, use_listings_cache=False)[0]
        except ImportError as error:
            driver = f"run: pip install {_DRIVERS[scheme]}" if scheme in _DRIVERS else "install what it names"
            raise CheckpointError(
                f"{self.url}: {scheme}:// needs a driver that is not installed ({error}); {driver}"
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{self.url}: unknown scheme {scheme!r}; known are s3, gs, hf, memory, file and others of fsspec "
                f"({error})"
            ) from error
        except Exception as error:  # drivers raise classes of their own, and need more than a URL
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            raise CheckpointError(f"{self.url}: {scheme}:// cannot be opened from a URL alone: {problem}") from error

    @property
    def key(self) -> str:
        """The path as the file system knows it."""
        return str(self.fs._strip_protocol(self.url))

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def is_of_this_process(self) -> bool:
        """Whether other processes see something else there."""
        return self.url.partition("://")[0] == "memory"

    def contains(self, other: RemotePath) -> bool:
        """Whether another place is inside this one."""
        return other.url.startswith(f"{self.url}/")

    def __truediv__(self, name: str) -> RemotePath:
        inner = RemotePath(f"{self.url}/{name}")
        inner.__dict__["fs"] = self.fs
        return inner

    def __str__(self) -> str:
        return self.url

    def info(self) -> dict[str, Any]:
        """What the store says of a file now."""
        with name_driver_errors(self, "read"):
            self.fs.invalidate_cache(self.key)
            found: dict[str, Any] = self.fs.info(self.key)
            return found

    def is_file(self) -> bool:
        try:
            return str(self.info()["type"]) == "file"
        except FileNotFoundError:
            return False

    def list_names(self) -> list[str]:
        """The names of everything in a folder; none where there is no such folder."""
        with name_driver_errors(self, "read"):
            self.fs.invalidate_cache(self.key)
            try:
                found = self.fs.ls(self.key, detail=False)
            except FileNotFoundError:
                return []
        return [name for name in (str(path).rstrip("/").rpartition("/")[2] for path in found) if name]

    def read_range(self, low: int, high: int) -> bytes:
        """The bytes `low` to `high` of a file."""
        try:
            with name_driver_errors(self, "read"):
                data: bytes = self.fs.cat_file(self.key, start=low, end=high)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self}: cannot be read: {os.strerror(errno.ENOENT)}") from error
        if len(data) != high - low:
            raise CheckpointError(
                f"{self}: cannot be read: it was truncated while it was read: no byte {low + len(data)}"
            )
        return data

    def write(self, data: bytes) -> None:
        """Write a small file, whole or not at all."""
        with name_driver_errors(self, "written"):
            self.fs.pipe_file(self.key, data)

    def remove_file(self) -> None:
        """Remove a file, and see that it is gone."""
        with name_driver_errors(self, "removed"):
            self.fs.rm_file(self.key)
        if self.is_file():
            raise CheckpointError(f"{self}: cannot be removed: it is still there")

    def remove_files(self, names: Collection[str]) -> None:
        """Remove files of this folder; those that are gone are not an error."""
        with name_driver_errors(self, "written"):
            if names:
                try:
                    self.fs.rm([f"{self.key}/{name}" for name in names])
                except FileNotFoundError:
                    return


_THREADS, _AHEAD = 8, 4
_LARGE_CHUNK, _SMALL_CHUNK, _SMALL_READ = 4 << 20, 64 << 10, 4 << 10
_SMALL_CHUNKS = 32


class RangeCache:
    """Chunks of files, fetched by a few threads, the ones used last kept up to a limit."""

    def __init__(self, limit: int) -> None:
        self.chunk_bytes = min(_LARGE_CHUNK, max(_SMALL_CHUNK, limit // 8))
        self._most = max(2, limit // 2 // self.chunk_bytes)
        self._chunks: OrderedDict[tuple[str, int, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwise read")

    def read(self, place: RemotePath, size: int, low: int, high: int) -> npt.NDArray[np.uint8]:
        """Bytes of a file of this size."""
        if low >= high:
            return np.empty(0, np.uint8)
        step = _SMALL_CHUNK if high - low <= _SMALL_READ else self.chunk_bytes
        numbers = range(low // step, (high - 1) // step + 1)
        found = np.empty(0 if len(numbers) == 1 else high - low, np.uint8)
        for first in range(numbers.start, numbers.stop, self._most):  # no more at once than are kept
            some = range(first, min(numbers.stop, first + self._most))
            for number, chunk in zip(some, [self._start(place, size, step, n) for n in some], strict=True):
                begin, data = number * step, np.frombuffer(chunk.result(), np.uint8)
                part = data[max(0, low - begin) : high - begin]
                if len(numbers) == 1:
                    self._read_ahead(place, size, step, number)
                    return part
                at = max(low, begin) - low
                found[at : at + len(part)] = part
        return found

    def fetch(self, place: RemotePath, size: int, low: int, high: int) -> None:
        """Start to read bytes, as many as may be kept."""
        step = self.chunk_bytes
        for number in list(range(low // step, -(-high // step)))[: self._most - 1]:
            self._start(place, size, step, number)

    def _read_ahead(self, place: RemotePath, size: int, step: int, number: int) -> None:
        """Start with the next chunks, where the one before was read as well and there is room."""
        with self._lock:
            in_order = (place.url, step, number - 1) in self._chunks
        if in_order and step == self.chunk_bytes and self._most >= 2 * _AHEAD:
            self.fetch(place, size, (number + 1) * step, min(size, (number + 1 + _AHEAD) * step))

    def _start(self, place: RemotePath, size: int, step: int, number: int) -> Future[bytes]:
        key = (place.url, step, number)
        with self._lock:
            found = self._chunks.get(key)
            if found is None or (found.done() and found.exception() is not None):
                low = number * step
                found = self._pool.submit(place.read_range, low, min(size, low + step))
                self._chunks[key] = found
            self._chunks.move_to_end(key)
            while len(self._chunks) > self._most + (_SMALL_CHUNKS if step == _SMALL_CHUNK else 0):
                self._chunks.popitem(last=False)
        return found

    def close(self) -> None:
        """Stop the threads, which finish the ranges that they are reading, and drop what was read."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._chunks.clear()


class RangedFile(FileReader):
    """A file behind a URL, of which ranges are read."""

    def __init__(self, place: RemotePath, cache: RangeCache, size: int) -> None:
        self._place, self._cache, self.size = place, cache, size

    def read(self, low: int, high: int) -> npt.NDArray[np.uint8]:
        return self._cache.read(self._place, self.size, low, min(high, self.size))

    def read_into(self, place: memoryview, begin: int) -> None:
        data = self.read(begin, begin + len(place))
        if len(data) != len(place):
            raise CheckpointError(f"{self._place}: cannot be read: it ends at byte {self.size}")
        place[:] = data.data

    def fetch(self, low: int, high: int) -> bool:
        self._cache.fetch(self._place, self.size, low, high)
        return True

    def release(self) -> None:
        return None  # the cache has a limit of its own


_TOKEN_FILE = re.compile(r"[0-9a-f]{16}-.+")
_LOCK_FILE = re.compile(r"[0-9a-f]{16}-lock")
_VERSION_KEYS = (
    *("ETag", "etag", "generation", "VersionId", "version_id", "blob_id", "oid"),
    *("LastModified", "last_modified", "mtime", "created"),
)


class RemoteFolder(ReadableFolder):
    """A folder behind a URL; files may change under their names, so their versions are remembered and compared."""

    path: RemotePath
    pins = False

    def __init__(self, path: RemotePath, max_buffer_bytes: int) -> None:
        self.path = path
        self._cache = RangeCache(max_buffer_bytes)
        self._indexes: dict[str, list[str | int]] = {}
        self._files: dict[str, list[str | int]] = {}

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def names(self) -> list[str]:
        return self.path.list_names()

    def version(self, name: str) -> list[str | int]:
        try:
            info = (self.path / name).info()
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error
        known = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None}
        return [int(info["size"]), checksum(str(known or sorted(info.items(), key=str)).encode())]

    def is_replaced(self) -> bool:
        return any(self._is_other(*item) for item in self._indexes.items()) or self.has_changed_files()

    def has_changed_files(self) -> bool:
        """Whether a file that is read has changed; those of a save have names of their own, and never do."""
        return any(self._is_other(*item) for item in self._files.items() if not _TOKEN_FILE.fullmatch(item[0]))

    def _is_other(self, name: str, version: list[str | int]) -> bool:
        try:
            return self.version(name) != version
        except OSError:
            return True

    def pin(self, name: str) -> None:
        return None

    def read(self, name: str, limit: int = MAX_INDEX_BYTES) -> bytes:
        size = self._open(name, self._indexes)
        if size > limit:
            raise CheckpointError(f"{self.path / name}: {size} bytes; no more than {limit} are read")
        return (self.path / name).read_range(0, size) if size else b""

    def reader(self, name: str) -> RangedFile:
        return RangedFile(self.path / name, self._cache, self._open(name, self._files))

    def _open(self, name: str, kept: dict[str, list[str | int]]) -> int:
        """The length of a file, whose version is kept."""
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{self.path}: {name[:200]!r} is not a file name in this folder; nothing is read")
        try:
            version = self.version(name)
        except OSError as error:
            raise CheckpointError(f"{self.path / name}: cannot be read: {error.strerror}") from error
        kept.setdefault(name, version)
        return int(version[0])

    def close(self) -> None:
        self._cache.close()


def check_remote_target(path: RemotePath, besides: Collection[str] = ()) -> None:
    """Raise unless a checkpoint may be written here: what is there is one, or was left by a save that was killed."""
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder, choose another name")
    known = {*besides, "", path.name}
    strange = [
        n for n in path.list_names() if n not in known and not _TOKEN_FILE.fullmatch(n) and not is_checkpoint_file(n)
    ]
    if strange:
        raise CheckpointError(
            f"{path} is a folder that contains things other than a checkpoint ({', '.join(sorted(strange)[:3])}); "
            "it is not replaced: choose another name, or move the folder"
        )


class RemoteLock(SaveLock):
    """The lock of a folder behind a URL: a small file TOKEN-lock in it, which its owner writes again and again.

    A store does not say who was first. So one who begins writes its lock, then looks for others: one that has begun to
    save wins; of two that are starting, the one with the smaller token goes on when the other has given up.
    """

    path: RemotePath

    def acquire(self) -> None:
        self._check_others()
        self._state = "starting"
        self.beat()
        self.hold()
        try:
            self._check_others()
            self._state = "saving"
            self.beat()
        except BaseException:
            self.release()
            raise

    def _check_others(self) -> None:
        """Raise if another live owner goes first; wait for one that is starting and has to give up."""
        deadline = time.monotonic() + DEAD_SECONDS
        while True:
            others = [name for name in self.path.list_names() if _LOCK_FILE.fullmatch(name) and name != self._name]
            found = {name: parse_owner(self._read(name)) for name in others}
            alive = {n: o for n, o in found.items() if o is not None and is_alive(o, partial(self._read, n))}
            self.path.remove_files([name for name in others if name not in alive])
            ahead = [o for o in alive.values() if o.get("state") != "starting" or o["token"] < self.token]
            if ahead or (alive and time.monotonic() > deadline):
                raise self.held_by((ahead or list(alive.values()))[0])
            if not alive or self.token not in OWN_LOCKS:  # nothing is written yet: there is a second look
                return
            time.sleep(0.1)

    @property
    def _name(self) -> str:
        return f"{self.token}-lock"

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_range(0, int((self.path / name).info()["size"]))
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def beat(self) -> None:
        (self.path / self._name).write(self.describe(self._state))

    def is_held(self) -> bool:
        owner = parse_owner(self._read(self._name))
        return owner is not None and owner["token"] == self.token

    def release(self) -> None:
        self.let_go()
        with suppress(CheckpointError, OSError):  # the next save finds out that its owner is gone
            self.path.remove_files([self._name])


class RemoteSave(SaveFolder):
    """A running save to a URL: files are written to a local temporary folder, one by one, and uploaded from there."""

    path: RemotePath
    poll_seconds = 0.2  # each look is a request

    def __init__(self, path: RemotePath, token: str) -> None:
        self.path, self.token, self.prefix = path, token, f"{token}-"
        self._index: tuple[str, bytes] | None = None
        self._beside: set[str] = set()

    @cached_property
    def work(self) -> Path:  # type: ignore[override]  # made when it is needed, read-only
        return Path(tempfile.mkdtemp(prefix="shardwise-"))

    def make(self) -> None:
        RemoteLock(self.path, "save", self.token).acquire()
        try:
            check_remote_target(self.path)
        except BaseException:
            self.unlock()
            raise

    def find(self) -> None:
        self.work.mkdir(exist_ok=True)

    def deliver(self, name: str) -> None:
        if not name.startswith(self.prefix):
            raise CheckpointError(f"{name}: this format does not name its files for a store; choose another format")
        with name_driver_errors(self.path / name, "written"):
            self.path.fs.put_file(str(self.work / name), (self.path / name).key)
        (self.work / name).unlink()

    def size_of(self, name: str) -> int:
        return int((self.path / name).info()["size"])

    def write_note(self, name: str, data: bytes) -> None:
        (self.path / (self.prefix + name)).write(data)

    def read_note(self, name: str) -> bytes | None:
        return self._read_file(self.prefix + name)

    def remove_note(self, name: str) -> None:
        self.path.remove_files([self.prefix + name])

    def is_gone(self) -> bool:
        return not any(name.startswith(f"{self.prefix}share") for name in self.path.list_names())

    def remove(self) -> None:
        with suppress(CheckpointError, OSError):  # the next save removes them; why this one failed is what matters
            ours = [name for name in self.path.list_names() if name.startswith(self.prefix)]
            self.path.remove_files([name for name in ours if not _LOCK_FILE.fullmatch(name)])
        self.unlock()
        self.close()

    def close(self) -> None:
        """Remove what is left of the local folder."""
        shutil.rmtree(self.work, ignore_errors=True)

    def write_index(self, index: tuple[str, bytes] | None, beside: Mapping[str, bytes]) -> None:
        if index is None:
            raise CheckpointError(f"{self.path}: this format has no index, which a store needs; choose another format")
        self._index = index
        for name, data in beside.items():
            (self.path / name).write(data)
            self._beside.add(name)

    def put_in_place(self, in_background: bool) -> None:
        """Write the index; then remove what no checkpoint needs any more, first the indexes of other formats."""
        assert self._index is not None
        name, data = self._index
        try:
            (self.path / name).write(data)
        except CheckpointError:
            try:
                written = self._read_file(name) == data
            except CheckpointError:
                written = True  # nobody knows: the files must stay
            if written:
                self.close()
            else:
                self.remove()
            raise
        try:
            indexes = {index for known in FORMATS for index in known.index_names} - {name}
            there = self.path.list_names()
            for other in (index for index in there if index in indexes):  # surely: one of them may win over the new one
                (self.path / other).remove_file()
            kept = {name, *indexes, *self._beside}
            self.path.remove_files([old for old in there if old not in kept and self._is_old(old)])
        finally:
            self.close()

    def _read_file(self, name: str) -> bytes | None:
        """The content of a small file; None where there is none."""
        try:
            size = self.size_of(name)
        except FileNotFoundError:
            return None
        return (self.path / name).read_range(0, size) if size else b""

    def _is_old(self, name: str) -> bool:
        ours = name.startswith(self.prefix)
        return not ours and (_TOKEN_FILE.fullmatch(name) is not None or is_checkpoint_file(name))
