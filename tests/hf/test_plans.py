"""Plans made for models: what they leave of the model, how much they split, and heads that must not be cut."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise.hf
from shardwise.comm import Comm, run_local
from shardwise.geometry import Mesh
from shardwise.nn import ModelPlan, PlanError, describe_plan, shard_module
from shardwise.tensor import ShardedTensor

TP = Mesh.of(tp=2)
TABLES: dict[int, Tensor] = {}


@functools.lru_cache
def remembered_table(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


def table_of_the_file(length: int) -> Tensor:
    if length not in TABLES:
        TABLES[length] = torch.ones(length)
    return TABLES[length]


class Remembering(nn.Module):
    """Keeps tensors wherever models keep them: in attributes, lists, functions' caches, tables of its file."""

    classes: ClassVar[dict[str, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.again = self.down  # one module in two places
        self.mask: Tensor | None = None
        self.rows: list[Tensor] = []
        self.lock = threading.Lock()  # cannot be copied

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[-1])
        if not self.rows:
            self.rows.append(torch.full((4,), 0.5))
        self.classes.setdefault("shift", torch.ones(4))
        x = x * self.mask * self.rows[0] + remembered_table(4) + table_of_the_file(4) + self.classes["shift"]
        y: Tensor = x + self.again(self.down(self.up(x).relu()).repeat(1, 2))
        return y


@pytest.mark.parametrize("first", ["the plan", "the model"])
def test_a_model_is_as_it_was_after_its_plan_was_made(first: str) -> None:
    model, batch = Remembering(), torch.ones(2, 4)
    remembered_table.cache_clear()
    TABLES.clear()
    Remembering.classes.clear()
    expected = model(batch) if first == "the model" else None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    plan = shardwise.hf.plan(model, TP, {"x": batch})
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model.again is model.down and model.training
    assert (model.mask is None) == (first == "the plan") and len(model.rows) == (first == "the model")
    assert not any(t.is_meta for t in (*TABLES.values(), *Remembering.classes.values(), remembered_table(4)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = model(batch)
    assert found.isfinite().all() and (expected is None or torch.equal(found, expected))
    assert plan.parameters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)))
        return x + y


class Decoder(nn.Module):
    """As a model of transformers whose own plan names the layer of logits only."""

    _tp_plan: Mapping[str, str] = {"head": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(x))


def test_a_plan_of_a_model_that_splits_little_is_completed_by_structure() -> None:
    plan = shardwise.hf.plan(Decoder(), TP, {"x": torch.ones(1, 16)})
    assert plan.parameters == {
        "head.weight": "tp: S(0)",
        "blocks.*.up.*": "tp: S(0)",
        "blocks.*.down.weight": "tp: S(1)",
    }
    table = describe_plan(plan, Decoder())
    assert table.split_share > 0.9 and table.notes == ("split: 7 of 9 parameters, 99.3 % of the bytes",)


def test_a_plan_that_splits_less_than_half_says_so_and_why() -> None:
    with pytest.warns(
        UserWarning, match=r"Decoder: the axis 'tp' splits 1 parameters, 2\.9 % of the bytes; every rank"
    ) as caught:
        plan = shardwise.hf.plan(Decoder(), TP)
    assert "pass example=, the arguments of one forward pass" in str(caught[0].message)
    table = str(describe_plan(plan, Decoder()))
    assert "split: 1 of 9 parameters, 2.9 % of the bytes; whole on every rank" in table
    assert "blocks.{0-1}.up.weight (8.2 kB)" in table


class Attention(nn.Module):
    """Grouped queries: 8 heads of queries, 2 of keys and values, each of 4 rows, in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.qkv, self.out = nn.Linear(32, 48, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).split((32, 8, 8), -1))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        return y


def test_heads_that_the_ranks_do_not_divide_are_named_with_numbers() -> None:
    patterns = {"qkv.weight": "S(0) groups(32,8,8)", "out.weight": "S(1)"}
    plan = ModelPlan(Mesh.of(tp=4), patterns, input_plan="replicated")
    with pytest.warns(UserWarning) as caught:  # of all ranks together: the first one speaks
        run_local(lambda comm: type(shard_module(Attention(), plan)).__name__, 4)
    assert [str(warning.message) for warning in caught] == [
        "qkv.weight: 12 heads of 4 along dim 0 are cut apart by S(0) groups(32,8,8) on tp=4, as rank 0 holds 12 of 48; "
        "each use gathers them: split it over a number of ranks that divides the heads, or leave it whole"
    ]


@pytest.mark.parametrize(
    ("mesh", "text", "count"),
    [
        (Mesh.of(tp=2), "S(0) groups(32,8,8)", 0),
        (Mesh.of(tp=2), "S(1)", 0),
        (Mesh.of(tp=3), "S(0) groups(32,8,8)", 1),
        (Mesh.of(tp=8), "S(0)", 1),
        (Mesh.of(tp=4), "S(0) sizes(12,12,12,12)", 0),
    ],
)
def test_only_heads_that_are_cut_are_named(mesh: Mesh, text: str, count: int) -> None:
    assert len(describe_plan(ModelPlan(mesh, {"qkv.weight": text}), Attention()).warnings) == count


def test_a_gathered_half_head_still_gives_the_right_values() -> None:
    dense = Attention().double()
    batch = torch.randn(2, 3, 32, dtype=torch.float64)
    expected = dense(batch)

    plan = ModelPlan(Mesh.of(tp=4), {"qkv.weight": "S(0) groups(32,8,8)"}, input_plan="replicated")

    def body(comm: Comm) -> Tensor:
        model = Attention().double()
        model.load_state_dict(dense.state_dict())
        found = shard_module(model, plan)(batch)
        assert isinstance(found, ShardedTensor)
        return found.full()

    with pytest.warns(UserWarning, match="heads of 4"):
        results = run_local(body, 4)
    for found in results:
        torch.testing.assert_close(found, expected)


class Routed(nn.Module):
    """Splits its rows by counts that it reads, as mixtures of experts do: a pass without values cannot follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        counts = (x[:, 0] > 0).long().bincount(minlength=2)
        parts = x.split(counts.tolist())
        self.seen.append(parts[0])
        y: Tensor = torch.cat([self.down(F.relu(self.up(part))) for part in parts])
        return y


def test_a_model_that_reads_values_is_followed_with_its_own_parameters() -> None:
    model = Routed()
    plan = shardwise.hf.plan(model, TP, {"x": torch.randn(6, 4)})
    assert plan.parameters == {"up.*": "tp: S(0)", "down.weight": "tp: S(1)"} and not model.seen
    with torch.device("meta"):
        bare = Routed()
    with pytest.raises(PlanError, match="a forward pass without values fails"):
        shardwise.hf.plan(bare, TP, {"x": torch.randn(6, 4)})


class Chunked(Block):
    """Computes sizes as tensors, as exporters like it."""

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.div(x.shape[0], 2, rounding_mode="trunc")
        return super().forward(x.view(parts, 2, x.shape[1]))


def test_sizes_that_are_tensors_are_numbers_in_a_pass_without_values() -> None:
    with torch.device("meta"):
        model = Chunked()
    assert "up.*" in shardwise.hf.plan(model, TP, {"x": torch.ones(4, 16)}).parameters
