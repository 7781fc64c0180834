"""Tensor parallelism by hand: columns, then rows, and one sum at the end, as Megatron cuts a perceptron.

python examples/gallery/tensor_parallel.py
"""

import copy

import torch
from torch import nn

import shardwise
from shardwise import Mesh, ModelPlan, explain, run_local, shard_module

RANKS, WIDTH, HIDDEN = 4, 16, 64

# The hidden units are cut over the ranks: rows of the first weight, columns of the second one.
PLAN = ModelPlan(
    Mesh.of(tp=RANKS),
    {"0.*": "tp: S(0)", "2.weight": "tp: S(1)", "2.bias": "tp: R"},
    input_plan="replicated",
    output_plan="plain",  # losses are written as for a plain model
)


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).double()
    batches = [torch.randn(8, WIDTH, dtype=torch.float64) for _ in range(5)]
    expected = train(copy.deepcopy(whole), batches)

    def body(comm: shardwise.Comm) -> tuple[list[float], str]:
        model = copy.deepcopy(whole)
        shard_module(model, PLAN)
        with torch.no_grad(), explain() as log:
            model(batches[0])
        return train(model, batches), str(log)

    losses, log = run_local(body, RANKS)[0]
    print(log)
    for step, (ours, dense) in enumerate(zip(losses, expected, strict=True), 1):
        print(f"step {step}  sharded {ours:.9f}  whole {dense:.9f}")
    print("equal:", all(abs(a - b) < 1e-9 for a, b in zip(losses, expected, strict=True)))


if __name__ == "__main__":
    main()
