"""Reductions of runs of memory into one or several targets, float32 sums in one launch by a kernel of Triton.

Each sum has terms and targets, all of one length. A table on the device has a row for each sum: the length, the
addresses of the terms, those of the targets. Terms are added in the order given, as `reduce_tensors` does, and every
target gets the same bits. A target may be one of the terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.kernels.box_copies import copy_boxes, reduce_tensors
from shardwise.comm.kernels.box_kernels import TableLaunch, TritonKernel, device_table, launch_on
from shardwise.comm.protocol import ReduceOp

tl: Any = None  # triton.language, once it is needed: importing it takes long
_BLOCK = 2048  # elements, for one program
_MOST_RUNS = 64
_WIDE = 4  # elements that are read at once where every run begins and ends at a multiple of them

RunSum = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Terms and targets of one length."""


def _reduce_tile(table, TERMS: tl.constexpr, TARGETS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads the annotations
    row = table + tl.program_id(1) * (1 + TERMS + TARGETS)
    length = tl.multiple_of(tl.load(row), UNIT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    first = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 4 * UNIT)
    total = tl.load(first + at, mask=inside)
    for number in range(1, TERMS):
        term = tl.multiple_of(tl.load(row + 1 + number).to(tl.pointer_type(tl.float32)), 4 * UNIT)
        total += tl.load(term + at, mask=inside)
    for number in range(TARGETS):
        target = tl.multiple_of(tl.load(row + 1 + TERMS + number).to(tl.pointer_type(tl.float32)), 4 * UNIT)
        tl.store(target + at, total, mask=inside)


RUN_KERNEL = TritonKernel(_reduce_tile, "runs are reduced one by one")


def reduce_runs(sums: Sequence[RunSum], op: ReduceOp) -> Callable[[], None] | None:
    """Reduce the terms of each sum into its targets.

    If one launch took them all, what makes it again is returned: it knows addresses alone and keeps no tensor alive.

    >>> targets = torch.zeros(2), torch.zeros(2)
    >>> reduce_runs([([torch.tensor([1.0, 2.0]), torch.tensor([5.0, 0.0])], targets)], "max")
    >>> [target.tolist() for target in targets]
    [[5.0, 2.0], [5.0, 2.0]]
    """
    if op == "sum" and (rows := find_run_rows(sums)) is not None and RUN_KERNEL.find() is not None:
        try:
            launch = prepare_sums(rows, len(sums[0][0]), sums[0][1][0].device)
            launch()
            return launch
        except Exception as error:  # Triton needs a compiler of the system, and more that may be missing
            RUN_KERNEL.disable(error)
    for terms, targets in sums:
        reduce_tensors(targets[0], terms, op)
        copy_boxes([(target, targets[0]) for target in targets[1:]])
    return None


def find_run_rows(sums: Sequence[RunSum], kind: str = "cuda") -> list[tuple[int, ...]] | None:
    """The table of these sums; None if a launch cannot take them all."""
    counts = {(len(terms), len(targets)) for terms, targets in sums}
    if len(counts) != 1 or max(counts.pop()) > _MOST_RUNS:
        return None
    tensors = [t for terms, targets in sums for t in (*terms, *targets)]
    if any(t.dtype != torch.float32 or not t.is_contiguous() or t.is_neg() for t in tensors):
        return None
    if len({t.device for t in tensors}) > 1 or tensors[0].device.type != kind:
        return None
    return [(terms[0].numel(), *(t.data_ptr() for t in (*terms, *targets))) for terms, targets in sums]


def prepare_sums(rows: Sequence[tuple[int, ...]], terms: int, device: torch.device) -> Callable[[], None]:
    """Return what carries out these rows in one launch, as often as it is called."""
    aligned = all(row[0] % _WIDE == 0 and not any(place % (4 * _WIDE) for place in row[1:]) for row in rows)
    tiles = max(-(-row[0] // _BLOCK) for row in rows)
    form = {"TERMS": terms, "TARGETS": len(rows[0]) - 1 - terms, "BLOCK": _BLOCK, "UNIT": _WIDE if aligned else 1}
    launch = TableLaunch(RUN_KERNEL.find(), (tiles, len(rows)), device_table(tuple(rows), device), form)
    return partial(launch_on, device, launch)
