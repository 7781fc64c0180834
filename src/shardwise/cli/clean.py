"""Commands that remove: `clean`, what killed saves left; `compact`, the versions of a chain that nobody needs.

Neither removes a checkpoint that is still needed.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.checkpoint.commit import find_checkpoint, find_writer, list_leftovers, local_path, recover_commit
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.store import open_store
from shardwise.checkpoint.verify import cleaning, find_checkpoint_problem, remove_leftover
from shardwise.cli.inspect import detect_folder
from shardwise.cli.output import NO, AsJson, escape_for_terminal, format_count, print_json, table_lines
from shardwise.transfer.transfer import format_bytes
from shardwise.view import Line, line, print_lines

_NAME = re.compile(r"\.(?P<checkpoint>.+)\.(?P<kind>saving|replaced|resharding)-[^-]*")
_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


@dataclass(frozen=True)
class Leftover:
    """A folder that was left: whose, how large, how long ago it last changed, and why it is not removed, if so."""

    path: Path
    checkpoint: Path
    kind: str
    bytes: int
    age: float
    kept: str | None


PathText = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint, or a folder that contains several checkpoints.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list; change nothing.")]


def clean(path: PathText, yes: Yes = False, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Remove what killed saves and reshards left next to a checkpoint; an interrupted commit is completed first.

    A complete checkpoint is removed only after the one that stays has been read and verified.
    What a save or a reshard that is running writes is left alone.
    Exit status 0: done; 1: you said no; 2: there is nothing at PATH.

    \b
    Examples:
      shardwise clean runs/step-1000 --dry-run
      shardwise clean runs --yes
    """
    targets = find_targets(path)
    unfinished = [target for target in targets if is_unfinished(target)]
    found = [left for target in targets for left in find_leftovers(target)]
    doomed = [left for left in found if left.kept is None]
    if as_json and (doomed or unfinished) and not (yes or dry_run):
        raise CheckpointError("with --json nobody is asked; pass --yes to remove, or --dry-run to list")
    if not as_json:
        print_lines(leftovers_to_lines(found, unfinished), sys.stdout)
    agreed = not dry_run and (yes or not (doomed or unfinished) or confirm_removal(doomed, unfinished))
    if agreed:
        remove_leftovers(doomed, unfinished)
    if as_json:
        print_json(leftovers_to_json(path, found, unfinished, agreed))
    elif agreed and (doomed or unfinished):
        print(f"removed {_format_folders(doomed)}")
    if not agreed and not dry_run:
        print("nothing was changed", file=sys.stderr)
        raise typer.Exit(NO)


def find_targets(path: str) -> list[Path]:
    """The checkpoints to clean up after: the one of this name, or all whose leftovers are in this folder."""
    whole = local_path(path)
    if whole.is_file():
        raise CheckpointError(f"{path}: a file; pass the folder of a checkpoint, or one that contains checkpoints")
    if whole.is_dir() and detect_folder(whole) is None and not list_leftovers(whole):
        names = {found["checkpoint"] for entry in whole.iterdir() if (found := _NAME.fullmatch(entry.name))}
        return [whole / name for name in sorted(names)]
    if not whole.exists() and not list_leftovers(whole) and not is_unfinished(whole):
        raise CheckpointError(f"{path}: no such file or folder, and nothing left beside it; pass a checkpoint's folder")
    return [whole]


def is_unfinished(target: Path) -> bool:
    """Whether a save was killed between the two renames of its commit."""
    try:
        return find_checkpoint(target) != target
    except CheckpointError:
        return False


def find_leftovers(target: Path) -> list[Leftover]:
    """What was left of saves to a checkpoint; complete ones stay, unless the checkpoint was read whole and is right."""
    found = list_leftovers(target)
    writer = find_writer(target) if found else None
    if writer is not None:
        return [_describe_leftover(folder, target, writer) for folder in found]
    loadable = [folder for folder in found if _is_loadable(folder)]
    reason = _reason_to_keep(target) if loadable else None
    return [_describe_leftover(folder, target, reason if folder in loadable else None) for folder in found]


def _reason_to_keep(target: Path) -> str | None:
    if not _is_loadable(target):
        return f"it is a complete checkpoint and {target.name} is not: rename it, or remove it by hand"
    problem = find_checkpoint_problem(target, progress=None)
    if problem is None:
        return None
    return f"{target.name} is damaged ({problem}): see which of them is right, and remove the other by hand"


def _is_loadable(path: Path) -> bool:
    try:
        open_store(path).close()
    except (CheckpointError, OSError):
        return False
    return True


def _describe_leftover(folder: Path, target: Path, kept: str | None) -> Leftover:
    stats = [stat for entry in (folder, *folder.rglob("*")) if (stat := _stat_or_none(entry)) is not None]
    found = _NAME.fullmatch(folder.name)
    return Leftover(
        path=folder,
        checkpoint=target,
        kind=found["kind"] if found else "unknown",
        bytes=sum(s.st_size for s in stats[1:]),
        age=max(0.0, time.time() - max((s.st_mtime for s in stats), default=0.0)),
        kept=kept,
    )


def _stat_or_none(path: Path) -> os.stat_result | None:
    """A file's state; None for one that a running save has just renamed."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def confirm_removal(doomed: Sequence[Leftover], unfinished: Sequence[Path]) -> bool:
    """Ask on the error stream, so that standard output holds the result only."""
    finish = f"complete {', '.join(p.name for p in unfinished)} and " if unfinished else ""
    try:
        return typer.confirm(f"{finish}remove {_format_folders(doomed)}?", err=True)
    except typer.Abort:
        raise CheckpointError("nothing was changed: there was no answer; pass --yes to remove without asking") from None


def remove_leftovers(doomed: Sequence[Leftover], unfinished: Sequence[Path]) -> None:
    """Complete what was cut short, then remove; saves to these checkpoints wait meanwhile."""
    for target in dict.fromkeys([*unfinished, *(left.checkpoint for left in doomed)]):
        with cleaning(target):
            recover_commit(target)
            for left in doomed:
                if left.checkpoint == target:
                    remove_leftover(left.path)


def _format_folders(found: Sequence[Leftover]) -> str:
    total = format_bytes(sum(left.bytes for left in found))
    return f"{format_count(len(found), 'folder')} of {total}"


def leftovers_to_lines(found: Sequence[Leftover], unfinished: Sequence[Path]) -> list[Line]:
    """What was found, as text."""
    lines = [line(f"{target}: killed while it was committed; this is completed first") for target in unfinished]
    if not found:
        return lines or [line("nothing to clean")]
    rows = [(str(left.path), left.kind, format_age(left.age), format_bytes(left.bytes)) for left in found]
    lines += table_lines(("folder", "kind", "last change", "bytes"), rows, left=2)
    return [*lines, *(line(f"kept: {left.path.name}: {left.kept}") for left in found if left.kept)]


def format_age(seconds: float) -> str:
    """How long ago something was.

    >>> format_age(7300), format_age(61), format_age(0)
    ('2 hours ago', '1 minute ago', '0 seconds ago')
    """
    unit, length = next(((u, n) for u, n in _UNITS if seconds >= n), ("second", 1))
    return f"{format_count(int(seconds // length), unit)} ago"


def leftovers_to_json(path: str, found: Sequence[Leftover], unfinished: Sequence[Path], done: bool) -> dict[str, Any]:
    """What was found and done, as plain data."""
    entries = [
        {
            "path": str(left.path),
            "checkpoint": str(left.checkpoint),
            "kind": left.kind,
            "bytes": left.bytes,
            "seconds_since_change": left.age,
            "kept": left.kept,
            "removed": done and left.kept is None,
        }
        for left in found
    ]
    return {"path": path, "done": done, "unfinished": [str(p) for p in unfinished], "leftovers": entries}


Chain = Annotated[
    str, typer.Argument(metavar="PATH", help="The full checkpoint of a chain; versions are in PATH.deltas.")
]
Version = Annotated[int | None, typer.Option("--version", help="The version; the newest one by default.")]


def compact(path: Chain, version: Version = None, as_json: AsJson = False) -> None:
    """Write a version of a chain (shardwise.sync.publish_files) as the full checkpoint, and remove older versions.

    The old checkpoint is replaced at once. All tensors are in memory meanwhile. The publisher may go on.

    \b
    Examples:
      shardwise compact runs/weights
      shardwise compact s3://bucket/weights --version 1200
    """
    from shardwise.checkpoint.changes import list_versions  # these load torch
    from shardwise.checkpoint.loading import compact as compact_chain

    before = len(list_versions(path))
    step = compact_chain(path, version)
    after = len(list_versions(path))
    if as_json:
        print_json({"path": path, "version": step, "removed": before - after, "versions": after})
        return
    text = f"{path} is version {step}; {before - after} older versions were removed, {after} are there"
    print_lines([line(escape_for_terminal(text))], sys.stdout)
