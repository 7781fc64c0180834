"""The part of the demo that computes: what each of the 4 ranks does, and what it tells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.comm import launch
from shardwise.geometry import Mesh, MeshSpec, Replicate, Shard, parse_layout
from shardwise.ops import explain
from shardwise.tensor import ShardedTensor, shard

STEPS = 8
FEATURES, HIDDEN, BATCH = 16, 64, 32
LEARNING_RATE = 0.5


@dataclass(frozen=True)
class JobReport:
    """What one rank saw: whether the moved values are exact, both losses of each step, the largest difference."""

    exact: bool
    losses: list[float]
    dense_losses: list[float]
    difference: float
    operations: str


def run_job(before: str, after: str) -> JobReport:
    """Start 4 ranks, have each do the job, and return what rank 0 saw."""
    reports = launch(_on_rank, 4, before, after, timeout=120)
    report: JobReport = reports[0]
    return report


def _on_rank(before: str, after: str) -> JobReport:
    torch.set_num_threads(1)
    exact = _move(before, after)
    losses, dense_losses, difference, operations = _train()
    return JobReport(exact, losses, dense_losses, difference, operations)


def _move(before: str, after: str) -> bool:
    """Move a tensor between two layouts and compare every element."""
    source = parse_layout(before).layout
    target = parse_layout(after, like=parse_layout(before)).layout
    values = torch.arange(float(source.numel)).reshape(source.shape)
    moved = shard(values, source).redistribute(target)
    return bool(torch.equal(moved.full(), values))


def _train() -> tuple[list[float], list[float], float, str]:
    """Train a two-layer network sharded over a 2 x 2 mesh, and the same network whole, side by side."""
    torch.manual_seed(0)
    first, second = torch.randn(FEATURES, HIDDEN) / 4, torch.randn(HIDDEN, FEATURES) / 8
    inputs = torch.randn(BATCH, FEATURES)
    wanted = torch.tanh(inputs)
    mesh = Mesh.of(dp=2, tp=2)
    weights = [
        nn.Parameter(shard(first, MeshSpec(mesh, (Replicate(), Shard(1))), src_rank=None)),
        nn.Parameter(shard(second, MeshSpec(mesh, (Replicate(), Shard(0))), src_rank=None)),
    ]
    rows = MeshSpec(mesh, (Shard(0), Replicate()))
    batch, targets = shard(inputs, rows, src_rank=None), shard(wanted, rows, src_rank=None)
    with explain() as log:
        _step(weights, batch, targets, update=False)
    losses = [_step(weights, batch, targets) for _ in range(STEPS)]
    dense = [nn.Parameter(first.clone()), nn.Parameter(second.clone())]
    dense_losses = [_step(dense, inputs, wanted) for _ in range(STEPS)]
    apart = [float((_whole(a.detach()) - b.detach()).abs().max()) for a, b in zip(weights, dense, strict=True)]
    return losses, dense_losses, max(apart), str(log)


def _step(weights: list[nn.Parameter], inputs: Tensor, wanted: Tensor, update: bool = True) -> float:
    """One step of gradient descent; the same code for whole and for sharded tensors."""
    outputs = torch.relu(inputs @ weights[0]) @ weights[1]
    loss = nn.functional.mse_loss(outputs, wanted)
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    with torch.no_grad():
        for weight in weights:
            if update:
                assert weight.grad is not None
                weight.sub_(weight.grad * LEARNING_RATE)
            weight.grad = None
    return float(_whole(loss.detach()))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full() if isinstance(tensor, ShardedTensor) else tensor
