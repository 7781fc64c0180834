"""Opening and writing files so that errors name them, and a pipe under the name of a file stops nobody."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path


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
def naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an error of the system that has none.

    >>> with naming(Path("ckpt/a.safetensors")):
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
