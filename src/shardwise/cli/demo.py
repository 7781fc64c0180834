"""`shardwise demo`: the main job in a few steps, one function for each."""

from __future__ import annotations

import sys

from shardwise.cli.plan import plan_between, plan_lines
from shardwise.cli.show import tensor_lines
from shardwise.cli.units import terminal_width
from shardwise.geometry import TensorType, parse_layout
from shardwise.transfer import Topology, Transfer
from shardwise.view import Line, line, print_lines

BEFORE = "f32[8,8] on dp=2,tp=2: S(0), S(1)"
AFTER = "on rows=4 @ 2,0,3,1: S(0) sizes(3,1,0,4)"


def demo() -> None:
    """Draw two layouts of one tensor over 4 ranks and print the transfer between them.

    \b
    Example:
      shardwise demo
    """
    before = draw_before()
    after = draw_after(before)
    explain_transfer(before, after)


def draw_before() -> TensorType:
    """Step 1: a tensor cut in quarters over a 2 x 2 mesh."""
    tensor = parse_layout(BEFORE)
    _print("1. A tensor is laid out over a 2 x 2 mesh of ranks.", tensor_lines(tensor, terminal_width()))
    return tensor


def draw_after(before: TensorType) -> TensorType:
    """Step 2: the same tensor with uneven rows, on the same ranks in another order."""
    tensor = parse_layout(AFTER, like=before)
    _print("2. It is wanted with uneven rows, ranks in another order.", tensor_lines(tensor, terminal_width()))
    return tensor


def explain_transfer(before: TensorType, after: TensorType) -> Transfer:
    """Step 3: the plan that leads from one to the other."""
    topology = Topology(ranks_per_host=8)
    transfer = plan_between(before, after, topology)
    _print("3. The plan moves the fewest bytes.", plan_lines(before, after, transfer, topology))
    return transfer


def _print(heading: str, lines: list[Line]) -> None:
    print_lines([line(heading), line(), *lines, line()], sys.stdout)
