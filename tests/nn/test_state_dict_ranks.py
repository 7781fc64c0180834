"""Saving the way torch's users save: state dicts, whole or in parts, torch.save, asynchronous checkpoints."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import shardwise
from shardwise import Mesh, ModelPlan, ShardedOptimizer, ShardedTensor
from tests.world import Ranks, world_fixture

world = world_fixture(2, shared=True)
PLAN = {"0.weight": "S(0)", "0.bias": "S(0)", "2.weight": "S(1)"}
OPTIMIZERS = ("ShardedOptimizer", "AdamW")


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))


def sharded() -> nn.Module:
    model = dense()
    shardwise.shard_module(model, ModelPlan(Mesh.of(tp=2), PLAN, input_plan="replicated"))
    return model


def trained(kind: str, model: nn.Module, steps: int = 2) -> Any:
    """An optimizer of a model after some steps."""
    if kind == "ShardedOptimizer":
        optimizer: Any = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
    optimizer.step()


def kinds(tree: Any) -> set[type]:
    return {type(v) for v in torch.utils._pytree.tree_leaves(tree) if isinstance(v, Tensor) and v.dim() > 0}


def whole_states() -> tuple[Any, ...]:
    model, options = sharded(), StateDictOptions(full_state_dict=True)
    everywhere = get_model_state_dict(model, options=options)
    on_cpu = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    parts = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    return everywhere, on_cpu, kinds(parts), {str(v.device) for v in parts.values()}


def test_a_whole_state_dict_has_plain_tensors(world: Ranks) -> None:
    expected = dense().state_dict()
    for rank, (everywhere, on_cpu, parts, devices) in enumerate(world.run(whole_states)):
        assert kinds(everywhere) == {Tensor}
        torch.testing.assert_close(everywhere, dict(expected), rtol=0, atol=0)
        assert list(on_cpu) == (list(expected) if rank == 0 else [])
        assert (parts, devices) == ({ShardedTensor}, {"cpu"})


def set_from(rank0_only: bool) -> bool:
    model, other = sharded(), dense()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    given = other.state_dict() if not rank0_only or dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=rank0_only)
    set_model_state_dict(model, given, options=options)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(isinstance(a, ShardedTensor) and torch.equal(a.full(), b) for a, b in pairs)


@pytest.mark.parametrize("rank0_only", [False, True])
def test_a_whole_state_dict_is_set(world: Ranks, rank0_only: bool) -> None:
    assert world.run(set_from, rank0_only) == [True, True]


def optimizer_round_trip(kind: str, flat: bool, full: bool, from_rank0: bool) -> tuple[Any, ...]:
    """Train, hand model and optimizer over to new ones, train on: both give the same."""
    options = StateDictOptions(
        flatten_optimizer_state_dict=flat, full_state_dict=full, broadcast_from_rank0=from_rank0, cpu_offload=from_rank0
    )
    model = sharded()
    optimizer = trained(kind, model)
    states = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    found, states = kinds(states), copy.deepcopy(states)  # torch's optimizers take over the tensors themselves
    again = sharded()
    new = trained(kind, again, steps=0)
    set_model_state_dict(again, states[0], options=options)
    set_optimizer_state_dict(again, new, states[1], options=options)
    step(model, optimizer)
    step(again, new)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    return found, all(torch.equal(a.full(), b.full()) for a, b in pairs)


@pytest.mark.parametrize("from_rank0", [False, True])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_go_through_torchs_state_dicts(
    world: Ranks, kind: str, flat: bool, full: bool, from_rank0: bool
) -> None:
    if from_rank0 and not full:
        pytest.skip("rank 0 alone has whole states only")
    for rank, (found, same) in enumerate(world.run(optimizer_round_trip, kind, flat, full, from_rank0)):
        assert found == (set() if from_rank0 and rank else {Tensor} if full else {ShardedTensor})
        assert same


def saved_by_torch() -> tuple[Any, ...]:
    model, file, whole = sharded(), io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = sharded()
    with torch.no_grad():
        again[0].weight.zero_()  # type: ignore[operator]  # a parameter
    again.load_state_dict(torch.load(file, weights_only=True))
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), whole)
    whole.seek(0)
    plain = dense()
    plain.load_state_dict(torch.load(whole, weights_only=True))
    return all(torch.equal(a.full(), b.full()) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_torch_save_and_load_of_weights_only(world: Ranks) -> None:
    assert world.run(saved_by_torch) == [True, True]


def into_a_plain_model() -> tuple[Any, ...]:
    plain = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))
    plain.load_state_dict(sharded().state_dict())
    return dict(plain.state_dict()), {type(p) for p in plain.parameters()}


def test_a_sharded_state_dict_loads_into_a_plain_model(world: Ranks) -> None:
    for found, types in world.run(into_a_plain_model):
        torch.testing.assert_close(found, dict(dense().state_dict()), rtol=0, atol=0)
        assert types == {nn.Parameter}


def saved_meanwhile(folder: str) -> bool:
    model = sharded()
    future: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # what is written is a copy
    future.result()
    again = {"model": sharded().state_dict()}
    for value in again["model"].values():
        value.zero_()
    dcp.load(again, checkpoint_id=folder)
    return all(torch.equal(again["model"][n].full(), whole) for n, whole in dense().state_dict().items())


def test_asynchronous_checkpoints_of_torch(world: Ranks, tmp_path: Path) -> None:
    assert world.run(saved_meanwhile, str(tmp_path / "checkpoint")) == [True, True]
