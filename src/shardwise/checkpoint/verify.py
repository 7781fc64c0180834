"""What is wrong with a stored checkpoint? Every problem, not only the first, each with its file and its tensor.

1. Files: each is there, as long as the index says, and begins with the header that was written.
2. Boxes: the header of the file describes the same elements at the same place as the index.
3. Bytes: every block has the checksum of the index.

That the boxes of each tensor tile it is checked whenever an index is read.

What killed saves left next to a checkpoint is removed only when the one that stays has been read whole and found right.
Where it is broken, or there is none, every folder that has an index stays.

Do two stored tensors have the same values? Whatever their formats, layouts and worlds, in bounded memory.

1. The stored boxes of one meet those of the other in regions, each of which is in one file on either side.
2. A region is read in parts that touch few pages. Equal bits are equal elements; nothing else is done with them.
3. The elements whose bits differ are turned into numbers: how many differ, and by how much.

Elements are equal if their bits are, or if both are NaN. With tolerances they are also equal if they are near.

What is in a checkpoint, in short? The layouts of its tensors in the notation, and how evenly it is spread.

Tensors that are cut alike share one description. The balance has the bytes that each rank had and wrote, as far as the
format records it, and the number of tensors in each file.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise._progress import Progress, show_progress
from shardwise.checkpoint.commit import (
    find_checkpoint,
    is_complete,
    list_leftovers,
    local_path,
    new_lock,
    recover_commit,
)
from shardwise.checkpoint.files import CLEANING, CheckpointError
from shardwise.checkpoint.formats.huggingface import HeaderEntry, parse_header, safetensors_code_and_shape
from shardwise.checkpoint.index import StoredCut, TensorEntry, block_count, stored_layout
from shardwise.checkpoint.store import Store, StoredRegion, decode_numbers, has_numbers, open_store
from shardwise.geometry import DType, Layout, LayoutError, format_rule
from shardwise.transfer.overlap import BoxOverlap, overlaps_with_boxes


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong in a file, with the tensor it concerns if it is one."""

    file: str
    tensor: str | None
    text: str

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f"tensor {self.tensor!r}: "
        return f"{self.file}: {tensor}{self.text}"


def count_checked_bytes(store: Store) -> int:
    """How many stored bytes have checksums, and are read by `find_problems`."""
    return sum(
        elements * entry.dtype.itemsize
        for entry in store.index.tensors.values()
        for (_, elements), sums in zip(entry.cut.extents, entry.sums, strict=True)
        if sums
    )


def find_problems(store: Store, on_bytes: Callable[[int], None] = lambda count: None) -> Iterator[Problem]:
    """Read everything and yield all problems; `on_bytes` is called with how much has been read."""
    headers: dict[int, dict[int, HeaderEntry] | None] = {}
    for number in range(len(store.index.files)):
        try:
            headers[number] = _read_file_header(store, number)
        except CheckpointError as error:
            yield Problem(store.index.files[number].name, None, _without_path(error, store, number))
            headers[number] = None
    layouts: dict[StoredCut, str | None] = {}
    for entry in store.index.tensors.values():
        if entry.cut not in layouts:
            layouts[entry.cut] = _layout_problem(entry)
        text = layouts[entry.cut]
        if text is not None:
            yield Problem("the index", entry.name, text)
        for box in range(len(entry.cut)):
            yield from _find_box_problems(store, entry, box, headers[entry.files[box]], on_bytes)


def _read_file_header(store: Store, number: int) -> dict[int, HeaderEntry]:
    """What the header of a file says, by first byte; nothing for files of a kind that has no such header."""
    file = store.index.files[number]
    data = store.reader(number)
    if file.header_sum is None:
        return {}
    store.verify_header(number)
    found = parse_header(data.read(0, file.data_start).tobytes(), file.bytes, str(store.folder / file.name))
    return {entry.begin: entry for entry in found.values() if 0 not in entry.shape}


def _without_path(error: CheckpointError, store: Store, number: int) -> str:
    return str(error).removeprefix(f"{store.folder / store.index.files[number].name}: ")


def _layout_problem(entry: TensorEntry) -> str | None:
    try:
        stored_layout(entry)
    except CheckpointError as error:
        return str(error).removeprefix(f"tensor {entry.name!r}: ")
    return None


def _find_box_problems(
    store: Store, entry: TensorEntry, box: int, header: dict[int, HeaderEntry] | None, on_bytes: Callable[[int], None]
) -> Iterator[Problem]:
    name, (sizes, elements) = store.index.files[entry.files[box]].name, entry.cut.extents[box]
    nbytes = entry.run_bytes(box)
    if header is None:
        on_bytes(nbytes if entry.sums[box] else 0)
        yield Problem(name, entry.name, f"{entry.cut.box(box)} is lost with its file")
        return
    if header and elements and not _agrees(header.get(entry.begins[box]), entry, sizes):
        yield Problem(name, entry.name, f"the header has no {entry.dtype}{list(sizes)} at byte {entry.begins[box]}")
    bad = list(_find_bad_blocks(store, entry, box, nbytes, on_bytes))
    if bad:
        text = f"{bad[0]}; {len(bad)} of {block_count(nbytes, store.index.block_bytes)} blocks of {entry.cut.box(box)}"
        yield Problem(name, entry.name, text)


def _agrees(found: HeaderEntry | None, entry: TensorEntry, sizes: tuple[int, ...]) -> bool:
    return found is not None and safetensors_code_and_shape(found.dtype, found.shape) == safetensors_code_and_shape(
        entry.dtype, sizes
    )


def _find_bad_blocks(
    store: Store, entry: TensorEntry, box: int, nbytes: int, on_bytes: Callable[[int], None]
) -> Iterator[str]:
    step = store.index.block_bytes
    for block in range(block_count(nbytes, step) if entry.sums[box] else 0):
        try:
            store.verify(entry, box, block, block + 1)
        except CheckpointError as error:
            text = _without_path(error, store, entry.files[box])
            yield text.removeprefix(f"tensor {entry.name!r}: ")
        on_bytes(min(step, nbytes - block * step))


def leftovers(path: str | os.PathLike[str]) -> list[Path]:
    """The temporary folders that killed saves and reshards left next to this checkpoint, to be removed.

    Where there is no checkpoint, complete ones are not among them: they are the only ones there are.

    >>> leftovers("no/such/checkpoint")
    []
    """
    whole = local_path(path)
    found = list_leftovers(whole)
    try:
        if is_complete(find_checkpoint(whole)):
            return found
    except CheckpointError:
        pass
    return [folder for folder in found if not is_complete(folder)]


def find_checkpoint_problem(path: Path, progress: Progress = False) -> str | None:
    """Read a checkpoint whole; what is wrong with it, or None."""
    try:
        store = open_store(path)
        try:
            with show_progress(progress, f"verifying {path.name}", count_checked_bytes(store)) as meter:
                return next((str(problem) for problem in find_problems(store, meter.advance)), None)
        finally:
            store.close()
    except (CheckpointError, OSError) as error:
        return str(error)


def clean(path: str | os.PathLike[str]) -> list[Path]:
    """Complete a killed commit, remove what killed saves left, and return what was removed; see `leftovers`.

    The checkpoint is read and verified first; if it is damaged, nothing that has an index is removed. Raises while a
    save or a reshard to this path is running.

    >>> clean("no/such/checkpoint")
    []
    """
    whole = local_path(path)
    if not whole.parent.is_dir():
        return []
    with cleaning(whole):
        recover_commit(whole)
        found = leftovers(path)
        complete = [folder for folder in found if is_complete(folder)]
        if complete and (problem := find_checkpoint_problem(whole)) is not None:
            raise CheckpointError(
                f"{whole} is damaged, so {', '.join(folder.name for folder in complete[:3])} may be needed and nothing "
                f"was removed: {problem}"
            )
        for folder in found:
            remove_leftover(folder)
    return found


@contextmanager
def cleaning(path: Path) -> Iterator[None]:
    """Keep saves to a checkpoint away; raise if one is running."""
    lock = new_lock(path, CLEANING, secrets.token_hex(8))
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def remove_leftover(folder: Path) -> None:
    """Remove a folder; one that goes away by itself is not an error."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        shutil.rmtree(folder, ignore_errors=True)


PART_BYTES = 4 << 20
_PART_ELEMENTS = 1 << 18
ArrayPair: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart equal elements may be: |a - b| <= atol + rtol * |b|. Nothing at all by default."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def exact(self) -> bool:
        return self.atol == self.rtol == 0


EXACT = Tolerance()


@dataclass(frozen=True, slots=True)
class Difference:
    """How many elements differ, the largest |a - b| and the largest |a - b| / |b|; NaN is infinitely far from numbers.

    >>> Difference(1, 0.5, 0.1) + Difference(2, 0.25, 0.2)
    Difference(count=3, max_abs=0.5, max_rel=0.2)
    """

    count: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def __add__(self, other: Difference) -> Difference:
        absolute, relative = max(self.max_abs, other.max_abs), max(self.max_rel, other.max_rel)
        return Difference(self.count + other.count, absolute, relative)


@dataclass(frozen=True, eq=False, slots=True)
class ComparedTensor:
    """A tensor of a checkpoint: its entry in the index, and the files."""

    store: Store
    entry: TensorEntry


def compare_stored(
    a: ComparedTensor,
    b: ComparedTensor,
    tolerance: Tolerance = EXACT,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Difference:
    """Compare two tensors of one shape; `on_bytes` is called with the bytes of the first read so far."""
    kinds = (a.entry.dtype, b.entry.dtype)
    found = Difference()
    for left, right in _iterate_pairs(a, b):
        found += _compare_pair((left.load(), right.load()), kinds, tolerance)
        on_bytes(left.nbytes)
        a.store.touch(left.span)
        b.store.touch(right.span)
    return found


def _iterate_pairs(a: ComparedTensor, b: ComparedTensor) -> Iterator[tuple[StoredRegion, StoredRegion]]:
    """The same elements of both, part by part, each of which spans few bytes of its file."""
    for met in _overlapping_regions(a.entry.cut, b.entry.cut):
        left = a.store.region(a.entry, met.box).part(met.here.slices)
        right = b.store.region(b.entry, met.cell).part(met.there.slices)
        for slices in left.split(PART_BYTES):
            some_left, some_right = left.part(slices), right.part(slices)
            yield from ((some_left.part(s), some_right.part(s)) for s in some_right.split(PART_BYTES))


@lru_cache(maxsize=64)
def _overlapping_regions(cut: StoredCut, other: StoredCut) -> list[BoxOverlap]:
    """Where the boxes of two cuts meet; tensors that are cut alike share it."""
    met = overlaps_with_boxes(cut.shape, cut.offsets, cut.sizes, other.offsets, other.sizes)
    return met.regions(cut.offsets, other.offsets)


def _compare_pair(pair: ArrayPair, kinds: tuple[DType, DType], near: Tolerance) -> Difference:
    left, right = pair
    if kinds[0] == kinds[1]:
        apart = _view_as_bits(left) != _view_as_bits(right)
        if not apart.any():
            return Difference()
        left, right = left[apart], right[apart]
    left, right = left.reshape(-1), right.reshape(-1)
    found = Difference()
    for start in range(0, len(left), _PART_ELEMENTS):
        part = slice(start, start + _PART_ELEMENTS)
        found += _compare_values(left[part], right[part], kinds, near)
    return found


def _view_as_bits(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Elements as something that is equal if, and only if, its bits are; 16 bytes are carried as complex numbers."""
    return part.view([("real", "<u8"), ("imag", "<u8")]) if part.dtype.kind == "c" else part


def _compare_values(
    left: npt.NDArray[Any], right: npt.NDArray[Any], kinds: tuple[DType, DType], near: Tolerance
) -> Difference:
    """Compare elements that may differ; those of one type are known to have different bits."""
    if not all(map(has_numbers, kinds)):
        return Difference(len(left), np.inf, np.inf)
    a, b = decode_numbers(left, kinds[0]), decode_numbers(right, kinds[1])
    with np.errstate(all="ignore"):
        distance = _absolute_difference(a, b)
        size = np.abs(b.astype(np.float64) if b.dtype.kind in "iu" else b)
        same = np.isnan(a) & np.isnan(b)
        if kinds[0] != kinds[1] or not near.exact:
            same |= (a == b) | (distance <= near.atol + near.rtol * size)
        distance, size = distance[~same], size[~same]
        distance[np.isnan(distance)] = np.inf
        relative = distance / size
        relative[np.isnan(relative)] = np.inf
        relative[distance == 0] = 0
    if not len(distance):
        return Difference()
    return Difference(len(distance), float(distance.max()), float(relative.max()))


def _absolute_difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """|a - b|; that of two integers is found without overflow."""
    if a.dtype != b.dtype:
        a, b = (n.astype(np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64) for n in (a, b))
    if a.dtype.kind in "iu":
        left, right = a.view(np.uint64), b.view(np.uint64)
        return np.where(a > b, left - right, right - left).astype(np.float64)
    return np.asarray(np.abs(a - b))


@dataclass(frozen=True, eq=False, slots=True)
class _KnownCut:
    """What is known of a cut; it is kept with its cut, so that the id of this is not used again."""

    cut: StoredCut
    layout: Layout | None
    rule: str
    elements: Mapping[int, int]


class StoredLayouts:
    """The layouts of stored tensors, worked out once for all that are cut alike."""

    def __init__(self) -> None:
        self._known: dict[int, _KnownCut] = {}

    def layout(self, entry: TensorEntry) -> Layout | None:
        """The layout a tensor was saved with; None where the format has no layouts, or it is damaged."""
        return None if entry.cut.spec is None else self._look(entry).layout

    def notation(self, entry: TensorEntry) -> str | None:
        """The rule of the layout in the notation, without dtype and shape; None where the format has no layouts."""
        return None if entry.cut.spec is None else self._look(entry).rule

    def elements_per_rank(self, entry: TensorEntry) -> Mapping[int, int]:
        """How many elements each rank held, as far as that is known."""
        return {} if entry.cut.spec is None else self._look(entry).elements

    def _look(self, entry: TensorEntry) -> _KnownCut:
        if id(entry.cut) not in self._known:
            self._known[id(entry.cut)] = _describe_cut(entry)
        return self._known[id(entry.cut)]


def _describe_cut(entry: TensorEntry) -> _KnownCut:
    try:
        layout = stored_layout(entry)
    except CheckpointError:
        return _KnownCut(entry.cut, None, "damaged", {})
    return _KnownCut(entry.cut, layout, rule_of(layout), layout.elements_per_rank())


def rule_of(layout: Layout) -> str:
    """How a layout cuts, in the notation; a tensor that is whole on rank 0 has the rule "@ 0".

    >>> from shardwise.geometry import ChunkSpec
    >>> rule_of(ChunkSpec(0, 4).layout((8, 2)))
    'as chunk(0) over 0-3'
    """
    try:
        return format_rule(layout) or "@ 0"
    except LayoutError:  # pieces with a pending reduction have no notation
        return repr(layout.spec)


@dataclass(frozen=True)
class CheckpointBalance:
    """Bytes by rank, as far as the format records it, and the number of tensors in each file."""

    held: Mapping[int, int]
    written: Mapping[int, int]
    tensors_by_file: Sequence[int]

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.held, *self.written})


def measure_balance(store: Store, layouts: StoredLayouts) -> CheckpointBalance:
    """How a checkpoint is spread, as far as its format records who stored copies of what."""
    index = store.index
    held: dict[int, int] = {}
    in_file = [0] * len(index.files)
    tensors = [0] * len(index.files)
    for entry in index.tensors.values():
        elements_per_rank = layouts.elements_per_rank(entry) if store.format.has_copies else {}
        for rank, elements in elements_per_rank.items():
            held[rank] = held.get(rank, 0) + elements * entry.dtype.itemsize
        for number, (_, elements) in zip(entry.files, entry.cut.extents, strict=True):
            in_file[number] += elements * entry.dtype.itemsize
        for number in set(entry.files):
            tensors[number] += 1
    written: dict[int, int] = {}
    for file, nbytes in zip(index.files, in_file, strict=True):
        writer = store.format.writer_of(file.name)
        if writer is not None:
            written[writer] = written.get(writer, 0) + nbytes
    return CheckpointBalance(held, written, tensors)
