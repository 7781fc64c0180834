"""Which folder is the checkpoint? Names of temporary folders, the commit, and what a killed save leaves behind.

A save to `ckpt` with the token `1f2e` writes `.ckpt.saving-1f2e` next to it, all files synced, the index last. Then:

1. if there is a `ckpt`, the two folders swap their names in one step, so that there is a checkpoint at any time; the
   old one is now called `.ckpt.saving-1f2e` and is renamed to `.ckpt.replaced-1f2e`;
2. where the system cannot swap, `ckpt` is renamed to `.ckpt.replaced-1f2e`, and `.ckpt.saving-1f2e` to `ckpt`;
3. `.ckpt.replaced-1f2e` is removed, its index first, by a save in the background.

All the while the save holds the lock `.ckpt.lock`, and so does a reshard or `clean`: one of them at a time.

So `ckpt` is the old or the new checkpoint wherever a save is killed; only between the two renames of 2 it is missing.
Then, and only then, a `.ckpt.replaced-1f2e` has a complete `.ckpt.saving-1f2e` of the same token next to it, which is
the checkpoint. A folder without its partner is never brought back: it was replaced by a save that came through.

Where is a checkpoint: in a local folder, or behind a URL? The only code that distinguishes the two.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeAlias

from shardwise.checkpoint.files import (
    CLEANING,
    CheckpointError,
    FolderLock,
    PinnedFolder,
    ReadableFolder,
    SaveFolder,
    SaveLock,
    drop_from_cache,
    make_folders,
    sync_folder,
    write_synced,
)
from shardwise.checkpoint.formats import FORMATS, is_checkpoint_file
from shardwise.checkpoint.remote import RemoteFolder, RemoteLock, RemotePath, RemoteSave, check_remote_target, is_url

SAVING, REPLACED, RESHARDING = "saving", "replaced", "resharding"
_CURRENT_FOLDER, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_SEEN_SECONDS = 5.0  # how long a network file system may take to show a new folder on another host
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}

_removal_threads: list[threading.Thread] = []
_removal_lock = threading.Lock()


def temporary_folder(path: Path, kind: str, token: str) -> Path:
    """The folder of a running save, next to the checkpoint.

    >>> temporary_folder(Path("runs/ckpt"), SAVING, "1f2e").as_posix()
    'runs/.ckpt.saving-1f2e'
    """
    return path.with_name(f".{path.name}.{kind}-{token}")


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint, so that its name and its parent are known; links are followed to what they name."""
    try:
        whole = Path(os.path.realpath(path))
    except ValueError as error:
        raise CheckpointError(f"{os.fspath(path)!r} is not a valid path: {error}") from error
    if not whole.name:
        raise CheckpointError(f"{str(path)!r} is not a valid checkpoint name; pass a folder below the root")
    return whole


def is_complete(folder: Path) -> bool:
    """Whether a folder has a finished checkpoint of any format."""
    try:
        with PinnedFolder(folder) as pinned:
            return any(known.is_complete(pinned) for known in FORMATS)
    except CheckpointError:
        return False


def find_checkpoint(path: Path) -> Path:
    """The folder (or file) that has the checkpoint called `path`, also where a save was killed in its commit."""
    for _ in range(2):  # a commit may end between the two looks
        if path.exists() and not is_empty(path):
            return path
        saved = find_interrupted_commit(path)
        if saved is not None:
            return saved
    if path.exists():
        raise CheckpointError(f"{path}: an empty folder, not a checkpoint")
    complete = [p.name for p in list_temporary_folders(path, SAVING, REPLACED) if is_complete(p)]
    hint = f"; complete ones are left next to it: rename one of {', '.join(complete[:3])}" if complete else ""
    raise CheckpointError(f"{path}: no such checkpoint{hint}")


def find_interrupted_commit(path: Path) -> Path | None:
    """The new checkpoint of a save that was killed between its two renames; it has the token of what it replaces."""
    found = [temporary_folder(path, SAVING, p.name.rpartition("-")[2]) for p in list_temporary_folders(path, REPLACED)]
    saved = [folder for folder in found if is_complete(folder)]
    if len(saved) > 1:
        names = ", ".join(folder.name for folder in saved[:3])
        raise CheckpointError(f"{path}: several saves were killed while they put it in place; rename one of {names}")
    return saved[0] if saved else None


def is_empty(path: Path) -> bool:
    """Whether a path is a folder with nothing in it."""
    return path.is_dir() and not any(path.iterdir())


def list_temporary_folders(path: Path, *kinds: str) -> list[Path]:
    """The folders of these kinds next to a checkpoint."""
    starts = tuple(temporary_folder(path, kind, "").name for kind in kinds)
    if not path.parent.is_dir():
        return []
    return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(starts) and entry.is_dir())


def check_target(path: Path, besides: Collection[str] = ()) -> None:
    """Raise unless a checkpoint may be written here: nothing is there, or a checkpoint that is to be replaced.

    It may have files `besides`, of which the new one has its own.
    """
    if not path.exists() or is_empty(path):
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder, choose another name")
    strange = [e.name for e in path.iterdir() if e.name not in besides and not is_checkpoint_file(e.name)]
    if strange or not is_complete(path):
        raise CheckpointError(
            f"{path} is a folder that contains things other than a checkpoint ({', '.join(sorted(strange)[:3])}); "
            "it is not replaced: choose another name, or move the folder"
        )


def exchange_folders(one: Path, other: Path) -> bool:
    """Let two folders swap their names in one step; False where the system or the file system cannot."""
    try:
        rename: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if rename(_CURRENT_FOLDER, os.fsencode(one), _CURRENT_FOLDER, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint, its index first: what is left of it when this is killed is not taken for one."""
    for name in (name for known in FORMATS for name in known.index_names):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def commit_checkpoint(path: Path, token: str, remove: Callable[[Path], object] = remove_folder) -> None:
    """Put a complete temporary folder in the checkpoint's place. If that fails, the old one stays and it is removed."""
    saving, replaced = temporary_folder(path, SAVING, token), temporary_folder(path, REPLACED, token)
    new = os.stat(saving).st_ino
    try:
        sync_folder(saving)
        exchanged = _put_in_place(path, saving, replaced)
    except OSError:
        if path.exists() and os.stat(saving).st_ino == new:  # nothing has changed places
            _remove_quietly(saving)
        raise
    try:
        sync_folder(path.parent)
    except OSError:
        _put_back(path, saving, replaced, exchanged)
        raise
    old = _name_replaced(saving, replaced) if exchanged else replaced
    if old.exists():
        remove(old)


def _name_replaced(saving: Path, replaced: Path) -> Path:
    """Give the old folder, which has the name of the running save, the name of a replaced one; return what it got."""
    try:
        os.rename(saving, replaced)
        return replaced
    except OSError:
        return saving  # the new one is in place: all that is left is to remove the old one


def _put_back(path: Path, saving: Path, replaced: Path, exchanged: bool) -> None:
    """After a commit that may not last, restore the old checkpoint; the new one is removed once that lasts."""
    try:
        if exchanged:
            exchange_folders(saving, path)
        elif replaced.exists():
            os.rename(path, saving)
            os.rename(replaced, path)
        else:
            return  # there was none before
        sync_folder(path.parent)
    except OSError:
        return  # which of the two names lasts is not known, so neither folder may go
    _remove_quietly(saving)


def _put_in_place(path: Path, saving: Path, replaced: Path) -> bool:
    """Whether the new and the old folder have swapped their names; else the old one is called replaced, if any."""
    if not path.exists():
        os.rename(saving, path)
    elif exchange_folders(saving, path):
        return True
    else:
        os.rename(path, replaced)
        try:
            os.rename(saving, path)
        except OSError:
            os.rename(replaced, path)
            raise
    return False


class LocalSave(SaveFolder):
    """A running save to a local folder: a temporary folder next to it, which takes its place."""

    path: Path

    def __init__(self, path: Path, token: str, work: Path | None = None) -> None:
        self.path, self.token = path, token
        self.work = temporary_folder(path, SAVING, token) if work is None else work

    def make(self) -> None:
        make_folders(self.path.parent)
        new_lock(self.path, "save", self.token).acquire()
        try:
            recover_commit(self.path)
            check_target(self.path)
            self.work.mkdir(exist_ok=True)
        except BaseException:
            self.unlock()
            raise

    def find(self) -> None:
        deadline = time.monotonic() + _SEEN_SECONDS
        while not self.work.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.path}: the folder that the first rank has made next to it is not seen here; ranks of "
                    "several hosts save to a path that all of them share, on a network file system or an object store"
                )
            time.sleep(self.poll_seconds)

    def forget_replaced(self, name: str) -> None:
        drop_from_cache(self.path / name)

    def deliver(self, name: str) -> None:
        return None

    def size_of(self, name: str) -> int:
        return (self.work / name).stat().st_size

    def write_note(self, name: str, data: bytes) -> None:
        write_synced(self.work / name, data)

    def read_note(self, name: str) -> bytes | None:
        try:
            return (self.work / name).read_bytes()
        except FileNotFoundError:
            return None

    def remove_note(self, name: str) -> None:
        (self.work / name).unlink()

    def is_gone(self) -> bool:
        return not self.work.exists()

    def remove(self) -> None:
        remove_folder(self.work)
        self.unlock()

    def write_index(self, index: tuple[str, bytes] | None, beside: Mapping[str, bytes]) -> None:
        last = {**beside, **({} if index is None else dict([index]))}
        for name, data in last.items():
            write_synced(self.work / name, data)
        self.last_files = {name: len(data) for name, data in last.items()}
        sync_folder(self.work)

    def put_in_place(self, in_background: bool) -> None:
        commit_checkpoint(self.path, self.token, remove_in_background if in_background else remove_folder)

    def close(self) -> None:
        return None


def recover_commit(path: Path) -> None:
    """Complete a commit that was killed between its two renames."""
    if path.exists() and not is_empty(path):
        return
    saved = find_interrupted_commit(path)
    if saved is not None:
        os.rename(saved, path)
        sync_folder(path.parent)


def list_leftovers(path: Path) -> list[Path]:
    """All temporary folders next to a checkpoint, except the one that is the checkpoint in the middle of a commit.

    Those of a save that is running are among them; `find_writer` says whether there is one.
    """
    wait_for_removals()
    found = list_temporary_folders(path, SAVING, REPLACED, RESHARDING)
    if not found or (path.exists() and not is_empty(path)):
        return found
    kept = find_interrupted_commit(path)
    return [folder for folder in found if folder != kept]


def find_writer(path: Path) -> str | None:
    """Who writes to a checkpoint just now, in words; None if nobody does."""
    owner = FolderLock(path, CLEANING, "").find_owner()
    if owner is None:
        return None
    return f"a {owner.get('what')} to {path.name} is running: process {owner.get('pid')} on {owner.get('host')}"


def remove_in_background(folder: Path) -> None:
    """Start to remove a folder: freeing gigabytes takes a while. A program that ends waits for it."""
    thread = threading.Thread(target=_remove_quietly, args=(folder,), name="shardwise remove")
    with _removal_lock:
        _removal_threads[:] = [t for t in _removal_threads if t.is_alive()]
        thread.start()
        _removal_threads.append(thread)


def _remove_quietly(folder: Path) -> None:
    try:
        remove_folder(folder)
    except OSError:
        return  # it is recognised as a leftover


def wait_for_removals() -> None:
    """Wait until everything that this process removes is gone."""
    with _removal_lock:
        threads = list(_removal_threads)
    for thread in threads:
        thread.join()


Place: TypeAlias = Path | RemotePath


class FolderVanished(Exception):
    """A folder was there and is not any more: a save has replaced it."""


def find_place(path: str | os.PathLike[str]) -> Place:
    """The place that a path or URL names.

    >>> str(find_place("memory://runs/ckpt")), find_place("file:///runs/ckpt").as_posix()
    ('memory://runs/ckpt', '/runs/ckpt')
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"the path of a checkpoint is a string or a pathlib.Path, got {type(path).__name__}; the state comes "
            "first: save(state, path), load(state, path)"
        )
    if is_url(path):
        return RemotePath.parse(os.fspath(path))
    text = os.fspath(path)
    return absolute_path(text.partition("://")[2] if text.startswith(("file://", "local://")) else path)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The folder that a path names; an error for URLs."""
    found = find_place(path)
    if isinstance(found, RemotePath):
        raise CheckpointError(
            f"{found}: this works on local folders only; the next save to this URL removes what killed ones left"
        )
    return found


def check_destination(place: Place, overwrite: bool, besides: Collection[str]) -> None:
    """Raise unless a checkpoint may be written here, where one is replaced only if the user says so."""
    if isinstance(place, RemotePath):
        check_remote_target(place, besides)
        taken = bool(set(place.list_names()) & {name for known in FORMATS for name in known.index_names})
    else:
        recover_commit(place)
        if overwrite:
            check_target(place, besides)
        taken = place.exists() and not is_empty(place)
    if taken and not overwrite:
        raise CheckpointError(
            f"{place} exists; choose another name, or pass overwrite=True (--overwrite) to replace it"
        )


def check_apart(source: Place, target: Place) -> None:
    """Raise unless a checkpoint can be rewritten from one place to another."""
    if source == target:
        raise CheckpointError(f"{source} is both source and destination; choose another name for the new checkpoint")
    if isinstance(source, Path) and isinstance(target, Path):
        inside = source in target.parents
    else:
        inside = isinstance(source, RemotePath) and isinstance(target, RemotePath) and source.contains(target)
    if inside:
        raise CheckpointError(f"{target} is inside the source {source}; choose a path outside it")


def new_lock(place: Place, what: str, token: str) -> SaveLock:
    """The lock of whoever writes to a place, to be acquired."""
    return RemoteLock(place, what, token) if isinstance(place, RemotePath) else FolderLock(place, what, token)


def new_save(place: Place, token: str) -> SaveFolder:
    """The folder of a save that begins."""
    return RemoteSave(place, token) if isinstance(place, RemotePath) else LocalSave(place, token)


def open_plain_folder(place: Place, max_buffer_bytes: int) -> ReadableFolder:
    """A folder, opened, whatever is in it."""
    return RemoteFolder(place, max_buffer_bytes) if isinstance(place, RemotePath) else PinnedFolder(place)


def open_folder(place: Place, max_buffer_bytes: int) -> tuple[ReadableFolder, str | None]:
    """The folder of a checkpoint, opened; and the name of the file, if the checkpoint is a single one in it."""
    if isinstance(place, RemotePath):
        is_file = any(known.accepts_file(place.name) for known in FORMATS) and place.is_file()
        if not is_file and not place.list_names():
            raise CheckpointError(f"{place}: no such checkpoint")
        return RemoteFolder(place.parent if is_file else place, max_buffer_bytes), place.name if is_file else None
    found = find_checkpoint(place)
    is_file = found.is_file()
    try:
        return PinnedFolder(found.parent if is_file else found), found.name if is_file else None
    except CheckpointError as error:
        if found.exists():
            raise
        raise FolderVanished from error
