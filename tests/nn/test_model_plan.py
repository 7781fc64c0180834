"""Plans by pattern: what they match, what they refuse, how they are kept in files, and models sharded by them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.comm import Comm, DisagreementError, run_local
from shardwise.geometry import ChunkSpec, Mesh, Replicate, Shard
from shardwise.geometry.notation import read_placements
from shardwise.nn import (
    ModelPlan,
    PlanError,
    ShardedOptimizer,
    ShardingPlan,
    describe_plan,
    load_plan,
    named_params_with_sharded_tensor,
    plan_files,
    plan_from_data,
    save_plan,
    shard_module,
)
from shardwise.nn.plan import match_patterns
from shardwise.tensor import ShardedTensor
from tests.nn.tiny_transformer import Sizes, Transformer, make_model, train

SIZES = Sizes()
MESH = Mesh.of(dp=2, tp=2)
PATTERNS = {
    "blocks.*.query.weight": "S(0)",
    "blocks.*.key.weight": "S(0)",
    "blocks.*.value.weight": "S(0)",
    "blocks.*.out.weight": "S(1)",
    "blocks.*.up.*": "tp: S(0)",
    "blocks.*.down.weight": "R, S(1)",
    "tokens.weight": "S(0)",
}


def plan(**changes: Any) -> ModelPlan:
    return ModelPlan(**{"mesh": MESH, "parameters": PATTERNS, "axis": "tp", "input_plan": "dp: S(0)", **changes})


def model() -> Transformer:
    return make_model(SIZES, torch.float64, tied=True, rms=False)


# Patterns and placements


def test_stars_stand_for_one_part_and_two_stars_for_any_number() -> None:
    names = ["weight", "a.weight", "a.b.weight", "a.b.bias", "a.bc.weight"]
    assert list(match_patterns(["*.weight"], names)) == ["a.weight"]
    assert list(match_patterns(["**.weight"], names)) == ["weight", "a.weight", "a.b.weight", "a.bc.weight"]
    assert list(match_patterns(["a.**"], names)) == ["a.weight", "a.b.weight", "a.b.bias", "a.bc.weight"]
    assert list(match_patterns(["a.b*.weight"], names)) == ["a.b.weight", "a.bc.weight"]


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"parameters": {"block.*.up.weight": "S(0)"}},
        r"'block\.\*\.up\.weight' matches no parameter; near it: .*blocks\.\d\.up\.weight",
    ),
    ({"parameters": {"tokens.*": "S(0)", "*.weight": "S(0)"}}, r"tokens\.weight matches 'tokens\.\*' and '\*\.weight'"),
    ({"parameters": {"tokens.weight": "S(2)"}}, r"tokens\.weight .* a dim from -2 to 1"),
    ({"parameters": {"tokens.weight": "S(0) groups(9,9)"}}, r"groups \(9, 9\), which add up to 18"),
    ({"parameters": {"tokens.weight": "S(0) groups(q)"}}, "names the length 'q'; the plan's lengths are: none"),
    ({"parameters": {"tokens.weight": "pp: S(0)"}}, "names the axis 'pp'; the mesh has dp, tp"),
    ({"parameters": {"tokens.weight": "dp: S(0), S(1)"}}, "name the axis of every placement"),
    ({"parameters": {"tokens.weight": "R, R, R"}}, "has 3 placements; the mesh dp=2,tp=2 has 2 axes"),
    ({"parameters": {"tokens.weight": "tp: S(0), tp: S(1)"}}, "gives the axis 'tp' two placements; an axis has one"),
    ({"parameters": {"tokens.weight": "P"}}, "never pending"),
    ({"axis": None}, r"'S\(0\)' does not say which axis of dp=2,tp=2 it is for"),
    ({"parameters": {"tokens.weight": "S(0)", "head.weight": "S(1)"}}, "are one parameter, and their patterns differ"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_a_plan_that_does_not_fit_changes_nothing(changes: dict[str, Any], text: str) -> None:
    net = model()
    with pytest.raises(PlanError, match=text):
        shard_module(net, plan(**changes))
    assert not any(isinstance(p, ShardedTensor) for p in net.parameters())


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        plan(parameters={"token.weight": "S(0)", "place": "S(0)"}).specs(model())
    assert len(str(caught.value).splitlines()) == 2


def test_lengths_and_forms_of_placements() -> None:
    lengths = {"q": 8, "kv": 4}
    assert read_placements("S(0) groups(q, kv, 4)", Mesh.of(tp=2), None, lengths) == (Shard(0, groups=(8, 4, 4)),)
    assert read_placements("tp: S(1), dp: S(0)", MESH) == (Shard(0), Shard(1))
    assert read_placements("R", MESH, "dp") == (Replicate(), Replicate())


@pytest.mark.parametrize("text", ["dp: S(-1)", "dp: S(0), tp: S(1) sizes(1,2)", "P, R", "dp: S(0) sizes(1,2)"])
def test_inputs_are_whole_or_parts_of_dim_0(text: str) -> None:
    with pytest.raises(PlanError, match="plain inputs are 'replicated', or each rank's part of dim 0"):
        plan(input_plan=text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"mesh": "dp=2,tp=2"},
            r"a plan's mesh is a Mesh such as Mesh\.of\(dp=2, tp=4\), or torch's DeviceMesh; got 'dp=2,tp=2'",
        ),
        (
            {"parameters": {"tokens.weight": ChunkSpec(0, 2)}},
            "has placements as strings, .* got ChunkSpec; specs of single",
        ),
        ({"input_plan": "sharded"}, "input_plan 'sharded': expected S"),
        ({"input_plan": "pp: S(0)"}, r"input_plan 'pp: S\(0\)': .* the mesh has dp, tp"),
    ],
)
def test_plans_of_other_kinds_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan(**changes)


def test_near_misses_are_of_different_kinds() -> None:
    with pytest.raises(PlanError, match=r"near it: blocks\.0\.up\.weight, blocks\.0\.\w+\.\w+, blocks\.0\.\w+\.\w+$"):
        plan(parameters={"block.*.up.weight": "S(0)"}).specs(model())


# Files


@pytest.mark.parametrize("kind", ["toml", "json", "yaml"])
def test_plans_survive_a_file(kind: str, tmp_path: Path) -> None:
    given = plan(lengths={"q": 8}, parameters={**PATTERNS, 'odd "näme"': "S(0) groups(q,q)"})
    save_plan(given, tmp_path / f"plan.{kind}")
    assert load_plan(tmp_path / f"plan.{kind}") == given
    small = ModelPlan(Mesh(("tp",), [3, 1]), {})
    save_plan(small, tmp_path / f"small.{kind}")
    assert load_plan(tmp_path / f"small.{kind}") == small


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"mesh": "tp=2", "parameter": {}}, "no field 'parameter'; a plan has mesh, axis"),
        ({"mesh": "tp=2"}, "at least mesh and parameters, got mesh"),
        ({"mesh": 2, "parameters": {}}, "mesh is a str, got int"),
        ({"mesh": "tp=2", "parameters": {"a": 1}}, "parameters 'a' is a str, got int"),
        ({"mesh": "tp=2", "parameters": {}, "lengths": {"q": "8"}}, "lengths 'q' is a int, got str"),
        ({"mesh": "tp=2", "parameters": {0: "S(0)"}}, "parameters needs strings as names, got 0; put it in quotes"),
    ],
)
def test_data_that_is_no_plan_is_refused(data: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan_from_data(data)


TWICE = {
    "json": '{"mesh": "tp=2", "parameters": {"up": "S(0)", "up": "R"}}',
    "toml": 'mesh = "tp=2"\n[parameters]\n"up" = "S(0)"\n"up" = "R"\n',
    "yaml": "mesh: tp=2\nparameters:\n  up: S(0)\n  up: R\n",
}


@pytest.mark.parametrize("kind", TWICE)
def test_a_name_that_appears_twice_in_a_file_is_an_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan.{kind}"
    path.write_text(TWICE[kind])
    with pytest.raises(PlanError, match=f"plan.{kind} is not valid {kind.upper()}: "):
        load_plan(path)


def test_files_of_other_bytes_or_without_end_of_nesting_are_plan_errors(tmp_path: Path) -> None:
    for name, data in {"a.json": b"[" * 100_000, "b.toml": b"\xff\xfe", "c.yaml": b"a: &a\n  b: *a\n"}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(PlanError, match=name):
            load_plan(tmp_path / name)


def test_files_that_hold_no_plan_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content, text in [
        ("plan.toml", "mesh = ", "plan.toml is not valid TOML"),
        ("plan.json", "{", "plan.json is not valid JSON"),
        ("plan.json", "[]", "a plan is a table with the fields"),
        ("plan.txt", "", "ends in .toml, .json or .yaml"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(PlanError, match=text):
            load_plan(tmp_path / name)
    monkeypatch.setattr(plan_files, "_yaml", None)
    (tmp_path / "plan.yaml").write_text("mesh: tp=2")
    with pytest.raises(PlanError, match="YAML needs the package PyYAML, which is not installed"):
        load_plan(tmp_path / "plan.yaml")


# The table


def test_a_large_model_is_planned_without_values_or_ranks() -> None:
    with torch.device("meta"):
        large = Transformer(Sizes(32000, 4096, 32, 2048, 1, 64), tied=False)
    table = describe_plan(plan(mesh=Mesh.of(dp=128, tp=8)), large)
    assert table.elements == sum(p.numel() for p in large.parameters()) > 10**10
    assert table.rank_bytes < 4 * table.elements / 7
    lines = str(table).splitlines()
    assert len(lines) < 30, "equal layers are one row"
    up = next(line.split() for line in lines if line.startswith("blocks.{0-63}.up.weight"))
    # 64 weights of 16384 x 4096 x 4 bytes over 8 ranks; gradients twice, less a 128th; rows of 4096 floats, twice 7/8.
    assert up[1:] == ["64", "16384x4096", "R,", "S(0)", "2.1", "GB", "4.3", "GB", "1.8", "MB"]


def test_costs_of_axes_that_cut_batch_and_parameter() -> None:
    table = describe_plan(ModelPlan(Mesh.of(dp=4), {"weight": "S(0)"}, input_plan="S(0)"), nn.Linear(8, 8))
    weight, bias = table.rows
    assert (weight.rank_bytes, weight.gradient_bytes, weight.row_bytes) == (64, 3 * 3 * 64, 0)
    assert (bias.rank_bytes, bias.gradient_bytes) == (32, 48)


def moved_in_a_step(net: nn.Module, given: ModelPlan, inputs: Tensor) -> float:
    """The bytes that a rank receives in a forward and a backward pass, by what `explain()` records."""

    def body(comm: Comm) -> int:
        mine = copy.deepcopy(net)
        shard_module(mine, given)
        own = inputs if given.input_plan == "replicated" else inputs.chunk(2)[comm.rank]
        with shardwise.explain() as log:
            mine(own).square().mean().backward()
        return log.moved_bytes

    return run_local(body, 2)[0] / 2


def test_the_table_tells_what_a_step_moves() -> None:
    net = nn.Sequential(nn.Embedding(8, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    ids = torch.arange(48) % 8
    tp = ModelPlan(Mesh.of(tp=2), {"0.weight": "S(0)", "2.*": "S(0)", "4.weight": "S(1)"}, input_plan="replicated")
    table = describe_plan(tp, net)
    assert table.gradient_bytes == 0 and len(ids) * table.row_bytes == moved_in_a_step(net, tp, ids)
    dp = ModelPlan(Mesh.of(dp=2), {}, input_plan="S(0)")
    table = describe_plan(dp, net)
    assert table.row_bytes == 0 and table.gradient_bytes == moved_in_a_step(net, dp, ids)
    both = ModelPlan(Mesh.of(dp=2), {"**": "S(0)"}, input_plan="S(0)")
    assert moved_in_a_step(net, both, ids) <= describe_plan(both, net).gradient_bytes, "an upper bound"


# Models


def part(comm: Comm) -> Callable[[Tensor], Tensor]:
    """This rank's part of a batch along dp."""
    return lambda batch: batch.chunk(2)[comm.rank // 2]


@pytest.mark.parametrize("inputs", ["dp: S(0)", "replicated"])
def test_a_planned_model_trains_as_the_dense_one(inputs: str) -> None:
    dense, base = model(), model()
    expected = train(dense, SIZES, 3)
    copies = [copy.deepcopy(base) for _ in range(4)]

    def body(comm: Comm) -> tuple[list[float], dict[str, Tensor], bool]:
        net = copies[comm.rank]
        shard_module(net, plan(input_plan=inputs))
        losses = train(net, SIZES, 3, part(comm) if inputs != "replicated" else lambda batch: batch)
        full = {name: p.full().detach() for name, p in net.named_parameters() if isinstance(p, ShardedTensor)}
        return losses, full, net.head.weight is net.tokens.weight

    for losses, parameters, tied in run_local(body, 4):
        assert tied and losses == pytest.approx(expected, rel=1e-10)
        for name, parameter in dense.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach())


def test_parts_of_inputs_must_fit_together() -> None:
    def body(comm: Comm) -> None:
        net = nn.Sequential(nn.Linear(2, 2))
        shard_module(net, ModelPlan(Mesh.of(dp=2), {}, input_plan="S(0)"))
        with pytest.raises(DisagreementError, match=r"the parts have the shapes \[\(1, 2\), \(1, 3\)\]"):
            net(torch.ones(1, 2 + comm.rank))
        with pytest.raises(DisagreementError, match=r"the ranks pass \[1, 2\] plain tensors"):
            net(*[torch.ones(1, 2)] * (1 + comm.rank))
        assert net(torch.ones(1 + comm.rank, 2)).shape == (3, 2), "a refused input leaves the reading as it was"

    run_local(body, 2)


@pytest.mark.parametrize("lengths", [(2, 2, 2, 2), (3, 1, 3, 1), (2, 1, 1, 1), (2, 1, 1, 0), (1, 0, 0, 0)])
def test_batches_are_cut_along_several_axes(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    copies = [copy.deepcopy(net) for _ in range(4)]
    parts = torch.randn(sum(lengths), 3, dtype=torch.float64).split(lengths)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = copies[comm.rank]
        shard_module(mine, ModelPlan(MESH, {"0.weight": "tp: S(0)"}, input_plan="dp: S(0), tp: S(0)"))
        result = mine(parts[comm.rank])
        result.square().sum().backward()
        gradient = next(mine.parameters()).grad
        assert isinstance(gradient, ShardedTensor)
        return result.full().detach(), gradient.full()

    net(torch.cat(parts)).square().sum().backward()
    for result, gradient in run_local(body, 4):
        torch.testing.assert_close(result, net(torch.cat(parts)).detach())
        torch.testing.assert_close(gradient, next(net.parameters()).grad)


def test_batches_that_no_two_axes_cut_are_refused() -> None:
    def body(comm: Comm) -> None:
        net = nn.Sequential(nn.Linear(2, 2))
        shard_module(net, ModelPlan(MESH, {}, input_plan="dp: S(0), tp: S(0)"))
        text = r"along axis 'tp' have the lengths \(3, 1\) and \(1, 1\) in the parts of the axes before it; use"
        with pytest.raises(DisagreementError, match=text):
            net(torch.ones((3, 1, 1, 1)[comm.rank], 2))

    run_local(body, 4)


def test_buffers_and_plain_tensors_of_the_forward_are_replicated() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))
            self.scale: Tensor
            self.register_buffer("scale", torch.tensor([1.0, 2.0]), persistent=False)

        def forward(self, x: Tensor, *, bias: float = 0.0) -> Tensor:
            return F.linear(x * self.scale + torch.arange(2), self.weight) + bias

    def body(comm: Comm) -> Tensor:
        net = Shifted()
        shard_module(net, ModelPlan(Mesh.of(dp=2), {"weight": "S(0)"}, input_plan="S(0)"))
        assert "scale" not in net.state_dict() and isinstance(net.scale, ShardedTensor)
        found = net(torch.full((2, 2), float(comm.rank)), bias=1.0)
        assert isinstance(found, ShardedTensor)
        return found.full().detach()

    whole = torch.tensor([[0.0, 0], [0, 0], [1, 1], [1, 1]])
    for found in run_local(body, 2):
        torch.testing.assert_close(found, Shifted()(whole, bias=1.0).detach())


def test_without_an_input_plan_layers_read_batches_of_their_rank() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3))
    copies = [copy.deepcopy(net) for _ in range(2)]

    def body(comm: Comm) -> Tensor:
        shard_module(copies[comm.rank], ModelPlan(Mesh.of(x=2), {"0.weight": "S(0)", "1.weight": "S(1)"}))
        result: Tensor = copies[comm.rank](torch.tensor([comm.rank, 5]))
        return result.detach()

    for rank, found in enumerate(run_local(body, 2)):
        torch.testing.assert_close(found, net(torch.tensor([rank, 5])).detach())


# Models without values


def built() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(6, 4, padding_idx=1), nn.Linear(4, 3), nn.BatchNorm1d(3))


def materialised(comm: Comm, spec: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        net = built()
    shardwise.manual_seed(7)
    names = {"0.weight": spec, "1.weight": spec}
    shard_module(net, ModelPlan(Mesh.of(x=comm.world_size), names, input_plan="replicated"))
    state = net.state_dict()
    assert all(isinstance(t, ShardedTensor) and not t.is_meta for t in state.values())
    return {name: tensor.full().detach() for name, tensor in state.items()}


def test_values_of_a_model_built_without_do_not_depend_on_the_layout() -> None:
    first = run_local(lambda comm: materialised(comm, "S(0)"), 1)[0]
    assert first["0.weight"][1].tolist() == [0.0] * 4 and first["0.weight"][0].std() > 0.1
    assert first["2.running_var"].tolist() == [1.0] * 3 and 0 < first["1.weight"].abs().max() <= 0.5
    for spec in ("S(0)", "S(1)"):
        for found in run_local(lambda comm, spec=spec: materialised(comm, spec), 3):
            assert all(torch.equal(found[name], value) for name, value in first.items())


def test_a_model_without_values_is_filled_by_a_function() -> None:
    def fill(net: nn.Module) -> None:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(2.0)

    with torch.device("meta"):
        net = nn.Linear(2, 3)
    shard_module(net, ShardingPlan({"weight": ChunkSpec(0, 1), "bias": ChunkSpec(0, 1)}), init=fill)
    assert isinstance(net.weight, ShardedTensor) and net.weight.full().tolist() == [[2.0, 2.0]] * 3


def test_what_would_stay_without_values_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(2))

    with torch.device("meta"):
        bare, linear = nn.Sequential(Bare()), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"0 \(scale\): tensors on the meta device whose modules have no reset_param"):
        shard_module(bare, ModelPlan(Mesh.of(x=1), {}))
    with pytest.raises(ValueError, match="bias: 1 tensors on the meta device are not in the plan"):
        shard_module(linear, ShardingPlan({"weight": ChunkSpec(0, 1)}))
    assert not isinstance(linear.weight, ShardedTensor)


# Optimizers


def make_layers() -> nn.Sequential:
    """The same weights in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double()


LAYERS = make_layers()


def run_steps(comm: Comm, spec: str, state: Any, steps: int) -> tuple[Any, dict[str, Tensor]]:
    """Some steps of a planned model, from a state that may come from another world; the state as whole tensors."""
    net = copy.deepcopy(LAYERS)
    shard_module(net, ModelPlan(Mesh.of(x=comm.world_size), {"*.weight": spec}, input_plan="replicated"))
    named = dict(named_params_with_sharded_tensor(net))
    optimizer = ShardedOptimizer(named, torch.optim.AdamW, lr=0.1)
    if state is not None:
        weights, saved = state
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])
        optimizer.load_state_dict(_laid_out(saved, named))
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4)).square().sum().backward()
        optimizer.step()
    weights = {n: p.full().detach() for n, p in named.items() if isinstance(p, ShardedTensor)}
    return (weights, _whole(optimizer.state_dict())), weights


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    def full(value: Any) -> Any:
        return value.full().detach() if isinstance(value, ShardedTensor) else value

    return {**state, "state": {n: {k: full(v) for k, v in s.items()} for n, s in state["state"].items()}}


def _laid_out(state: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    def like(name: str, value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0
        return shardwise.shard(value, named[name].sharding_spec(), None) if whole else value

    return {**state, "state": {n: {k: like(n, v) for k, v in s.items()} for n, s in state["state"].items()}}


def test_optimizer_state_goes_to_another_world_size() -> None:
    _, expected = run_local(lambda comm: run_steps(comm, "S(0)", None, 4), 1)[0]
    half, _ = run_local(lambda comm: run_steps(comm, "S(0)", None, 2), 3)[0]
    for _, found in run_local(lambda comm: run_steps(comm, "S(1)", half, 2), 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_sharded_optimizer_trains_parameters_that_are_copied_along_an_axis() -> None:
    def losses(comm: Comm) -> list[tuple[float, float]]:
        whole, net = copy.deepcopy(LAYERS), copy.deepcopy(LAYERS)
        shard_module(net, ModelPlan(Mesh.of(dp=2), {}, input_plan="dp: S(0)"))
        optimizers = [ShardedOptimizer(dict(m.named_parameters()), torch.optim.SGD, lr=0.1) for m in (whole, net)]
        rows = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4)
        found = []
        for _ in range(3):
            each = whole(rows).square().sum(), net(rows.tensor_split(2)[comm.rank]).square().sum()
            for loss, optimizer in zip(each, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            found.append((each[0].item(), each[1].full().item()))
        return found

    for pairs in run_local(losses, 2):
        assert all(ours == pytest.approx(dense, rel=1e-12) for dense, ours in pairs)
        assert pairs[2][0] < pairs[0][0]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "NAdam", "RMSprop", "Rprop"])
def test_blank_state_takes_a_checkpoint_of_another_world_and_training_goes_on(name: str, tmp_path: Path) -> None:
    make = getattr(torch.optim, name)
    options = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.05}

    def steps(comm: Comm, first: int, last: int) -> list[Tensor]:
        net = copy.deepcopy(LAYERS)
        shard_module(net, ModelPlan(Mesh.of(x=comm.world_size), {"*.weight": "S(0)"}, input_plan="replicated"))
        optimizer = ShardedOptimizer(dict(net.named_parameters()), make, **options)
        if first:
            optimizer.init_state()
            assert all(torch.equal(a.full(), b) for a, b in zip(net.parameters(), LAYERS.parameters(), strict=True))
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            optimizer.load_state_dict(shardwise.load(state, tmp_path / "half")["optimizer"])
        for _ in range(first, last):
            optimizer.zero_grad()
            net(torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4)).square().sum().backward()
            optimizer.step()
        if last == 2:
            shardwise.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half")
        return [p.full().detach() for p in net.parameters()]

    expected = run_local(steps, 3, 0, 4)[0]
    run_local(steps, 3, 0, 2)
    for found in run_local(steps, 2, 2, 4):
        torch.testing.assert_close(found, expected)


class _FusedAttention(nn.Module):
    """One projection for queries, keys and values, taken apart by a view, as in many vision models."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        heads = nn.functional.scaled_dot_product_attention(query, key, value)
        found: Tensor = self.out(heads.transpose(1, 2).reshape(x.shape))
        return found


ATTENTION: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], Any]]]] = {
    "MultiheadAttention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)[0]),
    "MultiheadAttention, time first": lambda: (nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0]),
    "encoder layer": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda m, x: m(x),
    ),
    "fused projection": lambda: (_FusedAttention(), lambda m, x: m(x)),
}


@pytest.mark.parametrize("batch", (1, 2, 3, 4))
@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("name", ATTENTION)
def test_every_parameter_by_rows_suits_attention_for_each_batch(name: str, ranks: int, batch: int) -> None:
    torch.manual_seed(0)
    dense, call = ATTENTION[name]()
    dense = dense.double()
    whole = torch.randn(batch, 3, 8, dtype=torch.float64)
    expected = call(dense, whole).detach()
    call(dense, whole).square().sum().backward()

    def body(comm: Comm) -> None:
        model: Any = copy.deepcopy(dense)
        model.zero_grad()
        shard_module(model, ModelPlan(Mesh.of(tp=ranks), {"**": "S(0)"}, input_plan="replicated"))
        found = call(model, whole)
        torch.testing.assert_close(found.full().detach(), expected)
        found.square().sum().backward()
        for own, other in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full(), other.grad)

    run_local(body, ranks)
