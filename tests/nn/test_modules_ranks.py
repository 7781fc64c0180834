"""Sharded modules on real processes: lookups, planned models and their training, beside whole ones and torch's own."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._shard.api import shard_parameter as torch_shard_parameter
from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchChunkSpec

from shardwise import ChunkSpec, Mesh, ShardedTensor, explain, shard
from shardwise.nn import (
    BalancedPlanner,
    ModelPlan,
    ShardedOptimizer,
    named_params_with_sharded_tensor,
    shard_module,
    shard_parameter,
)
from shardwise.nn import lookup_fetch as lookup_call
from shardwise.ops.propagation import prefer_strategies
from tests.world import Ranks, world_fixture

world = world_fixture(3)
ROWS, WIDTH = 12, 6


def ids_of(rank: int, dims: int) -> Tensor:
    ids = torch.arange(rank, rank + 6) * 5 % ROWS
    return ids if dims == 1 else ids.view(2, 3)


def layer(kind: str) -> nn.Module:
    torch.manual_seed(4)
    return nn.Embedding(ROWS, WIDTH) if kind == "embedding" else nn.EmbeddingBag(ROWS, WIDTH, mode="sum")


def _three_ways(kind: str, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """On one rank: the results of our sharded layer, of torch's, and of the whole one."""
    warnings.simplefilter("ignore", FutureWarning)
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = ids_of(rank, 1 if kind == "embedding" else 2)
    ours, whole = layer(kind), layer(kind)
    shard_parameter(ours, "weight", ChunkSpec(dim, size))
    with torch.device("cpu"):  # where torch's own works over gloo
        theirs = layer(kind)
        theirs.load_state_dict(whole.state_dict())
        torch_shard_parameter(theirs, "weight", TorchChunkSpec(dim, [f"rank:{r}/cpu" for r in range(size)]))
        found = theirs(ids.cpu()).detach()
    return ours(ids).detach(), found.to(ids.device), whole(ids).detach()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_lookups_are_those_of_torch_and_of_the_whole_table(world: Ranks, kind: str, dim: int) -> None:
    for ours, theirs, whole in world.run(_three_ways, kind, dim):
        torch.testing.assert_close(ours, whole)
        torch.testing.assert_close(ours, theirs)


def _gradients(kind: str, dim: int, inline: int) -> tuple[Tensor, Tensor]:
    """The gradients of a sharded table and of a whole one that sees the ids of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sharded, whole = layer(kind), layer(kind)
    shard_parameter(sharded, "weight", ChunkSpec(dim, size))
    dims = 1 if kind == "embedding" else 2
    before, lookup_call.INLINE = lookup_call.INLINE, inline
    try:
        sharded(ids_of(rank, dims)).square().sum().backward()
    finally:
        lookup_call.INLINE = before
    torch.stack([whole(ids_of(r, dims)).square().sum() for r in range(size)]).sum().backward()  # type: ignore[no-untyped-call]
    found, expected = (next(module.parameters()).grad for module in (sharded, whole))
    assert isinstance(found, ShardedTensor) and expected is not None
    return found.full(), expected


@pytest.mark.parametrize("inline", [0, 1 << 16], ids=["lists on their own", "lists that come along"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_gradients_are_those_of_the_whole_table(world: Ranks, kind: str, dim: int, inline: int) -> None:
    for found, expected in world.run(_gradients, kind, dim, inline):
        torch.testing.assert_close(found, expected)


class Scored(nn.Module):
    """Bags from two tables, and a score."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.EmbeddingBag(ROWS, WIDTH, mode="sum"), nn.EmbeddingBag(2 * ROWS, WIDTH, mode="sum")
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.score(torch.tanh(self.first(ids) + self.second(ids)))


def _train(model: nn.Module, batches: list[Tensor], steps: int) -> None:
    optimizer = ShardedOptimizer(dict(named_params_with_sharded_tensor(model)), torch.optim.Adam, lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([model(ids).square().sum() for ids in batches]).sum().backward()  # type: ignore[no-untyped-call]
        if len(batches) == 1:
            for name, parameter in model.named_parameters():
                if name.startswith("score"):
                    dist.all_reduce(parameter.grad)
        optimizer.step()


def _tables_after_training() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(6)
    whole = Scored().double()
    torch.manual_seed(6)
    sharded = Scored().double()
    limit = 14 * WIDTH * 8 + 100
    shard_module(sharded, BalancedPlanner(dist.get_world_size(), limit).build_plan(sharded))
    _train(sharded, [ids_of(dist.get_rank(), 2)], 3)
    _train(whole, [ids_of(rank, 2) for rank in range(dist.get_world_size())], 3)
    pairs = zip(sharded.parameters(), whole.parameters(), strict=True)
    return [((s.full() if isinstance(s, ShardedTensor) else s).detach(), w.detach()) for s, w in pairs]


def test_tables_train_as_whole_ones(world: Ranks) -> None:
    for pairs in world.run(_tables_after_training):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)


def _planned_step() -> tuple[float, float]:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 2)).double()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    whole = F.mse_loss(model(x), torch.zeros(6, 2).double()).item()
    shard_module(model, ModelPlan(Mesh.of(tp=3), {"0.*": "S(0)", "2.weight": "S(1)"}, input_plan="replicated"))
    loss = model(x).square().mean()
    loss.backward()
    return float(loss.full().detach()), whole


def test_a_planned_model_gives_the_loss_of_the_whole_one(world: Ranks) -> None:
    for found, expected in world.run(_planned_step):
        assert found == pytest.approx(expected, rel=1e-12)


def _bad_ids() -> None:
    table = nn.Embedding(ROWS, WIDTH)
    shard_parameter(table, "weight", ChunkSpec(0, 3))
    table(torch.tensor([ROWS if dist.get_rank() == 1 else 0]))


def test_an_id_that_is_out_of_range_on_one_rank_is_told_to_all(world: Ranks) -> None:
    for outcome in world.outcomes(_bad_ids):
        assert "rank 1: Index out of range in Input: ids from 12 to 12, and the table has 12 rows" in str(outcome.error)


def _attend_in_a_ring(length: int) -> list[tuple[Tensor, Tensor]]:
    """Blocks of keys travel between processes, large ones beside computation."""
    drawn = torch.Generator().manual_seed(2)
    whole = [torch.randn(1, 2, length, 8, dtype=torch.float64, generator=drawn).requires_grad_() for _ in range(3)]
    held = [shard(t.detach(), "on cp=3: S(2) zigzag", None).requires_grad_() for t in whole]
    with prefer_strategies("ring"), explain() as log:
        made = F.scaled_dot_product_attention(*held, is_causal=True)
    assert [e.name for e in log.entries[:-1]] == ["attention (ring)"] * 4
    dense = F.scaled_dot_product_attention(*whole, is_causal=True)
    for out in (made, dense):
        out.square().sum().backward()
    return [
        (made.full().detach(), dense.detach()),
        *((a.grad.full(), b.grad) for a, b in zip(held, whole, strict=True)),
    ]


@pytest.mark.parametrize("length", [7, 1201])
def test_a_ring_of_processes_attends_as_the_whole(world: Ranks, length: int) -> None:
    for pairs in world.run(_attend_in_a_ring, length):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)
