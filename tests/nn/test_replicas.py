"""Are replicas compared: inputs that every rank is to pass alike, and tensors that several ranks hold?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise
from shardwise.comm import Comm, DisagreementError, run_local
from shardwise.geometry import Mesh
from shardwise.nn import ModelPlan, shard_module


def sharded(mesh: Mesh, input_plan: str, patterns: dict[str, str] | None = None) -> nn.Module:
    return shard_module(nn.Linear(3, 2), ModelPlan(mesh, patterns or {}, input_plan=input_plan, output_plan="plain"))


TP, DP_TP = Mesh.of(tp=2), Mesh.of(dp=2, tp=2)
BATCHES: dict[str, Callable[[int], Tensor]] = {
    "rows": lambda rank: torch.ones(2 + rank, 3),
    "dims": lambda rank: torch.ones(*(1,) * rank, 2, 3),
    "dtypes": lambda rank: torch.ones(2, 3, dtype=torch.float64 if rank else torch.float32),
}


@pytest.mark.parametrize("patterns", [{}, {"weight": "S(0)"}])
@pytest.mark.parametrize("kind", BATCHES)
def test_replicated_inputs_of_other_shapes_are_refused_on_every_rank(kind: str, patterns: dict[str, str]) -> None:
    def body(comm: Comm) -> None:
        model = sharded(TP, "replicated", patterns)
        text = r"'inputs': the ranks pass different tensors to a model whose plan reads them as replicated: tensor 0 is"
        with pytest.raises(DisagreementError, match=text):
            model(BATCHES[kind](comm.rank))
        assert model(torch.ones(2, 3)).shape == (2, 2)  # the model is still of use

    run_local(body, 2)


def test_values_of_replicated_inputs_are_compared_on_request() -> None:
    def body(comm: Comm) -> None:
        model = sharded(TP, "replicated")
        own = torch.full((2, 3), float(comm.rank))
        model(own)
        with shardwise.check_replicas(), pytest.raises(DisagreementError, match="tensor 0 of the inputs differs"):
            model(own)
        with shardwise.check_replicas(model):
            model(torch.ones(2, 3)).sum().backward()

    run_local(body, 2)


def test_batches_are_compared_along_the_axes_that_do_not_split_them() -> None:
    def body(comm: Comm) -> None:
        model = sharded(DP_TP, "dp: S(0)")
        with shardwise.check_replicas():
            model(torch.full((2, 3), float(comm.rank // 2)))
            with pytest.raises(DisagreementError, match=r"tensor 0 of the inputs differs between ranks 2, 3"):
                model(torch.full((2, 3), float(max(comm.rank, 1))))

    run_local(body, 4)


def test_parameters_gradients_and_states_that_drifted_apart_are_named() -> None:
    def body(comm: Comm) -> None:
        model = sharded(TP, "replicated", {"weight": "S(0)"})
        optimizer = optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        shardwise.check_replicas(model, optimizer)
        bias = model.bias
        assert isinstance(bias, shardwise.ShardedTensor) and isinstance(bias.grad, shardwise.ShardedTensor)
        with torch.no_grad():
            bias.grad.local_tensor().add_(comm.rank)
        with pytest.raises(DisagreementError, match="check_replicas: the gradient of bias differs between ranks 0, 1"):
            shardwise.check_replicas(model, optimizer)
        with pytest.raises(DisagreementError, match="the tensor differs"), shardwise.check_replicas(bias):
            bias.local_tensor().data.add_(comm.rank)

    run_local(body, 2)


def test_parts_and_pending_sums_have_no_replicas() -> None:
    def body(comm: Comm) -> None:
        model = sharded(TP, "replicated", {"weight": "S(0)"})
        weight = model.weight
        assert isinstance(weight, shardwise.ShardedTensor)
        weight.local_tensor().data.fill_(comm.rank)
        shardwise.check_replicas({"weight": weight, "sum": weight.sum()}, [weight])

    run_local(body, 2)


class Masked(nn.Module):
    """The sum of the weights of each row's tokens, without those that a mask leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5.0))

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        found = self.weight[ids]
        return (found if attention_mask is None else found * attention_mask).sum(-1)


def test_ragged_parts_of_a_batch_are_filled_up_to_the_longest() -> None:
    pads = {"ids": 4, "attention_mask": 0}

    def body(comm: Comm) -> list[float]:
        plan = ModelPlan(Mesh.of(dp=2), {}, input_plan="dp: S(0)", output_plan="plain", pad_inputs=pads)
        model = shard_module(Masked(), plan)
        ids = torch.full((comm.rank + 1, 2 + comm.rank), 3)
        rows: list[float] = model(ids=ids, attention_mask=torch.ones_like(ids)).tolist()
        plain = shard_module(Masked(), ModelPlan(Mesh.of(dp=2), {}, input_plan="dp: S(0)", output_plan="plain"))
        for net, arguments in ((plain, {"ids": ids}), (model, {"mask": ids})):
            with pytest.raises((DisagreementError, TypeError), match=r"name the arguments .* pad_inputs|mask"):
                net(**arguments)
        return rows

    assert run_local(body, 2) == [[6.0], [9.0, 9.0]]


def test_plans_with_numbers_that_fill_up_are_kept_in_files(tmp_path: Path) -> None:
    plan = ModelPlan(TP, {}, input_plan="tp: S(0)", pad_inputs={"input_ids": 0, "scores": -0.5})
    for kind in ("toml", "json"):
        shardwise.save_plan(plan, tmp_path / f"plan.{kind}")
        assert shardwise.load_plan(tmp_path / f"plan.{kind}") == plan
    with pytest.raises(shardwise.PlanError, match="pad_inputs maps names of arguments to numbers, got 'ids': 'zero'"):
        ModelPlan(TP, {}, pad_inputs={"ids": "zero"})  # type: ignore[dict-item]
