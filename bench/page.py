"""Section "page": how long does the page of `shardwise view` take to make, to show and to draw again, in a browser?

The facts are made in Python; the page is opened from a file in a headless Chromium. Showing is building the document
from the facts; drawing again is the slowest canvas or table of the page, as the page itself measures it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Cell, Figures
from shardwise.checkpoint.formats.huggingface import header_bytes
from shardwise.cli.inspect import open_checkpoint
from shardwise.cli.view import CheckpointTarget, LayoutTarget, MoveTarget
from shardwise.nn import plan_from_data
from shardwise.page.document import render_document
from shardwise.page.facts import step_facts
from shardwise.page.plan_facts import plan_facts
from shardwise.planner import estimate
from shardwise.transfer import Topology
from tests.browser import Browser, find_browser

SLOWEST = """const nodes = [...document.querySelectorAll('[data-redraw-ms]')];
const boxes = document.querySelectorAll('.scroll');
for (const box of boxes) { box.scrollTop = 20000; box.dispatchEvent(new Event('scroll')); }
return Math.max(...nodes.map((node) => Number(node.dataset.redrawMs)))"""


@dataclass(frozen=True)
class PageBenchSizes:
    """The side of the mesh, and numbers of tensors and events."""

    side: int = 128
    tensors: int = 2000
    events: int = 100_000


TINY = PageBenchSizes(side=2, tensors=10, events=20)


def run(sizes: PageBenchSizes) -> list[Figures]:
    """Time to make the facts, size of the file, time to show it and to draw it again."""
    title = f"The page at {sizes.side**2:,} ranks, {sizes.tensors:,} tensors, {sizes.events:,} events"
    columns = ("page", "facts, ms", "file, kB", "show, ms", "draw again, ms")
    if find_browser() is None:
        return [Figures(title, columns, [], ["chromium and chromedriver are not installed: nothing was measured"])]
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        rows = [_measure(browser, Path(folder), name, facts) for name, facts in _pages(sizes, Path(folder)).items()]
    return [Figures(title, columns, rows, ["Drawing again is the slowest canvas or table of the page."])]


def _pages(sizes: PageBenchSizes, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    ranks, side = sizes.side**2, sizes.side
    grid = f"bf16[131072,131072] on dp={side},tp={side}: S(0), S(1)"
    names = [f"blocks.{i}.weight" for i in range(sizes.tensors)]
    file = folder / "model.safetensors"
    file.write_bytes(header_bytes({name: ("F32", [2], 8) for name in names}) + bytes(8 * len(names)))
    plan = {"mesh": f"dp={side},tp={side}", "input_plan": "dp: S(0)", "parameters": {"blocks.*.weight": "tp: S(0)"}}
    shapes = dict.fromkeys(names, (8192, 8192))
    events = [
        {"ph": "X", "pid": i % 64, "ts": float(i), "dur": 40.0, "name": f"op{i % 50}", "cat": "operator"}
        for i in range(sizes.events)
    ]
    return {
        "layout": LayoutTarget(grid).facts,
        "move, all to all in groups": MoveTarget(grid, f"on tp={ranks}: S(0)").facts,
        "move, all to all": MoveTarget(f"bf16[131072,131072] on dp={ranks}: S(0)", f"on tp={ranks}: S(1)").facts,
        "checkpoint": lambda: CheckpointTarget(open_checkpoint(str(file))).facts(),
        "plan": lambda: plan_facts("p", "m", [("p", estimate(shapes, plan_from_data(plan)))], Topology(8)),
        "step": lambda: step_facts("step.json", {"traceEvents": events}),
    }


def _measure(browser: Browser, folder: Path, name: str, make: Callable[[], dict[str, Any]]) -> list[Cell]:
    begin = time.perf_counter()
    facts = make()
    made = (time.perf_counter() - begin) * 1e3
    path = folder / "page.html"
    path.write_text(render_document(facts))
    browser.open(path.as_uri())
    browser.wait_for("document.getElementById('content').dataset.shown")
    shown = float(browser.run("return document.getElementById('content').dataset.showMs"))
    return [name, made, path.stat().st_size / 1e3, shown, float(browser.run(SLOWEST))]
