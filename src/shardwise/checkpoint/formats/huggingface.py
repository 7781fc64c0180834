"""Writing a Hugging Face folder: every tensor whole in one safetensors file, and an index where there are several.

1. Tensors are put into files in order, up to the requested size; files are distributed over the ranks.
2. Tensors move to the rank that writes them in batches, as many in one exchange as the buffer limit allows.
3. The folder is written next to its final place and renamed, as any checkpoint is.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import folders
from shardwise.checkpoint.assign import TensorToSave, pack_into_files
from shardwise.checkpoint.background import wait_for_running_save
from shardwise.checkpoint.describe import agree_on_state, gather_or_raise, run_or_describe_error
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.safetensors_header import CODES, header_bytes
from shardwise.checkpoint.state import Leaf, flatten_state, make_leaf, torch_dtype
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES
from shardwise.checkpoint.tree import Json
from shardwise.checkpoint.writing import Sink, iterate_host_bytes
from shardwise.comm import Comm
from shardwise.tensor import redistribute_many, wrap
from shardwise.tensor.comms import resolve_comm
from shardwise.tensor.move import single_rank_layout

SAVE_HF_LABEL = "save_hf"
HF_MAX_FILE_BYTES = 5_000_000_000


def save_hf(
    state: Any,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = HF_MAX_FILE_BYTES,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    comm: Any = None,
) -> None:
    """Save tensors as a Hugging Face folder: `model.safetensors`, or numbered files and an index. All ranks call it.

    Entries that are not tensors are refused: the format cannot store them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_hf({"w": torch.ones(4), "b": torch.ones(2)}, f"{folder}/model", max_file_bytes=16)
    ...     sorted(os.listdir(f"{folder}/model"))[:2]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    comm = resolve_comm(comm)
    wait_for_running_save(comm)
    found, problem = run_or_describe_error(lambda: _prepare_save_hf(state, path, comm, max_file_bytes))
    target, leaves = found or (Path(), [])
    _, tensors, everyone = agree_on_state(comm, None, leaves, secrets.token_hex(8), problem, SAVE_HF_LABEL)
    token = everyone[0]
    folder = folders.temporary_folder(target, folders.SAVING, token)
    files = _plan_hf_files(tensors, max_file_bytes)
    held = {leaf.name: leaf for leaf in leaves}
    try:
        for number, (name, chosen) in enumerate(files.items()):
            owner = comm.ranks[number % comm.world_size]
            _write_hf_file(folder / name, [(t, held.get(t.name)) for t in chosen], owner, comm, max_buffer_bytes)
        first = comm.rank == comm.ranks[0]
        _, problem = run_or_describe_error(lambda: _commit_hf(target, token, files)) if first else (None, None)
        gather_or_raise(comm, None, problem, SAVE_HF_LABEL)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _prepare_save_hf(
    state: Any, path: str | os.PathLike[str], comm: Comm, max_file_bytes: int
) -> tuple[Path, list[Leaf]]:
    target, flat = folders.absolute_path(path), flatten_state(state)
    if flat.values:
        raise CheckpointError(f"{next(iter(flat.values))} is not a tensor; a Hugging Face folder stores only tensors")
    if max_file_bytes < 1:
        raise CheckpointError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
    leaves = [make_leaf(name, tensor, comm) for name, tensor in flat.tensors.items()]
    for leaf in leaves:
        if leaf.dtype.torch_name not in CODES:
            raise CheckpointError(f"{leaf.name}: safetensors has no {leaf.dtype}; convert it, or use save()")
    if comm.rank == comm.ranks[0]:
        target.parent.mkdir(parents=True, exist_ok=True)
        folders.recover_commit(target)
        folders.check_target(target)
    return target, leaves


def _plan_hf_files(tensors: Sequence[TensorToSave], max_file_bytes: int) -> dict[str, list[TensorToSave]]:
    """The tensors of each file; within a file the widest elements come first, so that all are aligned."""
    sizes = [(t.dtype.itemsize, t.layout.numel * t.dtype.itemsize) for t in tensors]
    groups = [[tensors[i] for i in chosen] for chosen in pack_into_files(sizes, max_file_bytes, widest_first=False)]
    if len(groups) <= 1:
        names = [folders.HF_SINGLE_NAME]
    else:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    ordered = [sorted(group, key=lambda t: -t.dtype.itemsize) for group in groups or [[]]]
    return dict(zip(names, ordered, strict=True))


def _write_hf_file(
    path: Path, tensors: Sequence[tuple[TensorToSave, Leaf | None]], owner: int, comm: Comm, max_buffer_bytes: int
) -> None:
    """Bring the tensors of one file to its owner and write it; a failure there is raised on all ranks."""
    sink, problem = (
        run_or_describe_error(lambda: _open_hf_file(path, [t for t, _ in tensors]))
        if comm.rank == owner
        else (None, None)
    )
    for batch in _split_into_batches(tensors, max_buffer_bytes):
        whole = _gather_on_owner(batch, owner, comm, max_buffer_bytes)
        if sink is not None and problem is None:
            _, problem = run_or_describe_error(partial(_append_tensors, sink, whole))
    if sink is not None:
        _, closed = run_or_describe_error(lambda: sink.__exit__(None, None, None))
        problem = problem or closed
    gather_or_raise(comm, None, problem, SAVE_HF_LABEL)


def _open_hf_file(path: Path, tensors: Sequence[TensorToSave]) -> Sink:
    path.parent.mkdir(exist_ok=True)
    entries = {
        t.name: (CODES[t.dtype.torch_name], list(t.layout.shape), t.layout.numel * t.dtype.itemsize) for t in tensors
    }
    sink = Sink(path)
    sink.write(memoryview(header_bytes(entries)))
    return sink


def _append_tensors(sink: Sink, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        for data in iterate_host_bytes(tensor):
            sink.write(data)


def _split_into_batches(
    tensors: Sequence[tuple[TensorToSave, Leaf | None]], max_bytes: int
) -> Iterator[list[tuple[TensorToSave, Leaf | None]]]:
    batch: list[tuple[TensorToSave, Leaf | None]] = []
    size = 0
    for tensor, leaf in tensors:
        own = tensor.layout.numel * tensor.dtype.itemsize
        if batch and size + own > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append((tensor, leaf))
        size += own
    if batch:
        yield batch


def _gather_on_owner(
    batch: Sequence[tuple[TensorToSave, Leaf | None]], owner: int, comm: Comm, max_buffer_bytes: int
) -> list[Tensor]:
    """The whole tensors on the owner, nothing elsewhere."""
    sources = [
        wrap(t.layout, leaf.locals if leaf is not None else (), comm, dtype=torch_dtype(t.dtype)) for t, leaf in batch
    ]
    targets = [single_rank_layout(t.layout.shape, owner) for t, _ in batch]
    with torch.no_grad():
        moved = redistribute_many(sources, targets, max_buffer_bytes=max_buffer_bytes)
    return [tensor.local_parts[0] for tensor in moved] if comm.rank == owner else []


def _commit_hf(target: Path, token: str, files: dict[str, list[TensorToSave]]) -> None:
    folder = folders.temporary_folder(target, folders.SAVING, token)
    if len(files) > 1:
        total = sum(t.layout.numel * t.dtype.itemsize for group in files.values() for t in group)
        weight_map = {t.name: name for name, group in files.items() for t in group}
        index: Json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        folders.write_synced(folder / folders.HF_INDEX_NAME, json.dumps(index, indent=2).encode())
    folders.commit_checkpoint(target, token)
