"""Looking into a checkpoint from one process: names, shapes, layouts, and any slice of any tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise._text import draw_html
from shardwise.checkpoint.convert import NameMap, rename_index
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.index import (
    Scalar,
    TensorEntry,
    block_count,
    build_state,
    stored_layout,
    stored_names,
    stored_values,
)
from shardwise.checkpoint.state import copy_target, torch_dtype
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES, Store, copy_reads, open_store, plan_reads
from shardwise.geometry import Box, Layout, shorten_layout
from shardwise.transfer.transfer import format_bytes

SHOWN_TENSORS = 40


class StoredTensor:
    """A tensor of a checkpoint; `stored[...]` reads a slice, and only that.

    >>> import tempfile, shardwise
    >>> path = f"{tempfile.mkdtemp()}/ckpt"
    >>> shardwise.save({"w": torch.arange(6.0).reshape(3, 2)}, path)
    >>> with shardwise.open(path) as checkpoint:
    ...     checkpoint["w"].shape, checkpoint["w"][1:].tolist()
    (torch.Size([3, 2]), [[2.0, 3.0], [4.0, 5.0]])
    """

    def __init__(self, store: Store, entry: TensorEntry, verify: bool) -> None:
        self._store, self._entry, self._verify = store, entry, verify

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self._entry.dtype)

    @property
    def nbytes(self) -> int:
        return self._entry.nbytes

    @property
    def layout(self) -> Layout:
        """The layout it was saved with; a tensor of a Hugging Face folder is whole on rank 0."""
        return stored_layout(self._entry)

    @property
    def boxes(self) -> list[tuple[Box, str]]:
        """The stored boxes, each with the name of its file."""
        files = self._store.index.files
        return [(self._entry.cut.box(i), files[n].name) for i, n in enumerate(self._entry.files)]

    def __getitem__(self, index: Any) -> Tensor:
        box, after = index_to_box(index, self._entry.shape)
        return self.read(box)[after]

    def read(self, box: Box | None = None) -> Tensor:
        """A box of the tensor, or all of it, in fresh memory."""
        box = box or Box.whole(self._entry.shape)
        target = torch.empty(box.sizes, dtype=self.dtype, device="cpu")
        zeros = np.zeros((1, box.ndim), np.int64)
        offsets, sizes = (np.array([v], np.int64).reshape(1, box.ndim) for v in (box.offsets, box.sizes))
        reads = plan_reads(self._entry.cut, offsets, sizes, np.zeros(1, np.int64), zeros)
        try:
            for read in reads if self._verify else ():
                blocks = self._entry.touched_blocks(read.cell, read.there, self._store.index.block_bytes)
                self._store.verify(self._entry, read.cell, *blocks)
            copy_reads(self._store, [(self._entry, reads, [copy_target(target, self._entry.dtype)])])
            if self._store.pinned.has_changed_files():
                raise CheckpointError(f"{self._store.folder}: its files have changed while they were read")
        except CheckpointError as error:
            if not self._store.is_stale():
                raise
            raise CheckpointError(f"{error}; a save has replaced the checkpoint since: open it again") from error
        return target

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, {self._entry.dtype}{list(self._entry.shape)})"


def index_to_box(index: Any, shape: Sequence[int]) -> tuple[Box, tuple[Any, ...]]:
    """The box that an index of ints and slices covers, and the index to apply to what was read.

    >>> index_to_box((slice(1, 9, 2), ..., 3), (10, 4, 5))
    (Box(offsets=(1, 0, 3), sizes=(8, 4, 1)), (slice(None, None, 2), slice(None, None, 1), 0))
    """
    given = index if isinstance(index, tuple) else (index,)
    if sum(i is ... for i in given) > 1 or len([i for i in given if i is not ...]) > len(shape):
        raise IndexError(f"{index!r} has more entries than a tensor of shape {tuple(shape)} has dims")
    at = next((i for i, entry in enumerate(given) if entry is ...), len(given))
    fill = len(shape) - len(given) + (at < len(given))
    entries = (*given[:at], *([slice(None)] * fill), *given[at + 1 :])
    ranges = [_range(entry, length, index) for entry, length in zip(entries, shape, strict=True)]
    box = Box(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges))
    return box, tuple(r[2] for r in ranges)


def _range(entry: Any, length: int, index: Any) -> tuple[int, int, Any]:
    if isinstance(entry, slice):
        start, stop, step = entry.indices(length)
        if step < 1:
            raise IndexError(f"{index!r}: steps must be 1 or more")
        return start, max(0, stop - start), slice(None, None, step)
    if not isinstance(entry, int) or isinstance(entry, bool):
        raise IndexError(f"{index!r}: a stored tensor is indexed by ints, slices and ..., got {type(entry).__name__}")
    if not -length <= entry < length:
        raise IndexError(f"{index!r}: {entry} is out of range for a dim of length {length}")
    return entry % length, 1, 0


class Checkpoint:
    """An opened checkpoint; only what is requested is read.

    >>> import tempfile, shardwise
    >>> path = f"{tempfile.mkdtemp()}/ckpt"
    >>> shardwise.save({"w": torch.ones(3), "step": 7}, path)
    >>> with shardwise.open(path) as checkpoint:
    ...     checkpoint.names(), checkpoint.values()
    (['w'], {'step': 7})
    """

    def __init__(self, store: Store, verify: bool = True) -> None:
        self._store, self._verify = store, verify
        self._names = stored_names(store.index)

    def _repr_html_(self) -> str:
        """The tensors as a table for notebooks; only the index is read."""
        shown = [self[name] for name in self.names()[:SHOWN_TENSORS]]
        rows = [(t.name, shorten_layout(t.layout, t._entry.dtype.name), format_bytes(t.nbytes)) for t in shown]
        count = len(self.names())
        title = f"{self._store.folder}: {count} tensors" + (f", the first {len(rows)}" if count > len(rows) else "")
        return draw_html("table_html", title, ("tensor", "layout", "bytes"), rows)

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._store.index.tensors)

    def values(self) -> dict[str, Scalar]:
        """Everything that is not a tensor, by name."""
        return stored_values(self._store.index)

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._names:
            raise CheckpointError(f"{self._store.folder}: no tensor {name!r}; it has {self.names()[:8]}")
        return StoredTensor(self._store, self._store.index.tensors[self._names[name]], self._verify)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._store.index.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def files(self) -> dict[str, int]:
        """The names and lengths of all files."""
        return {file.name: file.bytes for file in self._store.index.files}

    def state(self) -> Any:
        """The nested state as it was saved, every tensor whole."""
        return build_state(self._store.index.tree, lambda name: self[name].read())

    def verify(self) -> None:
        """Check every byte against its checksum; raise for the first that differs."""
        index = self._store.index
        for number in range(len(index.files)):
            self._store.verify_header(number)
        for entry in index.tensors.values():
            for box in range(len(entry.cut)):
                self._store.verify(entry, box, 0, block_count(entry.run_bytes(box), index.block_bytes))

    def close(self) -> None:
        """Release the mapped files."""
        self._store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self._store.folder)!r}, {len(self)} tensors)"


def open(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    names: NameMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
) -> Checkpoint:
    """Open a checkpoint (or a Hugging Face folder, or a safetensors file) and read any slice of it from one process.

    With `names`, a `NameMap` or its TOML file, its tensors are renamed, split, fused and transposed by patterns.

    >>> import tempfile
    >>> from shardwise import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.arange(6).reshape(2, 3)}, f"{folder}/ckpt")
    ...     open(f"{folder}/ckpt")["w"][:, 1].tolist()
    [1, 4]
    """
    renaming = None if names is None else NameMap.of(names)
    store = open_store(path, max_buffer_bytes)
    if renaming is not None:
        store.index = rename_index(store.index, renaming)
    return Checkpoint(store, verify)
