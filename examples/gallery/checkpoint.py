"""Train on 4 ranks, save, continue on 2 ranks in another parallelism: model, optimizer and all.

python examples/gallery/checkpoint.py
"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

import shardwise
from shardwise import Mesh, ModelPlan, run_local, shard_module

BEFORE = ModelPlan(Mesh.of(fsdp=4), {"**": "fsdp: S(0)"}, input_plan="replicated", output_plan="plain")
AFTER = ModelPlan(
    Mesh.of(tp=2),
    {"0.*": "tp: S(0)", "2.weight": "tp: S(1)", "2.bias": "tp: R"},
    input_plan="replicated",
    output_plan="plain",
)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def begin(comm: shardwise.Comm, path: Path, whole: nn.Module, batch: torch.Tensor) -> list[float]:
    model = copy.deepcopy(whole)
    shard_module(model, BEFORE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, batch, 3)
    shardwise.save({"model": model, "optimizer": optimizer}, path)
    return losses


def resume(comm: shardwise.Comm, path: Path, untrained: nn.Module, batch: torch.Tensor) -> list[float]:
    model = copy.deepcopy(untrained)
    shard_module(model, AFTER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardwise.load({"model": model, "optimizer": optimizer}, path)
    return train(model, optimizer, batch, 3)


def main() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
    batch = torch.randn(4, 8, dtype=torch.float64)
    dense = copy.deepcopy(whole)
    expected = train(dense, torch.optim.AdamW(dense.parameters(), lr=1e-2), batch, 6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        losses = run_local(begin, 4, path, whole, batch)[0] + run_local(resume, 2, path, whole, batch)[0]
    for step, (ours, one) in enumerate(zip(losses, expected, strict=True), 1):
        where = "4 ranks, fully sharded" if step <= 3 else "2 ranks, tensor parallel"
        print(f"step {step}  {where:24}  sharded {ours:.9f}  whole {one:.9f}")
    print("equal:", all(abs(a - b) < 1e-9 for a, b in zip(losses, expected, strict=True)))


if __name__ == "__main__":
    main()
