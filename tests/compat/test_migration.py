"""A whole program of a user of torch's ShardedTensor gives the same answers when its import lines are changed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.world import Ranks, on_host, world_fixture

world = world_fixture(2, timeout=120)
TORCH, OURS = "torch.distributed._shard", "shardwise.compat._shard"
PROGRAM = (Path(__file__).parent / "old_program.py").read_text()


def run_program(source: str, folder: str) -> tuple[str, Any]:
    """On one rank: what a program's main returns, and the module that its ShardedTensor is from."""
    warnings.simplefilter("ignore")  # torch calls its own checkpoint planner and hooks deprecated
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "program", "exec"), namespace)
    with on_host():
        return namespace["ShardedTensor"].__module__, namespace["main"](folder)


def migrated() -> str:
    return PROGRAM.replace(TORCH, OURS)


def test_only_import_lines_change() -> None:
    pairs = zip(PROGRAM.splitlines(), migrated().splitlines(), strict=True)
    changed = [old for old, new in pairs if old != new]
    assert len(changed) == 6 and all(line.startswith("from torch.distributed._shard") for line in changed)


def test_the_migrated_program_gives_the_same_answers(world: Ranks, tmp_path: Path) -> None:
    theirs = world.run(run_program, PROGRAM, str(tmp_path / "theirs"), limit=200)
    ours = world.run(run_program, migrated(), str(tmp_path / "ours"), limit=200)
    for (torchs, expected), (module, found) in zip(theirs, ours, strict=True):
        assert torchs.startswith(TORCH) and module.startswith("shardwise.")
        before, trained, loaded, names, gathered = found
        for values, wanted in zip(found[:3], expected[:3], strict=True):
            assert values == pytest.approx(wanted, rel=1e-5)
        assert trained != before and loaded == pytest.approx(trained)
        assert names == expected[3] and ("words.weight", "ShardedTensor") in names
        assert gathered == expected[4]
    assert ours[0][1][4][0] == [[0.0] * 4] * 3 + [[1.0] * 4] * 2
