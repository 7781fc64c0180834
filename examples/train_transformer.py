"""Train a small language model on a dp x tp mesh, save it, load it fully sharded, and go on: beside the model whole.

    python examples/train_transformer.py
    torchrun --nproc-per-node 4 examples/train_transformer.py

The model is plain torch code. A plan of a few patterns shards it; another plan, on another mesh, takes the checkpoint
of the first one, optimizer included. The losses are those of the same model whole on every rank.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from shardwise import Comm, Mesh, ShardedTensor, default_comm, launch, load, save
from shardwise.nn import ModelPlan, ShardedOptimizer, describe_plan, shard_module

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, LAYERS = 64, 32, 4, 8, 8, 2
TOLERANCE = 1e-9


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and with a residual."""

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


def tensor_parallel(ranks: int, tp: int) -> ModelPlan:
    """Heads, perceptrons and the vocabulary are cut over `tp` ranks, the batch over the others."""
    if tp < 1 or ranks % tp:
        sys.exit(f"{ranks} ranks do not fill a mesh with tp={tp}; pick a --tp dividing {ranks}, or start other ranks")
    patterns = {
        "tokens.weight": "S(0)",
        "blocks.*.query.weight": "S(0)",
        "blocks.*.key.weight": "S(0)",
        "blocks.*.value.weight": "S(0)",
        "blocks.*.out.weight": "S(1)",
        "blocks.*.up.*": "S(0)",
        "blocks.*.down.weight": "S(1)",
        "head.weight": "S(0)",
    }
    return ModelPlan(Mesh.of(dp=ranks // tp, tp=tp), patterns, axis="tp", input_plan="dp: S(0)")


def fully_sharded(ranks: int) -> ModelPlan:
    """Every parameter and the batch are cut along dim 0 over all ranks, attention between heads."""
    if HEADS % ranks:
        sys.exit(f"{ranks} ranks cut the {HEADS} heads of attention apart; start ranks whose number divides {HEADS}")
    return ModelPlan(Mesh.of(dp=ranks), {"**": "S(0)"}, input_plan="dp: S(0)")


class Training:
    """A model, sharded as a plan says (or whole on every rank without one), and its optimizer."""

    def __init__(self, model: Model, plan: ModelPlan | None) -> None:
        self.model, self.plan = model, plan
        if plan is not None:
            shard_module(model, plan)
        self.optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-2)

    def step(self, number: int) -> float:
        """One step of training; the same code for a sharded and for a whole model."""
        loss = self.model(*map(self.mine, batch_of(number)))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float((loss.full() if isinstance(loss, ShardedTensor) else loss).detach())

    def mine(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch, as the plan's `input_plan` says."""
        if self.plan is None:
            return batch
        place = self.plan.mesh.coordinates(default_comm().rank)["dp"]
        return batch.tensor_split(self.plan.mesh.axis_size("dp"))[place]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model, "optimizer": self.optimizer}

    def load(self, folder: str) -> None:
        """Take everything from a checkpoint of any layout and number of ranks."""
        load(self.state(), folder)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards from random starts, and what follows each token."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


@contextmanager
def folder_of_all(comm: Comm) -> Iterator[str]:
    """A temporary folder that the first rank makes and removes, and all know. A real run names one on a shared disk."""
    with tempfile.TemporaryDirectory() as mine:
        yield f"{comm.all_gather_bytes(mine.encode(), label='folder')[0].decode()}/checkpoint"
        comm.barrier(label="folder")


def main(steps: int, tp: int) -> float:
    """On one rank: train both models; return the largest difference between their losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = default_comm()
    console = Console(quiet=comm.rank != 0, highlight=False, soft_wrap=True)
    plan, later_plan = tensor_parallel(comm.world_size, tp), fully_sharded(comm.world_size)
    whole = Training(Model().double(), None)
    sharded = Training(copy.deepcopy(whole.model), plan)
    console.print(str(describe_plan(plan, whole.model)))
    differences = []
    with Progress(console=console) as progress:
        for step in progress.track(range(steps), description="training"):
            if step == steps // 2:
                with folder_of_all(comm) as folder:
                    save(sharded.state(), folder)
                    sharded = Training(Model().double(), later_plan)
                    sharded.load(folder)
                console.print(f"saved, and loaded with every parameter cut over {comm.world_size} ranks")
            ours, dense = sharded.step(step), whole.step(step)
            differences.append(abs(ours - dense))
            console.print(f"step {step:>2}  sharded {ours:.9f}  whole {dense:.9f}")
    console.print(f"largest difference of the losses: {max(differences):.1e}")
    return max(differences)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start, where torchrun does not (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="steps of training, at least 2 (default 10)")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer (default 2)")
    asked = parser.parse_args()
    sys.exit(max(launch(main, asked.ranks, asked.steps, asked.tp, timeout=300)) > TOLERANCE)
