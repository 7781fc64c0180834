"""Do measured topologies come back from their samples, from their files, and from ranks that really measure?"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.geometry import LayoutError
from shardwise.planner.calibrate import Calibration, MoveSample, fit_topology, list_moves
from shardwise.planner.rehearsal import MOVE_KINDS
from shardwise.transfer import Link, Topology
from shardwise.transfer.cost import DEVICES, Device

NEAR, FAR = Link(2e-6, 8e9, 1e-6, 9e-5), Link(3e-5, 5e8, 4e-6, 9e-5)


def samples_of(made: Topology, ranks: int, inner: int, noise: float = 0.0) -> list[MoveSample]:
    rng = np.random.default_rng(1)
    moves = [MoveSample(src, dst, 1.0) for src, dst in list_moves(range(ranks), inner)]
    factors = np.exp(noise * rng.standard_normal(len(moves)))
    return [replace(m, seconds=m.transfer().estimate(made) * f) for m, f in zip(moves, factors, strict=True)]


@pytest.mark.parametrize("kind", ("messages", "native"))
def test_links_of_two_hosts_are_told_apart(kind: str) -> None:
    made = Topology(2, within=NEAR, between=FAR, memory=6e9, collectives=kind)  # type: ignore[arg-type]
    found = fit_topology(samples_of(made, 4, 2), Topology(2))
    assert found.collectives == kind and found.calibrated
    assert found.within.bandwidth == pytest.approx(NEAR.bandwidth, rel=0.25)
    assert found.between.bandwidth == pytest.approx(FAR.bandwidth, rel=0.1)
    for sample in samples_of(made, 4, 2):
        assert sample.transfer().estimate(found) == pytest.approx(sample.seconds, rel=0.25)


def test_a_noisy_machine_moves_the_figures_little() -> None:
    """One of ten samples takes 20 times as long: a slow moment."""
    made = Topology(4, within=Link(0, 5e9, 1e-6, 2e-4), memory=4e9, collectives="messages")
    samples = samples_of(made, 4, 2, noise=0.1)
    samples = [replace(s, seconds=s.seconds * 20) if i % 10 == 3 else s for i, s in enumerate(samples)]
    found = fit_topology(samples, Topology(4))
    assert found.within.bandwidth == pytest.approx(5e9, rel=0.4)
    assert found.within.call == pytest.approx(2e-4, rel=0.4)


def test_files_come_back(tmp_path: Path) -> None:
    topology = Topology(hosts=[0, 0, 1], within=NEAR, between=FAR, memory=6e9, collectives="messages", calibrated=True)
    device = replace(DEVICES["a100"], products={"bf16": ((1.0, 2.0, 3.0, 4e12),), "f32": ()}, asynchronous=False)
    device = replace(device, eager_moves={"gather": 1e-4, "gradient": 2e-4})
    path = tmp_path / "machine.toml"
    Calibration(topology, device, tuple(samples_of(topology, 3, 1)), (0.1,), 3).save(path)
    assert Topology.from_file(path) == topology and Device.from_file(path) == device
    assert [p.name for p in tmp_path.iterdir()] == ["machine.toml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks_per_host = 4", "'within' is missing"),
        ("ranks_per_host = 4\n[within]\nlatency = -1\nbandwidth = 1\n[between]", "no negative time"),
        ("ranks_per_host = 1\n[within]\nspeed = 1\n[between]", "speed"),
        ("= 4", "cannot be read"),
    ],
)
def test_files_that_are_not_topologies(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.toml"
    path.write_text(text)
    with pytest.raises(LayoutError, match=rf"(?s)other\.toml.*{message}"):
        Topology.from_file(path)


def test_the_command_measures_and_estimates_take_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of gloo, started by torchrun; then plan and model read what they wrote."""
    path = tmp_path / "machine.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*command, "-m", "shardwise", "topology", "-o", str(path), "--repeats", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # rank 0 alone prints
    topology, device = Topology.from_file(path), Device.from_file(path)
    assert topology.ranks_per_host == 2 and topology.calibrated and data["within"]["call"] >= 0
    assert len(data["sample"]) == len(data["errors"]) == len(list_moves([0, 1]))
    assert device.eager_call >= 0 and not device.asynchronous and all(row[3] > 0 for row in device.products["f32"])
    assert sorted(device.eager_moves) == sorted(MOVE_KINDS) and min(device.eager_moves.values()) >= 0
    (tmp_path / "linear_model.py").write_text("from torch import nn\ndef make(): return nn.Linear(64, 64)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    src = "f32[64,64] on tp=2: S(0)"
    planned = CliRunner().invoke(app, ["plan", src, "on tp=2: S(1)", "--topology", str(path), "--json"])
    assert json.loads(planned.stdout)["estimate_seconds"] == pytest.approx(
        MoveSample(src, "on tp=2: S(1)", 1.0).transfer().estimate(topology)
    )
    words = ["model", "linear_model:make", "--mesh", "dp=2", "--topology", str(path), "--json"]
    found = CliRunner().invoke(app, words)
    assert json.loads(found.stdout)["device"]["name"] == device.name, found.stderr
    missing = CliRunner().invoke(app, ["plan", src, "on tp=2: S(1)", "--topology", "missing.toml"])
    assert missing.exit_code == 2
    assert missing.stderr == "error: missing.toml cannot be read: No such file or directory\n"
