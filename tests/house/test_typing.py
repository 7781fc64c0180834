"""Does a type checker refuse what no function of the package takes?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).parent / "typing" / "calls.py"
OPTIONS = ("--follow-imports=silent", f"--cache-dir={ROOT / 'build' / 'mypy-of-tests'}")


def check(*files: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *OPTIONS, *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout


def test_wrong_calls_are_refused_and_right_ones_taken(tmp_path: Path) -> None:
    """An `ignore` that is not needed is an error of its own, and so is a wrong call without one."""
    bare = tmp_path / "bare.py"
    bare.write_text(re.sub(r"  # type: ignore\[[a-z-]+\]", "", CALLS.read_text()))
    found = check(CALLS, bare)
    wrong = [number for number, row in enumerate(CALLS.read_text().splitlines(), 1) if "# type: ignore[" in row]
    assert len(wrong) >= 18
    assert [row for row in found.splitlines() if "typing/calls.py" in row] == [], found
    reported = {int(n) for n in re.findall(r"bare\.py:(\d+): error", found)}
    assert reported == set(wrong), found
