"""Are terms of several ranks added in one launch to the same bits as one after another?

The kernel runs in Triton's interpreter where Triton is installed. Everywhere its rows are carried out in plain Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.comm import Comm, LocalComm, run_local
from shardwise.comm.transports import kernels as box_sums
from shardwise.comm.transports.kernels import HEAD_FIELDS, TERM_FIELDS, find_sum_row, plan_tiles
from shardwise.geometry import Layout, Mesh, MeshSpec, Partial, Shard
from shardwise.tensor import execute, wrap
from shardwise.tensor.execute import combine_term
from tests.comm.transports.test_device_engine import LendingLocalComm
from tests.comm.transports.triton_interpreter import needs_triton, run_in_interpreter

CPU = torch.device("cpu")


def at_address(address: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    length = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory = (ctypes.c_uint8 * (length * dtype.itemsize)).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(dtype).as_strided(sizes, strides)


def add_rows(rows: Sequence[tuple[int, ...]], count: int, dtype: torch.dtype, device: torch.device) -> None:
    """What the kernel does with its table, in host memory."""
    for address, *rest in rows:
        sizes, strides, terms = rest[:3], rest[3:6], rest[6:]
        assert len(terms) == count * TERM_FIELDS and len(rest) == HEAD_FIELDS - 1 + len(terms)
        target = at_address(address, torch.float32, sizes, strides)
        for i in range(0, len(terms), TERM_FIELDS):
            target += at_address(terms[i], dtype, sizes, terms[i + 1 : i + TERM_FIELDS]).float()


def boxes(dtype: torch.dtype) -> list[tuple[Tensor, list[Tensor]]]:
    """Targets, with terms of other strides: a whole tensor, columns, a block of three dims, a scalar."""
    generator = torch.Generator(CPU).manual_seed(1)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)

    def zeros(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float32, device="cpu")

    return [
        (zeros(6, 40), [values(6, 40), values(8, 40)[1:7], values(6, 50)[:, 3:43]]),
        (zeros(6, 40)[:, 5:9], [values(6, 4), values(6, 12)[:, ::3], values(4, 6).t()]),
        (zeros(3, 5, 7)[:2, 1:4], [values(2, 3, 7), values(4, 6, 8)[:2, :3, :7], values(2, 3, 7)]),
        (zeros(1, 1), [values(1, 1), values(9, 9)[2:3, 4:5], values(1, 1)]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_of_the_table_describes_a_target_and_its_terms(dtype: torch.dtype) -> None:
    for target, terms in boxes(dtype):
        wanted = target.clone()
        for term in terms:
            wanted += term.float()
        row = find_sum_row(target, terms)
        assert row is not None
        add_rows([row], len(terms), dtype, CPU)
        assert torch.equal(target, wanted)


def test_what_the_kernel_cannot_take_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.zeros(4, 4, 4, 4, device="cpu")
    every_other = torch.ones(8, 8, 8, 8, device="cpu")[::2, ::2, ::2, ::2]
    assert find_sum_row(target, [every_other]) is None  # four dims
    assert find_sum_row(target.to(torch.bfloat16), [target.to(torch.bfloat16)]) is None  # sums of low precision
    assert find_sum_row(target, [target, target.to(torch.bfloat16)]) is None  # terms of different dtypes
    assert find_sum_row(target[:0], [target[:0]]) is None
    monkeypatch.setattr(box_sums, "_launch", add_rows)
    other = torch.zeros(2, device="cpu")
    pairs = [(target, every_other), (other, torch.ones(2, device="cpu")), (target, every_other)]
    left = box_sums._launch_sums(pairs, CPU)
    assert [(a is target, b is every_other) for a, b in left] == [(True, True)] * 2
    assert other.tolist() == [1, 1] and not target.any()


def test_terms_are_added_one_by_one_where_the_kernel_does_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(box_sums.SUM_KERNEL, "problem", None)

    def fail(*args: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(box_sums, "_launch", fail)
    pairs = [(torch.zeros(4, device="cpu"), torch.ones(4, device="cpu")) for _ in range(2)]
    assert box_sums._launch_sums(pairs, CPU) == pairs
    assert box_sums.SUM_KERNEL.find() is None
    assert "terms are added one by one: Triton's kernel does not run here (no compiler)" in caplog.text


def resolve(comm: Comm, src: Layout, dst: Layout, terms: Sequence[Tensor]) -> Tensor:
    assert isinstance(comm, LocalComm)
    lending = LendingLocalComm(comm.rank, comm._hub, timeout=comm.timeout)
    return wrap(src, (terms[comm.rank],), lending, dtype=terms[0].dtype).redistribute(dst).local_tensor()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [0, 1])
def test_moves_add_in_one_launch_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int
) -> None:
    """Sums that are not the comm's collective, with and without the kernel."""
    mesh = Mesh.of(x=4)
    src, dst = (MeshSpec(mesh, (kind,)).layout((10, 11)) for kind in (Partial("sum"), Shard(dim)))
    generator = torch.Generator(CPU).manual_seed(2)
    terms = [torch.randn(10, 11, generator=generator, device="cpu").to(dtype) for _ in range(4)]
    plain = run_local(resolve, 4, src, dst, terms)
    launched: list[int] = []

    def launch(rows: Sequence[tuple[int, ...]], count: int, *rest: Any) -> None:
        launched.append(count)
        add_rows(rows, count, *rest)

    monkeypatch.setattr(box_sums, "_launch", launch)
    monkeypatch.setattr(execute, "add_together", lambda pairs: box_sums._launch_sums(pairs, CPU))
    together = run_local(resolve, 4, src, dst, terms)
    assert launched == [3] * 4
    assert all(torch.equal(a, b) for a, b in zip(plain, together, strict=True))


@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_terms_of_low_precision_are_combined_as_if_they_were_converted(op: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(CPU).manual_seed(3)
    target, part = (torch.randn(500, generator=generator, device="cpu") for _ in range(2))
    target[:3] = torch.tensor([float("nan"), 0.0, -1.0], device="cpu")
    part = part.to(dtype)
    part[3] = float("nan")
    wanted = target.clone()
    combine_term(op, wanted, part.float())
    combine_term(op, target, part)
    assert torch.equal(target.view(torch.int32), wanted.view(torch.int32))


IN_TRITON = """
import torch
from shardwise.comm.transports import kernels as box_sums
from tests.comm.transports.test_box_sums import boxes
box_sums.device_table = lambda rows, device: torch.tensor(rows, dtype=torch.int64, device="cpu")
box_sums.launch_on = lambda device, launch: launch()
for dtype in box_sums.TERM_KINDS:
    held = boxes(dtype)
    wanted = [target.clone() for target, _ in held]
    for total, (_, terms) in zip(wanted, held):
        for term in terms:
            total += term.float()
    pairs = [(target, term) for target, terms in held for term in terms]
    left = box_sums._launch_sums(pairs, torch.device("cpu"))
    assert not left and box_sums.SUM_KERNEL.problem is None, (left, box_sums.SUM_KERNEL.problem)
    assert all(torch.equal(target, total) for (target, _), total in zip(held, wanted)), dtype
print("added")
"""


@needs_triton
def test_kernel_in_the_interpreter() -> None:
    assert run_in_interpreter(IN_TRITON) == "added\n"


def test_tiles_cover_the_largest_box() -> None:
    rows = [(0, 1, 6, 40), (0, 2, 3, 7), (0, 1, 1, 5000)]
    tiles, columns, height = plan_tiles(rows)
    for _, outer, inner, length in rows:
        assert tiles >= -(-outer * inner // height) * -(-length // columns)
