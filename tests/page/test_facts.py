"""What does the page of `shardwise view` show? The facts are plain data: tested here without a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shardwise.checkpoint.formats.huggingface import header_bytes
from shardwise.cli.inspect import open_checkpoint
from shardwise.cli.main import app
from shardwise.cli.plan import plan_between
from shardwise.cli.view import CheckpointTarget, LayoutTarget, MoveTarget
from shardwise.geometry import LayoutError, parse_layout
from shardwise.page.document import bundle, content_policy, facts_to_json, read_front_file, render_document
from shardwise.page.facts import (
    MATRIX_CELLS,
    MOST_OWNERS,
    SHOWN_RANKS,
    MoveQuestion,
    layout_facts,
    move_facts,
    step_facts,
)
from shardwise.transfer import Topology

FRONT = Path(__file__).parents[2] / "src" / "shardwise" / "page" / "front"


def layout_of(text: str) -> dict[str, Any]:
    return layout_facts(parse_layout(text))


def move_of(source: str, target: str, question: MoveQuestion | None = None, buffer: int | None = None) -> Any:
    a = parse_layout(source)
    b = parse_layout(target, like=a)
    return move_facts(a, b, plan_between(a, b, Topology(8), buffer), Topology(8), question)


def owners_by_cells(facts: dict[str, Any]) -> dict[tuple[tuple[int, int], ...], list[int]]:
    """The holders of each cell of a regular layout, as the page works them out."""
    regular = facts["regular"]
    cuts = [list(zip(dim["starts"], dim["ends"], strict=True)) for dim in regular["cuts"]]
    copies = regular["addends"] * regular["replicas"]
    found = {}
    cells: list[tuple[tuple[int, int], ...]] = [()]
    for dim in cuts:
        cells = [(*cell, cut) for cell in cells for cut in dim]
    for number, cell in enumerate(cells):
        found[cell] = regular["owners"][number * copies : (number + 1) * copies]
    return found


@pytest.mark.parametrize(
    "text",
    [
        "f32[8,6] on dp=2,tp=2: S(0), S(1)",
        "f32[9,4] on tp=4: S(0) sizes(3,0,5,1)",
        "f32[64,3] on dp=2,tp=4: S(0), R",
        "f32[12,8] on tp=2: S(0) groups(8,2,2)",
        "f32[100] on tp=4: S(0) block(16)",
        "f32[8,4] on dp=2,tp=2: P, S(0)",
        "f32[8,4] as grid(/2, 1+3) over 5,3,1,0",
        "f32[4,4] @ 3",
        "f32[]",
    ],
)
def test_cells_of_a_layout_are_its_pieces(text: str) -> None:
    layout = parse_layout(text).layout
    told = {(cell, rank) for cell, ranks in owners_by_cells(layout_of(text)).items() for rank in ranks}
    real = {(tuple(zip(p.box.offsets, p.box.ends, strict=True)), p.rank) for p in layout.pieces}
    assert told == real


def test_boxes_of_an_irregular_layout_have_their_holders() -> None:
    facts = layout_of("f32[4,4] as pieces 0,2[0:2,0:4], 1[2:4,0:4]")
    assert facts["regular"] is None
    assert facts["boxes"]["starts"] == [[0, 0], [2, 0]] and facts["boxes"]["ends"] == [[2, 4], [4, 4]]
    assert facts["boxes"]["holders"] == [[[0, 2]], [[1]]]


def test_axes_groups_and_pending_reductions_are_named() -> None:
    facts = layout_of("f32[12,8] on dp=2,tp=2,ep=2: P(max), S(0) groups(8,2,2), R")
    assert [axis["words"] for axis in facts["axes"]] == [
        "has addends of a pending max",
        "splits dim 0, each of 3 groups on its own",
        "has replicas",
    ]
    assert facts["groups"] == [{"dim": 0, "lengths": [8, 2, 2]}]
    assert facts["pending"] == "max"
    assert layout_of("f32[8] on tp=2 @ 4,7: S(0)")["mesh_ranks"] == [4, 7]


def test_bytes_by_rank_name_ranks_that_do_not_count_from_zero() -> None:
    assert layout_of("f32[8] on tp=2: S(0)")["ranks"] == {"count": 2, "numbers": None, "elements": [4, 4]}
    assert layout_of("f32[8] on tp=2 @ 4,7: S(0)")["ranks"]["numbers"] == [4, 7]


@pytest.mark.parametrize(
    "text",
    [
        "bf16[131072,131072] on dp=128,tp=128: S(0), S(1)",
        "bf16[131072] on dp=16384: S(0)",
        "bf16[64,64] on dp=16384: R",
        "bf16[65536,2048] on dp=128,tp=128: S(0) block(16), S(1) block(16)",
    ],
)
def test_sixteen_thousand_ranks_are_little_data(text: str) -> None:
    facts = layout_of(text)
    assert len(facts["regular"]["owners"]) <= MOST_OWNERS
    assert len(facts_to_json(facts)) < 2_000_000


def test_merged_cells_cover_the_tensor_and_keep_their_first_owner() -> None:
    text = "bf16[131072,64] on dp=128,tp=8: S(0) block(4), S(1)"
    facts, layout = layout_of(text), parse_layout(text).layout
    rows = facts["regular"]["cuts"][0]
    assert facts["regular"]["merged"][0] > 1
    assert rows["starts"] == [0, *rows["ends"][:-1]] and rows["ends"][-1] == 131072
    across = len(facts["regular"]["cuts"][1]["starts"])
    assert layout.cells is not None
    assert facts["regular"]["owners"][: 2 * across] == [
        *layout.cells.owners[0, :, 0, 0].tolist(),
        *layout.cells.owners[facts["regular"]["merged"][0], :, 0, 0].tolist(),
    ]


def test_many_boxes_are_cut_off_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.page.facts.MOST_BOXES", 100)
    boxes = ", ".join(f"{i % 4}[{i}:{i + 1}]" for i in range(105))
    facts = layout_of(f"f32[105] as pieces {boxes}")
    assert len(facts["boxes"]["starts"]) == 100 and facts["boxes"]["hidden"] == 5
    assert len(facts["title"]) < 300


def test_figures_and_matrix_of_a_move_are_those_of_the_plan() -> None:
    source, target = "f32[12,8] on dp=2,tp=2: R, S(0)", "on tp=3: S(1)"
    facts = move_of(source, target)
    a = parse_layout(source)
    transfer = plan_between(a, parse_layout(target, like=a), Topology(8))
    told = {(y, x): n for y, row in enumerate(facts["matrix"]["values"]) for x, n in enumerate(row) if n}
    assert told == dict(transfer.bytes_by_edge)
    assert facts["matrix"]["busiest_link"][2] == max(transfer.bytes_by_edge.values())
    assert facts["figures"]["moved_bytes"] == sum(facts["by_rank"]["sent"]) == sum(facts["by_rank"]["received"])
    assert facts["by_rank"]["received"] == facts["by_rank"]["bound"]
    assert sum(facts["by_rank"]["bound"]) == facts["figures"]["lower_bound_bytes"]


def test_boxes_of_the_animation_fill_what_ranks_hold_afterwards() -> None:
    facts = move_of("f32[12,8] on tp=4: S(0)", "on dp=2,tp=2: S(1), S(0)", buffer=96)
    lanes = facts["lanes"]
    assert facts["figures"]["rounds"] > 1
    filled: dict[int, int] = {}
    for step in lanes["steps"]:
        assert {move[2] for move in step["moves"]} == set(range(-1, step["rounds"]))
        for _, target, _, start, end in step["moves"]:
            filled[target] = filled.get(target, 0) + (end[0] - start[0]) * (end[1] - start[1])
    assert filled == dict.fromkeys(range(4), 24)
    assert lanes["steps"][0]["before"][1] == [[[3, 0], [6, 8]]]


def test_steps_of_a_reduction_are_shown_one_after_the_other() -> None:
    facts = move_of("f32[8,4] on tp=4: P", "on tp=4: R")
    assert [step["op"] for step in facts["lanes"]["steps"]] == ["sum", None]
    assert facts["by_rank"]["bound"] is None


def test_boxes_that_are_passed_on_within_a_host_are_a_step_of_their_own() -> None:
    facts = MoveTarget("f32[64,64] on w=16: S(0)", "on w=16: R", topology="4").facts()
    first, second = facts["lanes"]["steps"]
    assert first["moves"] and {move[0] // 4 == move[1] // 4 for move in second["moves"]} == {True}
    assert facts["figures"]["bytes_between_hosts"] == facts["figures"]["lower_bound_between_hosts"] > 0


def test_a_move_of_sixteen_thousand_ranks_is_sampled_and_can_be_looked_into() -> None:
    source, target = "bf16[131072,131072] on dp=128,tp=128: S(0), S(1)", "on tp=16384: S(0)"
    facts = move_of(source, target)
    matrix = facts["matrix"]
    assert matrix["sampled"] and matrix["rows"] == [0, 16384, 128]
    assert len(matrix["values"]) == MATRIX_CELLS and len(matrix["values"][0]) == MATRIX_CELLS
    lanes = facts["lanes"]
    assert len(lanes["ranks"]) == SHOWN_RANKS and lanes["labels"][1] == "ranks 1024-2047" and lanes["hosts"] == 128
    assert lanes["steps"][0]["before"][1] == [[[8192, 0], [16384, 131072]]]
    assert len(facts_to_json(facts)) < 3_000_000
    near = move_of(source, target, MoveQuestion((128, 256), (128, 256), animated=200))
    assert not near["matrix"]["sampled"] and near["matrix"]["rows"] == [128, 256, 1]
    sent = [sum(row) for row in near["matrix"]["values"]]
    assert sent == facts["by_rank"]["sent"][128:256]
    assert near["lanes"]["ranks"][0] == 200


def volume(boxes: list[list[list[int]]]) -> int:
    return sum(int(np.prod(np.subtract(end, start))) for start, end in boxes)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[96,48] on tp=48: S(0)", "on tp=48: S(1)"),
        ("f32[96,48] on dp=6,tp=8: R, S(0)", "on dp=6,tp=8: S(0), R"),
        ("f32[100,7] as chunk(0) over 0-19", "on dp=4,tp=8: S(1), S(0)"),
        ("f32[64,8] on dp=4,tp=8: S(0), P", "on dp=4,tp=8: S(0), R"),
    ],
)
def test_a_block_gets_each_element_once_that_it_needs(source: str, target: str) -> None:
    """From itself what it holds, from another block the rest; of a pending sum from every block with an addend."""
    lanes = move_of(source, target)["lanes"]
    assert lanes["count"] > SHOWN_RANKS and len(lanes["ranks"]) <= SHOWN_RANKS
    for step in lanes["steps"]:
        assert step["hidden"] == 0
        for block, spans in enumerate(step["after"]):
            rows = [row for row in step["moves"] if row[1] == block]
            assert all((row[2] == -1) == (row[0] == block) for row in rows)
            assert volume([row[3:] for row in rows]) == volume(spans) * (1 if step["op"] is None else len(rows))


def spread_runs(detail: dict[str, Any], count: int) -> np.ndarray[Any, Any]:
    """The matrix that the runs of a written file stand for."""
    found = np.zeros((len(detail["ends"]), count), np.int64)
    first = 0
    for row, end in enumerate(detail["ends"]):
        for run in range(first, end):
            start = detail["starts"][run]
            found[row, start : start + detail["lengths"][run]] += detail["bytes"][run]
        first = end
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("f32[300,90] on tp=300: S(0)", "on dp=10,tp=30: S(1), S(0)"),
        ("f32[512,64] on dp=4,tp=64: P, S(0)", "on dp=4,tp=64: S(0), R"),
        ("f32[8,8] on tp=200: R", "on tp=200: R"),
    ],
)
def test_a_file_has_the_matrix_rank_by_rank(source: str, target: str) -> None:
    """Runs of equal cells, spread out and added up in groups, are the coarse matrix."""
    facts = MoveTarget(source, target).facts(written=True)
    matrix, detail = facts["matrix"], facts["matrix"]["detail"]
    count, step = matrix["count"], matrix["rows"][2]
    assert detail["step"] == 1 and step > 1
    found = spread_runs(detail, count)
    assert found.sum(axis=1).tolist() == facts["by_rank"]["sent"]
    assert found.sum(axis=0).tolist() == facts["by_rank"]["received"]
    edges = np.arange(0, count, step)
    coarse = np.add.reduceat(np.add.reduceat(found, edges, axis=0), edges, axis=1)
    assert coarse.tolist() == matrix["values"]
    assert "detail" not in MoveTarget(source, target).facts()["matrix"]


def test_a_file_of_very_many_ranks_has_one_sender_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = "bf16[131072,131072] on dp=128,tp=128: S(0), S(1)", "on tp=16384: S(0)"
    facts = MoveTarget(source, target).facts(written=True)
    detail = facts["matrix"]["detail"]
    assert detail["step"] == 128 and len(detail["ends"]) == MATRIX_CELLS
    assert spread_runs(detail, 16384).sum(axis=1).tolist() == facts["by_rank"]["sent"][::128]
    assert len(facts_to_json(facts)) < 3_000_000
    monkeypatch.setattr("shardwise.page.facts.MOST_RUNS", 10)
    assert MoveTarget(source, target).facts(written=True)["matrix"]["detail"] is None


def safetensors(path: Path, *names: str) -> Path:
    path.write_bytes(header_bytes({name: ("F32", [2, 3], 24) for name in names}) + bytes(24 * len(names)))
    return path


def test_facts_of_a_checkpoint_are_its_tensors_files_and_values(tmp_path: Path) -> None:
    opened = open_checkpoint(str(safetensors(tmp_path / "a.safetensors", "w", "</script>")))
    facts = CheckpointTarget(opened).facts()
    assert facts["columns"] == ["name", "dtype", "shape", "layout", "bytes", "files", "picture"]
    assert facts["tensors"][0] == ["w", "f32", [2, 3], None, 24, [0], None]
    assert facts["bytes"] == 48 and [file[0] for file in facts["files"]] == ["a.safetensors"]
    assert CheckpointTarget(opened).answer({"tensor": 0}) == {"picture": None}


def event(rank: int, start: float, duration: float, name: str = "mm", kind: str = "operator", **arguments: Any) -> Any:
    return {
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": start,
        "dur": duration,
        "name": name,
        "cat": kind,
        "args": arguments,
    }


def test_events_of_a_step_have_depths_and_time_counts_once() -> None:
    move = {"bytes": 64, "from": "f32[8] on tp=2: P(sum)", "to": "f32[8] on tp=2: R", "line": "train.py:7"}
    found = [
        {"ph": "M", "pid": 0, "name": "process_name"},
        event(1, 110, 10),
        event(0, 100, 50, "linear", line="train.py:6"),
        event(0, 110, 30, "all_reduce", "move", **move),
        event(0, 112, 20, "wait", "wait"),
        event(0, 150, 5),
    ]
    facts = step_facts("step.json", {"traceEvents": found})
    assert facts["ranks"] == [0, 1] and facts["count"] == 5
    assert facts["starts"] == [0, 10, 12, 50, 10] and facts["lanes"] == [0, 1, 2, 0, 0]
    assert facts["by_rank"] == {"operator": [25, 10], "move": [10, 0], "wait": [20, 0]}
    kinds = {kind[0]: kind for kind in facts["kinds"]}
    assert kinds["all_reduce"] == ["all_reduce", "move", 64, "train.py:7", f"{move['from']} -> {move['to']}"]
    assert facts["totals"][[kind[0] for kind in facts["kinds"]].index("mm")] == [2, 15, 10]


def test_tracks_have_lanes_and_a_moment_belongs_to_what_began_last() -> None:
    found = [event(0, 0, 100), event(0, 20, 30, "redistribute", "move"), event(0, 40, 20, "agree", "wait")]
    found += [event(0, 90, 30, "prefetch", "move"), event(0, 100, 15, "mul", **{"pass": "backward"})]
    for item in found:
        item["tid"] = int(item["cat"] != "operator")
    facts = step_facts("step.json", {"traceEvents": found})
    assert facts["lanes"] == [0, 0, 1, 2, 1]  # operators; then moves, of which one meets another
    assert facts["by_rank"] == {"operator": [20 + 30 + 15], "move": [20 + 10 + 5], "wait": [20]}
    assert "mul, backward" in [kind[0] for kind in facts["kinds"]]


def test_of_very_many_events_the_longest_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.page.facts.MOST_EVENTS", 10)
    facts = step_facts("step.json", {"traceEvents": [event(0, 100 * i, i) for i in range(25)]})
    assert facts["durations"] == list(range(15, 25)) and facts["count"] == 25
    assert facts["totals"] == [[25, sum(range(25)), 24]]


def test_files_that_are_not_traces_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    finite = "ts and dur finite numbers"
    for text, message in (
        ("{", "is not valid JSON"),
        ("3", "has no traceEvents"),
        ('{"traceEvents": 3}', "has no traceEvents"),
        ("[1, 2]", "has 1, which is not an event"),
        ('[{"ph": "X", "pid": 0, "ts": NaN}]', finite),
        ('[{"ph": "X", "pid": 0, "ts": 1e999}]', finite),
    ):
        path.write_text(text)
        result = CliRunner().invoke(app, ["view", str(path), "--json"])
        assert result.exit_code == 2 and message in json.loads(result.stdout)["error"]["message"]
    path.write_text(json.dumps([{"ph": "X", "name": "mm", "pid": "rank"}]))
    result = CliRunner().invoke(app, ["view", str(path)])
    assert "'mm' has pid" in result.stderr and "ts and dur finite numbers" in result.stderr
    path.write_text(json.dumps({"traceEvents": []}))
    assert json.loads(CliRunner().invoke(app, ["view", str(path), "--json"]).stdout)["count"] == 0


def test_targets_and_files_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    one = str(safetensors(tmp_path / "a.safetensors", "w"))
    (tmp_path / "folder").mkdir()
    for words, message in (
        ([one, one], "is a checkpoint; two targets are two plans, or the two layouts of a move"),
        ([one, "--json", "-o", str(tmp_path / "p.html")], "pass one of them"),
        ([one, "-o", str(tmp_path / "folder")], "is a folder; name a file in it"),
        ([one, "-o", ""], "is a folder; name a file in it"),
        ([one, "-o", str(tmp_path / "none" / "p.html")], f"{tmp_path}/none/p.html: No such file or directory"),
    ):
        result = CliRunner().invoke(app, ["view", *words])
        assert result.exit_code == 2 and message in result.output
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert CliRunner().invoke(app, ["view", one, "-o", str(pipe)]).exit_code == 0
        assert reader.stdout is not None and reader.stdout.read().startswith(b"<!doctype html>")
    assert pipe.is_fifo()


def test_questions_change_notation_hosts_and_buffers() -> None:
    assert (
        LayoutTarget("f32[8]").answer({"notation": "f32[8] on tp=2: S(0)", "ranks_per_host": 2})["ranks"]["count"] == 2
    )
    target = MoveTarget("f32[64,64] on tp=4: S(0)", "on tp=4: S(1)")
    assert target.answer({})["figures"]["rounds"] == 1
    assert target.answer({"buffer": "1kB"})["figures"]["rounds"] > 1
    assert target.answer({"target": "on tp=4: R"})["figures"]["collective"] == "all_gather of 4 ranks"
    near = target.answer({"topology": "8"})["figures"]["estimate_seconds"]
    assert target.answer({"topology": "1"})["figures"]["estimate_seconds"] > near
    slow = target.answer({"topology": "8:1MB:1MB"})
    assert slow["figures"]["estimate_seconds"] > 100 * near and slow["topology"]["within"]["bandwidth"] == 1e6
    with pytest.raises(LayoutError, match="is not a topology"):
        target.answer({"topology": "eight"})


def test_a_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["view", "f32[8,6] on dp=2,tp=2: S(0), S(1)", "-o", str(path)])
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=[\"'](?!data:,)", text)
    assert "connect-src &#x27;none&#x27;" in text and "default-src &#x27;none&#x27;" in text
    assert "connect-src 'self'" in content_policy(served=True)


def test_names_cannot_end_the_script_they_are_in() -> None:
    name = "</script><script>alert(1)</script>\u2028<!--"
    facts = {"title": name, "kind": "layout", "x": [name], name: 1}
    text = render_document(facts)
    assert "alert(1)</script>" not in text
    embedded = re.search(r'<script type="application/json" id="facts">(.*)</script>\n<script>', text)
    assert embedded is not None and "\u2028" not in embedded[1]
    assert json.loads(embedded[1]) == {**facts, "served": False}


def test_targets_that_are_neither_files_nor_notation_are_explained(tmp_path: Path) -> None:
    def error_of(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["view", *arguments])
        assert result.exit_code == 2
        return str(result.stderr)

    assert "no such file or folder, and not a layout such as" in error_of("runs/step-1000")
    assert "a dim from -2 to 1" in error_of("f32[8,6] on tp=2: S(2)")
    assert "got 3" in error_of("a", "b", "c")
    (tmp_path / "notes.txt").write_text("hello")
    assert "not a checkpoint" in error_of(str(tmp_path))


def test_scripts_import_what_exists_and_never_write_markup() -> None:
    text = bundle()
    scripts = sorted(path.relative_to(FRONT).as_posix() for path in FRONT.rglob("*.js"))
    assert len(scripts) > 10
    for path in scripts:
        source = read_front_file(path)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", source), (
            path
        )
        assert f"const module_{re.sub(r'[^A-Za-z0-9_]', '_', path.removesuffix('.js'))} =" in text, (
            f"{path} is not used"
        )
        assert not re.search(r"https?://", source), path


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: scripts are not parsed here")
def test_scripts_are_valid(tmp_path: Path) -> None:
    script = tmp_path / "bundle.cjs"
    script.write_text(bundle())
    done = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
