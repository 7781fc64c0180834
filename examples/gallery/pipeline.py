"""A pipeline of two stages, each divided over two ranks: a schedule of torch runs it, and losses are those of one rank.

python examples/gallery/pipeline.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import shardwise
from shardwise import Mesh, ModelPlan, shard_module
from shardwise.nn import Pipeline

STEPS, MICRO = 3, 2
LAYERS = {"layers.*.0.weight": "tp: S(0)", "layers.*.2.weight": "tp: S(1)"}
PLAN = ModelPlan(Mesh.of(pp=2, tp=2), LAYERS, input_plan="replicated", stages="balanced")


class Model(nn.Module):
    """It knows nothing of ranks and stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def prepare() -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    text = torch.randint(20, (4, 9))
    return Model(), text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train(comm: shardwise.Comm) -> list[float]:
    """The losses, on the ranks of the last stage."""
    model, ids, targets = prepare()
    shard_module(model, PLAN)
    pipeline = Pipeline(model, ids[: len(ids) // MICRO])
    schedule = Schedule1F1B(pipeline.stage, n_microbatches=MICRO, loss_fn=pipeline.loss(loss_of))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), list[Tensor]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        if pipeline.stage.is_first:
            schedule.step(ids)
        else:
            schedule.step(target=targets, losses=losses)  # the losses of this step's micro-batches
        optimizer.step()
    return torch.stack(losses).tolist() if losses else []


def train_alone() -> list[float]:
    model, ids, targets = prepare()
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(ids), targets).backward()
        found += [loss_of(model(i), t).item() for i, t in zip(ids.chunk(MICRO), targets.chunk(MICRO), strict=True)]
        optimizer.step()
    return found


if __name__ == "__main__":
    expected, found = train_alone()[-MICRO:], shardwise.launch(train, 4)[-1]
    print("losses of the last step:", *(f"{loss:.4f}" for loss in found))
    print("equal:", torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-5))
