"""Ranks that raise, die, hang or make other calls: the others say so, in time, and sources stay whole."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import CommError, default_comm
from shardwise.comm.launch import results_of
from shardwise.comm.transports.backends import GlooEngine
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

TIMEOUT, GRACE = 4.0, 1.0
IN_TIME = TIMEOUT + 20  # far from the minute after which gloo itself ends, however busy the machine is
world = world_fixture(3)
both_transports = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])


def report(error: CommError, began: float) -> tuple[str, tuple[int, ...], bool]:
    return str(error), error.ranks, time.monotonic() - began < IN_TIME


def exchange_with_all(comm: Any, label: str) -> tuple[str, tuple[int, ...], bool] | None:
    """Swap 1 MB with every rank; return what went wrong, having checked that the sources are as they were."""
    sources = {r: [torch.full((1 << 18,), float(comm.rank))] for r in comm.ranks}
    targets = {r: [torch.empty(1 << 18)] for r in comm.ranks}
    began = time.monotonic()
    try:
        comm.exchange(sources, targets, label=label).wait()
    except CommError as error:
        assert all(bool((t[0] == comm.rank).all()) for t in sources.values())
        return report(error, began)
    return None


def one_rank_is_killed(shared: bool, victim: int) -> Any:
    comm = set_up_comm(TIMEOUT, shared=shared)
    if comm.rank != victim:
        return exchange_with_all(comm, "move w")
    if shared:
        receives = {r: [torch.empty(1 << 18)] for r in comm.ranks if r != victim}
        comm.exchange({}, receives, label="move w")
        os.kill(os.getpid(), signal.SIGKILL)
    # Over gloo sizes are told first: all of them agree, then the bytes of this rank never come.
    GlooEngine._exchange = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return exchange_with_all(comm, "move w")


@pytest.mark.parametrize(("shared", "victim"), [(True, 0), (False, 1)])
def test_a_rank_killed_in_mid_exchange_is_named(world: Ranks, shared: bool, victim: int) -> None:
    outcomes = world.outcomes(one_rank_is_killed, shared, victim)
    assert f"rank {victim} ended with exit code -9" in str(outcomes[victim].error)
    for outcome in outcomes:
        if outcome.rank != victim:
            text, ranks, in_time = outcome.value
            assert f"'move w': rank {victim} did not take part" in text
            assert (ranks, in_time) == ((victim,), True)


def one_rank_raises() -> Any:
    dist.barrier()
    comm = default_comm()
    comm.barrier(label="set up")
    if comm.rank == 2:
        raise KeyError("no weight 'w'")
    return exchange_with_all(comm, "move w")


def test_an_exception_comes_back_with_its_rank_and_the_others_are_told() -> None:
    with DeviceWorld(3, timeout=PATIENT) as ranks:
        outcomes = ranks.outcomes(one_rank_raises, limit=240, last=True)
    expected = ("'move w': rank 2 raised KeyError: \"no weight 'w'\"", (2,), True)
    assert [outcome.value for outcome in outcomes[:2]] == [expected] * 2
    with pytest.raises(KeyError, match="no weight 'w'") as caught:
        results_of(outcomes)
    note = caught.value.__notes__[0]
    assert note.startswith("on rank 2 of 3:\nTraceback") and "in one_rank_raises" in note


def one_rank_stays_away(shared: bool) -> Any:
    comm = set_up_comm(SOON, shared=shared)
    given_up = [f"stays away {shared}: {rank}" for rank in comm.ranks if rank != 1]
    if comm.rank == 1:
        return [wait_for(event) for event in given_up]
    found = exchange_with_all(comm, "move w")
    announce(given_up[comm.rank // 2])
    return found


@both_transports
def test_a_time_out_names_the_rank_that_stayed_away(world: Ranks, shared: bool) -> None:
    first, _, third = (outcome.value for outcome in world.outcomes(one_rank_stays_away, shared))
    if not shared:
        world.restart()
    for text, ranks, in_time in (first, third):
        assert "'move w': rank 1 did not take part" in text
        assert (ranks, in_time) == ((1,), True)


def one_rank_waits_for_another_that_waits(shared: bool) -> Any:
    """Rank 2 needs rank 0, which comes later, after the grace, and needs rank 1, which never comes."""
    comm = set_up_comm(TIMEOUT, shared=shared)
    given_up = [f"waits itself {shared}: {rank}" for rank in comm.ranks if rank != 1]
    if comm.rank == 1:
        return [wait_for(event) for event in given_up]
    if comm.rank == 0:
        time.sleep(GRACE + 0.5)
    began, block = time.monotonic(), torch.ones(1 << 18)
    try:
        comm.exchange({}, {1: [block]} if comm.rank == 0 else {}, label="first").wait()
        comm.exchange({2: [block]} if comm.rank == 0 else {}, {0: [block]} if comm.rank == 2 else {}, label="w").wait()
    except CommError as error:
        return report(error, began)
    finally:
        announce(given_up[comm.rank // 2])
    return None


@both_transports
def test_a_rank_that_waits_itself_is_not_blamed(world: Ranks, shared: bool) -> None:
    first, _, third = (outcome.value for outcome in world.outcomes(one_rank_waits_for_another_that_waits, shared))
    if not shared:
        world.restart()
    for text, ranks, in_time in (first, third):
        assert "rank 1 did not take part" in text
        assert (ranks, in_time) == ((1,), True)


def ranks_make_different_calls() -> Any:
    comm = set_up_comm(TIMEOUT)
    began = time.monotonic()
    try:
        if comm.rank == 1:
            comm.all_reduce(torch.ones(1 << 16), label="loss").wait()
        else:
            comm.barrier(label="end")
    except CommError as error:
        return report(error, began)
    return None


def test_different_calls_are_told_to_all_ranks(world: Ranks) -> None:
    for text, _, in_time in world.run(ranks_make_different_calls):
        assert "the ranks made different calls" in text and "'loss'" in text and "'end'" in text
        assert in_time


def ranks_reduce_different_sizes(sizes: tuple[int, ...]) -> Any:
    comm = set_up_comm(TIMEOUT)
    began = time.monotonic()
    try:
        comm.all_reduce(torch.ones(sizes[comm.rank]), label="loss").wait()
    except CommError as error:
        return report(error, began)
    return None


@pytest.mark.parametrize("sizes", [(4, 5, 4), (4, 4, 1 << 18), (0, 1 << 18, 4)])
def test_different_sizes_in_a_reduction_are_told_to_all_ranks(world: Ranks, sizes: tuple[int, ...]) -> None:
    for text, _, in_time in world.run(ranks_reduce_different_sizes, sizes):
        assert "the ranks made different calls" in text and "all_reduce 'loss' (sum of " in text
        assert in_time


def ranks_disagree_on_bytes() -> Any:
    comm = set_up_comm(TIMEOUT)
    began = time.monotonic()
    try:
        if comm.rank == 0:
            comm.exchange({1: [torch.zeros(3)]}, {}, label="move w").wait()
            comm.barrier(label="after")
        else:
            comm.exchange({}, {0: [torch.zeros(2)]} if comm.rank == 1 else {}, label="move w").wait()
            comm.barrier(label="after")
    except CommError as error:
        return report(error, began)
    return None


def test_bytes_that_do_not_match_are_told_to_all_ranks(world: Ranks) -> None:
    message = (
        "exchange 'move w': rank 0 sends [12] bytes to rank 1, which do not match the [8] received; "
        "the k-th tensors on both sides must match"
    )
    assert world.run(ranks_disagree_on_bytes) == [(message, (0, 1), True)] * 3


def a_failed_comm_refuses_further_calls() -> Any:
    comm = set_up_comm(TIMEOUT)
    if comm.rank == 1:
        return "away"
    comm.timeout = PATIENT
    comm = comm.subset([0, 2])
    comm.barrier(label="pair")
    if comm.rank == 2:
        wait_for("refused again")
        return "late"
    texts = []
    for timeout in (SOON, PATIENT):
        shorten_timeout(comm, timeout)
        began = time.monotonic()
        with pytest.raises(CommError) as caught:
            comm.barrier(label="end")
        texts.append(str(caught.value))
    announce("refused again")
    return texts[0] == texts[1], time.monotonic() - began < PATIENT  # what another wait would take


def test_a_comm_that_failed_refuses_further_calls_at_once(world: Ranks) -> None:
    assert world.run(a_failed_comm_refuses_further_calls) == [(True, True), "away", "late"]


def sleep_long() -> None:
    time.sleep(600)


def test_a_world_over_its_limit_is_stopped_and_starts_anew() -> None:
    with DeviceWorld(2, timeout=TIMEOUT) as ranks:
        with pytest.raises(CommError, match="it had not ended when its world was shut down"):
            ranks.run(sleep_long, limit=0.2)
        assert ranks.run(dist.get_rank, limit=240) == [0, 1]
