"""Are the figures of an estimate those of the step that really runs?"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Mesh, ModelPlan, run_local, shard_module
from shardwise.nn import PlanError
from shardwise.planner import Device, OptimizerState, estimate
from shardwise.planner.rehearsal import planned_attention, silent_comm, sum_of_outputs
from shardwise.tensor.parts import plan_for_rank

WIDTH, HEADS, WORDS = 32, 4, 64
BATCH, SEQUENCE = 2, 8


class Block(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.norm, self.again = nn.LayerNorm(WIDTH), again
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.again else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(again) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PATTERNS = {
    "blocks.*.{q,k,v,up}.*": "tp: S(0)",
    "blocks.*.{o,down}.weight": "tp: S(1)",
    "{embed,head}.weight": "tp: S(0)",
}
TENSOR = ModelPlan(Mesh.of(dp=1, tp=2), PATTERNS, input_plan="dp: S(0)")
DATA = ModelPlan(Mesh.of(dp=2, tp=1), {}, input_plan="dp: S(0)")
FULLY = ModelPlan(
    Mesh.of(dp=2),
    {name: "S(0)" for name, p in Net().named_parameters() if p.ndim > 1},
    input_plan="dp: S(0)",
    reshard_after_forward=True,
)


def run_and_measure(plan: ModelPlan, again: bool = False) -> tuple[int, int]:
    """What a rank really keeps for the backward pass, storages once and parameters left out, and what it receives."""

    def body(comm: Any) -> tuple[int, int]:
        torch.manual_seed(0)
        net = Net(again)
        shard_module(net, plan)
        own = {part.untyped_storage().data_ptr() for p in net.parameters() for part in p.local_parts}  # type: ignore[attr-defined]
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % WORDS
        with shardwise.explain() as log:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = net(ids).sum()
            loss.backward()
        received = 0
        for entry in log.entries:
            if entry.moved_bytes:
                received += entry.moved_bytes
        return sum(kept.values()), received

    return run_local(body, 2)[0]


@pytest.mark.parametrize("plan", (TENSOR, DATA), ids=("tensor", "data"))
def test_activations_are_those_of_a_real_step(plan: ModelPlan) -> None:
    kept, _ = run_and_measure(plan)
    found = estimate(Net(), plan, batch=BATCH, sequence=SEQUENCE)
    assert found.activation_bytes == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("plan", (TENSOR, DATA), ids=("tensor", "data"))
def test_traffic_is_that_of_a_real_step(plan: ModelPlan) -> None:
    _, sent_by_all = run_and_measure(plan)
    found = estimate(Net(), plan, batch=BATCH, sequence=SEQUENCE)
    assert found.traffic_bytes * 2 == sent_by_all
    assert set(found.traffic) == {"tp" if plan is TENSOR else "dp"}


def test_sums_of_large_gradients_are_counted() -> None:
    """Training sums them beside the backward pass. Each weight is gathered once: the last one is kept for its end."""
    net = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
    plan = ModelPlan(Mesh.of(dp=2), {"**": "S(0)"}, input_plan="dp: S(0)")
    found = estimate(net, plan, inputs=(torch.ones(4096, 256, device="meta"),))
    half = 256 * 512 * 4 // 2
    assert [(row.traffic_bytes, row.name) for row in found.rows] == [(2 * half, "0.weight"), (2 * half, "1.weight")]
    assert found.traffic == {"dp": 4 * half}


def test_checkpointed_blocks_keep_less_and_compute_more() -> None:
    plain, again = (estimate(Net(a), TENSOR, batch=64, sequence=SEQUENCE) for a in (False, True))
    assert again.activation_bytes is not None and plain.activation_bytes is not None
    assert again.activation_bytes < plain.activation_bytes / 2
    assert again.flops > plain.flops
    assert again.peak_bytes < plain.peak_bytes


def test_parameters_that_are_freed_are_not_kept() -> None:
    kept = ModelPlan(FULLY.mesh, FULLY.parameters, input_plan="dp: S(0)", reshard_after_forward=False)
    few, many = (estimate(Net(), plan, batch=64, sequence=SEQUENCE) for plan in (FULLY, kept))
    assert few.activation_bytes is not None and many.activation_bytes is not None
    gathered = sum(p.nbytes for name, p in Net().named_parameters() if p.ndim > 1 and name != "embed.weight")
    assert many.activation_bytes - few.activation_bytes == pytest.approx(gathered, rel=0.05)
    assert few.traffic_bytes > many.traffic_bytes


def test_memory_of_parameters_and_optimizers() -> None:
    shapes = {"w": (8, 6), "b": (8,)}
    plan = ModelPlan(Mesh.of(dp=2, tp=2), {"w": "tp: S(0)"}, input_plan="dp: S(0)")
    found = estimate(shapes, plan, dtype="bf16", optimizer="adamw-fp32")
    assert found.parameter_bytes == found.gradient_bytes == (24 + 8) * 2
    assert found.optimizer_bytes == (24 + 8) * 12
    assert found.activation_bytes is None and found.moves == ()
    assert dict(found.traffic) == {"dp": (24 + 8) * 2}
    assert estimate(shapes, plan, optimizer=OptimizerState(3)).optimizer_bytes == (24 + 8) * 12
    assert found.rows[0].layout == "bf16[8,6] on dp=2,tp=2: R, S(0)"


def test_fullest_rank_is_the_one_that_holds_most() -> None:
    plan = ModelPlan(Mesh.of(tp=2), {"w": "S(0) sizes(1,7)"})
    found = estimate({"w": (8, 2)}, plan)
    assert (found.rank, found.parameter_bytes) == (1, 7 * 2 * 4)


def test_fits_or_not() -> None:
    small = Device("small", 10_000, 1e9, efficiency=0.5)
    found = estimate(Net(), TENSOR, batch=BATCH, sequence=SEQUENCE, device=small)
    assert not found.fits and found.peak_bytes > 10_000
    assert found.compute_seconds == pytest.approx(found.flops / 1e9 / 0.5 * 2)
    assert estimate(Net(), TENSOR, batch=BATCH, sequence=SEQUENCE).fits


def test_cast_parameters_are_held_twice() -> None:
    found = estimate(Net(), TENSOR, batch=BATCH, sequence=SEQUENCE, dtype="f32", compute_dtype="bf16")
    plain = estimate(Net(), TENSOR, batch=BATCH, sequence=SEQUENCE, dtype="f32")
    assert found.parameter_bytes == plain.parameter_bytes
    assert found.activation_bytes is not None and plain.activation_bytes is not None
    assert found.activation_bytes < 0.6 * plain.activation_bytes


def test_model_is_left_as_it_is() -> None:
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    estimate(net, TENSOR, batch=BATCH, sequence=SEQUENCE, dtype="bf16")
    for name, parameter in net.named_parameters():
        assert type(parameter) is nn.Parameter and parameter.grad is None
        assert torch.equal(parameter, before[name])
    assert shardwise.ops.rule.find_rule(planned_attention._opoverload) is None


def test_large_model_on_many_ranks_needs_no_memory() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Embedding(32000, 8192), *(nn.Linear(8192, 8192, bias=False) for _ in range(4)))
    plan = ModelPlan(
        Mesh.of(dp=2048, tp=8), {"{1,3}.weight": "tp: S(0)", "{2,4}.weight": "tp: S(1)"}, input_plan="dp: S(0)"
    )
    found = estimate(net, plan, batch=1, sequence=512, dtype="bf16")
    assert found.ranks == 16384 and found.tokens == 512 * 2048
    assert found.rows[1].rank_bytes == 8192 * 8192 * 2 // 8
    assert json.loads(json.dumps(found.to_json()))["fits"] is True


def test_what_cannot_be_guessed_or_run_is_named() -> None:
    plan = ModelPlan(Mesh.of(tp=2), {}, input_plan="replicated")
    with pytest.raises(PlanError, match="arguments of Conv2d cannot be guessed; pass inputs="):
        estimate(nn.Conv2d(3, 4, 3), plan)
    assert estimate(nn.Conv2d(3, 4, 3), plan, inputs=(torch.ones(1, 3, 8, 8),)).flops > 0
    with pytest.raises(PlanError, match="a step of Linear cannot be run without values"):
        estimate(nn.Linear(4, 4), plan, inputs=(torch.ones(2, 3),))
    with pytest.raises(PlanError, match="the device 'tpu' is not known; known are a100-40gb"):
        estimate({"w": (2, 2)}, plan, device="tpu")
    with pytest.raises(PlanError, match="the optimizer 'best' is not known"):
        estimate({"w": (2, 2)}, plan, optimizer="best")
    with pytest.raises(ValueError, match="depends on its parameters"):
        sum_of_outputs(torch.ones(2))


def test_plans_of_ranks_are_those_of_moves() -> None:
    found = estimate(Net(), TENSOR, batch=BATCH, sequence=SEQUENCE)
    move = next(m for m in found.moves if not m.backward)
    src, dst = (shardwise.parse_layout(text).layout for text in (move.src, move.dst))
    assert plan_for_rank(src, dst, 4, None, silent_comm(0, src.ranks)).received_bytes[0] == move.received_bytes
