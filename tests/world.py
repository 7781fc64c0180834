"""One persistent world of gloo ranks per test file.

A test file says `world = world_fixture(3)` and its tests take `world`; functions given to `world.run` are defined at
the top of that file, so that the ranks can import them. Files whose tests leave no trace in the ranks may share one
world (`shared=True`).

Ranks are forks of one server process that has imported what they need (`tests/preloaded.py`) and has one thread:
importing torch costs a rank more than most files. `SHARDWISE_TEST_START=spawn` starts each as a new interpreter, so
that its lines can be counted.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise._torch import default_store
from shardwise.comm import LocalWorld, Outcome, ProcessGroupComm, use_comm
from shardwise.testing.network_hosts import HostsWorld, NetworkHosts
from tests.device import DEVICE, load_device

LIMIT = 480.0
PATIENT = 60.0  # the time-out of what must not fail, however busy the machine is
SOON = 1.5  # the time-out of ranks that wait for one which never comes, once all others have come
WORLD_DEVICE = None if DEVICE == "cpu" else DEVICE
# A GPU cannot be used after a fork; a process that was forked counts no lines.
CAN_FORK = DEVICE == "cpu" and "COVERAGE_PROCESS_START" not in os.environ
START_METHOD = os.environ.get("SHARDWISE_TEST_START", "forkserver" if CAN_FORK else "spawn")


def start_server() -> None:
    """Start the process that ranks are forks of, unless it runs or they are to be new interpreters."""
    if START_METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(["tests.preloaded"])
        forkserver.ensure_running()


class Ranks:
    """A world whose calls end by themselves: each has a limit, after which its processes are killed."""

    def __init__(self, world: LocalWorld) -> None:
        self._world = world

    def run(self, fn: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        """Call `fn(*args)` on every rank; return the results in rank order or raise the first cause."""
        return self._world.run(fn, *args, limit=limit)

    def outcomes(self, fn: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Outcome]:
        """Call `fn(*args)` on every rank; return how each ended."""
        return self._world.outcomes(fn, *args, limit=limit)

    def restart(self) -> None:
        """End the ranks, whose process group a fault has spoilt; the next call starts new ones."""
        self._world.close()


class DeviceWorld(LocalWorld):
    """A world of this machine whose ranks work on the device of the tests."""

    _context: Any = multiprocessing.get_context(START_METHOD)

    def __init__(self, nprocs: int, *, timeout: float) -> None:
        super().__init__(nprocs, timeout=timeout, device=WORLD_DEVICE)

    def _start(self) -> None:
        start_server()
        self._prepare = partial(_prepare_rank, dict(os.environ))
        super()._start()


class ForkedHostsWorld(HostsWorld):
    """The same on two hosts, whose ranks set their own environment when they join them."""

    _context: Any = DeviceWorld._context

    def _start(self) -> None:
        start_server()
        super()._start()


def _prepare_rank(environment: Mapping[str, str], rank: int) -> None:
    """Give a rank the environment of the process that starts it; the server's is older."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    load_device(rank)


@contextmanager
def start_world(nprocs: int, timeout: float) -> Iterator[LocalWorld]:
    """A world of this machine or, with SHARDWISE_TEST_HOSTS (`make test-hosts`), of two network namespaces of it."""
    if not os.environ.get("SHARDWISE_TEST_HOSTS"):
        with DeviceWorld(nprocs, timeout=timeout) as running:
            yield running
        return
    with NetworkHosts(megabits=10_000) as hosts, ForkedHostsWorld(hosts, nprocs, timeout=timeout) as running:
        yield running


def world_fixture(nprocs: int, timeout: float = PATIENT, *, shared: bool = False) -> Any:
    """Return a module-scoped fixture that yields a world of `nprocs` ranks with this time-out for collectives."""

    @pytest.fixture(scope="module")
    def world() -> Iterator[Ranks]:
        with start_world(nprocs, timeout) as running:
            yield Ranks(running)

    @pytest.fixture(scope="module", name="world")
    def one_of_all(shared_worlds: Callable[[int, float], LocalWorld]) -> Ranks:
        return Ranks(shared_worlds(nprocs, timeout))

    return one_of_all if shared else world


def set_up_comm(timeout: float, *, shared: bool = True, group: dist.ProcessGroup | None = None) -> ProcessGroupComm:
    """A fresh comm that has connected its ranks; `timeout` holds from then on: a busy machine is slow to connect."""
    dist.barrier()
    comm = ProcessGroupComm(group, timeout=PATIENT, shared_memory=shared)
    comm.barrier(label="set up")
    shorten_timeout(comm, timeout)
    return comm


def shorten_timeout(comm: Any, timeout: float) -> None:
    """Let a comm that has connected its ranks give up sooner from now on."""
    engine = comm._engine
    comm.timeout = timeout
    for part in (engine, *(getattr(engine, name, None) for name in ("_near", "_far", "_calls"))):
        if hasattr(part, "_timeout"):
            part._timeout = timeout


@contextmanager
def on_host() -> Iterator[None]:
    """Let a rank make and move host tensors, for what torch's gloo does with them alone: DTensor's and FSDP's moves."""
    if DEVICE == "cpu":
        yield
        return
    with torch.device("cpu"), use_comm(ProcessGroupComm(device="cpu", timeout=PATIENT)):
        yield


def announce(event: str) -> None:
    """Let the ranks that wait for an event of this name go on; through the store, which the parent process hosts."""
    store: Any = default_store()
    store.set(f"test/{event}", "")


def wait_for(event: str) -> None:
    """Wait until a rank has announced an event."""
    store: Any = default_store()
    deadline = time.monotonic() + PATIENT
    while not store.check([f"test/{event}"]):
        assert time.monotonic() < deadline, f"no rank has announced {event!r}"
        time.sleep(0.02)
