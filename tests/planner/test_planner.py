"""Are the figures of an estimate those of the step that really runs?"""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Mesh, ModelPlan, run_local, shard_module
from shardwise.geometry import Partial, Replicate
from shardwise.nn import PlanError
from shardwise.planner import Device, OptimizerState, estimate
from shardwise.planner.candidates import Prices
from shardwise.planner.estimate import SHOWN, activation_rows, batch_for, move_rows, move_seconds, summary_rows
from shardwise.planner.rehearsal import planned_attention, rehearse, silent_comm, sum_of_outputs
from shardwise.tensor.parts import plan_for_rank
from shardwise.transfer import Link, Topology

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


def run_and_measure(plan: ModelPlan, again: bool = False, *, keeping: bool = True) -> tuple[int, int]:
    """What a rank really keeps for the backward pass, storages once and parameters left out, and what it receives.

    Not `keeping`: without the hooks that look at what is kept, under which no parameter is freed.
    """

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
            with saved_tensors_hooks(pack, lambda tensor: tensor) if keeping else nullcontext():
                loss = net(ids).sum()
            loss.backward()
        received = 0
        for entry in log.entries:
            if entry.moved_bytes:
                received += entry.moved_bytes
        return sum(kept.values()), received

    return run_local(body, plan.mesh.size)[0]


WEIGHTS = {name: "S(0)" for name, p in Net().named_parameters() if p.ndim > 1}
PLANS = {
    "tensor": TENSOR,
    "data": DATA,
    "fully": FULLY,
    "kept": ModelPlan(Mesh.of(dp=2), WEIGHTS, input_plan="dp: S(0)", reshard_after_forward=False),
    "replicated": ModelPlan(Mesh.of(dp=2), {}, input_plan="replicated"),
    "sequence": ModelPlan(Mesh.of(tp=2), PATTERNS, input_plan="replicated", activations="tp: S(1)"),
    "vocabulary": ModelPlan(Mesh.of(tp=2), {"{embed,head}.weight": "S(0)"}, input_plan="replicated"),
    "uneven": ModelPlan(Mesh.of(tp=2), {"blocks.*.up.weight": "S(0) sizes(48,80)"}, input_plan="replicated"),
    "columns": ModelPlan(Mesh.of(tp=2), {"blocks.*.{up,down}.weight": "S(1)"}, input_plan="replicated"),
    "both": ModelPlan(Mesh.of(dp=2, tp=2), PATTERNS, input_plan="dp: S(0)"),
    "data of four": ModelPlan(Mesh.of(dp=4), {}, input_plan="dp: S(0)"),
    "fully and tensor": ModelPlan(
        Mesh.of(fsdp=2, tp=2),
        {
            "blocks.*.{q,k,v,up}.weight": "fsdp: S(1), tp: S(0)",
            "blocks.*.{o,down}.weight": "fsdp: S(0), tp: S(1)",
            "{embed,head}.weight": "fsdp: S(1), tp: S(0)",
        },
        input_plan="fsdp: S(0)",
        reshard_after_forward=True,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_those_of_a_real_step(name: str) -> None:
    """Not about: what all ranks together receive in a step is as many times what the estimate says of one."""
    plan = PLANS[name]
    _, received = run_and_measure(plan, keeping=False)
    found = estimate(Net(), plan, batch=BATCH, sequence=SEQUENCE)
    if name != "uneven":  # where ranks hold different amounts
        assert found.traffic_bytes * plan.mesh.size == received
    assert sum(m.received_bytes * m.count for m in found.moves) == found.traffic_bytes
    assert (received > 0) is (name != "replicated")


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


def test_checkpointing_may_be_switched_on() -> None:
    """As if the model had been written so."""
    written, switched = (estimate(Net(own), TENSOR, batch=8, sequence=SEQUENCE, again=not own) for own in (True, False))
    assert written.activation_bytes == switched.activation_bytes and written.peak_bytes == switched.peak_bytes
    assert written.flops == switched.flops > switched.model_flops
    named = estimate(Net(), TENSOR, batch=8, sequence=SEQUENCE, again=["blocks.1"])
    assert switched.flops < 2 * named.flops - estimate(Net(), TENSOR, batch=8, sequence=SEQUENCE).flops + 1
    with pytest.raises(PlanError, match="Linear has no list of blocks"):
        estimate(nn.Linear(2, 2), ModelPlan(Mesh.of(dp=2), {}, input_plan="dp: S(0)"), again=True)


@pytest.mark.parametrize("again", [True, ["blocks.1"]])
def test_plans_compute_modules_again(again: Any) -> None:
    """Not about: gradients and moves of a real step, which keeps no more than is estimated."""
    torch.manual_seed(0)
    nets = [copy.deepcopy(net) for net in [Net()] * 4]
    plan = ModelPlan(Mesh.of(dp=2), {"**": "S(0)"}, input_plan="dp: S(0)", reshard_after_forward=True)
    ids = torch.arange(4 * SEQUENCE).reshape(4, SEQUENCE) % WORDS

    def body(comm: Any) -> tuple[list[Tensor], int]:
        grads: list[list[Tensor]] = []
        for number, each in enumerate((plan, replace(plan, recompute=again))):
            net = shard_module(nets[2 * number + comm.rank], each)
            with shardwise.explain() as log:
                net(ids[2 * comm.rank : 2 * comm.rank + 2]).sum().backward()
            grads.append([p.grad.redistribute("R").local_tensor() for p in net.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        return grads[0], log.moved_bytes

    grads, moved = run_local(body, 2)[0]
    found = estimate(Net(), replace(plan, recompute=again), inputs=(ids[:2],))
    moves = rehearse(Net(), replace(plan, recompute=again), (ids[:2],), 0, None).moves
    assert len(grads) == len(list(Net().parameters())) and moved == sum(m.record.moved_bytes for m in moves)
    assert found.activation_bytes == estimate(Net(), plan, inputs=(ids[:2],), again=again).activation_bytes


def test_modules_to_compute_again_are_named() -> None:
    for model, again, text in (
        (Net(), ["layers.*"], r"'layers\.\*' matches no module; near it: embed"),
        (nn.Linear(2, 2), True, "Linear has no list of blocks"),
    ):
        plan = ModelPlan(Mesh.of(dp=1), {}, input_plan="dp: S(0)", recompute=again)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=text):
            run_local(lambda comm, model=model, plan=plan: shard_module(model, plan), 1)


def test_activations_by_module_add_up() -> None:
    found = estimate(Net(), TENSOR, batch=8, sequence=SEQUENCE)
    assert sum(found.activations.values()) == found.activation_bytes
    assert found.activations["blocks.0.up"] == found.activations["blocks.1.up"] >= 8 * SEQUENCE * 4 * WIDTH * 4 // 2
    rows = activation_rows(found)
    assert next(row for row in rows if row[0] == "blocks.{0-1}.up")[1] == "2"


def test_moves_are_listed_by_time_and_none_is_left_out() -> None:
    found = estimate(Net(), PLANS["fully and tensor"], batch=BATCH, sequence=SEQUENCE)
    times = [m.seconds * m.count for m in found.moves]
    assert times == sorted(times, reverse=True) and len(times) > SHOWN
    last = move_rows(found)[-1]
    assert last[0] == f"and {len(times) - SHOWN} more"
    assert len(move_rows(found)) == SHOWN + 1 and last[-1] == f"{1000 * sum(times[SHOWN:]):.2f} ms"
    rows = dict(row[:2] for row in summary_rows([found]))
    assert rows["tokens per step"] == "32" and rows["MFU"].endswith("% of h100")


def test_a_small_sum_over_many_ranks_takes_a_tree() -> None:
    """18 kB over 128 hosts of 8 ranks: 16 hops, and not a message to each of 1,023 ranks."""
    links = Topology(ranks_per_host=8)
    src, dst = (shardwise.parse_layout(f"bf16[8192] on fsdp=128,tp=8: {text}").layout for text in ("P(sum), R", "R, R"))
    seconds, latency = move_seconds(src, dst, 2, links)
    assert 100e-6 < latency <= seconds < 250e-6


def test_time_of_a_step_lies_between_its_parts() -> None:
    for name in ("tensor", "fully", "both"):
        for compiled in (False, True):
            found = estimate(Net(), PLANS[name], batch=BATCH, sequence=SEQUENCE, compiled=compiled)
            parts = (found.compute_seconds, found.communication_seconds)
            python = 0 if compiled else 20e-6 * 2000
            assert max(parts) <= found.step_seconds <= sum(parts) + python, name
            assert found.exposed_seconds == pytest.approx(found.step_seconds - found.compute_seconds)


def test_compiled_steps_send_small_moves_together() -> None:
    """64 small sums of gradients: one by one they take 64 latencies."""
    net = nn.Sequential(*(nn.LayerNorm(64) for _ in range(32)))
    plan = ModelPlan(Mesh.of(dp=16), {}, input_plan="dp: S(0)")
    given = (torch.ones(4, 64, device="meta", requires_grad=True),)
    eager, compiled = (estimate(net, plan, inputs=given, compiled=c) for c in (False, True))
    assert eager.traffic == compiled.traffic
    assert compiled.communication_seconds < eager.communication_seconds / 8


def test_what_the_engine_adds_to_a_move_counts_in_eager_steps_and_in_searches() -> None:
    """Not about: 8 gradients of layers that every rank has whole are summed, each by a move of its own."""
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    plan, device = ModelPlan(Mesh.of(dp=4), {}, input_plan="dp: S(0)"), Device("small", 10**9, 1e12, asynchronous=False)
    slow = replace(device, eager_moves={"gather": 0.0, "gradient": 0.5, "activation": 0.0})
    given: dict[str, Any] = {"inputs": (torch.ones(2, 16),), "topology": Topology(4, within=Link(0.0, 1e30))}
    steps = [estimate(net, plan, device=each, **given).step_seconds for each in (device, slow)]
    assert steps[1] - steps[0] == pytest.approx(8 * 0.5, rel=1e-3)
    prices = Prices(plan.mesh, given["topology"], "seconds", slow)
    move = (16, 16), 4, (Partial("sum"),), (Replicate(),)
    assert prices.move(*move, "gradient") == pytest.approx(0.5, rel=1e-3)
    assert prices.move(*move, "gather") == pytest.approx(0.0, abs=1e-6)


def test_large_moves_are_hidden_by_computation() -> None:
    """Gathers of the next layer beside this one's product; with slow links they cannot be hidden."""
    net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(6)))
    plan = ModelPlan(Mesh.of(fsdp=8), {"*.weight": "S(0)"}, input_plan="fsdp: S(0)", reshard_after_forward=True)
    given = (torch.ones(32768, 4096, dtype=torch.bfloat16, device="meta"),)
    slow = Topology(ranks_per_host=1, between=Link(1e-5, 1e9))
    for compiled in (False, True):
        fast, late = (
            estimate(net, plan, inputs=given, compiled=compiled, topology=t) for t in (Topology(ranks_per_host=8), slow)
        )
        assert fast.exposed_seconds < 0.35 * fast.communication_seconds
        assert late.exposed_seconds > 0.5 * late.communication_seconds


def test_sums_of_gradients_are_hidden_only_where_the_engine_hides_them() -> None:
    """Eagerly a sum of a whole parameter is a collective of the group, which nothing else may run beside."""
    links = Topology(ranks_per_host=8, within=Link(0, 1e9, 0, 0), collectives="messages", memory=1e15)
    device = Device("slow", 80 * 10**9, 1e12, bandwidth=1e9, launch=0, eager_call=0)
    net = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    whole, split = ({}, {"*.weight": "S(0)"})
    for parameters, hides in ((whole, False), (split, True)):
        plan = ModelPlan(Mesh.of(dp=2), parameters, input_plan="dp: S(0)", reshard_after_forward=False)
        found = [
            estimate(net, plan, inputs=(torch.ones(4096, 512),), topology=links, device=one)
            for one in (device, replace(device, overlap=0.0))
        ]
        together = found[0].compute_seconds + found[0].communication_seconds
        assert found[0].communication_seconds > 1e-3
        assert (found[0].step_seconds < 0.99 * together) is hides
        assert found[1].step_seconds == pytest.approx(together)


def test_heads_that_ranks_do_not_divide_are_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 8, bias=False)
            self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.q_proj(x) + self.k_proj(x).repeat(1, 1, 4)

    given = {"inputs": (torch.ones(2, 4, 32, device="meta"),)}
    plan = ModelPlan(Mesh.of(tp=2), {"q_proj.weight": "S(0)"}, input_plan="replicated")
    assert (
        "k_proj.weight: 1 heads of keys and values on tp=2 are not divided"
        in estimate(Attention(), plan, **given).notes[0]
    )
    split = ModelPlan(plan.mesh, {"{q,k}_proj.weight": "S(0)"}, input_plan="replicated")
    assert estimate(Attention(), split, **given).notes == ()


def test_batches_for_plans_of_other_meshes() -> None:
    assert batch_for(PLANS["data of four"], 8) == 2 and batch_for(TENSOR, 8) == 8
    with pytest.raises(PlanError, match="6 sequences in all are not divided by the 4 batches"):
        batch_for(PLANS["data of four"], 6)
    assert estimate(Net(), PLANS["data of four"], batch=3, sequence=4).sequences == 12


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
    rates = {"f32": ((1.0, 1.0, 1.0, 1e9),)}
    small = Device("small", 10_000, 4e9, bandwidth=1e30, launch=0, eager_call=0, products=rates)
    found = estimate(Net(), TENSOR, batch=BATCH, sequence=SEQUENCE, device=small)
    assert not found.fits and found.peak_bytes > 10_000
    assert found.compute_seconds == pytest.approx(found.flops / 1e9)
    assert found.utilisation == pytest.approx(found.model_flops / 2e9 / found.step_seconds)
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


def test_a_split_of_a_dim_that_no_input_has_is_named() -> None:
    plan = ModelPlan(Mesh.of(tp=2), {}, input_plan="tp: S(5)")
    message = r"input_plan tp: S\(5\) splits dim 5, and the inputs have the shapes \(4, 16\)"
    with pytest.raises(PlanError, match=message):
        estimate(nn.Linear(16, 4), plan, inputs=(torch.ones(4, 16),))
    nets = [nn.Linear(16, 4) for _ in range(2)]
    with pytest.raises(shardwise.LayoutError, match=message):
        run_local(lambda comm: shard_module(nets[comm.rank], plan)(torch.ones(4, 16)), 2)


def test_plans_of_ranks_are_those_of_moves() -> None:
    found = estimate(Net(), TENSOR, batch=BATCH, sequence=SEQUENCE)
    move = next(m for m in found.moves if not m.backward)
    src, dst = (shardwise.parse_layout(text).layout for text in (move.src, move.dst))
    assert plan_for_rank(src, dst, 4, None, silent_comm(0, src.ranks)).received_bytes[0] == move.received_bytes
