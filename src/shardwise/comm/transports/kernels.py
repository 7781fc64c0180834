"""Copies and reductions of boxes that may have strides, on any device.

Elements are copied in units of up to 16 bytes where both sides allow it: torch's kernels for tensors with strides move
one element at a time.

Many boxes copied in one launch, by a kernel of Triton where that is installed.

A table on the device has a row for each box: both addresses, rows by two dims, the length of a row, strides. Boxes have
up to three dims after those that adjoin in memory are joined; a row is cut in units of 8 bytes. Where all places are
multiples of 16 bytes (WIDE), two units are read at once; where offsets fit in 32 bits (NARROW), they have so many.

Sums of boxes from several ranks in one launch, by a kernel of Triton where that is installed.

Terms are read where they are and added in float32 to a target, in the order given: the same bits as one addition after
another, without a pass over the target for each term. A table on the device has a row for each target: its address, up
to three dims, and for each term an address and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from shardwise._text import package_logger
from shardwise._torch import copy_each
from shardwise.comm.protocol import ReduceOp

_log = package_logger(__name__)
tl: Any = None  # triton.language, once it is needed: importing it takes long
UNIT = 8  # bytes
_TILE = 2048  # units, for one program
_FIELDS = 9
_NARROW_OFFSETS = 1 << 30  # units; sums of two of them are still numbers of 32 bits
BoxRow = tuple[int, int, int, int, int, int, int, int, int]
"""Addresses of target and source, outer and inner rows, units in a row, strides of target and source in units."""


def _copy_tile(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    table,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
):
    box = table + tl.program_id(1) * FIELDS
    target = tl.load(box).to(tl.pointer_type(tl.int64))
    source = tl.load(box + 1).to(tl.pointer_type(tl.int64))
    outer, inner, length = tl.load(box + 2), tl.load(box + 3), tl.load(box + 4)
    to_outer, to_inner, at_outer, at_inner = tl.load(box + 5), tl.load(box + 6), tl.load(box + 7), tl.load(box + 8)
    if NARROW:
        outer, inner, length = outer.to(tl.int32), inner.to(tl.int32), length.to(tl.int32)
        to_outer, to_inner = to_outer.to(tl.int32), to_inner.to(tl.int32)
        at_outer, at_inner = at_outer.to(tl.int32), at_inner.to(tl.int32)
    if WIDE:
        target, source, length = tl.multiple_of(target, 16), tl.multiple_of(source, 16), tl.multiple_of(length, 2)
        to_outer, to_inner = tl.multiple_of(to_outer, 2), tl.multiple_of(to_inner, 2)
        at_outer, at_inner = tl.multiple_of(at_outer, 2), tl.multiple_of(at_inner, 2)
    across = (length + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    rows = (tile // across) * ROWS + tl.arange(0, ROWS)
    columns = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < outer * inner)[:, None] & (columns < length)[None, :]
    to = (rows // inner) * to_outer + (rows % inner) * to_inner
    at = (rows // inner) * at_outer + (rows % inner) * at_inner
    values = tl.load(source + at[:, None] + columns[None, :], mask=inside)
    tl.store(target + to[:, None] + columns[None, :], values, mask=inside)


class TritonKernel:
    """A kernel that is compiled when it is first needed; none where Triton is not installed or does not run."""

    def __init__(self, tile: Callable[..., None], instead: str) -> None:
        self._tile, self._instead = tile, instead
        self.problem: BaseException | None = None

    def find(self) -> Any:
        """The compiled kernel, or None."""
        return None if self.problem is not None else _compile_tile(self._tile)

    def disable(self, problem: BaseException) -> None:
        """Use the kernel no more in this process."""
        _log.warning("%s: Triton's kernel does not run here (%s)", self._instead, problem)
        self.problem = problem


@cache
def _compile_tile(tile: Any) -> Any:
    try:
        import triton
        import triton.language
    except ImportError:
        return None
    tile.__globals__["tl"] = triton.language  # the name by which the code of a tile reads it
    return triton.jit(tile)


COPY_KERNEL = TritonKernel(_copy_tile, "boxes are copied one by one")


def find_row(target: Tensor, source: Tensor) -> BoxRow | None:
    """One box as a row of the table; None if it does not fit."""
    form = _find_form(target.shape, target.stride(), source.stride(), target.itemsize)
    to, at = target.data_ptr(), source.data_ptr()
    return None if form is None or (to | at) % UNIT else (to, at, *form)


@lru_cache(maxsize=4096)
def _find_form(
    shape: torch.Size, after: tuple[int, ...], before: tuple[int, ...], size: int
) -> tuple[int, int, int, int, int, int, int] | None:
    """Outer and inner rows, units in a row, and the strides of both sides in units."""
    dims = [(1, 0, 0), (1, 0, 0), *_joined_dims(shape, after, before)]
    length, *ends = dims.pop() if len(dims) > 2 else (1, 1, 1)
    (outer, a0, b0), (inner, a1, b1) = dims[-2:]
    strides = [s * size for s in (a0, a1, b0, b1)]
    if len(dims) > 4 or (len(dims) > 2 and dims[-3][0] != 1) or ends != [1, 1]:
        return None
    if any(place % UNIT for place in (length * size, *strides)):
        return None
    units = length * size // UNIT
    if outer * inner == 1 and units > _TILE and units % _TILE == 0:  # one run of memory, in rows of a tile
        return 1, units // _TILE, _TILE, 0, _TILE, 0, _TILE
    return outer, inner, units, *(s // UNIT for s in strides)  # type: ignore[return-value]  # four of them


def _joined_dims(shape: torch.Size, after: tuple[int, ...], before: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The dims as size and both strides, outermost first, those that adjoin in both tensors joined."""
    dims: list[tuple[int, int, int]] = []
    for n, a, b in zip(shape, after, before, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * a and dims[-1][2] == n * b:
            dims[-1] = (dims[-1][0] * n, a, b)
        else:
            dims.append((n, a, b))
    return dims


_launches: dict[tuple[tuple[BoxRow, ...], Any], TableLaunch] = {}


def copy_rows(rows: Sequence[BoxRow], device: torch.device) -> None:
    """Copy boxes in one launch, which is kept: programs that go round in steps copy between the same addresses."""
    key = tuple(rows), torch.cuda.current_stream(device)
    known = _launches.get(key)
    if known is None:
        if len(_launches) >= _KEPT_TABLES:
            _launches.clear()
        grid, form = plan_launch(rows)
        known = _launches[key] = TableLaunch(COPY_KERNEL.find(), grid, device_table(key[0], device), form)
    launch_on(device, known)


def plan_launch(rows: Sequence[BoxRow]) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """The grid of a launch, and the constants for which the kernel is compiled."""
    columns = min(_TILE, max(16, 1 << (min(row[4] for row in rows) - 1).bit_length()))
    height = _TILE // columns
    tiles = max(-(-(row[2] * row[3]) // height) * -(-row[4] // columns) for row in rows)
    wide = not any(place % (2 * UNIT) for row in rows for place in row[:2])
    wide = wide and not any(units % 2 for row in rows for units in row[4:])
    narrow = max(tiles * height, *map(_largest_offset, rows)) < _NARROW_OFFSETS
    return (tiles, len(rows)), {"COLUMNS": columns, "ROWS": height, "FIELDS": _FIELDS, "WIDE": wide, "NARROW": narrow}


def _largest_offset(row: BoxRow) -> int:
    """A bound of the offsets of a box on both sides, in units."""
    _, _, outer, inner, length, to_outer, to_inner, at_outer, at_inner = row
    return max(outer * to_outer + inner * to_inner, outer * at_outer + inner * at_inner) + length


class TableLaunch:
    """Launches a kernel on a table, as often as it is called; constants are in the order of the kernel's arguments.

    The first time Triton compiles the kernel or finds it compiled. Later that is known: the search takes longer than a
    launch.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int], table: Tensor, constants: Mapping[str, Any]) -> None:
        self._kernel, self._grid, self._table, self._constants = kernel, grid, table, constants
        self._compiled: Any = None
        self._is_repeatable = True

    def __call__(self) -> None:
        """Launch it on the current device and stream."""
        if self._compiled is not None:
            try:
                self._compiled(self._table, *self._constants.values())
                return
            except TypeError:  # compiled kernels of another version of Triton take other arguments
                self._compiled, self._is_repeatable = None, False
        compiled = self._kernel[self._grid](self._table, **self._constants, num_warps=8)
        if self._is_repeatable and hasattr(compiled, "__getitem__"):
            self._compiled = compiled[(*self._grid, 1)]


def launch_on(device: torch.device, launch: Callable[[], None]) -> None:
    """Launch a kernel on a device: Triton takes the current one, which may be another."""
    if device.index in (None, torch.cuda.current_device()):
        launch()
        return
    with torch.cuda.device(device):
        launch()


_tables: dict[tuple[tuple[tuple[int, ...], ...], Any], Tensor] = {}
_KEPT_TABLES = 512


def device_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The table on the device; programs that go round in steps use the same memory again and again."""
    stream = torch.cuda.current_stream(device)
    known = _tables.get((rows, stream))
    if known is None:
        if len(_tables) >= _KEPT_TABLES:
            _tables.clear()
        host = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=True)
        known = _tables[rows, stream] = host.to(device, non_blocking=True)
    return known


BoxPair = tuple[Tensor, Tensor]
"""A target and a source of one shape."""

_UNITS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


def copy_boxes(pairs: Sequence[BoxPair]) -> None:
    """Copy each source into its target; several on one GPU in one launch, where Triton is installed."""
    if len(pairs) > 1 and pairs[0][0].device.type == "cuda" and COPY_KERNEL.find() is not None:
        pairs = _launch_fitting(pairs)
    for target, source in pairs:
        copy_box(target, source)


class RepeatedCopy:
    """The same copies again and again; what one launch does of them is found out once.

    >>> target, source = torch.zeros(2), torch.arange(2.0)
    >>> copy = RepeatedCopy([target], [source])
    >>> copy()
    >>> target.tolist()
    [0.0, 1.0]
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.targets, self.sources = list(targets), list(sources)
        pairs = list(zip(self.targets, self.sources, strict=True))
        self._devices = {t.device for pair in pairs for t in pair if t.device.type == "cuda"}
        self._rows: list[BoxRow] = []
        self._rest: list[BoxPair] = pairs
        if len(self._devices) == 1 and COPY_KERNEL.find() is not None:
            self._rows, self._rest = _find_rows(pairs)

    def __call__(self) -> None:
        """Copy, and return when a GPU has done so."""
        if not self._devices:
            copy_each(self.targets, self.sources)
            return
        if self._rows and not _launch_rows(self._rows, next(iter(self._devices))):
            if not self.targets:
                raise RuntimeError("copies that were launched before cannot be launched any more")
            self._rows, self._rest = [], list(zip(self.targets, self.sources, strict=True))
        self.targets, self.sources = [], []  # memory that others move is not kept alive by its address
        for target, source in self._rest:
            copy_box(target, source)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()


def _launch_fitting(pairs: Sequence[BoxPair]) -> list[BoxPair]:
    """Copy the boxes that one launch can take; return the others."""
    rows, rest = _find_rows(pairs)
    return rest if not rows or _launch_rows(rows, pairs[0][0].device) else list(pairs)


def _find_rows(pairs: Sequence[BoxPair]) -> tuple[list[BoxRow], list[BoxPair]]:
    """The boxes that one launch can take, as rows of its table, and the others."""
    rows, rest = [], []
    device = pairs[0][0].device
    for pair in pairs:
        target, source = pair
        same = target.dtype == source.dtype and target.device == source.device == device and target.numel() > 0
        row = find_row(target, source) if same and not (source.is_conj() or source.is_neg()) else None
        if row is None:
            rest.append(pair)
        else:
            rows.append(row)
    return rows, rest


def _launch_rows(rows: Sequence[BoxRow], device: torch.device) -> bool:
    """Copy boxes in one launch; whether that was done."""
    try:
        copy_rows(rows, device)
    except Exception as error:  # Triton needs a compiler of the system, and more that may be missing
        COPY_KERNEL.disable(error)
        return False
    return True


def copy_box(target: Tensor, source: Tensor) -> None:
    """Copy one tensor into another of the same shape.

    >>> whole, part = torch.zeros(2, 8, dtype=torch.int16), torch.arange(8, dtype=torch.int16).view(2, 4)
    >>> copy_box(whole[:, 4:], part)
    >>> whole[1].tolist()
    [0, 0, 0, 0, 4, 5, 6, 7]
    """
    if target.dtype == source.dtype:
        unit = _unit_of(target, source)
        if unit is not None:
            target, source = target.view(unit), source.view(unit)
    target.copy_(source)


def _unit_of(target: Tensor, source: Tensor) -> torch.dtype | None:
    """A wider dtype in which both can be copied; None where one run of memory is copied, or none fits."""
    before, after = source.stride(), target.stride()
    width = _unit_bytes(target.shape, after, before, target.itemsize)
    if width == 0 or any(t.storage_offset() * t.itemsize % width for t in (source, target)):
        return None
    return None if source.is_conj() or source.is_neg() else _UNITS[width]


@lru_cache(maxsize=4096)
def _unit_bytes(shape: torch.Size, after: tuple[int, ...], before: tuple[int, ...], size: int) -> int:
    """The most bytes, of 16 and its divisors, into which the rows of both can be cut; 0 if that is one element."""
    if not shape or after[-1] != 1 or before[-1] != 1 or after == before == _dense_strides(shape):
        return 0
    places = [shape[-1], *after[:-1], *before[:-1]]
    return next((unit for unit in _UNITS if unit > size and all(n * size % unit == 0 for n in places)), 0)


def _dense_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides)


_COMBINE: dict[ReduceOp, Any] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def reduce_tensors(out: Tensor, terms: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce tensors of one shape into `out`, which may be one of them, in the order given.

    >>> out = torch.tensor([1, 2])
    >>> reduce_tensors(out, [torch.tensor([5, 0]), out, torch.tensor([3, 3])], "max")
    >>> out.tolist()
    [5, 3]
    """
    combine, total = _COMBINE[op], terms[0]
    for number, term in enumerate(terms[1:], 2):
        if number == len(terms):
            combine(total, term, out=out)
        else:
            total = combine(total, term) if number == 2 else combine(total, term, out=total)
    if len(terms) == 1:
        out.copy_(total)
    if op == "avg":
        out.div_(len(terms))


TERM_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
HEAD_FIELDS, TERM_FIELDS = 7, 4  # target: address, three sizes, three strides; term: address, three strides
_SUM_TILE = 1024
_MOST_TERMS = 64

TermPair = tuple[Tensor, Tensor]
"""A target and a term of one shape."""


def _sum_tile(table, TERMS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads the annotations
    box = table + tl.program_id(1) * (7 + 4 * TERMS)
    target = tl.load(box).to(tl.pointer_type(tl.float32))
    outer, inner, length = tl.load(box + 1), tl.load(box + 2), tl.load(box + 3)
    across = (length + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    rows = (tile // across) * ROWS + tl.arange(0, ROWS)
    columns = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < outer * inner)[:, None] & (columns < length)[None, :]
    down = (rows // inner) * tl.load(box + 4) + (rows % inner) * tl.load(box + 5)
    places = target + down[:, None] + (columns * tl.load(box + 6))[None, :]
    total = tl.load(places, mask=inside)
    for number in range(TERMS):
        term = box + 7 + 4 * number
        source = tl.load(term).to(tl.pointer_type(KIND))
        at = (rows // inner) * tl.load(term + 1) + (rows % inner) * tl.load(term + 2)
        total += tl.load(source + at[:, None] + (columns * tl.load(term + 3))[None, :], mask=inside).to(tl.float32)
    tl.store(places, total, mask=inside)


SUM_KERNEL = TritonKernel(_sum_tile, "terms are added one by one")


def add_together(pairs: Sequence[TermPair]) -> list[TermPair]:
    """Add terms to float32 targets, those of each target in the order given; return the pairs that are left to add.

    Targets are the same or have no element in common. All are left where there is no GPU, or no Triton.
    """
    if len(pairs) < 2 or pairs[0][0].device.type != "cuda" or SUM_KERNEL.find() is None:
        return list(pairs)
    return _launch_sums(pairs, pairs[0][0].device)


def _launch_sums(pairs: Sequence[TermPair], device: torch.device) -> list[TermPair]:
    left: list[TermPair] = []
    fitting: dict[tuple[int, torch.dtype], list[tuple[tuple[int, ...], list[TermPair]]]] = {}
    for same in _group_by_target(pairs):
        row = find_sum_row(same[0][0], [term for _, term in same])
        if row is None or any(t.device != device for pair in same for t in pair):
            left += same
        else:
            fitting.setdefault((len(same), same[0][1].dtype), []).append((row, same))
    for (count, dtype), found in fitting.items():
        try:
            _launch([row for row, _ in found], count, dtype, device)
        except Exception as error:  # Triton needs a compiler of the system, and more that may be missing
            SUM_KERNEL.disable(error)
            left += [pair for _, same in found for pair in same]
    return left


def _group_by_target(pairs: Sequence[TermPair]) -> list[list[TermPair]]:
    groups: dict[tuple[int, torch.Size], list[TermPair]] = {}
    for pair in pairs:
        groups.setdefault((pair[0].data_ptr(), pair[0].shape), []).append(pair)
    return list(groups.values())


def find_sum_row(target: Tensor, terms: Sequence[Tensor]) -> tuple[int, ...] | None:
    """A target and its terms as a row of the table; None if they do not fit."""
    kind = terms[0].dtype
    fits = target.dtype == torch.float32 and kind in TERM_KINDS and len(terms) <= _MOST_TERMS and target.numel() > 0
    if not fits or any(term.dtype != kind or term.is_neg() for term in terms):
        return None
    dims = _join_dims(target.shape, [t.stride() for t in (target, *terms)])
    if len(dims) > 3:
        return None
    dims = [(1, (0,) * (1 + len(terms)))] * (3 - len(dims)) + dims
    sizes, strides = [size for size, _ in dims], list(zip(*(each for _, each in dims), strict=True))
    places = [value for term, its in zip(terms, strides[1:], strict=True) for value in (term.data_ptr(), *its)]
    return (target.data_ptr(), *sizes, *strides[0], *places)


def _join_dims(shape: Sequence[int], strides: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """The dims as size and strides of all tensors, outermost first, those that adjoin in all of them joined.

    >>> _join_dims((2, 3, 4), [(12, 4, 1), (24, 4, 1)])
    [(2, (12, 24)), (12, (1, 1))]
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    for n, steps in zip(shape, zip(*strides, strict=True), strict=True):
        if n == 1:
            continue
        if dims and all(before == n * step for before, step in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * n, steps)
        else:
            dims.append((n, steps))
    return dims


def plan_tiles(rows: Sequence[tuple[int, ...]]) -> tuple[int, int, int]:
    """Tiles for the largest box, and the columns and rows of a tile."""
    shortest = min(row[3] for row in rows)
    columns = min(_SUM_TILE, max(16, 1 << (shortest - 1).bit_length()))
    height = _SUM_TILE // columns
    return max(-(-(row[1] * row[2]) // height) * -(-row[3] // columns) for row in rows), columns, height


def _launch(rows: Sequence[tuple[int, ...]], count: int, dtype: torch.dtype, device: torch.device) -> None:
    tiles, columns, height = plan_tiles(rows)
    kernel, kind = SUM_KERNEL.find()[(tiles, len(rows))], getattr(tl, TERM_KINDS[dtype])
    table = device_table(tuple(rows), device)
    launch_on(device, partial(kernel, table, TERMS=count, COLUMNS=columns, ROWS=height, KIND=kind, num_warps=8))
