"""Reductions that groups of ranks make side by side, each by a collective of its own: exact, and in one call each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import run_local
from shardwise.comm import current_comm
from shardwise.geometry import Layout, parse_spec
from shardwise.tensor import from_local, redistribute_many
from shardwise.tensor.move import Move
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
ON = "on a=2,b=2: "


def layout_of(text: str, shape: tuple[int, ...]) -> Layout:
    return parse_spec(ON + text).layout(shape)


def reduce_in_groups(dtype: torch.dtype) -> list[tuple[str, bool]]:
    """The collective of each move, and whether its result is the sum of the addends; ranks 0, 2 and 1, 3 reduce."""
    comm, found = current_comm(), []
    for dst in ("R, R", "S(0), R"):
        move = Move.of(layout_of("P(sum), R", (8, 3)), layout_of(dst, (8, 3)), comm, dtype, "sum")
        addend = torch.arange(24).reshape(8, 3).to(dtype) * (1 + comm.rank // 2)
        (moved,) = move.run((addend,))
        rows = slice(0, 8) if dst == "R, R" else slice(comm.rank // 2 * 4, comm.rank // 2 * 4 + 4)
        whole = torch.arange(24).reshape(8, 3)[rows] * 3
        found.append((str(move.collective), moved.dtype == dtype and torch.equal(moved, whole.to(dtype))))
    return found


EXPECTED = [("2 x all_reduce of 2 ranks", True), ("2 x reduce_scatter of 2 ranks", True)]


def test_groups_of_threads() -> None:
    assert run_local(lambda: reduce_in_groups(torch.float32), 4) == [EXPECTED] * 4


def test_groups_of_processes(world: Ranks) -> None:
    assert world.run(reduce_in_groups, torch.float64) == [EXPECTED] * 4
    low = world.run(reduce_in_groups, torch.bfloat16)  # by collectives in 32 bits, or by exchanges: a question of cost
    assert low == [low[0]] * 4 and all(right for _, right in low[0])


def join_reductions() -> tuple[int, list[bool]]:
    """How many collectives several small all-reduces take, and whether each result is right."""
    comm, calls = current_comm(), []
    part = comm.subset((comm.rank % 2, comm.rank % 2 + 2))
    kind, reduce = type(part), type(part).all_reduce_into

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.ranks)
        return reduce(self, *args, **kwargs)

    tensors = [
        from_local(torch.full(shape, float(n + comm.rank // 2)), layout_of("P(sum), R", shape), comm=comm)
        for n, shape in enumerate([(3,), (2, 2), (), (5,)])
    ]
    targets = [layout_of("R, R", t.sharding.shape) for t in tensors]
    kind.all_reduce_into = count  # type: ignore[method-assign, assignment]  # put back below
    try:
        moved = redistribute_many(tensors, targets)
    finally:
        kind.all_reduce_into = reduce  # type: ignore[method-assign]
    right = [torch.equal(t.local_tensor(), torch.full(t.sharding.shape, 2.0 * n + 1)) for n, t in enumerate(moved)]
    return len(calls), right


def test_small_all_reduces_of_one_group_are_made_as_one(world: Ranks) -> None:
    assert world.run(join_reductions) == [(1, [True] * 4)] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_low_precision_are_rounded_once(dtype: torch.dtype) -> None:
    """Made by the comm in 32 bits where that takes less time, as between many ranks with few bytes."""

    def body() -> bool:
        comm = current_comm()
        layouts = [parse_spec(f"on a=4: {text}").layout((16,)) for text in ("P(sum)", "R")]
        move = Move.of(layouts[0], layouts[1], comm, dtype, "sum")
        move.__dict__["collective"] = move.transfer.collective_of_comm(comm.ranks)
        addends = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        (moved,) = move.run((addends[comm.rank],))
        return torch.equal(moved, addends.float().sum(0).to(dtype))

    assert all(run_local(body, 4))
