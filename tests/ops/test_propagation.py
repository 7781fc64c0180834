"""Does a tensor-parallel model communicate as code by hand does: one sum for each half of a block and each way?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Comm, Mesh, MeshSpec, Partial, Placement, Replicate, Shard, ShardedTensor, explain, shard
from shardwise.comm import run_local
from shardwise.ops.explain import Log
from shardwise.ops.propagation import change_cost

RANKS, WIDTH, TOKENS, HEAD = 2, 8, 6, 2
ROWS, COLUMNS = ("query", "key", "value", "up"), ("out", "down")


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        raised: Tensor = self.down(F.relu(self.up(self.between(x))))
        return x + raised


def _on_mesh(model: nn.Module, mesh: Mesh) -> nn.Module:
    for name, layer in model.named_modules():
        kind = name.rpartition(".")[2]
        cut: Placement = Shard(0) if kind in ROWS else Shard(1) if kind in COLUMNS else Replicate()
        for key, parameter in list(layer.named_parameters(recurse=False)):
            setattr(layer, key, nn.Parameter(shard(parameter.detach(), MeshSpec(mesh, [cut]), None)))
    return model


def _moves(log: Log) -> list[tuple[tuple[str, ...], tuple[str, ...], int]]:
    return [(e.inputs, e.outputs, e.moved_bytes) for e in log.entries if e.moved_bytes]


def _moved_placements(log: Log) -> list[str]:
    """The moves without the names of axes: layouts that differ only in names are known as one."""
    return [f"{given[0].split(': ')[1]} -> {then[0].split(': ')[1]}: {n}" for given, then, n in _moves(log)]


def _placements(tensor: ShardedTensor) -> tuple[Placement, ...]:
    spec = tensor.sharding.spec
    assert isinstance(spec, MeshSpec)
    return spec.placements


def _steps(comm: Comm) -> list[list[tuple[tuple[str, ...], tuple[str, ...], int]]]:
    """The moves of a first and of a second step: what is remembered of the first changes nothing."""
    torch.manual_seed(3)
    mesh = Mesh.of(tp=RANKS)
    model = _on_mesh(Block(), mesh)
    x = shard(torch.randn(2, TOKENS, WIDTH), MeshSpec(mesh, [Replicate()]), None)
    found = []
    for _ in range(2):
        with explain() as log:
            y = model(x)
            (y * y).sum().backward()
        found.append(_moves(log))
    return found


def test_a_block_makes_two_sums_forward_and_two_backward() -> None:
    one_sum = (("tp=2: P(sum)",), ("tp=2: R",), 2 * (2 * TOKENS * WIDTH * 4))
    for by_rank in run_local(_steps, RANKS):
        assert by_rank == [[one_sum] * 4] * 2


def _moved(comm: Comm, compute: Callable[[ShardedTensor, ShardedTensor], Tensor]) -> tuple[list[str], list[str]]:
    mesh = Mesh.of(tp=RANKS)
    pending = shard(torch.ones(4, 6), MeshSpec(mesh, [Partial("sum")]), None)
    rows = shard(torch.ones(4, 6), MeshSpec(mesh, [Shard(0)]), None)
    with explain() as log:
        compute(pending, rows)
    moves = _moves(log)
    return [src[0] for src, _, _ in moves], [dst[0] for _, dst, _ in moves]


@pytest.mark.parametrize(
    ("compute", "towards"),
    [
        (lambda pending, rows: pending * pending, ["tp=2: R"]),
        (lambda pending, rows: torch.stack([pending.exp(), pending.exp()]), ["tp=2: R"]),
        (lambda pending, rows: pending + rows, ["tp=2: S(0)"]),
        (lambda pending, rows: pending.sum(), []),
        (lambda pending, rows: pending + pending, []),
    ],
    ids=["with itself", "twice", "beside shards", "summed", "added"],
)
def test_where_a_pending_sum_goes(
    compute: Callable[[ShardedTensor, ShardedTensor], Tensor], towards: list[str]
) -> None:
    for sources, targets in run_local(_moved, RANKS, compute):
        assert sources == ["tp=2: P(sum)"] * len(towards)
        assert targets == towards


def test_a_pending_sum_costs_the_same_wherever_it_goes() -> None:
    everywhere, scattered = (change_cost(Partial("sum"), to, 1000, 4) for to in (Replicate(), Shard(0)))
    assert everywhere == pytest.approx(scattered, abs=1)
    assert everywhere < scattered


def test_a_weight_is_weighed_against_the_rows_of_one_data_parallel_group() -> None:
    """Of 12 rows in all, 6 are in each group: to sum them moves less than to gather 16 rows of the weight."""

    def body(comm: Comm) -> list[tuple[tuple[str, ...], tuple[str, ...], int]]:
        mesh = Mesh.of(dp=2, tp=2)
        x = shard(torch.ones(12, 8), MeshSpec(mesh, [Shard(0), Partial("sum")]), None)
        weight = shard(torch.ones(16, 8), MeshSpec(mesh, [Replicate(), Shard(0)]), None)
        with explain() as log:
            F.linear(x, weight)
        return _moves(log)

    for moves in run_local(body, 4):
        assert [(given, then) for given, then, _ in moves] == [(("dp=2,tp=2: S(0), P(sum)",), ("dp=2,tp=2: S(0), R",))]


@pytest.mark.parametrize(
    ("tokens", "moved"),
    [
        (64, [f"S(0) -> R: {2 * 4 * 4 * 4}"]),
        (2, [f"S(0) -> R: {2 * 8}", f"P(sum) -> S(0): {2 * 4 * 4}"]),
    ],
    ids=("many tokens", "few tokens"),
)
def test_a_table_is_gathered_where_its_rows_for_all_tokens_are_larger(tokens: int, moved: list[str]) -> None:
    """The batch stays sharded: of few tokens the numbers are gathered, and each rank gets the rows of its own."""

    def body(comm: Comm) -> tuple[list[str], tuple[Placement, ...]]:
        mesh = Mesh.of(fsdp=2)
        table = shard(torch.ones(8, 4), MeshSpec(mesh, [Shard(0)]), None)
        ids = shard(torch.zeros(tokens, dtype=torch.long), MeshSpec(mesh, [Shard(0)]), None)
        with explain() as log:
            found: ShardedTensor = F.embedding(ids, table)  # type: ignore[assignment]  # of ShardedTensors
        assert found.full().eq(1).all()
        return _moved_placements(log), _placements(found)

    for moves, placements in run_local(body, 2):
        assert moves == moved
        assert placements == (Shard(0),)


def test_a_fully_sharded_weight_is_gathered_also_for_few_rows() -> None:
    """Rows could be split by columns for a pending sum at little cost, but then every rank has all rows to sum."""

    def body(comm: Comm) -> tuple[list[str], str]:
        mesh = Mesh.of(fsdp=2)
        x = shard(torch.ones(10, 16), MeshSpec(mesh, [Shard(0)]), None)
        weight = shard(torch.ones(8, 16), MeshSpec(mesh, [Shard(0)]), None)
        with explain() as log:
            y = F.linear(x, weight)
        return _moved_placements(log), str(_placements(y))  # type: ignore[arg-type]  # of ShardedTensors

    for moves, placements in run_local(body, 2):
        assert moves == [f"S(0) -> R: {16 * 4 * 8}"]
        assert "Partial" not in placements


@pytest.mark.parametrize(("rows", "wanted"), [(4, Shard(1)), (32, Shard(0)), (64, Shard(0))])
def test_a_fully_sharded_layer_gathers_the_smaller_of_batch_and_weight(rows: int, wanted: Placement) -> None:
    """And makes no pending sum of both cut along the dim that the product sums over, which few bytes would do."""

    def body(comm: Comm) -> tuple[Placement, ...]:
        spec = MeshSpec(Mesh.of(dp=4), [Shard(0)])
        x, weight = (shard(torch.ones(n, 16), spec, None) for n in (rows, 16))
        result: ShardedTensor = F.linear(x, weight)  # type: ignore[assignment]  # of ShardedTensors
        assert result.full().eq(16).all()
        return _placements(result)

    assert run_local(body, 4) == [(wanted,)] * 4


def test_an_axis_is_weighed_by_what_the_axes_before_it_do() -> None:
    """The weight is gathered along dp: along tp it is then large, and the few rows are summed instead."""

    def body(comm: Comm) -> list[str]:
        mesh = Mesh.of(dp=2, tp=2)
        x = shard(torch.ones(12, 8), MeshSpec(mesh, [Shard(0), Partial("sum")]), None)
        weight = shard(torch.ones(16, 8), MeshSpec(mesh, [Shard(0), Shard(0)]), None)
        with explain() as log:
            F.linear(x, weight)
        return sorted(f"{given[0]} -> {then[0]}" for given, then, _ in _moves(log))

    wanted = ["S(0), P(sum) -> dp=2,tp=2: S(0), R", "S(0), S(0) -> dp=2,tp=2: R, S(0)"]
    for moves in run_local(body, 4):
        assert moves == [f"dp=2,tp=2: {text}" for text in wanted]


@pytest.mark.parametrize(("rows", "heads", "wanted"), [(1, 4, Shard(1)), (2, 4, Shard(1)), (4, 4, Shard(0))])
def test_attention_of_few_rows_leaves_no_rank_idle(rows: int, heads: int, wanted: Placement) -> None:
    """The rows of a batch would be on as many ranks as there are rows."""

    def body(comm: Comm) -> tuple[Placement, ...]:
        mesh = Mesh.of(cp=4)
        q, k, v = (shard(torch.randn(rows, heads, 8, 2), MeshSpec(mesh, [Shard(2)]), None) for _ in range(3))
        return _placements(F.scaled_dot_product_attention(q, k, v))  # type: ignore[arg-type]  # of ShardedTensors

    assert run_local(body, 4) == [(wanted,)] * 4


def test_explain_names_the_axes_of_the_tensors_at_hand() -> None:
    """Plans are shared by equal layouts, which may be those of meshes with other names."""

    def body(comm: Comm) -> list[set[str]]:
        found = []
        for first, second in (("dp", "tp"), ("fs", "mp"), ("dp", "tp")):
            mesh = Mesh.of(**{first: 2, second: 2})
            x = shard(torch.ones(4, 8), MeshSpec(mesh, [Shard(0), Replicate()]), None).requires_grad_()
            weight = nn.Parameter(shard(torch.ones(8, 8), MeshSpec(mesh, [Shard(0), Shard(0)]), None))
            with explain() as log:
                F.relu(F.linear(F.linear(x, weight), weight.t().contiguous())).sum().backward()  # type: ignore[no-untyped-call]
                x.redistribute([Replicate(), Replicate()])
            found.append({text.split(":")[0] for e in log.entries for text in (*e.inputs, *e.outputs)})
        return found

    wanted = [{"dp=2,tp=2"}, {"fs=2,mp=2"}, {"dp=2,tp=2"}]
    assert run_local(body, 4) == [wanted] * 4
