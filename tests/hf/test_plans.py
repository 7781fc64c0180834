"""Plans made for models: what they leave of the model, how much they split, and heads that must not be cut."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise.hf
from shardwise import explain, replicate
from shardwise.comm import Comm, run_local
from shardwise.geometry import Mesh, Shard, parse_spec
from shardwise.nn import ModelPlan, PlanError, describe_plan, shard_module
from shardwise.ops import no_communication
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


PATTERNS = {"qkv.weight": "S(0) groups(32,8,8)", "out.weight": "S(1)"}


def test_heads_that_the_ranks_do_not_divide_are_named_with_numbers() -> None:
    """Where each layer is by itself, parameters are cut as the plan says; along an axis that splits no batch."""
    plan = ModelPlan(Mesh.of(tp=4), PATTERNS)
    with pytest.warns(UserWarning) as caught:  # of all ranks together: the first one speaks
        run_local(lambda comm: type(shard_module(Attention(), plan)).__name__, 4)
    assert [str(warning.message) for warning in caught] == [
        "qkv.weight: 12 heads of 4 along dim 0 are cut apart by S(0) groups(32,8,8) on tp=4, as rank 0 holds 12 of 48; "
        "each use gathers them: split it over a number of ranks that divides the heads, or leave it whole"
    ]


def test_a_plan_cuts_heads_of_a_fused_layer_nowhere_and_moves_nothing_but_a_sum() -> None:
    """2 heads of keys on 4 ranks: each is on two of them."""
    plan = ModelPlan(Mesh.of(tp=4), PATTERNS, input_plan="replicated")
    assert plan.specs(Attention())["qkv.weight"].placements == (Shard(0, groups=(32, 8, 8), each=(1, 2, 2), unit=4),)
    assert "S(0) groups(32,8 each 2,8 each 2) unit(4)" in str(describe_plan(plan, Attention()))
    dense, batch = Attention().double(), torch.randn(2, 3, 32, dtype=torch.float64)
    expected = dense(batch)
    expected.pow(2).sum().backward()

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        model = Attention().double()
        model.load_state_dict(dense.state_dict())
        shard_module(model, plan)
        with no_communication():
            found = model(batch)
        assert isinstance(found, ShardedTensor) and str(found.placements) == "(Partial('sum'),)"
        found.pow(2).sum().backward()
        return found.full(), model.qkv.weight.grad.full()  # type: ignore[union-attr]

    for found, grad in run_local(body, 4):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(grad, dense.qkv.weight.grad)


class Grouped(nn.Module):
    """Heads of queries and of keys in layers of their own, found by following a pass, or by `head_dim`."""

    def __init__(self, queries: int, keys: int, named: bool = False, length: int = 4) -> None:
        super().__init__()
        if named:
            self.head_dim = length
        self.length = length
        self.q_proj = nn.Linear(8, queries * length)
        self.k_proj, self.v_proj = nn.Linear(8, keys * length), nn.Linear(8, keys * length)
        self.o_proj = nn.Linear(queries * length, 8)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        made = (layer(x).unflatten(-1, (-1, self.length)).transpose(1, 2) for layer in layers)
        y: Tensor = self.o_proj(F.scaled_dot_product_attention(*made, enable_gqa=True).transpose(1, 2).flatten(2))
        return y


CUTS = [
    (8, 4, 4, "S(0)", "S(0)"),
    (8, 2, 4, "S(0)", "S(0) each 2 unit(4)"),
    (8, 1, 4, "S(0)", "S(0) each 4 unit(4)"),
    (14, 2, 4, "S(0) sizes(16,12,16,12) unit(4)", "S(0) each 2 unit(4)"),
    (6, 6, 4, "S(0) unit(4)", "S(0) unit(4)"),
    (12, 3, 2, "S(0) unit(16)", "S(0) unit(4)"),
]


@pytest.mark.parametrize(("queries", "keys", "ranks", "q", "k"), CUTS)
@pytest.mark.parametrize("how", ["structure", "names", "written"])
def test_projections_are_cut_by_heads(queries: int, keys: int, ranks: int, q: str, k: str, how: str) -> None:
    model, batch = Grouped(queries, keys, how != "structure").double(), torch.randn(2, 3, 8, dtype=torch.float64)
    mesh = Mesh.of(tp=ranks)
    if how == "written":
        plan = ModelPlan(mesh, {"{q,k,v}_proj.*": "S(0)", "o_proj.weight": "S(1)"}, input_plan="replicated")
    else:
        plan = shardwise.hf.plan(model, mesh, {"x": batch})
    specs = plan.specs(model)
    for name, text in (("q_proj", q), ("k_proj", k)):
        shape = tuple(getattr(model, name).weight.shape)
        assert specs[f"{name}.weight"].layout(shape) == parse_spec(f"on tp={ranks}: {text}").layout(shape)
    assert specs["v_proj.bias"] == specs["k_proj.bias"] and not describe_plan(plan, model).warnings
    expected = model(batch)

    def body(comm: Comm) -> Tensor:
        own = Grouped(queries, keys, how != "structure").double()
        own.load_state_dict(model.state_dict())
        shard_module(own, plan)
        with explain() as log:
            result = own(batch)
        moved = [entry.name for entry in log.entries if entry.moved_bytes]
        assert moved == (["redistribute"] if how != "written" else []) or k == "S(0) unit(4)"  # the sum of the output
        return result.full() if isinstance(result, ShardedTensor) else result

    for result in run_local(body, ranks):
        torch.testing.assert_close(result, expected)


def test_sizes_that_cut_a_head_are_an_error_with_the_numbers() -> None:
    plan = ModelPlan(Mesh.of(tp=2), {"q_proj.weight": "S(0) sizes(18,14)"}, input_plan="replicated")
    said = (
        "q_proj.weight, of which a head has 4 rows: S(0) sizes(18,14) unit(4) cuts inside a unit: 18 rows are 4 units "
        "of 4 and 2 rows; give sizes in multiples of 4, or write S(0) unit(4)"
    )
    with pytest.raises(PlanError, match=re.escape(said)):
        plan.specs(Grouped(8, 8, named=True))


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

    def body(comm: Comm) -> Tensor:
        model = Attention().double()
        model.load_state_dict(dense.state_dict())
        with pytest.warns(UserWarning, match="heads of 4") if comm.rank == 0 else nullcontext():
            shard_module(model, ModelPlan(Mesh.of(tp=4), {"qkv.weight": "S(0) groups(32,8,8)"}))
        found = model(replicate(batch))
        assert isinstance(found, ShardedTensor)
        return found.full()

    for found in run_local(body, 4):
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


class Captions(nn.Module):
    """A model of images that cannot do without a text, as its config does not say."""

    main_input_name = "pixel_values"
    config = SimpleNamespace(image_size=2, num_channels=1)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, pixel_values: Tensor, input_ids: Tensor | None = None) -> Tensor:
        assert input_ids is not None, "specify input_ids"
        made: Tensor = self.down(self.up(self.words(input_ids) + pixel_values.reshape(1, 1, 4)).relu())
        return made


def test_inputs_that_a_model_names_are_made_where_the_main_one_is_not_enough() -> None:
    made = shardwise.hf.plan(Captions(), TP)
    assert made.parameters["down.weight"] == "tp: S(1)" and made.parameters["up.*"] == "tp: S(0)"


class Balanced(nn.Module):
    """Experts that pick their rows by values, and a loss of balance."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * shares[rows, None])
        return x + out, (shares * shares).sum() * 4


@pytest.mark.parametrize("example", [torch.ones(3, 4), (torch.ones(3, 4),), {"x": torch.ones(3, 4)}])
def test_an_example_with_values_shows_experts_that_pick_their_rows(example: Any) -> None:
    made = shardwise.hf.plan(Balanced(), TP, example).parameters
    assert [made[f"experts.{{0,1}}.{layer}.weight"] for layer in (0, 2)] == ["tp: S(0)", "tp: S(1)"]


def test_an_example_that_fails_is_named() -> None:
    with pytest.raises(PlanError, match=r"Balanced has no tp_plan, and a forward pass fails: .*; correct example=, or"):
        shardwise.hf.plan(Balanced(), TP, torch.ones(3, 5))
