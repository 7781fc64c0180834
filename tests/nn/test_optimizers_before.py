"""Does an optimizer that was made before its model was sharded train the sharded parameters, or say that it cannot?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from shardwise.comm import Comm, run_local
from shardwise.geometry import ChunkSpec, Mesh
from shardwise.nn import ModelPlan, ShardedOptimizer, ShardingPlan, shard_module, shard_parameter
from shardwise.tensor import ShardedTensor

MESH = Mesh.of(tp=2)
PLAN = ModelPlan(MESH, {"0.*": "S(0)", "2.weight": "S(1)"}, input_plan="replicated", output_plan="plain")


def make_model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1, generator=generator)
    return model


def do_step(model: nn.Module, optimizer: Any, number: int) -> None:
    batch = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(batch).square().sum().backward()
    optimizer.step()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: (p.full() if isinstance(p, ShardedTensor) else p).detach().clone() for n, p in model.named_parameters()}


def make_with_groups(model: nn.Module) -> optim.Optimizer:
    first, last = model.get_submodule("0"), model.get_submodule("2")
    groups: list[dict[str, Any]] = [{"params": list(first.parameters())}]
    return optim.Adam([*groups, {"params": list(last.parameters()), "lr": 0.3}])


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: optim.AdamW(m.parameters(), lr=0.1),
    "groups": make_with_groups,
    "adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.1),
    "by names": lambda m: ShardedOptimizer(dict(m.named_parameters()), optim.Adam, lr=0.1),
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_training_goes_on_as_if_the_model_were_whole(kind: str, steps_before: int) -> None:
    def train(shard: bool) -> dict[str, Tensor]:
        model = make_model()
        optimizer = MAKERS[kind](model)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(4):
            if number == steps_before and shard:
                shard_module(model, PLAN)
            do_step(model, optimizer, number)
            scheduler.step()
        return values_of(model)

    expected = train(False)
    for found in run_local(lambda comm: train(True), 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name)


def test_several_optimizers_and_one_that_nothing_else_holds() -> None:
    class Loop:
        """Its optimizers are reachable through it only."""

        def __init__(self, model: nn.Sequential) -> None:
            self.steps = [optim.SGD(model[0].parameters(), lr=0.1).step, optim.SGD(model[2].parameters(), lr=0.1).step]

    def body(comm: Comm) -> None:
        model = make_model()
        loop = Loop(model)
        before = values_of(model)
        shard_module(model, PLAN)
        model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
        for step in loop.steps:
            step()
        assert not any(torch.equal(value, before[name]) for name, value in values_of(model).items())

    run_local(body, 2)


def test_gradients_are_dropped_by_an_optimizer_made_before() -> None:
    def body(comm: Comm) -> None:
        model = make_model()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        assert shard_module(model, PLAN) is model
        model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    run_local(body, 2)


def test_plans_by_names_and_single_parameters() -> None:
    def body(comm: Comm) -> None:
        model = make_model()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        shard_module(model, ShardingPlan({"0.weight": ChunkSpec(0, ranks=2)}))
        shard_parameter(model[2], "weight", ChunkSpec(1, ranks=2))
        held = optimizer.param_groups[0]["params"]
        assert [id(p) for p in held] == [id(p) for p in model.parameters()]

    run_local(body, 2)


def test_parameters_listed_before_are_refused_at_the_first_step() -> None:
    def body(comm: Comm) -> None:
        model = make_model()
        listed = list(model.parameters())
        shard_module(model, PLAN)
        optimizer = optim.SGD(listed, lr=0.1)
        model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
        with pytest.raises(ValueError, match=r"SGD holds 4 of 4 parameters as they were before shard_module"):
            optimizer.step()

    run_local(body, 2)


def test_optimizers_of_other_models_stay_as_they_are() -> None:
    def body(comm: Comm) -> None:
        model = make_model()
        other = copy.deepcopy(model)
        optimizer = optim.SGD(other.parameters(), lr=0.1)
        shard_module(model, PLAN)
        other(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], other.parameters(), strict=True))

    run_local(body, 2)
