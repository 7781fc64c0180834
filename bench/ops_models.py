"""A perceptron and a transformer block: plain, by hand with raw collectives, on ShardedTensors, and on DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import Mesh, MeshSpec, Replicate, Shard, shard

WIDTH, HEAD, TOKENS, BATCH = 64, 16, 16, 4
BY_ROWS = ("query", "key", "value", "up")
BY_COLUMNS = ("out", "down")


class Perceptron(nn.Module):
    """Two linear layers and what is between them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class BenchBlock(nn.Module):
    """Attention and a perceptron, each behind a norm and with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.perceptron = Perceptron(width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.between(x))


class _Copy(torch.autograd.Function):
    """The same tensor to all ranks; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Sum(torch.autograd.Function):
    """The sum of all ranks' tensors; each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class HandPerceptron(Perceptron):
    """A perceptron whose layers hold this rank's part."""

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(super().forward(_Copy.apply(x)))


class HandBlock(BenchBlock):
    """A block whose layers hold this rank's part."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.perceptron = HandPerceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        normed = _Copy.apply(self.before(x))
        query, key, value = (
            layer(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + _Sum.apply(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.perceptron(self.between(x))


def make_seeded(model: Callable[[], torch.nn.Module]) -> Any:
    """A model whose weights do not depend on the order in which its layers are made."""
    made = model()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in sorted(made.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def shard_by_hand(model: nn.Module) -> nn.Module:
    """Keep this rank's part of every layer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, layer in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in BY_ROWS or kind in BY_COLUMNS:
            assert isinstance(layer, nn.Linear)
            layer.weight = nn.Parameter(layer.weight.detach().chunk(world, int(kind in BY_COLUMNS))[rank].clone())
            if kind in BY_ROWS and layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias.detach().chunk(world)[rank].clone())
    return model


def make_sharded(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Make every parameter a ShardedTensor."""
    for name, layer in model.named_modules():
        kind = name.rpartition(".")[2]
        for key, parameter in list(layer.named_parameters(recurse=False)):
            cut = Shard(0) if kind in BY_ROWS else Shard(1) if kind in BY_COLUMNS else Replicate()
            setattr(layer, key, nn.Parameter(shard(parameter.detach(), MeshSpec(mesh, [cut]), None)))
    return model


def make_dtensors(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let torch make the layers parallel."""
    styles: dict[str, Any] = {}
    for name, _ in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in BY_ROWS or kind in BY_COLUMNS:
            styles[name] = ColwiseParallel() if kind in BY_ROWS else RowwiseParallel()
    return parallelize_module(model, mesh, styles)


def step(model: nn.Module, x: Tensor) -> Callable[[Any], Any]:
    """A forward and a backward pass; returns the loss."""

    def run(_: Any) -> Tensor:
        model.zero_grad()
        y = model(x)
        loss = (y * y).sum()
        loss.backward()
        return loss

    return run
