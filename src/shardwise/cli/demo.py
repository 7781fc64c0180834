"""`shardwise demo`: the whole workflow, from a drawing to a checkpoint that is resumed elsewhere.

The chapters of the demo's story; the first three draw and plan, without torch and without processes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from shardwise.cli.output import NO, AsJson, print_json, terminal_width
from shardwise.cli.plan import plan_between, plan_lines, tensor_lines
from shardwise.geometry import TensorType, parse_layout
from shardwise.transfer import Topology
from shardwise.view import Line, line, print_lines, wants_colour

BEFORE = "f32[8,8] on dp=2,tp=2: S(0), S(1)"
AFTER = "on rows=4 @ 2,0,3,1: S(0) sizes(3,1,0,4)"


@dataclass(frozen=True)
class Chapter:
    """One chapter of the demo: its text, the same as plain data, and whether it was correct."""

    heading: str
    lines: list[Line]
    data: dict[str, Any] = field(default_factory=dict)
    right: bool = True


def parse_demo_layouts() -> tuple[TensorType, TensorType]:
    """The tensor of the first chapters: its layout, and its target layout."""
    before = parse_layout(BEFORE)
    return before, parse_layout(AFTER, like=before)


def draw_before() -> Chapter:
    """A tensor cut in quarters over a 2 x 2 mesh."""
    before, _ = parse_demo_layouts()
    return Chapter("A tensor is split over a 2 x 2 mesh of ranks.", tensor_lines(before, terminal_width()))


def draw_after() -> Chapter:
    """The same tensor with uneven rows, on the same ranks in another order."""
    _, after = parse_demo_layouts()
    return Chapter("The target has uneven rows and another order of ranks.", tensor_lines(after, terminal_width()))


def explain_transfer() -> Chapter:
    """The plan from one to the other."""
    before, after = parse_demo_layouts()
    topology = Topology(ranks_per_host=8)
    transfer = plan_between(before, after, topology)
    figures = {"moved_bytes": transfer.moved_bytes, "lower_bound_bytes": transfer.lower_bound_bytes}
    data = {"from": str(before), "to": str(after), **figures}
    return Chapter(
        "The plan moves the fewest bytes.", plan_lines(before, after, transfer, topology), {"transfer": data}
    )


END = """Everything is equal: saved and loaded tensors bit by bit, losses and parameters to 9 digits.

What to try next:
  shardwise show "bf16[4096,1024] on dp=2,tp=4: S(0), S(1)"   draw a layout of your own
  shardwise plan "f32[8,8] on tp=4: S(0)" "on tp=2: S(1)"     plan a move of your own
  shardwise --help                                            inspect, reshard and compare checkpoints
  README.md, docs/index.md, examples/                         code to start from"""


def demo(as_json: AsJson = False) -> None:
    """Draw, plan and run a move; shard, train, save, reshard and resume a model on local ranks.

    Everything is checked against the same model whole; the exit status is 1 if anything differs. Files are made in a
    temporary folder and removed.

    \b
    Example:
      shardwise demo
    """
    chapters = []
    for number, chapter in enumerate(run_chapters(show=not as_json), start=1):
        chapters.append(chapter)
        if not as_json:
            _print_chapter(number, chapter)
    right = all(chapter.right for chapter in chapters)
    if as_json:
        print_json({key: value for chapter in chapters for key, value in chapter.data.items()} | {"right": right})
    else:
        print(END if right else "SOMETHING DIFFERS: see the words in capitals above.")
    if not right:
        raise typer.Exit(NO)


def _print_chapter(number: int, chapter: Chapter) -> None:
    bold, normal = ("\x1b[1m", "\x1b[0m") if wants_colour(sys.stdout) else ("", "")
    print(f"{bold}{number}. {chapter.heading}{normal}\n", flush=True)
    if chapter.lines:
        print_lines([*chapter.lines, line()], sys.stdout)
        sys.stdout.flush()


def run_chapters(show: bool) -> Iterator[Chapter]:
    """All chapters in order; `show`: with progress bars."""
    yield draw_before()
    yield draw_after()
    yield explain_transfer()
    with tempfile.TemporaryDirectory(prefix="shardwise-demo-") as folder:
        yield from import_module("shardwise.cli.demo_story").run_rank_chapters(Path(folder), show)
