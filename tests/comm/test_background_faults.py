"""Ranks that raise, take another path or are interrupted while calls go on in the background: all ranks end in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from shardwise.comm import CommError, ProcessGroupComm, default_comm
from tests.nn.test_prefetch_ranks import AHEAD, Deep, batch, make_model
from tests.world import Ranks, announce, shorten_timeout, wait_for, world_fixture

TIMEOUT = 4.0
IN_TIME = TIMEOUT + 20
world = world_fixture(2)


def train(model: Deep, steps: int) -> None:
    for step in range(steps):
        model(batch(step, default_comm().rank)).square().mean().backward()


def _fail_in_a_step(kind: str) -> tuple[str, tuple[int, ...], bool]:
    """What a rank is told in the third step, in which rank 1 raises or takes another path."""
    torch.set_num_threads(1)
    model, rank = make_model(AHEAD), default_comm().rank
    train(model, 2)
    shorten_timeout(default_comm(), TIMEOUT)

    def fail(number: int) -> None:
        if number == 2 and kind == "raises":
            raise KeyError("no layer")

    if rank == 1:
        model.between, model.order = fail, [0, 3, 1] if kind == "differs" else model.order
    began = time.monotonic()
    try:
        train(model, 1)
    except CommError as error:
        return str(error), error.ranks, time.monotonic() - began < IN_TIME
    return "", (), True


@pytest.mark.parametrize("kind", ["raises", "differs"])
def test_a_rank_that_fails_beside_calls_in_the_background_is_named(world: Ranks, kind: str) -> None:
    outcomes = world.outcomes(_fail_in_a_step, kind)
    world.restart()
    text, ranks, in_time = outcomes[0].value
    assert in_time and text
    if kind == "differs":
        assert outcomes[1].value[0] and outcomes[1].value[2]
        assert "the ranks made different calls" in text or "did not take part" in text
    else:
        assert ranks == (1,) and "rank 1" in text


def _interrupt_a_wait() -> tuple[str, bool]:
    """Rank 0 is interrupted while it waits for a call, in the background of host memory, that rank 1 joins later."""
    signal.signal(signal.SIGUSR1, signal.default_int_handler)  # ranks have Ctrl-C itself blocked
    comm = default_comm()
    assert isinstance(comm, ProcessGroupComm)
    comm.barrier(label="set up")
    shorten_timeout(comm, TIMEOUT)
    source, began = torch.ones(1 << 20), time.monotonic()
    targets = [torch.zeros(1 << 20), torch.zeros(1 << 20)]
    peer = 1 - comm.rank

    def swap() -> None:
        if comm.rank == 0:  # soon after the program has begun to wait
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        comm.exchange({peer: [source]}, {peer: [targets[comm.rank]]}, label="swap").wait()

    error: BaseException | None = None
    if comm.rank == 1:
        wait_for("interrupted")
    try:
        if not comm.capabilities.background:  # a device has streams for that
            swap()
        else:
            comm.submit(swap).wait()
    except (CommError, KeyboardInterrupt) as caught:
        error = caught
    source.zero_()  # the program goes on
    announce("interrupted")
    with pytest.raises(CommError):
        comm.barrier(label="afterwards")
    taken: Any = targets[1].sum().item() if comm.rank == 1 and error is None else 0
    assert not taken, "bytes of a rank that has gone on"
    return f"{type(error).__name__}: {error}", time.monotonic() - began < IN_TIME


def test_a_rank_that_is_interrupted_gives_up_what_it_lent(world: Ranks) -> None:
    (own, own_in_time), (other, in_time) = world.run(_interrupt_a_wait)
    world.restart()
    assert own_in_time and in_time and own.startswith("KeyboardInterrupt")
    assert "rank 0 was ended by KeyboardInterrupt" in other
