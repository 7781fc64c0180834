"""Checkpoints behind a URL: folders that are read, and saves.

Reading: nothing is pinned by a store, so versions are compared: an index or a file that has changed is noticed.

Writing: a store cannot rename a folder. So the data files of a save have names that begin with its token, and are new;
the index, which names them, comes last and is the commit. Then the files of the checkpoint that was replaced are
removed: its index first, if it has another name. A save that is killed leaves files that no index names, which the next
save removes.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.table import FORMATS, is_checkpoint_file
from shardwise.checkpoint.storage.base import MAX_INDEX_BYTES, ReadableFolder, SaveFolder
from shardwise.checkpoint.storage.ranges import RangeCache, RangedFile
from shardwise.checkpoint.storage.remote_path import RemotePath, name_driver_errors

_TOKEN_FILE = re.compile(r"[0-9a-f]{16}-.+")
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


class RemoteSave(SaveFolder):
    """A running save to a URL: files are written to a local temporary folder, one by one, and uploaded from there."""

    path: RemotePath
    poll_seconds = 0.2  # each look is a request

    def __init__(self, path: RemotePath, token: str) -> None:
        self.path, self.token, self.prefix = path, token, f"{token}-"
        self._index: tuple[str, bytes] | None = None
        self._delivered: set[str] = set()

    @cached_property
    def work(self) -> Path:  # type: ignore[override]  # made when it is needed, read-only
        return Path(tempfile.mkdtemp(prefix="shardwise-"))

    def make(self) -> None:
        return None  # each process has a local folder of its own

    def find(self) -> None:
        self.work.mkdir(exist_ok=True)

    def deliver(self, name: str) -> None:
        if not name.startswith(self.prefix):
            raise CheckpointError(f"{name}: this format does not name its files for a store; choose another format")
        self._upload(name)

    def _upload(self, name: str) -> None:
        with name_driver_errors(self.path / name, "written"):
            self.path.fs.put_file(str(self.work / name), (self.path / name).key)
        (self.work / name).unlink()

    def deliver_beside(self, name: str, data: bytes) -> None:
        """Write a file that is copied along."""
        (self.path / name).write(data)
        self._delivered.add(name)

    def size_of(self, name: str) -> int:
        return int((self.path / name).info()["size"])

    def write_note(self, name: str, data: bytes) -> None:
        (self.path / (self.prefix + name)).write(data)

    def read_note(self, name: str) -> bytes:
        return self.read_file(self.prefix + name)

    def has_note(self, name: str) -> bool:
        return (self.path / (self.prefix + name)).is_file()

    def remove_note(self, name: str) -> None:
        self.path.remove_files([self.prefix + name])

    def is_gone(self) -> bool:
        return not any(name.startswith(f"{self.prefix}share") for name in self.path.list_names())

    def remove(self) -> None:
        with suppress(CheckpointError, OSError):  # the next save removes them; why this one failed is what matters
            self.path.remove_files([name for name in self.path.list_names() if name.startswith(self.prefix)])
        self.close()

    def close(self) -> None:
        """Remove what is left of the local folder."""
        shutil.rmtree(self.work, ignore_errors=True)

    def write_index(self, index: tuple[str, bytes] | None) -> None:
        if index is None:
            raise CheckpointError(f"{self.path}: this format has no index, which a store needs; choose another format")
        self._index = index

    def commit(self, in_background: bool) -> None:
        """Write the index; then remove what no checkpoint needs any more, first the indexes of other formats."""
        assert self._index is not None
        name, data = self._index
        try:
            (self.path / name).write(data)
        except CheckpointError:
            self._give_up_commit(name, data)
            raise
        try:
            self._remove_replaced(name)
        finally:
            self.close()

    def _remove_replaced(self, index_name: str) -> None:
        """Remove what the new checkpoint replaces: indexes of other formats first and surely, one may win over it."""
        indexes = {name for known in FORMATS for name in known.index_names} - {index_name}
        there = self.path.list_names()
        for other in (name for name in there if name in indexes):
            (self.path / other).remove_file()
        kept = {index_name, *indexes, *self._delivered}
        self.path.remove_files([name for name in there if name not in kept and self._is_old(name)])

    def _give_up_commit(self, name: str, data: bytes) -> None:
        """Remove the files, unless the index may be in place although writing it failed."""
        try:
            written = self.read_file(name) == data
        except CheckpointError:
            written = True
        if written:
            self.close()
        else:
            self.remove()

    def read_file(self, name: str) -> bytes:
        """The content of a small file; nothing, where there is none."""
        try:
            size = self.size_of(name)
        except FileNotFoundError:
            return b""
        return (self.path / name).read_range(0, size) if size else b""

    def _is_old(self, name: str) -> bool:
        ours = name.startswith(self.prefix)
        return not ours and (_TOKEN_FILE.fullmatch(name) is not None or is_checkpoint_file(name))
