"""Does the page of the operator database count calls as they end?"""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bench.op_db_dtensor
from bench.op_db import main, page, run_on_threads, run_ours
from bench.op_db_calls import (
    IN_PLACE,
    LAYOUTS,
    OUT,
    REFUSED,
    RIGHT,
    UNCLEAR,
    WRONG,
    Answer,
    Call,
    Ending,
    addend,
    answer,
    calls,
    compare,
    layouts_of,
    name_of,
)
from bench.op_samples import operators
from shardwise import Replicate, Shard, register_sharding, remove_sharding

NUMBERS = {name_of(op): number for number, op in enumerate(operators())}


def test_every_form_dtype_and_layout_of_add_is_tried() -> None:
    endings = run_ours([NUMBERS["add"]], samples=3)
    assert {e.layout for e in endings} == set(LAYOUTS)
    assert {e.dtype for e in endings} == {"float32", "complex64", "int64", "bool", "bfloat16"}
    assert {e.form for e in endings} == {"call", IN_PLACE, OUT}
    assert [e for e in endings if e.kind != RIGHT] == []


LAYOUT_HEAVY = ("exp", "scatter_reduce sum", "unsqueeze", "as_strided", "resize_", "linalg.inv", "unbind_copy", "msort")


@pytest.mark.parametrize("name", LAYOUT_HEAVY)
def test_every_call_of_operators_that_write_or_turn_is_right(name: str) -> None:
    assert [e for e in run_ours([NUMBERS[name]], samples=1) if e.kind != RIGHT] == []


def test_wrong_values_and_gradients_are_noticed() -> None:
    ones = torch.ones(2)
    right = Answer([ones], [ones])
    assert compare(right, right, torch.float32) is None
    assert compare(Answer([ones * 2], [ones]), right, torch.float32) == "2 of 2 elements, by at most 1"
    assert compare(Answer([ones], [ones * 3]), right, torch.float32) == "gradient: 2 of 2 elements, by at most 2"


@torch.library.custom_op("shardwise_op_db::running", mutates_args=())
def running(x: Tensor) -> Tensor:
    return x.cumsum(0)


def _call(*shape: int, dtype: torch.dtype = torch.float32) -> Call:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype) + 1
    return Call("planted", dtype, 0, "call", torch.ops.shardwise_op_db.running, ((tensor,), {}), False, False)


def test_a_planted_wrong_rule_ends_as_wrong() -> None:
    register_sharding(running)(lambda x: [([Shard(d)], [Shard(d)]) for d in (0, 1)] + [([Replicate()], [Replicate()])])
    try:
        call = _call(5, 2)
        wanted = answer(call, lambda tensor: tensor, lambda value: value)
        kinds = {layout: run_on_threads(call, wanted, layout).kind for layout in ("S(0)", "S(-1)", "R", "uneven")}
    finally:
        remove_sharding(running)
    assert kinds == {"S(0)": WRONG, "S(-1)": RIGHT, "R": RIGHT, "uneven": WRONG}


def test_a_layout_that_is_another_one_is_not_counted_again() -> None:
    assert layouts_of(_call(5, 2)) == ["R", "S(0)", "S(-1)", "P", "uneven"]
    assert layouts_of(_call(5)) == ["R", "S(0)", "P", "uneven"]
    assert layouts_of(_call(2, 3)) == ["R", "S(0)", "S(-1)", "P"]
    assert layouts_of(_call()) == ["R", "P"]
    assert layouts_of(_call(5, 2, dtype=torch.bool)) == ["R", "S(0)", "S(-1)", "uneven"]


def test_gradients_are_part_of_a_call() -> None:
    found = [wanted for call, wanted in calls(operators()[NUMBERS["mul"]], 1) if call.gradients]
    assert found and all(g is not None for wanted in found for g in wanted.gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.bfloat16])
def test_addends_make_up_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.tensor([3, -5, 0]).to(dtype)
    assert torch.equal(addend(tensor, 0) + addend(tensor, 1), tensor)


def test_the_page_adds_up() -> None:
    mine = [
        Ending("add", "float32", "call", "R", RIGHT),
        Ending("add", "float32", "call", "P", WRONG),
        Ending("mul", "bool", "out=", "R", REFUSED),
    ]
    lines = page(mine, [Ending("add", "float32", "call", "R", RIGHT)], 1).splitlines()
    assert "| all | 3 | 1 | 1 | 0 | 1 | 33.3 % | 1 | 1 | 0 | 100 % |" in lines
    assert "| `add` | 2 | 1 | 0 | 0 | 1 | 50 % | 1 | 1 | 0 | 100 % |" in lines
    assert "| `mul` | 1 | 0 | 1 | 0 | 0 | 0 % | 0 | 0 | 0 |  |" in lines


def _pipes() -> tuple[list[Any], list[Any]]:
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def test_ranks_of_a_dtensor_that_end_differently_are_wrong() -> None:
    here, there = _pipes()
    right, unclear = (Ending("add", "float32", "call", "R", kind) for kind in (RIGHT, UNCLEAR))
    for said in ((right, right), (right, unclear), (None, None)):
        for pipe, ending in zip(there, said, strict=True):
            pipe.send(ending)
    first, second, last = bench.op_db_dtensor._collect(here, 1)
    assert first == right and last is None
    assert isinstance(second, Ending) and second.kind == WRONG and second.text == "right:  / unclear: "


def test_a_world_of_dtensors_that_hangs_or_ends_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.op_db_dtensor, "STALLED", 0.01)
    here, there = _pipes()
    assert list(bench.op_db_dtensor._collect(here, 2)) == ["no end within 0.01 s"]
    there[0].close()
    there[1].send(None)
    assert list(bench.op_db_dtensor._collect(here, 2)) == ["a process ended"]
    worlds = iter([[None, "a process ended"], [None]])
    monkeypatch.setattr(bench.op_db_dtensor, "_run_in_a_world", lambda numbers, samples: next(worlds))
    numbers = [NUMBERS["add"], NUMBERS["sub"], NUMBERS["mul"]]
    assert bench.op_db_dtensor.run_dtensors(numbers, 1) == [Ending("sub", "", "call", "", UNCLEAR, "a process ended")]


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    files = [str(tmp_path / "page.md"), "--failures", str(tmp_path / "bad.txt")]
    main([*files, "--only", "to_sparse,positive", "--samples", "1", "--no-dtensor"])
    assert "## Operators (2)" in (tmp_path / "page.md").read_text()
    refused = (tmp_path / "bad.txt").read_text().splitlines()
    assert refused and all(line.startswith("refused: to_sparse ") and "torch.strided" in line for line in refused)
