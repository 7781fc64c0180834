"""Collectives over hosts of any size: each means the same as in one place, and what enters a host enters it once.

Ranks are threads; their comm stands in for both transports, and counts what passes between hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Comm, run_local
from shardwise.comm import Work
from shardwise.comm.flat_tensors import Edges
from shardwise.comm.transports import hosts as several_hosts
from shardwise.comm.transports.hosts import SeveralHostsEngine

HOST = "cpu"  # where this engine works: a comm copies tensors of a device there and back
SIZES = (1, 5, 1003)
SHAPES = [(2, 2), (3, 1), (1, 2), (2, 1, 2), (1, 1, 3)]
OPS = ("sum", "avg", "min", "max", "product")


class ThreadEngine:
    """An engine between threads, which only exchanges; the rest is what is tested."""

    device = torch.device(HOST)
    awaited: tuple[int, ...] = ()

    def __init__(self, comm: Any, sent: Counter[int]) -> None:
        self._comm, self.sent = comm, sent

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        self.sent[self._comm.rank] += sum(len(t) for tensors in sends.values() for t in tensors)
        return self._comm.exchange(sends, receives, label=call)

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        return self._comm.all_gather_into(out, tensor, label=call)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: Any, *, call: str) -> Work:
        return self._comm.reduce_scatter_into(out, tensor, op, label=call)

    def all_reduce(self, tensor: Tensor, op: Any, *, call: str) -> Work:
        return self._comm.all_reduce(tensor, op, label=call)

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        return self._comm.broadcast(tensor, src, label=call)

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        return self._comm.all_gather_bytes(data, label=call)

    def abort(self, reason: str, ranks: Iterable[int]) -> None: ...
    def close(self) -> None: ...


def hosts_of(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    ends = [sum(shape[: i + 1]) for i in range(len(shape))]
    return [tuple(range(end - count, end)) for end, count in zip(ends, shape, strict=True)]


def make_engine(comm: Comm, shape: tuple[int, ...], sent: Counter[int]) -> SeveralHostsEngine:
    hosts = hosts_of(shape)
    own = next(members for members in hosts if comm.rank in members)
    near = ThreadEngine(comm.subset(own), Counter()) if len(own) > 1 else None
    return SeveralHostsEngine(comm.rank, comm.ranks, hosts, near, ThreadEngine(comm, sent))


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(count, device=HOST) * (rank + 2) + rank) % 3 + 1).to(dtype)


def reduced(parts: Tensor, op: str) -> Tensor:
    found = {"sum": parts.sum, "min": parts.amin, "max": parts.amax, "product": parts.prod, "avg": parts.sum}[op](0)
    return (found / len(parts) if op == "avg" else found).to(parts.dtype)


def run_all(comm: Comm, shape: tuple[int, ...], op: Any, dtype: torch.dtype) -> list[Tensor]:
    engine, ranks = make_engine(comm, shape, Counter()), len(comm.ranks)
    results = []
    for count in SIZES:
        parts = torch.stack([values(r, count, dtype) for r in comm.ranks])
        out = torch.empty(ranks * count, dtype=dtype, device=HOST)
        engine.all_gather_into(out, parts[comm.rank].clone(), call="gather").wait()
        assert torch.equal(out, parts.view(-1))
        for src in comm.ranks:
            mine = parts[comm.rank].clone()
            engine.broadcast(mine, src, call="broadcast").wait()
            assert torch.equal(mine, parts[src])
        mine = parts[comm.rank].clone()
        engine.all_reduce(mine, op, call="reduce").wait()
        torch.testing.assert_close(mine, reduced(parts, op))
        results.append(mine)
        runs = torch.stack([values(r, ranks * count, dtype) for r in comm.ranks])
        run = torch.empty(count, dtype=dtype, device=HOST)
        engine.reduce_scatter_into(run, runs[comm.rank].clone(), op, call="scatter").wait()
        torch.testing.assert_close(run, reduced(runs, op).view(ranks, -1)[comm.rank])
    return results


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_collectives_mean_the_same_on_hosts_of_any_size(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_hosts, "_SMALL_BYTES", -1)
    monkeypatch.setattr(several_hosts, "_WINDOW_BYTES", (256, 2048))
    for op, dtype in zip(OPS, (torch.float32, torch.float64, torch.int32, torch.int64, torch.float32), strict=True):
        first, *others = run_local(run_all, sum(shape), shape, op, dtype, device=HOST)
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def count_far(comm: Comm, shape: tuple[int, ...], count: int, sent: Counter[int], name: str) -> None:
    engine, ranks = make_engine(comm, shape, sent), len(comm.ranks)
    whole, part = torch.ones(ranks * count, device=HOST), torch.ones(count, device=HOST)
    if name == "all_gather":
        engine.all_gather_into(whole, part, call=name).wait()
    elif name == "reduce_scatter":
        engine.reduce_scatter_into(part, whole, "sum", call=name).wait()
    elif name == "all_reduce":
        engine.all_reduce(whole, "sum", call=name).wait()
    else:
        engine.broadcast(whole, 0, call=name).wait()


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
def test_each_byte_enters_a_host_once(shape: tuple[int, ...], name: str) -> None:
    """In runs of a rank: what enters the hosts in a gather, in a reduction, in both, and a whole tensor for each."""
    count, ranks, hosts = 1200, sum(shape), len(shape)
    sent: Counter[int] = Counter()
    run_local(count_far, ranks, shape, count, sent, name, device=HOST)
    gathered = sum(ranks - members for members in shape)
    reduced_runs = sum(members * (hosts - 1) for members in shape)
    spread = ranks * (hosts - 1)
    expected = {"all_gather": gathered, "reduce_scatter": reduced_runs, "broadcast": spread}
    entering = expected.get(name, gathered + reduced_runs)
    assert sum(sent.values()) == entering * count * 4
