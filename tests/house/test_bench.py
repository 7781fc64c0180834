"""Does each section of the benchmarks run, in a tiny size, and give the tables it promises? No time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import checkpoint, checkpoint_stall, layouts, move, plans
from bench.__main__ import SECTIONS, main
from bench.memory import Peak
from bench.timing import Contender, run_interleaved
from tests.browser import find_browser

pytestmark = pytest.mark.usefixtures("forked_ranks")  # no time is looked at


def _tables(section: str, folder: Path) -> list[dict[str, object]]:
    assert main([section, "--tiny", "--results", str(folder)]) == 0
    content = json.loads((folder / f"{section}.json").read_text())
    assert content["machine"]["torch"]
    found: list[dict[str, object]] = content["tables"]
    return found


@pytest.mark.parametrize("section", ["layouts", "plans"])
def test_section_gives_a_row_for_each_size(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = _tables(section, tmp_path)
    shown = capsys.readouterr().out
    for table in tables:
        assert isinstance(table["rows"], list) and isinstance(table["columns"], list)
        assert table["rows"] and all(len(row) == len(table["columns"]) for row in table["rows"])
        assert str(table["title"])[:20] in shown


@pytest.mark.skipif(find_browser() is None, reason="chromium and chromedriver are not installed: no browser")
def test_page_shows_every_kind_of_target(tmp_path: Path) -> None:
    (table,) = _tables("page", tmp_path)
    assert isinstance(table["rows"], list)
    assert [row[0].partition(",")[0] for row in table["rows"]] == [
        "layout",
        "move",
        "move",
        "checkpoint",
        "plan",
        "step",
    ]


def test_move_runs_and_checks_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = _tables("move", tmp_path)
    assert "Partial -> Shard(0)" in capsys.readouterr().out
    times, wire, memory, targets, made = tables
    for table in (times, wire, memory):
        assert isinstance(table["rows"], list) and len(table["rows"]) == len(move.TINY.cases)
    assert isinstance(wire["rows"], list) and all(row[2] == 1.0 for row in wire["rows"]), "the plan moves the bound"
    assert isinstance(targets["rows"], list) and isinstance(made["rows"], list)


def test_checkpoint_runs_and_checks_what_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, stall, offline = _tables("checkpoint", tmp_path)
    assert isinstance(offline["rows"], list) and offline["rows"]
    assert isinstance(stall["rows"], list)
    assert [row[0] for row in stall["rows"]] == [checkpoint_stall.OURS, checkpoint_stall.PEER, checkpoint_stall.COPY]
    assert "Checkpoints: save, and load in another layout" in capsys.readouterr().out
    assert isinstance(table["rows"], list)
    ways = {(row[0], row[1]) for row in table["rows"]}
    assert {way for case, way in ways if case == "save 4 tensors"} == {
        checkpoint.OURS,
        checkpoint.REPLACING,
        checkpoint.PEER,
        checkpoint.RAW,
    }
    assert len(ways) == len(table["rows"]) == 8


def test_modules_runs_and_gives_lookups_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lookups, steps, sharded, owners = _tables("modules", tmp_path)
    assert "ours / by hand" in capsys.readouterr().out
    assert isinstance(lookups["rows"], list) and len(lookups["rows"]) == 2
    assert isinstance(steps["rows"], list) and [row[0] for row in steps["rows"]] == ["perceptron", "transformer block"]
    assert isinstance(sharded["rows"], list) and len(sharded["rows"]) == 1
    assert isinstance(owners["rows"], list) and len(owners["rows"]) == 1


def test_sync_runs_and_checks_what_arrives(tmp_path: Path) -> None:
    (table,) = _tables("sync", tmp_path)
    assert isinstance(table["rows"], list)
    names = [row[0] for row in table["rows"]]
    small = [f"{way} of 16 elements each, CPU time" for way in ("push", "pull")]
    assert names[2:] == ["push", "pull", "push and pull", "push and pull, over TCP", *small]


def test_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speed"])
    assert f"no section speed; there are {', '.join(SECTIONS)}" in capsys.readouterr().err


def test_contenders_take_turns() -> None:
    seen: list[str] = []
    ways = [Contender(name, lambda _, name=name: seen.append(name)) for name in "abc"]  # type: ignore[misc]  # bound
    spans = run_interleaved(ways, 2)
    assert "".join(seen) == "abcbca"
    assert all(end >= start for found in spans.values() for start, end in found)


def test_peak_sees_memory_that_is_gone_again() -> None:
    peak = Peak()
    large = np.ones(4_000_000)
    del large
    grown = peak.grown()
    assert grown is None or grown > 16_000_000


@pytest.mark.parametrize("make", [layouts.grid, layouts.ribbons, layouts.cut_ribbons])
def test_pieces_of_the_layout_section_cover_their_tensor(make: object) -> None:
    assert callable(make)
    pieces = make(60)
    for contender in pieces.contenders():
        contender.run(None)
    assert int(pieces.sizes.prod(axis=1).sum()) == pieces.shape[0] * pieces.shape[1]


def test_irregular_specs_cover_the_tensor() -> None:
    for spec in plans.make_irregular_specs(16):
        assert len(spec.layout((plans.SIDE, plans.SIDE)).pieces) == 16


def test_compile_runs_all_ways_to_the_same_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = _tables("compile", tmp_path)
    assert isinstance(table["rows"], list)
    assert [row[1] for row in table["rows"]] == ["plain", "by hand", "ours", "ours, not compiled", "DTensor"]


def test_estimates_are_compared_with_steps(tmp_path: Path) -> None:
    moves, steps, agreement = _tables("estimates", tmp_path)
    assert isinstance(moves["rows"], list) and all(row[3] > 0 for row in moves["rows"])
    assert isinstance(steps["rows"], list) and [row[:2] for row in steps["rows"]] == [
        ["tp=2", "eager"],
        ["tp=2", "compiled"],
    ]
    assert isinstance(agreement["rows"], list) and len(agreement["rows"]) == 4
