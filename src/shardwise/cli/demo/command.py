"""`shardwise demo`: the whole workflow, from a drawing to a checkpoint that is resumed elsewhere."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import typer

from shardwise.cli.demo.chapters import Chapter, draw_after, draw_before, explain_transfer
from shardwise.cli.errors import NO
from shardwise.cli.output import AsJson, print_json
from shardwise.view import line, print_lines
from shardwise.view.lines import wants_colour

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
        yield from import_module("shardwise.cli.demo.story").run_rank_chapters(Path(folder), show)
