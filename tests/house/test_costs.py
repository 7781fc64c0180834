"""Does a warm call take no more than it did? Counted, not timed: calls of our functions, exchanges, bytes, memory.

1. A count is the least of a few repeats of a warm call on one rank, whose thread alone is looked at. The memory is all
   that torch allocates in one call, in bytes, whether it is freed again or not.
2. MOST says how many there are today, and a little more, since what a thread does depends a little on when the others
   come. It is lowered when a path becomes shorter, and raised only with the reason.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.nn import functional

import shardwise
from shardwise import Comm, Mesh, ModelPlan, run_local, shard, shard_module
from shardwise.comm import use_comm
from tests.moving import CountingComm

SOURCE = str(Path(shardwise.__file__).parent)
REPEATS = 12
KINDS = ("calls", "exchanges", "bytes", "memory")
MOST = {  # one of each of KINDS
    "x + y": (1, 0, 0, 128),
    "x + y, new shape": (420, 0, 0, 33600),
    "linear, new shape": (420, 0, 0, 33600),
    "x.t()": (1, 0, 0, 0),
    "x @ w": (14, 0, 0, 128),
    "x @ w, backward": (95, 0, 0, 1032),
    "x += 1": (5, 0, 0, 12),
    "pending sum": (1, 0, 0, 32),
    "move": (185, 1, 128, 192),  # threads of two ranks: 145 to 151
    "gather": (180, 1, 256, 256),  # 136
    "step": (1340, 3, 1088, 7200),  # 1219 to 1261, 6508 to 7020
    "AdamW's step": (330, 0, 0, 1392),
}


def count_calls(call: Callable[[], Any]) -> int:
    """How many functions of ours this thread calls in a call; the least of a few, after some that warm up."""
    found = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            found[-1] += 1

    for _ in range(4):
        call()
    gc.disable()  # what a collection ends may call functions as well
    try:
        for _ in range(REPEATS):
            found.append(0)
            sys.setprofile(note)
            try:
                call()
            finally:
                sys.setprofile(None)
    finally:
        gc.enable()
    return min(found)


def count_memory(call: Callable[[], Any], looks: bool = True) -> int:
    """The bytes that torch allocates for this thread in a call; one thread of a process can look at a time."""
    with profile(enabled=looks, profile_memory=True) as seen:
        call()
    events = seen.kineto_results.events() if looks else ()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


PLAN = ModelPlan(Mesh.of(tp=2), {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"})


def make_calls() -> dict[str, Callable[[], Any]]:
    """Calls by name, each on tensors of its own."""
    rows, columns = (shard(torch.ones(8, 8), f"on tp=2: S({dim})") for dim in (0, 1))
    weight = shard(torch.ones(8, 8), "on tp=2: R").requires_grad_()
    model = shard_module(make_model(), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(4, 8)
    other = shard_module(make_model(), PLAN)
    adamw = torch.optim.AdamW(other.parameters(), lr=0.1)  # whose numbers change with each step
    other(batch).square().mean().backward()

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return {
        "x + y": lambda: rows + rows,
        "x.t()": lambda: rows.t(),
        "x @ w": lambda: rows @ weight,
        "x @ w, backward": lambda: (rows @ weight).sum().backward(),
        "x += 1": lambda: rows.add_(1.0),
        "pending sum": lambda: columns.sum(1),
        "move": lambda: rows.redistribute("on tp=2: S(1)"),
        "gather": lambda: rows.full(),
        "step": step,
        "AdamW's step": adamw.step,
    }


def make_calls_at_new_shapes() -> dict[str, Callable[[], Any]]:
    """Calls that each take a tensor of a shape that none had before; for one rank, since threads share decisions."""
    weight = shard(torch.ones(8, 8), "on tp=1: R").requires_grad_()
    new = [shard(torch.ones(rows, 8), "on tp=1: S(0)") for rows in range(1000, 1050)]
    return {
        "x + y, new shape": lambda: [t + t for t in [new.pop()]],
        "linear, new shape": lambda: [functional.linear(t, weight) for t in [new.pop()]],
    }


def count_all() -> dict[str, tuple[int, ...]]:
    """What each takes, on rank 0 of ranks whose moves are exchanges as between processes."""

    def body(comm: Comm, make: Callable[[], dict[str, Callable[[], Any]]]) -> dict[str, tuple[int, ...]]:
        counting = CountingComm(comm)
        with use_comm(counting):
            found = {}
            for name, call in make().items():
                calls = count_calls(call)
                counting.exchanges.clear()
                call()
                exchanges = len(counting.exchanges), sum(size for _, size in counting.exchanges)
                found[name] = calls, *exchanges, count_memory(call, looks=comm.rank == 0)
            return found

    count_memory(lambda: None)  # the profiler starts once, in this thread
    counts: dict[str, tuple[int, ...]] = run_local(body, 2, make_calls, timeout=60.0)[0]
    return counts | run_local(body, 1, make_calls_at_new_shapes, timeout=60.0)[0]


@pytest.fixture(scope="module")
def counts() -> dict[str, tuple[int, ...]]:
    return count_all()


@pytest.mark.parametrize("name", MOST)
def test_a_warm_call_takes_no_more_than_it_did(counts: dict[str, tuple[int, ...]], name: str) -> None:
    found, most = (dict(zip(KINDS, each[name], strict=True)) for each in (counts, MOST))
    assert all(found[kind] <= most[kind] for kind in found), f"{name}: {found}, at most {most}"


def test_every_call_is_looked_at(counts: dict[str, tuple[int, ...]]) -> None:
    assert counts.keys() == MOST.keys()


def test_memory_is_counted_also_where_it_is_freed_again() -> None:
    assert count_memory(lambda: torch.empty(1000)) == 4000
    assert count_memory(lambda: None) == 0


def test_one_more_call_is_counted() -> None:
    layout = shardwise.parse_spec("on tp=2: S(0)").layout((4,))
    once = count_calls(lambda: layout.shape)
    assert count_calls(lambda: [layout.pieces_of(0), layout.shape]) > once


FIRST_BLOCK = """
import sys, torch, shardwise
block = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
block = shardwise.shard_module(block, shardwise.ModelPlan(shardwise.Mesh.of(x=1), {"**": "R"}))
block(shardwise.shard(torch.ones(2, 8, 32), "on x=1: S(0)")).sum().backward()
print(*[name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_the_first_block_loads_no_compiler() -> None:
    """It takes half a second and more, and no eager step needs it."""
    done = subprocess.run([sys.executable, "-c", FIRST_BLOCK], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == []
