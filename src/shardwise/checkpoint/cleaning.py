"""What did killed saves leave next to a checkpoint, and what of it can be removed? Nothing that may still be needed.

Removing begins when the checkpoint that stays has been read whole and found right. Where it is broken, or there is
none, every folder that has an index stays.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.folders import find_checkpoint, is_complete, list_leftovers, recover_commit
from shardwise.checkpoint.storage.place import local_path
from shardwise.checkpoint.store import open_store
from shardwise.checkpoint.verify import count_checked_bytes, find_problems


def leftovers(path: str | os.PathLike[str]) -> list[Path]:
    """The temporary folders that killed saves and reshards left next to this checkpoint, to be removed.

    Where there is no checkpoint, complete ones are not among them: they are the only ones there are.

    >>> leftovers("no/such/checkpoint")
    []
    """
    whole = local_path(path)
    found = list_leftovers(whole)
    try:
        if is_complete(find_checkpoint(whole)):
            return found
    except CheckpointError:
        pass
    return [folder for folder in found if not is_complete(folder)]


def find_checkpoint_problem(path: Path, progress: Callable[[int, int], None] | None = None) -> str | None:
    """Read a checkpoint whole; what is wrong with it, or None. `progress` gets the bytes read so far, and all bytes."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    try:
        store = open_store(path)
        total = count_checked_bytes(store)
        try:
            return next((str(problem) for problem in find_problems(store, advance)), None)
        finally:
            store.close()
    except (CheckpointError, OSError) as error:
        return str(error)


def clean(path: str | os.PathLike[str]) -> list[Path]:
    """Complete a killed commit, remove what killed saves left, and return what was removed; see `leftovers`.

    The checkpoint is read and verified first; if it is damaged, nothing that has an index is removed. Do not call it
    while a save to this path is running.

    >>> clean("no/such/checkpoint")
    []
    """
    whole = local_path(path)
    recover_commit(whole)
    found = leftovers(path)
    complete = [folder for folder in found if is_complete(folder)]
    if complete and (problem := find_checkpoint_problem(whole)) is not None:
        raise CheckpointError(
            f"{whole} is damaged, so {', '.join(folder.name for folder in complete[:3])} may be needed and nothing was "
            f"removed: {problem}"
        )
    for folder in found:
        shutil.rmtree(folder)
    return found
