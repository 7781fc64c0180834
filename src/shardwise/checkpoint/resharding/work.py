"""The folder in which a reshard works: what is done so far, and how a run that was killed is resumed.

A reshard to `ckpt` works in `.ckpt.resharding-work` next to it:

- `manifest.json` records the request, with a digest of the source and of all that determines the result;
- `journal` has a line for each segment that is copied and synced, with its checksums;
- `files` is the checkpoint to be, and `identity` its inode; `verified` are the marks of source blocks that were checked
  in this run.

When all is copied, `files` becomes `.ckpt.saving-TOKEN` and is put in place as every save is. A run finds out from what
is there how far the one before it came.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.checkpoint import folders
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import make_folders, write_synced
from shardwise.checkpoint.formats.base import PlannedFile
from shardwise.checkpoint.resharding.plan import RangeSums, Segment

_TOKEN = "work"


def work_folder(path: Path) -> Path:
    """Where a reshard to `path` works.

    >>> work_folder(Path("runs/ckpt")).as_posix()
    'runs/.ckpt.resharding-work'
    """
    return folders.temporary_folder(path, folders.RESHARDING, _TOKEN)


class ReshardWorkFolder:
    """The work folder of one run, locked while it is open."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, work_folder(path)
        self._lock = -1
        self._journal = -1

    @property
    def files(self) -> Path:
        return self.folder / "files"

    @property
    def marks(self) -> Path:
        return self.folder / "verified"

    def __enter__(self) -> ReshardWorkFolder:
        make_folders(self.folder)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise CheckpointError(
                f"another reshard to {self.path} is running in {self.folder}; wait for it, or stop it"
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._journal >= 0:
            os.close(self._journal)
        if kind is not None and self._holds_nothing(kind):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _holds_nothing(self, kind: type[BaseException]) -> bool:
        """Whether there is nothing to resume: no run, or one that failed before its first segment."""
        if not (self.folder / "manifest.json").exists():
            return True
        return (
            self._journal >= 0 and issubclass(kind, Exception) and _file_size_or_missing(self.folder / "journal") == 0
        )

    def begin(self, asked: Mapping[str, Any], token: str | None) -> tuple[str, dict[int, list[RangeSums]]]:
        """Resume the run of a token, or start one; return its token and what is done of each segment."""
        if token is None:
            self._clear()
            token = secrets.token_hex(8)
            self.files.mkdir()
            manifest = {"version": 1, "token": token, **asked}
            write_synced(self.folder / "manifest.json", json.dumps(manifest).encode())
        done = self._read_journal()
        self._journal = os.open(self.folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.marks.unlink(missing_ok=True)
        return token, done

    def find_unfinished(self, asked: Mapping[str, Any]) -> str | None:
        """The token of a run that was killed, if there is one; an error if its request was different."""
        try:
            known = json.loads((self.folder / "manifest.json").read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        if not isinstance(known, dict) or known.get("version") != 1 or not isinstance(known.get("token"), str):
            return None
        differs = [key for key in asked if known.get(key) != asked[key]]
        if differs:
            changes = "; ".join(f"{key} was {str(known.get(key))[:80]}, is {str(asked[key])[:80]}" for key in differs)
            raise CheckpointError(
                f"{self.folder} contains an unfinished reshard of something else: {changes}. Run it again as it was to "
                "finish it, or start over with resume=False (--restart), which removes it"
            )
        return str(known["token"])

    def _clear(self, keep: str = "") -> None:
        if not keep:  # first: a manifest without files would say that all is done
            (self.folder / "manifest.json").unlink(missing_ok=True)
        for entry in (e for e in list(self.folder.iterdir()) if e.name != keep):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                os.unlink(entry)

    def _read_journal(self) -> dict[int, list[RangeSums]]:
        """What the journal says; a line that was cut off by a kill, and all after it, does not count."""
        done: dict[int, list[RangeSums]] = {}
        try:
            lines = (self.folder / "journal").read_bytes().split(b"\n")
        except FileNotFoundError:
            return done
        whole = 0
        for line in lines[:-1]:
            try:
                number, sums = json.loads(line)
                done[int(number)] = [(str(text), int(crc)) for text, crc in sums]
            except (ValueError, TypeError):
                break
            whole += 1
        if lines[whole:] != [b""]:
            write_synced(self.folder / "journal", b"".join(line + b"\n" for line in lines[:whole]))
        return done

    def log_segment(self, number: int, sums: Sequence[RangeSums]) -> None:
        """Note that a segment is copied and synced."""
        line = json.dumps([number, sums], separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._journal, line) :]
        os.fsync(self._journal)

    def make_files(self, files: Sequence[PlannedFile]) -> None:
        """Make all files in their full length, and see that there is room for them."""
        missing = [f for f in files if _file_size_or_missing(self.files / f.name) != f.bytes]
        needed, free = sum(f.bytes for f in missing), shutil.disk_usage(self.folder).free
        if needed > free:
            raise CheckpointError(
                f"{self.path}: {needed} bytes must be written, but only {free} are free there; free some space"
            )
        for file in missing:
            make_sparse_file(self.files / file.name, file.bytes)

    def finish_commit(self, token: str) -> bool:
        """Complete the commit of a run that was killed in it; whether there was one."""
        if self.files.exists():
            return False
        folders.recover_commit(self.path)
        saving, replaced = (
            folders.temporary_folder(self.path, kind, token) for kind in (folders.SAVING, folders.REPLACED)
        )
        if self._is_new(saving):
            folders.commit_checkpoint(self.path, token)
        for old in (saving, replaced):  # after the swap of names, the folder of this run is that of the old one
            if old.exists() and self._is_new(self.path):
                folders.remove_folder(old)
        return folders.is_complete(self.path)

    def commit(self, token: str) -> None:
        """Put the files in place of the checkpoint, and remove the work folder."""
        write_synced(self.folder / "identity", json.dumps(os.stat(self.files).st_ino).encode())
        os.rename(self.files, folders.temporary_folder(self.path, folders.SAVING, token))
        folders.commit_checkpoint(self.path, token)
        self.remove()

    def _is_new(self, folder: Path) -> bool:
        """Whether a folder is the one that this run made, under whatever name."""
        try:
            return bool(folder.stat().st_ino == json.loads((self.folder / "identity").read_bytes()))
        except (FileNotFoundError, ValueError):
            return False

    def remove(self) -> None:
        """Remove the work folder, the manifest last: until then it says that all is done."""
        self._clear(keep="manifest.json")
        self._clear()
        os.rmdir(self.folder)


def make_sparse_file(path: Path, size: int) -> None:
    """Make a file of this length; what is not written takes no room."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.ftruncate(handle, size)
    finally:
        os.close(handle)


def _file_size_or_missing(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def select_finished_segments(
    segments: Sequence[Segment], done: Mapping[int, Sequence[RangeSums]]
) -> dict[int, Sequence[RangeSums]]:
    """Of what a journal says, that which fits the segments."""
    return {n: sums for n, sums in done.items() if n < len(segments) and len(segments[n].ranges) == len(sums)}
