"""`shardwise.compile` of what people train: language models, checkpointed layers, fully sharded layers, experts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Comm, Mesh, ModelPlan, ShardedTensor, run_local, shard_module
from shardwise.nn import GroupedExperts
from shardwise.ops.implicit_replication import reads_plain_as_replicated
from tests.dense import numbers

BACKEND = "aot_eager"
ROWS, WIDTH, CLASSES, LAYERS = 6, 8, 12, 3


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Any:
        scores = self.head(torch.tanh(self.table(ids)))
        return F.cross_entropy(scores[:, :-1].reshape(-1, CLASSES), ids[:, 1:].reshape(-1))


class Layers(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = checkpoint(self._run, layer, x, use_reentrant=False) if self.checkpointed else self._run(layer, x)
        return x

    def _run(self, layer: nn.Module, x: Any) -> Any:
        return x + layer(x).sigmoid().tanh()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), GroupedExperts(4, WIDTH, 16)

    def forward(self, x: Any) -> Any:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        return x + self.experts(x, ids, weights)


def make(model: nn.Module, plan: ModelPlan) -> nn.Module:
    for i, parameter in enumerate(model.parameters()):
        parameter.data = numbers(*parameter.shape, seed=i, dtype=torch.float32) * 0.5
    shard_module(model, plan)
    return model


def make_step(model: nn.Module) -> Callable[[Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(batch: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def train_beside(
    build: Callable[[], nn.Module], batches: list[Tensor], backend: Any = BACKEND, tolerance: float = 1e-4
) -> Any:
    """The compiled step, after its losses and parameters were found to be those without a graph."""
    models = [build(), build()]
    run, eager = shardwise.compile(make_step(models[0]), backend=backend), make_step(models[1])
    for batch in batches:
        assert_close(run(batch).full(), eager(batch).full(), rtol=tolerance, atol=tolerance)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert isinstance(p, ShardedTensor) and isinstance(q, ShardedTensor)
        assert_close(p.detach().full(), q.detach().full(), rtol=tolerance, atol=tolerance / 100)
    return run


def ids_of(comm: Comm, seed: int, split: bool) -> Tensor:
    whole = (torch.arange(ROWS * 4) * (seed + 5) % CLASSES).reshape(ROWS, 4)
    return whole.chunk(2)[comm.rank] if split else whole


ROW_WISE = ModelPlan(Mesh.of(tp=2), {"*.weight": "S(0)"}, axis="tp", input_plan="replicated")
FULLY = ModelPlan(Mesh.of(dp=2), {"**.weight": "S(0)"}, axis="dp", input_plan="dp: S(0)")


@pytest.mark.parametrize("plan", [ROW_WISE, FULLY], ids=["classes split", "fully sharded"])
def test_lookups_and_likelihoods_are_part_of_the_graph(plan: ModelPlan) -> None:
    def body(comm: Comm) -> str:
        batches = [ids_of(comm, seed, plan is FULLY) for seed in range(3)]
        return str(train_beside(lambda: make(Language(), plan), batches).explain())

    for text in run_local(body, 2, timeout=60.0):
        assert "1 kind of inputs" in text and "without a graph" not in text


def test_ids_that_no_rank_has_are_an_error_of_the_graph_on_every_rank() -> None:
    def body(comm: Comm) -> str:
        run = shardwise.compile(make(Language(), ROW_WISE), backend=BACKEND)
        run(ids_of(comm, 0, False))
        assert "without a graph" not in run.explain()
        try:
            run(torch.full((ROWS, 4), CLASSES))
        except RuntimeError as error:
            return str(error)
        return "no error"

    for text in run_local(body, 2, timeout=60.0):
        assert f"an index is out of bounds for dim 0 of length {CLASSES}" in text


def saved_activations(comm: Comm, checkpointed: bool) -> int:
    """The bytes that a compiled forward keeps for its backward pass besides parameters."""
    model = make(Layers(checkpointed), ROW_WISE_LAYERS)
    run = shardwise.compile(model, backend=BACKEND)
    x, found, own = numbers(64, WIDTH, dtype=torch.float32), {}, set()
    for parameter in model.parameters():
        assert isinstance(parameter, ShardedTensor)
        own |= {t.untyped_storage().data_ptr() for t in parameter.local_parts}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            found[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = run(x).square().mean()
    loss.backward()
    return sum(found.values())


ROW_WISE_LAYERS = ModelPlan(Mesh.of(tp=2), {"layers.*.weight": "S(0)"}, axis="tp", input_plan="replicated")


def test_checkpointed_layers_keep_their_inputs_only() -> None:
    kept, all_ = (run_local(saved_activations, 2, flag, timeout=60.0)[0] for flag in (True, False))
    layer = 64 * WIDTH * 4
    assert kept <= (LAYERS + 2) * layer < all_


def count_ops(names: dict[str, int]) -> Callable[[Any, Any], Any]:
    """A backend that counts the operators of graphs, and runs them as they are."""

    def backend(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            names[str(node.target)] = names.get(str(node.target), 0) + 1
        return graph.forward

    return backend


def test_a_whole_step_computes_checkpointed_layers_again() -> None:
    def body(comm: Comm) -> int:
        names: dict[str, int] = {}
        batches = [numbers(ROWS, WIDTH, seed=i, dtype=torch.float32) for i in range(3)]
        train_beside(lambda: make(Layers(True), ROW_WISE_LAYERS), batches, count_ops(names))
        return names["aten.sigmoid.default"]

    assert run_local(body, 2, timeout=60.0) == [2 * LAYERS] * 2


@pytest.mark.parametrize("again", [True, False])
def test_a_whole_step_gathers_parameters_again_in_its_backward_pass(again: bool) -> None:
    plan = ModelPlan(
        Mesh.of(dp=2), {"layers.*.weight": "S(0)"}, axis="dp", input_plan="dp: S(0)", reshard_after_forward=again
    )

    def body(comm: Comm) -> int:
        batches = [numbers(64, WIDTH, seed=i, dtype=torch.float32).chunk(2)[comm.rank] for i in range(3)]
        run = train_beside(lambda: make(Layers(False), plan), batches)
        return int(run._order[0].schedules["step"].count)

    # Gathers and reductions of gradients; the first layer's weight is not needed in the backward pass.
    assert run_local(body, 2, timeout=60.0) == [2 * LAYERS + (LAYERS - 1 if again else 0)] * 2


@pytest.mark.parametrize("whole_step", [True, False])
def test_parameters_are_gathered_in_another_dtype(whole_step: bool) -> None:
    cut = {"layers.*.weight": "S(0)"}
    plan = ModelPlan(Mesh.of(dp=2), cut, axis="dp", input_plan="dp: S(0)", gather_dtype=torch.bfloat16)

    def body(comm: Comm) -> str:
        batches = [numbers(64, WIDTH, seed=i, dtype=torch.float32).chunk(2)[comm.rank] for i in range(3)]
        if whole_step:
            return str(train_beside(lambda: make(Layers(False), plan), batches, tolerance=0.02).explain())
        models = [make(Layers(False), plan), make(Layers(False), plan)]
        run = shardwise.compile(models[0], backend=BACKEND)
        for batch in batches:
            assert_close(run(batch).full(), models[1](batch).full(), rtol=0.02, atol=0.02)
        return str(run.explain())

    for text in run_local(body, 2, timeout=60.0):
        assert "1 kind of inputs" in text and "without a graph" not in text


def test_a_mixture_of_experts_runs_without_a_graph_and_says_where() -> None:
    plan = ModelPlan(Mesh.of(ep=2), {"experts.*": "S(0)"}, axis="ep", input_plan="replicated")

    def body(comm: Comm) -> tuple[str, bool]:
        batches = [numbers(ROWS, WIDTH, seed=i, dtype=torch.float32) for i in range(2)]
        run = train_beside(lambda: make(Mixture(), plan), batches)
        return str(run.explain()), reads_plain_as_replicated()

    with warnings.catch_warnings():  # around the ranks: filters belong to the process, not to a thread
        warnings.simplefilter("ignore")
        ended = run_local(body, 2, timeout=60.0)
    for text, is_left_open in ended:
        assert "runs without a graph: ranks 0, 1: DataDependentOutputException" in text
        assert "(at test_programs.py:" in text and not is_left_open


class Grouped(nn.Module):
    """Heads of queries and one of keys, in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 2
        self.qkv, self.out = nn.Linear(WIDTH, 12, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in self.qkv(x).split((8, 2, 2), -1))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        return y


def test_a_whole_step_sums_the_gradients_of_copies() -> None:
    """Parameters with copies have a hook, which is part of the graph: nothing falls back, which would warn."""
    torch.manual_seed(0)
    dense, x = Grouped().double(), numbers(2, 3, WIDTH)
    start = {name: value.clone() for name, value in dense.state_dict().items()}
    plan = ModelPlan(Mesh.of(tp=2), {"qkv.weight": "S(0) groups(8,2,2)", "out.weight": "S(1)"}, input_plan="replicated")

    def train(model: nn.Module, compiled: bool) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(batch: Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(batch).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss

        run = shardwise.compile(step, backend="eager") if compiled else step
        return [float(run(x).detach()) for _ in range(3)]

    def body(comm: Comm) -> list[float]:
        model = Grouped().double()
        model.load_state_dict(start)
        return train(shard_module(model, plan), compiled=True)

    assert "each 2" in str(plan.specs(dense)["qkv.weight"].placements[0].format())
    expected = train(dense, compiled=False)
    for found in run_local(body, 2):
        assert_close(found, expected)
