"""Many boxes copied in one launch, by a kernel of Triton where that is installed.

A table on the device has a row for each box: both addresses, rows by two dims, the length of a row, strides. Boxes have
up to three dims after those that adjoin in memory are joined; a row is cut in units of 8 bytes. Where all places are
multiples of 16 bytes (WIDE), two units are read at once; where offsets fit in 32 bits (NARROW), they have so many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from shardwise._log import package_logger

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


def prepare_rows(rows: Sequence[BoxRow], device: torch.device) -> Callable[[], None]:
    """Return what copies these boxes in one launch, as often as it is called."""
    grid, form = plan_launch(rows)
    return partial(launch_on, device, TableLaunch(COPY_KERNEL.find(), grid, device_table(tuple(rows), device), form))


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
