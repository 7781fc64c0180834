"""Sums of boxes from several ranks in one launch, by a kernel of Triton where that is installed.

Terms are read where they are and added in float32 to a target, in the order given: the same bits as one addition after
another, without a pass over the target for each term. A table on the device has a row for each target: its address, up
to three dims, and for each term an address and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.kernels.box_kernels import TritonKernel, device_table, launch_on

tl: Any = None  # triton.language, once it is needed: importing it takes long
TERM_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
HEAD_FIELDS, TERM_FIELDS = 7, 4  # target: address, three sizes, three strides; term: address, three strides
_TILE = 1024
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
    columns = min(_TILE, max(16, 1 << (shortest - 1).bit_length()))
    height = _TILE // columns
    return max(-(-(row[1] * row[2]) // height) * -(-row[3] // columns) for row in rows), columns, height


def _launch(rows: Sequence[tuple[int, ...]], count: int, dtype: torch.dtype, device: torch.device) -> None:
    tiles, columns, height = plan_tiles(rows)
    kernel, kind = SUM_KERNEL.find()[(tiles, len(rows))], getattr(tl, TERM_KINDS[dtype])
    table = device_table(tuple(rows), device)
    launch_on(device, partial(kernel, table, TERMS=count, COLUMNS=columns, ROWS=height, KIND=kind, num_warps=8))
