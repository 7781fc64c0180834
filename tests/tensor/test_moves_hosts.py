"""Moves that are planned for several hosts: the executor combines within hosts, sends, and passes on within hosts."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise import Comm, Topology, explain, run_local, shard
from shardwise.comm import LocalComm
from shardwise.geometry import Mesh, MeshSpec, parse_placements
from shardwise.nn.experts import route_tokens
from shardwise.tensor import from_local, redistribute_many

FLAT, TWO = Mesh.of(x=4), Mesh.of(a=2, b=2)
PLACEMENTS = [
    (FLAT, "S(0)"),
    (FLAT, "R"),
    (FLAT, "P"),
    (FLAT, "S(1)"),
    (TWO, "P, S(1)"),
    (TWO, "S(0), R"),
    (TWO, "R, P"),
]


@pytest.fixture(autouse=True)
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalComm, "find_topology", lambda self: Topology(hosts=(0, 0, 1, 1)))


def specs() -> list[MeshSpec]:
    return [MeshSpec(mesh, parse_placements(text)) for mesh, text in PLACEMENTS]


def move_all(comm: Comm, dtype: torch.dtype, limit: int | None) -> None:
    whole = (torch.arange(12 * 8).view(12, 8) % 16).to(dtype)
    for before, after in itertools.permutations(specs(), 2):
        moved = shard(whole, before).redistribute(after, max_buffer_bytes=limit)
        assert moved.sharding == after.layout((12, 8))
        assert torch.equal(moved.full(), whole), (before, after)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, None), (torch.bfloat16, None), (torch.int64, 4096)])
def test_all_pairs_keep_the_values(dtype: torch.dtype, limit: int | None) -> None:
    run_local(move_all, 4, dtype, limit)


def move_together(comm: Comm) -> None:
    tensors = [shard(torch.full((8, 4 + i), float(i)), spec) for i, spec in enumerate(specs())]
    moved = redistribute_many(tensors, list(reversed(specs())), async_op=True).wait()
    for i, tensor in enumerate(moved):
        assert torch.equal(tensor.full(), torch.full((8, 4 + i), float(i)))


def test_many_tensors_share_the_steps() -> None:
    run_local(move_together, 4)


def differentiate(comm: Comm) -> torch.Tensor:
    mine = torch.full((2, 6), comm.rank + 1.0, requires_grad=True)
    rows = from_local(mine, MeshSpec(FLAT, parse_placements("S(0)")), (8, 6))
    rows.redistribute(MeshSpec(FLAT, parse_placements("R"))).square().sum().backward()
    assert mine.grad is not None
    return mine.grad


def test_gradients_pass_through() -> None:
    for rank, grad in enumerate(run_local(differentiate, 4)):
        assert torch.equal(grad, torch.full((2, 6), 2 * (rank + 1.0)))


def record(comm: Comm) -> tuple[int, int, str]:
    rows = shard(torch.zeros(8, 8), MeshSpec(FLAT, parse_placements("S(0)")))
    with explain() as log:
        rows.redistribute(MeshSpec(FLAT, parse_placements("R")))
    return log.moved_bytes, log.bytes_between_hosts, str(log).splitlines()[0]


def test_explain_shows_what_passes_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, between, head = run_local(record, 4)[0]
    assert (moved, between) == (3 * 256, 256)
    assert head.split() == ["operation", "from", "to", "moved", "between", "hosts", "line"]
    monkeypatch.setattr(LocalComm, "find_topology", lambda self: None)
    moved, between, head = run_local(record, 4)[0]
    assert (moved, between) == (3 * 256, 0)
    assert head.split() == ["operation", "from", "to", "moved", "line"]


def route_to_experts(comm: Comm) -> tuple[int, int]:
    """Two tokens on each rank, all for the first expert, which is on rank 0."""
    tokens = shard(torch.ones(8, 4), MeshSpec(FLAT, parse_placements("S(0)")))
    ids = shard(torch.zeros(8, 1, dtype=torch.int64), MeshSpec(FLAT, parse_placements("S(0)")))
    with explain() as log:
        route_tokens(tokens, ids, num_experts=4, axis="x")
    entry = next(e for e in log.entries if e.name == "route_tokens" and e.moved_bytes)
    return entry.moved_bytes, entry.bytes_between_hosts


def test_explain_shows_tokens_that_pass_between_hosts() -> None:
    """Six of the eight rows of 16 bytes move, four of them from the other host."""
    assert run_local(route_to_experts, 4) == [(96, 64)] * 4
