"""Stages of a plan: what ranks hold, how a model is followed, and schedules of torch beside the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.optim import AdamW
from torch.testing import assert_close

from shardwise import Comm, Mesh, ModelPlan, ShardedTensor, default_comm, hf, load, run_local, save, shard_module
from shardwise.nn import Pipeline, PlanError, ShardedOptimizer, load_plan, save_plan
from tests.nn.test_combinations import rows_of, whole
from tests.nn.test_sequence_parallel import PARAMETERS, WIDTH, WORDS, Block, _batch
from tests.world import world_fixture

world = world_fixture(8)
ROWS, LENGTH, STEPS, MICRO, CLIP = 8, 8, 2, 2, 0.1
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
FSDP = {"tp: S(0)": "fsdp: S(1)", "tp: S(1)": "fsdp: S(0)"}
BY_HAND = {"embed": 0, "blocks.0": 0, "blocks.1.**": 1, "blocks.{2-2}": 2, "{blocks.3,norm,head}": 3}


class Llama(nn.Module):
    """Tokens, blocks, a norm and a head; returns logits."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_llama() -> Llama:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Llama().double()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_plan(mesh: Mesh, stages: Any, activations: str | None = None) -> ModelPlan:
    texts = {p: [tp] * ("tp" in mesh.axes) + [FSDP[tp]] * ("fsdp" in mesh.axes) for p, tp in PARAMETERS.items()}
    parameters = {pattern: ", ".join(parts) for pattern, parts in texts.items() if parts}
    cut = {"dp": "dp: S(0)", "fsdp": "fsdp: S(0)", "cp": "cp: S(1)"}
    inputs = ", ".join(cut[axis] for axis in mesh.axes if axis in cut) or "replicated"
    return ModelPlan(mesh, parameters, input_plan=inputs, activations=activations, stages=stages)


def train_in_stages(kind: str, plan: ModelPlan, path: Path) -> tuple[list[float], list[float]]:
    """The losses of steps on ranks with the last stage, each the mean over micro-batches; the norms of gradients."""
    comm = default_comm()
    model = shard_module(make_llama(), plan)
    ids, targets = (t[rows_of(plan.mesh, comm.rank, ROWS)] for t in _batch(ROWS, LENGTH))
    pipeline = Pipeline(model, ids[: len(ids) // MICRO])
    stages = pipeline.stages if plan.stage_count > plan.mesh.axis_size("pp") else pipeline.stage
    schedule = SCHEDULES[kind](stages, n_microbatches=MICRO, loss_fn=pipeline.loss(loss_of))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    first, last = (any(getattr(s, name) for s in pipeline.stages) for name in ("is_first", "is_last"))
    found, norms = [], list[float]()
    for _ in range(STEPS):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([ids] if first else []), **({"target": targets, "losses": losses} if last else {}))
        norms.append(pipeline.clip_grad_norm(CLIP))
        optimizer.step()
        found += [sum(loss.item() for loss in losses) / MICRO] if last else []
    save({"model": model, "optimizer": optimizer}, path)
    return found, norms


@pytest.fixture(scope="module")
def dense() -> tuple[list[float], list[float], Llama, torch.optim.Optimizer]:
    model, (ids, targets), losses, norms = make_llama(), _batch(ROWS, LENGTH), list[float](), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(STEPS):
        loss = loss_of(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model, optimizer


def load_as_tp2(comm: Comm, path: Path) -> dict[str, Tensor]:
    model = shard_module(make_llama(), ModelPlan(Mesh.of(tp=2), PARAMETERS, input_plan="replicated"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    load({"model": model, "optimizer": optimizer}, path)
    moments = {f"{n}.exp_avg": optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    return whole({**model.state_dict(), **moments})


@pytest.mark.parametrize(
    ("kind", "sizes", "stages", "activations"),
    [
        ("1f1b", {"pp": 2, "dp": 2, "tp": 2}, "balanced", "tp: S(1)"),
        ("zero bubble", {"pp": 2, "dp": 2, "tp": 2}, 4, None),
        ("gpipe", {"dp": 2, "pp": 4}, BY_HAND, None),
        ("interleaved", {"tp": 4, "pp": 2}, 4, None),
        ("1f1b", {"pp": 2, "dp": 2, "fsdp": 2}, "balanced", None),
        ("1f1b", {"fsdp": 2, "pp": 2, "tp": 2}, "balanced", "tp: S(1)"),
        ("1f1b", {"pp": 2, "cp": 2, "tp": 2}, "balanced", "tp: S(1)"),
    ],
)  # fmt: skip
def test_schedules_train_as_the_dense_model_and_their_checkpoint_loads_into_another_layout(
    world: Any, dense: Any, tmp_path: Path, kind: str, sizes: dict[str, int], stages: Any, activations: Any
) -> None:
    losses, norms, model, optimizer = dense
    plan = make_plan(Mesh.of(**sizes), stages, activations)
    found = world.run(train_in_stages, kind, plan, tmp_path / "c")
    assert [bool(each) for each, _ in found].count(True) == 8 // sizes["pp"]
    for each, own_norms in found:
        assert_close(each or losses, losses)
        assert_close(own_norms, norms)
    moments = {f"{n}.exp_avg": optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    for state in run_local(load_as_tp2, 2, tmp_path / "c"):
        assert_close(state, {**model.state_dict(), **moments})


def test_a_rank_has_the_parameters_of_its_stages_and_loads_them_from_a_whole_model(tmp_path: Path) -> None:
    model = make_llama()
    save({"model": model}, tmp_path / "c")
    plan = make_plan(Mesh.of(pp=2, tp=2), "balanced")

    def body(comm: Comm) -> dict[str, Tensor]:
        with torch.device("meta"):
            twin = Llama().double()
        shard_module(twin, plan, init=lambda made: load({"model": made}, tmp_path / "c"))
        state = twin.state_dict()
        assert all(isinstance(t, ShardedTensor) for t in state.values())
        return whole(state)

    found = run_local(body, 4)
    parts = [sorted({name.removesuffix(".weight").rsplit(".", name.count(".") - 2)[0] for name in s}) for s in found]
    assert parts[0] == parts[1] == ["blocks.0", "blocks.1", "embed"]
    assert parts[2] == parts[3] == ["blocks.2", "blocks.3", "head", "norm"]
    for state in found:
        assert_close(state, {name: model.state_dict()[name] for name in state})


def test_stages_load_a_model_and_its_optimizer_from_another_plan(tmp_path: Path) -> None:
    def save_tp2(comm: Comm) -> dict[str, Tensor]:
        plan = ModelPlan(Mesh.of(tp=2), PARAMETERS, input_plan="replicated", output_plan="plain")
        model, (ids, targets) = shard_module(make_llama(), plan), _batch(2, LENGTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model(ids), targets).backward()
        optimizer.step()
        save({"model": model, "optimizer": optimizer}, tmp_path / "c")
        return whole({name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()})

    def load_stages(comm: Comm) -> dict[str, Tensor]:
        model = shard_module(make_llama(), make_plan(Mesh.of(pp=2, tp=2), "balanced"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        load({"model": model, "optimizer": optimizer}, tmp_path / "c")
        return whole({name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()})

    expected, found = run_local(save_tp2, 2)[0], run_local(load_stages, 4)
    assert {*found[0], *found[2]} == set(expected) and not {*found[0]} & {*found[2]}
    for moments in found:
        assert_close(moments, {name: expected[name] for name in moments})


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_an_optimizer_that_was_made_before_holds_the_parameters_of_the_stage(kind: str) -> None:
    def body(comm: Comm) -> list[str]:
        model = make_llama()
        named = dict(model.named_parameters())
        make = {"torch": lambda: torch.optim.AdamW(named.values()), "ours": lambda: ShardedOptimizer(named, AdamW)}
        optimizer: Any = make[kind]()
        shard_module(model, make_plan(Mesh.of(pp=2), "balanced"))
        held, own = optimizer.param_groups[0]["params"], list(model.parameters())
        assert len(held) == len(own) and all(p is q for p, q in zip(held, own, strict=True))
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [name for name, p in model.named_parameters() if not torch.equal(p.full(), named[name])]

    first, second = run_local(body, 2)
    assert len(first) + len(second) == len(list(make_llama().parameters()))


def test_parameters_without_values_are_those_of_the_dense_model_in_any_stage() -> None:
    def start(comm: Comm, sizes: dict[str, int], stages: Any) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(5, 4), *(nn.Linear(4, 4) for _ in range(3)))
        torch.manual_seed(3)
        return whole(shard_module(model, make_plan(Mesh.of(**sizes), stages)).state_dict())

    (expected,) = run_local(start, 1, {"dp": 1}, None)
    found = run_local(start, 2, {"pp": 2}, {"{0,1}": 0, "{2,3}": 1})
    assert_close({**found[0], **found[1]}, expected)


def test_a_made_plan_for_a_mesh_with_stages_is_that_of_the_other_axes() -> None:
    example = {"ids": torch.zeros(1, LENGTH, dtype=torch.long)}
    made = hf.plan(make_llama(), Mesh.of(pp=2, dp=2, tp=2), example, sequence_parallel=True)
    inner = hf.plan(make_llama(), Mesh.of(dp=2, tp=2), example, sequence_parallel=True)
    assert made.stages == "balanced" and made.parameters == inner.parameters and made.activations == "tp: S(1)"
    assert made.input_plan == inner.input_plan == "dp: S(0)"
    assert hf.plan(make_llama(), Mesh.of(pp=4)).stage_count == 4


def test_a_plan_with_stages_is_a_text_and_a_file(tmp_path: Path) -> None:
    for stages in (BY_HAND, "balanced", 8):
        plan = make_plan(Mesh.of(pp=4, tp=2), stages, "tp: S(1)")
        save_plan(plan, tmp_path / "plan.toml")
        assert load_plan(tmp_path / "plan.toml") == plan
    with torch.device("meta"):
        specs = make_plan(Mesh.of(pp=2, tp=2), "balanced").specs(Llama())
    assert str(specs["blocks.0.q.weight"].mesh.ranks.tolist()) == "[0, 1]"
    assert str(specs["head.weight"].mesh.ranks.tolist()) == "[2, 3]"


class Scaled(nn.Module):
    """A layer that reads a mask besides the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * mask


class Masked(nn.Module):
    """A model that scales its tokens and reads a mask in each layer; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Scaled() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x, mask = self.embed(ids) * 2, mask.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, mask)
        return {"logits": self.head(x).clamp(-3, 3)}


def make_masked() -> Masked:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return Masked()


def run_masked() -> tuple[Any, str]:
    plan = ModelPlan(Mesh.of(pp=4, dp=2), {}, input_plan="dp: S(0)", output_plan="plain", stages="balanced")
    comm, model = default_comm(), shard_module(make_masked(), plan)
    ids, mask = (t[rows_of(plan.mesh, comm.rank, ROWS)] for t in (_batch(ROWS, LENGTH)[0], MASK))
    pipeline = Pipeline(model, ids[:2], mask[:2])
    schedule = ScheduleGPipe(pipeline.stage, n_microbatches=2)
    with torch.no_grad():
        made = schedule.step(ids, mask) if pipeline.stage.is_first else schedule.step(mask=mask)
        text = ""
        if not pipeline.stage.is_first:
            with pytest.raises(PlanError) as raised:
                pipeline.modules[0](torch.zeros(2, LENGTH, WIDTH))
            text = str(raised.value)
    return made, text


MASK = (torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 3 > 0).float()


def test_outputs_are_this_ranks_rows_and_inputs_that_later_stages_read_are_passed_to_them(world: Any) -> None:
    """What surrounds the layers (a scale before them, a limit after them) is computed once."""
    expected = make_masked()(_batch(ROWS, LENGTH)[0], MASK)["logits"]
    found = world.run(run_masked)
    assert all(made is None for made, _ in found[:6])
    assert_close(torch.cat([made for made, _ in found[6:]]), expected)
    assert {text for _, text in found[2:]} == {
        f"stages: stage {stage} reads the input 'mask' of the model; pass it to every stage, as in "
        "schedule.step(mask=...)"
        for stage in (1, 2, 3)
    }


@pytest.mark.parametrize(
    ("sizes", "stages", "text"),
    [
        ({"tp": 2}, "balanced", "stages are along an axis 'pp' of the mesh, as in Mesh.of(pp=2, dp=4); got tp=2"),
        ({"pp": 2}, 3, "stages: 3 stages on pp=2; each rank has equally many, so use a multiple of 2"),
        ({"pp": 2}, "even", "stages is 'balanced', a number of stages, or maps patterns to numbers from 0"),
        ({"pp": 2}, {"embed": 0, "head": 2}, "stages: no pattern has stage 1, and the last is 2"),
    ],
)
def test_stages_that_no_mesh_has_are_refused(sizes: dict[str, int], stages: Any, text: str) -> None:
    with pytest.raises(PlanError) as raised:
        make_plan(Mesh.of(**sizes), stages)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ({"emb": 0, "**": 1}, "stages: the pattern 'emb' matches no module or parameter; near it: embed"),
        ({"embed": 0, "{embed,head}": 1}, "stages: embed.weight is in the stages 0 ('embed') and 1 ('{embed,head}')"),
        ({"embed": 0, "blocks.{0-3}": 1}, "stages: norm.weight, head.weight: 2 parameters have no stage"),
        (8, "stages: 8 balanced stages need as many layers in one list, and 'blocks' has 4"),
    ],
)
def test_stages_that_do_not_fit_the_model_are_refused(stages: Any, text: str) -> None:
    with torch.device("meta"), pytest.raises(PlanError) as raised:
        make_plan(Mesh.of(pp=2), stages).specs(Llama())
    assert text in str(raised.value)


class Skipping(Llama):
    """A model whose last block also reads what the first one returned."""

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.blocks[0](self.embed(ids))
        for block in list(self.blocks)[1:3]:
            x = block(x)
        logits: Tensor = self.head(self.norm(self.blocks[3](x + first)))
        return logits


class Between(Llama):
    """A model with arithmetic of its own between blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * 2
        logits: Tensor = self.head(self.norm(x))
        return logits


class Positions(Llama):
    """A model with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


ENDS = {"embed": 0, "blocks.0": 0, "blocks.{1-3}": 1, "{norm,head}": 1}


@pytest.mark.parametrize(
    ("kind", "stages", "text"),
    [
        (Skipping, ENDS, "stages: blocks.3 of stage 1 takes what stage 0 computed, besides the stream"),
        (Between, ENDS, "stages: blocks.1 of stage 1 does not take what blocks.0 of stage 0 returns as it is"),
        (Llama, {**ENDS, "{norm,head}": 0}, "stages: norm of stage 0 is called after blocks.3 of stage 1"),
        (Positions, {**ENDS, "scale": 0}, "stages: 'scale' is a parameter of Positions, which has parts in the stages"),
    ],
)
def test_a_model_that_is_no_chain_of_stages_is_refused(kind: Any, stages: Any, text: str) -> None:
    def body(comm: Comm) -> None:
        Pipeline(shard_module(kind(), make_plan(Mesh.of(pp=2), stages)), torch.zeros(1, LENGTH, dtype=torch.long))

    with pytest.raises(PlanError) as raised:
        run_local(body, 2)
    assert text in str(raised.value)


def test_a_staged_model_is_run_by_schedules_on_processes() -> None:
    def body(comm: Comm) -> list[str]:
        model, ids = shard_module(Llama(), make_plan(Mesh.of(pp=2), "balanced")), torch.zeros(1, 8, dtype=torch.long)
        texts = []
        for call in (lambda: model(ids), lambda: Pipeline(model, ids).stages, lambda: Pipeline(nn.Linear(1, 1), ids)):
            with pytest.raises(PlanError) as raised:
                call()
            texts.append(str(raised.value))
        return texts

    for texts in run_local(body, 2):
        assert texts[0].startswith("embed is in stage 0 of 2: a model with stages is run by a schedule")
        assert texts[1].startswith("torch's schedules send between processes, and these ranks have no process group")
        assert texts[2].startswith("Pipeline takes a model that shard_module sharded by a plan with stages")
