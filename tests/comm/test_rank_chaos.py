"""A small form of the rank faults: every kind once, over memory and over sockets; at length with `make chaos`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.ranks import BAD, CALLS, FAULTS, SIGNALS, RankCase, draw_case, judge

ROOT = Path(__file__).parents[2]


def test_no_fault_of_a_rank_fools_the_others() -> None:
    """In a process of its own, which forks its worlds."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.chaos.ranks"]
    command += ["--faults", str(len(FAULTS)), "--lanes", "4", "--timeout", "3", "--seed", "1200"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"'cases': {len(FAULTS)}" in done.stdout


def test_every_kind_of_fault_is_drawn_over_both_transports() -> None:
    cases = [draw_case(seed) for seed in range(500)]
    assert {(case.fault, case.shared) for case in cases} == {(f, s) for f in FAULTS for s in (True, False)}
    assert {operation[0] for case in cases for operation in case.program} == {
        *("move", "limited", "reduce", "broadcast", "gather", "scatter", "save")
    }
    assert draw_case(7) == draw_case(7) and set(SIGNALS) | set(CALLS) == set(FAULTS)


@pytest.mark.parametrize(
    ("fault", "message", "bad"),
    [
        ("kill", None, "hangs"),
        ("label", {"event": "done"}, "taken for the same call"),
        ("stop", {"event": "wrong", "text": "a move"}, "wrong data"),
        ("stop", {"event": "failed", "text": "someone is late", "seconds": 1.0}, "unnamed"),
        ("stop", {"event": "failed", "text": "rank 1 is late", "seconds": 9.0}, "late"),
        ("pause", {"event": "failed", "text": "rank 1 is late", "seconds": 1.0}, "false alarms"),
        ("kill", {"event": "failed", "text": "rank 1 ended", "seconds": 1.0, "lines": 742}, "floods of text"),
        ("exit", {"event": "crashed", "text": "KeyError"}, "crashes"),
    ],
)
def test_what_is_wrong_is_counted(fault: str, message: dict[str, object] | None, bad: str) -> None:
    case = RankCase(0, 2, True, False, fault, 1, 0, 0.0, ())
    good = {"event": "failed", "text": "rank 0 did not take part", "seconds": 0.1}
    counts = judge(case, [message, good if fault != "pause" else {"event": "done"}], 3.0)
    assert [name for name in BAD if counts[name]] == [bad]
