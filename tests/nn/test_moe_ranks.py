"""Mixtures of experts on real processes: routed tokens and grouped products train as on one."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from shardwise import Mesh, ModelPlan, shard_module
from tests.nn.test_moe import F32, LAYOUTS, floats, grouped_block, own_part, sorted_block, train, whole
from tests.world import Ranks, world_fixture

world = world_fixture(2)
BATCHES = [floats(4, 3, 8, seed=s) for s in (50, 51, 52)]
BLOCKS = {"plain torch": sorted_block, "routed": grouped_block}


def _train(kind: str, layout: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    axes, patterns, input_plan = LAYOUTS[layout]
    mesh, model = Mesh.of(**axes), BLOCKS[kind]()
    shard_module(model, ModelPlan(mesh, patterns, lengths={"h": 16}, input_plan=input_plan))
    losses, gradients = train(model, [own_part(x, mesh, input_plan, dist.get_rank()) for x in BATCHES])
    return losses, gradients, [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("layout", ["ep2 of batches", "ep2", "dp2"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_processes_train_as_one(world: Ranks, kind: str, layout: str) -> None:
    dense = BLOCKS[kind]()
    losses, gradients = train(dense, BATCHES)
    for found, grads, parameters in world.run(_train, kind, layout):
        assert_close(found, losses, **F32)
        assert_close(grads, gradients, **F32)
        assert_close(parameters, [whole(p) for p in dense.parameters()], **F32)
