"""Opening and writing files so that errors name them, and a pipe under the name of a file stops nobody."""

from __future__ import annotations

import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self


def open_file(path: Path) -> FileIO:
    """A file, open for reading; anything else that has the name of one is an OSError."""
    return FileIO(path, "rb", opener=_opener)


def _opener(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # the caller refuses a folder in the system's words
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "Not an ordinary file", path)


@contextmanager
def add_path_to_error(path: Path) -> Iterator[None]:
    """Add the name of the file to an error of the system that has none.

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


class SyncedFile(ABC):
    """A file that is open for writing; what was collected is written and synced when it is closed without an error."""

    def __init__(self, path: Path, flags: int) -> None:
        self._path = path
        self._handle = os.open(path, flags, 0o644)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._flush()
                with add_path_to_error(self._path):
                    os.fsync(self._handle)
        finally:
            os.close(self._handle)

    @abstractmethod
    def _flush(self) -> None:
        """Write what was collected."""
