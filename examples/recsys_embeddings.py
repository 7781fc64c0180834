"""Train embedding tables that lie whole, by rows, by columns and in irregular pieces; then move them, and go on.

    python examples/recsys_embeddings.py
    torchrun --nproc-per-node 4 examples/recsys_embeddings.py

Every rank brings its own batch of plain ids, as users of torch's sharded embeddings do. Halfway, tables and optimizer
state move in memory to the layout that a planner finds. The losses are those of the same model whole on every rank.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import shardwise
from shardwise import Box, ChunkSpec, Comm, EnumerableSpec, Piece, ShardedTensor, ShardingSpec
from shardwise.nn import BalancedPlanner, ShardedOptimizer, ShardingPlan, shard_module

ROWS, WIDTH, BAG, BATCH = {"user": 4000, "item": 2000, "shop": 300, "city": 50}, 16, 8, 32
TOLERANCE = 1e-9


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
    """One table by rows, one by columns, one whole on the last rank, one in uneven pieces of rows and columns."""
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


def planned(ranks: int, model: Model, console: Console) -> ShardingPlan:
    """Whole tables where they fit, rows of those that do not: about as many bytes on each rank."""
    table_bytes = sum(rows * WIDTH * 8 for rows in ROWS.values())
    planner = BalancedPlanner(ranks, memory_limit=table_bytes // ranks + 4096)
    console.print(f"the tables move to the layout of a planner:\n{planner.balance(model)}")
    return planner.build_plan(model)


def optimizer_of(model: Model) -> ShardedOptimizer:
    return ShardedOptimizer(dict(model.named_parameters()), torch.optim.Adam, lr=0.02)


def moved(model: Model, optimizer: ShardedOptimizer, plan: ShardingPlan) -> tuple[Model, ShardedOptimizer]:
    """The same model and optimizer in other layouts: one exchange for all tables, and the state follows them."""
    other = Model().double()
    other.score.load_state_dict(model.score.state_dict())
    shard_module(other, plan)
    olds, news = ([p for p in m.parameters() if isinstance(p, ShardedTensor)] for m in (model, other))
    with torch.no_grad():
        arrived = shardwise.redistribute_many(olds, [table.sharding for table in news])
        for table, values in zip(news, arrived, strict=True):
            table.copy_(values)
    fresh = optimizer_of(other)
    fresh.load_state_dict(optimizer.state_dict())
    return other, fresh


def batch_of(step: int, ranks: int) -> tuple[dict[str, Tensor], Tensor]:
    """The batches of all ranks, one after another, and what to predict for them."""
    generator = torch.Generator().manual_seed(step)
    ids = {name: torch.randint(rows, (ranks * BATCH, BAG), generator=generator) for name, rows in ROWS.items()}
    return ids, (ids["user"] % 2).double().mean(1)


def step_on_own_batch(model: Model, optimizer: ShardedOptimizer, step: int, comm: Comm) -> float:
    """One step of the sharded model, on this rank's batch; the loss over the batches of all ranks."""
    ids, wanted = batch_of(step, comm.world_size)
    mine = slice(comm.rank * BATCH, (comm.rank + 1) * BATCH)
    loss = F.mse_loss(model({name: given[mine] for name, given in ids.items()}), wanted[mine], reduction="sum")
    loss = loss / len(wanted)
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.score.named_parameters():  # gradients of sharded tables are summed already
        if parameter.grad is not None:
            comm.all_reduce(parameter.grad, label=name).wait()
    optimizer.step()
    total = loss.detach()
    comm.all_reduce(total, label="loss").wait()
    return float(total)


def step_on_all(model: Model, optimizer: ShardedOptimizer, step: int, comm: Comm) -> float:
    """One step of the whole model, on the batches of all ranks."""
    ids, wanted = batch_of(step, comm.world_size)
    loss = F.mse_loss(model(ids), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def main(steps: int) -> float:
    """On one rank: train the sharded and the whole model; return the largest difference between losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = shardwise.default_comm()
    console = Console(quiet=comm.rank != 0, highlight=False, soft_wrap=True)
    whole = Model().double()
    sharded = copy.deepcopy(whole)
    shard_module(sharded, by_hand(comm.world_size))
    optimizer, whole_optimizer = optimizer_of(sharded), optimizer_of(whole)
    differences = []
    with Progress(console=console) as progress:
        for step in progress.track(range(steps), description="training"):
            if step == steps // 2:
                sharded, optimizer = moved(sharded, optimizer, planned(comm.world_size, whole, console))
            ours = step_on_own_batch(sharded, optimizer, step, comm)
            dense = step_on_all(whole, whole_optimizer, step, comm)
            differences.append(abs(ours - dense))
            console.print(f"step {step:>2}  sharded {ours:.9f}  whole {dense:.9f}")
    console.print(f"largest difference of the losses: {max(differences):.1e}")
    return max(differences)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start, where torchrun does not (default 4)")
    parser.add_argument("--steps", type=int, default=12, help="steps of training, at least 2 (default 12)")
    asked = parser.parse_args()
    sys.exit(max(shardwise.launch(main, asked.ranks, asked.steps, timeout=300)) > TOLERANCE)
