"""The demo's job on 4 real processes."""

from __future__ import annotations

import pytest

from shardwise.cli.demo import run_on_ranks


@pytest.mark.timeout(180)
def test_demo_moves_and_trains_like_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks()
    out = capsys.readouterr().out
    assert "4. The same move on 4 processes: every element arrived." in out
    rows = [row.split() for row in out.splitlines() if row[:4].strip().isdigit() and len(row.split()) == 3]
    assert len(rows) == 8
    assert all(abs(float(ours) - float(dense)) < 2e-6 for _, ours, dense in rows)
    assert float(rows[-1][1]) < float(rows[0][1]) / 4
    assert "gradient of a replicated tensor" in out
