"""Mixtures of experts: grouped products, rows that values decide about, routes of tokens, and blocks that train."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    Comm,
    DisagreementError,
    Mesh,
    MeshSpec,
    ModelPlan,
    Replicate,
    Shard,
    ShardedTensor,
    explain,
    no_communication,
    replicate,
    run_local,
    shard,
    shard_module,
)
from shardwise.nn import GroupedExperts, route_tokens
from shardwise.ops import HiddenCommunicationError
from shardwise.ops import dispatch_cache as fast_path
from shardwise.ops import engine as dispatcher
from shardwise.tensor import parts
from tests.dense import S0, S1, P, R, check, lay, numbers

F32 = {"rtol": 1e-4, "atol": 1e-5}
S2 = "on tp=2: S(2)"
OFFSETS = [torch.tensor(o, dtype=torch.int32) for o in ([3, 3, 8, 12], [0, 5, 5, 12], [12, 12, 12, 12])]


def floats(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed, dtype=torch.float32)


# Grouped products


def multiply(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(x, w, offs=offs)


@pytest.mark.parametrize("w", [R, S0, S1, S2, P, "on tp=2: S(0) sizes(3,1)", "on tp=2: S(0) sizes(0,4)"])
@pytest.mark.parametrize("x", [R, S0, S1, P, "on tp=2: S(0) sizes(0,12)", "on tp=2: S(0) block(1)"])
def test_rows_times_the_weights_of_their_experts(x: str, w: str) -> None:
    """Three calls with the same shapes and other rows for the experts: nothing about one is used for the next."""
    calls = [(floats(12, 8), floats(4, 8, 16, seed=1), offs) for offs in OFFSETS]
    check(multiply, (x, w, R), *calls, **F32)


@pytest.mark.parametrize("layouts", [(R, R, R), (S0, S0, R), (S1, S1, R), (R, S2, R), (S0, R, R), (P, R, R)])
def test_a_product_of_stacks(layouts: tuple[str, ...]) -> None:
    check(lambda x, w: F.grouped_mm(x, w), layouts[:2], (floats(4, 12, 8), floats(4, 8, 16, seed=1)), **F32)


@pytest.mark.parametrize("layouts", [(R, R, R), (S0, R, R), (R, S1, R), (S1, S0, R), (R, P, R), (S1, R, R)])
def test_sums_over_the_rows_of_experts(layouts: tuple[str, ...]) -> None:
    calls = [(floats(8, 12), floats(12, 16, seed=1), offs) for offs in OFFSETS]
    check(multiply, layouts, *calls, grad=False, **F32)


@pytest.mark.parametrize("layouts", [(R, R, R), (S1, R, R), (S2, S0, R), (R, S1, R), (P, R, R), (S0, S1, R)])
def test_stacks_times_columns_of_experts(layouts: tuple[str, ...]) -> None:
    calls = [(floats(4, 8, 16), floats(16, 12, seed=1), offs) for offs in OFFSETS]
    check(multiply, layouts, *calls, grad=False, **F32)


@pytest.mark.parametrize("layouts", ["S(0), S(0)", "S(0), R", "R, S(0)", "S(1), S(0)", "R, R", "P(sum), S(0)"])
@pytest.mark.parametrize("weights", ["S(2), S(0)", "S(0), S(2)", "S(0), S(0)", "S(1), S(0)", "S(0), R"])
def test_two_axes(layouts: str, weights: str) -> None:
    calls = [(floats(12, 8), floats(4, 8, 16, seed=1), offs) for offs in OFFSETS[:2]]
    texts = [f"on a=2,b=2: {placements}" for placements in (layouts, weights, "R, R")]
    check(multiply, texts, *calls, world=4, **F32)


def test_offsets_that_are_sharded_or_pending() -> None:
    for offs in (S0, P):
        check(multiply, (S0, S0, offs), (floats(12, 8), floats(4, 8, 16, seed=1), OFFSETS[0]), **F32)


def test_shapes_that_kernels_refuse_on_local_tensors() -> None:
    """8 columns over 2 ranks in 3 and 5: torch's kernel takes multiples of 16 bytes, and rank 1 has none of k."""
    calls = [(floats(12, 8), floats(4, 8, 8, seed=1), OFFSETS[0])]
    check(multiply, (R, "on tp=2: S(2) sizes(3,5)", R), *calls, **F32)
    check(multiply, ("on tp=2: S(1) sizes(8,0)", "on tp=2: S(1) sizes(8,0)", R), *calls, **F32)


def test_scales_are_cut_with_what_they_scale() -> None:
    """Torch has this kernel for accelerators only, so the rule is looked at and not run."""
    from shardwise.ops.rule import TensorMeta, find_rule

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
        layout = MeshSpec(Mesh.of(tp=2), [Replicate()]).layout(shape)
        return TensorMeta(shape, dtype, layout, (Replicate(),))

    rule: Any = find_rule(torch.ops.aten._scaled_grouped_mm.default)
    found = rule(meta(12, 16), meta(4, 16, 32), meta(12), meta(4, 32), meta(4, dtype=torch.int32))
    ways = {s.inputs: s.outputs[0] for s in found}
    whole = Replicate()
    assert ways[Shard(0), whole, Shard(0), whole, whole] == Shard(0)
    assert ways[whole, Shard(2), whole, Shard(1), whole] == Shard(1)
    assert len(ways) == 4


# Rows that values decide about


@pytest.mark.parametrize("placed", [S0, "on tp=2: S(0) sizes(1,7)", "on tp=2: S(0) block(2)", R, P, S1])
def test_rows_taken_by_their_numbers(placed: str) -> None:
    index = torch.tensor([7, 0, 3, 3, -1, 5, 6, 1, 2, 4])
    calls = [(floats(8, 4), index), (floats(8, 4), index.flip(0))]
    check(lambda x, i: x[i], (placed, R), *calls, **F32)
    check(lambda x, i: x.index_select(0, i), (placed, R), (floats(8, 4), index.remainder(8)), **F32)
    check(lambda x, i: torch.tanh(x[i]) * 2 + x.repeat(2, 1)[:10], (placed, R), *calls, **F32)


def test_rows_in_another_order_and_back_move_nothing() -> None:
    order = torch.tensor([5, 0, 3, 7, 1, 6, 2, 4])

    def body(comm: Comm) -> None:
        x = lay(floats(8, 4), S0)
        with no_communication():
            back = torch.tanh(x[replicate(order, x)])[replicate(order.argsort(), x)].view(4, 2, 4).sum(1)
        assert back.sharding == lay(floats(4, 4), S0).sharding
        assert_close(back.full(), torch.tanh(floats(8, 4)).view(4, 2, 4).sum(1))

    run_local(body, 2)


@pytest.mark.parametrize("shape", [(4, 2, 4), (2, 4, 4), (32,), (8, 2, 2), (8, 4, 1), (16, 2), (1, 8, 4)])
def test_views_of_rows_with_owners(shape: tuple[int, ...]) -> None:
    """Where rows of several ranks are merged they become a pending sum or move to an even split."""
    orders = [torch.tensor(o) for o in ([5, 0, 3, 7, 1, 6, 2, 4], [0, 4, 1, 5, 2, 6, 3, 7])]
    calls = [(floats(8, 4), order) for order in orders]
    check(lambda x, i: x[i].reshape(shape), (S0, R), *calls, **F32)
    check(lambda x, i: x[i].reshape(shape), ("on tp=4: S(0)", "on tp=4: R"), *calls, world=4, **F32)
    check(lambda x, i: (x[i] > 0).view(shape), (S0, R), *calls, grad=False)


def test_a_number_out_of_range_is_refused_on_every_rank() -> None:
    def body(comm: Comm) -> None:
        x = lay(floats(4, 4), S0)
        with pytest.raises(IndexError, match="index 9 is out of bounds for dim 0 of length 4"):
            x[replicate(torch.tensor([0, 9, 1, 2]), x)]

    run_local(body, 2)


def test_an_exchange_of_rows_sends_each_row_once() -> None:
    def body(comm: Comm) -> int:
        x, w = lay(floats(12, 8), S0), lay(floats(4, 8, 16, seed=1), S0)
        order = replicate(torch.tensor([0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]), x)
        offs = replicate(OFFSETS[0], x)  # rows 0 to 2 are for rank 0, that is tokens 0, 6 and 1
        with explain() as log:
            F.grouped_mm(x[order], w, offs=offs)
        return log.moved_bytes

    assert run_local(body, 2) == [5 * 8 * 4] * 2  # token 6 to rank 0, and tokens 2 to 5 to rank 1


# A block as models write it: sorted by expert, multiplied, put back in order


class Router(nn.Module):
    """Scores, the best groups of experts, and the best experts in them."""

    def __init__(self, width: int, experts: int, top_k: int, groups: int = 1, kept_groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(floats(experts, width, seed=7))
        self.top_k, self.groups, self.kept_groups = top_k, groups, kept_groups

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        choice = scores
        if self.groups > 1:
            best = scores.view(len(scores), self.groups, -1).topk(2, dim=-1).values.sum(-1)
            kept = torch.zeros_like(best).scatter(1, best.topk(self.kept_groups, dim=-1).indices, 1)
            mask = kept.unsqueeze(-1).expand(-1, -1, scores.shape[1] // self.groups).reshape(scores.shape)
            choice = scores.masked_fill(mask == 0, float("-inf"))
        ids = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)


class SortedExperts(nn.Module):
    """Experts written with torch alone, for one process: it knows nothing of ranks."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(floats(experts, 2 * hidden, width, seed=3) / 4)
        self.down = nn.Parameter(floats(experts, width, hidden, seed=4) / 4)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        top_k, flat = ids.shape[1], ids.reshape(-1)
        _, order = flat.sort()
        counts = torch.histc(flat.float(), bins=len(self.down), min=0, max=len(self.down) - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(x[order // top_k], self.gate_up.transpose(1, 2), offs=offs).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=offs)
        out = out * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return out[back].view(len(x), top_k, -1).sum(1)


class Block(nn.Module):
    """Shared experts, routed experts, and a residual."""

    def __init__(self, experts: nn.Module, router: Router, width: int = 8) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.shared_up, self.shared_down = nn.Linear(width, 16), nn.Linear(16, width)
        for number, parameter in enumerate([*self.shared_up.parameters(), *self.shared_down.parameters()]):
            parameter.data.copy_(floats(*parameter.shape, seed=20 + number) / 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        ids, weights = self.router(tokens)
        routed = self.experts(tokens, ids, weights).reshape(x.shape)
        return x + routed + self.shared_down(F.silu(self.shared_up(x)))


def sorted_block() -> Block:
    return Block(SortedExperts(4, 8, 16), Router(8, 4, 2))


def grouped_block(**options: Any) -> Block:
    experts = GroupedExperts(8, 8, 16, **options)
    experts.gate_up.data.copy_(floats(8, 32, 8, seed=3) / 4)
    experts.down.data.copy_(floats(8, 8, 16, seed=4) / 4)
    return Block(experts, Router(8, 8, 2, groups=4, kept_groups=2))


SPLIT = {"experts.*": "ep: S(0)"}
COLUMNS = {"experts.gate_up": "tp: S(1) groups(h,h)", "experts.down": "tp: S(2)"}
SHARED = {"shared_up.*": "tp: S(0)", "shared_down.weight": "tp: S(1)"}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, str], str]] = {
    "tp2": ({"tp": 2}, {**COLUMNS, **SHARED}, "replicated"),
    "dp2": ({"dp": 2}, {}, "dp: S(0)"),
    "fsdp2": ({"fsdp": 2}, {"**": "S(0)"}, "fsdp: S(0)"),
    "ep2": ({"ep": 2}, SPLIT, "replicated"),
    "ep2 of batches": ({"ep": 2}, SPLIT, "ep: S(0)"),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, {**COLUMNS, **SHARED}, "dp: S(0)"),
    "dp2 x ep2": ({"dp": 2, "ep": 2}, SPLIT, "dp: S(0)"),
    "dp2 x ep2 of batches": ({"dp": 2, "ep": 2}, SPLIT, "dp: S(0), ep: S(0)"),
    "ep2 x tp2": (
        {"ep": 2, "tp": 2},
        {"experts.gate_up": "ep: S(0), tp: S(1) groups(h,h)", "experts.down": "ep: S(0), tp: S(2)"},
        "ep: S(0)",
    ),
    "ep4": ({"ep": 4}, SPLIT, "ep: S(0)"),
}


def train(model: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and the gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(whole(loss))
    return losses, [whole(p.grad) for p in model.parameters()]


def whole(value: Any) -> Tensor:
    full: Tensor = value.full() if isinstance(value, ShardedTensor) else value
    return full.detach().clone()


def own_part(x: Tensor, mesh: Mesh, input_plan: str, rank: int) -> Tensor:
    for text in input_plan.split(",") if ":" in input_plan else []:
        axis = text.split(":")[0].strip()
        x = x.tensor_split(mesh.shape[mesh.axis_index(axis)])[mesh.coordinates(rank)[axis]]
    return x


def assert_trains_alike(make: Callable[[], nn.Module], layout: str) -> None:
    axes, patterns, input_plan = LAYOUTS[layout]
    mesh = Mesh.of(**axes)
    batches = [floats(4, 3, 8, seed=s) for s in (50, 51, 52)]
    dense = make()
    losses, gradients = train(dense, batches)
    plan = ModelPlan(mesh, patterns, lengths={"h": 16}, input_plan=input_plan)

    def body(comm: Comm) -> None:
        model = make()
        shard_module(model, plan, process_group=comm)
        found, grads = train(model, [own_part(x, mesh, input_plan, comm.rank) for x in batches])
        assert_close(found, losses, **F32)
        assert_close(grads, gradients, **F32)
        assert_close([whole(p) for p in model.parameters()], [whole(p) for p in dense.parameters()], **F32)

    run_local(body, math.prod(mesh.shape))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_of_plain_torch_trains_as_dense(layout: str) -> None:
    assert_trains_alike(sorted_block, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_with_shared_experts_and_groups_trains_as_dense(layout: str) -> None:
    assert_trains_alike(grouped_block, layout)


@pytest.mark.parametrize("layout", ["dp2", "ep2", "dp2 x ep2 of batches", "ep2 x tp2"])
def test_a_block_with_a_capacity_trains_as_dense(layout: str) -> None:
    """The factor leaves room for less than the experts get, so choices are dropped, the same ones in each layout."""
    assert_trains_alike(lambda: grouped_block(capacity_factor=0.8), layout)


def test_both_kinds_of_experts_agree() -> None:
    own, plain = GroupedExperts(4, 8, 16), SortedExperts(4, 8, 16)
    own.gate_up.data.copy_(plain.gate_up.data)
    own.down.data.copy_(plain.down.data)
    ids, weights = Router(8, 4, 2)(floats(6, 8))
    assert_close(own(floats(6, 8), ids, weights), plain(floats(6, 8), ids, weights))


def test_steps_leave_nothing_behind() -> None:
    """Every batch is routed in another way. What is remembered stays what it was after the first batches."""
    axes, patterns, input_plan = LAYOUTS["ep2 of batches"]
    mesh = Mesh.of(**axes)

    def remembered() -> list[int]:
        caches = [parts._plan_cached, parts.work_out_rank_part, parts.list_copies_of_all]
        return [len(dispatcher._decisions), len(fast_path._shortcuts), *(c.cache_info().currsize for c in caches)]

    def body(comm: Comm) -> tuple[list[int], list[int]]:
        model = sorted_block()
        shard_module(model, ModelPlan(mesh, patterns, input_plan=input_plan), process_group=comm)
        train(model, [floats(2, 3, 8, seed=s + 10 * comm.rank) for s in range(2)])
        comm.barrier(label="first")
        first = remembered()
        comm.barrier(label="looked")
        train(model, [floats(2, 3, 8, seed=s + 10 * comm.rank) for s in range(2, 6)])
        comm.barrier(label="last")
        return first, remembered()

    for first, last in run_local(body, 2):
        assert first == last


# Routes


def test_dropped_tokens_are_the_last_of_the_batch_in_every_layout() -> None:
    x, ids = floats(8, 4), torch.tensor([[0], [1], [0], [0], [1], [0], [0], [1]])
    dense = route_tokens(x, ids, 2, capacity=3)
    assert dense.counts == (3, 3) and dense.offsets.tolist() == [3, 6]
    expected = dense.combine(dense.rows * 2, torch.ones(8, 1))
    assert (expected == 0).all(1).tolist() == [False, False, False, False, False, True, True, False]

    def body(comm: Comm) -> None:
        for layout in ("on ep=2: S(0)", "on ep=2: S(0) sizes(1,7)", "on ep=2: R", "on ep=2: S(1)"):
            tokens = lay(x, layout)
            route = route_tokens(tokens, replicate(ids, tokens), 2, capacity=3)
            assert route.counts == (3, 3)
            assert_close(route.rows.full(), dense.rows)  # type: ignore[attr-defined]  # a ShardedTensor
            found = route.combine(route.rows * 2, replicate(torch.ones(8, 1), tokens))
            assert_close(found.full(), expected)  # type: ignore[attr-defined]  # a ShardedTensor

    run_local(body, 2)


def test_second_derivatives_of_a_route() -> None:
    def program(x: Tensor, ids: Tensor) -> Tensor:
        route = route_tokens(x, ids, 4)
        out = route.combine(route.rows**3, torch.ones_like(ids, dtype=torch.float64))
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return first * 2

    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [0, 2]])
    check(program, ("on ep=2: S(0)", "on ep=2: S(0)"), (numbers(4, 3), ids))


def test_a_wrong_expert_on_one_rank_is_an_error_on_all() -> None:
    def body(comm: Comm) -> str:
        spec = MeshSpec(Mesh.of(ep=2), [Shard(0)])
        x = lay(floats(4, 4), "on ep=2: S(0)")
        ids = shard(torch.tensor([[0], [1], [0], [5]]), spec)
        with pytest.raises(DisagreementError) as caught:
            route_tokens(x, ids, 4)
        return str(caught.value)

    text = "route_tokens: rank 1: expert id 5 is out of range for 4 experts; every rank passes ids from 0 to 3"
    assert run_local(body, 2) == [text] * 2
    with pytest.raises(IndexError, match="expert id -1 is out of range for 4 experts"):
        route_tokens(floats(1, 4), torch.tensor([[-1]]), 4)


def test_what_a_route_refuses() -> None:
    x, ids = floats(4, 4), torch.zeros(4, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shape \(tokens, choices\), got \(4, 4\) and \(4,\)"):
        route_tokens(x, ids.flatten(), 2)
    with pytest.raises(ValueError, match="capacity=0: pass positive numbers"):
        route_tokens(x, ids, 2, capacity=0)
    for tokens, choices, name in ((1, ids, "tokens"), (x, [[0]], "expert ids")):
        with pytest.raises(TypeError, match=f"route_tokens takes {name} as a tensor, got (int|list)"):
            route_tokens(tokens, choices, 2)
    with pytest.raises(
        ValueError, match=r"combine takes 4 rows and weights of shape \(4, 1\), got 3 rows and \(4, 1\)"
    ):
        route_tokens(x, ids, 2).combine(x[:3], torch.ones(4, 1))
    with pytest.raises(ValueError, match="capacity_factor=0: pass a positive number"):
        GroupedExperts(2, 4, 4, capacity_factor=0)

    def body(comm: Comm) -> None:
        tokens = lay(x, "on ep=2: S(0)")
        with pytest.raises(TypeError, match="route_tokens got plain expert ids for tokens that are sharded"):
            route_tokens(tokens, ids, 2)
        placed = shard(ids, MeshSpec(Mesh.of(ep=2), [Shard(0)]))
        with pytest.raises(HiddenCommunicationError, match="route_tokens at test_moe"), no_communication():
            route_tokens(tokens, placed, 2)
        route = route_tokens(tokens, replicate(ids, tokens), 2)
        with pytest.raises(TypeError, match="combine got a plain tensor for"):
            route.combine(route.rows.full(), replicate(torch.ones(4, 1), tokens))  # type: ignore[attr-defined]

    run_local(body, 2)


# Moves of rows


def test_every_move_between_two_axes_of_owners() -> None:
    """Values and gradients of all pairs of a few layouts on a mesh of 2 x 2."""
    one, other = "S(0) owners(1,0,0,1,1,0)", "S(0) owners(0,0,0,1,1,1)"
    words = ["R, R", "S(0), S(0)", "P(sum), S(0)", f"{one}, {other}", f"{other}, S(0)", f"S(0), {one}", f"R, {one}"]
    texts = [f"on a=2,b=2: {placements}" for placements in words]

    def body(comm: Comm) -> None:
        x = numbers(6, 3).requires_grad_()
        for before in texts:
            held = lay(x, before)
            for after in texts:
                moved = held.redistribute(lay(x.detach(), after).sharding.spec)
                assert_close(moved.full(), x.detach())
                (gradient,) = torch.autograd.grad((moved.full() * x.detach()).sum(), held)
                assert_close(gradient.full(), x.detach())  # type: ignore[attr-defined]  # a ShardedTensor

    run_local(body, 4)


def test_an_empty_cache_beside_keys_moves_nothing() -> None:
    def body(comm: Comm) -> None:
        keys = lay(floats(4, 3), S0)
        with no_communication():
            joined = torch.cat([replicate(torch.empty(0), keys), keys], dim=-1)
        assert joined.sharding == keys.sharding
        assert_close(joined.full(), floats(4, 3))

    run_local(body, 2)
    check(lambda x: torch.cat([torch.empty_like(x, requires_grad=False)[0, :0], x, x], dim=0), (S0,), (floats(4, 3),))
