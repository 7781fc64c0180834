"""Are boxes copied whole, in whatever units, and described rightly to the kernel that copies many of them?"""

from __future__ import annotations

import ctypes
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm.transports import kernels as box_copies
from shardwise.comm.transports import kernels as box_kernels
from shardwise.comm.transports.kernels import (
    COPY_KERNEL,
    UNIT,
    TableLaunch,
    copy_box,
    copy_boxes,
    find_row,
    reduce_tensors,
)
from tests.moving import DTYPES, same_bytes, values

BOXES = [
    (slice(2, 5), slice(4, 40), slice(0, 4)),
    (slice(0, 8), slice(0, 64), slice(2, 4)),
    (slice(1, 2), slice(0, 64), slice(0, 6)),
    (slice(0, 8), slice(3, 60), slice(0, 6)),
    (slice(0, 8), slice(0, 64), slice(1, 2)),
    (slice(3, 3), slice(0, 64), slice(0, 6)),
]


def copy_row(row: tuple[int, ...]) -> None:
    """What the kernel does with one row of its table, in host memory."""
    to, at, outer, inner, length, a0, a1, b0, b1 = row
    for i, j in product(range(outer), range(inner)):
        ctypes.memmove(to + UNIT * (i * a0 + j * a1), at + UNIT * (i * b0 + j * b1), UNIT * length)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("box", BOXES)
def test_box_is_copied_in_any_dtype(dtype: torch.dtype, box: tuple[slice, ...]) -> None:
    source, target = values((8, 64, 6), dtype), values((8, 64, 6), dtype).flip(0).contiguous()
    wanted = target.clone()
    wanted[box] = source[box]
    copy_box(target[box], source[box])
    assert same_bytes(target, wanted)
    packed = torch.empty_like(source[box], memory_format=torch.contiguous_format)
    assert copy_boxes([(packed, source[box])]) is None
    assert same_bytes(packed, source[box])


@pytest.mark.parametrize("box", BOXES[:4])
def test_row_of_the_table_describes_the_box(box: tuple[slice, ...]) -> None:
    source = torch.arange(8 * 64 * 6, dtype=torch.float32, device="cpu").view(8, 64, 6)
    target, dense = torch.zeros_like(source), torch.zeros_like(source[box], memory_format=torch.contiguous_format)
    for pair in ((dense, source[box]), (target[box], dense)):
        row = find_row(*pair)
        assert row is not None
        copy_row(row)
        assert torch.equal(*pair)
    assert target.sum() == source[box].sum()


@pytest.mark.parametrize(
    "part",
    [
        lambda t: t[:2, :3, 0],  # rows of one element with strides
        lambda t: t[:, :, :3],  # 12 bytes are not units of 8
        lambda t: t.transpose(1, 2),
        lambda t: t.view(8, 8, 8, 6)[::2, ::2, ::2, :4],  # more dims than the kernel has
    ],
)
def test_box_that_the_kernel_cannot_take_has_no_row(part: object) -> None:
    source: Tensor = part(torch.zeros(8, 64, 6, device="cpu"))  # type: ignore[operator]  # one of the functions above
    assert find_row(torch.empty(source.shape, device="cpu"), source) is None


def test_kernel_reads_16_bytes_at_once_only_where_all_places_allow_it() -> None:
    whole, part = torch.zeros(64, 64, device="cpu"), torch.zeros(64, 16, device="cpu")

    def plan(left: int, width: int) -> tuple[bool, bool]:
        row = find_row(part[:, :width], whole[:, left : left + width])
        assert row is not None
        form = box_kernels.plan_launch([row])[1]
        return bool(form["WIDE"]), bool(form["NARROW"])

    assert whole.data_ptr() % 16 == part.data_ptr() % 16 == 0
    assert plan(4, 8) == (True, True)
    assert plan(2, 8) == (False, True), "the address is a multiple of 8 bytes"
    assert plan(4, 6) == (False, True), "the length of a row is"


def test_kernel_counts_in_64_bits_where_offsets_need_them() -> None:
    row = (0, 0, 1, 4, 16, 0, 1 << 28, 0, 16)
    assert box_kernels.plan_launch([row]) == (
        (1, 1),
        {"COLUMNS": 16, "ROWS": 128, "FIELDS": 9, "WIDE": True, "NARROW": False},
    )
    few = (0, 0, 1, 4, 16, 0, 1 << 27, 0, 16)
    assert box_kernels.plan_launch([few])[1]["NARROW"] and not box_kernels.plan_launch([few, row])[1]["NARROW"]


def test_reduction_may_write_to_any_of_its_terms() -> None:
    for place in range(4):
        terms = [torch.tensor([1.0, 5.0]) * (i + 1) for i in range(4)]
        reduce_tensors(terms[place], list(terms), "avg")
        assert terms[place].tolist() == [2.5, 12.5]


def test_boxes_are_copied_one_by_one_where_the_kernel_does_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(box_kernels.COPY_KERNEL, "problem", None)

    def fail(rows: object, device: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(box_copies, "copy_rows", fail)
    pairs = [(torch.zeros(4, device="cpu"), torch.ones(4, device="cpu")) for _ in range(2)]
    assert box_copies._launch_fitting(pairs) == pairs
    assert box_kernels.COPY_KERNEL.find() is None
    assert "boxes are copied one by one: Triton's kernel does not run here (no compiler)" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available() or COPY_KERNEL.find() is None, reason="needs a GPU and Triton")
def test_boxes_are_copied_in_one_launch() -> None:
    source = torch.rand(64, 4096, device="cuda")
    target = torch.zeros_like(source)
    cuts = [(slice(i, i + 16), slice(j, j + 1000)) for i in range(0, 64, 16) for j in range(0, 4000, 1000)]
    assert box_copies._launch_fitting([(target[cut], source[cut]) for cut in cuts]) == []
    assert torch.equal(target[:, :4000], source[:, :4000]) and not target[:, 4000:].any()
    source.add_(1)
    box_copies._launch_fitting([(target[cut], source[cut]) for cut in cuts])
    assert torch.equal(target[:, :4000], source[:, :4000])


class CompiledStub:
    """What Triton returns of a launch; it launches again for a grid."""

    def __init__(self, launched: list[str], takes: int) -> None:
        self._launched, self._takes = launched, takes

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def again(*args: object) -> None:
            if len(args) != self._takes:
                raise TypeError("function takes other arguments")
            self._launched.append(f"again on {grid}")

        return again


@pytest.mark.parametrize(("takes", "later"), [(3, "again on (7, 2, 1)"), (1, "found on (7, 2)")])
def test_compiled_kernel_is_launched_without_being_looked_for(takes: int, later: str) -> None:
    launched: list[str] = []

    class KernelStub:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def find(table: Tensor, A: int, B: int, num_warps: int) -> CompiledStub:
                launched.append(f"found on {grid}")
                return CompiledStub(launched, takes)

            return find

    launch = TableLaunch(KernelStub(), (7, 2), torch.zeros(1, device="cpu"), {"A": 1, "B": 2})
    for _ in range(3):
        launch()
    assert launched == ["found on (7, 2)", later, later]
