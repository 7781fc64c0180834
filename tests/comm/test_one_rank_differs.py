"""One rank of three makes another call, or has other sizes: every rank says so, and no process ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Comm, CommError, ProcessGroupComm, use_comm
from tests.world import PATIENT, Ranks, world_fixture

world = world_fixture(3)


def _after(comm: Comm, call: Callable[[], object]) -> list[str]:
    """How a call ended, and the next one."""
    texts = []
    for attempt in (call, lambda: comm.barrier(label="after")):
        try:
            attempt()
            texts.append("done")
        except CommError as error:
            texts.append(f"{error} {getattr(error, '__notes__', '')}")
    return texts


def broadcast_from(shared: bool, count: int, odd: int) -> list[str]:
    comm = ProcessGroupComm(shared_memory=shared, timeout=PATIENT)
    tensor, source = torch.ones(count), int(comm.rank == odd)
    return _after(comm, lambda: comm.broadcast(tensor, source, label="w").wait())


@pytest.mark.parametrize("count", [4, 1 << 16])
@pytest.mark.parametrize("shared", [True, False])
def test_another_source_of_a_broadcast_is_an_error_on_every_rank(world: Ranks, shared: bool, count: int) -> None:
    for odd in (1, 2):
        for first, after in world.run(broadcast_from, shared, count, odd):
            assert "the ranks made different calls" in first and "broadcast 'w'" in first
            assert "carries no more calls" in first and "make another group" in after
        world.restart()


def exchange_sizes(shared: bool, sent: int, wanted: int) -> list[str]:
    """Rank 1 sends to rank 0 and expects from it other sizes than rank 0 does; rank 2 has no part in it."""
    comm = ProcessGroupComm(shared_memory=shared, timeout=PATIENT)
    comm.barrier(label="before")
    sizes = (sent, wanted) if comm.rank == 1 else (4, 4)
    others = [1 - comm.rank] if comm.rank < 2 else []
    sends, receives = ({r: [torch.ones(n), torch.ones(2)] for r in others} for n in sizes)
    try:
        comm.exchange(sends, receives, label="w").wait()
        if shared:
            comm.barrier(label="after")
    except CommError as error:
        return [str(error), str(sorted(error.ranks))]
    return ["done"]


@pytest.mark.parametrize(("sent", "wanted"), [(8, 4), (4, 8), (2, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize("shared", [True, False])
def test_other_sizes_are_an_error_on_both_sides_of_an_edge(world: Ranks, shared: bool, sent: int, wanted: int) -> None:
    """In the memory of a host a side that has got what it expects hears of it in the next call."""
    found = world.run(exchange_sizes, shared, sent, wanted)
    world.restart()
    for text, *ranks in found if shared else found[:2]:
        assert "exchange 'w'" in text and "must match" in text, found
        assert "rank 1" in text and ranks == ["[0, 1]"], found


def test_equal_sizes_pass_as_often_as_one_likes(world: Ranks) -> None:
    assert world.run(exchange_many) == [True] * 3


def exchange_many() -> bool:
    comm = ProcessGroupComm(shared_memory=False, timeout=PATIENT)
    for number in range(40):
        count, others = 1 + number % 5, [r for r in comm.ranks if r != comm.rank]
        sends = {r: [torch.full((count,), comm.rank * 100.0 + r), torch.ones(number)] for r in others}
        receives = {r: [torch.zeros(count), torch.zeros(number)] for r in others}
        if number % 3 == 0:  # one direction only
            sends, receives = ({}, {0: receives[0]}) if comm.rank else (sends, {})
        comm.exchange(sends, receives, label="w").wait()
        for r, (first, second) in receives.items():
            assert first.eq(r * 100 + comm.rank).all() and second.eq(1).all()
    return True


def train_on(shared: bool, dtype_of_odd: str) -> list[str]:
    comm = ProcessGroupComm(shared_memory=shared, timeout=PATIENT)
    with use_comm(comm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3))
        sw.shard_module(model, sw.ModelPlan(sw.Mesh.of(dp=3), {"**": "S(0)"}, input_plan="dp: S(0)"))
        batch = torch.randn(4, 6)
        if comm.rank == 1:
            model, batch = model.to(getattr(torch, dtype_of_odd)), batch.to(getattr(torch, dtype_of_odd))
        return _after(comm, lambda: model(batch).square().sum().backward())


@pytest.mark.parametrize("shared", [True, False])
def test_a_model_of_another_dtype_on_one_rank_is_an_error_everywhere(world: Ranks, shared: bool) -> None:
    found = world.run(train_on, shared, "float64")
    world.restart()
    for rank, (text, after) in enumerate(found):
        assert "must match" in text and "rank 1" in text, found
        assert f"rank {rank} did not take part" not in text + after
        assert "carries no more calls" in after
