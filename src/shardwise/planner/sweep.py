"""Which mesh of so many ranks? The best plan on each, in a table and a picture of memory against time.

Meshes are all ways to write the number of ranks as a product over named axes, in which the last axis stays within a
host. Before a mesh is searched its bounds are found, for time and for memory. Where a plan that is known is below both,
nothing on this mesh can be better, and it is skipped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.geometry import Mesh
from shardwise.nn.plan import PlanError
from shardwise.nn.shard_module import find_blocks
from shardwise.planner.auto import AutoPlanner, FoundPlan, Search
from shardwise.planner.program import Infeasible, find_least_memory, solve
from shardwise.planner.rehearsal import Inputs, Loss
from shardwise.transfer.transfer import format_bytes

WIDTH, HEIGHT = 60, 14


@dataclass(frozen=True)
class SweepRow:
    """One mesh: its plan, or why it has none; `best`: no other plan is better in time and in memory."""

    mesh: str
    plan: FoundPlan | None
    note: str = ""
    best: bool = False

    @property
    def seconds(self) -> float:
        """The time of a step, endless without a plan."""
        return math.inf if self.plan is None else self.plan.finding.estimate.step_seconds

    @property
    def peak_bytes(self) -> float:
        """The most memory at once, endless without a plan."""
        return math.inf if self.plan is None else self.plan.finding.estimate.peak_bytes


@dataclass(frozen=True)
class Sweep:
    """The plans of all meshes; prints as a table and a picture, in which `*` marks what no other plan is better than.

    >>> import torch
    >>> found = sweep(AutoPlanner("tp=2"), nn.Linear(8, 8), 2, (torch.ones(4, 8),))
    >>> [row.mesh for row in found.rows], found.fastest.mesh
    (['dp=2', 'tp=2'], Mesh(...))
    """

    rows: tuple[SweepRow, ...]

    @property
    def fastest(self) -> FoundPlan:
        """The plan of the shortest step."""
        plans = [row.plan for row in self.rows if row.plan is not None]
        if not plans:
            raise PlanError("no mesh has a plan that fits:\n" + "\n".join(f"{r.mesh}: {r.note}" for r in self.rows))
        return min(plans, key=lambda plan: plan.finding.estimate.step_seconds)

    def table(self) -> list[tuple[str, ...]]:
        """One row for each mesh: time, peak, gap, traffic, or why there is no plan."""
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            if row.plan is None:
                rows.append(("", row.mesh, "-", "-", "-", row.note))
            else:
                found = row.plan.finding
                figures = (f"{1000 * row.seconds:.2f} ms", format_bytes(found.estimate.peak_bytes))
                inputs = f"inputs {row.plan.input_plan}"
                rows.append(("*" * row.best, row.mesh, *figures, f"{100 * found.certificate.gap:.2g} %", inputs))
        return rows

    def picture(self) -> list[str]:
        """Memory upwards and time to the right, a letter for each mesh, those that are best in capitals."""
        shown = [row for row in self.rows if row.plan is not None]
        if not shown:
            return []
        times, peaks = [math.log(row.seconds or 1e-9) for row in shown], [row.peak_bytes for row in shown]
        grid = [[" "] * WIDTH for _ in range(HEIGHT)]
        for number, (row, when, peak) in enumerate(zip(shown, times, peaks, strict=True)):
            letter = chr(ord("a") + number % 26)
            x = _place(when, times, WIDTH)
            grid[HEIGHT - 1 - _place(peak, peaks, HEIGHT)][x] = letter.upper() if row.best else letter
        highest, lowest = format_bytes(round(max(peaks))), format_bytes(round(min(peaks)))
        margin = max(len(highest), len(lowest))
        labels = [highest, *[""] * (HEIGHT - 2), lowest]
        lines = [f"{label:>{margin}} |{''.join(cells)}" for label, cells in zip(labels, grid, strict=True)]
        ends = f"{1000 * min(r.seconds for r in shown):.3g} ms", f"{1000 * max(r.seconds for r in shown):.3g} ms"
        lines += [" " * margin + " +" + "-" * WIDTH, " " * (margin + 2) + f"{ends[0]:<{WIDTH - len(ends[1])}}{ends[1]}"]
        names = ", ".join(f"{chr(ord('a') + i % 26)} {row.mesh}" for i, row in enumerate(shown))
        return [*lines, names]

    def __str__(self) -> str:
        head = ("best", "mesh", "step", "peak", "gap", "")
        rows = [head, *self.table()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", *self.picture()])

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data: for each mesh its plan and figures, or a note."""
        return [
            {"mesh": row.mesh, "note": row.note}
            if row.plan is None
            else {
                "mesh": row.mesh,
                "plan": row.plan.to_data(),
                "step_seconds": row.seconds,
                "peak_bytes": row.peak_bytes,
                "gap": row.plan.finding.certificate.gap,
                "best": row.best,
            }
            for row in self.rows
        ]


def _place(value: float, among: Sequence[float], places: int) -> int:
    low, high = min(among), max(among)
    return 0 if high == low else round((value - low) / (high - low) * (places - 1))


def meshes_of(ranks: int, axes: Sequence[str], within: int | None) -> Iterator[Mesh]:
    """All meshes of so many ranks over some of the axes, the last one within a host if there are several.

    >>> [str(mesh) for mesh in meshes_of(4, ("dp", "tp"), 2)]
    ['dp=4', 'tp=4', 'dp=2,tp=2']
    """
    for count in range(1, len(axes) + 1):
        for names in itertools.combinations(axes, count):
            for sizes in _factorise(ranks, count):
                if count == 1 or within is None or within % sizes[-1] == 0:
                    yield Mesh.of(**dict(zip(names, sizes, strict=True)))


def _factorise(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors above 1, in order."""
    if parts == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(number // 2, 1, -1):
        if number % first == 0:
            for rest in _factorise(number // first, parts - 1):
                yield first, *rest


def sweep(
    planner: AutoPlanner,
    model: nn.Module,
    ranks: int,
    inputs: Inputs | None = None,
    *,
    axes: Sequence[str] = ("dp", "tp"),
    batch: int | None = None,
    sequence: int = 4096,
    loss: Loss | None = None,
) -> Sweep:
    """The best plans of a model on all meshes of so many ranks; the mesh of the planner does not count.

    >>> import torch
    >>> len(sweep(AutoPlanner("tp=2"), nn.Linear(8, 8), 4, (torch.ones(4, 8),)).rows)
    3
    """
    within = None if planner.topology is None else planner.topology.ranks_per_host
    rows: list[SweepRow] = []
    for mesh in meshes_of(ranks, axes, within or 8):
        try:
            one = replace(planner, mesh=mesh)
            if note := _find_better(Search(one, model, inputs, batch or ranks, sequence, loss), rows):
                rows.append(SweepRow(str(mesh), None, note))
                continue
            plan = one.plan(model, inputs, batch=batch or ranks, sequence=sequence, loss=loss)
            rows.append(SweepRow(str(mesh), plan))
        except PlanError as error:
            rows.append(SweepRow(str(mesh), None, str(error).partition("; ")[2] or str(error)))
    return Sweep(tuple(replace(row, best=_is_best(row, rows)) for row in rows))


def _find_better(search: Search, rows: Sequence[SweepRow]) -> str:
    """The plan that is known to be better in time and memory than all on a mesh, in words; empty if there is none."""
    known = [row for row in rows if row.plan is not None]
    if not known:
        return ""
    blocks, again = tuple(find_blocks(search.model)), search.planner.again
    space = search.build(blocks if again else (), search.pins)
    try:
        least = solve(space.problem, relaxed=True).cost
    except Infeasible:
        return "nothing is possible with what is pinned"
    faster = [row for row in known if row.seconds <= least]
    if not faster:
        return ""
    if again is None and blocks:  # computing again costs time and saves memory
        space = search.build(blocks, search.pins)
    smallest = find_least_memory(space.problem)
    better = next((r for r in faster if smallest is not None and r.peak_bytes <= smallest.memory), None)
    return "" if better is None else f"skipped: {better.mesh} is better in time and memory than any plan here can be"


def _is_best(row: SweepRow, rows: Sequence[SweepRow]) -> bool:
    others = [other for other in rows if other is not row and other.plan is not None]
    return row.plan is not None and not any(
        other.seconds <= row.seconds
        and other.peak_bytes <= row.peak_bytes
        and (other.seconds, other.peak_bytes) != (row.seconds, row.peak_bytes)
        for other in others
    )
