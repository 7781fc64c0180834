"""Which elements of the weights are not what they were? Found once, sent as absolute values.

1. Elements are compared bit by bit with a kept copy. A rank that publishes has one anyway: the slot of the version
   before.
2. What changed in a version is remembered for each piece as positions or bits, whichever is shorter, for as many
   versions as a budget allows. Who has an older version gets the union; values are absolute, so that it does not
   matter when elements changed.
3. Changed values travel in blocks of 4,096 elements: nothing, the whole block, a bit mask with values, or positions
   with values. One percent of random elements takes 1.5 percent of the bytes of float32 and 2 percent of bfloat16.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 4096
MOST_VERSIONS = 64
_MASK_BYTES = BLOCK // 8
_NOTHING, _WHOLE, _MASK, _POSITIONS = range(4)
_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Flags: TypeAlias = npt.NDArray[np.bool_]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def bits_of(values: Tensor) -> Tensor:
    """The elements in a row as integers, which are equal if their bits are; on the host."""
    flat = values.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    if flat.dtype.itemsize > 8:
        return flat.view(torch.int64).view(-1, flat.dtype.itemsize // 8)
    return flat.view(_KINDS[flat.dtype.itemsize])


def compare(new: Tensor, old: Tensor) -> Flags:
    """Which elements of two rows of equal types differ in a bit."""
    differ = bits_of(new) != bits_of(old)
    found: Flags = (differ if differ.ndim == 1 else differ.any(dim=1)).numpy()
    return found


def most_bytes(count: int, itemsize: int) -> int:
    """How many bytes `encode_changes` makes of so many elements at most."""
    return -(-count // BLOCK) + count * itemsize


def encode_changes(values: Tensor, changed: Flags) -> Bytes:
    """The changed ones of a row of values as bytes.

    >>> encode_changes(torch.arange(5, dtype=torch.int16), np.array([False, True, False, False, True])).tolist()
    [1, 0, 0, 1, 0, 2, 0, 3, 0, 4, 0]
    """
    count, itemsize = len(values), values.dtype.itemsize
    rows = _in_blocks(changed)
    counts = rows.sum(axis=1)
    costs = np.stack([_block_lengths(count) * itemsize, _MASK_BYTES + counts * itemsize, 2 + counts * (2 + itemsize)])
    kinds = np.where(counts == 0, _NOTHING, 1 + costs.argmin(axis=0)).astype(np.uint8)
    rows[kinds == _WHOLE] = True
    listed = rows[kinds == _POSITIONS]
    sent = torch.from_numpy(rows.reshape(-1)[:count].nonzero()[0])
    parts = [
        kinds,
        counts[kinds == _POSITIONS].astype("<u2").view(np.uint8),
        listed.nonzero()[1].astype("<u2").view(np.uint8),
        np.packbits(rows[kinds == _MASK]),
        bits_of(values)[sent].numpy().reshape(-1).view(np.uint8),
    ]
    return np.concatenate(parts)


def decode_changes(data: Bytes, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The positions in a row of so many elements and their values, as `encode_changes` wrote them; checked.

    >>> positions, values = decode_changes(np.array([3, 1, 0, 4, 0, 9, 0], np.uint8), 5, torch.int16)
    >>> positions.tolist(), values.tolist()
    ([4], [9])
    """
    blocks, at = -(-count // BLOCK), 0

    def take(size: int) -> Bytes:
        nonlocal at
        at += size
        if at > len(data):
            raise ValueError(f"changes of {count} elements end after {len(data)} bytes; they need {at} or more")
        return data[at - size : at]

    kinds = take(blocks)
    if kinds.max(initial=0) > _POSITIONS:
        raise ValueError(f"changes of {count} elements have a block of the unknown kind {kinds.max()}")
    rows = np.zeros((blocks, BLOCK), np.bool_)
    rows[kinds == _WHOLE] = True
    with_positions = np.flatnonzero(kinds == _POSITIONS)
    counts = take(2 * len(with_positions)).view("<u2").astype(np.int64)
    positions = take(2 * int(counts.sum())).view("<u2").astype(np.int64)
    if positions.max(initial=0) >= BLOCK:
        raise ValueError(f"changes of {count} elements have a position outside of a block")
    rows[np.repeat(with_positions, counts), positions] = True
    with_mask = np.flatnonzero(kinds == _MASK)
    masks = take(_MASK_BYTES * len(with_mask)).reshape(-1, _MASK_BYTES)
    rows[with_mask] = np.unpackbits(masks, axis=1).astype(np.bool_)
    flat = rows.reshape(-1)
    flat[count:] &= kinds[-1:] != _WHOLE  # the end of the last block, where there is nothing
    found = flat.nonzero()[0]
    values = np.array(take(len(found) * dtype.itemsize))
    if at != len(data) or found.max(initial=-1) >= count:
        raise ValueError(f"changes of {count} elements do not end where they should: {at} of {len(data)} bytes")
    made = torch.from_numpy(values).view(dtype) if len(values) else torch.empty(0, dtype=dtype, device="cpu")
    return torch.from_numpy(found), made


def write_at(target: Tensor, positions: Tensor, values: Tensor, shape: Sequence[int], widen: Sequence[object]) -> None:
    """Write values at positions of a row-major tensor of a shape, which `target` has but for dims of `widen` (None)."""
    if not len(positions):
        return
    positions, values = positions.to(target.device), values.to(target.device, target.dtype)
    if target.is_contiguous() and tuple(target.shape) == tuple(shape):
        target.view(-1)[positions] = values
        return
    repeated = [dim for dim, kept in enumerate(widen) if kept is None]
    kept = [dim for dim, one in enumerate(widen) if one is not None]
    index: list[Any] = []
    for length in reversed(shape):
        index.insert(0, positions % length)
        positions = positions // length
    turned = target.permute(*repeated, *kept)
    if shape:
        turned[(..., *index)] = values
    else:
        turned.fill_(values[0])


def _in_blocks(changed: Flags) -> Flags:
    rows = np.zeros((-(-len(changed) // BLOCK), BLOCK), np.bool_)
    rows.reshape(-1)[: len(changed)] = changed
    return rows


def _block_lengths(count: int) -> npt.NDArray[np.int64]:
    return np.minimum(BLOCK, count - BLOCK * np.arange(-(-count // BLOCK)))


@dataclass(frozen=True, eq=False)
class VersionChanges:
    """What changed in a version since the one before it: for each piece positions or packed bits; none: nothing."""

    before: int
    pieces: Mapping[int, npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.pieces.values())


class ChangeLog:
    """What changed in the last versions, by piece; pieces are numbered by whoever writes the log.

    >>> log = ChangeLog(limit=1000)
    >>> log.add(2, before=1, changed={0: np.array([True, False, False])})
    >>> log.add(3, before=2, changed={0: np.array([False, False, True])})
    >>> log.since(1, 3).flags(0, 3).tolist()
    [True, False, True]
    >>> log.since(0, 3) is None
    True
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._versions: dict[int, VersionChanges] = {}
        self._guard = threading.Lock()

    def add(self, version: int, before: int, changed: Mapping[int, Flags]) -> None:
        """Remember what changed in a version; the oldest ones are forgotten."""
        pieces = {n: self._shorten(flags) for n, flags in changed.items() if flags.any()}
        with self._guard:
            self._versions[version] = VersionChanges(before, pieces)
            while len(self._versions) > MOST_VERSIONS or (
                sum(each.nbytes for each in self._versions.values()) > self._limit
            ):
                self._versions.pop(next(iter(self._versions)))

    @staticmethod
    def _shorten(flags: Flags) -> npt.NDArray[Any]:
        count = int(flags.sum())
        return flags.nonzero()[0].astype(np.uint32) if 32 * count < len(flags) else np.packbits(flags)

    def since(self, old: int, new: int) -> Union | None:
        """What changed from one version to another; None if it is not known."""
        with self._guard:
            found = []
            while new != old:
                each = self._versions.get(new)
                if each is None:
                    return None
                found.append(each)
                new = each.before
            return Union(found)


class Union:
    """What changed in any of several versions."""

    def __init__(self, versions: Sequence[VersionChanges]) -> None:
        self._versions = versions

    def flags(self, piece: int, count: int) -> Flags | None:
        """Which of a piece's elements changed; None: none did."""
        listed = [each.pieces[piece] for each in self._versions if piece in each.pieces]
        if not listed:
            return None
        found = np.zeros(count, np.bool_)
        for each in listed:
            if each.dtype == np.uint32:
                found[each] = True
            else:
                found |= np.unpackbits(each, count=count).view(np.bool_)
        return found
