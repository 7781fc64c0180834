"""What `shardwise model` prints: the figures of an estimate as text or JSON."""

from __future__ import annotations

import inspect
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.cli.output import print_json, table_lines
from shardwise.geometry import LayoutError
from shardwise.hf.plans import plan as make_plan
from shardwise.nn import ModelPlan, PlanError, load_plan
from shardwise.nn.plan import read_mesh
from shardwise.planner import Estimate, estimate
from shardwise.planner.estimate import (
    MOVE_HEAD,
    PARAMETER_HEAD,
    find_device,
    move_rows,
    parameter_rows,
    resharding_bytes,
    summary_rows,
)
from shardwise.planner.rehearsal import ModelSource, load_model
from shardwise.transfer.transfer import format_bytes
from shardwise.view import Line, line, print_lines


def report_model(
    source: str,
    plan: Path | str,
    compare: Path | None,
    device: tuple[str, int | None],
    options: dict[str, Any],
    as_json: bool,
) -> bool:
    """Print the estimate of a model under the plan of a file, or one made for a mesh; return whether it fits."""
    name, memory = device
    try:
        with redirect_stdout(sys.stderr):  # the user's module and its forward pass may print
            loaded, found = load_model(source), find_device(name)
            options["device"] = found if memory is None else replace(found, memory_bytes=memory)
            plans = [load_plan(plan) if isinstance(plan, Path) else make_plan_for(loaded, plan)]
            plans += [load_plan(compare)] if compare is not None else []
            made = [estimate(loaded.model, one, inputs=loaded.inputs, **options) for one in plans]
    except PlanError as error:
        raise LayoutError(str(error)) from error
    if as_json:
        print_json(estimates_to_json(made))
    else:
        print_lines(estimate_lines(loaded, made), sys.stdout)
    return made[0].fits


def make_plan_for(loaded: ModelSource, mesh: str) -> ModelPlan:
    """A plan for a mesh; the arguments of a forward pass that a factory returned show what follows what."""
    given = loaded.inputs
    if isinstance(given, tuple):
        given = inspect.signature(loaded.model.forward).bind(*given).arguments
    return make_plan(loaded.model, read_mesh(mesh), given)


def estimate_lines(loaded: ModelSource, found: list[Estimate]) -> list[Line]:
    """The figures of one plan, or of two side by side; then parameters and moves of the first."""
    first = found[0]
    title = f"{type(loaded.model).__name__}, {first.elements:,} parameters; one step on rank {first.rank}"
    step = f"batch {first.batch} x {first.sequence} on each rank, {first.tokens:,} tokens in all, {first.optimizer}"
    head = ("", "plan") if len(found) == 1 else ("", "plan", "compared")
    lines = [line(title), line(step), line(), *table_lines(head, summary_rows(found), left=len(head))]
    if len(found) > 1:
        cost = resharding_bytes(*found)
        text = "unknown" if cost is None else format_bytes(cost)
        lines.append(line(f"moving the parameters from one plan to the other sends {text}"))
    lines += [line(), *table_lines(PARAMETER_HEAD, parameter_rows(first), left=3)]
    moves = move_rows(first)
    return [*lines, line(), *table_lines(MOVE_HEAD, moves, left=4)] if moves else lines


def estimates_to_json(found: list[Estimate]) -> dict[str, Any]:
    """The first estimate as plain data; a second one is under `compare`, with what moving between them sends."""
    data = found[0].to_json()
    if len(found) > 1:
        data |= {"compare": found[1].to_json(), "resharding_bytes": resharding_bytes(*found)}
    return data
