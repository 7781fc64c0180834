"""Copies and reductions of boxes that may have strides, on any device.

Elements are copied in units of up to 16 bytes where both sides allow it: torch's kernels for tensors with strides move
one element at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.protocol import ReduceOp

BoxPair = tuple[Tensor, Tensor]
"""A target and a source of one shape."""

_UNITS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


def copy_boxes(pairs: Sequence[BoxPair]) -> None:
    """Copy each source into its target."""
    for target, source in pairs:
        copy_box(target, source)


def copy_box(target: Tensor, source: Tensor) -> None:
    """Copy one tensor into another of the same shape.

    >>> whole, part = torch.zeros(2, 8, dtype=torch.int16), torch.arange(8, dtype=torch.int16).view(2, 4)
    >>> copy_box(whole[:, 4:], part)
    >>> whole[1].tolist()
    [0, 0, 0, 0, 4, 5, 6, 7]
    """
    if target.dtype == source.dtype and not (target.is_contiguous() and source.is_contiguous()):
        unit = min(_unit_bytes(target), _unit_bytes(source))
        if unit > target.itemsize:
            target, source = target.view(_UNITS[unit]), source.view(_UNITS[unit])
    target.copy_(source)


def _unit_bytes(tensor: Tensor) -> int:
    """The most bytes, of 16 and its divisors, into which the rows of a tensor can be cut."""
    size = tensor.itemsize
    if tensor.ndim == 0 or tensor.stride(-1) != 1 or tensor.is_conj() or tensor.is_neg():
        return size
    places = [tensor.size(-1), tensor.storage_offset(), *tensor.stride()[:-1]]
    return next((unit for unit in _UNITS if unit > size and all(n * size % unit == 0 for n in places)), size)


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
