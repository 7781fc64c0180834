"""What does the page show of model plans and traces? Figures of the planner, what editing changes, events of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardwise
from shardwise import ChunkSpec, Comm, run_local
from shardwise.cli.main import app
from shardwise.nn import ModelPlan, plan_from_data
from shardwise.page.document import facts_to_json
from shardwise.page.facts import read_trace, step_facts
from shardwise.page.plan_facts import SETTINGS, PlanTarget, bytes_by_rank, plan_facts
from shardwise.planner import Estimate, ParameterRow, estimate
from shardwise.planner.estimate import count_batches
from shardwise.transfer import Topology, plan_transfer

PLAN = {
    "mesh": "dp=2,tp=2",
    "input_plan": "dp: S(0)",
    "parameters": {"0.weight": "tp: S(0)", "2.weight": "tp: S(1)"},
}
OTHER = {"mesh": "dp=4", "input_plan": "dp: S(0)", "parameters": {"0.weight": "S(0)", "2.weight": "S(0)"}}
SMALL = {**SETTINGS, "batch": 2, "sequence": 16}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64, bias=False))


def target_of(*plans: dict[str, Any]) -> PlanTarget:
    named = tuple((f"{number}.toml", plan_from_data(plan)) for number, plan in enumerate(plans))
    return PlanTarget("plans", make_model(), named, settings=SMALL)


def test_figures_are_those_of_the_planner() -> None:
    facts = target_of(PLAN).facts()
    found = estimate(make_model(), plan_from_data(PLAN), batch=2, sequence=16)
    plan = facts["plans"][0]
    assert facts["kind"] == "plan" and facts["elements"] == found.elements
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "peak_bytes", "fits"):
        assert plan[name] == getattr(found, name), name
    assert plan["traffic"] == dict(found.traffic) and plan["step_seconds"] == found.step_seconds
    rows = [dict(zip(facts["columns"], row, strict=True)) for row in plan["rows"]]
    assert [row["name"] for row in rows] == ["0.weight", "0.bias", "2.weight"]
    assert sum(row["parameters"] for row in rows) == found.parameter_bytes
    assert plan["by_rank"]["equal"] and plan["by_rank"]["values"][0] == [found.parameter_bytes]


def test_two_plans_are_moved_into_each_other() -> None:
    facts = target_of(PLAN, OTHER).facts()
    assert facts["kind"] == "plans" and [plan["mesh"] for plan in facts["plans"]] == ["dp=2,tp=2", "dp=4"]
    forth, back = facts["resharding"]
    pairs = zip(facts["plans"][0]["rows"], facts["plans"][1]["rows"], strict=True)
    assert forth["by_parameter"] == [plan_transfer(a[4], b[4], topology=Topology(8)).moved_bytes for a, b in pairs]
    assert "rank" in forth["busiest"][0]
    assert forth["bytes"] == sum(forth["by_parameter"]) and back["bytes"] > 0
    assert json.loads(facts_to_json(facts))["plans"][1]["name"] == "1.toml"


def test_ranks_that_hold_different_amounts_are_listed() -> None:
    uneven = {"mesh": "tp=3", "input_plan": "replicated", "parameters": {"0.weight": "S(0) sizes(200,56,0)"}}
    by_rank = target_of(uneven).facts()["plans"][0]["by_rank"]
    replicated = (256 + 256 * 64) * 4
    assert not by_rank["equal"]
    assert by_rank["values"][0] == [replicated + rows * 64 * 4 for rows in (200, 56, 0)]
    assert by_rank["values"][2] == [2 * held for held in by_rank["values"][0]]


def test_an_edited_plan_is_estimated_again() -> None:
    target = target_of(PLAN)
    before = target.facts()["plans"][0]
    wider = {**PLAN, "mesh": "dp=1,tp=4"}
    after = target.answer({"plans": [wider], "settings": {"batch": "4", "dtype": "bf16"}})
    assert after["plans"][0]["mesh"] == "dp=1,tp=4" and after["settings"]["batch"] == 4
    assert after["plans"][0]["parameter_bytes"] < before["parameter_bytes"] / 2
    whole = target.answer({"plans": [{**PLAN, "parameters": {}}]})["plans"][0]
    assert whole["parameter_bytes"] == (64 * 256 * 2 + 256) * 4


def test_the_best_plan_takes_the_place_of_the_last() -> None:
    """Not about: 2 sequences of each of 2 batches are 4 of all ranks, however the plan that is found cuts them."""
    target = target_of(PLAN)
    facts = target.answer({"autoplan": True})
    plan = facts["plans"][0]
    found = plan_from_data(plan["data"])
    assert facts["found"].startswith("0.toml: objective ") and plan["mesh"] == "dp=2,tp=2"
    assert facts["settings"]["batch"] * count_batches(found) == 4
    assert plan["step_seconds"] <= target.facts()["plans"][0]["step_seconds"]
    facts = target_of(PLAN, OTHER).answer({"autoplan": True})
    assert facts["plans"][0]["data"] == plan_from_data(PLAN).to_data() and facts["plans"][1]["mesh"] == "dp=4"
    with pytest.raises(ValueError, match="no plan of Sequential on dp=2,tp=2 fits in"):
        target_of(PLAN).answer({"autoplan": True, "settings": {"batch": 1 << 24, "sequence": 4096}})


def test_only_what_was_edited_is_estimated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(PLAN, OTHER)
    first = target.facts()
    asked: list[str] = []

    def count(model: nn.Module, plan: ModelPlan, **options: Any) -> Estimate:
        asked.append(str(plan.mesh))
        return estimate(model, plan, **options)

    monkeypatch.setattr("shardwise.page.plan_facts.estimate", count)
    edited = {**OTHER, "parameters": {"0.weight": "S(1)", "2.weight": "S(0)"}}
    second = target.answer({"plans": [PLAN, edited]})
    assert asked == ["dp=4"] and second["plans"][0] == first["plans"][0] and second["plans"][1] != first["plans"][1]
    assert target.answer({})["plans"] == first["plans"] and asked == ["dp=4"]
    target.answer({"settings": {"batch": 3}})
    assert asked == ["dp=4", "dp=2,tp=2", "dp=4"]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"plans": [{**PLAN, "parameters": {"9.weight": "S(0)"}}]}, "matches no parameter"),
        ({"plans": [{**PLAN, "mesh": "dp=0"}]}, "at least one rank"),
        ({"plans": []}, "shows 1 plans, got 0"),
        ({"plans": [{**PLAN, "file": "/etc/passwd"}]}, "no field 'file'"),
        ({"settings": {"batch": 0}}, "1 or more"),
        ({"settings": {"path": "/etc/passwd"}}, "unknown settings: path"),
        ({"settings": {"device": "abacus"}}, "is not known"),
    ],
)
def test_mistakes_are_told(question: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        target_of(PLAN).answer(question)


def test_two_thousand_parameters_on_sixteen_thousand_ranks_are_little_data() -> None:
    shapes = {f"blocks.{i}.{name}.weight": (8192, 8192) for i in range(250) for name in "abcdefgh"}
    plan = {"mesh": "dp=2048,tp=8", "input_plan": "dp: S(0)", "parameters": {"blocks.*.*.weight": "tp: S(0)"}}
    found = estimate(shapes, plan_from_data(plan), dtype="bf16")
    facts = plan_facts("plan.toml", "shapes", [("plan.toml", found)], Topology(8))
    assert len(facts["plans"][0]["rows"]) == 2000 and facts["plans"][0]["by_rank"]["count"] == 16384
    assert facts["plans"][0]["activation_bytes"] is None
    assert len(facts_to_json(facts)) < 400_000


def test_a_recorded_step_has_operators_and_moves_with_lines(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    def step(comm: Comm) -> None:
        weight = shardwise.shard(torch.ones(8, 4), ChunkSpec(0, ranks=2))
        with shardwise.trace(path):
            (weight * 2).redistribute(ChunkSpec(1, ranks=2))

    run_local(step, 2)
    facts = step_facts("step.json", read_trace(path))
    assert facts["ranks"] == [0, 1] and facts["seconds"] > 0
    moves = [kind for kind in facts["kinds"] if kind[1] == "move"]
    assert {(name, sent) for name, _, sent, _, _ in moves} == {("redistribute", 4 * 4 * 2)}
    assert all("test_plans.py:" in kind[3] for kind in facts["kinds"] if kind[1] != "wait")
    assert moves[0][4].endswith(" -> f32[8,4] as chunk(1) over 0-1")
    assert {kind[1] for kind in facts["kinds"]} >= {"operator", "move"}


def test_layouts_that_are_not_written_out_are_left_out() -> None:
    row = ParameterRow("w", "", (4,), "f32", "f32[4] somewhere", 16, 16, 32, 0)
    assert bytes_by_rank([row]) is None


def test_the_command_needs_a_model_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = torch.get_default_device()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "paged_models.py").write_text("from torch import nn\ndef make(): return nn.Linear(8, 4)\n")
    (tmp_path / "plan.toml").write_text('mesh = "tp=2"\ninput_plan = "replicated"\n[parameters]\n"weight" = "S(0)"\n')
    (tmp_path / "plan.json").write_text(
        json.dumps({"mesh": "tp=2", "input_plan": "replicated", "parameters": {"weight": "S(1)"}})
    )
    missing = CliRunner().invoke(app, ["view", "plan.toml"])
    assert missing.exit_code == 2 and "name it with --model" in missing.stderr
    options = ["--model", "paged_models:make", "--batch", "1", "--sequence", "2", "--json"]
    one, two = (
        CliRunner().invoke(app, ["view", *names, *options]) for names in (["plan.json"], ["plan.toml", "plan.json"])
    )
    assert json.loads(one.stdout)["kind"] == "plan" and json.loads(two.stdout)["kind"] == "plans"
    assert json.loads(two.stdout)["title"] == "plan.toml and plan.json for paged_models:make"
    wrong = CliRunner().invoke(app, ["view", "plan.toml", "--model", "paged_models:nothing"])
    assert wrong.exit_code == 2 and "has no nothing" in wrong.stderr
    assert torch.get_default_device() == default
