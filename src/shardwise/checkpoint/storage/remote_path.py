"""Places behind a URL (`s3://`, `gs://`, `hf://`, `memory://`): what is there, read and written through fsspec.

Whatever a driver raises becomes an error that names the URL. Listings are never taken from a cache.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.checkpoint.errors import CheckpointError

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
