"""FSDP on CPU: SHARDED_STATE_DICT -> torch.distributed.checkpoint -> another world size, all through Shardwise.

Two ranks of three train and save, as a group of their own; then all three load.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from shardwise.compat import install
from tests.world import Ranks, on_host, world_fixture

SAVERS = (0, 1)

world = world_fixture(3, timeout=60.0)


def make_model(seed: int, group: dist.ProcessGroup | None = None) -> FSDP:
    """A small model with parameters that no world size here divides evenly."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4, bias=False), nn.LayerNorm(4))
    return FSDP(layers, group, ShardingStrategy.FULL_SHARD, device_id=torch.device("cpu"))


def train(model: FSDP, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 5), float(step + 1))).square().sum().backward()
        optimizer.step()


def outputs(model: FSDP, optimizer: torch.optim.Optimizer) -> list[float]:
    """What the model computes now, and after one more step, which depends on the optimizer's state."""
    found = []
    for steps in (0, 1):
        train(model, optimizer, steps)
        with torch.no_grad():
            found += [float(x) for x in model(torch.arange(5.0).reshape(1, 5)).flatten()]
    return found


def save(folder: str) -> tuple[set[str], list[str], list[float]] | None:
    group = dist.new_group(SAVERS)
    if dist.get_rank() not in SAVERS:
        return None
    with warnings.catch_warnings(), install(), on_host():
        warnings.simplefilter("ignore")  # torch's own, on FSDP's state dict types
        model = make_model(1, group)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer, steps=3)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            optimizer_state = FSDP.optim_state_dict(model, optimizer, group=group)
        kinds = {type(value).__module__ for value in (*state.values(), optimizer_state["state"]["0.weight"]["exp_avg"])}
        sizes = [f"{name} {[list(s.tensor.shape) for s in value.local_shards()]}" for name, value in state.items()]
        whole = {"model": state, "optim": optimizer_state}
        state_dict_saver.save(whole, checkpoint_id=folder, process_group=group)
        return kinds, sizes, outputs(model, optimizer)


def load(folder: str) -> list[float]:
    with warnings.catch_warnings(), install(), on_host():
        warnings.simplefilter("ignore")
        model = make_model(2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            wanted: dict[str, Any] = {"model": model.state_dict()}
            state_dict_loader.load(wanted, checkpoint_id=folder)
            model.load_state_dict(wanted["model"])
            found = load_sharded_optimizer_state_dict(wanted["model"], "optim", FileSystemReader(folder))
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optim"]))
        return outputs(model, optimizer)


def test_a_sharded_state_dict_is_loaded_on_another_world_size(world: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    first, second, third = world.run(save, folder, limit=100.0)
    assert third is None
    kinds, sizes, values = first
    assert kinds == {"shardwise.compat.sharded_tensor"}
    assert sizes == ["0.weight [[4, 5]]", "0.bias [[4]]", "2.weight [[2, 7]]", "3.weight [[2]]", "3.bias [[2]]"]
    assert second[1] == ["0.weight [[3, 5]]", "0.bias [[3]]", "2.weight [[2, 7]]", "3.weight [[2]]", "3.bias [[2]]"]
    assert second[2] == values
    for loaded in world.run(load, folder, limit=100.0):
        assert loaded == pytest.approx(values, rel=1e-5, abs=1e-6)
    assert values[:4] != pytest.approx(values[4:], rel=1e-2)
