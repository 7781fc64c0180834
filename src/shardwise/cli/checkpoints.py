"""What do the commands on checkpoints have in common? Opening with errors that help, and names."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import PinnedFolder
from shardwise.checkpoint.folders import find_checkpoint
from shardwise.checkpoint.formats.table import FORMATS, describe_expected, detect_format
from shardwise.checkpoint.storage.place import find_place, open_folder
from shardwise.checkpoint.storage.remote_path import RemotePath
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES, Store, find_index, open_store

_SHOWN = 4


@dataclass(frozen=True, eq=False)
class OpenedCheckpoint:
    """A checkpoint that a command looks into."""

    path: str
    store: Store

    @property
    def format(self) -> str:
        """The format in words."""
        return self.store.format_title


def open_checkpoint(path: str) -> OpenedCheckpoint:
    """The checkpoint at a path; an error says what was found there and what was expected."""
    find_format_title(path)
    return OpenedCheckpoint(path, open_store(path))


def find_format_title(path: str) -> str:
    """The format of the checkpoint at a path in words, by the names of its files."""
    whole = find_place(path)
    if isinstance(whole, RemotePath):
        folder, file_name = open_folder(whole, DEFAULT_BUFFER_BYTES)
        with folder:
            known, index_name = find_index(folder, file_name)
        return known.title_of(index_name)
    try:
        place = find_checkpoint(whole)
    except CheckpointError:
        raise CheckpointError(_explain_missing(path, whole)) from None
    if place.is_file():
        accepting = next((known for known in FORMATS if known.accepts_file(place.name)), None)
        if accepting is None:
            raise CheckpointError(_explain_other_file(path, place))
        return accepting.title_of(place.name)
    found = detect_folder(place)
    if found is None:
        raise CheckpointError(_explain_other_folder(path, place))
    return found


def detect_folder(folder: Path) -> str | None:
    """The format of a folder in words, or None if it is not a checkpoint."""
    try:
        with PinnedFolder(folder) as pinned:
            found = detect_format(pinned)
    except CheckpointError:
        return None
    return None if found is None else found[0].title_of(found[1])


def _explain_missing(path: str, whole: Path) -> str:
    if whole.is_dir():
        return f"{path}: an empty folder; expected {describe_expected()}"
    beside = _list_checkpoints(whole.parent)
    near = difflib.get_close_matches(whole.name, beside, n=2, cutoff=0.4)
    hint = f"; near: {', '.join(os.path.join(os.path.dirname(path), name) for name in near)}" if near else ""
    return f"{path}: no such file or folder{hint}; expected {describe_expected()}"


def _explain_other_folder(path: str, place: Path) -> str:
    names = sorted(e.name + ("/" if e.is_dir() else "") for e in place.iterdir())
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    inside = _list_checkpoints(place)
    hint = f"; inside are {', '.join(os.path.join(path, name) for name in inside[:_SHOWN])}" if inside else ""
    listed = f"{', '.join(names[:_SHOWN])}{more}"
    return f"{path}: a folder with {listed}, not a checkpoint{hint}; expected {describe_expected()}"


def _explain_other_file(path: str, place: Path) -> str:
    if detect_folder(place.parent) is not None:
        return f"{path}: a file of a checkpoint; pass its folder, {os.path.dirname(path) or '.'}"
    return f"{path}: a file of {place.stat().st_size} bytes, not a checkpoint; expected {describe_expected()}"


def _list_checkpoints(folder: Path) -> list[str]:
    """The names of the checkpoints in a folder."""
    if not folder.is_dir():
        return []
    return sorted(e.name for e in folder.iterdir() if not e.name.startswith(".") and e.is_dir() and detect_folder(e))


def filter_names(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that fit one of the patterns; all of them where there is no pattern.

    >>> filter_names(["a.weight", "a.bias", "b.bias"], ["a.*", "*.weight"])
    ['a.weight', 'a.bias']
    """
    wanted = list(patterns)
    return [name for name in names if not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)]


def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the shell: the names of tensors that begin so in the first checkpoint on the command line."""
    paths = [*(value for value in ctx.params.values() if isinstance(value, str)), *ctx.args]
    for path in paths:
        try:
            names = open_checkpoint(path).store.index.tensors
        except (CheckpointError, OSError):
            continue
        return [name for name in names if name.startswith(incomplete)]
    return []


NamePatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        metavar="GLOB",
        autocompletion=complete_name,
        help="Only what has this name, * and ? allowed; may be repeated.",
    ),
]
