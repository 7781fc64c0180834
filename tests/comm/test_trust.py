"""Late ranks, strangers, forked children, calls that differ: no rank takes bytes that were never sent to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import CommError, ProcessGroupComm
from shardwise.comm.launch import host_store
from shardwise.comm.protocol import CompletedWork
from shardwise.comm.transports.backends import GlooEngine, NativeEngine
from shardwise.comm.transports.device_memory import SameHostDeviceEngine
from shardwise.comm.transports.host_memory import SameHostEngine
from shardwise.comm.transports.links import FrameKind
from shardwise.geometry import ChunkSpec
from shardwise.tensor import shard
from tests.device import DEVICE
from tests.killing import die_with_a_living_child
from tests.world import PATIENT, SOON, DeviceWorld, Ranks, announce, set_up_comm, wait_for, world_fixture

TIMEOUT = 4.0
LARGE = 1 << 18
SENT, LATER = 7.0, -1.0
HANGS = 60.0  # seconds
MEMORY_ENGINE = SameHostDeviceEngine if DEVICE == "cuda" else SameHostEngine  # reads the memory of other ranks
world = world_fixture(2)
both_transports = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])


def comm_for(shared: bool, timeout: float = TIMEOUT) -> ProcessGroupComm:
    """Return a fresh comm, set up before anything goes wrong."""
    comm = set_up_comm(timeout, shared=shared)
    assert isinstance(comm._engine, MEMORY_ENGINE) == shared
    return comm


def mute_failures(comm: ProcessGroupComm) -> None:
    """Let this rank not say that it gives up."""
    engine: Any = comm._engine
    links = engine._calls._links
    send = links.send
    links.send = lambda r, kind, *rest, **how: None if kind is FrameKind.FAILED else send(r, kind, *rest, **how)


def reduce_into(comm: ProcessGroupComm, mine: torch.Tensor, into: torch.Tensor) -> None:
    comm.all_reduce(mine, "max", label="w").wait()
    into.copy_(mine)


MOVES: dict[str, Callable[[ProcessGroupComm, torch.Tensor, torch.Tensor], Any]] = {
    "exchange": lambda comm, mine, into: comm.exchange(
        {1: [mine]} if comm.rank == 0 else {}, {0: [into]} if comm.rank == 1 else {}, label="move w"
    ).wait(),
    "broadcast": lambda comm, mine, into: comm.broadcast(mine if comm.rank == 0 else into, 0, label="w").wait(),
    "all_gather": lambda comm, mine, into: into.copy_(comm.all_gather(mine, label="w")[0]),
    "all_reduce": lambda comm, mine, into: reduce_into(comm, mine, into),
    "reduce_scatter": lambda comm, mine, into: comm.reduce_scatter_into(
        into, mine.repeat(2) if comm.rank else torch.cat([mine, mine]), "max", label="w"
    ).wait(),
}


def late_rank(name: str, shared: bool, count: int, silent: bool) -> str:
    """Rank 0 gives up and writes to what it sent; rank 1 comes after that. How the call ended on this rank."""
    comm = comm_for(shared, SOON)
    mine, into = torch.full((count,), SENT if comm.rank == 0 else 0.0), torch.zeros(count)
    if comm.rank == 0 and silent:
        mute_failures(comm)
    gave_up, came = (f"late rank: {name} {shared} {silent}: {event}" for event in ("gave up", "came"))
    if comm.rank == 1:
        wait_for(gave_up)
    try:
        MOVES[name](comm, mine, into)
    except CommError:
        mine.fill_(LATER)
        into.fill_(LATER)
        if comm.rank == 0:
            announce(gave_up)
            wait_for(came)  # so that its memory can still be read
        return "CommError"
    finally:
        if comm.rank == 1:
            announce(came)
    return "right" if bool((into == SENT).all()) or comm.rank == 0 else f"read {sorted(set(into.tolist()))}"


LATE = [("exchange", True), ("all_reduce", True), ("exchange", False), ("broadcast", False), ("all_gather", False)]


@pytest.mark.parametrize(("name", "shared"), LATE)
def test_a_late_rank_fails_or_gets_what_was_sent(world: Ranks, name: str, shared: bool) -> None:
    first, late = world.run(late_rank, name, shared, 9 if name == "all_gather" else LARGE, False)
    if not shared:
        world.restart()
    assert first == "CommError" and late in ("CommError", "right")


@pytest.mark.parametrize("name", ["exchange", "broadcast", "reduce_scatter"])
def test_a_late_rank_sees_that_the_lease_has_ended(world: Ranks, name: str) -> None:
    """Though nothing says that rank 0 gave up: its offer is there, and its memory can be read."""
    assert world.run(late_rank, name, True, LARGE, True) == ["CommError", "CommError"]


CALLS: dict[str, Callable[[ProcessGroupComm, bool, int], Any]] = {
    "reduction": lambda comm, odd, n: comm.all_reduce(torch.ones(n), "max" if odd else "sum", label="w"),
    "dtype of a reduction": lambda comm, odd, n: comm.all_reduce(
        torch.ones(n, dtype=torch.int32 if odd else torch.float32), label="w"
    ),
    "label": lambda comm, odd, n: comm.all_reduce(torch.ones(n), label="v" if odd else "w"),
    "label of an exchange": lambda comm, odd, n: comm.exchange(
        {1 - comm.rank: [torch.ones(n)]}, {1 - comm.rank: [torch.ones(n)]}, label="v" if odd else "w"
    ),
    "dtype of a gather": lambda comm, odd, n: comm.all_gather_into(
        torch.ones(2 * n, dtype=torch.int32 if odd else torch.float32),
        torch.ones(n, dtype=torch.int32 if odd else torch.float32),
        label="w",
    ),
    "size of a gather": lambda comm, odd, n: comm.all_gather_into(
        torch.ones(2 * (n + odd)), torch.ones(n + odd), label="w"
    ),
    "barrier for a reduction": lambda comm, odd, n: (
        comm.barrier(label="w") or CompletedWork() if odd else comm.all_reduce(torch.ones(n), label="w")
    ),
    "source of a broadcast": lambda comm, odd, n: comm.broadcast(torch.ones(n), int(odd), label="w"),
    "reduction of a scatter": lambda comm, odd, n: comm.reduce_scatter_into(
        torch.ones(n), torch.ones(2 * n), "min" if odd else "sum", label="w"
    ),
}


def make_other_calls(name: str, shared: bool, count: int) -> str:
    comm = comm_for(shared)
    try:
        CALLS[name](comm, comm.rank == 1, count).wait()
        comm.barrier(label="after")
    except CommError as error:
        return f"{error} {error.ranks}"
    return "done"


@pytest.mark.parametrize(
    ("name", "shared", "count"),
    [
        *((name, True, LARGE) for name in CALLS),
        ("reduction", True, 9),
        ("reduction", False, 9),
        ("size of a gather", False, 9),
        ("size of a gather", False, 900),
        ("barrier for a reduction", False, 9),
        ("dtype of a reduction", False, LARGE),
    ],
)
def test_calls_that_differ_fail_on_every_rank(world: Ranks, name: str, shared: bool, count: int) -> None:
    texts = world.run(make_other_calls, name, shared, count)
    if not shared:
        world.restart()
    for text in texts:
        assert "the ranks made different calls" in text and "()" not in text, texts


def make_other_calls_natively(name: str) -> tuple[str, str]:
    """The engine for device memory, over gloo in its place; how a right call and then a wrong one ended."""
    comm = comm_for(False)
    host = GlooEngine(comm.process_group, comm.rank, comm.ranks, TIMEOUT)
    comm._use_engine(NativeEngine(comm.process_group, comm.rank, comm.ranks, torch.device("cpu"), host))
    texts = []
    for odd in (False, comm.rank == 1):
        try:
            CALLS[name](comm, odd, 9).wait()
            comm.barrier(label="after")
            texts.append("done")
        except CommError as error:
            texts.append(f"{error} {error.ranks}")
    return texts[0], texts[1]


@pytest.mark.parametrize("name", ["reduction", "dtype of a reduction", "label", "label of an exchange"])
def test_calls_on_device_memory_are_compared_over_the_host(world: Ranks, name: str) -> None:
    for first, second in world.run(make_other_calls_natively, name):
        assert first == "done"
        assert "the ranks made different calls" in second


def join_a_subset_alone(stopped: bool) -> tuple[str, float]:
    """Rank 1 never joins; with `stopped` the store does not answer either."""
    comm = comm_for(False, timeout=0.5)
    if comm.rank == 1:
        wait_for(f"subset alone {stopped}")
        return "away", 0.0
    began = time.monotonic()
    wait = dist.new_group
    try:
        if stopped:
            dist.new_group = lambda *args, **kwargs: time.sleep(HANGS)
        comm.ranks = (0, 1, 2)  # a subset is not the whole
        comm.subset((0, 1))
    except CommError as error:
        return f"{error} {error.ranks}", time.monotonic() - began
    finally:
        dist.new_group = wait
        announce(f"subset alone {stopped}")
    return "made", 0.0


@pytest.mark.parametrize("stopped", [False, True], ids=["away", "store hangs"])
def test_a_subset_is_made_within_the_time_out(world: Ranks, stopped: bool) -> None:
    (text, seconds), _ = world.run(join_a_subset_alone, stopped)
    world.restart()
    assert "rank 1" in text and "(1,)" in text and seconds < HANGS


def drop_a_handle(shared: bool) -> str:
    """Rank 0 drops a move of several rounds after the first of them, and goes on."""
    comm = comm_for(shared, SOON)
    x = shard(torch.arange(4096.0).reshape(64, 64), ChunkSpec(0, 2), None, comm=comm)
    handle = x.redistribute(ChunkSpec(1, 2), async_op=True, max_buffer_bytes=2000)
    try:
        if comm.rank == 1:
            handle.wait()
        comm.all_reduce(torch.ones(LARGE), label="after").wait()
    except CommError as error:
        return f"{error} {error.ranks}"
    return "done"


@both_transports
def test_a_handle_that_was_dropped_is_named_by_rank_and_call(world: Ranks, shared: bool) -> None:
    texts = world.run(drop_a_handle, shared)
    if not shared:
        world.restart()
    for text in texts:
        assert "exchange 'redistribute'" in text and "rank 0 " in text and "all_reduce 'after'" in text, texts


def meet_a_stranger(sent: bytes, stays: bool) -> tuple[float, bool]:
    """Set up a comm while something else connects to every listener first, and sends a few bytes.

    Returns a sum of all ranks, and whether this rank connected to a listener.
    """
    dist.barrier()
    connect: Any = socket.socket.connect
    strangers: list[socket.socket] = []

    def after_a_stranger(self: socket.socket, address: Any) -> None:
        if isinstance(address, str) and "shardwise" in address:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connect(stranger, address)
            stranger.sendall(sent)
            strangers.append(stranger)
            if not stays:
                stranger.close()
        connect(self, address)

    socket.socket.connect = after_a_stranger  # type: ignore[method-assign, assignment]
    try:
        comm = comm_for(True, timeout=PATIENT)
    finally:
        socket.socket.connect = connect  # type: ignore[method-assign]
    x = torch.full((LARGE,), float(comm.rank))
    comm.all_reduce(x, label="after").wait()
    return x[0].item(), bool(strangers)


@pytest.mark.parametrize("stays", [False, True], ids=["leaves", "stays"])
@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\1\0\0\0" + bytes(16), bytes(400)], ids=["nothing", "2", "20", "400"])
def test_a_stranger_does_not_hold_the_set_up_up(world: Ranks, sent: bytes, stays: bool) -> None:
    assert world.run(meet_a_stranger, sent, stays) == [(1.0, False), (1.0, True)]


def set_up_where_nothing_may_listen() -> list[Any]:
    dist.barrier()
    bind: Any = socket.socket.bind

    def refuse(self: socket.socket, address: Any) -> None:
        if dist.get_rank() == 1 and isinstance(address, str):
            raise PermissionError("no sockets here")
        bind(self, address)

    socket.socket.bind = refuse  # type: ignore[method-assign, assignment]
    try:
        comm = ProcessGroupComm(timeout=PATIENT)
        x = torch.ones(LARGE)
        comm.all_reduce(x, label="sum").wait()
    finally:
        socket.socket.bind = bind  # type: ignore[method-assign]
    return [x[0].item(), type(comm._engine).__name__]


def test_a_rank_that_may_not_listen_leads_to_the_slower_transport(world: Ranks) -> None:
    assert world.run(set_up_where_nothing_may_listen) == [[2.0, "GlooEngine"]] * 2


def sum_without_the_dead() -> str:
    return die_with_a_living_child(comm_for(True, timeout=200), LARGE)


def test_a_killed_rank_whose_child_lives_is_seen() -> None:
    """Long before the time-out of its comm: the limit of the call is shorter."""
    with DeviceWorld(2, timeout=PATIENT) as ranks:
        survivor, killed = ranks.outcomes(sum_without_the_dead, limit=100)
    assert "'w': rank 1 did not take part" in str(survivor.value)
    assert "rank 1 ended with exit code -9" in str(killed.error)


def test_the_store_of_a_launch_listens_on_loopback_alone() -> None:
    """Any other address of this machine, also 127.0.0.2, is refused; a socket on all interfaces would take it."""
    store = host_store("127.0.0.1")
    socket.create_connection(("127.0.0.1", store.port), 5).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), 5)
