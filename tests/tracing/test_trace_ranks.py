"""Traces and log messages of ranks that are processes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise import ChunkSpec, Mesh, ModelPlan, shard_module
from shardwise.comm import ProcessGroupComm
from tests.world import Ranks, world_fixture

world = world_fixture(2)


def trace_step(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    plan = ModelPlan(Mesh.of(dp=2), {"**": "S(0)"}, input_plan="dp: S(0)", reshard_after_forward=True)
    shard_module(model, plan)
    x = shardwise.ones(ChunkSpec(0, 2), 512, 512)
    for _ in range(2):  # the second step gathers ahead, in the background
        with shardwise.trace(path):
            model(torch.ones(256, 64)).square().sum().backward()
            x.redistribute(ChunkSpec(1, 2), async_op=True).wait()


def log_engine() -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(f"{record.name}: {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("shardwise")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        ProcessGroupComm().barrier(label="first call")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return found


def test_the_first_rank_tells_how_ranks_communicate(world: Ranks) -> None:
    first, second = world.run(log_engine)
    assert len(first) == 1 and first[0].startswith("shardwise.comm: ranks 0, 1 use ") and "Engine" in first[0]
    assert second == []


def test_processes_write_one_file(world: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    world.run(trace_step, str(path))
    events: list[dict[str, Any]] = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert not list(tmp_path.glob("*.rank*"))
    for rank in (0, 1):
        own = [e for e in events if e["pid"] == rank]
        moves = [e for e in own if e["cat"] == "move"]
        assert sum(e["args"]["bytes"] for e in moves if e["name"] == "redistribute") == 512 * 512 * 4 // 4
        assert {e["args"]["pass"] for e in own if e["cat"] == "operator"} == {"forward", "backward"}
        assert all("test_trace_ranks.py:" in e["args"]["line"] for e in moves if e["name"] == "redistribute")
        assert len([e for e in moves if "64,64" in e["args"]["from"]]) >= 3, "weights are gathered, or gradients summed"
    first = [min(e["ts"] for e in events if e["pid"] == rank) for rank in (0, 1)]
    assert abs(first[0] - first[1]) < 60_000_000, "one clock"
