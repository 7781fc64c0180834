"""`shardwise.compile`: values, gradients, parameters and buffers are those of the same program without a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import shardwise
from shardwise import Comm, Mesh, ModelPlan, ShardedTensor, run_local, shard, shard_module
from tests.dense import numbers

BACKEND = "aot_eager"
TIMEOUT = 60.0


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        rows, length, width = x.shape
        heads = [
            layer(self.norm(x)).view(rows, length, 2, width // 2).transpose(1, 2) for layer in (self.q, self.k, self.v)
        ]
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Normed(nn.Module):
    """A batch norm, whose buffers are written to, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.norm(self.layer(x)))


TENSOR_PARALLEL = {
    Perceptron: {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"},
    Attention: {f"{n}.{p}": "S(0)" for n in "qkv" for p in ("weight", "bias")} | {"out.weight": "S(1)"},
    Normed: {},
}


def make_plan(kind: type[nn.Module], name: str) -> ModelPlan:
    if name == "tp":
        return ModelPlan(Mesh.of(tp=2), TENSOR_PARALLEL[kind], axis="tp", input_plan="replicated")
    if name == "dp x tp":
        named = {pattern: f"tp: {placement}" for pattern, placement in TENSOR_PARALLEL[kind].items()}
        return ModelPlan(Mesh.of(dp=2, tp=2), named, input_plan="dp: S(0)")
    cut = {"*.weight": "S(0)", "*.bias": "S(0)"} if name == "fully sharded" else {}
    return ModelPlan(Mesh.of(dp=2), cut, axis="dp", input_plan="dp: S(0)")


def make_model(kind: type[nn.Module], plan: ModelPlan | None = None) -> nn.Module:
    model = kind()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = numbers(*parameter.shape, seed=i, dtype=torch.float32) * 0.5
    if plan is not None:
        shard_module(model, plan)
    return model


def batch_of(kind: type[nn.Module], comm: Comm, name: str, seed: int) -> tuple[Tensor, Tensor]:
    """The whole batch, and this rank's part of it."""
    shape = (4, 3, 8) if kind is Attention else (4, 8)
    whole = numbers(*shape, seed=seed, dtype=torch.float32)
    parts = 1 if name == "tp" else 2
    place = comm.rank // 2 if name == "dp x tp" else comm.rank
    return whole, whole if parts == 1 else whole.chunk(2)[place]


def full(value: Any) -> Any:
    return value.detach().full() if isinstance(value, ShardedTensor) else value.detach()


def assert_same_models(one: nn.Module, other: nn.Module, what: str) -> None:
    for (name, tensor), twin in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert_close(full(tensor), full(twin), rtol=1e-4, atol=1e-5, msg=f"{what}: {name}")


def run_ranks(body: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    return run_local(body, ranks, *args, timeout=TIMEOUT)


LAYOUTS = ["tp", "dp", "fully sharded", "dp x tp"]


def _module_beside_others(comm: Comm, kind: type[nn.Module], name: str) -> None:
    plan = make_plan(kind, name)
    compiled_model, eager, dense = make_model(kind, plan), make_model(kind, plan), make_model(kind)
    compiled = shardwise.compile(compiled_model, backend=BACKEND)
    for seed in (0, 1):
        whole, part = batch_of(kind, comm, name, seed)
        outputs = []
        for run, batch in ((compiled, part), (eager, part), (dense, whole)):
            output = run(batch)
            output.square().mean().backward()
            outputs.append(full(output))
        assert_close(outputs[0], outputs[1])
        assert_close(outputs[0], outputs[2], rtol=1e-4, atol=1e-5)
        for p, q, r in zip(compiled_model.parameters(), eager.parameters(), dense.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and r.grad is not None
            assert_close(full(p.grad), full(q.grad), rtol=1e-4, atol=1e-6)
            assert_close(full(p.grad), full(r.grad), rtol=1e-4, atol=1e-5)
    assert "2 calls, traced because: the first call" in compiled.explain()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", [Perceptron, Attention])
def test_a_compiled_module_is_the_module(kind: type[nn.Module], name: str) -> None:
    run_ranks(_module_beside_others, kind, name, ranks=4 if name == "dp x tp" else 2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def _steps_beside_others(comm: Comm, kind: type[nn.Module], name: str, optimizer: str) -> str:
    plan = make_plan(kind, name)
    models = [make_model(kind, plan), make_model(kind, plan)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]

    def make_step(model: nn.Module, owner: torch.optim.Optimizer) -> Callable[[Tensor], Any]:
        def step(batch: Tensor) -> Any:
            owner.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            owner.step()
            return loss

        return step

    steps = [make_step(*pair) for pair in zip(models, optimizers, strict=True)]
    compiled = shardwise.compile(steps[0], backend=BACKEND)
    for seed in range(4):
        for owner in optimizers:
            owner.param_groups[0]["lr"] = 0.01 * (seed + 1)  # as a scheduler does
        _, part = batch_of(kind, comm, name, seed)
        losses = []
        for run in (compiled, steps[1]):
            shardwise.manual_seed(seed)
            losses.append(full(run(part)))
        assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)
        assert_same_models(models[0], models[1], f"step {seed}")
    assert all(full(p.grad).abs().sum() > 0 for p in models[0].parameters() if p.grad is not None)
    return str(compiled.explain())


@pytest.mark.parametrize(
    ("kind", "name", "optimizer"),
    [
        (Perceptron, "tp", "adamw"),
        (Normed, "dp", "adamw"),
        (Normed, "fully sharded", "sgd with momentum"),
        (Attention, "fully sharded", "adamw"),
    ],
)
def test_a_whole_training_step_is_one_graph(kind: type[nn.Module], name: str, optimizer: str) -> None:
    for explained in run_ranks(_steps_beside_others, kind, name, optimizer):
        assert "1 kind of inputs" in explained and "without a graph" not in explained


def test_shapes_that_do_not_fit_are_one_error_of_the_whole_tensors() -> None:
    """No warning that the program runs without a graph comes before it, and torch logs nothing of its trace."""
    logged: list[logging.LogRecord] = []
    log = logging.getLogger("torch._subclasses.fake_tensor")
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]  # of this one
    log.addHandler(handler)

    def body() -> list[str]:
        a, b = shard(torch.ones(6, 4), "on tp=2: S(0)"), shard(torch.ones(3, 3), "on tp=2: R")
        program, said = shardwise.compile(torch.matmul, backend=BACKEND), []
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                program(a, b)
            said.append(str(caught.value))
        assert program(a, a.t()).shape == (6, 6)
        return said

    try:
        found = run_local(body, 2, timeout=TIMEOUT)
    finally:
        log.removeHandler(handler)
    assert found == [["mat1 and mat2 shapes cannot be multiplied (6x4 and 3x3)"] * 2] * 2
    assert [record.getMessage() for record in logged] == []


def test_what_runs_without_a_graph_is_said_at_the_line_of_the_call() -> None:
    program = shardwise.compile(lambda x: print(end="") or x * 2, backend=BACKEND)
    with pytest.warns(UserWarning, match="runs without a graph: .*print") as warned:
        program(shard(torch.ones(4), shardwise.ChunkSpec(0, 1)))
    assert warned[0].filename == __file__
