"""The chapters of the demo's story; the first three draw and plan, without torch and without processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.cli.output import terminal_width
from shardwise.cli.plan import plan_between, plan_lines
from shardwise.cli.show import tensor_lines
from shardwise.geometry import TensorType, parse_layout
from shardwise.transfer import Topology
from shardwise.view import Line

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
    return Chapter("A tensor is laid out over a 2 x 2 mesh of ranks.", tensor_lines(before, terminal_width()))


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
