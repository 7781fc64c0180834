"""Does the tool that tries releases of torch plan the right commands and keep its table? Nothing is installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import matrix
from tools.matrix import CHECKS, PAIRS, Check, Pair

ROOT = Path(__file__).parents[2]


def test_the_pairs_are_the_supported_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pairs = [Pair.parse(text) for text in PAIRS]
    minors = sorted({int(pair.torch.split(".")[1]) for pair in pairs})
    assert f"torch>=2.{minors[0]},<2.{minors[-1] + 1}" in project["dependencies"]
    assert minors == list(range(minors[0], minors[-1] + 1))
    named = {text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text}
    assert {pair.python for pair in pairs} == named


def test_the_page_has_a_row_for_each_pair() -> None:
    rows = [line for line in matrix.PAGE.read_text().splitlines() if line.startswith("| 2.")]
    assert [matrix._pair_of(row) for row in rows] == [Pair.parse(text) for text in PAIRS]
    assert all(row.count("|") == len(CHECKS) + 3 for row in rows)
    assert not any("**" in row for row in rows), "a check failed"


def test_every_check_names_files_that_exist() -> None:
    words = [word for check in CHECKS for word in check.command if "/" in word or word.endswith(".md")]
    assert len(words) == 4
    assert all(list(ROOT.glob(word)) for word in words)


def test_an_environment_gets_the_wheel_and_one_torch() -> None:
    make, install = matrix.install_commands(Pair("2.14.0", "3.13"), Path("e"), Path("s.whl"), Path("c.txt"))
    assert make == ["python3.13", "-m", "venv", "e"]
    assert install[0] == "e/bin/python"
    assert {"s.whl", "torch==2.14.0", "pytest"} <= set(install)


def test_this_python_is_the_running_one() -> None:
    assert Pair.parse("2.15.0").interpreter == sys.executable


@pytest.mark.parametrize("text", ["2.15", "torch==2.15.0", "2.15.0:py", ""])
def test_a_wrong_pair_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a pair of releases"):
        Pair.parse(text)


def test_constraints_leave_torch_open() -> None:
    kept = matrix.loosen((ROOT / "constraints.txt").read_text())
    assert "\ntorch==" not in kept and "\nsetuptools==" not in kept
    assert "\nnumpy==" in kept and "\nhypothesis==" in kept


def test_rows_are_replaced_and_ordered() -> None:
    page = "before\n\n| a |\n|---|\n| 2.9.0 | 3.11 | old |\n| 2.15.0 | 3.11 | old |\n\nafter\n"
    changed = matrix.replace_rows(page, {Pair("2.15.0", "3.11"): ["new"], Pair("2.10.0", "3.13"): ["**status 1**"]})
    rows = [line for line in changed.splitlines() if line.startswith("| 2.")]
    assert rows == ["| 2.9.0 | 3.11 | old |", "| 2.10.0 | 3.13 | **status 1** |", "| 2.15.0 | 3.11 | new |"]
    assert changed.startswith("before\n\n| torch | Python | README |") and changed.endswith("|\n\nafter\n")


@pytest.mark.parametrize("status", [0, 3])
def test_a_check_runs_in_the_environment(tmp_path: Path, status: int) -> None:
    program = tmp_path / "bin" / "checker"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 7 passed in 1.0s\nexit {status}\n")
    program.chmod(0o755)
    cell = matrix.run_check(Check("any", ("checker",)), tmp_path, tmp_path)
    assert cell == ("7 passed, **status 3**" if status else "7 passed")


def test_the_plan_is_printed_without_running_it() -> None:
    command = [sys.executable, str(ROOT / "tools" / "matrix.py"), "--plan", "2.14.0:3.12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.startswith("torch 2.14.0, Python 3.12:\n  python3.12 -m venv environment\n")
    assert "torch==2.14.0" in done.stdout and "shardwise demo" in done.stdout
