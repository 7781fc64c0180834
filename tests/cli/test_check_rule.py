"""Does `shardwise check-rule` read its samples, say what is wrong, and end with the right status?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli.check_rule import Sample, parse_samples
from shardwise.cli.main import app
from shardwise.geometry import NotationError
from shardwise.ops.discovery import UNDECIDED

WRONG_RULE = """
import torch
from shardwise import Replicate, Shard, register_sharding

library = torch.library.Library("check_rule_test", "DEF")
library.define("running(Tensor x, int dim) -> Tensor")
library.impl("running", lambda x, dim: x.cumsum(dim), "CompositeImplicitAutograd")
running = torch.ops.check_rule_test.running.default


@register_sharding(running)
def rule(x, dim):
    return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check-rule", *arguments])


@pytest.mark.parametrize(
    ("text", "args", "kwargs"),
    [
        ("f32[8,6], 1", (Sample("f32", (8, 6)), 1), {}),
        ("bf16[], -2, 0.5, 1e-5", (Sample("bf16", ()), -2, 0.5, 1e-5), {}),
        ("i64[5]<8, [0, -1], true, none", (Sample("i64", (5,), 8), [0, -1], True, None), {}),
        ("[f32[4], f32[4]], dim=0, mode='sum'", ([Sample("f32", (4,))] * 2,), {"dim": 0, "mode": "sum"}),
        ("", (), {}),
    ],
)
def test_samples(text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parsed = parse_samples(text)
    assert (parsed.args, parsed.kwargs) == (args, kwargs)


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("f33[4]", "unknown dtype 'f33'", 0),
        ("f32", "expected '[' after f32", 3),
        ("f32[4,", "the length of a dim", 6),
        ("f32[4] 1", "expected ',' between arguments", 7),
        ("dim=1, 2", "without a name after one with a name", 7),
        ("[1, 2", "expected ',' or ']' in a list", 5),
    ],
)
def test_mistakes_are_pointed_at(text: str, message: str, position: int) -> None:
    with pytest.raises(NotationError) as caught:
        parse_samples(text)
    assert message in str(caught.value)
    assert caught.value.position == position


def test_a_right_rule_ends_with_0() -> None:
    result = run("aten.mm.default", "--sample", "f32[4,6], f32[6,5]")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "aten.mm.default on (4, 6), (6, 5): 6 strategies checked, values and gradients",
        "  all right",
        f"  not decided: {UNDECIDED}",
    ]


def test_a_wrong_rule_of_a_module_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_running_sum.py").write_text(WRONG_RULE)
    monkeypatch.chdir(tmp_path)
    result = run("my_running_sum:running", "--sample", "f32[8,6], 0")
    assert result.exit_code == 1, result.output
    assert "wrong: S(0) -> S(0) on" in result.stdout
    assert "missing: S(1) -> S(1)" in result.stdout
    data = json.loads(run("my_running_sum:running", "--json", "--sample", "f32[8,6], 0").stdout)
    assert not data["ok"]
    assert data["wrong"][0]["strategy"] == "S(0) -> S(0)"
    assert data["wrong"][0]["error"] > 0.1
    assert data["missing"] == ["S(1) -> S(1)", "P(sum) -> P(sum)"]


def test_missing_strategies_fail_when_asked_for() -> None:
    asked = ("aten.flip.default", "--sample", "f32[4,6], [1]")
    assert run(*asked).exit_code == 0
    complete = run(*asked, "--complete")
    assert complete.exit_code == int("missing" in complete.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("aten.no_such_op.default", "--sample", "f32[4]"), "no operator 'aten.no_such_op.default'"),
        (("no.such.module:op", "--sample", "f32[4]"), "write package.module:op"),
        (("aten.arange.start_step", "--sample", "0, 4, 1"), "has no rule"),
        (("aten.mm.default", "--sample", "f32[4,6], f32[5,6]"), "does not run on tensors of shapes (4, 6), (5, 6)"),
    ],
)
def test_what_cannot_be_checked_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
