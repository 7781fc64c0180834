"""The chapters of the demo that run on processes: a move, training, a checkpoint, and resuming elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from shardwise.checkpoint import open as open_checkpoint
from shardwise.checkpoint import reshard
from shardwise.cli.demo.chapters import AFTER, BEFORE, Chapter
from shardwise.cli.demo.job import (
    MORE_STEPS,
    SMALLER_WORLD,
    STEPS,
    WORLD,
    ResumeResult,
    TrainingResult,
    move_exactly,
    resume,
    train,
)
from shardwise.cli.demo.model import Transformer, plan_for
from shardwise.comm import LocalWorld
from shardwise.geometry import Layout, format_layout
from shardwise.nn import describe_plan
from shardwise.transfer.report import format_bytes
from shardwise.view import Line, line

TOLERANCE = 1e-9
TIMEOUT = 300.0
OFFLINE = "S(0)"
SHOWN = ("model.blocks.0.qkv.weight", "optimizer.state.blocks.0.down.weight.exp_avg")


def run_rank_chapters(folder: Path, show: bool) -> Iterator[Chapter]:
    """All chapters that need processes; files are made in the folder."""
    with LocalWorld(WORLD.size, timeout=TIMEOUT) as world:
        yield move_chapter(all(world.run(move_exactly, BEFORE, AFTER)))
        yield plan_chapter()
        trained = world.run(train, str(folder / "trained"), show)[0]
    yield training_chapter(trained)
    yield step_chapter(trained)
    yield reshard_chapter(folder)
    with LocalWorld(SMALLER_WORLD.size, timeout=TIMEOUT) as world:
        found = world.run(resume, str(folder / "resharded"), show)[0]
    yield load_chapter(trained, found)
    yield resume_chapter(trained, found)


def move_chapter(exact: bool) -> Chapter:
    """The move of the first chapters, executed."""
    verdict = "every element arrived" if exact else "WRONG VALUES"
    return Chapter(f"The same move on 4 processes: {verdict}.", [], {"move_is_exact": exact}, exact)


def plan_chapter() -> Chapter:
    """The plan of the model: its patterns, and what they come to as a table."""
    plan = plan_for(WORLD)
    table = describe_plan(plan, Transformer().double())
    data = {"mesh": table.mesh, "parameters": table.elements, "rank_bytes": table.rank_bytes}
    lines = [*_table(*plan.parameters.items()), line(), *map(line, str(table).splitlines())]
    return Chapter("A transformer is sharded by a plan of 6 patterns; its code stays as it is.", lines, {"plan": data})


def training_chapter(trained: TrainingResult) -> Chapter:
    """The losses of the sharded model next to those of the whole one."""
    dense = trained.dense_losses[:STEPS]
    lines = [*_losses(0, trained.losses, dense), line(f"parameters differ by {trained.difference:.1e} at most")]
    right = trained.difference < TOLERANCE and _are_losses_close(trained.losses, dense)
    data = {"losses": trained.losses, "dense_losses": dense, "largest_difference": trained.difference}
    heading = f"It is trained on 4 ranks, next to the same model unsharded: {_verdict(right)}."
    return Chapter(heading, lines, {"training": data}, right)


def step_chapter(trained: TrainingResult) -> Chapter:
    """What one step of training moved."""
    rows = [(name, a, b, str(times), format_bytes(nbytes)) for name, a, b, times, nbytes in trained.moves]
    total = sum(nbytes for *_, nbytes in trained.moves)
    lines = _table(("operation", "from", "to", "times", "bytes"), *rows)
    return Chapter(f"One step moved {format_bytes(total)} between the ranks.", lines, {"step_moved_bytes": total})


def reshard_chapter(folder: Path) -> Chapter:
    """The checkpoint of 4 ranks, rewritten for 2 by this process alone."""
    report = reshard(folder / "trained", folder / "resharded", layout=OFFLINE, ranks=SMALLER_WORLD.size, workers=1)
    with open_checkpoint(folder / "trained") as old, open_checkpoint(folder / "resharded") as new:
        rows = [(name, _format_layout_rule(old[name].layout), _format_layout_rule(new[name].layout)) for name in SHOWN]
    data = {"tensors": report.tensors, "bytes": report.bytes, "ranks": len(report.ranks)}
    told = f"{report.tensors} tensors, {format_bytes(report.bytes)}"
    heading = f"The checkpoint of 4 ranks ({told}) is resharded for 2, without starting any."
    return Chapter(heading, _table(("tensor", "on 4 ranks", "on 2 ranks"), *rows), {"resharded": data})


def load_chapter(trained: TrainingResult, found: ResumeResult) -> Chapter:
    """Whether 2 ranks loaded what 4 ranks saved."""
    saved = trained.saved
    equal = [name for name in saved if name in found.loaded and torch.equal(saved[name], found.loaded[name])]
    exact = len(equal) == len(saved) == len(found.loaded)
    verdict = f"all {len(saved)} equal, bit by bit" if exact else f"ONLY {len(equal)} OF {len(saved)} EQUAL"
    heading = f"2 ranks load it into the same plan on another mesh, {SMALLER_WORLD}: {verdict}."
    return Chapter(heading, [], {"loaded": {"tensors": len(saved), "equal": len(equal)}}, exact)


def resume_chapter(trained: TrainingResult, found: ResumeResult) -> Chapter:
    """The losses of further steps, next to those of the unsharded model."""
    dense = trained.dense_losses[STEPS:]
    right = len(found.losses) == MORE_STEPS and _are_losses_close(found.losses, dense)
    data = {"losses": found.losses, "dense_losses": dense}
    heading = f"They resume training where the 4 stopped: {_verdict(right)}."
    return Chapter(heading, _losses(STEPS, found.losses, dense), {"going_on": data}, right)


def _verdict(right: bool) -> str:
    return "the losses are equal" if right else "THE LOSSES DIFFER"


def _are_losses_close(losses: list[float], dense: list[float]) -> bool:
    return all(abs(ours - other) < TOLERANCE for ours, other in zip(losses, dense, strict=True))


def _losses(first: int, losses: list[float], dense: list[float]) -> list[Line]:
    pairs = enumerate(zip(losses, dense, strict=True), start=first)
    rows = [(str(step), f"{ours:.9f}", f"{other:.9f}") for step, (ours, other) in pairs]
    return _table(("step", "sharded", "whole"), *rows)


def _format_layout_rule(layout: Layout) -> str:
    return format_layout(layout).partition(" on ")[2]


def _table(*rows: Sequence[str]) -> list[Line]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [line("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True))) for row in rows]
