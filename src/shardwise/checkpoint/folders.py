"""Removing what a save has replaced, while the program goes on: freeing gigabytes takes a while.

A program that ends waits for it; one that is killed leaves a folder that is recognised as a leftover.

Which folder is the checkpoint? Names of temporary folders, the commit, and what a killed save leaves behind.

A save to `ckpt` with the token `1f2e` writes `.ckpt.saving-1f2e` beside it, all files synced, the index last. Then:

1. if there is a `ckpt`, it is renamed to `.ckpt.replaced-1f2e`;
2. `.ckpt.saving-1f2e` is renamed to `ckpt`;
3. `.ckpt.replaced-1f2e` is removed, by a save while the program goes on.

So wherever a save is killed, `ckpt` is the old or the new checkpoint, or is missing for the moment between 1 and 2. In
that case, and only then, a `.ckpt.replaced-1f2e` has a complete `.ckpt.saving-1f2e` beside it, which is the checkpoint.
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

_running: list[threading.Thread] = []
_lock = threading.Lock()


def remove_later(folder: Path) -> None:
    """Start to remove a folder."""
    thread = threading.Thread(target=shutil.rmtree, args=(folder, True), name="shardwise remove")
    with _lock:
        _running[:] = [t for t in _running if t.is_alive()]
        thread.start()
        _running.append(thread)


def finish_removals() -> None:
    """Wait until everything that this process removes is gone."""
    with _lock:
        threads = list(_running)
    for thread in threads:
        thread.join()


SAVING, REPLACED, RESHARDING = "saving", "replaced", "resharding"
HF_INDEX_NAME = "model.safetensors.index.json"
HF_SINGLE_NAME = "model.safetensors"
DCP_NAME = ".metadata"
_COMPLETE = (INDEX_NAME, HF_INDEX_NAME, HF_SINGLE_NAME, DCP_NAME)
_SUFFIXES = (".safetensors", ".distcp")


def sibling(path: Path, kind: str, token: str) -> Path:
    """The folder of a save under way, beside the checkpoint.

    >>> sibling(Path("runs/ckpt"), SAVING, "1f2e").as_posix()
    'runs/.ckpt.saving-1f2e'
    """
    return path.with_name(f".{path.name}.{kind}-{token}")


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint, so that its name and its parent are known; links are followed to what they name."""
    whole = Path(os.path.realpath(path))
    if not whole.name:
        raise CheckpointError(f"{str(path)!r} is no name for a checkpoint; give a folder below the root")
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


def resolve(path: Path) -> Path:
    """The folder (or file) that holds the checkpoint called `path`, also where a save was killed in its commit."""
    if path.exists() and not _is_empty(path):
        return path
    for replaced in _siblings(path, REPLACED):
        saved = _partner(path, replaced)
        if is_complete(saved):
            return saved
        if is_complete(replaced):
            return replaced
    if path.exists():
        raise CheckpointError(f"{path}: an empty folder, no checkpoint")
    raise CheckpointError(f"{path}: no such checkpoint")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _partner(path: Path, replaced: Path) -> Path:
    return sibling(path, SAVING, replaced.name.rpartition("-")[2])


def _siblings(path: Path, *kinds: str) -> list[Path]:
    starts = tuple(sibling(path, kind, "").name for kind in kinds)
    if not path.parent.is_dir():
        return []
    return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(starts) and entry.is_dir())


def check_target(path: Path) -> None:
    """Raise unless a checkpoint may be written here: nothing is there, or a checkpoint that is to be replaced."""
    if not path.exists() or _is_empty(path):
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder, give another name")
    strange = [e.name for e in path.iterdir() if e.suffix not in _SUFFIXES and e.name not in _COMPLETE]
    if strange or not is_complete(path):
        raise CheckpointError(
            f"{path} is a folder that holds other things than a checkpoint ({', '.join(sorted(strange)[:3])}); "
            "it is not replaced: give another name, or move it away"
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


def commit(path: Path, token: str, remove: Callable[[Path], object] = shutil.rmtree) -> None:
    """Put a complete temporary folder in the checkpoint's place."""
    saving, replaced = sibling(path, SAVING, token), sibling(path, REPLACED, token)
    sync_folder(saving)
    if path.exists():
        os.rename(path, replaced)
    os.rename(saving, path)
    sync_folder(path.parent)
    if replaced.exists():
        remove(replaced)


def recover(path: Path) -> None:
    """Complete a commit that was killed between its two renames."""
    if path.exists() and not _is_empty(path):
        return
    for replaced in _siblings(path, REPLACED):
        saved = _partner(path, replaced)
        if is_complete(saved) or is_complete(replaced):
            os.rename(saved if is_complete(saved) else replaced, path)
            sync_folder(path.parent)
            return


def leftovers(path: str | os.PathLike[str]) -> list[Path]:
    """The temporary folders that killed saves and reshards left beside this checkpoint, to be removed.

    Where there is no checkpoint, complete ones are not among them: they are the only ones there are.

    >>> leftovers("no/such/checkpoint")
    []
    """
    whole = absolute(path)
    found = left_beside(whole)
    try:
        if is_complete(resolve(whole)):
            return found
    except CheckpointError:
        pass
    return [folder for folder in found if not is_complete(folder)]


def left_beside(path: Path) -> list[Path]:
    """All temporary folders beside a checkpoint, but for the one that stands for it in the middle of a commit."""
    finish_removals()
    found = _siblings(path, SAVING, REPLACED, RESHARDING)
    if not found or (path.exists() and not _is_empty(path)):
        return found
    try:
        kept = resolve(path)
    except CheckpointError:
        return found
    return [folder for folder in found if folder != kept]


def clean(path: str | os.PathLike[str]) -> list[Path]:
    """Complete a killed commit, remove what killed saves left, and return what was removed; see `leftovers`.

    Not to be called while a save to this path is under way.

    >>> clean("no/such/checkpoint")
    []
    """
    recover(absolute(path))
    found = leftovers(path)
    for folder in found:
        shutil.rmtree(folder)
    return found
