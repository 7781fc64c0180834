"""A rank that dies, raises, stays away or asks for something else in a move: the others say so, and keep their data."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import CommError, DisagreementError, default_comm
from shardwise.geometry import ChunkSpec, Layout, Mesh, MeshSpec, Partial, Shard
from shardwise.tensor import ShardedTensor, from_local, redistribute_many, shard
from tests.moving import local_parts, same_bytes, values
from tests.world import (
    PATIENT,
    SOON,
    DeviceWorld,
    Ranks,
    announce,
    set_up_comm,
    shorten_timeout,
    wait_for,
    world_fixture,
)

TIMEOUT = 4.0
IN_TIME = TIMEOUT + 20  # far from the minute after which gloo itself ends, however busy the machine is
SHAPE = (300, 70)
ROWS, COLUMNS = ChunkSpec(0, 3), ChunkSpec(1, 3)
LIMIT = 20_000
world = world_fixture(3)


def source(comm: Any, layout: Layout | None = None) -> ShardedTensor:
    where = layout or ROWS.layout(SHAPE)
    return from_local(local_parts(where, comm.rank, values(SHAPE, torch.float32)), where, comm=comm)


def is_whole(tensor: ShardedTensor) -> bool:
    """Whether the local tensors are as `source` made them."""
    made = local_parts(tensor.sharding, tensor.comm.rank, values(SHAPE, torch.float32))
    return all(map(same_bytes, tensor.local_tensors(), made))


def report(tensor: ShardedTensor, call: Callable[[], Any]) -> Any:
    """What a call raised: text, blamed ranks, whether it came in time and whether the source is whole."""
    began = time.monotonic()
    try:
        call()
    except CommError as error:
        return str(error), error.ranks, time.monotonic() - began < IN_TIME, is_whole(tensor)
    return "no error"


def makes_another_call() -> Any:
    comm = set_up_comm(TIMEOUT)
    tensor = source(comm)
    return report(tensor, lambda: tensor.gather_to(0) if comm.rank == 1 else tensor.redistribute(COLUMNS))


def test_a_rank_that_makes_another_call_is_told_to_all(world: Ranks) -> None:
    for text, _, in_time, whole in world.run(makes_another_call):
        assert "the ranks made different calls" in text and "'gather'" in text and "'redistribute'" in text
        assert (in_time, whole) == (True, True)


def disagree() -> Any:
    """Every kind of mismatch on rank 2; then the same tensor moves as if nothing had been."""
    comm, texts = set_up_comm(TIMEOUT), []
    odd, tensor, whole = comm.rank == 2, source(comm), values(SHAPE, torch.float32)
    taller = shard(values((301, 70), torch.float32), ROWS, None, comm=comm)
    calls: list[Callable[[], Any]] = [
        lambda: tensor.redistribute(ChunkSpec(1, (1, 0, 2)) if odd else COLUMNS),
        lambda: (taller if odd else tensor).redistribute(COLUMNS),
        lambda: tensor.to(torch.float64 if odd else torch.float32).redistribute(COLUMNS),
        lambda: tensor.redistribute(MeshSpec(Mesh.of(tp=3), (Shard(0, sizes=(1, 2, 3)),)) if odd else COLUMNS),
        lambda: tensor.gather_to(2 if odd else 0),
        lambda: shard(whole, ROWS, 2 if odd else 0, comm=comm),
        lambda: shard(whole if comm.rank == 0 else None, COLUMNS if odd else ROWS, 0, comm=comm),
        lambda: shard(whole.double() if odd else whole, ROWS, 0, comm=comm),
        lambda: redistribute_many([tensor], [ROWS if odd else COLUMNS]),
    ]
    for call in calls:
        with pytest.raises(DisagreementError) as caught:
            call()
        texts.append(str(caught.value))
    return texts, is_whole(tensor), torch.equal(tensor.redistribute(COLUMNS).full(), whole)


def test_ranks_that_disagree_all_say_so_and_can_go_on(world: Ranks) -> None:
    results = world.run(disagree)
    assert results[0] == results[1] == results[2]
    texts, whole, moved = results[0]
    assert whole and moved
    spec, shape, dtype, sizes, gather, src_rank, hidden, given, many = texts
    assert "to is '[300,70] as chunk(1) over 0-2' on ranks 0, 1 and '[300,70] as chunk(1) over 1,0,2' on rank 2" in spec
    assert "'redistribute': the ranks pass different arguments: from is '[300,70]" in shape
    assert "dtype is torch.float32 on ranks 0, 1 and torch.float64 on rank 2" in dtype
    assert "rank 2: " in sizes and "sizes (1, 2, 3)" in sizes
    assert "'gather': the ranks pass different arguments: " in gather and "dst is 0 on ranks 0, 1" in gather
    assert "'shard': the ranks pass different src_ranks: 0 on ranks 0, 1 and 2 on rank 2" in src_rank
    assert "'shard': the ranks pass different arguments: spec is " in hidden
    assert "'shard': the ranks pass different dtypes: torch.float32 on ranks 0, 1 and torch.float64 on rank 2" in given
    assert "'redistribute_many': the ranks pass different arguments: moves is " in many


def deviates_after_identical_calls(shared: bool) -> Any:
    """All ranks make the same move twice; then rank 2 alone asks for something else, while the others send their data.

    What it asks for sends as much, less, nothing, has been asked for before or is a mistake. Small pieces come along
    with the messages, large ones are read from the sender's memory.
    """
    comm, texts, moved = set_up_comm(TIMEOUT, shared=shared), [], []
    for shape in ((30, 6), (600, 512)):
        whole = values(shape, torch.float32)
        tensor = from_local(local_parts(ROWS.layout(shape), comm.rank, whole), ROWS, shape, comm=comm)
        turned = ChunkSpec(1, (1, 0, 2))

        def move(target: Any = COLUMNS, *, whole: Any = whole, tensor: ShardedTensor = tensor, **options: Any) -> None:
            moved.append(torch.equal(tensor.redistribute(target, **options).full(), whole))

        deviations: list[Callable[[], Any]] = [
            partial(move, ChunkSpec(1, (2, 1, 0))),
            partial(move, turned),
            partial(move, ROWS),
            partial(move, 3.5),
            partial(move, max_buffer_bytes=LIMIT),
            partial(move, MeshSpec(Mesh.of(tp=3), (Partial("sum"),))),
            lambda tensor=tensor: tensor.to(torch.float64).redistribute(COLUMNS),  # type: ignore[misc]  # bound to this turn's
        ]
        move(), move(), move(turned)
        for deviate in deviations:
            with pytest.raises(DisagreementError) as caught:
                deviate() if comm.rank == 2 else move()
            texts.append(str(caught.value))
            move(), move(turned)
    return texts, moved


@pytest.mark.parametrize("shared", (True, False), ids=("same host", "sockets"))
def test_a_rank_that_deviates_after_identical_calls(world: Ranks, shared: bool) -> None:
    results = world.run(deviates_after_identical_calls, shared)
    assert results[0] == results[1] == results[2]
    texts, moved = results[0]
    assert moved == [True] * len(moved) and len(moved) == 2 * (3 + 7 * 2)
    assert all(text.startswith("'redistribute': ") for text in texts)
    another, known, nothing, mistake, limit, pending, dtype = texts[:7]
    assert "as chunk(1) over 2,1,0' on rank 2" in another and "as chunk(1) over 1,0,2' on rank 2" in known
    assert "to is '[30,6] as chunk(1) over 0-2' on ranks 0, 1 and '[30,6] as chunk(0) over 0-2' on rank 2" in nothing
    assert "rank 2: redistribute takes a spec, a Layout, placements such as" in mistake
    assert f"max_buffer_bytes is None on ranks 0, 1 and {LIMIT} on rank 2" in limit
    assert "P(sum)' on rank 2" in pending
    assert "dtype is torch.float32 on ranks 0, 1 and torch.float64 on rank 2" in dtype


def stays_away() -> Any:
    comm = set_up_comm(SOON)
    tensor = source(comm)
    if comm.rank == 1:
        return [wait_for(f"stays away: {rank}") for rank in (0, 2)]
    found = report(tensor, lambda: redistribute_many([tensor, tensor], [COLUMNS, COLUMNS]))
    announce(f"stays away: {comm.rank}")
    return found


def test_a_rank_that_stays_away_is_named(world: Ranks) -> None:
    first, _, third = world.run(stays_away)
    for text, ranks, in_time, whole in (first, third):
        assert "'redistribute_many': rank 1 did not take part" in text
        assert (ranks, in_time, whole) == ((1,), True, True)


def skips_the_backward_pass() -> Any:
    comm = set_up_comm(PATIENT)
    tensor = source(comm).requires_grad_()
    loss = tensor.redistribute(COLUMNS).full().sum()
    shorten_timeout(comm, SOON)
    if comm.rank == 2:
        return [wait_for(f"skips the backward pass: {rank}") for rank in (0, 1)]
    found = report(tensor, loss.backward)
    announce(f"skips the backward pass: {comm.rank}")
    return found


def test_a_rank_that_skips_the_backward_pass_is_named(world: Ranks) -> None:
    for text, ranks, in_time, whole in world.run(skips_the_backward_pass)[:2]:
        assert "'redistribute (backward)': rank 2 did not take part" in text
        assert (ranks, in_time, whole) == ((2,), True, True)


def killed_in_mid_exchange(shared: bool, victim: int, pending: bool) -> Any:
    """The victim takes part in the first of several rounds and is gone before the second."""
    comm = set_up_comm(TIMEOUT, shared=shared)
    layout = MeshSpec(Mesh.of(tp=3), (Partial("sum"),)).layout(SHAPE) if pending else ROWS.layout(SHAPE)
    tensor = source(comm, layout)
    if comm.rank == victim:
        tensor.redistribute(COLUMNS, max_buffer_bytes=LIMIT, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return report(tensor, lambda: tensor.redistribute(COLUMNS, max_buffer_bytes=LIMIT))


@pytest.mark.parametrize(("shared", "victim", "pending"), [(True, 0, False), (False, 1, True)])
def test_a_rank_killed_in_mid_exchange_is_named(world: Ranks, shared: bool, victim: int, pending: bool) -> None:
    outcomes = world.outcomes(killed_in_mid_exchange, shared, victim, pending)
    assert f"rank {victim} ended with exit code -9" in str(outcomes[victim].error)
    for outcome in outcomes:
        if outcome.rank != victim:
            text, ranks, in_time, whole = outcome.value
            assert f"'redistribute': rank {victim} did not take part" in text
            assert (ranks, in_time, whole) == ((victim,), True, True)


def raises_before_the_move() -> Any:
    dist.barrier()
    comm = default_comm()
    tensor = source(comm)
    if comm.rank == 1:
        raise KeyError("no weight 'w'")
    return report(tensor, lambda: tensor.redistribute(COLUMNS))


def test_a_rank_that_raises_before_the_move_is_named_with_its_error() -> None:
    with DeviceWorld(3, timeout=PATIENT) as ranks:
        outcomes = ranks.outcomes(raises_before_the_move, limit=240, last=True)
    expected = ("'redistribute': rank 1 raised KeyError: \"no weight 'w'\"", (1,), True, True)
    assert [outcomes[0].value, outcomes[2].value] == [expected] * 2
    assert isinstance(outcomes[1].error, KeyError)
