"""Compiled programs on real processes: training steps beside those without a graph, and inductor once."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Mesh, ModelPlan, default_comm, shard_module
from tests.world import Ranks, world_fixture

world = world_fixture(2)
CUT = {"layers.*.weight": "S(0)", "layers.*.bias": "S(0)"}


class Dropping(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.checkpointed = checkpointed

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = checkpoint(_drop, layer, x, use_reentrant=False) if self.checkpointed else _drop(layer, x)
        return x


def _drop(layer: nn.Module, x: Any) -> Any:
    return F.dropout(torch.tanh(layer(x)), 0.3)


def _train(
    backend: str | None, lengths: list[list[int]], resharded: bool, checkpointed: bool = False
) -> tuple[list[Tensor], str]:
    """The parameters after some steps on batches whose parts have these lengths, and what was traced."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = Dropping(checkpointed)
    plan = ModelPlan(Mesh.of(dp=2), CUT, axis="dp", input_plan="dp: S(0)", reshard_after_forward=resharded)
    shard_module(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)

    def step(batch: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run: Any = step if backend is None else shardwise.compile(step, backend=backend)
    rank = default_comm().rank
    for number, rows in enumerate(lengths):
        torch.manual_seed(number)
        batch = torch.arange(rows[rank] * 8.0).reshape(rows[rank], 8).sin() + rank
        run(batch)
    text = "" if backend is None else run.explain()
    parameters: list[Any] = list(model.parameters())
    return [p.detach().full() for p in parameters], text


@pytest.mark.parametrize("resharded", [False, True])
def test_steps_on_uneven_batches_are_those_without_a_graph(world: Ranks, resharded: bool) -> None:
    lengths = [[6, 6], [6, 6], [6, 6], [6, 4], [6, 6], [6, 4]]  # one rank alone sees another shape
    compiled = world.run(_train, "aot_eager", lengths, resharded)
    eager = world.run(_train, None, lengths, resharded)
    for (found, text), (expected, _) in zip(compiled, eager, strict=True):
        assert "2 kinds of inputs" in text and "without a graph" not in text
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_checkpointed_layers_drop_the_same_elements_again(world: Ranks) -> None:
    lengths = [[6, 6]] * 3
    compiled = world.run(_train, "aot_eager", lengths, True, True)
    eager = world.run(_train, None, lengths, True, True)
    for (found, text), (expected, _) in zip(compiled, eager, strict=True):
        assert "without a graph" not in text
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(os.environ.get("SHARDWISE_SKIP_INDUCTOR") == "1", reason="inductor needs a C++ compiler")
def test_inductor_compiles_a_training_step(world: Ranks) -> None:
    lengths = [[6, 6]] * 3
    compiled = world.run(_train, "inductor", lengths, True, limit=380)
    eager = world.run(_train, None, lengths, True)
    for (found, text), (expected, _) in zip(compiled, eager, strict=True):
        assert "1 kind of inputs" in text and "without a graph" not in text
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-5)
