"""The local folder in which a reshard to a URL works: each file is made there, uploaded, and removed.

Nothing is resumed: a run that fails removes what it has uploaded, and one that is killed leaves files that no index
names, which the next save or reshard to the URL removes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.base import PlannedFile
from shardwise.checkpoint.resharding.work import make_sparse_file
from shardwise.checkpoint.storage.remote import RemoteSave
from shardwise.checkpoint.storage.remote_path import RemotePath


class ReshardStaging:
    """The folder of one run to a URL. Use as a context manager: an error removes everything."""

    def __init__(self, path: RemotePath, token: str) -> None:
        self.path, self.save = path, RemoteSave(path, token)

    @property
    def files(self) -> Path:
        return self.save.work / "files"

    @property
    def marks(self) -> Path:
        return self.save.work / "verified"

    def __enter__(self) -> ReshardStaging:
        self.files.mkdir()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is not None:
                self.save.remove()
        finally:
            self.save.close()

    def make_files(self, files: Sequence[PlannedFile]) -> None:
        """Make all files in their full length; they take room as they are filled."""
        for file in files:
            make_sparse_file(self.files / file.name, file.bytes)

    def deliver(self, name: str) -> None:
        """Upload a file that is complete."""
        (self.files / name).rename(self.save.work / name)
        self.save.deliver(name)

    def commit(
        self, written: Sequence[PlannedFile], index: tuple[str, bytes] | None, beside: Mapping[str, bytes]
    ) -> None:
        """See that all files are there, and write the index."""
        for file in written:
            if self.save.size_of(file.name) != file.bytes:
                raise CheckpointError(f"{self.path / file.name}: {file.bytes} bytes were written, others are there")
        self.save.write_index(index)
        for name, data in beside.items():
            self.save.deliver_beside(name, data)
        self.save.commit(in_background=False)
