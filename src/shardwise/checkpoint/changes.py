"""Which elements of the weights are not what they were? Found once, sent as absolute values.

1. Elements are compared bit by bit with a kept copy. A rank that publishes has one anyway: the slot of the version
   before.
2. What changed in a version is remembered for each piece as positions or bits, whichever is shorter, for as many
   versions as a budget allows. Who has an older version gets the union; values are absolute, so that it does not
   matter when elements changed.
3. Changed values travel in blocks of 4,096 elements: nothing, the whole block, a bit mask with values, or positions
   with values. One percent of random elements takes 1.5 percent of the bytes of float32 and 2 percent of bfloat16.

The same bytes in files: a chain. `ckpt` is a full checkpoint, `ckpt.deltas/000000000012` what changed in version 12.
Each is saved like every checkpoint, all ranks' bytes one after another as one tensor. Absolute values make it safe to
apply versions that the full checkpoint has already, so that it may be replaced by a newer one at any time; the digests
of all tensors, which each version has, say whether what was loaded is that version.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.checkpoint.commit import Place, find_place
from shardwise.checkpoint.digests import digest_leaves
from shardwise.checkpoint.files import CheckpointError, run_or_describe_error
from shardwise.checkpoint.formats import FORMATS
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.objects import expand_objects
from shardwise.checkpoint.remote import RemotePath
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.state import Leaf, flatten_state, gather_or_raise, make_leaf, torch_dtype
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES, Store, copy_reads, open_store, plan_reads
from shardwise.comm import Comm, LocalComm
from shardwise.geometry import Box, GridSpec, Layout, find_dtype
from shardwise.tensor import wrap

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
    index = _unravel(positions, shape)
    turned = target.permute(*repeated, *kept)
    if shape:
        turned[(..., *index)] = values
    else:
        turned.fill_(values[0])


def _unravel(positions: Tensor, shape: Sequence[int]) -> list[Any]:
    """The index along each dim of positions in a row-major tensor."""
    index: list[Any] = []
    for length in reversed(shape):
        index.insert(0, positions % length)
        positions = positions // length
    return index


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


# Chains in files.

_FORMAT = "shardwise.changes/1"
_DIGITS = 12
_LABEL = "publish files"


def chain_place(path: str | os.PathLike[str]) -> Place:
    """The folder of the versions on top of a checkpoint."""
    place = find_place(path)
    return (
        RemotePath(f"{place.url}.deltas") if isinstance(place, RemotePath) else place.with_name(f"{place.name}.deltas")
    )


def list_versions(path: str | os.PathLike[str]) -> list[int]:
    """The versions that are there, in order."""
    place = chain_place(path)
    if isinstance(place, RemotePath):
        indexes = {name for known in FORMATS for name in known.index_names}
        names = [name for name in place.list_names() if set((place / name).list_names()) & indexes]
    else:
        names = [each.name for each in place.iterdir()] if place.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and len(name) == _DIGITS)


def _version_place(path: str | os.PathLike[str], step: int) -> str:
    return str(chain_place(path) / f"{step:0{_DIGITS}d}")


@dataclass(frozen=True, eq=False)
class _Piece:
    """What changed of a box of a tensor: where that is in the bytes of all ranks."""

    name: str
    box: Box
    dtype: str
    begin: int
    length: int


class VersionFile:
    """A version of a chain, opened."""

    def __init__(self, path: str | os.PathLike[str], step: int, max_buffer_bytes: int = DEFAULT_BUFFER_BYTES) -> None:
        self.place = _version_place(path, step)
        self._store: Store = open_store(self.place, max_buffer_bytes)
        try:
            values = dict(self._store.index.values)
            self._entry: TensorEntry = self._store.index.tensors["bytes"]
            if values["format"] != _FORMAT or values["step"] != step:
                raise ValueError(f"it has the format {values['format']!r:.40} and the step {values['step']!r:.20}")
            self.previous = int(values["previous"])  # type: ignore[arg-type]  # checked by int
            self._lengths = [int(each) for each in json.loads(str(values["lengths"]))]
            if sum(self._lengths) != self._entry.nbytes or min(self._lengths) < 8 or self._entry.dtype.name != "u8":
                raise ValueError(f"its ranks have {sum(self._lengths)} bytes, and {self._entry.nbytes} are stored")
            self.digests: dict[str, str] = {}
            self.pieces = list(self._read_headers())
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            self.close()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.place}: not a version of a chain: {error}") from error

    def _read_headers(self) -> Iterator[_Piece]:
        begin = 0
        for length in self._lengths:
            size = int.from_bytes(self.read(begin, 8).tobytes(), "little")
            if size > length - 8:
                raise ValueError(f"a rank of {length} bytes announces a header of {size}")
            header = json.loads(self.read(begin + 8, size).tobytes())
            self.digests.update(header["digests"])
            at = begin + 8 + size
            for name, offsets, sizes, dtype, count in header["pieces"]:
                box = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
                if not 0 <= count <= begin + length - at:
                    raise ValueError(f"{count} bytes of {name} are announced where {begin + length - at} are left")
                yield _Piece(str(name), box, str(dtype), at, int(count))
                at += count
            begin += length

    def read(self, begin: int, count: int) -> Bytes:
        """Bytes of the version, verified."""
        target = np.empty(count, np.uint8)
        one = np.zeros(1, np.int64)
        for_all = (np.array([[begin]], np.int64), np.array([[count]], np.int64), one, np.zeros((1, 1), np.int64))
        reads = plan_reads(self._entry.cut, *for_all)
        for read in reads:
            blocks = self._entry.touched_blocks(read.cell, read.there, self._store.index.block_bytes)
            self._store.verify(self._entry, read.cell, *blocks)
        copy_reads(self._store, [(self._entry, reads, [target])])
        return target

    def close(self) -> None:
        self._store.close()


@dataclass(frozen=True, eq=False)
class VersionTarget:
    """A tensor that a version is applied to: the stored name and shape, the layout, and this rank's local tensors."""

    name: str
    dtype: str
    layout: Layout
    parts: Sequence[Tensor]


def apply_versions(
    path: str | os.PathLike[str], version: int, targets: Sequence[VersionTarget], rank: int, max_buffer_bytes: int
) -> Mapping[str, str]:
    """Bring tensors that have the full checkpoint to a version; the digests of all tensors of that version."""
    steps, digests = list_versions(path), dict[str, str]()
    if version not in steps:
        near = ", ".join(map(str, steps[-8:])) or "none"
        raise CheckpointError(f"{path} has no version {version!r}; it has {near}" + (" last" if len(steps) > 8 else ""))
    wanted: dict[str, list[VersionTarget]] = {}
    for target in targets:
        wanted.setdefault(target.name, []).append(target)
    opened: list[int] = []
    for step in reversed(steps):  # the last start of a chain is where the full checkpoint is, or will be
        file = VersionFile(path, step, max_buffer_bytes)
        file.close()
        opened.insert(0, step)
        if file.previous < 0:
            break
    else:
        raise CheckpointError(f"{path}: the version {steps[0]} follows {file.previous}, which is missing")
    if version < opened[0]:
        raise CheckpointError(f"{path}: version {version} was compacted into {opened[0]}; load that or a later one")
    before = -1
    for step in (step for step in opened if step <= version):
        file = VersionFile(path, step, max_buffer_bytes)
        try:
            if before >= 0 and file.previous != before:
                raise CheckpointError(f"{path}: version {step} follows {file.previous}, which is missing")
            for piece in file.pieces:
                _apply_piece(file, piece, wanted.get(piece.name, ()), rank)
        finally:
            file.close()
        before, digests = step, file.digests
    return digests


def _apply_piece(file: VersionFile, piece: _Piece, targets: Sequence[VersionTarget], rank: int) -> None:
    if not piece.length:
        return
    for target in targets:
        if piece.dtype != target.dtype or any(
            o < 0 or o + n > length
            for o, n, length in zip(piece.box.offsets, piece.box.sizes, target.layout.shape, strict=True)
        ):
            have = f"{target.dtype}{list(target.layout.shape)}"
            raise CheckpointError(f"{file.place}: {piece.name} is {piece.dtype} in {piece.box}, and {have} is stored")
        table = target.layout.table.take(target.layout.rows_of(rank))
        rows = [
            (slot, Box(tuple(o), tuple(n)), at)
            for slot, o, n, at in zip(
                table.slots.tolist(),
                table.offsets.tolist(),
                table.sizes.tolist(),
                table.local_offsets.tolist(),
                strict=True,
            )
            if Box(tuple(o), tuple(n)).intersect(piece.box) is not None
        ]
        if not rows:
            continue
        data = file.read(piece.begin, piece.length)
        try:
            positions, values = decode_changes(data, piece.box.numel, torch_dtype(find_dtype(piece.dtype)))
        except ValueError as error:
            raise CheckpointError(f"{file.place}: {piece.name}: {error}") from error
        index = [each + o for each, o in zip(_unravel(positions, piece.box.sizes), piece.box.offsets, strict=True)]
        for slot, box, at in rows:
            part = target.parts[slot]
            inside = torch.ones(len(positions), dtype=torch.bool, device="cpu")
            for each, low, size in zip(index, box.offsets, box.sizes, strict=True):
                inside &= (each >= low) & (each < low + size)
            new = values[inside].to(part.device, part.dtype)
            if not len(new):
                continue
            places = [
                (each[inside] - low + start).to(part.device)
                for each, low, start in zip(index, box.offsets, at, strict=True)
            ]
            with torch.no_grad():
                if places:
                    part[tuple(places)] = new
                else:
                    part.fill_(new[0])


def start_chain_at(path: str | os.PathLike[str], version: int) -> None:
    """Say that the full checkpoint has a version, and remove older ones; one process calls it."""
    file = VersionFile(path, version)
    file.close()
    _save_version(path, version, -1, {}, [], file.digests, LocalComm.alone())
    for step in list_versions(path):
        if step < version:
            _remove_version(chain_place(path) / f"{step:0{_DIGITS}d}")


def _remove_version(place: Place) -> None:
    if isinstance(place, RemotePath):
        place.remove_files(place.list_names())
    else:
        shutil.rmtree(place)


def _save_version(
    path: str | os.PathLike[str],
    step: int,
    previous: int,
    changed: Mapping[int, Bytes],
    pieces: Sequence[_OwnPiece],
    digests: Mapping[str, str],
    comm: Comm,
) -> None:
    """Save what changed on all ranks as a version."""
    empty = np.empty(0, np.uint8)
    data = [changed.get(number, empty) for number in range(len(pieces))]
    rows = [
        [each.leaf.name, list(each.box.offsets), list(each.box.sizes), each.leaf.dtype.name, len(part)]
        for each, part in zip(pieces, data, strict=True)
    ]
    first = comm.rank == comm.ranks[0]
    header = json.dumps({"pieces": rows, "digests": dict(digests) if first else {}}, separators=(",", ":")).encode()
    head = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    mine = torch.from_numpy(np.concatenate([head, *data]))
    lengths = gather_or_raise(comm, len(mine), None, _LABEL)
    layout = GridSpec(splits=(tuple(lengths),), ranks=list(comm.ranks)).layout((sum(lengths),))
    stream = wrap(layout, (mine,), comm, dtype=torch.uint8)
    state = {"format": _FORMAT, "step": step, "previous": previous, "lengths": json.dumps(lengths), "bytes": stream}
    save(state, _version_place(path, step), comm=comm)


@dataclass(frozen=True, eq=False)
class _OwnPiece:
    """A box of a tensor that this rank compares and saves; one of its holders does so."""

    leaf: Leaf
    box: Box
    slot: int
    where: tuple[slice, ...]

    def values(self) -> Tensor:
        """The elements, in a row on the host."""
        return self.leaf.locals[self.slot][self.where].detach().cpu().reshape(-1)


def _own_pieces(leaves: Sequence[Leaf], rank: int) -> list[_OwnPiece]:
    found = []
    for number, leaf in enumerate(leaves):
        table = leaf.layout.table
        holders: dict[int, list[int]] = {}
        for row, cell in enumerate(table.cells.tolist()):
            holders.setdefault(cell, []).append(row)
        for cell, rows in holders.items():
            row = rows[(number + cell) % len(rows)]  # replicas take turns
            if int(table.ranks[row]) != rank:
                continue
            box = Box(tuple(table.offsets[row].tolist()), tuple(table.sizes[row].tolist()))
            at = table.local_offsets[row].tolist()
            where = tuple(slice(o, o + n) for o, n in zip(at, box.sizes, strict=True))
            if box.numel:
                found.append(_OwnPiece(leaf, box, int(table.slots[row]), where))
    return found


def hash_blocks(values: Tensor) -> list[bytes]:
    """A hash of each block of a row of values."""
    step = BLOCK * values.dtype.itemsize
    data = bits_of(values).numpy().reshape(-1).view(np.uint8).data
    return [hashlib.blake2b(data[at : at + step], digest_size=16).digest() for at in range(0, len(data), step)]


class FilePublisher:
    """Versions of weights in files: a full checkpoint, and what changed in each version after it.

    >>> import tempfile, shardwise
    >>> weights, path = {"w": torch.zeros(1000)}, f"{tempfile.mkdtemp()}/ckpt"
    >>> link = shardwise.sync.publish_files(weights, path)
    >>> link.push(step=0)
    >>> weights["w"][7] = 1.0
    >>> link.push(step=1)
    >>> [shardwise.load({"w": torch.ones(1000)}, path, version=step)["w"][7].item() for step in (0, 1)]
    [0.0, 1.0]
    """

    def __init__(
        self, state: object, path: str | os.PathLike[str], comm: Comm, max_kept_bytes: int | None = None
    ) -> None:
        self.comm, self.path, self._state, self._limit = comm, path, state, max_kept_bytes
        self.version: int | None = None
        """The step of the newest version that this object has pushed."""
        self.written_bytes = 0
        """What this rank wrote in the last push, without what a full checkpoint takes."""
        self._kept: list[Any] | None = None
        self._known: Any = None

    def push(self, step: int) -> None:
        """Save the tensors as they are now as the version `step`; all ranks call it.

        The first one saves a full checkpoint if there is none. If there is one, everything counts as changed.
        """
        found, problem = run_or_describe_error(lambda: self._look(step))
        everyone = gather_or_raise(self.comm, None if found is None else [step, *found[1:]], problem, _LABEL)
        if any(one[0] != step for one in everyone):
            raise CheckpointError(f"push: the step is {[one[0] for one in everyone][:8]} on the ranks; pass the same")
        leaves, (newest, is_new) = found[0], everyone[0][1:]
        kept, self._kept = self._kept, None  # until the version is saved
        if is_new:
            save({leaf.name: leaf.tensor for leaf in leaves}, self.path, comm=self.comm)
        pieces = _own_pieces(leaves, self.comm.rank)
        small = self._limit is None or sum(p.box.numel * p.leaf.dtype.itemsize for p in pieces) <= self._limit
        changed, new_kept = dict[int, Bytes](), list[Any]()
        for number, piece in enumerate(pieces):
            values = piece.values()
            if is_new:
                flags = np.zeros(len(values), np.bool_)
            else:
                flags = _compare_kept(values, None if kept is None else kept[number])
            new_kept.append(values.clone() if small else hash_blocks(values))
            if flags.any():
                changed[number] = encode_changes(values, flags)
        digests = digest_leaves(leaves, self.comm)
        _save_version(self.path, step, -1 if newest is None else newest, changed, pieces, digests, self.comm)
        self.written_bytes = sum(map(len, changed.values()))
        self._kept, self.version = new_kept, step

    def _look(self, step: int) -> tuple[list[Leaf], int | None, bool]:
        """The tensors as they are now, the newest version, and whether there is no checkpoint yet."""
        if type(step) is not int or not 0 <= step < 10**_DIGITS:
            raise CheckpointError(f"push: a step is an int of 0 to {10**_DIGITS - 1}, got {step!r:.40}")
        flat = flatten_state(expand_objects(self._state)[0])
        if flat.values:
            raise CheckpointError(f"push: {next(iter(flat.values))} is not a tensor; versions are of tensors only")
        leaves = [make_leaf(name, tensor, self.comm) for name, tensor in flat.tensors.items()]
        pending = next((leaf.name for leaf in leaves if leaf.layout.pending is not None), None)
        if pending is not None:
            raise CheckpointError(f"push: {pending} has a pending reduction; redistribute it first")
        described = [(leaf.name, leaf.dtype, leaf.layout) for leaf in leaves]
        if self._known is not None and self._known != described:
            raise CheckpointError("push: names, types or layouts have changed; start a chain at another path")
        self._known = described
        if self.comm.rank != self.comm.ranks[0]:
            return leaves, None, False
        steps = list_versions(self.path)
        if steps and steps[-1] >= step:
            raise CheckpointError(f"push: step {step} is not after {steps[-1]}, the newest version of {self.path}")
        if self._kept is not None:
            return leaves, steps[-1] if steps else None, False
        try:
            store = open_store(self.path)
        except CheckpointError:
            if steps:
                raise
            return leaves, None, True
        try:
            stored = {name: (entry.dtype, entry.shape) for name, entry in store.index.tensors.items()}
        finally:
            store.close()
        wanted = {leaf.name: (leaf.dtype, leaf.layout.shape) for leaf in leaves}
        if stored != wanted:
            wrong = sorted(name for name in {*stored, *wanted} if stored.get(name) != wanted.get(name))
            raise CheckpointError(f"push: {self.path} has other tensors: {', '.join(wrong[:4])}; start at another path")
        return leaves, steps[-1] if steps else None, False


def _compare_kept(values: Tensor, kept: Any) -> Flags:
    """Which elements differ from what was kept: a copy, hashes of blocks, or nothing."""
    if kept is None:
        return np.ones(len(values), np.bool_)
    if isinstance(kept, Tensor):
        return compare(values, kept)
    differ = np.array([new != old for new, old in zip(hash_blocks(values), kept, strict=True)], np.bool_)
    return np.repeat(differ, BLOCK)[: len(values)]
