"""Two hosts with two ranks each, as network namespaces with a slow link: what passes the link, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardwise.comm import default_comm
from shardwise.comm.transports.several_hosts import SeveralHostsEngine
from shardwise.testing.network_hosts import HostsWorld, NetworkHosts, why_no_network_hosts
from tests.ranks.world import Ranks

TIMEOUT = 6.0
SIZES = (1, 3, 1000, 5003, 3 << 20)


@pytest.fixture(scope="module")
def hosts() -> Iterator[NetworkHosts]:
    if (reason := why_no_network_hosts()) is not None:
        pytest.skip(reason)
    with NetworkHosts(megabits=1000) as made:
        yield made


@pytest.fixture(scope="module")
def world(hosts: NetworkHosts) -> Iterator[Ranks]:
    with HostsWorld(hosts, ranks_per_host=2, timeout=TIMEOUT) as running:
        yield Ranks(running)


def find_hosts() -> tuple[str, Any]:
    comm: Any = default_comm()
    return comm.topology.hosts, type(comm._engine).__name__


def test_ranks_find_their_hosts(world: Ranks) -> None:
    assert world.run(find_hosts) == [((0, 0, 1, 1), SeveralHostsEngine.__name__)] * 4


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
        torch.testing.assert_close(out, parts, rtol=0, atol=0)
        for src in (0, 3):
            mine = parts[comm.rank].clone()
            comm.broadcast(mine, src, label="broadcast").wait()
            assert torch.equal(mine, parts[src])
        want = {"sum": parts.sum(0), "avg": parts.sum(0) / 4, "max": parts.amax(0)}[op].to(dtype)
        mine = parts[comm.rank].clone()
        comm.all_reduce(mine, op, label="reduce").wait()
        torch.testing.assert_close(mine, want)
        bits += mine.view(torch.uint8).numpy().tobytes()
        runs = torch.stack([values(r, 4 * count, dtype) for r in comm.ranks])
        total = {"sum": runs.sum(0), "avg": runs.sum(0) / 4, "max": runs.amax(0)}[op].to(dtype)
        run = torch.empty(count, dtype=dtype)
        comm.reduce_scatter_into(run, runs[comm.rank].clone(), op, label="scatter").wait()
        torch.testing.assert_close(run, total.view(4, -1)[comm.rank])
    return bits


@pytest.mark.parametrize(
    ("sizes", "dtype", "op"),
    [
        ((1, 3, 1000, 5003, 3 << 20), torch.float32, "sum"),
        ((7, 9001), torch.float64, "avg"),
        ((5, 2**14), torch.int32, "max"),
    ],
)
def test_collectives_mean_the_same(world: Ranks, sizes: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    bits = world.run(check_collectives, sizes, dtype, op)
    assert len(set(bits)) == 1
