"""Inputs that a plan cuts along the sequence: the model computes what the dense one computes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Comm, DisagreementError, LayoutError, Mesh, ModelPlan, explain, hf, run_local, shard_module
from shardwise.nn import PlanError, load_plan, save_plan
from tests.nn.test_sequence_parallel import _batch, _make_model, _whole_gradients


def _train(start: nn.Module, plan: ModelPlan, comm: Comm, ids: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    model = shard_module(copy.deepcopy(start), plan)
    part = plan.mesh.coordinates(comm.rank).get("dp")
    rows = slice(None) if part is None else slice(part, part + 1)
    loss = model(ids[rows], targets[rows])
    loss.backward()
    return loss.detach(), _whole_gradients(model)


@pytest.mark.parametrize("length", [8, 7, 3, 1])
@pytest.mark.parametrize("mesh", [Mesh.of(cp=2), Mesh.of(cp=4), Mesh.of(dp=2, cp=2)], ids=str)
def test_losses_and_gradients_are_those_of_the_dense_model(mesh: Mesh, length: int) -> None:
    start, (ids, targets) = _make_model(), _batch(2, length)
    dense = copy.deepcopy(start)
    loss = dense(ids, targets)
    loss.backward()
    inputs = ", ".join(["dp: S(0)"] * ("dp" in mesh.axes) + ["cp: S(1)"])
    plan = ModelPlan(mesh, {}, input_plan=inputs, output_plan="plain")
    for found, gradients in run_local(lambda comm: _train(start, plan, comm, ids, targets), mesh.size):
        assert_close(found, loss.detach())
        assert_close(gradients, _whole_gradients(dense))


class Seen(nn.Module):
    """Returns where its inputs are."""

    def forward(self, *given: Any, mask: Any = None) -> list[str]:
        return [str(t.sharding.spec.placements) for t in (*given, mask) if t is not None]


def test_tokens_and_their_embeddings_are_cut_and_other_tensors_stay_whole() -> None:
    def body(comm: Comm) -> tuple[list[str], list[int]]:
        model = shard_module(Seen(), ModelPlan(Mesh.of(dp=2, cp=2), {}, input_plan="dp: S(0), cp: S(1)"))
        with explain() as log:
            found = model(*(torch.zeros(shape) for shape in [(2, 4), (2, 4, 3), (2, 1), (4,), (2, 1, 4, 4)]))
        return found, [log.moved_bytes]

    cut, whole = "(Shard(0), Shard(1))", "(Shard(0), Replicate())"
    assert run_local(body, 4) == [([cut, cut, whole, whole, whole], [0])] * 4


def test_arguments_have_placements_by_their_names() -> None:
    plan = ModelPlan(Mesh.of(cp=2), {}, input_plan={"mask": "cp: S(2)", "**": "cp: S(1)"})

    def body(comm: Comm) -> list[str]:
        found: list[str] = shard_module(Seen(), plan)(torch.zeros(1, 4), mask=torch.zeros(1, 1, 4, 4))
        with pytest.raises(LayoutError, match=r"inputs: cp: S\(2\) splits dim 2, .* names has the shape \(1, 4\)"):
            shard_module(Seen(), plan)(mask=torch.zeros(1, 4))
        return found

    assert run_local(body, 2) == [["(Shard(1),)", "(Shard(2),)"]] * 2


@pytest.mark.parametrize("cut", ["cp: S(1)", "cp: S(1) zigzag"])
@pytest.mark.parametrize("kind", ["ulysses", "ring", "gather"])
def test_a_plan_says_how_attention_over_a_split_sequence_is_computed(kind: str, cut: str) -> None:
    start, (ids, targets) = _make_model(), _batch(2, 12)
    dense = copy.deepcopy(start)
    loss = dense(ids, targets)
    loss.backward()
    plan = ModelPlan(Mesh.of(cp=2), {}, input_plan=cut, output_plan="plain", attention=kind)

    def body(comm: Comm) -> tuple[tuple[Tensor, Any], str]:
        with explain() as log:
            found = _train(start, plan, comm, ids, targets)
        return found, next(
            e.name for e in log.entries if e.name.startswith("aten.scaled_dot_product") and "(" in e.name
        )

    for (found, gradients), name in run_local(body, 2):
        assert name.endswith(f"({kind})")
        assert_close(found, loss.detach())
        assert_close(gradients, _whole_gradients(dense))


def test_a_kind_of_attention_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        PlanError, match="attention is 'ulysses', 'ring', 'gather' or None, in a plan with an input_plan"
    ):
        ModelPlan(Mesh.of(cp=2), {}, input_plan="cp: S(1)", attention="rings")


def test_ranks_that_pass_other_wholes_are_refused_on_every_rank() -> None:
    def body(comm: Comm) -> None:
        model = shard_module(Seen(), ModelPlan(Mesh.of(cp=2), {}, input_plan="cp: S(1)"))
        with pytest.raises(DisagreementError, match="the ranks pass different tensors to a model"):
            model(torch.zeros(1, 4 + comm.rank))

    run_local(body, 2)


@pytest.mark.parametrize("inputs", ["cp: S(-1)", "cp: S(1) sizes(3,1)", "cp: P", {"ids": "cp: S(1) block(2)"}])
def test_what_is_no_cut_of_inputs_is_refused_when_the_plan_is_made(inputs: Any) -> None:
    with pytest.raises(PlanError, match="or cut along another dim, as in 'cp: S\\(1\\)'"):
        ModelPlan(Mesh.of(cp=2), {}, input_plan=inputs)


def test_a_file_of_a_plan_keeps_inputs_by_name(tmp_path: Any) -> None:
    plan = ModelPlan(Mesh.of(cp=2), {}, input_plan={"mask": "replicated", "**": "cp: S(1)"})
    save_plan(plan, tmp_path / "plan.toml")
    assert load_plan(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(cp=2, tp=2), Mesh.of(tp=2, cp=2)], ids=str)
def test_a_made_plan_with_sequence_parallelism_moves_the_bytes_of_all_reduces(mesh: Mesh) -> None:
    start, (ids, targets) = _make_model(blocks=2), _batch(2, 16)
    dense = copy.deepcopy(start)
    loss = dense(ids, targets)
    loss.backward()
    plans = [
        hf.plan(start, mesh, {"ids": ids, "targets": targets}, sequence_parallel=sequence) for sequence in (False, True)
    ]

    def train(comm: Comm, plan: ModelPlan) -> tuple[Tensor, Any, int, int]:
        model = shard_module(copy.deepcopy(start), plan)
        held: list[int] = []
        model.norm.register_forward_pre_hook(lambda _m, args: held.append(args[0].local_parts[0].numel()))
        with explain() as log:
            made = model(ids, targets)
        made.backward()
        moved = sum(e.moved_bytes for e in log.entries if e.name not in ("nll_loss", "aten.div.Tensor"))
        return made.detach(), _whole_gradients(model), moved, held[0]

    for (one, grads_one, bytes_one, held_one), (two, grads_two, bytes_two, held_two) in run_local(
        lambda comm: [train(comm, plan) for plan in plans], mesh.size
    ):
        assert_close([one, two], [loss.detach()] * 2)
        assert_close([grads_one, grads_two], [_whole_gradients(dense)] * 2)
        assert bytes_two == bytes_one > 0
        assert held_one == 2 * held_two


def test_a_plan_without_the_axis_has_no_sequence_parallelism() -> None:
    with pytest.raises(PlanError, match="splits activations along 'tp', and dp=2 has no such axis"):
        hf.plan(nn.Linear(2, 2), Mesh.of(dp=2), sequence_parallel=True)
