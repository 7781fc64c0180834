"""Does `shardwise model` print the figures of an estimate, and say what is wrong with its arguments?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli.main import app
from shardwise.nn import load_plan

PLAN = """
mesh = "dp=2,tp=2"
input_plan = "dp: S(0)"
[parameters]
"0.weight" = "tp: S(0)"
"1.weight" = "tp: S(1)"
"""
FACTORY = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False))

def make_with_inputs():
    return nn.Conv2d(3, 4, 3), torch.ones(2, 3, 8, 8)

def make_nothing():
    return "a model"

def raise_error():
    raise ValueError("no weights")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_models.py").write_text(FACTORY)
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "other.toml").write_text(PLAN.replace("dp=2,tp=2", "dp=4,tp=1"))
    (tmp_path / "whole.toml").write_text('mesh = "dp=2"\ninput_plan = "S(0)"\n[parameters]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["model", *arguments])


def data_of(*arguments: str, status: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


SMALL = ("planned_models:make", "--plan", "plan.toml", "--batch", "2", "--sequence", "16")


def test_figures_as_json(folder: Path) -> None:
    data = data_of(*SMALL)
    assert data["parameter_bytes"] == 65536 and data["optimizer_bytes"] == 131072
    assert data["activation_bytes"] == 24580 and data["traffic"] == {"dp": 65536}
    assert data["fits"] is True and data["device"]["name"] == "h100"
    assert [row["name"] for row in data["rows"]] == ["0.weight", "1.weight"]


def test_figures_as_text(folder: Path) -> None:
    lines = run(*SMALL).stdout.splitlines()
    assert lines[0] == "Sequential, 32,768 parameters; one step on rank 0"
    assert "parameters         65.5 kB" in lines and "activations        24.6 kB" in lines
    assert any(line.startswith("memory             80.0 GB of h100: fits") for line in lines)
    assert any(line.split()[:2] == ["0.weight", "1"] for line in lines)


def test_two_plans_and_what_lies_between(folder: Path) -> None:
    data = data_of(*SMALL, "--compare", "other.toml")
    assert data["compare"]["mesh"] == "dp=4,tp=1"
    # Each of four ranks holds half of both weights and receives the other half: 2 x 32768 bytes each.
    assert data["resharding_bytes"] == 4 * 2 * 32768
    head = next(line for line in run(*SMALL, "--compare", "other.toml").stdout.splitlines() if "compared" in line)
    assert head.split() == ["plan", "compared"]


def test_too_little_memory_is_status_1(folder: Path) -> None:
    data = data_of(*SMALL, "--memory", "100kB", status=1)
    assert data["fits"] is False
    assert "too little" in run(*SMALL, "--memory", "100kB").stdout


def test_options_reach_the_estimate(folder: Path) -> None:
    options = ("--optimizer", "sgd", "--dtype", "bf16", "--device", "h200", "--topology", "1:300GB:10MB")
    data, usual = data_of(*SMALL, *options), data_of(*SMALL, "--dtype", "bf16")
    assert data["optimizer_bytes"] == 0 and data["parameter_bytes"] == 32768
    assert data["communication_seconds"] > 5 * usual["communication_seconds"]


def test_factory_may_return_inputs(folder: Path) -> None:
    assert data_of("planned_models:make_with_inputs", "--plan", "whole.toml")["flops"] > 0


def test_the_plan_that_is_made_for_a_mesh_is_written(folder: Path) -> None:
    data = data_of("planned_models:make", "--mesh", "dp=2", "--batch", "2", "--sequence", "16", "-o", "made.toml")
    assert load_plan("made.toml").to_data() == data["plan"]


def test_plan_is_made_for_a_mesh(folder: Path) -> None:
    data = data_of("planned_models:make", "--mesh", "dp=2", "--batch", "2", "--sequence", "16")
    assert data["plan"]["input_plan"] == "dp: S(0)"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("planned_models:make",), "pass one of --plan (a file) and --mesh"),
        (("nowhere", "--mesh", "dp=2"), "'nowhere' is neither a factory such as package.module:function"),
        (("no_such_module:make", "--mesh", "dp=2"), "cannot be imported: No module named 'no_such_module'"),
        (("planned_models:made", "--mesh", "dp=2"), "the module planned_models has no made"),
        (("planned_models:make_nothing", "--mesh", "dp=2"), "returned str; a factory returns a module"),
        (
            ("planned_models:raise_error", "--mesh", "dp=2"),
            "raised ValueError: no weights; a factory is called without",
        ),
        ((*SMALL, "--topology", "8:1"), "'8:1' is not a topology"),
        ((*SMALL, "--device", "abacus"), "the device 'abacus' is not known"),
        ((*SMALL, "--optimizer", "best"), "the optimizer 'best' is not known"),
    ],
)
def test_what_cannot_be_used_is_one_line(folder: Path, arguments: tuple[str, ...], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr and "Traceback" not in result.stderr


def test_config_without_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    result = run("config.json", "--mesh", "tp=2")
    assert result.exit_code == 2
    assert "transformers, which is not installed; install shardwise[hf]" in result.stderr


def test_plan_without_an_input_plan_is_advised(folder: Path) -> None:
    (folder / "no_inputs.toml").write_text('mesh = "tp=4"\n[parameters]\n"*.weight" = "S(0)"\n')
    result = run("planned_models:make", "--plan", "no_inputs.toml", "--sequence", "16")
    assert result.exit_code == 2
    assert "give it an input_plan, such as 'dp: S(0)' or 'replicated'" in result.stderr
