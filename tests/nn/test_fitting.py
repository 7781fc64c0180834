"""Does a plan that fits neither model nor ranks say so on every rank, and leave the model as it was?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.comm import Comm, DisagreementError, run_local
from shardwise.geometry import Box, ChunkSpec, EnumerableSpec, Mesh, Piece
from shardwise.nn import (
    BalancedPlanner,
    ModelPlan,
    PlanError,
    Sharder,
    ShardingPlan,
    check_plan,
    describe_plan,
    shard_module,
    shard_parameter,
)
from shardwise.tensor import ShardedTensor

Plan = ShardingPlan | ModelPlan


class Tied(nn.Module):
    """A table whose weight is that of a linear layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.tokens(ids))
        return found


class Gives(Sharder):
    """A sharder that returns what it is told."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def shard(self, module: nn.Module) -> nn.Module:
        made: nn.Module = self.made
        return made


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def refused(plan_of: Callable[[Comm], Plan], text: str, error: type[Exception] = PlanError, **given: Any) -> None:
    """Shard a model on two ranks: both refuse, and hold it whole."""

    def body(comm: Comm) -> None:
        mine = net()
        with pytest.raises(error, match=text):
            shard_module(mine, plan_of(comm), **given)
        assert not any(isinstance(p, ShardedTensor) for p in mine.parameters())

    run_local(body, 2)


BY_NAMES: list[tuple[ShardingPlan, str]] = [
    (ShardingPlan({"0.weight": ChunkSpec(0, 2), "1.weight": ChunkSpec(2, 2)}), r"1\.weight of shape \(4, 4\): .*dim=2"),
    (
        ShardingPlan({"0.weight": ChunkSpec(0, 2), "1.weight": ChunkSpec(0, 3)}),
        r"1\.weight: its spec names rank 2, not",
    ),
    (
        ShardingPlan({"0.bias": EnumerableSpec([Piece(Box((0,), (3,)), 0)]), "1.bias": ChunkSpec(1, 2)}),
        r"(?s)0\.bias of shape \(4,\).*1\.bias of shape \(4,\)",
    ),
]


@pytest.mark.parametrize(("plan", "text"), BY_NAMES, ids=["dim", "rank", "two"])
def test_specs_that_do_not_fit_are_named_before_anything_changes(plan: ShardingPlan, text: str) -> None:
    refused(lambda comm: plan, text)


def test_a_plan_is_checked_without_ranks() -> None:
    check_plan(net(), ShardingPlan({"0.weight": ChunkSpec(0, ranks=64)}))
    with pytest.raises(PlanError, match=r"0\.weight of shape \(4, 4\)"):
        check_plan(net(), ShardingPlan({"0.weight": ChunkSpec(5, ranks=64)}))


def test_a_mesh_that_is_not_the_group_is_named() -> None:
    text = "the mesh tp=4 has ranks 0-3, and the process group has ranks 0, 1; start that many processes"
    refused(lambda comm: ModelPlan(Mesh.of(tp=4), {"*.weight": "S(0)"}), text)
    text = "the mesh tp=1 has rank 0, and the process group has ranks 0, 1; with an input_plan all of them take part"
    refused(lambda comm: ModelPlan(Mesh.of(tp=1), {}, input_plan="replicated"), text)


def test_tables_may_lie_on_some_of_the_ranks_where_each_brings_its_own_batch() -> None:
    whole = nn.Embedding(6, 2)
    copies = [copy.deepcopy(whole) for _ in range(2)]

    def body(comm: Comm) -> Tensor:
        shard_module(copies[comm.rank], ModelPlan(Mesh(("x",), [1]), {"weight": "S(0)"}))
        found: Tensor = copies[comm.rank](torch.tensor([comm.rank, 5]))
        return found.detach()

    for rank, found in enumerate(run_local(body, 2)):
        torch.testing.assert_close(found, whole(torch.tensor([rank, 5])).detach())


DIFFERENT: list[tuple[Callable[[Comm], Plan], str]] = [
    (
        lambda c: ModelPlan(Mesh.of(x=2), {"0.weight": f"S({c.rank})"}),
        r"0\.weight is '\[4,4\] on x=2: S\(0\)' on rank 0",
    ),
    (lambda c: ModelPlan(Mesh.of(x=2), {}, input_plan=("replicated", "S(0)")[c.rank]), "input_plan is 'replicated' on"),
    (lambda c: ShardingPlan({f"{c.rank}.weight": ChunkSpec(0, 2)}), r"0\.weight is .* on rank 0 and .* on rank 1"),
    (lambda c: ShardingPlan({}, return_local_tensor=["0"][c.rank :]), r"return_local_tensor is \['0'\] on rank 0"),
]


@pytest.mark.parametrize(("plan_of", "text"), DIFFERENT, ids=["spec", "inputs", "name", "outputs"])
def test_plans_that_differ_between_ranks_are_refused_on_all(plan_of: Callable[[Comm], Plan], text: str) -> None:
    refused(plan_of, text, DisagreementError)


def test_what_is_wrong_on_one_rank_is_raised_on_all() -> None:
    def body(comm: Comm) -> str:
        rule: Any = ChunkSpec(0, 2) if comm.rank else "rows"
        with pytest.raises((TypeError, DisagreementError)) as caught:
            shard_module(net(), ShardingPlan({"0.weight": rule}))
        return f"{type(caught.value).__name__}: {caught.value}"

    text = "Only `ShardingSpec` and `Sharder` are supported to shard '0.weight', got str"
    assert run_local(body, 2) == [f"TypeError: {text}", f"DisagreementError: 'shard_module': rank 0: {text}"]


def test_sources_and_plans_of_other_kinds_are_refused() -> None:
    refused(lambda c: ShardingPlan({}), "src_rank=2 is not in the group: it has ranks 0 to 1", ValueError, src_rank=2)
    other: Any = {"0.weight": ChunkSpec(0, 2)}
    refused(lambda c: other, "shard_module takes a ShardingPlan or a ModelPlan, such as", TypeError)


def test_a_model_is_not_sharded_twice() -> None:
    layer = nn.Linear(2, 2)
    shard_module(layer, ShardingPlan({"weight": ChunkSpec(0, 1)}))
    with pytest.raises(PlanError, match=r"weight of shape \(2, 2\): it is already sharded"):
        shard_module(layer, ShardingPlan({"weight": ChunkSpec(0, 1)}))
    with pytest.raises(TypeError, match=r"Linear\.weight: shard takes a whole tensor, got ShardedTensor"):
        shard_parameter(layer, "weight", ChunkSpec(0, 1))


def test_sharders_do_not_nest_and_return_modules() -> None:
    nested = nn.Sequential(nn.Sequential(nn.ReLU()))
    with pytest.raises(RuntimeError, match=r"trying to shard a module: 0\.0, but there's already a Sharder entry for"):
        shard_module(nested, ShardingPlan({"0": Gives(nn.Tanh()), "0.0": Gives(nn.Tanh())}))
    with pytest.raises(TypeError, match=r"Gives\.shard\(\) returns the module to put at '0', got NoneType"):
        shard_module(nested, ShardingPlan({"0": Gives(None)}))
    assert isinstance(nested[0], nn.Sequential)


# Parameters with several names


@pytest.mark.parametrize("names", [["tokens"], ["head"], ["tokens", "head"]], ids=" ".join)
def test_a_shared_parameter_stays_one(names: list[str]) -> None:
    torch.manual_seed(0)
    whole = Tied().double()
    copies = [copy.deepcopy(whole) for _ in range(2)]

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = copies[comm.rank]
        shard_module(mine, ShardingPlan({f"{name}.weight": ChunkSpec(0, 2) for name in names}))
        assert mine.tokens.weight is mine.head.weight
        result = mine(torch.tensor([comm.rank, 7]))
        result.square().sum().backward()
        gradient = mine.tokens.weight.grad
        assert isinstance(gradient, ShardedTensor)
        return result.detach(), gradient.full()

    results = [whole(torch.tensor([rank, 7])) for rank in range(2)]
    torch.stack([r.square().sum() for r in results]).sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    for rank, (found, gradient) in enumerate(run_local(body, 2)):
        torch.testing.assert_close(found, results[rank].detach())
        torch.testing.assert_close(gradient, whole.tokens.weight.grad)


def test_a_shared_parameter_has_one_spec() -> None:
    plan = ShardingPlan({"tokens.weight": ChunkSpec(0, ranks=2), "head.weight": ChunkSpec(1, ranks=2)})
    with pytest.raises(PlanError, match=r"tokens\.weight and head\.weight are one parameter, and their specs differ"):
        check_plan(Tied(), plan)


def test_planners_and_tables_see_every_use_of_a_shared_parameter() -> None:
    assert list(BalancedPlanner(2).build_plan(Tied()).plan) == ["tokens.weight"]
    plan = ModelPlan(Mesh.of(tp=2), {"tokens.weight": "S(0)"}, input_plan="replicated")
    # Rows of 4 floats are summed in the forward pass of the table and in the backward pass of the layer.
    assert describe_plan(plan, Tied()).row_bytes == 2 * 4 * 4
