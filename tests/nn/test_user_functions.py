"""Do autograd Functions that know nothing of sharding, and later changes of a sharded model, give dense results?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, rnn

from shardwise.comm import Comm, run_local
from shardwise.geometry import Mesh
from shardwise.nn import ModelPlan, shard_module
from shardwise.ops import plain_as_replicated
from shardwise.tensor import ShardedTensor, shard
from shardwise.tensor.dispatch import UnsupportedOpError


class Square(torch.autograd.Function):
    """Elementwise: runs on the parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        y: Tensor = 2 * ctx.saved_tensors[0] * grads[0]
        return y


class InMemory(torch.autograd.Function):
    """Reads memory, as kernels do: it gets whole tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sort(0).values.untyped_storage().nbytes() * torch.as_strided(x, x.shape, x.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        y: Tensor = grads[0] * ctx.saved_tensors[0].numel() * 8
        return y


class IntoBuffer(torch.autograd.Function):
    """Its backward writes to a plain buffer, as chunked losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scaled = x * 3
        y: Tensor = ctx.scaled * x
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        made = torch.empty(4, 2, dtype=torch.float64)
        return torch.add(ctx.saved_tensors[0] * 3, ctx.scaled, out=made) * grads[0]


class ThroughNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().cpu().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x @ self.function.apply(self.weight)).tanh()
        return y


def train(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = None
    model(torch.rand(3, 4, dtype=torch.float64, generator=generator) / 400).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full() if isinstance(g, ShardedTensor) else g).clone() for n, g in grads.items()}


@pytest.mark.parametrize("spec", ["S(0)", "S(1)", "R"])
@pytest.mark.parametrize("function", [Square, InMemory, IntoBuffer, ThroughNumPy])
@pytest.mark.filterwarnings("ignore:the (forward|backward) of .* does not take ShardedTensors")
def test_functions_that_nothing_registers(function: Any, spec: str) -> None:
    expected = train(Applied(function))
    plan = ModelPlan(Mesh.of(tp=2), {"weight": spec}, input_plan="replicated", output_plan="plain")
    for found in run_local(lambda comm: train(shard_module(Applied(function), plan)), 2):
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found["weight"], expected["weight"])


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "parametrization": lambda m: parametrize.register_parametrization(m.get_submodule("0"), "weight", Half()),
    "weight norm": lambda m: parametrizations.weight_norm(m.get_submodule("0")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_sharded_model_takes_parametrizations(change: str) -> None:
    dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    start = copy.deepcopy(dense)
    CHANGES[change](dense)
    expected = train(dense)
    patterns = {"0.*": "S(0)", "2.weight": "S(1)"}
    plan = ModelPlan(Mesh.of(tp=2), patterns, input_plan="replicated", output_plan="plain")

    def body(comm: Comm) -> dict[str, Tensor]:
        model = shard_module(copy.deepcopy(start), plan)
        CHANGES[change](model)
        return train(model)

    for found in run_local(body, 2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


class Vocabulary(nn.Module):
    """The methods of a model of transformers that this is about; its tables are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def resize_token_embeddings(self, count: int) -> nn.Module:
        made = nn.Embedding(count, 4)
        with torch.no_grad():
            made.weight[:6] = self.table.weight
        self.table, self.head = made, nn.Linear(4, count, bias=False)
        self.head.weight = made.weight
        return self.table

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.table(ids))
        return y


@pytest.mark.parametrize("count", [6, 9])
def test_tables_are_resized_and_sharded_again(count: int) -> None:
    start, ids = Vocabulary(), torch.tensor([[0, 3], [2, 1]])
    expected = start(ids)
    plan = ModelPlan(Mesh.of(tp=2), {"table.weight": "S(0)"}, input_plan="replicated", output_plan="plain")

    def body(comm: Comm) -> list[Any]:
        model: Any = shard_module(copy.deepcopy(start), plan)
        model.resize_token_embeddings(count)
        weight = model.table.weight
        assert isinstance(weight, ShardedTensor) and model.head.weight is weight and weight.requires_grad
        logits = model(ids)
        logits.sum().backward()
        assert weight.grad is not None
        return [tuple(weight.shape), str(weight.placements), logits[..., :6].detach(), weight.full().detach()]

    found = run_local(body, 2)
    assert found[0][:2] == [(count, 4), "(Shard(0),)"]
    torch.testing.assert_close(found[0][2], expected)
    assert torch.equal(found[0][3], found[1][3])


def per_sample_gradients(model: nn.Module, x: Tensor) -> Any:
    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(model, parameters, (row[None],)).sum()
        return made

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)


TRACERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "torch.export": lambda model, x: torch.export.export(model, (x,)),
    "jit.trace": lambda model, x: torch.jit.trace(model, (x,)),
    "make_fx": lambda model, x: make_fx(model)(x),
    "vmap": per_sample_gradients,
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.compile runs what touches ShardedTensors")  # torch 2.15 exports by dynamo
@pytest.mark.parametrize("name", TRACERS)
def test_what_records_or_transforms_a_model_is_refused_by_what_to_do(name: str) -> None:
    """On one rank: several of these are not made for threads."""

    def body(comm: Comm) -> str:
        model = small_model()
        shard_module(model, ModelPlan(Mesh.of(tp=1), {"0.*": "tp: S(0)"}, input_plan="R", output_plan="plain"))
        with pytest.raises(UnsupportedOpError) as caught:
            TRACERS[name](model, torch.ones(3, 4))
        assert model(torch.ones(3, 4)).shape == (3, 2)
        return str(caught.value)

    records = name in ("torch.export", "jit.trace", "make_fx")
    wanted = "use shardwise.compile(model), or export an unsharded copy" if records else "use torch.autograd.grad"
    assert wanted in run_local(body, 1)[0]


@pytest.mark.parametrize("name", ["trace", "trace_module"])
def test_a_function_of_sharded_tensors_is_not_recorded(name: str) -> None:
    def body(comm: Comm) -> None:
        x = shard(torch.ones(4, 2), "on tp=2: S(0)")
        with pytest.raises(UnsupportedOpError, match="record the operators of one rank"):
            if name == "trace":
                torch.jit.trace(lambda y: y * 2 + 1, (x,))
            else:
                torch.jit.trace_module(nn.ReLU(), {"forward": x})

    run_local(body, 2, timeout=60)


def test_a_symbolic_trace_of_a_sharded_model() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def body(comm: Comm) -> Tensor:
        model = small_model()
        shard_module(model, ModelPlan(Mesh.of(tp=1), {"0.*": "tp: S(0)"}, input_plan="R", output_plan="plain"))
        with plain_as_replicated():
            made: Any = torch.fx.symbolic_trace(model)(x)
        assert isinstance(made, ShardedTensor)
        return made.full()

    torch.testing.assert_close(run_local(body, 1)[0], small_model()(x))


def test_torch_func_grad_of_sharded_parameters() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def run(model: nn.Module) -> list[Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            made: Tensor = torch.func.functional_call(model, parameters, (x,)).square().sum()
            return made

        gradients = torch.func.grad(loss)(dict(model.named_parameters()))
        return [g.full() if isinstance(g, ShardedTensor) else g.detach() for g in gradients.values()]

    start = small_model()

    def body(comm: Comm) -> list[Tensor]:
        model = copy.deepcopy(start)
        shard_module(model, ModelPlan(Mesh.of(tp=2), {"0.*": "tp: S(0)"}, input_plan="R", output_plan="plain"))
        return run(model)

    for found in run_local(body, 2):
        torch.testing.assert_close(found, run(start))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.end = nn.Embedding(9, 4), nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=ids.shape[1])
        made: Tensor = self.end(padded).square().mean()
        return made


@pytest.mark.filterwarnings("ignore:packed sequences")
@pytest.mark.parametrize(
    ("axis", "patterns"), [("dp", {}), ("fsdp", {"table.weight": "S(0)"}), ("tp", {"table.*": "S(0)"})]
)
def test_packed_sequences_of_split_batches(axis: str, patterns: dict[str, str]) -> None:
    ids = torch.arange(12).reshape(4, 3) % 9
    lengths = torch.tensor([1, 3, 2, 3])

    def run(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
        loss = model(*inputs)
        loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters())]
        return [t.full() if isinstance(t, ShardedTensor) else t for t in found]

    torch.manual_seed(0)
    whole = Packed()

    def body(comm: Comm) -> list[Tensor]:
        model, rows = copy.deepcopy(whole), slice(None) if axis == "tp" else slice(2 * comm.rank, 2 * comm.rank + 2)
        placed = {name: f"{axis}: {text}" for name, text in patterns.items()}
        inputs = "R" if axis == "tp" else f"{axis}: S(0)"
        shard_module(model, ModelPlan(Mesh((axis,), (0, 1)), placed, input_plan=inputs, output_plan="plain"))
        return run(model, ids[rows], lengths[rows])

    results, expected = run_local(body, 2), run(whole, ids, lengths)
    for found in results:
        torch.testing.assert_close(found, expected)


class Boxes(nn.Module):
    """A loss of as many boxes in each row as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        found = self.head(x)
        losses = [
            (row - item["boxes"]).square().sum() * item["weight"] for row, item in zip(found, labels, strict=True)
        ]
        made: Tensor = torch.stack(losses).mean()
        return made


@pytest.mark.parametrize("axes", [("dp",), ("dp", "tp")])
def test_a_list_with_a_dict_for_each_row_has_those_of_all_parts(axes: tuple[str, ...]) -> None:
    x = torch.arange(12.0).reshape(4, 3) / 10
    labels = [{"boxes": torch.full((i + 1, 2), 0.5 * i), "weight": torch.tensor(i + 1.0)} for i in range(4)]
    torch.manual_seed(0)
    start, mesh = Boxes(), Mesh.of(**dict.fromkeys(axes, 2))
    dense = copy.deepcopy(start)
    expected = dense(x, labels=labels)
    expected.backward()

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        model = copy.deepcopy(start)
        shard_module(model, ModelPlan(mesh, {}, input_plan="dp: S(0)", output_plan="plain"))
        part = mesh.coordinates(comm.rank)["dp"]
        loss = model(x[2 * part : 2 * part + 2], labels=labels[2 * part : 2 * part + 2])
        loss.backward()
        gradient = model.head.weight.grad
        assert isinstance(gradient, ShardedTensor)
        return loss.detach(), gradient.full()

    for loss, gradient in run_local(body, mesh.size):
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradient, dense.head.weight.grad)
