"""Does a training step move no more bytes than code written by hand? All bytes of all ranks, forward and backward.

By hand means: tensor-parallel blocks as in Megatron (one sum for each half of a block and each way), gradients of
replicated parameters summed once, fully sharded parameters gathered once and their gradients scattered once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Comm, Mesh, MeshSpec, Partial, Placement, Replicate, Shard, ShardedTensor, explain, run_local
from shardwise import shard as lay_out
from shardwise._cache import clear_on_change

WIDTH, HEAD, BATCH, VOCABULARY = 16, 4, 4, 64
COLUMN_PARALLEL, ROW_PARALLEL = ("query", "key", "value", "up", "gate", "embed", "head"), ("out", "down")


class NormByHand(nn.Module):
    """As models of transformers write it: the input is squared, and scaled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer norm": nn.LayerNorm,
    "rms norm": nn.RMSNorm,
    "by hand": NormByHand,
}


class Block(nn.Module):
    """Attention and a gated perceptron with residuals: one after the other, or side by side."""

    def __init__(self, norm: str, kv: int = WIDTH, parallel: bool = False) -> None:
        super().__init__()
        self.parallel, self.grouped = parallel, kv != WIDTH
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, kv, kv, WIDTH))
        self.up, self.gate = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.before = NORMS[norm](WIDTH)
        self.between = self.before if parallel else NORMS[norm](WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        made = F.scaled_dot_product_attention(query, key, value, enable_gqa=self.grouped)
        return self.out(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a module's

    def raise_and_lower(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]  # a module's

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        if self.parallel:
            return x + self.attend(normed) + self.raise_and_lower(normed)
        x = x + self.attend(normed)
        return x + self.raise_and_lower(self.between(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.block, self.norm = Block("by hand"), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(ids))))  # type: ignore[no-any-return]  # a module's


def place(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Cut as Megatron does along tp and by rows along fs; whole along dp."""
    for name, layer in model.named_modules():
        kind = name.rpartition(".")[2]
        own: Placement = Shard(0) if kind in COLUMN_PARALLEL else Shard(1) if kind in ROW_PARALLEL else Replicate()
        along: dict[str, Placement] = {"tp": own, "fs": Shard(0), "dp": Replicate()}
        for key, parameter in list(layer.named_parameters(recurse=False)):
            spec = MeshSpec(mesh, [along[axis] for axis in mesh.axes], _inner_first(mesh))
            setattr(layer, key, nn.Parameter(lay_out(parameter.detach(), spec, None)))
    return model


def _inner_first(mesh: Mesh) -> list[str]:
    """What is gathered splits last, so that a rank gathers what is next to its own rows."""
    return sorted(mesh.axes, key=lambda axis: axis != "tp")


def lose(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y * y).mean() if x.is_floating_point() else F.cross_entropy(y.flatten(0, 1), (x + 1).flatten() % VOCABULARY)


def train(comm: Comm, model: nn.Module, mesh: Mesh, x: Tensor) -> list[int]:
    """The bytes of two steps, the second by what was remembered of the first; gradients are those of the dense one."""
    dense, held = copy.deepcopy(model), place(copy.deepcopy(model), mesh)
    lose(dense, x).backward()  # type: ignore[no-untyped-call]  # untyped in torch
    rows = MeshSpec(mesh, [Replicate() if axis == "tp" else Shard(0) for axis in mesh.axes])
    moved = []
    for _ in range(2):
        held.zero_grad()
        with explain() as log:
            lose(held, lay_out(x, rows, None)).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        moved.append(log.moved_bytes)
    for own, other in zip(held.parameters(), dense.parameters(), strict=True):
        found: Any = own.grad
        assert_close(found.full(), other.grad, rtol=1e-4, atol=1e-5)
    return moved


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The bytes of what tp cuts, and of all others."""
    cut = sum(p.numel() for n, p in model.named_parameters() if n.split(".")[-2] in COLUMN_PARALLEL + ROW_PARALLEL)
    return 4 * cut, 4 * sum(p.numel() for p in model.parameters()) - 4 * cut


def by_hand(model: nn.Module, mesh: Mesh, batch_bytes: int, sums: int) -> int:
    """Sums of the batch along tp; gradients along dp summed, or parameters along fs gathered and gradients scattered:
    either takes twice their size."""
    sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
    others = math.prod(n for axis, n in sizes.items() if axis != "tp")
    cut, whole = count_parameters(model)
    return 2 * sums * batch_bytes * (sizes.get("tp", 1) - 1) + 2 * (cut + whole * sizes.get("tp", 1)) * (others - 1)


MESHES = [
    Mesh.of(tp=2),
    Mesh.of(dp=2, tp=2),
    Mesh.of(tp=2, dp=2),
    Mesh.of(fs=2, tp=2),
    Mesh.of(tp=2, fs=2),
    Mesh.of(fs=4),
]


@pytest.mark.parametrize("tokens", [2, 32], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_block(norm: str, mesh: Mesh, tokens: int) -> None:
    check_bytes(Block(norm), mesh, tokens, sums=4)


@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_fewer_keys_than_queries(mesh: Mesh) -> None:
    check_bytes(Block("by hand", kv=WIDTH // 2), mesh, 32, sums=4)


@pytest.mark.parametrize("mesh", MESHES[:3], ids=str)
def test_halves_side_by_side_are_summed_together(mesh: Mesh) -> None:
    check_bytes(Block("layer norm", parallel=True), mesh, 32, sums=2)


def check_bytes(model: nn.Module, mesh: Mesh, tokens: int, sums: int) -> None:
    x = torch.randn(BATCH, tokens, WIDTH, generator=torch.Generator().manual_seed(3))
    clear_on_change()
    first, second = run_local(train, mesh.size, model, mesh, x, timeout=60.0)[0]
    assert first == second <= by_hand(model, mesh, x.numel() * 4, sums)


@pytest.mark.parametrize("tokens", [2, 32], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_language_model(mesh: Mesh, tokens: int) -> None:
    """Along tp the lookup is one more sum, and the gradient of the last layer another. The loss sums three numbers for
    each token, and two in all."""
    model = LanguageModel()
    ids = torch.randint(0, VOCABULARY, (BATCH, tokens), generator=torch.Generator().manual_seed(3))
    clear_on_change()
    first, second = run_local(train, mesh.size, model, mesh, ids, timeout=60.0)[0]
    loss = 2 * 3 * ids.numel() * 4 * mesh.size + 2 * 2 * 8 * mesh.size
    assert first == second <= by_hand(model, mesh, ids.numel() * WIDTH * 4, sums=6) + loss


# Single layers: what is moved until a function that is not linear has its input


def moved_bytes(weight: Sequence[Placement], x: Sequence[Placement], mesh: Mesh, rows: int) -> tuple[int, Any]:
    def body(comm: Comm) -> tuple[int, Any]:
        inputs = lay_out(torch.ones(rows, 16), MeshSpec(mesh, x), None)
        layer = lay_out(torch.ones(32, 16), MeshSpec(mesh, weight), None)
        with explain() as log:
            found: ShardedTensor = torch.relu(F.linear(inputs, layer))  # type: ignore[assignment]  # of ShardedTensors
        assert found.full().eq(16).all()
        return log.moved_bytes, found.placements

    clear_on_change()
    return run_local(body, mesh.size, timeout=60.0)[0]


ROW_BYTES = 16 * 4


@pytest.mark.parametrize("rows", [2, 512])
def test_a_row_parallel_layer_sums_its_result_whatever_its_input(rows: int) -> None:
    mesh = Mesh.of(tp=2)
    for x in (Shard(1), Replicate()):
        assert moved_bytes([Shard(1)], [x], mesh, rows) == (2 * rows * 32 * 4, (Replicate(),))


@pytest.mark.parametrize("rows", [2, 512])
def test_a_column_parallel_layer_sums_a_pending_input(rows: int) -> None:
    """Also where its weight is smaller than the input: the pending result would have to be summed as well."""
    mesh = Mesh.of(tp=2)
    assert moved_bytes([Shard(0)], [Replicate()], mesh, rows) == (0, (Shard(1),))
    assert moved_bytes([Shard(0)], [Partial("sum")], mesh, rows) == (2 * rows * ROW_BYTES, (Shard(1),))


@pytest.mark.parametrize("axes", [("fs", "tp"), ("tp", "fs")], ids=" ".join)
def test_the_order_of_axes_does_not_count(axes: tuple[str, str]) -> None:
    """The weight is gathered along fs only, the input is summed along tp only."""
    mesh = Mesh.of(**dict.fromkeys(axes, 2))
    weight: dict[str, Placement] = {"fs": Shard(1), "tp": Shard(0)}
    x: dict[str, Placement] = {"fs": Shard(0), "tp": Partial("sum")}
    for rows in (8, 512):
        layer, batch = 32 * ROW_BYTES, rows * ROW_BYTES
        moved, placements = moved_bytes([weight[a] for a in axes], [x[a] for a in axes], mesh, rows)
        assert moved <= layer + 2 * batch
        assert dict(zip(axes, placements, strict=True))["tp"] == Shard(1)


@pytest.mark.parametrize("rows", [4, 512])
def test_a_split_batch_stays_split(rows: int) -> None:
    """Whichever is smaller is gathered; a weight that is cut along the dim summed over leaves no sum pending."""
    moved, placements = moved_bytes([Shard(1)], [Shard(0)], Mesh.of(fs=4), rows)
    assert placements == (Shard(0),)
    assert moved <= 3 * 32 * ROW_BYTES


@pytest.mark.parametrize("widen", [Tensor.float, lambda x: x.to(torch.float32), lambda x: x.to(dtype=torch.float32)])
def test_a_pending_sum_is_made_before_it_becomes_wider(widen: Callable[[Tensor], Tensor]) -> None:
    """A norm converts what it reads to 32 bits, and what adds the stream later does not sum again."""

    def body(comm: Comm) -> int:
        mesh = Mesh.of(tp=2)
        x = lay_out(torch.ones(8, 16, dtype=torch.bfloat16), MeshSpec(mesh, (Shard(1),)), None)
        layer = lay_out(torch.ones(32, 16, dtype=torch.bfloat16), MeshSpec(mesh, (Shard(1),)), None)
        with explain() as log:
            stream = F.linear(x, layer)
            wide = widen(stream)
            found = (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).bfloat16() + torch.relu(stream)
        assert found.full().eq(17).all()
        return log.moved_bytes

    clear_on_change()
    assert run_local(body, 2, timeout=60.0)[0] == 2 * 8 * 32 * 2  # one sum of 16 bits, and no other
