"""Removing what a save has replaced, in the background: freeing gigabytes takes a while.

A program that ends waits for it; one that is killed leaves a folder that is recognised as a leftover.

Which folder is the checkpoint? Names of temporary folders, the commit, and what a killed save leaves behind.

A save to `ckpt` with the token `1f2e` writes `.ckpt.saving-1f2e` next to it, all files synced, the index last. Then:

1. if there is a `ckpt`, it is renamed to `.ckpt.replaced-1f2e`;
2. `.ckpt.saving-1f2e` is renamed to `ckpt`;
3. `.ckpt.replaced-1f2e` is removed, by a save in the background.

So wherever a save is killed, `ckpt` is the old or the new checkpoint, or is missing for the moment between 1 and 2. In
that case, and only then, a `.ckpt.replaced-1f2e` has a complete `.ckpt.saving-1f2e` next to it: the checkpoint.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.huggingface_index import read_header
from shardwise.checkpoint.index import INDEX_NAME

_removal_threads: list[threading.Thread] = []
_removal_lock = threading.Lock()


def remove_in_background(folder: Path) -> None:
    """Start to remove a folder."""
    thread = threading.Thread(target=shutil.rmtree, args=(folder, True), name="shardwise remove")
    with _removal_lock:
        _removal_threads[:] = [t for t in _removal_threads if t.is_alive()]
        thread.start()
        _removal_threads.append(thread)


def wait_for_removals() -> None:
    """Wait until everything that this process removes is gone."""
    with _removal_lock:
        threads = list(_removal_threads)
    for thread in threads:
        thread.join()


SAVING, REPLACED, RESHARDING = "saving", "replaced", "resharding"
HF_INDEX_NAME = "model.safetensors.index.json"
HF_SINGLE_NAME = "model.safetensors"
DCP_NAME = ".metadata"
_COMPLETE = (INDEX_NAME, HF_INDEX_NAME, HF_SINGLE_NAME, DCP_NAME)
_SUFFIXES = (".safetensors", ".distcp")


def temporary_folder(path: Path, kind: str, token: str) -> Path:
    """The folder of a running save, next to the checkpoint.

    >>> temporary_folder(Path("runs/ckpt"), SAVING, "1f2e").as_posix()
    'runs/.ckpt.saving-1f2e'
    """
    return path.with_name(f".{path.name}.{kind}-{token}")


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint, so that its name and its parent are known; links are followed to what they name."""
    whole = Path(os.path.realpath(path))
    if not whole.name:
        raise CheckpointError(f"{str(path)!r} is not a valid checkpoint name; pass a folder below the root")
    return whole


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a finished checkpoint: its index is written last, a single file has its whole length."""
    if any((folder / name).is_file() for name in _COMPLETE if name != HF_SINGLE_NAME):
        return True
    try:
        read_header(folder / HF_SINGLE_NAME)
    except CheckpointError:
        return False
    return True


def find_checkpoint(path: Path) -> Path:
    """The folder (or file) that holds the checkpoint called `path`, also where a save was killed in its commit."""
    if path.exists() and not _is_empty(path):
        return path
    for replaced in _list_temporary_folders(path, REPLACED):
        saved = _saved_partner(path, replaced)
        if is_complete(saved):
            return saved
        if is_complete(replaced):
            return replaced
    if path.exists():
        raise CheckpointError(f"{path}: an empty folder, not a checkpoint")
    raise CheckpointError(f"{path}: no such checkpoint")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _saved_partner(path: Path, replaced: Path) -> Path:
    return temporary_folder(path, SAVING, replaced.name.rpartition("-")[2])


def _list_temporary_folders(path: Path, *kinds: str) -> list[Path]:
    starts = tuple(temporary_folder(path, kind, "").name for kind in kinds)
    if not path.parent.is_dir():
        return []
    return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(starts) and entry.is_dir())


def check_target(path: Path) -> None:
    """Raise unless a checkpoint may be written here: nothing is there, or a checkpoint that is to be replaced."""
    if not path.exists() or _is_empty(path):
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder, choose another name")
    strange = [e.name for e in path.iterdir() if e.suffix not in _SUFFIXES and e.name not in _COMPLETE]
    if strange or not is_complete(path):
        raise CheckpointError(
            f"{path} is a folder that contains things other than a checkpoint ({', '.join(sorted(strange)[:3])}); "
            "it is not replaced: choose another name, or move the folder"
        )


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    half = path.with_name(path.name + ".half")
    handle = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    os.rename(half, path)


def commit_checkpoint(path: Path, token: str, remove: Callable[[Path], object] = shutil.rmtree) -> None:
    """Put a complete temporary folder in the checkpoint's place."""
    saving, replaced = temporary_folder(path, SAVING, token), temporary_folder(path, REPLACED, token)
    sync_folder(saving)
    if path.exists():
        os.rename(path, replaced)
    os.rename(saving, path)
    sync_folder(path.parent)
    if replaced.exists():
        remove(replaced)


def recover_commit(path: Path) -> None:
    """Complete a commit that was killed between its two renames."""
    if path.exists() and not _is_empty(path):
        return
    for replaced in _list_temporary_folders(path, REPLACED):
        saved = _saved_partner(path, replaced)
        if is_complete(saved) or is_complete(replaced):
            os.rename(saved if is_complete(saved) else replaced, path)
            sync_folder(path.parent)
            return


def leftovers(path: str | os.PathLike[str]) -> list[Path]:
    """The temporary folders that killed saves and reshards left next to this checkpoint, to be removed.

    Where there is no checkpoint, complete ones are not among them: they are the only ones there are.

    >>> leftovers("no/such/checkpoint")
    []
    """
    whole = absolute_path(path)
    found = list_leftovers(whole)
    try:
        if is_complete(find_checkpoint(whole)):
            return found
    except CheckpointError:
        pass
    return [folder for folder in found if not is_complete(folder)]


def list_leftovers(path: Path) -> list[Path]:
    """All temporary folders next to a checkpoint, except the one that is the checkpoint in the middle of a commit."""
    wait_for_removals()
    found = _list_temporary_folders(path, SAVING, REPLACED, RESHARDING)
    if not found or (path.exists() and not _is_empty(path)):
        return found
    try:
        kept = find_checkpoint(path)
    except CheckpointError:
        return found
    return [folder for folder in found if folder != kept]


def clean(path: str | os.PathLike[str]) -> list[Path]:
    """Complete a killed commit, remove what killed saves left, and return what was removed; see `leftovers`.

    Do not call it while a save to this path is running.

    >>> clean("no/such/checkpoint")
    []
    """
    recover_commit(absolute_path(path))
    found = leftovers(path)
    for folder in found:
        shutil.rmtree(folder)
    return found
