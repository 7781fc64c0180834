"""Fully sharded data parallelism: every parameter, gradient and optimizer state is cut, and so is the batch.

python examples/gallery/fully_sharded.py
"""

import copy

import torch
from torch import nn

import shardwise
from shardwise import Mesh, ModelPlan, ShardedTensor, run_local, shard_module

RANKS, WIDTH, LAYERS = 4, 32, 3

# "**" is every parameter; weights are gathered when a layer needs them and freed after it.
PLAN = ModelPlan(Mesh.of(fsdp=RANKS), {"**": "fsdp: S(0)"}, input_plan="fsdp: S(0)", reshard_after_forward=["**"])


def make_model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()


def train(model: nn.Module, batch: torch.Tensor, steps: int = 5) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    dense, whole_batch = make_model(), torch.randn(16, WIDTH, dtype=torch.float64)
    count = sum(p.numel() for p in dense.parameters())
    expected = train(copy.deepcopy(dense), whole_batch)

    def body(comm: shardwise.Comm) -> tuple[list[float], int]:
        model = copy.deepcopy(dense)
        shard_module(model, PLAN)
        own = whole_batch.chunk(RANKS)[comm.rank]  # every rank passes its own rows, as a data loader gives them
        losses = train(model, own)
        held = [p for p in model.parameters() if isinstance(p, ShardedTensor)]
        return losses, sum(part.numel() for p in held for part in p.local_tensors())

    results = run_local(body, RANKS)
    for rank, (_, held) in enumerate(results):
        print(f"rank {rank} has {held} of {count} parameters")
    for step, (ours, one) in enumerate(zip(results[0][0], expected, strict=True), 1):
        print(f"step {step}  sharded {ours:.9f}  whole {one:.9f}")
    print("equal:", all(abs(a - b) < 1e-9 for a, b in zip(results[0][0], expected, strict=True)))


if __name__ == "__main__":
    main()
