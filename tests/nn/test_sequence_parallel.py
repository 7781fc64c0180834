"""Activations split along the sequence: parameters stay, sums are scattered, one gather for q, k, v."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import (
    Comm,
    LayoutError,
    Mesh,
    MeshSpec,
    ModelPlan,
    Replicate,
    Shard,
    ShardedTensor,
    explain,
    run_local,
    shard,
    shard_module,
)
from shardwise.nn import PlanError, load_plan, save_plan
from shardwise.ops.explain import Log
from shardwise.ops.unshard import pin_parameter

WIDTH, HEADS, KEYS, WORDS = 8, 4, 2, 12
PARAMETERS = {
    "embed.weight": "tp: S(0)",
    "blocks.*.{q,k,v,gate,up}.weight": "tp: S(0)",
    "blocks.*.{out,down}.weight": "tp: S(1)",
    "head.weight": "tp: S(0)",
}


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    """A block of Llama without its rotation: grouped attention and a gated perceptron."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        keys = WIDTH // HEADS * KEYS
        self.q, self.k, self.v, self.out = (_linear(WIDTH, n) for n in (WIDTH, keys, keys, WIDTH))
        self.gate, self.up, self.down = _linear(WIDTH, 2 * WIDTH), _linear(WIDTH, 2 * WIDTH), _linear(2 * WIDTH, WIDTH)
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        counts = (HEADS, KEYS, KEYS)
        q, k, v = (
            f(y).unflatten(-1, (n, -1)).transpose(1, 2) for f, n in zip((self.q, self.k, self.v), counts, strict=True)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        y = self.between(x)
        raised: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + self.dropout(raised)


class Model(nn.Module):
    """Tokens, blocks, a norm and a head; returns the loss."""

    def __init__(self, blocks: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(WIDTH), _linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _make_model(dtype: torch.dtype = torch.float64, **options: Any) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Model(**options).to(dtype)


def _batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(WORDS, (rows, length + 1), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _plan(mesh: Mesh, activations: Any = "tp: S(1)", **options: Any) -> ModelPlan:
    inputs = "dp: S(0)" if "dp" in mesh.axes else "replicated"
    return ModelPlan(mesh, PARAMETERS, input_plan=inputs, activations=activations, **options)


def _share(ids: Tensor) -> ShardedTensor:
    return shard(ids, "tp: R", None)


def _moves(log: Log) -> list[tuple[str, str, str]]:
    """The name of each move and what the axis does before and after."""
    brief = lambda texts: texts[0].split(": ")[1]  # noqa: E731
    return [(e.name, brief(e.inputs), brief(e.outputs)) for e in log.entries if e.moved_bytes]


def _whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.full() if isinstance(p.grad, ShardedTensor) else p.grad for n, p in model.named_parameters()}  # type: ignore[misc]  # all have gradients


def test_a_block_gathers_twice_and_scatters_twice_each_way() -> None:
    """The sums of norms' weights are all that moves besides: one for each tensor, in the backward pass."""
    start, (ids, _) = _make_model(torch.float32), _batch(2, 24)  # more tokens than any weight has rows

    def body(comm: Comm) -> list[Any]:
        model = shard_module(copy.deepcopy(start), _plan(Mesh.of(tp=2)))
        block, found = model.blocks[0], []
        for _ in range(2):  # by what was remembered the second time
            with explain() as log:
                y = block(model.embed(_share(ids)))
            with explain() as back:
                (y * y).sum().backward()
            found.append((_moves(log), sorted(move[1:] for move in _moves(back))))
        return found

    gather, scatter = ("aten.linear.default", "S(1)", "R"), ("aten.add.Tensor", "P(sum)", "S(1)")
    forward = [("activations of embed", "P(sum)", "S(1)"), gather, scatter, gather, scatter]
    norms = [("P(sum)", "R")] * 2
    backward = [*norms, *[("P(sum)", "S(1)")] * 2, *[("S(1)", "R")] * 3]
    for by_rank in run_local(body, 2):
        assert by_rank == [(forward, backward)] * 2


@pytest.mark.parametrize("length", [6, 5, 3, 2, 1])
@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(tp=4), Mesh.of(dp=2, tp=2)], ids=str)
def test_losses_and_gradients_are_those_of_the_dense_model(mesh: Mesh, length: int) -> None:
    start, (ids, targets) = _make_model(), _batch(2, length)
    dense = copy.deepcopy(start)
    loss = dense(ids, targets)
    loss.backward()
    wanted = _whole_gradients(dense)

    def body(comm: Comm) -> tuple[Tensor, dict[str, Tensor]]:
        model = shard_module(copy.deepcopy(start), _plan(mesh, output_plan="plain"))
        part = mesh.coordinates(comm.rank).get("dp")
        rows = slice(None) if part is None else slice(part, part + 1)
        made = model(ids[rows], targets[rows])
        made.backward()
        return made.detach(), _whole_gradients(model)

    for found, gradients in run_local(body, mesh.size):
        assert_close(found, loss.detach())
        assert_close(gradients, wanted)


def test_outputs_of_named_modules_are_redistributed() -> None:
    """Where the plan names the layers, a sum is scattered at once, before dropout draws for it."""
    start, (ids, _) = _make_model(dropout=0.5), _batch(2, 6)

    def body(comm: Comm, activations: Any) -> tuple[list[Any], Tensor]:
        torch.manual_seed(1)
        model = shard_module(copy.deepcopy(start), _plan(Mesh.of(tp=comm.world_size), activations))
        with explain() as log:
            y = model.blocks[0](model.embed(_share(ids)))
        return [move for move in _moves(log) if move[1] == "P(sum)"], y.full()

    names = ("embed", "blocks.0.out", "blocks.0.down")
    ((_, wanted),) = run_local(body, 1, "tp: S(1)")
    for moves, y in run_local(body, 2, {"embed": "tp: S(1)", "blocks.*.{out,down}": [Shard(1)]}):
        assert moves == [(f"activations of {name}", "P(sum)", "S(1)") for name in names]
        assert_close(y, wanted)


def test_a_dim_that_is_shorter_than_the_axis_stays_whole() -> None:
    start, (ids, _) = _make_model(), _batch(2, 1)

    def body(comm: Comm) -> bool:
        model = shard_module(copy.deepcopy(start), _plan(Mesh.of(tp=2)))
        x = model.embed(_share(ids))
        return x.sharding == MeshSpec(Mesh.of(tp=2), [Replicate()]).layout(tuple(x.shape))

    assert run_local(body, 2) == [True] * 2


def _pinned_weight(mesh: Mesh, pinned: bool) -> Any:
    weight = nn.Parameter(shard(torch.arange(64.0).reshape(8, 8), MeshSpec(mesh, [Shard(0)]), None))
    if pinned:
        pin_parameter(weight, ["tp"])  # type: ignore[arg-type]  # a ShardedTensor
    return weight


CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "linear": (F.linear, "S(0)"),
    "transposed": (lambda x, w: x @ w.t(), "S(1)"),
    "cast": (lambda x, w: F.linear(x.bfloat16(), w.to(torch.bfloat16)), "S(0)"),
    "view": (lambda x, w: F.linear(x, w.view(8, 8)), "S(0)"),
    "detached": (lambda x, w: F.linear(x, w.detach()), "S(0)"),
    "copied": (lambda x, w: F.linear(x, copy.deepcopy(w)), "S(0)"),
}


@pytest.mark.parametrize(("call", "cut"), CALLS.values(), ids=CALLS)
def test_a_pinned_weight_stays_however_many_tokens_there_are(call: Callable[[Any, Any], Any], cut: str) -> None:
    def body(comm: Comm) -> list[list[Any]]:
        mesh, found = Mesh.of(tp=2), []
        x = shard(torch.ones(1, 64, 8), MeshSpec(mesh, [Shard(1)]), None)
        for pinned in (False, True, False):
            weight = _pinned_weight(mesh, pinned)
            for _ in range(2):
                with explain() as log:
                    y = call(x, weight)
                assert_close(y.full(), call(torch.ones(1, 64, 8), weight.detach().full()))
                with explain() as log:  # by what was remembered
                    call(x.clone(), weight)
                found.append([move[1:] for move in _moves(log)])
        return found

    loose, pinned = [(cut, "R")], [("S(1)", "R")]
    assert run_local(body, 2) == [[loose, loose, pinned, pinned, loose, loose]] * 2


@pytest.mark.parametrize("autocast", [False, True])
def test_autocast_and_gather_dtype_keep_pins(autocast: bool) -> None:
    start, (ids, targets) = _make_model(torch.float32), _batch(2, 24)

    def body(comm: Comm) -> set[Any]:
        plan = _plan(Mesh.of(tp=2), gather_dtype=None if autocast else torch.bfloat16)
        model = shard_module(copy.deepcopy(start), plan)
        with explain() as log, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(ids, targets)
        return {move[1:] for move in _moves(log) if move[0] == "aten.linear.default"}

    assert run_local(body, 2) == [{("S(1)", "R")}] * 2


def test_fully_sharded_parameters_are_gathered_along_the_axis_of_the_batch() -> None:
    start, (ids, targets) = _make_model(torch.float32), _batch(4, 8)

    def body(comm: Comm) -> tuple[set[str], set[str]]:
        parameters = {name: f"fsdp: S({1 - int(text[-2])}), {text}" for name, text in PARAMETERS.items()}
        plan = ModelPlan(Mesh.of(fsdp=2, tp=2), parameters, input_plan="fsdp: S(0)", activations="tp: S(1)")
        model = shard_module(copy.deepcopy(start), plan)
        row = comm.rank // 2 * 2
        with explain() as log:
            model(ids[row : row + 2], targets[row : row + 2])
        moved = {e.inputs[0].split(": ", 1)[1]: e.outputs[0].split(": ", 1)[1] for e in log.entries if e.moved_bytes}
        return {moved["S(0), S(1)"]}, {moved["S(1), S(0)"]}  # of an activation, and of a parameter

    assert run_local(body, 4) == [({"S(0), R"}, {"R, S(0)"})] * 4


def test_what_was_gathered_is_freed_with_its_tensor_and_when_the_next_one_is_gathered() -> None:
    def body(comm: Comm) -> list[bool]:
        mesh = Mesh.of(tp=2)
        weight = _pinned_weight(mesh, True)
        first, second = (shard(torch.ones(1, 64, 8), MeshSpec(mesh, [Shard(1)]), None) for _ in range(2))
        held = []
        with torch.no_grad():
            for x in (first, first, second):
                F.linear(x, weight)
                held += [x.__dict__["_gathered"].parts[0]]
            same, gone = held[0] is held[1], "_gathered" not in first.__dict__
            second.mul_(2)
            with explain() as log:
                y = F.linear(second, weight)
            fresh = bool((y.full() == F.linear(torch.full((1, 64, 8), 2.0), weight.full())).all())
            weak = weakref.ref(second.__dict__["_gathered"].parts[0])
            del second, x, y, held
            gc.collect()
        return [same, gone, bool(_moves(log)), fresh, weak() is None]

    assert run_local(body, 2) == [[True] * 5] * 2


def test_an_operator_that_cannot_keep_a_pinned_parameter_says_so_and_moves_it() -> None:
    def body(comm: Comm) -> tuple[list[str], bool]:
        weight = _pinned_weight(Mesh.of(tp=2), True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = torch.linalg.svdvals(weight)
        same = torch.allclose(values.full(), torch.linalg.svdvals(weight.detach().full()))
        return [str(w.message) for w in caught if "activations" in str(w.message)], same

    # Threads share torch's list of warnings: one of them has caught it.
    results = run_local(body, 2)
    assert all(same for _, same in results)
    texts = {text for found, _ in results for text in found}
    assert texts == {
        "aten._linalg_svd.default of torch.float32[8,8] on tp=2: S(0): the plan's `activations` keep a parameter where "
        "it is, and no strategy of this operator does, so it is moved at each call; leave the axis out of the "
        "parameter's pattern, or out of `activations`"
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activations": "tp: S(1)", "input_plan": None}, "activations 'tp: S(1)' needs an input_plan"),
        ({"activations": "tp: P"}, "activations are sharded or replicated, never pending"),
        ({"activations": "cp: S(1)"}, "activations 'cp: S(1)': 'cp: S(1)' names the axis 'cp'; the mesh has tp"),
        ({"activations": {"embed": "tp: S(-1)"}}, "dims are counted from the front"),
        ({"activations": {"embed": 3}}, "maps patterns of modules to placements such as 'tp: S(1)', got 3"),
    ],
)
def test_a_wrong_text_is_refused_when_the_plan_is_made(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        ModelPlan(Mesh.of(tp=2), PARAMETERS, **{"input_plan": "replicated", **options})
    assert text in str(caught.value)


def test_a_plan_that_names_no_module_is_refused() -> None:
    plan = _plan(Mesh.of(tp=2), {"blocks.*.att": "tp: S(1)"})
    with pytest.raises(PlanError, match=r"the pattern 'blocks.\*.att' matches no module; near it: blocks.0"):
        plan.activation_modules(_make_model())
    with pytest.raises(PlanError, match=r"the model has no nn.Embedding, where .* as in \{'patches': 'tp: S\(1\)'\}"):
        ModelPlan(Mesh.of(tp=2), {}, input_plan="replicated", activations="tp: S(1)").activation_modules(nn.ReLU())


def test_an_output_without_the_dim_is_refused_on_every_rank() -> None:
    def body(comm: Comm) -> str:
        model = shard_module(_make_model(), _plan(Mesh.of(tp=2), {"embed": "tp: S(3)"}))
        with pytest.raises(LayoutError) as caught:
            model.embed(_share(torch.zeros(2, 4, dtype=torch.long)))
        return str(caught.value)

    wanted = "activations of embed: tp: S(3) splits dim 3, and its output has the shape (2, 4, 8); name another module"
    assert run_local(body, 2) == [wanted + " or another dim in the plan's activations"] * 2


@pytest.mark.parametrize("activations", ["tp: S(1)", {"embed": "tp: S(1)", "blocks.*.out": "dp: S(0), tp: R"}])
@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_file_of_a_plan_keeps_activations(activations: Any, kind: str, tmp_path: Path) -> None:
    plan = _plan(Mesh.of(dp=2, tp=2), activations)
    save_plan(plan, tmp_path / f"plan.{kind}")
    assert load_plan(tmp_path / f"plan.{kind}") == plan
