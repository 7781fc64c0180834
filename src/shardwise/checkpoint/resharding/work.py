"""The folder in which a reshard works: what is done so far, and how a run that was killed is taken up again.

A reshard to `ckpt` works in `.ckpt.resharding-work` beside it:

- `manifest.json` says what was asked, with a digest of the source and of all that decides a byte of the result;
- `journal` has a line for each segment that is copied and synced, with its checksums;
- `files` is the checkpoint to be; `verified` are the marks of source blocks that were checked in this run.

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
from shardwise.checkpoint.resharding.plan import Segment, Sums, TargetFile

_TOKEN = "work"


def work_folder(path: Path) -> Path:
    """Where a reshard to `path` works.

    >>> work_folder(Path("runs/ckpt")).as_posix()
    'runs/.ckpt.resharding-work'
    """
    return folders.sibling(path, folders.RESHARDING, _TOKEN)


class Work:
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

    def __enter__(self) -> Work:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise CheckpointError(
                f"another reshard to {self.path} is under way in {self.folder}; wait for it, or end it"
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._journal >= 0:
            os.close(self._journal)
        if kind is not None and self._holds_nothing(kind):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _holds_nothing(self, kind: type[BaseException]) -> bool:
        """Whether there is nothing to take up again: no run, or one that failed before its first segment."""
        if not (self.folder / "manifest.json").exists():
            return True
        return self._journal >= 0 and issubclass(kind, Exception) and _size(self.folder / "journal") == 0

    def begin(self, asked: Mapping[str, Any], token: str | None) -> tuple[str, dict[int, list[Sums]]]:
        """Take up the run of a token, or start one; return its token and what is done of each segment."""
        if token is None:
            self._clear()
            token = secrets.token_hex(8)
            self.files.mkdir()
            manifest = {"version": 1, "token": token, **asked}
            folders.write_synced(self.folder / "manifest.json", json.dumps(manifest).encode())
        done = self._read_journal()
        self._journal = os.open(self.folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.marks.unlink(missing_ok=True)
        return token, done

    def unfinished(self, asked: Mapping[str, Any]) -> str | None:
        """The token of a run that was killed, if there is one; an error if it was asked for something else."""
        try:
            known = json.loads((self.folder / "manifest.json").read_bytes())
            assert known["version"] == 1 and isinstance(known["token"], str)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AssertionError):
            return None
        differs = [key for key in asked if known.get(key) != asked[key]]
        if differs:
            told = "; ".join(f"{key} was {str(known.get(key))[:80]}, is {str(asked[key])[:80]}" for key in differs)
            raise CheckpointError(
                f"{self.folder} holds an unfinished reshard of something else: {told}. Run it again as it was to "
                "finish it, or start anew with resume=False (--restart), which removes it"
            )
        return str(known["token"])

    def _clear(self, keep: str = "") -> None:
        if not keep:  # first of all: a manifest without files would say that all is done
            (self.folder / "manifest.json").unlink(missing_ok=True)
        for entry in (e for e in list(self.folder.iterdir()) if e.name != keep):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                os.unlink(entry)

    def _read_journal(self) -> dict[int, list[Sums]]:
        """What the journal says; a line that was cut off by a kill, and all after it, does not count."""
        done: dict[int, list[Sums]] = {}
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
            folders.write_synced(self.folder / "journal", b"".join(line + b"\n" for line in lines[:whole]))
        return done

    def note(self, number: int, sums: Sequence[Sums]) -> None:
        """Note that a segment is copied and synced."""
        line = json.dumps([number, sums], separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._journal, line) :]
        os.fsync(self._journal)

    def make_files(self, files: Sequence[TargetFile]) -> None:
        """Make all files in their full length, and see that there is room for them."""
        missing = [f for f in files if _size(self.files / f.name) != f.bytes]
        needed, free = sum(f.bytes for f in missing), shutil.disk_usage(self.folder).free
        if needed > free:
            raise CheckpointError(
                f"{self.path}: {needed} bytes are to be written, but only {free} are free there; make room"
            )
        for file in missing:
            handle = os.open(self.files / file.name, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.ftruncate(handle, file.bytes)
            finally:
                os.close(handle)

    def finish_commit(self, token: str) -> bool:
        """Complete the commit of a run that was killed in it; whether there was one."""
        if self.files.exists():
            return False
        folders.recover(self.path)
        saving, replaced = (folders.sibling(self.path, kind, token) for kind in (folders.SAVING, folders.REPLACED))
        if saving.exists():
            folders.commit(self.path, token)
        if replaced.exists():
            shutil.rmtree(replaced)
        return folders.is_complete(self.path)

    def commit(self, token: str) -> None:
        """Put the files in place of the checkpoint, and remove the work folder."""
        os.rename(self.files, folders.sibling(self.path, folders.SAVING, token))
        folders.commit(self.path, token)
        self.remove()

    def remove(self) -> None:
        """Remove the work folder, the manifest last: until then it says that all is done."""
        self._clear(keep="manifest.json")
        self._clear()
        os.rmdir(self.folder)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def segments_done(segments: Sequence[Segment], done: Mapping[int, Sequence[Sums]]) -> dict[int, Sequence[Sums]]:
    """Of what a journal says, that which fits the segments."""
    return {n: sums for n, sums in done.items() if n < len(segments) and len(segments[n].ranges) == len(sums)}
