"""Mixed precision as people write it: autocast and a GradScaler; an overflow on one rank counts on all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from shardwise import Comm, Mesh, ModelPlan, ShardedOptimizer, ShardedTensor, run_local, shard_module
from tests.device import DEVICE

PLAN = ModelPlan(Mesh.of(tp=2), {"0.*": "S(0)", "3.weight": "S(1)"}, input_plan="replicated", output_plan="plain")
X = torch.linspace(-1, 1, 24).reshape(6, 4)


def sharded_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.1)


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "ShardedOptimizer": sharded_adamw,
}


def dense_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))


def spoil(weight: Any) -> None:
    """An infinite gradient in the last row, which rank 1 has."""
    if not isinstance(weight, ShardedTensor):
        weight.grad[-1, 0] = float("inf")
    elif weight.comm.rank == 1:
        weight.local_tensor().grad[-1, 0] = float("inf")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, overflow: bool) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scales = []
    for step in range(4):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(X).float().square().mean()
        scaler.scale(loss).backward()
        if overflow and step == 1:
            spoil(model[0].weight)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_scaler_decides_the_same_on_every_rank(name: str, overflow: bool) -> None:
    start = dense_model()
    dense = copy.deepcopy(start)
    expected = train(dense, MAKERS[name](dense), overflow)
    assert (256.0 / 2 in expected) == overflow

    def body(comm: Comm) -> tuple[list[float], dict[str, Any]]:
        model = copy.deepcopy(start)
        shard_module(model, PLAN)
        return train(model, MAKERS[name](model), overflow), {n: p.full() for n, p in model.named_parameters()}

    for scales, parameters in run_local(body, 2):
        assert scales == expected
        assert_close(parameters, {n: p.detach() for n, p in dense.named_parameters()}, rtol=0.05, atol=5e-3)
