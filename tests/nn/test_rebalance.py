"""Experts that move between steps: training is that of the dense model, and as few bytes as possible travel."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import Comm, Mesh, ModelPlan, ShardedTensor, load, run_local, save, shard_module
from shardwise.nn import GroupedExperts, PlanError, ShardedOptimizer, check_replicas, place_experts, rebalance_experts
from shardwise.nn.experts import ExpertPlacement, deal_experts, load_of_places, match_bins
from tests.nn.test_moe import F32, LAYOUTS, floats, grouped_block, own_part, sorted_block, whole

BATCHES = [floats(4, 3, 8, seed=s) for s in (50, 51, 52, 53)]
LOADS = [[9, 8, 1, 2, 1, 1, 1, 3], [1, 1, 1, 30, 1, 20, 40, 1], [5, 9, 1, 1, 1, 1, 1, 5]]


def train(model: nn.Module, batches: list[Tensor], kind: str, between: Callable[[int], object]) -> list[Tensor]:
    """The losses of steps of AdamW; `between` is called after each."""
    optimizer: Any = (
        torch.optim.AdamW(model.parameters(), lr=0.05)
        if kind == "torch"
        else ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.05)
    )
    losses = []
    for number, x in enumerate(batches):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(whole(loss))
        between(number)
    return losses


def assert_trains_alike(make: Callable[[], Any], layout: str, copies: tuple[int, ...], kind: str = "torch") -> None:
    axes, patterns, input_plan = LAYOUTS[layout]
    mesh, dense = Mesh.of(**axes), make()
    losses = train(dense, BATCHES, "torch", lambda number: None)
    plan, count = ModelPlan(mesh, patterns, lengths={"h": 16}, input_plan=input_plan), len(dense.experts.down)

    def body(comm: Comm) -> None:
        model, places, moved = shard_module(make(), plan), list[object](), list[int]()

        def rebalance(number: int) -> None:
            if number < len(copies):
                balance = rebalance_experts(model, LOADS[number][:count], copies=copies[number])
                moved.append(balance.moved_bytes)
                places.append(model.experts.down.sharding)

        found = train(model, [own_part(x, mesh, input_plan, comm.rank) for x in BATCHES], kind, rebalance)
        assert moved[0] > 0 and len(set(places)) == sum(each > 0 for each in moved)
        check_replicas(model)
        assert_close(found, losses, **F32)
        for name, parameter in model.named_parameters():
            assert_close(whole(parameter), whole(dense.get_parameter(name)), **F32, msg=lambda m, n=name: f"{n}: {m}")

    run_local(body, math.prod(mesh.shape))


@pytest.mark.parametrize("layout", ["ep2", "ep2 of batches", "dp2 x ep2 of batches", "ep2 x tp2"])
def test_a_block_of_plain_torch_trains_as_dense_while_experts_move(layout: str) -> None:
    assert_trains_alike(sorted_block, layout, (0,))


@pytest.mark.parametrize("copies", [(0, 0), (2, 0, 1), (4, 4)])
@pytest.mark.parametrize("layout", ["ep2", "ep2 of batches", "dp2 x ep2 of batches", "ep2 x tp2", "ep4"])
def test_grouped_experts_train_as_dense_while_hot_ones_are_copied(layout: str, copies: tuple[int, ...]) -> None:
    assert_trains_alike(grouped_block, layout, copies)


@pytest.mark.parametrize("copies", [(0, 0), (2, 0, 1)])
def test_the_state_of_a_sharded_optimizer_moves_along(copies: tuple[int, ...]) -> None:
    assert_trains_alike(grouped_block, "ep2 of batches", copies, "ours")


def test_two_experts_that_change_ranks_move_their_weights_gradients_and_state_only() -> None:
    def body(comm: Comm) -> tuple[int, Any]:
        plan = ModelPlan(Mesh.of(ep=2), {"*": "S(0)"}, input_plan="ep: S(0)")
        experts = shard_module(GroupedExperts(4, 8, 16), plan)
        optimizer = torch.optim.AdamW(experts.parameters(), lr=0.05)
        for parameter in experts.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found = rebalance_experts(experts, [10, 9, 1, 2])
        assert optimizer.param_groups[0]["params"] == list(experts.parameters())
        assert all(p.grad is not None and p.grad.sharding == p.sharding for p in experts.parameters())
        return found.moved_bytes, rebalance_experts(experts, [10, 9, 1, 2]).moved_bytes

    expert = (32 * 8 + 8 * 16) * 4  # bytes of one; its gradient and two moments besides
    assert run_local(body, 2) == [(2 * 4 * expert, 0)] * 2


def test_copies_are_saved_once_and_load_into_another_layout(tmp_path: Path) -> None:
    def copy_and_save(comm: Comm) -> dict[str, Tensor]:
        plan = ModelPlan(Mesh.of(ep=4), {"*": "S(0)"}, input_plan="ep: S(0)")
        experts = shard_module(GroupedExperts(8, 8, 16), plan)
        rebalance_experts(experts, LOADS[1], copies=3)
        assert isinstance(experts.down, ShardedTensor) and experts.down.sharding.spec.replicated
        save({"experts": experts}, tmp_path / "c")
        return {name: whole(parameter) for name, parameter in experts.named_parameters()}

    def load_elsewhere(comm: Comm) -> dict[str, Tensor]:
        experts = shard_module(GroupedExperts(8, 8, 16), ModelPlan(Mesh.of(tp=2), {"*": "S(1)"}))
        load({"experts": experts}, tmp_path / "c")
        return {name: whole(parameter) for name, parameter in experts.named_parameters()}

    saved = run_local(copy_and_save, 4)[0]
    assert sum(f.stat().st_size for f in (tmp_path / "c").glob("*.safetensors")) < 1.2 * 8 * (32 * 8 + 8 * 16) * 4
    assert_close(run_local(load_elsewhere, 2), [saved, saved])


def test_bins_are_matched_as_the_best_of_all_orders() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 4, 5):
        for _ in range(20):
            gains = torch.randint(0, 6, (count, count), generator=generator).tolist()
            best = max(sum(gains[r][c] for r, c in enumerate(p)) for p in itertools.permutations(range(count)))
            found = match_bins(gains)
            assert sorted(found) == list(range(count)) and sum(gains[r][c] for r, c in enumerate(found)) == best


@pytest.mark.parametrize("places", [1, 2, 3, 4])
def test_dealt_experts_are_all_there_spread_and_no_worse_than_before(places: int) -> None:
    generator, mesh = torch.Generator().manual_seed(places), Mesh.of(ep=places)
    now = ExpertPlacement(mesh, "ep", tuple((e * places // 8,) for e in range(8)))
    for _ in range(30):
        numbers = torch.randint(0, 50, (8,), generator=generator).tolist()
        copies = int(torch.randint(0, 8 * (places - 1) + 1, (), generator=generator))
        found = deal_experts(numbers, now, copies)
        assert len(found.slots) == 8 + copies and all(len(set(p)) == len(p) > 0 for p in found.holders)
        assert sum(load_of_places(numbers, found)) == pytest.approx(sum(numbers))
        if copies == 0 and not now.has_copies:
            assert max(found.sizes) <= -(-8 // places)
            assert max(load_of_places(numbers, found)) <= max(load_of_places(numbers, now))
        now = found


@pytest.mark.parametrize(
    ("load", "options", "text"),
    [
        ([1, 2, 3], {}, "no module has stacks of so many experts that are cut along the axis by dim 0; stacks: exp"),
        ({"expert": [1] * 8}, {}, "the pattern 'expert' matches no module with experts; near it: experts"),
        ({"experts": [1] * 7}, {}, "rebalance_experts: experts has 8 experts, and load 7"),
        ([1, 1, 1, 1, 1, 1, 1, -1], {}, "rebalance_experts: loads are numbers from 0"),
        ([1] * 8, {"copies": 9}, "rebalance_experts: 9 copies of 8 experts on ep=2"),
    ],
)  # fmt: skip
def test_loads_that_do_not_fit_are_refused(load: Any, options: dict[str, int], text: str) -> None:
    def body(comm: Comm) -> str:
        axes, patterns, input_plan = LAYOUTS["ep2"]
        model = shard_module(grouped_block(), ModelPlan(Mesh.of(**axes), patterns, input_plan=input_plan))
        with pytest.raises(PlanError) as raised:
            rebalance_experts(model, load, **options)
        return str(raised.value)

    assert all(text in each for each in run_local(body, 2))


def test_copies_of_other_modules_and_with_a_capacity_are_refused() -> None:
    def body(comm: Comm) -> list[str]:
        texts = []
        for make in (sorted_block, lambda: grouped_block(capacity_factor=2.0)):
            axes, patterns, input_plan = LAYOUTS["ep2"]
            model = shard_module(make(), ModelPlan(Mesh.of(**axes), patterns, input_plan=input_plan))
            with pytest.raises(PlanError) as raised:
                rebalance_experts(model, [1] * len(model.experts.down), copies=1)
            texts.append(str(raised.value))
        return texts

    for plain, limited in run_local(body, 2):
        assert plain.endswith("'experts' is SortedExperts; without copies= experts of any module move")
        assert "copies of experts need GroupedExperts without a capacity_factor" in limited


@pytest.mark.parametrize("seed", range(3))
def test_plans_place_experts_by_load_near_the_present_place(seed: int) -> None:
    """Not about: of all ways to give the same shares to ranks, the fewest experts move; later nothing is left to do."""
    torch.manual_seed(seed)
    load = torch.randint(1, 20, (6,)).tolist()
    layers = [GroupedExperts(6, width=8, hidden=16)] * 3
    mesh, inputs = Mesh.of(ep=3), "ep: S(0)"
    old = ModelPlan(mesh, {"*": "ep: S(0) owners(2,0,1,1,0,2)"}, input_plan=inputs)
    plan = place_experts(layers[0], ModelPlan(mesh, {"*": "ep: S(0)"}, input_plan=inputs), load, present=old)
    wanted = _owners_of(plan, layers[0])
    shares = [sum(load[e] for e in range(6) if wanted[e] == rank) for rank in range(3)]
    assert max(shares) <= max(sum(load[e] for e in own) for own in ((1, 4), (2, 3), (0, 5)))
    before, moved = (2, 0, 1, 1, 0, 2), []
    for order in itertools.permutations(range(3)):
        moved.append(sum(order[owner] != was for owner, was in zip(wanted, before, strict=True)))
    assert moved[0] == min(moved)
    nets = [copy.deepcopy(layers[0]) for _ in range(3)]
    balances = run_local(lambda comm: rebalance_experts(shard_module(nets[comm.rank], plan), load=load), 3)
    assert balances[0].moved_bytes == 0


def _owners_of(plan: ModelPlan, layer: nn.Module) -> list[int]:
    layout = plan.specs(layer)["down"].layout(tuple(layer.get_parameter("down").shape))
    return [
        next(p.rank for p in layout.pieces if p.box.offsets[0] <= e < p.box.offsets[0] + p.box.sizes[0])
        for e in range(6)
    ]
