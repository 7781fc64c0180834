"""Are runs of several ranks reduced to the same bits in one launch as one after another, for one target and for many?

The kernel runs in Triton's interpreter where Triton is installed. Everywhere its rows are carried out in plain Python.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.comm.kernels import run_sums
from shardwise.comm.kernels.box_kernels import TableLaunch
from shardwise.comm.kernels.run_sums import RunSum, find_run_rows, reduce_runs
from shardwise.comm.transports import same_host_device
from shardwise.comm.transports.same_host_device import SameHostDeviceEngine
from tests.fake_device import FakeDevice, engines, on_device, run
from tests.local.test_box_sums import at_address
from tests.local.triton_interpreter import needs_triton, run_in_interpreter

CPU = torch.device("cpu")


def make_sums(counts: tuple[int, int], lengths: tuple[int, ...]) -> tuple[list[RunSum], list[Tensor]]:
    """Sums of so many terms into so many targets, the first of which is the last term; and the right results."""
    generator = torch.Generator(CPU).manual_seed(len(lengths))
    sums: list[RunSum] = []
    wanted = []
    for length in lengths:
        terms = [torch.randn(length, generator=generator, device="cpu") for _ in range(counts[0])]
        targets = [terms[-1], *(torch.zeros(length, device="cpu") for _ in range(counts[1] - 1))]
        total = terms[0].clone()
        for term in terms[1:]:
            total = total + term
        sums.append((terms, targets))
        wanted.append(total)
    return sums, wanted


def carry_out(rows: Any, terms: int) -> None:
    """What the kernel does with its table, in host memory."""
    for length, *places in rows:
        runs = [at_address(place, torch.float32, (length,), (1,)) for place in places]
        total = runs[0].clone()
        for term in runs[1:terms]:
            total += term
        for target in runs[terms:]:
            target.copy_(total)


@pytest.mark.parametrize(("counts", "lengths"), [((4, 1), (8, 8, 8)), ((4, 4), (5000,)), ((3, 2), (7, 1, 3000))])
@pytest.mark.parametrize("in_rows", [False, True])
def test_every_target_gets_the_sum_in_the_order_of_terms(
    counts: tuple[int, int], lengths: tuple[int, ...], in_rows: bool
) -> None:
    sums, wanted = make_sums(counts, lengths)
    if in_rows:
        rows = find_run_rows(sums, "cpu")
        assert rows is not None and {len(row) for row in rows} == {1 + sum(counts)}
        carry_out(rows, counts[0])
    else:
        assert reduce_runs(sums, "sum") is None
    for (_, targets), total in zip(sums, wanted, strict=True):
        assert len(targets) == counts[1] and all(torch.equal(target, total) for target in targets)


def test_what_a_launch_cannot_take() -> None:
    x, y = torch.ones(4, device="cpu"), torch.ones(4, dtype=torch.float64, device="cpu")
    assert find_run_rows([([x, x], [x])], "cpu") is not None
    assert find_run_rows([([x, x], [x])]) is None  # not on a GPU
    assert find_run_rows([([y, y], [y])], "cpu") is None
    assert find_run_rows([([x, x], [x]), ([x], [x])], "cpu") is None
    assert find_run_rows([([torch.ones(8, device="cpu")[::2], x], [x])], "cpu") is None
    assert find_run_rows([], "cpu") is None
    assert find_run_rows([([x] * 65, [x])], "cpu") is None


def test_runs_are_reduced_one_by_one_where_the_kernel_does_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_sums.RUN_KERNEL, "problem", None)
    monkeypatch.setattr(run_sums.RUN_KERNEL, "find", lambda: None if run_sums.RUN_KERNEL.problem else object())
    monkeypatch.setattr(run_sums, "find_run_rows", lambda sums: find_run_rows(sums, "cpu"))

    def fail(*args: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(run_sums, "prepare_sums", fail)
    for _ in range(2):
        sums, (wanted,) = make_sums((3, 2), (5,))
        assert reduce_runs(sums, "sum") is None
        assert all(torch.equal(target, wanted) for target in sums[0][1])
    assert caplog.text.count("runs are reduced one by one: Triton's kernel does not run here (no compiler)") == 1


@pytest.mark.parametrize(("led", "one_shot"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_all_ranks_get_the_same_bits_by_each_path(
    monkeypatch: pytest.MonkeyPatch, op: Any, led: bool, one_shot: bool
) -> None:
    monkeypatch.setattr(same_host_device, "is_one_shot_faster", lambda nbytes, world: one_shot)
    generator = torch.Generator(CPU).manual_seed(4)
    given = [torch.randn(1003, generator=generator, device="cpu") for _ in range(3)]
    wanted = torch.maximum(torch.maximum(*given[:2]), given[2]) if op == "max" else given[0] + given[1] + given[2]
    wanted = wanted / 3 if op == "avg" else wanted
    device = FakeDevice()

    def body(rank: int, engine: SameHostDeviceEngine) -> None:
        mine, out = on_device(device, given[rank]), on_device(device, torch.zeros(1003, device="cpu"))
        engine.all_reduce_into(out, mine, op, call="into").wait()
        assert torch.equal(out, wanted) and torch.equal(mine, given[rank])
        engine.all_reduce(mine, op, call="in place").wait()
        assert torch.equal(mine, wanted)

    with engines(3, device, led=led) as made:
        run(made, body)


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


IN_TRITON = """
import torch
from shardwise.comm.kernels import run_sums
from shardwise.comm.kernels.box_kernels import TableLaunch
from tests.local.test_run_sums import make_sums
run_sums.device_table = lambda rows, device: torch.tensor(rows, dtype=torch.int64, device="cpu")
run_sums.launch_on = lambda device, launch: launch()
for counts, lengths in (((4, 1), (8, 8, 8)), ((4, 4), (5000,)), ((3, 2), (7, 1, 3000))):
    sums, wanted = make_sums(counts, lengths)
    run_sums.prepare_sums(run_sums.find_run_rows(sums, "cpu"), counts[0], torch.device("cpu"))()
    for (_, targets), total in zip(sums, wanted):
        assert all(torch.equal(target, total) for target in targets), counts
print("added")
"""


@needs_triton
def test_kernel_in_the_interpreter() -> None:
    assert run_in_interpreter(IN_TRITON) == "added\n"
