"""Is the library quiet until it is asked, and does it tell then what it decided?"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise import ChunkSpec, Comm, Mesh, ModelPlan, run_local, shard_module
from shardwise._text import package_logger
from tests.dense import forget

PLAN = ModelPlan(Mesh.of(tp=2), {"weight": "S(0)"}, input_plan="replicated")


def work(comm: Comm, path: Path) -> None:
    net = nn.Linear(4, 8)
    shard_module(net, PLAN)
    net(torch.ones(2, 4)).sum().backward()
    shardwise.save({"model": net.state_dict()}, path)
    shardwise.load({"model": net.state_dict()}, path)
    shardwise.ones(ChunkSpec(0, 2), 4, 2).redistribute(ChunkSpec(1, 2))


def test_nothing_is_printed_by_default() -> None:
    """In a fresh interpreter: pytest's own handlers would hide what Python prints of warnings by itself."""
    program = (
        "import torch, shardwise, shardwise.comm\n"
        "from shardwise._text import package_logger\n"
        "package_logger('shardwise.comm.x').warning('slower')\n"
        "x = shardwise.ones(shardwise.ChunkSpec(0, 1), 4); (x + 1).sum()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_info_tells_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardwise"):
        run_local(work, 2, tmp_path / "c")
    told = {(record.name, record.getMessage()) for record in caplog.records}
    size = 4 * 8 * 4
    kept = f"{size // 2 + 32} B of {size + 32} B on rank 0"
    assert ("shardwise.nn", f"Linear is sharded on tp=2, inputs replicated: 2 parameters, {kept}") in told
    assert any(name == "shardwise.checkpoint" and text.startswith(f"saved {tmp_path}/c: ") for name, text in told)
    assert ("shardwise.checkpoint", f"loaded {tmp_path}/c: 2 tensors") in told
    assert len([text for _, text in told if "is sharded" in text]) == 1, "one rank tells what all agreed on"


def test_debug_tells_moves_with_bytes_and_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget()
    with caplog.at_level(logging.DEBUG, "shardwise"):
        run_local(work, 2, tmp_path / "c")
    told = [(record.name, record.getMessage()) for record in caplog.records]
    moves = [text for name, text in told if name == "shardwise.tensor" and text.startswith("redistribute moves 16 B, ")]
    assert len(moves) == 2 and all("at test_logging.py:" in text for text in moves)
    assert ("shardwise.comm", "ranks 0, 1 agreed on 'redistribute'") in told
    assert {"shardwise.ops", "shardwise.nn", "shardwise.checkpoint"} <= {name for name, _ in told}


def test_an_operator_without_a_rule_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: Comm) -> None:
        rows = ChunkSpec(0, 2)
        torch.conv_tbc(shardwise.ones(rows, 4, 2, 2), shardwise.ones(rows, 2, 2, 2), shardwise.ones(rows, 2))

    forget()
    with caplog.at_level(logging.INFO, "shardwise.ops"):
        run_local(body, 2)
    texts = {record.getMessage() for record in caplog.records}
    assert texts == {"aten.conv_tbc.default has no rule: it is computed whole on every rank"}


def test_loggers_are_those_of_packages() -> None:
    assert package_logger("shardwise.ops.engine").name == "shardwise.ops"
    names = {n for n in logging.root.manager.loggerDict if n.startswith("shardwise.")}
    assert all(name.count(".") == 1 for name in names), names
