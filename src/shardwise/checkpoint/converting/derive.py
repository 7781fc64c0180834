"""Tensors made of others without reading a byte: slices, rows of several, stacks, other orders of dims.

The result is described as stored boxes are: each of its boxes is a region of a run of bytes of the source, with its own
strides. So a tensor that is split, fused or transposed is read like any other, a bounded part at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import StoredCut, StridedView, TensorEntry
from shardwise.geometry.mesh import IntArray


def narrow_tensor(entry: TensorEntry, dim: int, start: int, length: int) -> TensorEntry:
    """The indices `start` to `start + length` of one dim."""
    low = np.maximum(entry.cut.offsets[:, dim], start)
    high = np.minimum(entry.cut.offsets[:, dim] + entry.cut.sizes[:, dim], start + length)
    kept = np.flatnonzero(high > low).tolist() if length else []
    skipped = (low - entry.cut.offsets[:, dim]).tolist()
    offsets, sizes = entry.cut.offsets[kept].copy(), entry.cut.sizes[kept].copy()
    offsets[:, dim], sizes[:, dim] = low[kept] - start, (high - low)[kept]

    def view(number: int) -> StridedView:
        found = entry.view_of(number)
        return found._replace(start=found.start + skipped[number] * found.strides[dim])

    shape = (*entry.shape[:dim], length, *entry.shape[dim + 1 :])
    return _derive(entry, shape, offsets, sizes, kept, view)


def permute_tensor(entry: TensorEntry, dims: Sequence[int]) -> TensorEntry:
    """The dims in another order, as `torch.permute` does."""
    order = list(dims)

    def view(number: int) -> StridedView:
        found = entry.view_of(number)
        return found._replace(strides=tuple(found.strides[d] for d in order))

    shape = tuple(entry.shape[d] for d in order)
    rows = range(len(entry.cut))
    return _derive(entry, shape, entry.cut.offsets[:, order], entry.cut.sizes[:, order], rows, view)


def insert_dim(entry: TensorEntry, dim: int) -> TensorEntry:
    """A dim of length 1 in front of a dim, as `torch.unsqueeze` does."""

    def view(number: int) -> StridedView:
        found = entry.view_of(number)
        return found._replace(strides=(*found.strides[:dim], 0, *found.strides[dim:]))

    shape = (*entry.shape[:dim], 1, *entry.shape[dim:])
    offsets, sizes = np.insert(entry.cut.offsets, dim, 0, axis=1), np.insert(entry.cut.sizes, dim, 1, axis=1)
    return _derive(entry, shape, offsets, sizes, range(len(entry.cut)), view)


def select_index(entry: TensorEntry, dim: int, index: int) -> TensorEntry:
    """One index of a dim, without the dim, as `torch.select` does."""
    entry = narrow_tensor(entry, dim, index, 1)

    def view(number: int) -> StridedView:
        found = entry.view_of(number)
        return found._replace(strides=(*found.strides[:dim], *found.strides[dim + 1 :]))

    shape = (*entry.shape[:dim], *entry.shape[dim + 1 :])
    offsets, sizes = np.delete(entry.cut.offsets, dim, axis=1), np.delete(entry.cut.sizes, dim, axis=1)
    return _derive(entry, shape, offsets, sizes, range(len(entry.cut)), view)


def _derive(
    entry: TensorEntry,
    shape: tuple[int, ...],
    offsets: IntArray,
    sizes: IntArray,
    kept: Sequence[int],
    view: Callable[[int], StridedView],
) -> TensorEntry:
    files, begins = [entry.files[i] for i in kept], [entry.begins[i] for i in kept]
    sums, views = [entry.sums[i] for i in kept], [view(i) for i in kept]
    return TensorEntry(entry.name, entry.dtype, StoredCut(shape, offsets, sizes), files, begins, sums, views)


def concatenate_tensors(parts: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """Tensors one after another along a dim, as `torch.cat` does; the name is that of the first."""
    first, length = parts[0], sum(part.shape[dim] for part in parts)
    for part in parts[1:]:
        alike = part.shape[:dim] == first.shape[:dim] and part.shape[dim + 1 :] == first.shape[dim + 1 :]
        if part.dtype != first.dtype or not alike:
            raise CheckpointError(
                f"{first.name} is {first.dtype}{list(first.shape)} and {part.name} is {part.dtype}{list(part.shape)}; "
                f"what is joined along dim {dim} has one dtype and the same lengths of the other dims"
            )
    moved, start = [], 0
    for part in parts:
        shift = np.zeros(len(part.shape), np.int64)
        shift[dim], start = start, start + part.shape[dim]
        moved.append(part.cut.offsets + shift)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    cut = StoredCut(shape, np.concatenate(moved), np.concatenate([part.cut.sizes for part in parts]))
    views = [part.view_of(number) for part in parts for number in range(len(part.cut))]
    files, begins = [n for part in parts for n in part.files], [n for part in parts for n in part.begins]
    return TensorEntry(first.name, first.dtype, cut, files, begins, [s for part in parts for s in part.sums], views)
