"""Ranks of a trainer and of a server are killed or stopped while weights go from one to the other.

`python -m tests.chaos.sync --rounds 100`; a test runs two rounds. In each round a trainer of two processes pushes
versions whose tensors all have the number of the step, and a server of two processes pulls them. A random rank gets a
signal at a random moment after both have met. Then:

1. No version that was taken over is mixed: every element has the number of the step.
2. The other world is not ended by it, and nothing waits beyond its deadline and some seconds.
3. A server that lost its trainer says "waiting", keeps its step, and names the world and a rank. Where the trainer is
   started again, the server has its steps soon.
4. A trainer that lost its server goes on pushing.
5. A server that comes late, after the fault or before it, sees whole versions only, or an error that names worlds.
6. A rank that gets no memory for a version fails that push or that subscription on all ranks, by name.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.comm import LocalComm, LocalWorld, default_comm
from shardwise.comm.transports.links import identify_host
from shardwise.sync import subscriber
from tests.sync.worlds import TOKEN, free_address

SHAPE, DEADLINE, LIMIT = (64, 64), 3.0, 240.0
NAMES = {"a": "S(1)", "b": "S(1)", "c": "R"}  # and how the server has them
ROUND_LIMIT = 75.0  # the start of all ranks, twice, a fault, and what is waited for after it
FULL = 0  # no signal: a rank gets no memory


@dataclass(frozen=True)
class Served:
    """What a rank of the server saw: its last step, how many versions, the state at the end, and mixed versions."""

    step: int | None
    versions: int
    state: str
    mixed: int
    restarts: int
    longest: float
    problem: str | None


def refuse_memory(rank: int | None, times: int = 2) -> None:
    """Let a rank get no memory for its next slots."""
    allocate = os.posix_fallocate

    def refuse(*args: int) -> None:
        nonlocal times
        times -= 1
        if times <= 0:
            os.posix_fallocate = allocate
        raise OSError(errno.ENOMEM, "no memory is left")

    if rank == default_comm().rank:
        os.posix_fallocate = refuse


def push_for(address: str, met: Path, seconds: float, poor: int | None = None, back: bool = False) -> int:
    """Push versions until some time after a server came; how many. The rank `poor` gets no memory at first.

    With `back` versions are copied in the back, and weights change once they are.
    """
    faulthandler.register(signal.SIGUSR1)  # says where it hangs
    refuse_memory(poor)
    state = {name: shardwise.full("on x=2: S(0)", SHAPE, 0.0) for name in NAMES}
    until, step = None, 0
    with shardwise.sync.publish(state, address, token=TOKEN, deadline=DEADLINE, name="trainer") as link:
        while True:
            began = time.monotonic()
            link.guard()
            for x in state.values():
                x.local_tensor().fill_(step)
            try:
                link.push(step, wait=not back)
            except shardwise.sync.SyncError as error:
                assert poor is not None and f"rank {poor}: a slot of" in str(error), error
            assert link.problem is None and time.monotonic() - began < DEADLINE + 5, (link.problem, began)
            if until is None and met.exists():
                until = time.monotonic() + seconds
            left = 1.0 if until is None else until - time.monotonic()
            told = shardwise.comm.gather_values(default_comm(), left, label="time is up")
            if min(told.values()) <= 0:
                return step
            step += 1
            time.sleep(0.01)


def meet(state: dict[str, shardwise.ShardedTensor], address: str) -> shardwise.sync.Subscriber:
    """Subscribe to a trainer that may take long to start on a busy machine."""
    until = time.monotonic() + LIMIT / 2
    while True:
        try:
            return shardwise.sync.subscribe(state, address, token=TOKEN, deadline=DEADLINE, name="server")
        except shardwise.sync.SyncError:
            told = shardwise.comm.gather_values(default_comm(), until - time.monotonic(), label="once more")
            if min(told.values()) <= 0:
                raise


def pull_for(address: str, seconds: float, met: Path, ended: Path, far: bool = False) -> Served:
    """Pull versions for some time or until it is said, and look at every one of them.

    With `far` the ranks are on another host: they read over sockets, and pass on what both of them need.
    """
    faulthandler.register(signal.SIGUSR1)
    subscriber.identify_host = (lambda: "another host") if far else identify_host
    state = {name: shardwise.full(f"on x=2: {cut}", SHAPE, -1.0) for name, cut in NAMES.items()}
    versions, mixed, restarts, longest, last = 0, 0, 0, 0.0, -1
    with meet(state, address) as link:
        until = time.monotonic() + seconds
        met.touch()
        while True:
            began = time.monotonic()
            step = link.pull(timeout=0.5)
            longest = max(longest, time.monotonic() - began)
            if step is not None:
                versions, restarts, last = versions + 1, restarts + (step < last), step
            if link.version is not None:
                mixed += any(not x.local_tensor().eq(link.version).all() for x in state.values())
            left = 0.0 if ended.exists() else until - time.monotonic()
            told = shardwise.comm.gather_values(default_comm(), left, label="time is up")
            if min(told.values()) <= 0:
                return Served(link.version, versions, link.state, mixed, restarts, longest, link.problem)


def read_late(address: str, wait: float, until: float) -> str:
    """A third program that comes late: what it saw, which is whole versions or errors that name a world."""
    time.sleep(wait)
    served, comm = {name: torch.full(SHAPE, -1.0) for name in NAMES}, LocalComm.alone()
    try:
        link = shardwise.sync.subscribe(served, address, token=TOKEN, deadline=DEADLINE, name="late", comm=comm)
    except shardwise.sync.SyncError as error:
        assert "subscriber 'late' rank 0: no publisher at tcp://" in str(error), error
        return "came too late"
    with link:
        while time.monotonic() < until:
            began = time.monotonic()
            link.pull(timeout=0.5)
            assert time.monotonic() - began < 2 * DEADLINE + 5, link.describe()
            if link.version is not None:
                assert all(x.eq(link.version).all() for x in served.values()), (link.version, served)
        return f"a late server has step {link.version}"


def attack(
    trainer: LocalWorld,
    server: LocalWorld,
    victim: tuple[str, int],
    how: int,
    after: float,
    late: float | None = None,
    restart: bool = False,
    back: bool = False,
    far: bool = False,
) -> str:
    """One round; what came of it in words. Raises AssertionError if a promise was broken."""
    folder, address, seconds = Path(tempfile.mkdtemp()), free_address(), after + (LIMIT / 2 if restart else 3.0)
    met, ended = folder / "met", folder / "ended"
    worlds = {"trainer": trainer, "server": server}
    poor = victim[1] if how == FULL else None
    with shown_if_it_hangs(trainer, server), ThreadPoolExecutor(3) as pool:
        pushing = pool.submit(trainer.outcomes, push_for, address, met, after + 3.0, poor, back, limit=LIMIT)
        pulling = pool.submit(server.outcomes, pull_for, address, seconds, met, ended, far, limit=LIMIT)
        until = time.monotonic() + LIMIT
        while not met.exists() and time.monotonic() < until:
            time.sleep(0.02)
        reading = (
            pool.submit(read_late, address, late or 0.0, time.monotonic() + after + 3.0) if late is not None else None
        )
        time.sleep(after)
        if how != FULL:
            process: Any = worlds[victim[0]]._ranks[victim[1]][0]
            os.kill(process.pid, how)
            if how == signal.SIGSTOP:
                time.sleep(DEADLINE + 1.0)
                os.kill(process.pid, signal.SIGKILL)
        pushed = pushing.result(LIMIT + 30)
        again = trainer.outcomes(push_for, address, met, 4.0, None, back, limit=LIMIT) if restart else []
        if restart:
            ended.touch()
        served = pulling.result(LIMIT + 30)
        words = "" if reading is None else f"; {reading.result(LIMIT)}"
    name = "no memory" if how == FULL else signal.Signals(how).name
    where = f"{victim[0]} rank {victim[1]} gets {name} after {after:.2f} s{', pushes in the back' * back}"
    where += f"{', the server is on another host' * far}{words}"
    if victim[0] == "server" or how == FULL:
        assert all(outcome.error is None for outcome in pushed), f"{where}: {[o.error for o in pushed]}"
        if victim[0] == "server":
            return f"{where}: the trainer pushed {pushed[0].value} steps"
    assert all(outcome.error is None for outcome in [*served, *again]), f"{where}: {[o.error for o in served]}"
    for outcome in served:
        seen: Served = outcome.value
        assert seen.mixed == 0, f"{where}: {seen}"
        assert seen.longest < 2 * DEADLINE + 5, f"{where}: {seen}"
        assert seen.state in ("waiting", "current"), f"{where}: {seen}"
        assert seen.state == "current" or ("'trainer'" in str(seen.problem) and "rank" in str(seen.problem)), seen
        assert seen.restarts == restart, f"{where}: {seen}"
    assert len({outcome.value.step for outcome in served}) == 1, f"{where}: {served}"
    return f"{where}: {served[0].value}" + (f"; {again[0].value} steps after a restart" if restart else "")


@contextmanager
def shown_if_it_hangs(*worlds: LocalWorld) -> Iterator[None]:
    """Print where every thread of this process and of the ranks is, if a round takes longer than it ever may."""

    def show() -> None:
        faulthandler.dump_traceback(all_threads=True)
        for world in worlds:
            for process, _ in list(world._ranks):
                with suppress(OSError, ValueError):
                    os.kill(int(process.pid or 0) or os.getpid(), signal.SIGUSR1)

    faulthandler.register(signal.SIGUSR1)
    timer = threading.Timer(ROUND_LIMIT, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def draw(rng: random.Random) -> dict[str, Any]:
    """The fault of a round."""
    victim, how = (rng.choice(["trainer", "server"]), rng.randrange(2)), rng.choice([signal.SIGKILL, signal.SIGSTOP])
    if rng.random() < 0.1:
        victim, how = ("trainer", victim[1]), FULL
    after = 0.5 + 2 * rng.random()
    late = after * 2 * rng.random() if rng.random() < 0.4 else None
    restart = victim[0] == "trainer" and how != FULL and rng.random() < 0.3
    back, far = rng.random() < 0.4, rng.random() < 0.4
    return {"victim": victim, "how": how, "after": after, "late": late, "restart": restart, "back": back, "far": far}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(given.seed)
    for number in range(given.rounds):
        began = time.monotonic()
        with LocalWorld(2, timeout=20.0) as trainer, LocalWorld(2, timeout=20.0) as server:
            print(number, attack(trainer, server, **draw(rng)), f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
