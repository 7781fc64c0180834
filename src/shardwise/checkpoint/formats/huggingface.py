"""Writing a Hugging Face folder: every tensor whole in one safetensors file, and an index where there are several.

1. Tensors are put into files in order, up to the size asked for; files are dealt out to the ranks.
2. Tensors move to the rank that writes them in batches, as many in one exchange as the buffer limit allows.
3. The folder is written beside its place and renamed, as any checkpoint is.
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
from shardwise.checkpoint.background import finish_running
from shardwise.checkpoint.describe import Described, agreed, attempt, gathered
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.formats.safetensors_header import CODES, header_bytes
from shardwise.checkpoint.state import Leaf, flatten, leaf_of, torch_dtype
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES
from shardwise.checkpoint.tree import Json
from shardwise.checkpoint.writing import Sink, host_bytes, packed
from shardwise.comm import Comm
from shardwise.tensor import redistribute_many, wrap
from shardwise.tensor.comms import resolve_comm
from shardwise.tensor.move import single_rank_layout

LABEL = "save_hf"
MAX_FILE_BYTES = 5_000_000_000


def save_hf(
    state: Any,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    comm: Any = None,
) -> None:
    """Save tensors as a Hugging Face folder: `model.safetensors`, or numbered files and an index. All ranks call it.

    Entries that are no tensors are refused: the format has no place for them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_hf({"w": torch.ones(4), "b": torch.ones(2)}, f"{folder}/model", max_file_bytes=16)
    ...     sorted(os.listdir(f"{folder}/model"))[:2]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    comm = resolve_comm(comm)
    finish_running(comm)
    found, problem = attempt(lambda: _look(state, path, comm, max_file_bytes))
    target, leaves = found or (Path(), [])
    _, tensors, everyone = agreed(comm, None, leaves, secrets.token_hex(8), problem, LABEL)
    token = everyone[0]
    folder = folders.sibling(target, folders.SAVING, token)
    files = _files(tensors, max_file_bytes)
    held = {leaf.name: leaf for leaf in leaves}
    try:
        for number, (name, chosen) in enumerate(files.items()):
            owner = comm.ranks[number % comm.world_size]
            _write(folder / name, [(t, held.get(t.name)) for t in chosen], owner, comm, max_buffer_bytes)
        first = comm.rank == comm.ranks[0]
        _, problem = attempt(lambda: _commit(target, token, files)) if first else (None, None)
        gathered(comm, None, problem, LABEL)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _look(state: Any, path: str | os.PathLike[str], comm: Comm, max_file_bytes: int) -> tuple[Path, list[Leaf]]:
    target, flat = folders.absolute(path), flatten(state)
    if flat.values:
        raise CheckpointError(f"{next(iter(flat.values))} is no tensor; a Hugging Face folder holds tensors only")
    if max_file_bytes < 1:
        raise CheckpointError(f"max_file_bytes is at least 1, got {max_file_bytes}")
    leaves = [leaf_of(name, tensor, comm) for name, tensor in flat.tensors.items()]
    for leaf in leaves:
        if leaf.dtype.torch_name not in CODES:
            raise CheckpointError(f"{leaf.name}: safetensors has no {leaf.dtype}; convert it, or use save()")
    if comm.rank == comm.ranks[0]:
        target.parent.mkdir(parents=True, exist_ok=True)
        folders.recover(target)
        folders.check_target(target)
    return target, leaves


def _files(tensors: Sequence[Described], max_file_bytes: int) -> dict[str, list[Described]]:
    """The tensors of each file; within a file the widest elements come first, so that all are aligned."""
    sizes = [(t.dtype.itemsize, t.layout.numel * t.dtype.itemsize) for t in tensors]
    groups = [[tensors[i] for i in chosen] for chosen in packed(sizes, max_file_bytes, widest_first=False)]
    if len(groups) <= 1:
        names = [folders.HF_SINGLE_NAME]
    else:
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    ordered = [sorted(group, key=lambda t: -t.dtype.itemsize) for group in groups or [[]]]
    return dict(zip(names, ordered, strict=True))


def _write(
    path: Path, tensors: Sequence[tuple[Described, Leaf | None]], owner: int, comm: Comm, max_buffer_bytes: int
) -> None:
    """Bring the tensors of one file to its owner and write it; a failure there is raised on all ranks."""
    sink, problem = attempt(lambda: _opened(path, [t for t, _ in tensors])) if comm.rank == owner else (None, None)
    for batch in _batches(tensors, max_buffer_bytes):
        whole = _brought(batch, owner, comm, max_buffer_bytes)
        if sink is not None and problem is None:
            _, problem = attempt(partial(_append, sink, whole))
    if sink is not None:
        _, closed = attempt(lambda: sink.__exit__(None, None, None))
        problem = problem or closed
    gathered(comm, None, problem, LABEL)


def _opened(path: Path, tensors: Sequence[Described]) -> Sink:
    path.parent.mkdir(exist_ok=True)
    entries = {
        t.name: (CODES[t.dtype.torch_name], list(t.layout.shape), t.layout.numel * t.dtype.itemsize) for t in tensors
    }
    sink = Sink(path)
    sink.write(memoryview(header_bytes(entries)))
    return sink


def _append(sink: Sink, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        for data in host_bytes(tensor):
            sink.write(data)


def _batches(
    tensors: Sequence[tuple[Described, Leaf | None]], max_bytes: int
) -> Iterator[list[tuple[Described, Leaf | None]]]:
    batch: list[tuple[Described, Leaf | None]] = []
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


def _brought(
    batch: Sequence[tuple[Described, Leaf | None]], owner: int, comm: Comm, max_buffer_bytes: int
) -> list[Tensor]:
    """The whole tensors on the owner, nothing elsewhere."""
    sources = [
        wrap(t.layout, leaf.locals if leaf is not None else (), comm, dtype=torch_dtype(t.dtype)) for t, leaf in batch
    ]
    targets = [single_rank_layout(t.layout.shape, owner) for t, _ in batch]
    with torch.no_grad():
        moved = redistribute_many(sources, targets, max_buffer_bytes=max_buffer_bytes)
    return [tensor.local_parts[0] for tensor in moved] if comm.rank == owner else []


def _commit(target: Path, token: str, files: dict[str, list[Described]]) -> None:
    folder = folders.sibling(target, folders.SAVING, token)
    if len(files) > 1:
        total = sum(t.layout.numel * t.dtype.itemsize for group in files.values() for t in group)
        weight_map = {t.name: name for name, group in files.items() for t in group}
        index: Json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        folders.write_synced(folder / folders.HF_INDEX_NAME, json.dumps(index, indent=2).encode())
    folders.commit(target, token)
