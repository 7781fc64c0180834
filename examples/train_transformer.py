"""Train a small language model on a dp x tp mesh, beside the same model whole on every rank, and compare the losses.

    python examples/train_transformer.py
    torchrun --nproc-per-node 4 examples/train_transformer.py
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

from shardwise import Mesh, ShardedTensor, default_comm, launch
from shardwise.nn import ModelPlan, describe_plan, shard_module

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, LAYERS, STEPS = 96, 32, 4, 16, 8, 2, 12
TOLERANCE = 1e-5
PLAN = {
    "tokens.weight": "S(0)",
    "blocks.*.query.weight": "S(0)",
    "blocks.*.key.weight": "S(0)",
    "blocks.*.value.weight": "S(0)",
    "blocks.*.out.weight": "S(1)",
    "blocks.*.up.*": "S(0)",
    "blocks.*.down.weight": "S(1)",
    "head.weight": "S(0)",
}


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        query, key, value = (
            layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Plain torch code: nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences that count upwards from random starts, and what follows each token."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        ids = (start + torch.arange(LENGTH + 1)) % VOCABULARY
        yield ids[:, :-1], ids[:, 1:]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, targets: Tensor) -> float:
    """One step of training; the same code for the sharded and the whole model."""
    loss = model(ids, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float((loss.full() if isinstance(loss, ShardedTensor) else loss).detach())


def main() -> float:
    """On one rank: train both models; return the largest difference between their losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = default_comm()
    tp = 2 if comm.world_size % 2 == 0 else 1
    plan = ModelPlan(Mesh.of(dp=comm.world_size // tp, tp=tp), PLAN, axis="tp", input_plan="dp: S(0)")
    whole = Model().double()
    sharded = copy.deepcopy(whole)
    console = Console(quiet=comm.rank != 0)
    console.print(str(describe_plan(plan, sharded)), highlight=False, soft_wrap=True)
    shard_module(sharded, plan)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (sharded, whole)]
    mine = plan.mesh.coordinates(comm.rank)["dp"]
    differences = []
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=STEPS)
        for number, (ids, targets) in enumerate(batches()):
            part = [batch.chunk(plan.mesh.axis_size("dp"))[mine] for batch in (ids, targets)]
            ours = step(sharded, optimizers[0], part[0], part[1])
            dense = step(whole, optimizers[1], ids, targets)
            differences.append(abs(ours - dense))
            progress.console.print(f"step {number:>2}  sharded {ours:.6f}  whole {dense:.6f}", highlight=False)
            progress.advance(task)
    console.print(f"largest difference of the losses: {max(differences):.1e}", highlight=False)
    return max(differences)


if __name__ == "__main__":
    sys.exit(max(launch(main, 4, timeout=120)) > TOLERANCE)
