"""Does the page work in a real browser? One headless Chromium opens every kind of target, served and from a file.

Debian's packages chromium and chromium-driver are needed; without them everything here is skipped. After each test the
console is empty, and no request went anywhere but to the page itself.
"""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise
from shardwise import ChunkSpec, Comm, Mesh, MeshSpec, Replicate, Shard, run_local
from shardwise.cli.inspect import open_checkpoint
from shardwise.cli.view import CheckpointTarget, LayoutTarget, MoveTarget, PageTarget, StepTarget
from shardwise.nn import plan_from_data
from shardwise.page.document import PageServer, render_document
from shardwise.page.plan_facts import SETTINGS, PlanTarget
from tests.browser import Browser, find_browser

pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason="chromium and chromedriver are not installed: no browser"),
]
SHOWN = """document.getElementById('content').dataset.shown
    && [...document.querySelectorAll('canvas')].every((canvas) => canvas.dataset.redrawMs)"""


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    shared_browser.open("about:blank")
    shared_browser.emulate()
    shared_browser.resize(1240, 900)
    shared_browser.requests()
    yield shared_browser
    assert shared_browser.logged() == []
    page = shared_browser.run("return location.href")
    allowed = (page.rpartition("/")[0], "data:,", "about:blank")
    assert [address for address in shared_browser.requests() if not address.startswith(allowed)] == []
    loaded = shared_browser.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [address for address in loaded if not address.startswith(allowed)] == []


def open_file(browser: Browser, target: PageTarget, folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(render_document(target.facts(written=True)))
    browser.open(path.as_uri())
    browser.wait_for(SHOWN)


@contextmanager
def served(browser: Browser, target: PageTarget) -> Iterator[None]:
    with PageServer(target.facts(), target.answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            browser.open(server.address)
            browser.wait_for(SHOWN)
            yield
        finally:
            server.shutdown()
            thread.join()


def tip_at(browser: Browser, selector: str, x: float, y: float) -> str:
    """The text beside the pointer at a place of an element; what was there before is put away first."""
    browser.run("document.getElementById('tooltip').hidden = true")
    browser.hover(selector, x, y)
    browser.wait_for("!document.getElementById('tooltip').hidden")
    return browser.text("#tooltip")


def canvas(name: str) -> str:
    return f"canvas[data-name={name}]"


def pixels_of(browser: Browser, name: str) -> str:
    """What is drawn, to be compared."""
    found: str = browser.run("return document.querySelector(arguments[0]).toDataURL()", canvas(name))
    return found


def test_a_layout_is_drawn_and_the_pointer_reads_it(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, LayoutTarget("f32[8,6] on dp=2,tp=2: S(0), S(1)"), tmp_path)
    assert browser.text("h1") == "f32[8,6] on dp=2,tp=2: S(0), S(1)"
    assert browser.texts(".chips li") == ["dp=2 splits dim 0", "tp=2 splits dim 1"]
    tip = tip_at(browser, canvas("layout"), 0.7, 0.8)
    assert "[4:8, 3:6]" in tip and "rank 3" in tip and "48 B on each holder" in tip and "sizes 4 x 3" in tip
    assert "rank 2" in tip_at(browser, canvas("rank-bytes"), 0.65, 0.5)


def test_replicas_addends_and_groups_are_told(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, LayoutTarget("f32[12,8] on dp=2,tp=2,ep=2: P, S(0) groups(8,4), R"), tmp_path)
    assert {"bands: replicas, 0,1", "hatched: addends of a pending sum, 0+1", "border of a fused group"} <= set(
        browser.texts(".legend li")
    )
    tip = tip_at(browser, canvas("layout"), 0.5, 0.15)
    assert "pending sum: addends on ranks 0,1 + 4,5" in tip and "[0:4, 0:8]" in tip


def test_sliders_choose_the_slice_and_selects_the_dims(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, LayoutTarget("f32[4,6,8] on dp=2,tp=2,pp=2: S(0), S(1), S(2)"), tmp_path)
    before = pixels_of(browser, "layout")
    assert tip_at(browser, canvas("layout"), 0.2, 0.8).startswith("[0:2, 3:6, 0:4]")
    browser.run("document.querySelector('input[type=range]').focus()")
    browser.press("End")
    assert pixels_of(browser, "layout") != before
    assert tip_at(browser, canvas("layout"), 0.2, 0.8).startswith("[2:4, 3:6, 0:4]")
    browser.run("const s = document.querySelector('select'); s.value = '0'; s.dispatchEvent(new Event('change'))")
    assert browser.run("return document.querySelector('input[type=range]').dataset.dim") == "1"
    assert tip_at(browser, canvas("layout"), 0.8, 0.8).startswith("[2:4, 0:3, 4:8]")


def test_the_keyboard_goes_from_tile_to_tile(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, LayoutTarget("f32[8,6] on dp=2,tp=2: S(0), S(1)"), tmp_path)
    browser.run("document.querySelector('canvas').focus()")
    browser.press("Home", "ArrowRight", "ArrowDown")
    assert "rank 3" in browser.text("#status")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    names = browser.run("return [...document.querySelectorAll('canvas')].map((c) => c.getAttribute('aria-label'))")
    assert all(len(name) > 20 for name in names)
    unnamed = """return [...document.querySelectorAll('button, input, select')].filter((e) => !e.labels?.length
        && !e.getAttribute('aria-label') && !e.textContent.trim()).length"""
    assert browser.run(unnamed) == 0


def test_colours_follow_host_axis_and_scheme(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, LayoutTarget("f32[16,4] on dp=4,tp=4: S(0), S(1)", ranks_per_host=4), tmp_path)
    pictures = {pixels_of(browser, "layout")}
    for choice in ("host", "axis tp"):
        change = """const all = [...document.querySelectorAll('select')];
            const s = all.find((e) => [...e.options].some((o) => o.value === 'host')); s.value = arguments[0];
            s.dispatchEvent(new Event('change'))"""
        browser.run(change, choice)
        pictures.add(pixels_of(browser, "layout"))
    assert "tp 3" in browser.texts(".legend li")
    browser.emulate(prefers_color_scheme="dark")
    browser.wait_for("getComputedStyle(document.body).backgroundColor === 'rgb(15, 20, 26)'")
    drawn = f"document.querySelector('{canvas('layout')}').toDataURL()"
    browser.wait_for(f"!{json.dumps(sorted(pictures))}.includes({drawn})")  # drawn anew a moment after the style
    pictures.add(pixels_of(browser, "layout"))
    assert len(pictures) == 4


def test_a_served_layout_is_edited_and_mistakes_are_told(browser: Browser) -> None:
    with served(browser, LayoutTarget("f32[8,6] on tp=2: S(0)")):
        browser.fill("input[data-name=notation]", "f32[8,6] on tp=4: S(0)")
        browser.press("Enter")
        browser.wait_for("document.querySelector('h1').textContent.includes('tp=4')")
        assert browser.texts(".figures dd")[1].startswith("4")
        browser.fill("input[data-name=notation]", "f32[8,6] on tp=4: S(<b>)")
        browser.press("Enter")
        browser.wait_for("!document.querySelector('.error').hidden")
        assert "S(<b>)" in browser.text(".error") and browser.run("return document.querySelector('.error b')") is None


def test_a_move_is_drawn_round_by_round(browser: Browser, tmp_path: Path) -> None:
    target = MoveTarget("f32[64,32] on tp=4: S(0)", "on tp=4: S(1)", buffer="1kB")
    open_file(browser, target, tmp_path)
    assert browser.texts(".figures dt")[:2] == ["Moved", "Copied within ranks"]
    frames = {pixels_of(browser, "lanes")}
    browser.run("document.querySelector('input[data-name=time]').focus()")
    for _ in range(2):
        browser.press(*["ArrowRight"] * 30)
        frames.add(pixels_of(browser, "lanes"))
    assert len(frames) == 3
    assert browser.run(
        "return document.querySelector('input[data-name=time]').getAttribute('aria-valuetext')"
    ).startswith("round 1")
    assert "rank 1 → rank 3" in tip_at(browser, canvas("matrix"), 0.85 * 0.9, 0.4)
    assert "lower bound" in tip_at(browser, canvas("move-bytes"), 0.6, 0.5)
    assert "receives" in tip_at(browser, canvas("lanes"), 0.8, 0.2)


def test_the_animation_plays_and_stops(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, MoveTarget("f32[8,8] on tp=2: S(0)", "on tp=2: S(1)"), tmp_path)
    browser.click("button.act.main")
    browser.wait_for("Number(document.querySelector('input[data-name=time]').value) >= 1")
    browser.wait_for("document.querySelector('button.act.main').textContent === 'Play'")


def test_a_served_move_is_planned_again(browser: Browser) -> None:
    with served(browser, MoveTarget("f32[64,64] on tp=4: S(0)", "on tp=4: S(1)")):
        browser.fill("input[data-name=target]", "on tp=4: R")
        browser.press("Enter")
        browser.wait_for("document.querySelector('.figures').textContent.includes('all_gather')")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of 4 ranks with names that would be markup."""
    path = str(tmp_path_factory.mktemp("page") / "ckpt<b>")
    mesh = Mesh.of(dp=2, tp=2)

    def write(comm: Comm) -> None:
        weights = {f"blocks.{i}.up.weight": MeshSpec(mesh, (Replicate(), Shard(0))) for i in range(30)}
        tensors = {name: shardwise.shard(torch.zeros(8, 4), spec) for name, spec in weights.items()}
        tensors["embed"] = shardwise.shard(torch.zeros(10, 4, dtype=torch.float64), ChunkSpec(0, ranks=4))
        named = {
            "<img src=x onerror=document.title='owned'>": torch.zeros(3),
            "</script><script>alert(1)</script>": torch.ones(2),
        }
        shardwise.save({"model": {**tensors, **named}, "note": "<i>text</i>"}, path)

    run_local(write, 4)
    return path


def test_a_checkpoint_is_searched_sorted_and_looked_into(browser: Browser, checkpoint: str, tmp_path: Path) -> None:
    open_file(browser, CheckpointTarget(open_checkpoint(checkpoint)), tmp_path)
    first = "[data-card=tensors] tbody tr.row td"
    assert browser.text(first) == "▸ 30 \u00d7model.blocks.0-29.up.weight"
    assert browser.text("[data-card=tensors] output") == "33 tensors, those alike folded"
    browser.click("[data-card=tensors] button.fold")
    assert browser.texts("[data-card=tensors] tbody tr.row td:first-child")[:2] == [
        "▾model.blocks.0.up.weight",
        "model.blocks.1.up.weight",
    ]
    browser.click("[data-card=tensors] button.fold")
    assert len(browser.texts("[data-card=tensors] tbody tr.row")) == 4
    browser.fill("[data-card=tensors] input[type=search]", "blocks.1 up")
    assert browser.text("[data-card=tensors] output") == "11 tensors of 33"
    browser.fill("[data-card=tensors] input[type=search]", "nothing like this")
    assert "Nothing matches." in browser.text("[data-card=tensors] tbody")
    browser.fill("[data-card=tensors] input[type=search]", " ")
    browser.click("[data-card=tensors] th:nth-child(5) button")
    assert browser.text(first) == "model.embed"
    assert browser.run("return document.querySelector('[data-card=tensors] th:nth-child(5)').ariaSort") == "descending"
    browser.click(first)
    assert "as chunk(0)" in browser.texts("[data-card=tensors] tr.chosen td")[3]
    assert browser.text("[data-card=layout] code.whole").endswith("as chunk(0) over 0-3")
    assert "[3:6, 0:4]" in tip_at(browser, canvas("tensor"), 0.5, 0.45)
    assert "rank 1" in tip_at(browser, canvas("balance"), 0.4, 0.5)
    assert len(browser.texts("[data-card=files] tbody tr.row")) == 4


def test_names_in_a_checkpoint_stay_text(browser: Browser, checkpoint: str, tmp_path: Path) -> None:
    open_file(browser, CheckpointTarget(open_checkpoint(checkpoint)), tmp_path)
    browser.fill("[data-card=tensors] input[type=search]", "<")
    assert set(browser.texts("[data-card=tensors] tbody tr.row td:first-child")) == {
        "model.<img src=x onerror=document.title='owned'>",
        "model.</script><script>alert(1)</script>",
    }
    browser.click("[data-card=tensors] tbody tr.row td")
    assert browser.run("return document.querySelectorAll('main img, main i, main script').length") == 0
    assert "owned" not in browser.run("return document.title")


def test_injected_scripts_are_refused_by_the_policy(shared_browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        render_document(LayoutTarget("f32[8]").facts()).replace(
            "</main>", "<script>document.title = 'owned'</script></main>"
        )
    )
    shared_browser.open(path.as_uri())
    shared_browser.wait_for(SHOWN)
    assert "owned" not in shared_browser.run("return document.title")
    assert any("Content Security Policy" in message for message in shared_browser.logged())


def test_sixteen_thousand_ranks_are_drawn_and_zoomed(browser: Browser) -> None:
    grid = "bf16[131072,131072] on dp=128,tp=128: S(0), S(1)"
    with served(browser, MoveTarget(grid, "on tp=16384: S(0)")):
        assert "16,384 ranks" in browser.text("[data-card=matrix] .note")
        browser.click(canvas("matrix"), 0.5, 0.5)
        browser.wait_for("!document.querySelector('[data-card=matrix] button').hidden")
        zoomed = tip_at(browser, canvas("matrix"), 0.5, 0.5)
        assert re.match(r"rank \d+ → rank \d+", zoomed)
        before = pixels_of(browser, "before")
        browser.click("[data-card=before] button[aria-label='Zoom in']")
        assert pixels_of(browser, "before") != before
        slowest = browser.run(
            "return Math.max(...[...document.querySelectorAll('canvas')].map((c) => Number(c.dataset.redrawMs)))"
        )
        print(f"slowest redraw at 16,384 ranks: {slowest} ms")


def test_a_file_is_zoomed_into_without_a_server(browser: Browser, tmp_path: Path) -> None:
    """Rank 150 of 300 sends its 3 columns of 1 row, 4 bytes each, to every rank that has 3 columns."""
    target = MoveTarget("f32[300,900] on tp=300: S(0)", "on tp=300: S(1)")
    open_file(browser, target, tmp_path)
    assert "Click to look closer" in browser.text("[data-card=matrix] .note")
    assert re.match(r"ranks \d+ to \d+ → ranks \d+ to \d+", tip_at(browser, canvas("matrix"), 0.5, 0.5))
    browser.click(canvas("matrix"), 0.5, 0.5)
    browser.wait_for("!document.querySelector('[data-card=matrix] button').hidden")
    zoomed = tip_at(browser, canvas("matrix"), 0.45, 0.6)
    assert re.match(r"rank \d+ → rank \d+\s*12 B", zoomed)
    browser.click("[data-card=matrix] button")
    browser.run(f"document.querySelector('{canvas('matrix')}').focus()")
    browser.press("End", "Enter")
    assert browser.run("return document.activeElement.dataset.name") == "matrix"
    browser.press("End")
    assert "rank 299 → rank 299" in browser.text("#status")


def test_signs_that_are_not_seen_are_written_as_escapes(browser: Browser, tmp_path: Path) -> None:
    shardwise.save({"a\u202eb\n": torch.ones(2)}, tmp_path / "ckpt")
    open_file(browser, CheckpointTarget(open_checkpoint(str(tmp_path / "ckpt"))), tmp_path)
    assert browser.texts("[data-card=tensors] td.code")[0] == "a\\u{202e}b\\u{a}"


PLAN = {
    "mesh": "dp=2,tp=2",
    "input_plan": "dp: S(0)",
    "parameters": {"blocks.*.0.weight": "tp: S(0)", "blocks.*.2.weight": "tp: S(1)"},
}


def plan_target(*plans: dict[str, object]) -> PlanTarget:
    """Plans for three blocks of two layers."""
    block = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)]
    model = nn.Sequential()
    model.add_module("blocks", nn.Sequential(*block))
    named = tuple((f"plan{number}.toml", plan_from_data(plan)) for number, plan in enumerate(plans))
    return PlanTarget("<b>plans</b>", model, named, settings={**SETTINGS, "batch": 1, "sequence": 8})


def test_a_served_plan_is_edited(browser: Browser) -> None:
    with served(browser, plan_target(PLAN)):
        assert browser.text("h1") == "<b>plans</b>"
        label = "return document.querySelector('[data-card=memory] .track').ariaLabel"
        held = browser.run(label)
        assert held.startswith("plan0.toml on dp=2,tp=2: parameters")
        browser.fill("input[data-name=mesh]", "dp=1,tp=4")
        browser.press("Enter")
        browser.wait_for("document.querySelector('.figures').textContent.includes('dp=1,tp=4')")
        assert browser.run(label) != held.replace("dp=2,tp=2", "dp=1,tp=4")
        browser.fill("input[data-name=pattern]", "blocks.*.9.weight")
        browser.press("Enter")
        browser.wait_for("!document.querySelector('.error').hidden")
        assert "matches no parameter" in browser.text(".error")
        browser.click("button[aria-label='Remove blocks.*.2.weight']")
        browser.fill("input[data-name=pattern]", "blocks.*.0.weight")
        browser.press("Enter")
        browser.wait_for("document.querySelectorAll('input[data-name=pattern]').length === 1")
        browser.wait_for("document.querySelector('[data-card=parameters] tbody').textContent.includes('R, R')")


def test_names_in_a_plan_and_in_its_errors_stay_text(browser: Browser) -> None:
    """Names of modules and files, a mesh and a pattern that are typed, and the errors that repeat them."""
    hostile = "<img src=x onerror=alert(1)>"
    model = nn.Sequential()
    model.add_module(hostile, nn.Linear(8, 8))
    model.add_module("</script><script>alert(1)</script>", nn.Linear(8, 8))
    plan = plan_from_data({"mesh": "tp=2", "input_plan": "R", "parameters": {"**.weight": "S(0)"}})
    target = PlanTarget(hostile, model, ((f"{hostile}.toml", plan),), settings={**SETTINGS, "batch": 1, "sequence": 8})
    added = "return document.querySelectorAll('main img, main script').length"
    with served(browser, target):
        assert browser.text("h1") == hostile and browser.run(added) == 0
        for name, value in (("mesh", f"tp=2,{hostile}=1"), ("pattern", f"{hostile}.*.x")):
            browser.fill(f"input[data-name={name}]", value)
            browser.press("Enter")
            browser.wait_for("!document.querySelector('.error').hidden")
            assert hostile in browser.text(".error") and browser.run(added) == 0


def test_the_best_plan_is_searched_for(browser: Browser) -> None:
    with served(browser, plan_target(PLAN)):
        browser.fill("input[data-name=mesh]", "dp=4")
        browser.click("[aria-label='Remove blocks.*.0.weight']")
        browser.click("[aria-label='Remove blocks.*.2.weight']")
        browser.click(".settings button[type=button]")
        browser.wait_for("document.querySelector('[data-name=found]')")
        assert browser.text("[data-name=found]").startswith("plan0.toml: objective ")
        assert "dp=4" in browser.text(".figures")
        assert browser.texts(".settings button") == ["Estimate", "Autoplan"]


def test_modules_are_a_tree_and_parameters_a_table(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, plan_target(PLAN), tmp_path)
    assert browser.run("return document.querySelector('[data-card=editor]')") is None
    browser.run("document.querySelector('[role=treeitem]').focus()")
    browser.press("ArrowDown", "ArrowRight", "ArrowDown")
    assert browser.run("return document.activeElement.querySelector('.name').title") == "0"
    assert browser.run("return document.activeElement.ariaLevel") == "3"
    assert "0-2, 3 alike" in browser.texts("[role=treeitem] .name")[1]
    browser.press("Enter")
    assert browser.text("[data-card=parameters] output") == "4 parameters of 12"
    browser.fill("[data-card=parameters] input[type=search]", "bias")
    browser.click("[data-card=parameters] th:nth-child(1) button")
    assert browser.texts("[data-card=parameters] tbody tr.row td:first-child")[0] == "blocks.0.0.bias"
    assert "traffic" in browser.texts("[data-card=parameters] th")


def test_a_number_says_why_and_a_plan_is_a_file(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, plan_target(PLAN), tmp_path)
    tip = tip_at(browser, ".figures .asked:nth-child(3)", 0.5, 0.5)
    assert tip.startswith("The most that the fullest rank holds") and "The largest: blocks.0.0.weight" in tip
    assert "blocks.0.0.weight" in tip_at(browser, "[data-card=memory] .track span", 0.5, 0.5)
    browser.run("document.querySelectorAll('[data-name=plan-file] button')[1].click()")
    browser.wait_for("document.querySelector('[data-name=plan-file] output').textContent")
    assert browser.text("[data-name=plan-file] output") == "Saved as plan0.toml."


def test_an_edited_plan_is_copied_as_toml(browser: Browser) -> None:
    with served(browser, plan_target(PLAN)):
        browser.run("navigator.clipboard.writeText = async (text) => { document.body.dataset.copied = text; }")
        browser.fill("[data-name=mesh]", "dp=4,tp=1")
        browser.click("[data-name=plan-file] button")
        browser.wait_for("document.body.dataset.copied")
        copied = browser.run("return document.body.dataset.copied")
    assert plan_from_data(tomllib.loads(copied)) == plan_from_data({**PLAN, "mesh": "dp=4,tp=1"})


def test_a_thousand_ranks_are_drawn_in_blocks_of_hosts(browser: Browser, tmp_path: Path) -> None:
    open_file(browser, MoveTarget("f32[1024,1024] on tp=1024: S(0)", "on tp=1024: S(1)"), tmp_path)
    assert "1,024 ranks in blocks of 8 hosts" in browser.text("[data-card=lanes] .note")
    tip = tip_at(browser, canvas("lanes"), 0.05, 0.15)
    assert tip.startswith("ranks 0-63, before") and "holds [0:64, 0:1024]" in tip


def test_two_plans_are_side_by_side(browser: Browser, tmp_path: Path) -> None:
    other: dict[str, object] = {
        "mesh": "dp=4",
        "input_plan": "replicated",
        "parameters": {"blocks.*.0.weight": "S(0) sizes(10,20,30,68)"},
    }
    open_file(browser, plan_target(PLAN, other), tmp_path)
    assert browser.texts("table.compare thead th") == ["figure", "plan0.toml", "plan1.toml"]
    assert len(browser.texts("[data-card=memory] .track")) == 2
    assert "plan0.toml → plan1.toml: " in browser.text("[data-name=moving]")
    assert "(better)" in browser.text("table.compare")
    assert "rank 3" in tip_at(browser, canvas("plan-ranks"), 0.9, 0.5)


def test_a_step_is_a_timeline_with_source_lines(browser: Browser, tmp_path: Path) -> None:
    moved = {"bytes": 4096, "from": "f32[8] on tp=2: P(sum)", "to": "f32[8] on tp=2: R", "line": "train.py:7 <i>"}
    events = []
    for rank in range(2):
        for number in range(10):
            common = {"ph": "X", "pid": rank, "tid": 0, "dur": 60.0}
            operator = {"name": "aten.mm", "cat": "operator", "args": {"line": "train.py:6"}}
            events.append({**common, "ts": 100.0 * number, **operator})
            events.append(
                {**common, "ts": 100.0 * number + 60, "dur": 40.0, "name": "all_reduce", "cat": "move", "args": moved}
            )
    open_file(browser, StepTarget("step.json", {"traceEvents": events}), tmp_path)
    tip = tip_at(browser, canvas("timeline"), 0.1, 0.4)
    assert "aten.mm" in tip and "operator on rank 0" in tip and "train.py:6" in tip
    before = pixels_of(browser, "timeline")
    browser.click("[data-card=timeline] button[aria-label='Zoom in']")
    assert pixels_of(browser, "timeline") != before
    browser.run("document.querySelector('canvas').focus()")
    browser.press("ArrowDown", "Home", "ArrowRight")
    assert "all_reduce, move on rank 1" in browser.text("#status") and "train.py:7 <i>" in browser.text("#status")
    assert browser.texts("[data-card=what] tbody tr.row td")[:3] == ["aten.mm", "operator", "train.py:6"]
    assert "waiting" not in "".join(browser.texts(".legend li"))


def test_a_small_window_and_paper_have_no_sideways_scrolling(browser: Browser, checkpoint: str, tmp_path: Path) -> None:
    open_file(browser, CheckpointTarget(open_checkpoint(checkpoint)), tmp_path)
    browser.resize(500, 800)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    browser.emulate(media="print")
    assert browser.run("return getComputedStyle(document.querySelector('.controls')).display") == "none"
