"""Are these the same weights? A digest of 128 bits that does not depend on layout, ranks, device or file.

1. An element's bits are words of at most 4 bytes. A tensor is a matrix of words: a row for each index of the leading
   dims and each run of 8,192 words of the last dim, a column for each place in such a run.
2. A lane sums `R(row) * C(column) * word` modulo 2^64, with odd factors from a fixed mixing function of the numbers.
   Two lanes have other factors. Sums of boxes add up to that of the tensor, whatever the boxes are.
3. The digest of a tensor is BLAKE2b of both sums, the shape and the element type; of a state, of names and digests.

One changed word always changes a sum, since its factors are odd; other changes are missed with a chance of about 2^-64.
Negative zero and zero differ, and so do two kinds of NaN: bits are compared. It does not protect against someone who
chooses weights to collide.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shardwise._cache import cached
from shardwise._text import public
from shardwise.checkpoint.state import Leaf, as_array, flatten_state, make_leaf, torch_dtype
from shardwise.comm import Comm, gather_values
from shardwise.comm.current import GroupOrComm, comm_of, resolve_comm
from shardwise.geometry import Box, Layout, find_dtype
from shardwise.geometry.state_map import MappedTensor

_RUN = 8192  # words of the last dim that share a row
_BLOCK_WORDS = 1 << 16
_CHUNK_BYTES = 64 << 20
_VERSION = "shardwise.digest/1"
_LANES = ((0x243F6A8885A308D3, 0x13198A2E03707344), (0xA4093822299F31D0, 0x082EFA98EC4E6C89))
Sums: TypeAlias = tuple[int, int]
Words: TypeAlias = npt.NDArray[Any]


def _mix(numbers: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Odd numbers that look random, of consecutive ones: the finaliser of splitmix64."""
    x = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@cached(size=1)
def _column_factors(run: int) -> tuple[npt.NDArray[np.uint64], ...]:
    return tuple(_mix(np.arange(run, dtype=np.uint64), seeds[1]) for seeds in _LANES)


def sum_box(values: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Sums:
    """Both sums of a box at these offsets of a tensor of this shape."""
    if values.numel() == 0:
        return 0, 0
    if values.ndim == 0:
        values, offsets, shape = values.reshape(1), (0,), (1,)
    per_element = -(-values.dtype.itemsize // 4)
    runs = -(-shape[-1] * per_element // _RUN)
    lead = np.zeros((1,), np.int64)
    for offset, size, length in zip(offsets[:-1], values.shape[:-1], shape[:-1], strict=True):
        lead = (lead[:, None] * length + np.arange(offset, offset + size)).reshape(-1)
    first = offsets[-1] * per_element
    flat = values.detach().reshape(-1, values.shape[-1])
    totals = [0, 0]
    rows = max(1, _CHUNK_BYTES // max(1, flat.shape[1] * values.dtype.itemsize))
    for begin in range(0, len(flat), rows):
        words, base = _words_of(flat[begin : begin + rows]), lead[begin : begin + rows] * runs
        last = first + words.shape[1]
        whole = range(-(-first // _RUN), last // _RUN)  # runs that are in the box from end to end
        cuts = [(first, last)] if not whole else [(first, whole.start * _RUN), (whole.stop * _RUN, last)]
        for low, high in cuts:
            while low < high:
                run = low // _RUN
                end = min(high, (run + 1) * _RUN)
                _add_sums(totals, words[:, low - first : end - first], base + run, low - run * _RUN)
                low = end
        if whole:
            middle = words[:, whole.start * _RUN - first : whole.stop * _RUN - first].reshape(-1, _RUN)
            _add_sums(totals, middle, (base[:, None] + np.asarray(whole)).reshape(-1), 0)
    return totals[0], totals[1]


def _words_of(rows: Tensor) -> Words:
    """The words of rows as unsigned numbers of 1, 2 or 4 bytes."""
    values = as_array(rows.resolve_conj().resolve_neg().cpu().contiguous())
    return values.view(np.uint32) if values.dtype.itemsize > 4 else values


def _add_sums(totals: list[int], words: Words, keys: npt.NDArray[np.int64], column: int) -> None:
    """Add the sums of words whose rows have these numbers and whose first column is `column` of its run."""
    width = words.shape[1]
    step = max(1, _BLOCK_WORDS // width)
    wide = np.empty((min(step, len(words)), width), np.uint64)
    numbers = keys.astype(np.uint64)
    factors = [each[column : column + width] for each in _column_factors(_RUN)]
    row_factors = [_mix(numbers, seeds[0]) for seeds in _LANES]
    sums = [np.empty(len(words), np.uint64) for _ in _LANES]
    for begin in range(0, len(words), step):
        block = words[begin : begin + step]
        np.copyto(wide[: len(block)], block)
        for lane in range(2):
            np.einsum("rc,c->r", wide[: len(block)], factors[lane], out=sums[lane][begin : begin + step])
    for lane in range(2):
        totals[lane] = (totals[lane] + int((sums[lane] * row_factors[lane]).sum(dtype=np.uint64))) % (1 << 64)


def add_sums(parts: Iterable[Sums]) -> Sums:
    """The sums of boxes together."""
    listed = list(parts)
    return sum(part[0] for part in listed) % (1 << 64), sum(part[1] for part in listed) % (1 << 64)


def _finish(sums: Sums, shape: Sequence[int], dtype: str) -> str:
    text = f"{_VERSION} {sums[0]:016x}{sums[1]:016x} {dtype}{list(shape)}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Digest:
    """The digest of a tensor or a state: `hex`, and `by_tensor` for a state. Digests of equal weights are equal.

    >>> import torch, shardwise
    >>> print(shardwise.digest(torch.arange(4)))
    a0612bbdf7f31409aa944f210da5245b
    """

    hex: str
    by_tensor: Mapping[str, str]

    def __str__(self) -> str:
        return self.hex

    def __hash__(self) -> int:
        return hash(self.hex)

    def __eq__(self, other: object) -> bool:
        return self.hex == other.hex if isinstance(other, Digest) else NotImplemented

    def difference(self, other: Digest) -> list[str]:
        """The names of tensors that differ, or that only one of two states has."""
        names = [*self.by_tensor, *(name for name in other.by_tensor if name not in self.by_tensor)]
        return [name for name in names if self.by_tensor.get(name) != other.by_tensor.get(name)]


def digest_of(by_tensor: Mapping[str, str]) -> Digest:
    """The digest of a state from those of its tensors."""
    text = "".join(f"{name}\0{found}\n" for name, found in sorted(by_tensor.items()))
    return Digest(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), dict(by_tensor))


@runtime_checkable
class StoredState(Protocol):
    """An opened checkpoint: tensors by name, of which any box can be read."""

    def names(self) -> list[str]: ...

    def files(self) -> Mapping[str, int]: ...

    def __getitem__(self, name: str) -> Any: ...


@public
def digest(x: object, *, comm: GroupOrComm | None = None) -> Digest:
    """The digest of a tensor, a module, a nested state or an opened checkpoint: equal for equal weights in any layout.

    All ranks that have parts call it and get the same. Replicas count once, and are an error where they differ. Values
    that are not tensors do not count.

    >>> import torch, shardwise
    >>> w = torch.arange(12.0).reshape(4, 3)
    >>> def body(comm):
    ...     return shardwise.digest(shardwise.shard(w, "on x=3: S(0)"))
    >>> shardwise.run_local(body, 3)[0] == shardwise.digest(w)
    True
    """
    if isinstance(x, StoredState):
        return digest_of({name: digest_stored(x, name) for name in x.names()})
    state = x.state_dict(keep_vars=True) if isinstance(x, nn.Module) else x
    tensors = {"": state} if isinstance(state, Tensor) else flatten_state(state).tensors
    known = resolve_comm(comm) if comm is not None else next(filter(None, map(comm_of, tensors.values())), None)
    known = known or resolve_comm()
    leaves = [make_leaf(name, tensor, known) for name, tensor in tensors.items()]
    hexes = digest_leaves(leaves, known)
    return Digest(hexes[""], {}) if isinstance(state, Tensor) else digest_of(hexes)


def digest_leaves(leaves: Sequence[Leaf], comm: Comm) -> dict[str, str]:
    """The digest of each tensor, the same on all ranks, which pass the same tensors."""
    found = {}
    for leaf in leaves:
        if leaf.layout.pending is not None:
            raise ValueError(f"{leaf.name or 'the tensor'} has a pending reduction; redistribute it first, then digest")
        found[leaf.name] = [[f"{lane:x}" for lane in sums] for sums in _sum_pieces(leaf, comm.rank)]
    everyone = gather_values(comm, found, label="digest")
    return {leaf.name: _combine(leaf.name, leaf.layout, leaf.dtype.name, everyone) for leaf in leaves}


def _sum_pieces(leaf: Leaf, rank: int) -> list[Sums]:
    """The sums of each piece that a rank has, in the order of the layout's table."""
    table = leaf.layout.table.take(leaf.layout.rows_of(rank))
    columns = (table.slots.tolist(), table.offsets.tolist(), table.sizes.tolist(), table.local_offsets.tolist())
    sums = []
    for slot, offsets, sizes, at in zip(*columns, strict=True):
        box = tuple(slice(o, o + n) for o, n in zip(at, sizes, strict=True))
        held = leaf.locals[slot][box] if math.prod(sizes) else torch.empty(0, device="cpu")
        sums.append(sum_box(held, offsets, leaf.layout.shape))
    return sums


def _combine(name: str, layout: Layout, dtype: str, everyone: Mapping[int, Any]) -> str:
    """The digest of a tensor from what its ranks say; ranks that hold the same box say the same."""
    table = layout.table
    first: dict[int, tuple[int, Sums]] = {}
    for rank in layout.ranks:
        for row, lanes in zip(layout.rows_of(rank).tolist(), everyone[rank].get(name, ()), strict=True):
            sums = int(lanes[0], 16), int(lanes[1], 16)
            other, known = first.setdefault(int(table.cells[row]), (rank, sums))
            if known != sums:
                box = Box(tuple(table.offsets[row].tolist()), tuple(table.sizes[row].tolist()))
                raise ValueError(
                    f"{name or 'the tensor'}: ranks {other} and {rank} have different values in {box}, of which both "
                    "have a replica; broadcast it from one of them"
                )
    return _finish(add_sums(sums for _, sums in first.values()), layout.shape, dtype)


def digest_stored(checkpoint: StoredState, name: str) -> str:
    """The digest of a tensor of a checkpoint, read in parts of bounded size."""
    stored = checkpoint[name]
    shape, itemsize = tuple(stored.shape), stored.dtype.itemsize
    parts = []
    for box in cut_box(Box.whole(shape), max(1, _CHUNK_BYTES // itemsize)):
        parts.append(sum_box(stored.read(box), box.offsets, shape))
    return _finish(add_sums(parts), shape, find_dtype(str(stored.dtype)).name)


def digest_made(checkpoint: StoredState, made: MappedTensor) -> str:
    """The digest of a tensor that a map makes of those of a checkpoint, read in parts of bounded size."""
    kind, parts = find_dtype(made.dtype), list[Sums]()
    for term in made.terms:
        for box in cut_box(term.box, max(1, _CHUNK_BYTES // kind.itemsize)):
            part = term.cut(box)
            if part.source is None:
                values = torch.full(box.sizes, part.fill, dtype=torch_dtype(kind), device="cpu")
            else:
                low = part.starts
                ends = [s + step * (n - 1) + 1 for s, step, n in zip(low, part.steps, part.lengths, strict=True)]
                there = Box(low, tuple(end - start for start, end in zip(low, ends, strict=True)))
                inside = replace(part, starts=(0,) * len(low))
                read = checkpoint[part.source].read(there)[inside.index].permute(inside.order)[inside.widen]
                values = read.to(torch_dtype(kind)).expand(box.sizes)
            parts.append(sum_box(values, box.offsets, made.shape))
    return _finish(add_sums(parts), made.shape, kind.name)


def cut_box(box: Box, most: int) -> Iterable[Box]:
    """A box in parts of at most so many elements, cut along its first dims."""
    if box.numel <= most or not any(n > 1 for n in box.sizes):
        yield box
        return
    dim = next(d for d, n in enumerate(box.sizes) if n > 1)
    step = max(1, most * box.sizes[dim] // box.numel)
    for start in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, min(step, sizes[dim] - start)
        yield from cut_box(Box(tuple(offsets), tuple(sizes)), most)
