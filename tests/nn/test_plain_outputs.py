"""Does a model that returns plain tensors serve code that knows nothing of sharding: losses, metrics, generate()?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    Comm,
    LayoutError,
    Mesh,
    ModelPlan,
    PlanError,
    ShardedTensor,
    parse_spec,
    run_local,
    shard,
    shard_module,
)
from tests.device import DEVICE

WORDS, WIDTH, HEADS = 13, 8, 4
PLAN = {
    "{q,up}.weight": "tp: S(0)",
    "{k,v}.weight": "tp: S(0)",
    "{out,down}.weight": "tp: S(1)",
    "words.weight": "tp: S(0)",
}
MESHES = {"replicated": Mesh.of(tp=2), "dp: S(0)": Mesh.of(dp=2, tp=2)}


class Decoder(nn.Module):
    """One block with rotary positions, grouped queries, a cache of keys and values, and tied words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
        self.register_buffer("rates", 10.0 ** -torch.arange(WIDTH // HEADS), persistent=False)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

    def forward(self, ids: Tensor, cache: dict[str, Any] | None = None, labels: Tensor | None = None) -> Any:
        x = self.words(ids)
        start = 0 if not cache else cache["k"].shape[2]
        turns = torch.cos((torch.arange(ids.shape[1]) + start).unsqueeze(1) * self.rates)
        q, k, v = self.split(self.q(x)) * turns, self.split(self.k(x)) * turns, self.split(self.v(x))
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        if cache is not None:
            cache.update(k=k, v=v)
        causal = torch.arange(k.shape[2]) <= (torch.arange(ids.shape[1]) + start).unsqueeze(1)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        x = x + self.down(F.silu(self.up(x)))
        logits = F.linear(x, self.words.weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    @torch.no_grad()
    def generate(self, ids: Tensor, steps: int = 4) -> Tensor:
        """Greedy decoding with a cache, reordered as beams are."""
        holder = Cache()
        made, given = ids, ids
        for _ in range(steps):
            logits = self(given, cache=holder.values)["logits"]
            assert type(logits) is Tensor
            given = logits[:, -1:].argmax(-1)
            made = torch.cat([made, given], 1)
            holder.reorder(torch.arange(len(made)).flip(0).flip(0))
        return made


class Cache:
    """Keys and values that stay sharded between the calls of a model."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def reorder(self, rows: Tensor) -> None:
        for name, value in self.values.items():
            self.values[name] = value.index_select(0, rows)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, WORDS, (4, 5), generator=torch.Generator(DEVICE).manual_seed(3))
    return ids, ids.roll(1, 1)


def dense_model() -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder().double()


def sharded(dense: nn.Module, inputs: str) -> Any:
    model = copy.deepcopy(dense)
    shard_module(model, ModelPlan(MESHES[inputs], PLAN, input_plan=inputs, output_plan="plain"))
    return model


def own_rows(value: Tensor, inputs: str, rank: int) -> Tensor:
    return value if inputs == "replicated" else value.chunk(2)[rank // 2]


@pytest.mark.parametrize("inputs", MESHES)
def test_outputs_are_plain_and_have_the_gradients_of_the_dense_model(inputs: str) -> None:
    dense, (ids, labels) = dense_model(), batch()
    expected = dense(ids, labels=labels)
    (expected["loss"] + expected["logits"].square().sum()).backward()

    def body(comm: Comm) -> tuple[Any, ...]:
        model = sharded(dense, inputs)
        found = model(own_rows(ids, inputs, comm.rank), labels=own_rows(labels, inputs, comm.rank))
        assert {type(value) for value in found.values()} == {Tensor}
        (found["loss"] + found["logits"].square().sum()).backward()
        return found["loss"], found["logits"], {n: p.grad.full() for n, p in model.named_parameters()}

    for rank, (loss, logits, grads) in enumerate(run_local(body, MESHES[inputs].size)):
        assert_close(loss, expected["loss"])
        assert_close(logits, own_rows(expected["logits"], inputs, rank))
        assert_close(grads, {name: parameter.grad for name, parameter in dense.named_parameters()})


@pytest.mark.parametrize("inputs", MESHES)
def test_generate_keeps_its_cache_sharded_and_gives_the_dense_tokens(inputs: str) -> None:
    dense, (ids, _) = dense_model(), batch()
    expected = dense.generate(ids)

    def body(comm: Comm) -> Tensor:
        return sharded(dense, inputs).generate(own_rows(ids, inputs, comm.rank))

    for rank, made in enumerate(run_local(body, MESHES[inputs].size)):
        assert torch.equal(made, own_rows(expected, inputs, rank))


def test_a_copy_of_a_sharded_model_generates_with_its_own_parameters() -> None:
    dense, (ids, _) = dense_model(), batch()

    def body(comm: Comm) -> tuple[bool, str, type]:
        model = sharded(dense, "replicated")
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return torch.equal(other.generate(ids), dense.generate(ids)), type(other).__name__, type(other).__bases__[0]

    assert run_local(body, 2) == [(True, "Decoder", Decoder)] * 2


def test_one_query_token_of_grouped_queries_has_the_heads_of_the_queries() -> None:
    """The keys are larger than the queries then, and the result has the heads of the smaller tensor; asked twice."""
    q, k = torch.randn(2, 4, 1, 2, dtype=torch.float64), torch.randn(2, 2, 9, 2, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    def body(comm: Comm) -> None:
        heads = parse_spec("on tp=2: S(1)")
        x, y = shard(q, heads), shard(k, heads)
        for _ in range(3):
            found = F.scaled_dot_product_attention(x, y, y, enable_gqa=True)
            assert isinstance(found, ShardedTensor) and tuple(found.local_tensor().shape) == (2, 2, 1, 2)
            assert_close(found.full(), expected)

    run_local(body, 2)


def test_plans_with_plain_outputs_need_inputs_and_are_written_to_files(tmp_path: Path) -> None:
    mesh = Mesh.of(tp=2)
    with pytest.raises(PlanError, match="output_plan is 'plain' or None, got 'replicated'"):
        ModelPlan(mesh, {}, input_plan="replicated", output_plan="replicated")
    with pytest.raises(PlanError, match="output_plan 'plain' needs an input_plan"):
        ModelPlan(mesh, {}, output_plan="plain")
    plan = ModelPlan(mesh, {"up.weight": "S(0)"}, input_plan="replicated", output_plan="plain")
    (tmp_path / "plan.toml").write_text(str(plan))

    def body(comm: Comm) -> bool:
        model = nn.Sequential()
        model.up = nn.Linear(4, 2)
        shard_module(model, tmp_path / "plan.toml")
        return isinstance(model.up.weight, ShardedTensor)

    assert all(run_local(body, 2))


class Filling(nn.Module):
    """Writes its rows into a tensor of zeros, which is a plain one of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(x.shape[0], 5, dtype=x.dtype)
        for i, row in enumerate(self.inner(x)):
            made[i, : row.shape[0]] = row
        return made


@pytest.mark.parametrize("layout", ["S(0)", "R"])
def test_rows_of_a_plain_tensor_that_a_model_fills_are_those_of_the_rank_and_have_gradients(layout: str) -> None:
    dense, batch = Filling(), torch.arange(12.0, dtype=torch.float64).reshape(4, 3).sin()
    expected = dense(batch)
    expected.square().sum().backward()

    def body(comm: Comm) -> tuple[Tensor, list[Any]]:
        model = copy.deepcopy(dense)
        model.zero_grad()
        plan = {"inner.weight": layout} if layout != "R" else {}
        shard_module(model, ModelPlan(Mesh.of(dp=2), plan, input_plan="dp: S(0)", output_plan="plain"))
        found = model(batch[2 * comm.rank : 2 * comm.rank + 2])
        found.square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        return found.detach(), [g.full() if isinstance(g, ShardedTensor) else g for g in grads]

    for rank, (found, grads) in enumerate(run_local(body, 2)):
        assert_close(found, expected[2 * rank : 2 * rank + 2].detach())
        assert_close(grads, [p.grad for p in dense.parameters()])


class Scaled(nn.Module):
    """Rows, and a number that is made of a parameter alone, as those who train with images and texts return it."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.layer, self.scale, self.rows = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5)), rows

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale.exp()
        return self.layer(x), scale.expand(len(x)) if self.rows else scale


def loss_of_rows(model: nn.Module, x: Tensor, parts: int) -> Tensor:
    values, scale = model(x)
    loss: Tensor = (values * scale.unsqueeze(-1)).square().sum(1).mean() / parts
    return loss


@pytest.mark.parametrize("axis", ["dp", "fsdp"])
def test_what_is_made_of_parameters_alone_has_one_gradient_or_is_refused(axis: str) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    start = {rows: Scaled(rows) for rows in (True, False)}
    dense = {rows: copy.deepcopy(model) for rows, model in start.items()}
    for model in dense.values():
        loss_of_rows(model, x, 1).backward()
    mesh = Mesh.of(**{axis: 2})
    weights = "S(0)" if axis == "fsdp" else "R"
    plan = ModelPlan(mesh, {"*.weight": weights, "*.bias": "R", "scale": "R"}, input_plan="S(0)", output_plan="plain")

    def body(comm: Comm) -> str:
        mine = x[2 * comm.rank :][:2]
        with_rows = shard_module(copy.deepcopy(start[True]), plan)
        loss_of_rows(with_rows, mine, 2).backward()
        for own, whole in zip(with_rows.parameters(), dense[True].parameters(), strict=True):
            assert isinstance(own.grad, ShardedTensor)
            assert_close(own.grad.full(), whole.grad)
        without = shard_module(copy.deepcopy(start[False]), plan)
        without(mine)[1].square().backward()  # the same on all ranks
        with pytest.raises(LayoutError) as raised:
            loss_of_rows(without, mine, 2).backward()
        return str(raised.value)

    for text in run_local(body, 2):
        assert text.startswith("the ranks have other gradients for an output of shape () that is made of parameters al")


class Recurrent(nn.Module):
    """States of layers, whose dim 0 are no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(4, 4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor, h: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, h = self.layers(x, h)
        return self.head(y), h


def train_in_pieces(model: nn.Module, x: Tensor, parts: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    h = None
    for piece in x.split(2, 1):
        y, h = model(piece, h)
        h = tuple(state.detach() for state in h)
        (y.square().sum((1, 2)).mean() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.full() if isinstance(p, ShardedTensor) else p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("rows", ["x", "**"])
def test_states_that_are_whole_on_every_rank_leave_the_rows_of_the_batch_to_others(rows: str) -> None:
    x, start = torch.randn(6, 6, 4, generator=torch.Generator().manual_seed(0)), Recurrent()
    expected = train_in_pieces(copy.deepcopy(start), x, 1)
    plan = ModelPlan(Mesh.of(dp=2), {"**": "R"}, input_plan={rows: "dp: S(0)", "h": "R"}, output_plan="plain")

    def body(comm: Comm) -> dict[str, Tensor]:
        model = shard_module(copy.deepcopy(start), plan)
        mine, weights = x[3 * comm.rank :][:3], torch.zeros(2, 6, 4)
        assert model(mine, (weights, weights))[0].shape == (3, 6, 3)
        return train_in_pieces(model, mine, 2)

    for found in run_local(body, 2):
        assert_close(found, expected)
