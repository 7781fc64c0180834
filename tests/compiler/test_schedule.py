"""Moves of a graph start early and are waited for late, within a memory limit, in one order on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import Comm, Mesh, ModelPlan, run_local, shard_module
from tests.dense import numbers

LAYERS, WIDTH, ROWS = 4, 512, 2048  # a weight has 1 MiB, less than the batch: it is gathered, and travels alone


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _trace(comm: Comm, memory_limit: int) -> tuple[list[list[str]], bool]:
    model = Deep()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = numbers(*parameter.shape, seed=i, dtype=torch.float32) / WIDTH**0.5
    whole = Deep()
    whole.load_state_dict(model.state_dict())
    shard_module(model, ModelPlan(Mesh.of(dp=2), {"layers.*.weight": "S(0)"}, axis="dp", input_plan="dp: S(0)"))
    run = shardwise.compile(model, backend="aot_eager", memory_limit=memory_limit)
    x = numbers(ROWS, WIDTH, dtype=torch.float32)
    output = run(x.chunk(2)[comm.rank])
    output.square().mean().backward()
    expected = whole(x)
    expected.square().mean().backward()
    right = torch.allclose(output.full(), expected, atol=1e-5) and all(
        torch.allclose(p.grad.full(), q.grad, atol=1e-6)  # type: ignore[union-attr, arg-type]  # both have one
        for p, q in zip(model.parameters(), whole.parameters(), strict=True)
    )
    schedules = run._order[0].schedules
    return [[event.split()[0] for event in schedules[name].events] for name in ("forward", "backward")], right


def trace(memory_limit: int) -> list[list[str]]:
    """The starts and waits of the forward and of the backward graph."""
    (first, right), (second, other) = run_local(lambda comm: _trace(comm, memory_limit), 2, timeout=60.0)
    assert right and other
    assert first == second
    return first


def most_at_once(events: list[str]) -> int:
    """How many moves are under way at once, at most."""
    depths, depth = [], 0
    for event in events:
        depth += 1 if event == "start" else -1
        depths.append(depth)
    assert depth == 0
    return max(depths)


@pytest.mark.parametrize(("megabytes", "depth"), [(0, 1), (1, 1), (2, 2), (64, LAYERS)])
def test_gathers_of_the_next_layers_start_early_within_the_limit(megabytes: int, depth: int) -> None:
    forward, _ = trace(megabytes << 20)
    assert forward.count("start") == forward.count("wait") == LAYERS
    assert most_at_once(forward) == depth


def test_reductions_of_gradients_run_beside_the_layers_before() -> None:
    _, backward = trace(64 << 20)
    assert most_at_once(backward) > 1
