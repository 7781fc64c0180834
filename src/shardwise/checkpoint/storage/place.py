"""Where is a checkpoint: in a local folder, or behind a URL? The only code that distinguishes the two."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TypeAlias

from shardwise.checkpoint import folders
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import PinnedFolder, make_folders
from shardwise.checkpoint.folders import LocalSave
from shardwise.checkpoint.formats.table import FORMATS
from shardwise.checkpoint.storage.base import ReadableFolder, SaveFolder
from shardwise.checkpoint.storage.remote import RemoteFolder, RemoteSave, check_remote_target
from shardwise.checkpoint.storage.remote_path import RemotePath, is_url

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
    return folders.absolute_path(text.partition("://")[2] if text.startswith(("file://", "local://")) else path)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The folder that a path names; an error for URLs."""
    found = find_place(path)
    if isinstance(found, RemotePath):
        raise CheckpointError(
            f"{found}: this works on local folders only; the next save to this URL removes what killed ones left"
        )
    return found


def prepare_target(place: Place) -> None:
    """See that a checkpoint may be written here; complete a commit that was killed."""
    if isinstance(place, RemotePath):
        check_remote_target(place)
        return
    make_folders(place.parent)
    folders.recover_commit(place)
    folders.check_target(place)


def check_destination(place: Place, overwrite: bool, besides: Collection[str]) -> None:
    """The same for a checkpoint that is replaced only if the user says so."""
    if isinstance(place, RemotePath):
        check_remote_target(place, besides)
        taken = bool(set(place.list_names()) & {name for known in FORMATS for name in known.index_names})
    else:
        folders.recover_commit(place)
        if overwrite:
            folders.check_target(place, besides)
        taken = place.exists() and not folders.is_empty(place)
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
    found = folders.find_checkpoint(place)
    is_file = found.is_file()
    try:
        return PinnedFolder(found.parent if is_file else found), found.name if is_file else None
    except CheckpointError as error:
        if found.exists():
            raise
        raise FolderVanished from error
