"""Kinds of parallelism together on up to 8 ranks: two steps are those of the dense model; another layout loads them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Comm, Mesh, ModelPlan, ShardedTensor, load, run_local, save, shard_module
from tests.nn.test_sequence_parallel import PARAMETERS, _batch, _make_model

# Axes in the order of the mesh. What one combination saves is loaded in the layout of the one before it.
COMBINATIONS = [
    "dp=2,tp=2",
    "fsdp=2,tp=2",
    "dp=2,fsdp=2",
    "dp=2,cp=2",
    "fsdp=2,cp=2",
    "cp=2,tp=2",
    "dp=2,cp=2,tp=2",
    "fsdp=2,cp=2,tp=2",
    "dp=2,fsdp=2,tp=2",
    "dp=2,fsdp=2,cp=2",
    "tp=4,dp=2",
    "dp=1,fsdp=2,cp=1,tp=3",
]
ROWS, LENGTH, STEPS = 4, 8, 2


def make_plan(text: str) -> ModelPlan:
    """The plan of a mesh: `tp` splits layers as ever, `fsdp` their other dim, `dp` and `fsdp` rows, `cp` words."""
    mesh = Mesh.of(**{name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))})
    inputs = {"dp": "dp: S(0)", "fsdp": "fsdp: S(0)", "cp": "cp: S(1)", "tp": ""}
    parameters = {}
    for pattern, on_tp in PARAMETERS.items():
        on_fsdp = f"fsdp: S({1 - int(on_tp[-2])})"
        if parts := [on_tp] * ("tp" in mesh.axes) + [on_fsdp] * ("fsdp" in mesh.axes):
            parameters[pattern] = ", ".join(parts)
    cut = ", ".join(filter(None, (inputs[axis] for axis in mesh.axes))) or "replicated"
    stream = "tp: S(1)" if "tp" in mesh.axes else None
    return ModelPlan(mesh, parameters, input_plan=cut, output_plan="plain", activations=stream)


def rows_of(mesh: Mesh, rank: int, rows: int = ROWS) -> slice:
    """The rows of the batch that a rank passes."""
    number, parts = 0, 1
    for axis, place in mesh.coordinates(rank).items():
        if axis in ("dp", "fsdp"):
            number, parts = number * mesh.axis_size(axis) + place, parts * mesh.axis_size(axis)
    return slice(number * rows // parts, (number + 1) * rows // parts)


def train(model: nn.Module, rows: slice = slice(None), steps: int = STEPS) -> list[Tensor]:
    """The losses of steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        ids, targets = _batch(ROWS, LENGTH)
        loss = model(ids[rows], targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full() if isinstance(t, ShardedTensor) else t for name, t in tensors.items()}


@pytest.fixture(scope="module")
def dense() -> tuple[list[Tensor], dict[str, Tensor]]:
    model = _make_model()
    return train(model), dict(model.state_dict())


@pytest.mark.parametrize("text", COMBINATIONS)
def test_two_steps_are_those_of_the_dense_model_and_load_into_another_layout(
    text: str, dense: tuple[list[Tensor], dict[str, Tensor]], tmp_path: Path
) -> None:
    start, path = _make_model(), tmp_path / "checkpoint"
    plan, other = make_plan(text), make_plan(COMBINATIONS[COMBINATIONS.index(text) - 1])

    def body(comm: Comm) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = shard_module(copy.deepcopy(start), plan)
        losses = train(model, rows_of(plan.mesh, comm.rank))
        save(model.state_dict(), path)
        return losses, whole(model.state_dict())

    def load_there(comm: Comm) -> dict[str, Tensor]:
        model = shard_module(copy.deepcopy(start), other)
        state = model.state_dict()
        load(state, path)
        return whole(state)

    for losses, state in run_local(body, plan.mesh.size):
        assert_close(losses, dense[0])
        assert_close(state, dense[1])
    for state in run_local(load_there, other.mesh.size):
        assert_close(state, dense[1])
