"""A small language model in plain torch code, and how its parameters lie on a mesh of data and tensor parallel axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Mesh, MeshSpec, Placement, Replicate, Shard, ShardedTensor, shard
from tests.device import DEVICE

ROWS, COLUMNS = Shard(0), Shard(1)
# What the axis "tp" does to a parameter, by the last parts of its name; all others are replicated.
ON_TP = {
    "query.weight": ROWS,
    "key.weight": ROWS,
    "value.weight": ROWS,
    "up.weight": ROWS,
    "up.bias": ROWS,
    "out.weight": COLUMNS,
    "down.weight": COLUMNS,
    "head.weight": ROWS,
}


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batches."""

    vocabulary: int = 22
    width: int = 16
    heads: int = 4
    length: int = 6
    batch: int = 4
    layers: int = 2


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and with a residual."""

    def __init__(self, sizes: Sizes, rms: bool) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.between = (nn.RMSNorm(width) if rms else nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        query, key, value = (self._split(project(normed)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a norm, and a head that may share the embedding's weight."""

    def __init__(self, sizes: Sizes, *, tied: bool, rms: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Parameter(torch.randn(sizes.length, sizes.width) * 0.1)
        self.blocks = nn.ModuleList(Block(sizes, rms) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width) if rms else nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_model(sizes: Sizes, dtype: torch.dtype, *, tied: bool, rms: bool) -> Transformer:
    """The same model on every rank."""
    torch.manual_seed(5)
    return Transformer(sizes, tied=tied, rms=rms).to(dtype)


def batches(sizes: Sizes, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and the ids that follow them, the same on every rank: two batches, in turn."""
    generator = torch.Generator(DEVICE).manual_seed(11)
    texts = [torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=generator) for _ in range(2)]
    for step in range(steps):
        ids = texts[step % 2]
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def shard_parameters(model: nn.Module, mesh: Mesh, embedding: Placement) -> None:
    """Put every parameter on the mesh, in place; a parameter with two names stays one."""
    made: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                on_tp = embedding if module_name == "tokens" else _on_tp(f"{module_name}.{name}")
                laid = shard(parameter.detach(), MeshSpec(mesh, [Replicate(), on_tp]), None)
                made[id(parameter)] = nn.Parameter(laid)
            setattr(module, name, made[id(parameter)])


def _on_tp(name: str) -> Placement:
    return next((placement for ending, placement in ON_TP.items() if name.endswith(ending)), Replicate())


def train(
    model: nn.Module,
    sizes: Sizes,
    steps: int,
    place: Callable[[Tensor], Tensor] = lambda batch: batch,
    foreach: bool | None = None,
) -> list[float]:
    """The losses of some steps of AdamW with clipped gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=foreach)
    losses = []
    for ids, targets in batches(sizes, steps):
        loss = model(place(ids), place(targets))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        losses.append(float((loss.full() if isinstance(loss, ShardedTensor) else loss).detach()))
    return losses
