"""Does every rank take the same decision before anything is sent? Wrong types, DTensors, layouts made at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import (
    Comm,
    CommError,
    Partial,
    Replicate,
    from_local,
    parse_spec,
    redistribute_many,
    run_local,
    shard,
)
from shardwise.checkpoint import load, save
from shardwise.comm import DisagreementError, agree
from shardwise.compat._shard.sharded_tensor import init_from_local_shards
from shardwise.tensor import ShardedTensor
from tests.dense import WaitsForAnotherThread

ROWS = "on tp=2: S(0)"
TIMEOUT = 60.0


def endings(call: Callable[[bool], Any]) -> list[str]:
    """How a call ends on each of two ranks, of which the second makes a mistake."""

    def one(comm: Comm) -> str:
        try:
            call(comm.rank == 1)
        except CommError as error:
            return f"left waiting: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    return run_local(one, 2, timeout=TIMEOUT)


def given(odd: bool, mistake: Any, right: Any) -> Any:
    return mistake if odd else right


MISTAKES: dict[str, tuple[Callable[[bool], Any], str]] = {
    "a text for local shards": (
        lambda odd: init_from_local_shards(given(odd, "no list", []), 8, 4),
        "TypeError: rank 1: local_shards is a list of Shards, got str",
    ),
    "tensors for local shards": (
        lambda odd: init_from_local_shards(given(odd, [torch.zeros(8, 4)], []), 8, 4),
        "TypeError: rank 1: local_shards is a list of Shards, got one of Tensor",
    ),
    "nothing for local shards": (
        lambda odd: init_from_local_shards(given(odd, None, []), 8, 4),
        "TypeError: rank 1: local_shards is a list of Shards, got NoneType",
    ),
    "a text for a length": (
        lambda odd: init_from_local_shards([], given(odd, "eight", 8), 4),
        "rank 1: ",
    ),
    "a text for a local tensor": (
        lambda odd: from_local(given(odd, "no tensor", torch.zeros(4, 4)), parse_spec(ROWS), (8, 4)),
        "rank 1: from_local takes a tensor or a list of tensors, got str",
    ),
    "numbers for local tensors": (
        lambda odd: from_local(given(odd, [1.0], torch.zeros(4, 4)), parse_spec(ROWS), (8, 4)),
        "rank 1: local tensors are plain tensors, got float",
    ),
    "a text for the layout of local tensors": (
        lambda odd: from_local(torch.zeros(4, 4), given(odd, "rows", parse_spec(ROWS)), (8, 4)),
        "rank 1: expected S(dim), R or P",
    ),
    "a list for a whole tensor": (
        lambda odd: shard(given(odd, [1.0, 2.0], torch.zeros(8, 4)), parse_spec(ROWS), None),
        "rank 1: shard takes a whole tensor, got list",
    ),
    "a text for a spec": (
        lambda odd: shard(torch.zeros(8, 4), given(odd, "rows", parse_spec(ROWS)), None),
        "expected S(dim), R or P",
    ),
    "a number for a target": (
        lambda odd: shard(torch.zeros(8, 4), parse_spec(ROWS), None).redistribute(given(odd, 3.5, (Replicate(),))),
        "placements such as (Shard(0),), or a mesh and placements; got float: 3.5",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_type_on_one_rank_only(name: str) -> None:
    """Every rank raises the same error; none waits for the one that made the mistake."""
    call, text = MISTAKES[name]
    one, other = endings(call)
    assert one == other and text in one, f"{one}\n{other}"


def test_two_threads_that_make_one_layout_get_one_object() -> None:
    """Else one rank takes a tensor given twice for two, and moves it twice."""
    spec = WaitsForAnotherThread()
    first, second = run_local(lambda comm: spec.layout((6,)), 2, timeout=TIMEOUT)
    assert first is second


def test_a_new_layout_at_once_on_all_ranks() -> None:
    """A tensor given twice is moved once on every rank, however the threads take turns."""

    def body(comm: Comm, length: int) -> bool:
        whole = torch.arange(length, dtype=torch.float64)
        x = from_local(whole / 4, parse_spec("on tp=4: P(sum)"), (length,))
        square: Any = x * x
        return torch.equal(square.full(), whole * whole)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for length in range(2, 32):
            assert run_local(body, 4, length, timeout=TIMEOUT) == [True] * 4
    finally:
        sys.setswitchinterval(interval)


def empty_then_full() -> list[ShardedTensor]:
    """Pending tensors, the first without elements."""
    spec = parse_spec("on tp=2: P(sum)")
    return [from_local(torch.ones(shape), spec, shape) for shape in ((0, 3), (4, 3), (3, 0))]


def test_an_empty_tensor_may_come_first() -> None:
    def body(comm: Comm) -> list[Any]:
        moved = redistribute_many(empty_then_full(), [(Replicate(),)] * 3)
        waited = redistribute_many(empty_then_full(), [(Replicate(),)] * 3, async_op=True).wait()
        alone = empty_then_full()[0].redistribute((Replicate(),), async_op=True).wait()
        return [[t.local_tensor().tolist() for t in ts] for ts in (moved, waited, [alone])]

    full = [[2.0] * 3] * 4
    assert run_local(body, 2, timeout=TIMEOUT) == [[[[], full, [[]] * 3]] * 2 + [[[]]]] * 2


def test_pending_tensors_are_saved_with_an_empty_one_first(tmp_path: Path) -> None:
    def body(comm: Comm) -> Any:
        save({f"{i}": t for i, t in enumerate(empty_then_full())}, tmp_path / "c")
        state = {"1": shard(torch.zeros(4, 3), parse_spec(ROWS), None)}
        load(state, tmp_path / "c", strict=False)
        return torch.equal(state["1"].full(), torch.full((4, 3), 2.0))

    assert run_local(body, 2, timeout=TIMEOUT) == [True, True]


def test_a_partial_that_is_waited_for_twice_is_moved_once() -> None:
    def body(comm: Comm) -> bool:
        handle = empty_then_full()[1].redistribute((Partial("avg"),), async_op=True)
        return handle.wait() is handle.wait()

    assert run_local(body, 2, timeout=TIMEOUT) == [True, True]


def test_values_that_are_equal_but_read_differently_are_told_apart() -> None:
    """Texts of requests are kept: 1, True and 1.0 are one key of a dictionary, and three requests."""

    def body(comm: Comm) -> list[str]:
        found = []
        for value in (1, True, 1.0, 1):
            try:
                agree(comm, {"value": value if comm.rank else 1}, label="request")
                found.append("same")
            except DisagreementError as error:
                found.append(str(error))
        return found

    for texts in run_local(body, 2):
        assert [text == "same" for text in texts] == [True, False, False, True]
        assert "value is 1 on rank 0 and True on rank 1" in texts[1]
        assert "value is 1 on rank 0 and 1.0 on rank 1" in texts[2]
