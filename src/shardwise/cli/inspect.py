"""`shardwise inspect`: what is in a checkpoint, how it is spread, and whether it is intact.

The balance says how evenly it is spread: bytes that each rank had and wrote, and what is in each file.

What do the commands on checkpoints have in common? Opening with errors that help, and names.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise._lazy import collector_paused
from shardwise._progress import show_progress
from shardwise.checkpoint.commit import find_checkpoint, find_place, open_folder
from shardwise.checkpoint.files import CheckpointError, PinnedFolder
from shardwise.checkpoint.formats import FORMATS, describe_expected, detect_format
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.remote import RemotePath
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES, Store, find_index, open_store
from shardwise.checkpoint.verify import (
    CheckpointBalance,
    Problem,
    StoredLayouts,
    count_checked_bytes,
    find_problems,
    measure_balance,
)
from shardwise.cli.output import NO, AsJson, escape_for_terminal, format_count, print_json, table_lines
from shardwise.transfer.transfer import format_bytes
from shardwise.view import Line, line, print_lines

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


def format_spread(counts: Mapping[int, int]) -> str:
    """The range and the mean of the bytes of ranks.

    >>> format_spread({0: 90, 1: 110})
    '2 ranks, 90 B to 110 B each, mean 100 B'
    """
    low, high, mean = min(counts.values()), max(counts.values()), sum(counts.values()) / len(counts)
    who = format_count(len(counts), "rank")
    if low == high:
        return f"{who}, {format_bytes(low)}{' each' * (len(counts) != 1)}"
    return f"{who}, {format_bytes(low)} to {format_bytes(high)} each, mean {format_bytes(mean)}"


SHOWN_TENSORS, SHOWN_ROWS, SHOWN_PROBLEMS = 50, 16, 40
LONGEST_CELL, LONGEST_NAME = 60, 120


class Order(StrEnum):
    """How the table of tensors is sorted."""

    stored = "stored"
    name = "name"
    bytes = "bytes"


PathText = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint: its folder, or a .safetensors or .pt file.")
]
Sort = Annotated[Order, typer.Option(help="The order of the tensors: as stored, by name, or the largest first.")]
Limit = Annotated[int | None, typer.Option(min=0, metavar="N", help="Show at most N tensors; 0: all.")]
Verify = Annotated[bool, typer.Option("--verify", help="Read every byte and check it against its checksum.")]


def inspect(
    path: PathText,
    name: NamePatterns = None,
    sort: Sort = Order.stored,
    limit: Limit = None,
    verify: Verify = False,
    as_json: AsJson = False,
) -> None:
    """List the tensors and values of a checkpoint, and what each rank and file holds.

    It may be a folder of shardwise, of torch.distributed.checkpoint or of Hugging Face.
    Exit status 0: fine; 1: --verify found something broken; 2: there is no checkpoint to look into.

    \b
    Examples:
      shardwise inspect runs/step-1000
      shardwise inspect runs/step-1000 --name "*.bias" --sort bytes --limit 10
      shardwise inspect runs/step-1000 --verify
    """
    kind = find_format_title(path)
    try:
        with collector_paused():
            found = open_checkpoint(path)
    except CheckpointError as error:
        if not verify:
            raise
        report_unreadable(path, kind, str(error), as_json)
        raise typer.Exit(NO) from error
    entries = select_entries(found, name or [], sort)
    problems = verify_with_progress(found) if verify else None
    if as_json:
        print_json(checkpoint_to_json(found, entries[: limit or None], problems))
    else:
        print_lines(
            checkpoint_to_lines(found, entries, SHOWN_TENSORS if limit is None else limit, problems), sys.stdout
        )
    if problems:
        raise typer.Exit(NO)


def report_unreadable(path: str, kind: str, text: str, as_json: bool) -> None:
    """Say that a checkpoint is so broken that nothing in it can be listed."""
    if as_json:
        problems = [{"file": None, "tensor": None, "problem": text}]
        verdict = {"ok": False, "checked_bytes": 0, "problems": problems}
        print_json({"path": path, "format": kind, "verified": verdict})
    else:
        print_lines([line("broken: 1 problem"), line(f"  {text}")], sys.stdout)


def select_entries(found: OpenedCheckpoint, patterns: Sequence[str], order: Order) -> list[TensorEntry]:
    """The tensors whose names match, in the requested order."""
    tensors = found.store.index.tensors
    names = filter_names(tensors, patterns)
    if patterns and not names:
        raise CheckpointError(f"{found.path}: no tensor is called {' or '.join(patterns)}; it has {list(tensors)[:4]}")
    keys: dict[Order, Callable[[TensorEntry], Any]] = {
        Order.stored: lambda entry: 0,
        Order.name: lambda entry: entry.name,
        Order.bytes: lambda entry: -entry.nbytes,
    }
    return sorted((tensors[n] for n in names), key=keys[order])


def verify_with_progress(found: OpenedCheckpoint) -> list[Problem]:
    """Everything that is wrong, found with a progress bar."""
    with show_progress(None, "verifying", count_checked_bytes(found.store)) as meter:
        return list(find_problems(found.store, meter.advance))


def checkpoint_to_json(
    found: OpenedCheckpoint, entries: Sequence[TensorEntry], problems: Sequence[Problem] | None
) -> dict[str, Any]:
    """All that is known, as plain data."""
    index, layouts = found.store.index, StoredLayouts()
    balance = measure_balance(found.store, layouts)
    tensors = [
        {
            "name": e.name,
            "dtype": e.dtype.name,
            "shape": list(e.shape),
            "layout": layouts.notation(e),
            "bytes": e.nbytes,
            "files": sorted({index.files[n].name for n in e.files}),
        }
        for e in entries
    ]
    return {
        "path": found.path,
        "format": found.format,
        "count": len(index.tensors),
        "bytes": sum(e.nbytes for e in index.tensors.values()),
        "tensors": tensors,
        "values": dict(index.values),
        "opaque": list(index.opaque),
        "ranks": [
            {"rank": r, "held_bytes": balance.held.get(r), "written_bytes": balance.written.get(r)}
            for r in balance.ranks
        ],
        "files": [{"name": f.name, "bytes": f.bytes} for f in index.files],
        "verified": None if problems is None else _verification_to_json(found, problems),
    }


def _verification_to_json(found: OpenedCheckpoint, problems: Sequence[Problem]) -> dict[str, Any]:
    return {
        "ok": not problems,
        "checked_bytes": count_checked_bytes(found.store),
        "problems": [{"file": p.file, "tensor": p.tensor, "problem": p.text} for p in problems],
    }


def checkpoint_to_lines(
    found: OpenedCheckpoint, entries: Sequence[TensorEntry], limit: int, problems: Sequence[Problem] | None
) -> list[Line]:
    """All that is known, as text."""
    layouts = StoredLayouts()
    balance = measure_balance(found.store, layouts)
    lines = [*_summary(found, balance), line(), *_tensor_lines(entries, layouts, limit)]
    lines += [*_rank_lines(balance), *_file_lines(found, balance), *_value_lines(found)]
    return lines if problems is None else [*lines, line(), *_problem_lines(found, problems)]


def _summary(found: OpenedCheckpoint, balance: CheckpointBalance) -> list[Line]:
    index = found.store.index
    total = format_bytes(sum(e.nbytes for e in index.tensors.values()))
    rows = [
        ("checkpoint", found.path),
        ("format", found.format),
        ("tensors", f"{len(index.tensors)}, {total} in {format_count(len(index.files), 'file')}"),
        ("values", str(sum(1 for _ in index.values)) + (f", {len(index.opaque)} unreadable" if index.opaque else "")),
    ]
    rows += [("held", format_spread(balance.held))] if balance.held else []
    rows += [("written", format_spread(balance.written))] if balance.written else []
    return [line(f"{name:<10}  {value}") for name, value in rows]


def _tensor_lines(entries: Sequence[TensorEntry], layouts: StoredLayouts, limit: int) -> list[Line]:
    shown = entries[: limit or None]
    rows = [
        (
            truncate_text(e.name, LONGEST_NAME),
            e.dtype.name,
            str(e.shape),
            truncate_text(layouts.notation(e) or "whole"),
            format_bytes(e.nbytes),
        )
        for e in shown
    ]
    hidden = len(entries) - len(shown)
    more = [line(f"and {hidden} more tensors; --limit 0 shows all")] if hidden else []
    return [*table_lines(("tensor", "dtype", "shape", "layout", "bytes"), rows, left=4), *more] if rows else []


def truncate_text(text: str, longest: int = LONGEST_CELL) -> str:
    """A text short enough for a column."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _limit_rows(rows: Sequence[tuple[str, ...]], what: str) -> tuple[Sequence[tuple[str, ...]], list[Line]]:
    """The first rows, and a line that says how many were left out."""
    hidden = len(rows) - SHOWN_ROWS
    return rows[:SHOWN_ROWS], [line(f"and {hidden} more {what}; --json lists all")] if hidden > 0 else []


def _rank_lines(balance: CheckpointBalance) -> list[Line]:
    both = [(balance.held.get(r), balance.written.get(r)) for r in balance.ranks]
    texts = [tuple("-" if n is None else format_bytes(n) for n in pair) for pair in both]
    rows, more = _limit_rows([(str(r), *text) for r, text in zip(balance.ranks, texts, strict=True)], "ranks")
    return [line(), *table_lines(("rank", "held", "written"), rows, left=0), *more] if rows else []


def _file_lines(found: OpenedCheckpoint, balance: CheckpointBalance) -> list[Line]:
    files = found.store.index.files
    counts = zip(files, balance.tensors_by_file, strict=True)
    rows, more = _limit_rows([(f.name, format_bytes(f.bytes), str(count)) for f, count in counts], "files")
    return [line(), *table_lines(("file", "bytes", "tensors"), rows), *more] if rows else []


def _value_lines(found: OpenedCheckpoint) -> list[Line]:
    index = found.store.index
    values = [(name, truncate_text(repr(value))) for name, value in islice(index.values, SHOWN_ROWS)]
    values += [(name, "(not plain data: not read)") for name in index.opaque[: SHOWN_ROWS - len(values)]]
    hidden = sum(1 for _ in index.values) + len(index.opaque) - len(values)
    rows, more = values, [line(f"and {hidden} more values; --json lists all")] if hidden else []
    return [line(), *table_lines(("value", ""), rows, left=2), *more] if rows else []


def _problem_lines(found: OpenedCheckpoint, problems: Sequence[Problem]) -> list[Line]:
    checked = count_checked_bytes(found.store)
    if not problems:
        rest = sum(e.nbytes for e in found.store.index.tensors.values()) - checked
        what = f"{format_bytes(checked)} have the right checksums" if checked else "it stores no checksums of its bytes"
        also = f", {format_bytes(rest)} have none" if checked and rest else ""
        return [line(f"verified: lengths, headers and places are right; {what}{also}")]
    hidden = len(problems) - SHOWN_PROBLEMS
    more = [f"and {hidden} more; --json lists all"] if hidden > 0 else []
    shown = [f"  {escape_for_terminal(str(problem))}" for problem in problems[:SHOWN_PROBLEMS]]
    return [line(text) for text in (f"broken: {format_count(len(problems), 'problem')}", *shown, *more)]
