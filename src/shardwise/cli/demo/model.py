"""The model of the demo: a small transformer in plain torch, its batches, and a plan for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.geometry import Mesh
from shardwise.nn import ModelPlan

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, LAYERS = 64, 64, 4, 8, 8, 2


PATTERNS = {
    "tokens.weight": "S(0)",
    "blocks.*.qkv.weight": "S(0) groups(q,k,v)",
    "blocks.*.out.weight": "S(1)",
    "blocks.*.up.weight": "S(0)",
    "blocks.*.down.weight": "S(1)",
    "head.weight": "S(0)",
}


def plan_for(mesh: Mesh) -> ModelPlan:
    """Heads, perceptrons and the vocabulary are cut along `tp`; the batch along `dp`, where the mesh has it."""
    return ModelPlan(
        mesh,
        PATTERNS,
        axis="tp",
        lengths={"q": WIDTH, "k": WIDTH, "v": WIDTH},
        input_plan="dp: S(0)" if "dp" in mesh.axes else "replicated",
    )


class DemoBlock(nn.Module):
    """Attention and a perceptron, each behind a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.between(x))))
        return x


class Transformer(nn.Module):
    """Predicts the next token and returns the loss; nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(DemoBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards from random starts, and what follows each token."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    ids = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]
