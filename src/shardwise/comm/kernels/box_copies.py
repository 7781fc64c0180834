"""Copies and reductions of boxes that may have strides, on any device.

Elements are copied in units of up to 16 bytes where both sides allow it: torch's kernels for tensors with strides move
one element at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.kernels.box_kernels import COPY_KERNEL, find_row, prepare_rows
from shardwise.comm.protocol import ReduceOp

BoxPair = tuple[Tensor, Tensor]
"""A target and a source of one shape."""

_UNITS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


def copy_boxes(pairs: Sequence[BoxPair]) -> Callable[[], None] | None:
    """Copy each source into its target; several on one GPU in one launch, where Triton is installed.

    If one launch took them all, what makes it again is returned: it knows addresses alone and keeps no tensor alive.
    """
    launch = None
    if len(pairs) > 1 and pairs[0][0].device.type == "cuda" and COPY_KERNEL.find() is not None:
        launch, pairs = _launch_fitting(pairs)
    for target, source in pairs:
        copy_box(target, source)
    return None if pairs else launch


def _launch_fitting(pairs: Sequence[BoxPair]) -> tuple[Callable[[], None] | None, list[BoxPair]]:
    """Copy the boxes that one launch can take; return the launch, and the others."""
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
    if not rows:
        return None, rest
    try:
        launch = prepare_rows(rows, device)
        launch()
    except Exception as error:  # Triton needs a compiler of the system, and more that may be missing
        COPY_KERNEL.disable(error)
        return None, list(pairs)
    return launch, rest


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
