"""Train embedding tables that lie on many ranks: whole, by rows, by columns, in irregular pieces, and as planned.

Every rank brings its own batch of plain ids, as users of torch's sharded embeddings do. The losses are compared with
those of the same model whole on every rank.

    python examples/recsys_embeddings.py
    torchrun --nproc-per-node 4 examples/recsys_embeddings.py
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from shardwise import Box, ChunkSpec, Comm, EnumerableSpec, Piece, ShardingSpec, default_comm, launch
from shardwise.nn import BalancedPlanner, ShardedOptimizer, ShardingPlan, shard_module

ROWS, WIDTH, BAG, BATCH, STEPS = {"user": 4000, "item": 2000, "shop": 300, "city": 50}, 16, 8, 32, 20
TOLERANCE = 1e-9
LIMIT = 4000 * WIDTH * 8 // 2


class Model(nn.Module):
    """Bags of ids from several tables, summed up and scored. The tables are sharded, the score is on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(rows, WIDTH, mode="sum") for name, rows in ROWS.items()})
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        features = torch.stack([self.tables[name](given) for name, given in ids.items()]).sum(0)
        return self.score(torch.tanh(features)).squeeze(1)


def by_hand(ranks: int) -> ShardingPlan:
    """One table whole on the last rank, one by rows, one by columns, one in uneven pieces of rows and columns."""
    last = ranks - 1
    irregular = [
        Piece(Box((0, 0), (10, WIDTH)), last),
        Piece(Box((10, 0), (40, 4)), 0),
        Piece(Box((10, 4), (40, WIDTH - 4)), ranks // 2),
    ]
    specs: dict[str, ShardingSpec] = {
        "user": ChunkSpec(0, ranks),
        "item": ChunkSpec(1, ranks),
        "shop": EnumerableSpec([Piece(Box((0, 0), (ROWS["shop"], WIDTH)), last)]),
        "city": EnumerableSpec(irregular),
    }
    return ShardingPlan({f"tables.{name}.weight": spec for name, spec in specs.items()})


def batches(ranks: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The batches of all ranks, one after another in each step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = {n: torch.randint(rows, (ranks * BATCH, BAG), generator=generator) for n, rows in ROWS.items()}
        yield ids, (ids["user"] % 2).double().mean(1)


def train(model: nn.Module, comm: Comm, local: bool, progress: Progress, name: str) -> list[float]:
    """The losses of some steps, on this rank's part of each batch or on the whole batch."""
    optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adam, lr=0.02)
    losses = []
    place = comm.ranks.index(comm.rank)
    for ids, wanted in progress.track(batches(comm.world_size), total=STEPS, description=name):
        if local:
            ids = {n: given.chunk(comm.world_size)[place] for n, given in ids.items()}
            wanted = wanted.chunk(comm.world_size)[place]
        loss = F.mse_loss(model(ids), wanted, reduction="sum") / (comm.world_size * BATCH)
        optimizer.zero_grad()
        loss.backward()
        if local:
            sum_over_ranks(model, comm)
        optimizer.step()
        losses.append(total(loss, comm) if local else loss.item())
    return losses


def sum_over_ranks(model: nn.Module, comm: Comm) -> None:
    """Sum the gradients of what every rank holds whole; those of the tables are summed already."""
    for name, parameter in model.named_parameters():
        if name.startswith("score") and parameter.grad is not None:
            comm.all_reduce(parameter.grad, label=name).wait()


def total(loss: Tensor, comm: Comm) -> float:
    """The sum of all ranks' losses."""
    value = loss.detach().clone()
    comm.all_reduce(value, label="loss").wait()
    return value.item()


def main() -> float:
    """On one rank: train the whole model and two sharded ones; return the largest difference between losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = default_comm()
    whole = Model().double()
    console = Console(quiet=comm.rank != 0)
    planner = BalancedPlanner(comm.world_size, LIMIT if comm.world_size > 2 else None)
    console.print(str(planner.balance(whole)), highlight=False)
    plans = {"by hand": by_hand(comm.world_size), "as planned": planner.build_plan(whole)}
    models = {name: copy.deepcopy(whole) for name in plans}
    for name, plan in plans.items():
        shard_module(models[name], plan)
    with Progress(console=console) as progress:
        losses = {name: train(model, comm, True, progress, name) for name, model in models.items()}
        losses["whole"] = train(whole, comm, False, progress, "whole")
    for number in range(0, STEPS, 5):
        told = "  ".join(f"{name} {found[number]:.8f}" for name, found in losses.items())
        console.print(f"step {number:>2}  {told}", highlight=False)
    apart = max(abs(a - b) for name in plans for a, b in zip(losses[name], losses["whole"], strict=True))
    console.print(f"largest difference of the losses: {apart:.1e}", highlight=False)
    return apart


if __name__ == "__main__":
    sys.exit(max(launch(main, 4, timeout=120)) > TOLERANCE)
