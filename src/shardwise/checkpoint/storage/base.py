"""What is needed of a place that checkpoints are kept in? Formats and readers know it only through these classes.

A local folder implements them in `checkpoint/files.py`, everything behind a URL in `storage/remote.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

MAX_INDEX_BYTES = 1 << 28


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

    Files are written in the local folder `work`, then delivered. Small files tell other processes how far one is.
    `prefix`: what the names of its data files begin with, so that those of the checkpoint that is replaced stay.
    `poll_seconds`: how often to look for small files.
    """

    path: Location
    work: Path
    prefix: str = ""
    poll_seconds = 0.01

    @abstractmethod
    def make(self) -> None:
        """Make it: the first rank does, before the others look for it."""

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
    def read_note(self, name: str) -> bytes:
        """Read a small file."""

    @abstractmethod
    def has_note(self, name: str) -> bool:
        """Whether there is such a small file."""

    @abstractmethod
    def remove_note(self, name: str) -> None:
        """Remove a small file."""

    @abstractmethod
    def write_index(self, index: tuple[str, bytes] | None) -> None:
        """The index comes last: its name and content, if the format has one. It is not seen before the commit."""

    @abstractmethod
    def commit(self, in_background: bool) -> None:
        """Put the new checkpoint in place. What it replaces is removed, in the background where that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what this process has for it; the checkpoint stays."""

    @abstractmethod
    def is_gone(self) -> bool:
        """Whether the save has ended: it was committed or given up."""

    @abstractmethod
    def remove(self) -> None:
        """Give the save up: remove all that it has written, which is not a checkpoint."""
