"""Plans that shard a model, and the optimizer over what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm import Comm, run_local
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Mesh,
    MeshSpec,
    Piece,
    Replicate,
    Shard,
    ShardingSpec,
)
from shardwise.nn import (
    ShardedOptimizer,
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    named_params_with_sharded_tensor,
    shard_module,
    shard_parameter,
)
from shardwise.tensor import ShardedTensor, shard

ROWS = ChunkSpec(0, ranks=2)
UNEVEN = EnumerableSpec([Piece(Box((0, 0), (1, 4)), 1), Piece(Box((1, 0), (1, 4)), 0), Piece(Box((2, 0), (1, 4)), 1)])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def sharded(value: object) -> ShardedTensor:
    assert isinstance(value, ShardedTensor)
    return value


# Parameters and modules


class LastRowFirst(ShardingSpec):
    """A user's own spec: rank 0 holds the last row, rank 1 all others."""

    def pieces(self, shape: Sequence[int]) -> list[Piece]:
        rows, *rest = shape
        zeros = (0,) * len(rest)
        return [
            Piece(Box((rows - 1, *zeros), (1, *rest)), 0),
            Piece(Box((0, *zeros), (rows - 1, *rest)), 1),
        ]


SPECS: dict[str, ShardingSpec] = {
    "rows": ROWS,
    "columns": ChunkSpec(1, (1, 0)),
    "uneven": UNEVEN,
    "grid": GridSpec((3, 2), [[0, 1], [1, 0], [0, 0]]),
    "mesh": MeshSpec(Mesh.of(x=2), (Shard(1, sizes=(4, 0)),)),
    "cyclic": MeshSpec(Mesh.of(x=2), (Shard(0, block=1),)),
    "groups": MeshSpec(Mesh.of(x=2), (Shard(1, groups=(2, 2)),)),
    "everywhere": MeshSpec(Mesh.of(x=2), (Replicate(),)),
    "torch's": ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]),
    "a user's": LastRowFirst(),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_parameter_is_sharded_with_the_values_of_the_source(spec: ShardingSpec) -> None:
    whole = torch.arange(12.0).reshape(3, 4)

    def body(comm: Comm) -> tuple[bool, bool, bool]:
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.weight.copy_(whole if comm.rank == 1 else torch.zeros(3, 4))
        shard_parameter(layer, "weight", spec, src_rank=1)
        weight = sharded(layer.weight)
        named = [name for name, _ in layer.named_parameters()]
        return torch.equal(weight.full(), whole), weight.requires_grad and weight.is_leaf, named == ["weight", "bias"]

    assert run_local(body, 2) == [(True, True, True)] * 2


def test_frozen_parameters_stay_frozen() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    shard_parameter(layer, "weight", ChunkSpec(0, 1))
    assert not layer.weight.requires_grad


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("weights", AttributeError, "Linear has no attribute `weights`"),
        ("in_features", ValueError, "Expected Linear.in_features to be a Tensor, but found int"),
        ("weight", ValueError, "param: weight is not a contiguous Tensor"),
    ],
)
def test_what_cannot_be_sharded_is_refused(name: str, error: type[Exception], text: str) -> None:
    layer = nn.Linear(2, 3)
    layer.weight = nn.Parameter(torch.zeros(2, 3).t())
    with pytest.raises(error, match=text):
        shard_parameter(layer, name, ChunkSpec(0, 1))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Wrap(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return Wrapped(module)


def test_a_sharder_takes_the_place_of_its_module() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    shard_module(net, ShardingPlan({"0.0": Wrap()}))
    inner = net[0]
    assert isinstance(inner, nn.Sequential) and isinstance(inner[0], Wrapped)
    assert not hasattr(inner, "mod_name")


def test_outputs_are_laid_out_anew_and_handed_back() -> None:
    class Source(nn.Module):
        def forward(self, spec: ShardingSpec) -> ShardedTensor:
            return shard(torch.arange(4.0).reshape(2, 2), spec)

    def body(comm: Comm) -> tuple[list[float], list[float]]:
        columns, rows = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]), ChunkSpec(0, 2)
        net = nn.Sequential(Source())
        shard_module(net, ShardingPlan({}, output_plan={"0": columns}))
        laid_out = net(rows)
        shard_module(net, ShardingPlan({}, return_local_tensor=[""]))
        return laid_out.local_tensor().flatten().tolist(), net(rows).tolist()

    assert run_local(body, 2) == [([0.0, 2.0], [0.0, 2.0]), ([1.0, 3.0], [1.0, 3.0])]


NO_SPEC: Any = "rows"
WRONG_PLANS: list[tuple[ShardingPlan, type[Exception], str]] = [
    (
        ShardingPlan({"0.weight": NO_SPEC}),
        TypeError,
        "Only `ShardingSpec` and `Sharder` are supported to shard '0.weight'",
    ),
    (ShardingPlan({"": Wrap()}), KeyError, "Module path must not be empty"),
    (ShardingPlan({"0": Wrap(), "0.weight": ROWS}), RuntimeError, "ShardingPlan is in-valid"),
    (ShardingPlan({"5.weight": ROWS}), AttributeError, "5"),
    (ShardingPlan({"0.weights": ROWS}), AttributeError, "no attribute `weights`"),
    (ShardingPlan({}, {"0": NO_SPEC}), TypeError, "Only `ShardingSpec` is supported as output_plan for '0'"),
    (ShardingPlan({}, return_local_tensor=["9"]), AttributeError, "9"),
]


@pytest.mark.parametrize(("plan", "error", "text"), WRONG_PLANS)
def test_a_wrong_plan_changes_nothing(plan: ShardingPlan, error: type[Exception], text: str) -> None:
    net = model()
    plan.plan = {"2.weight": ChunkSpec(0, 1), **plan.plan}
    with pytest.raises(error, match=text):
        shard_module(net, plan)
    assert not any(isinstance(p, ShardedTensor) for p in net.parameters())


def test_names_that_only_begin_alike_do_not_conflict() -> None:
    net = nn.ModuleDict({"fc1": nn.Linear(1, 1), "fc10": nn.Linear(1, 1)})
    shard_module(net, ShardingPlan({"fc1": Wrap(), "fc10.weight": ChunkSpec(0, 1)}))
    assert isinstance(net["fc1"], Wrapped) and isinstance(net["fc10"].weight, ShardedTensor)


def test_a_planner_makes_plans() -> None:
    class AllWeights(ShardingPlanner):
        def build_plan(self, module: nn.Module) -> ShardingPlan:
            return ShardingPlan({n: ChunkSpec(0, 1) for n, _ in module.named_parameters() if n.endswith("weight")})

    net = model()
    shard_module(net, AllWeights().build_plan(net))
    assert [n for n, p in net.named_parameters() if isinstance(p, ShardedTensor)] == ["0.weight", "2.weight"]


def test_attributes_that_are_sharded_tensors_are_named() -> None:
    net = model()
    net.scale = shard(torch.ones(2), ChunkSpec(0, 1))
    net[0].scale = net.scale
    names = [name for name, _ in named_params_with_sharded_tensor(net, prefix="m")]
    assert names == ["m.scale", "m.0.weight", "m.0.bias", "m.2.weight", "m.2.bias"]
    assert [n for n, _ in named_params_with_sharded_tensor(net, recurse=False)] == ["scale"]


# Optimizers


def params(comm: Comm, spec: ShardingSpec) -> dict[str, torch.Tensor]:
    """A sharded and a plain parameter with gradients that are functions of their values."""
    whole = torch.arange(12.0).reshape(3, 4)
    weight = shard(whole, spec).requires_grad_()
    bias = nn.Parameter(torch.ones(2))
    for tensor in (*weight.local_tensors(), bias):
        tensor.grad = tensor.detach() + 1
    return {"weight": weight, "bias": bias}


def stepped(named: dict[str, torch.Tensor], times: int, **options: Any) -> ShardedOptimizer:
    optimizer = ShardedOptimizer(named, torch.optim.Adam, lr=0.1, **options)
    for _ in range(times):
        optimizer.step()
    return optimizer


def dense(times: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and its first moment after some steps of a plain optimizer."""
    weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
    weight.grad = weight.detach() + 1
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(times):
        optimizer.step()
    return weight.detach(), optimizer.state[weight]["exp_avg"]


@pytest.mark.parametrize("spec", [ROWS, UNEVEN, ChunkSpec(1, (1,))], ids=["rows", "uneven", "one rank"])
@pytest.mark.parametrize("other", [ROWS, UNEVEN, ChunkSpec(1, (0, 1))], ids=["rows", "uneven", "columns"])
def test_state_is_saved_by_name_and_loaded_into_any_layout(spec: ShardingSpec, other: ShardingSpec) -> None:
    def body(comm: Comm) -> list[bool]:
        named = params(comm, spec)
        state = stepped(named, 2).state_dict()
        again = params(comm, other)
        with torch.no_grad():
            moved = sharded(named["weight"]).redistribute(other)
            for mine, given in zip(sharded(again["weight"]).local_tensors(), moved.local_tensors(), strict=True):
                mine.copy_(given)
        optimizer = ShardedOptimizer(again, torch.optim.Adam, lr=9.0)
        optimizer.load_state_dict(state)
        optimizer.step()
        return [
            sorted(state["state"]) == ["bias", "weight"],
            state["param_groups"][0]["params"] == ["weight", "bias"],
            torch.allclose(sharded(state["state"]["weight"]["exp_avg"]).full(), dense(2)[1]),
            optimizer.param_groups[0]["lr"] == 0.1,
            torch.allclose(sharded(again["weight"]).full(), dense(3)[0]),
        ]

    assert run_local(body, 2) == [[True] * 5] * 2


def test_groups_are_added_by_name_and_schedulers_reach_them() -> None:
    weight, bias = nn.Parameter(torch.ones(2)), shard(torch.ones(2), ChunkSpec(0, 1)).requires_grad_()
    optimizer = ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=1.0)
    optimizer.add_param_group({"params": {"bias": bias}, "lr": 0.5})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    weight.grad = torch.ones(2)
    bias.local_tensor().grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    assert (weight.tolist(), bias.full().tolist()) == ([0.0, 0.0], [0.5, 0.5])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.05])
    assert [group["params"] for group in optimizer.state_dict()["param_groups"]] == [["weight"], ["bias"]]
    optimizer.zero_grad()
    assert [tensor.grad is None for tensor in (weight, bias)] == [True, True]
    with pytest.raises(ValueError, match=r"the parameters \['bias'\] are in another group already"):
        optimizer.add_param_group({"params": {"bias": bias}})
    with pytest.raises(ValueError, match="maps names to parameters"):
        optimizer.add_param_group({"params": [weight]})


class Codes(torch.Tensor):
    """A state of few bits, as torchao's are: it is copied by `to`, and has no `clone`."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]  # private
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            raise NotImplementedError(func)
        return Codes(args[0].codes.clone())


def test_states_of_few_bits_are_saved_and_loaded() -> None:
    weight = shard(torch.ones(2), ChunkSpec(0, 1)).requires_grad_()
    weight.local_tensor().grad = torch.ones(2)
    optimizer = ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=1.0, momentum=0.5)
    optimizer.step()
    optimizer.state[weight.local_tensor()]["momentum_buffer"] = Codes(torch.tensor([3, 4], dtype=torch.uint8))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[weight.local_tensor()]["momentum_buffer"].codes.tolist() == [3, 4]


def test_state_of_other_parameters_is_refused() -> None:
    optimizer = ShardedOptimizer({"weight": nn.Parameter(torch.ones(2))}, torch.optim.SGD, lr=1.0)
    other = ShardedOptimizer({"bias": nn.Parameter(torch.ones(2))}, torch.optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match=r"the state has the parameter groups \[\['bias'\]\], this optimizer has"):
        optimizer.load_state_dict(other.state_dict())


def test_whole_tensors_are_not_taken_for_local_state() -> None:
    weight = shard(torch.ones(2), ChunkSpec(0, 1)).requires_grad_()
    weight.local_tensor().grad = torch.ones(2)
    optimizer = ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=1.0, momentum=0.5)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"]["weight"]["momentum_buffer"] = torch.ones(2)
    with pytest.raises(ValueError, match="state 'momentum_buffer' of 'weight' is a whole tensor"):
        optimizer.load_state_dict(state)


def test_a_rank_without_any_part_takes_part() -> None:
    def body(comm: Comm) -> tuple[list[float], list[str]]:
        weight = shard(torch.ones(2, 2), EnumerableSpec([Piece(Box((0, 0), (2, 2)), 1)])).requires_grad_()
        optimizer = ShardedOptimizer([("weight", weight)], torch.optim.Adam, lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        optimizer.step()
        return weight.detach().full().flatten().tolist(), sorted(state["state"]["weight"])

    whole = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.Adam([whole], lr=0.5)
    for step in range(3):
        if step < 2:
            optimizer.zero_grad()
            whole.square().sum().backward()
        optimizer.step()
    expected = (whole.detach().flatten().tolist(), ["exp_avg", "exp_avg_sq", "step"])
    for values, names in run_local(body, 2):
        assert values == pytest.approx(expected[0]) and names == expected[1]


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_optimizers_that_look_at_whole_parameters_do_not_get_parts(kind: type[torch.optim.Optimizer]) -> None:
    def body(comm: Comm) -> None:
        cut = shard(torch.ones(2, 2), ROWS).requires_grad_()
        with pytest.raises(ValueError, match=f"{kind.__name__} needs whole parameters, .* such as 'cut'; pass"):
            ShardedOptimizer({"cut": cut}, kind, lr=0.1)
        everywhere = shard(torch.ones(2, 2), MeshSpec(Mesh.of(x=2), (Replicate(),))).requires_grad_()
        optimizer = ShardedOptimizer({"everywhere": everywhere}, kind, lr=0.1)
        with pytest.raises(ValueError, match="needs whole parameters"):
            optimizer.add_param_group({"params": {"cut": cut}})

    run_local(body, 2)


@pytest.mark.parametrize("given", [{}, [], [torch.ones(1)], {0: torch.ones(1)}, torch.ones(2)])
def test_parameters_are_given_by_name(given: Any) -> None:
    with pytest.raises(ValueError, match="parameters are given by name, such as dict"):
        ShardedOptimizer(given, torch.optim.SGD, lr=0.1)


def test_replicate_is_another_word_for_replicated_inputs() -> None:
    plan = shardwise.ModelPlan(Mesh.of(tp=2), {"*": "R"}, input_plan="replicate")
    assert plan == shardwise.ModelPlan(Mesh.of(tp=2), {"*": "R"}, input_plan="replicated")
    assert plan.input_placements == (Replicate(),)
