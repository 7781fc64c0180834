"""Two hosts with two ranks each, as network namespaces with a link: what passes the link, and what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import from_local, sync
from shardwise.comm import CommError, ProcessGroupComm, default_comm
from shardwise.comm.transports import host_memory as same_host
from shardwise.comm.transports.hosts import SeveralHostsEngine
from shardwise.geometry import parse_spec
from shardwise.geometry.state_map import BlockScale
from shardwise.sync.plan import quantize_blocks
from shardwise.testing.network_hosts import NetworkHosts, why_no_network_hosts
from shardwise.transfer import Topology, plan_transfer
from tests.world import PATIENT, ForkedHostsWorld, Ranks, set_up_comm

TIMEOUT = 3.0
SHAPE = (1024, 1024)
HOSTS = Topology(hosts=(0, 0, 1, 1))
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_transformer.py"
OVERHEAD = 1.05  # headers, and what the ranks agree on


@pytest.fixture(scope="module")
def hosts() -> Iterator[NetworkHosts]:
    if (reason := why_no_network_hosts()) is not None:
        pytest.skip(reason)
    with NetworkHosts(megabits=1000) as made:
        yield made


@pytest.fixture(scope="module")
def world(hosts: NetworkHosts) -> Iterator[Ranks]:
    with ForkedHostsWorld(hosts, 4, timeout=PATIENT) as running:
        yield Ranks(running)


def find_hosts() -> tuple[Topology | None, str]:
    comm: Any = default_comm()
    return comm.find_topology(), type(comm._engine).__name__


def test_ranks_find_their_hosts(world: Ranks) -> None:
    assert world.run(find_hosts) == [(HOSTS, SeveralHostsEngine.__name__)] * 4


def find_hosts_of_equal_names() -> tuple[Topology | None, str]:
    """As machines that were restored from one snapshot: all that names a host is the same."""
    known, same_host.identify_host = same_host.identify_host, lambda: "clone"
    try:
        comm: Any = new_comm()
    finally:
        same_host.identify_host = known
    return comm.find_topology(), type(comm._engine).__name__


def test_hosts_of_equal_names_are_told_apart(world: Ranks) -> None:
    assert world.run(find_hosts_of_equal_names) == [(HOSTS, SeveralHostsEngine.__name__)] * 4


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * (rank + 3) + rank) % 11).to(dtype)


def check_collectives(sizes: tuple[int, ...], dtype: torch.dtype, op: Any) -> bytes:
    """Compare each collective with what it means; return the bits of the reductions."""
    comm = default_comm()
    bits = b""
    for count in sizes:
        parts = torch.stack([values(r, count, dtype) for r in comm.ranks])
        out = torch.empty(4, count, dtype=dtype)
        comm.all_gather_into(out, parts[comm.rank].clone(), label="gather").wait()
        assert torch.equal(out, parts)
        for src in (0, 3):
            mine = parts[comm.rank].clone()
            comm.broadcast(mine, src, label="broadcast").wait()
            assert torch.equal(mine, parts[src])
        mine = parts[comm.rank].clone()
        comm.all_reduce(mine, op, label="reduce").wait()
        torch.testing.assert_close(mine, reduced(parts, op))
        bits += mine.view(torch.uint8).cpu().numpy().tobytes()
        runs = torch.stack([values(r, 4 * count, dtype) for r in comm.ranks])
        run = torch.empty(count, dtype=dtype)
        comm.reduce_scatter_into(run, runs[comm.rank].clone(), op, label="scatter").wait()
        torch.testing.assert_close(run, reduced(runs, op).view(4, -1)[comm.rank])
    return bits


def reduced(parts: torch.Tensor, op: str) -> torch.Tensor:
    return {"sum": parts.sum(0), "avg": parts.sum(0) / 4, "max": parts.amax(0)}[op].to(parts.dtype)


CASES = {
    "windows": ((1, 3, 5003, 2_100_001), torch.float32, "sum"),
    "average": ((7, 9001), torch.float64, "avg"),
    "integers": ((5, 2**14), torch.int16, "max"),
}


@pytest.mark.parametrize(("sizes", "dtype", "op"), CASES.values(), ids=CASES)
def test_collectives_mean_the_same(world: Ranks, sizes: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    assert len(set(world.run(check_collectives, sizes, dtype, op))) == 1


def move(before: str, after: str, dtype: torch.dtype) -> bool:
    """Move a tensor whose pieces hold 1 (of a pending sum: each addend) and say whether the values are right."""
    comm = default_comm()
    src, dst = (parse_spec(text) for text in (before, after))
    held = [torch.ones(shape, dtype=dtype) for shape in src.layout(SHAPE).local_shapes(comm.rank)]
    moved = from_local(held, src, SHAPE).redistribute(dst)
    addends = 1 if src.layout(SHAPE).cells is None else src.layout(SHAPE).cells.addends
    return all(bool((part == addends).all()) for part in moved.local_parts)


MOVES = [
    ("on x=4: S(0)", "on x=4: S(1)", torch.float32),
    ("on x=4: S(0)", "on x=4: R", torch.float32),
    ("on x=4: P", "on x=4: S(0)", torch.float32),
    ("on x=4: P", "on x=4: S(1)", torch.bfloat16),
    ("on x=4: P", "on x=4: R", torch.float32),
    ("on dp=2,tp=2: R, S(0)", "on x=4: R", torch.float32),
    ("on dp=2,tp=2: P, S(0)", "on dp=2,tp=2: R, S(0)", torch.float32),
]


@pytest.mark.parametrize(("before", "after", "dtype"), MOVES, ids=str)
def test_the_fewest_bytes_pass_the_link(
    world: Ranks, hosts: NetworkHosts, before: str, after: str, dtype: torch.dtype
) -> None:
    src, dst = (parse_spec(text).layout(SHAPE) for text in (before, after))
    plan = plan_transfer(src, dst, itemsize=dtype.itemsize, topology=HOSTS)
    bound = plan.lower_bound_between_hosts
    assert bound is not None and plan.bytes_between_hosts == bound
    already = hosts.bytes_sent()
    assert all(world.run(move, before, after, dtype))
    sent = [now - then for now, then in zip(hosts.bytes_sent(), already, strict=True)]
    for one in sent:
        assert bound / 2 <= one < bound / 2 * OVERHEAD + 50_000, (sent, bound)


def push_to_the_other_host(address: str, codes: bool) -> int:
    """The ranks of the first host publish rows, both of the second want all of them; what this rank has read."""
    comm, value = default_comm(), (torch.arange(1 << 20) % 251).float().view(SHAPE)
    ours = comm.subset([0, 1] if comm.rank < 2 else [2, 3])
    options: dict[str, Any] = {"token": "of the test of hosts", "deadline": PATIENT, "comm": ours}
    if comm.rank < 2:
        rows = from_local(value.chunk(2)[comm.rank].clone(), "on x=2: S(0)", SHAPE, comm=ours)
        with sync.publish({"w": rows}, address, **options) as link:
            link.push(1)
            comm.barrier(label="read")
        return 0
    served = {"w": torch.zeros(SHAPE)}
    if codes:
        served = {"w": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn), "s": torch.zeros(8, 8)}
        options["names"] = lambda types: sync.StateMap.identity(types).quantize("w", "s", (128, 128))
    with sync.subscribe(served, address, **options) as link:
        assert link.pull() == 1, link.problem
        comm.barrier(label="read")
        made = quantize_blocks(value, BlockScale("s", (128, 128)), torch.float8_e4m3fn)[0] if codes else value
        assert torch.equal(served["w"].view(torch.uint8), made.view(torch.uint8))
        return link.read_bytes


@pytest.mark.parametrize(("codes", "nbytes"), [(False, 4 << 20), (True, (1 << 20) + 256)])
def test_weights_pass_the_link_once(world: Ranks, hosts: NetworkHosts, codes: bool, nbytes: int) -> None:
    already = hosts.bytes_sent()[0]
    read = world.run(push_to_the_other_host, f"tcp://{hosts.addresses[0]}:{29610 + codes}", codes)
    sent = hosts.bytes_sent()[0] - already
    assert sum(read) == nbytes and min(read[2:]) > nbytes / 4
    assert nbytes <= sent < nbytes * OVERHEAD + 100_000


def new_comm(timeout: float = TIMEOUT) -> ProcessGroupComm:
    """A comm over a group of its own: what breaks it breaks no other."""
    return set_up_comm(timeout, group=dist.new_group())


def exchange_with_all(comm: Any, label: str) -> None:
    sources = {r: [torch.full((1 << 18,), float(comm.rank))] for r in comm.ranks}
    comm.exchange(sources, {r: [torch.empty(1 << 18)] for r in comm.ranks}, label=label).wait()


def failure_of(call: Any) -> tuple[str, tuple[int, ...], bool]:
    began = time.monotonic()
    with pytest.raises(CommError) as caught:
        call()
    return str(caught.value), caught.value.ranks, time.monotonic() - began < TIMEOUT + 20


def one_rank_makes_another_call() -> Any:
    comm = new_comm()
    if comm.rank == 1:
        return failure_of(lambda: comm.all_reduce(torch.ones(1 << 16), label="loss").wait())
    return failure_of(lambda: exchange_with_all(comm, "move w"))


def test_different_calls_are_named_on_both_hosts(world: Ranks) -> None:
    for text, _, in_time in world.run(one_rank_makes_another_call):
        assert "the ranks made different calls" in text and "'loss'" in text and "'move w'" in text, text
        assert in_time


def ranks_of_a_host_disagree_on_bytes() -> Any:
    """Rank 0 sends rank 1 more than that expects; the other host only waits for both."""
    comm = new_comm()
    sends = {1: [torch.zeros(3)]} if comm.rank == 0 else {}
    receives = {0: [torch.zeros(2)]} if comm.rank == 1 else {}

    def exchange_and_wait() -> None:
        comm.exchange(sends, receives, label="move w").wait()
        comm.barrier(label="after")

    return failure_of(exchange_and_wait)


def test_the_exact_cause_on_one_host_is_reported_on_the_other(world: Ranks) -> None:
    text = (
        "exchange 'move w': rank 0 sends [12] bytes to rank 1, which do not match the [8] received; "
        "the k-th tensors on both sides must match"
    )
    assert world.run(ranks_of_a_host_disagree_on_bytes) == [(text, (0, 1), True)] * 4


def one_rank_stays_away() -> Any:
    comm = new_comm(2.0)
    if comm.rank == 2:
        return time.sleep(4)
    return failure_of(lambda: comm.all_reduce(torch.ones(1 << 18), label="loss").wait())


def test_a_rank_of_another_host_that_stays_away_is_named(world: Ranks) -> None:
    outcomes = world.run(one_rank_stays_away)
    for text, ranks, in_time in outcomes[:2] + outcomes[3:]:
        assert "'loss': rank 2 did not take part" in text, text
        assert (ranks, in_time) == ((2,), True)


def one_rank_is_killed(collective: bool) -> Any:
    comm = new_comm()
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if collective:
        return failure_of(lambda: comm.all_reduce(torch.ones(1 << 20), label="move w").wait())
    return failure_of(lambda: exchange_with_all(comm, "move w"))


def test_a_killed_rank_is_named_on_both_hosts(world: Ranks) -> None:
    outcomes = world.outcomes(one_rank_is_killed, False)
    assert "rank 3 ended with exit code -9" in str(outcomes[3].error)
    for outcome in outcomes[:3]:
        text, ranks, in_time = outcome.value
        assert "'move w': rank 3 did not take part" in text, text
        assert (ranks, in_time) == ((3,), True)


@pytest.mark.skipif(not os.environ.get("SHARDWISE_TEST_HOSTS"), reason="long: `make test-hosts` runs it")
def test_torchrun_trains_the_example_on_both_hosts(hosts: NetworkHosts) -> None:
    """As on the page: losses are those of the model whole on every rank, to rounding."""
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", hosts.addresses[0], "--master-port", "29500"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    words = [[*command, "--node-rank", str(host), str(EXAMPLE), "--steps", "2"] for host in (0, 1)]
    started = [
        subprocess.Popen(hosts.command(host, *line), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for host, line in enumerate(words)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], printed
    found = next(line for line in printed[0].splitlines() if line.startswith("largest difference"))
    assert float(found.split()[-1]) < 1e-9
