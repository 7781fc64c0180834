"""Does a transformer whose parameters and batches are sharded over a 2 x 2 mesh train as it does on one rank?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, MeshSpec, Replicate, Shard, ShardedTensor, shard
from tests.nn.tiny_transformer import Sizes, make_model, shard_parameters, train
from tests.world import Ranks, world_fixture

world = world_fixture(4)
SIZES = Sizes()
STEPS = 20


def _losses(dtype: torch.dtype, tied: bool, rms: bool, rows: bool, foreach: bool) -> tuple[list[float], list[float]]:
    """On one rank: the losses of the dense run and of the sharded run."""
    mesh = Mesh.of(dp=2, tp=2)
    expected = train(make_model(SIZES, dtype, tied=tied, rms=rms), SIZES, STEPS)
    model = make_model(SIZES, dtype, tied=tied, rms=rms)
    shard_parameters(model, mesh, Shard(0) if rows else Shard(1))

    def on_dp(batch: Tensor) -> ShardedTensor:
        return shard(batch, MeshSpec(mesh, [Shard(0), Replicate()]), None)

    return expected, train(model, SIZES, STEPS, on_dp, foreach)


def _agree(world: Ranks, near: float, *case: object) -> None:
    for expected, found in world.run(_losses, *case):
        assert expected[-1] < expected[0], "the dense run learns"
        assert found == pytest.approx(expected, rel=near, abs=near)


def test_tied_head_in_float64_matches_the_dense_run(world: Ranks) -> None:
    _agree(world, 1e-10, torch.float64, True, False, True, False)


def test_untied_head_and_column_sharded_embedding_match_the_dense_run(world: Ranks) -> None:
    _agree(world, 1e-10, torch.float64, False, True, False, True)


def test_float32_matches_the_dense_run(world: Ranks) -> None:
    _agree(world, 1e-5, torch.float32, True, False, True, True)
