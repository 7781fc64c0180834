"""Do the commands read folders of torch.distributed.checkpoint like any other checkpoint?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from typer.testing import CliRunner, Result

import shardwise
from shardwise.cli.main import app

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that it runs without processes


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def state() -> dict[str, Any]:
    tensors = {"w": torch.arange(24.0).reshape(6, 4), "v": torch.arange(64).reshape(8, 8).to(torch.bfloat16)}
    return {"model": tensors, "step": 100, "loss": float("nan"), "name": "run"}


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    state_dict_saver.save({**state(), "odd": {1, 2}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_inspect(dcp: Path) -> None:
    result = run("inspect", dcp, "--verify", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["format"], data["count"], data["bytes"]) == ("torch.distributed.checkpoint", 2, 224)
    assert {t["name"]: (t["dtype"], t["shape"]) for t in data["tensors"]} == {
        "model.w": ("f32", [6, 4]),
        "model.v": ("bf16", [8, 8]),
    }
    assert data["values"] == {"step": 100, "loss": {"float": "nan"}, "name": "run"}
    assert data["opaque"] == ["odd"]
    assert data["ranks"] == [{"rank": 0, "held_bytes": None, "written_bytes": 224}]
    assert data["verified"] == {"ok": True, "checked_bytes": 224, "problems": []}
    assert "odd    (not plain data: not read)" in run("inspect", dcp).stdout


def test_diff(dcp: Path, tmp_path: Path) -> None:
    shardwise.save(state(), tmp_path / "ours")
    same = run("diff", dcp, tmp_path / "ours")
    assert same.exit_code == 0, same.output
    assert "the same: 2 tensors, 3 values; 1 that cannot be read are not compared: odd" in same.stdout
    other = state()
    other["model"]["w"][0, 1] = 3
    shardwise.save({**other, "step": 101}, tmp_path / "ours")
    data = json.loads(run("diff", dcp, tmp_path / "ours", "--json").stdout)
    assert [(t["name"], t["elements"], t["max_abs"]) for t in data["different"]] == [("model.w", 1, 2.0)]
    assert data["values"]["different"] == [{"name": "step", "a": 100, "b": 101}]


def test_damage_is_found(dcp: Path, tmp_path: Path) -> None:
    file = next(dcp.glob("*.distcp"))
    data = file.read_bytes()
    values = torch.arange(24.0).numpy().tobytes()
    at = data.index(values)
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    found = run("inspect", dcp, "--verify", "--json")
    assert found.exit_code == 1
    problems = json.loads(found.stdout)["verified"]["problems"]
    assert [(p["file"], p["tensor"]) for p in problems] == [(file.name, "model.w")]
    shardwise.save(state(), tmp_path / "ours")
    result = run("diff", dcp, tmp_path / "ours")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "are damaged" in result.stderr
