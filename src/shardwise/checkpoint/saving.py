"""Saving a nested state from all ranks at once.

1. The ranks agree on what is saved, in one small exchange, before a file is touched.
2. Each rank writes its share into a temporary folder, and syncs it.
3. The places and checksums of all shares make the index, which the first rank writes last; then it puts the folder in
   the checkpoint's place. If any rank fails before that, all raise and the previous checkpoint is as it was.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor

from shardwise.checkpoint import folders
from shardwise.checkpoint.assign import MAX_FILE_BYTES, BoxToWrite, CutPlan, TensorToSave, assign_boxes, pack_into_files
from shardwise.checkpoint.background import Saving, register_save, wait_for_running_save
from shardwise.checkpoint.describe import agree_on_state, gather_or_raise, run_or_describe_error
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.folders import remove_in_background, wait_for_removals
from shardwise.checkpoint.index import INDEX_NAME, FileEntry, Index, TensorEntry
from shardwise.checkpoint.state import Leaf, flatten_state, make_leaf, reduce_pending, reduced_layout
from shardwise.checkpoint.tree import Json
from shardwise.checkpoint.writing import FilePart, write_file
from shardwise.comm import Comm
from shardwise.tensor.comms import resolve_comm
from shardwise.tensor.execute import view_box

SAVE_LABEL = "save"


@dataclass(frozen=True, eq=False)
class SavePlan:
    """All that is decided before the first byte is written."""

    path: Path
    token: str
    tree: Json
    tensors: Sequence[TensorToSave]
    cuts: Sequence[CutPlan]
    parts: Sequence[BoxToWrite]
    sources: Sequence[Tensor]

    @property
    def folder(self) -> Path:
        return folders.temporary_folder(self.path, folders.SAVING, self.token)


@overload
def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    comm: Any = None,
    async_op: Literal[False] = False,
    max_file_bytes: int = ...,
) -> None: ...


@overload
def save(
    state: Any, path: str | os.PathLike[str], *, comm: Any = None, async_op: Literal[True], max_file_bytes: int = ...
) -> Saving: ...


@overload
def save(
    state: Any, path: str | os.PathLike[str], *, comm: Any = None, async_op: bool, max_file_bytes: int = ...
) -> Saving | None: ...


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    comm: Any = None,
    async_op: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Saving | None:
    """Save a nested state of tensors, numbers and strings; all ranks of the comm call it.

    The folder `path` is replaced at once when everything is on disk. With `async_op`, the tensors are copied to host
    memory and written in the background; `wait()` of what is returned, or the next save or load, waits for it.

    >>> import tempfile, torch, shardwise
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.arange(4.0), "step": 3}, f"{folder}/ckpt")
    ...     checkpoint = shardwise.open(f"{folder}/ckpt")
    ...     checkpoint.names(), checkpoint["w"][1:3].tolist(), checkpoint.values()
    (['w'], [1.0, 2.0], {'step': 3})
    """
    comm = resolve_comm(comm)
    wait_for_running_save(comm)
    wait_for_removals()
    plan = _plan_save(state, path, comm, max_file_bytes, async_op)
    if not async_op:
        _save_now(plan, comm, max_file_bytes)
        return None
    sources, problem = run_or_describe_error(lambda: [copy_to_host(t) for t in plan.sources])
    gather_or_raise(comm, None, problem, SAVE_LABEL)
    return register_save(
        Saving(
            comm,
            plan.folder,
            write=lambda: write_rank_files(plan, sources, comm.rank, max_file_bytes),
            finish=lambda records: _commit_save(plan, records, shutil.rmtree),
        )
    )


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy.contiguous()


def _plan_save(state: Any, path: str | os.PathLike[str], comm: Comm, max_file_bytes: int, async_op: bool) -> SavePlan:
    def look() -> tuple[Path, Json, list[Leaf]]:
        target = folders.absolute_path(path)
        if max_file_bytes < 1:
            raise CheckpointError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
        if comm.rank == comm.ranks[0]:
            target.parent.mkdir(parents=True, exist_ok=True)
            folders.recover_commit(target)
            folders.check_target(target)
        flat = flatten_state(state)
        return target, flat.tree, [make_leaf(name, t, comm) for name, t in flat.tensors.items()]

    found, problem = run_or_describe_error(look)
    target, tree, leaves = found or (Path(), None, [])
    asked = [str(target), async_op, max_file_bytes, secrets.token_hex(8)]
    tree, tensors, everyone = agree_on_state(comm, tree, leaves, asked, problem, SAVE_LABEL)
    _check_same_save(comm, everyone)
    tensors = [t if t.layout.pending is None else replace(t, layout=reduced_layout(t.layout)) for t in tensors]
    held = reduce_pending(leaves, comm)
    cuts, parts = assign_boxes(tensors, comm.rank)
    sources = [view_box(held[tensors[p.tensor].name][p.holder.slot], p.holder.here) for p in parts]
    return SavePlan(target, everyone[0][3], tree, tensors, cuts, parts, sources)


def _check_same_save(comm: Comm, everyone: Sequence[Json]) -> None:
    for number, what in enumerate(("path", "async_op", "max_file_bytes")):
        for rank, asked in zip(comm.ranks, everyone, strict=True):
            if asked[number] != everyone[0][number]:
                raise CheckpointError(
                    f"save: {what} is {everyone[0][number]!r} on rank {comm.ranks[0]} and {asked[number]!r} on rank "
                    f"{rank}; pass the same on every rank"
                )


def _save_now(plan: SavePlan, comm: Comm, max_file_bytes: int) -> None:
    try:
        record, problem = run_or_describe_error(lambda: write_rank_files(plan, plan.sources, comm.rank, max_file_bytes))
        first = comm.rank == comm.ranks[0]
        records = gather_or_raise(comm, record, problem, SAVE_LABEL, wanted=first)
        _, problem = (
            run_or_describe_error(lambda: _commit_save(plan, records, remove_in_background)) if first else (None, None)
        )
        gather_or_raise(comm, None, problem, SAVE_LABEL)
    except BaseException:
        shutil.rmtree(plan.folder, ignore_errors=True)
        raise


def write_rank_files(plan: SavePlan, sources: Sequence[Tensor], rank: int, max_file_bytes: int) -> Json:
    """Write this rank's boxes; return its files, and for each box where it is."""
    plan.folder.mkdir(exist_ok=True)
    pieces = [_make_file_part(plan, part, values) for part, values in zip(plan.parts, sources, strict=True)]
    files, places = [], []
    for number, chosen in enumerate(pack_into_files([(p.dtype.itemsize, p.nbytes) for p in pieces], max_file_bytes)):
        written = write_file(plan.folder / f"rank{rank:05d}-{number:05d}.safetensors", [pieces[i] for i in chosen])
        files.append([written.name, written.bytes, written.data_start, written.header_sum])
        for i, (begin, sums) in zip(chosen, written.places, strict=True):
            places.append((plan.parts[i].tensor, plan.parts[i].box, number, begin, sums))
    return {"files": files, "places": list(zip(*places, strict=True))}


def _make_file_part(plan: SavePlan, part: BoxToWrite, values: Tensor) -> FilePart:
    tensor, cut = plan.tensors[part.tensor], plan.cuts[part.tensor].cut
    sizes, count = cut.extents[part.box]
    return FilePart(tensor.name + cut.labels[part.box], tensor.dtype, sizes, count * tensor.dtype.itemsize, values)


def _commit_save(plan: SavePlan, records: Sequence[Json], remove: Callable[[Path], object]) -> None:
    index = join_records(plan, records)
    for file in index.files:
        size = (plan.folder / file.name).stat().st_size
        if size != file.bytes:
            raise CheckpointError(f"{file.name}: {file.bytes} bytes were written, {size} are in the folder")
    folders.write_synced(plan.folder / INDEX_NAME, index.to_bytes())
    folders.commit_checkpoint(plan.path, plan.token, remove)


def join_records(plan: SavePlan, records: Sequence[Json]) -> Index:
    """The index of what all ranks wrote."""
    counts = [len(c.cut) for c in plan.cuts]
    columns: list[tuple[list[Any], list[Any], list[Any]]] = [([None] * n, [None] * n, [None] * n) for n in counts]
    files: list[FileEntry] = []
    for record in records:
        for tensor, box, file, begin, sums in zip(*record["places"], strict=True):
            numbers, begins, all_sums = columns[tensor]
            numbers[box], begins[box], all_sums[box] = file + len(files), begin, sums
        files += [FileEntry(*entry) for entry in record["files"]]
    tensors = {
        t.name: TensorEntry(t.name, t.dtype, c.cut, *column)
        for t, c, column in zip(plan.tensors, plan.cuts, columns, strict=True)
    }
    assert all(n is not None for e in tensors.values() for n in e.files), "every box is written by one rank"
    return Index(files, tensors, plan.tree)
