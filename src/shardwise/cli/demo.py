"""`shardwise demo`: the main job in a few steps, one function for each."""

from __future__ import annotations

import sys
from importlib import import_module

from shardwise.cli.plan import plan_between, plan_lines
from shardwise.cli.show import tensor_lines
from shardwise.cli.units import terminal_width
from shardwise.geometry import TensorType, parse_layout
from shardwise.transfer import Topology, Transfer
from shardwise.view import Line, line, print_lines

BEFORE = "f32[8,8] on dp=2,tp=2: S(0), S(1)"
TOLERANCE = 1e-5
AFTER = "on rows=4 @ 2,0,3,1: S(0) sizes(3,1,0,4)"


def demo() -> None:
    """Draw two layouts, print the transfer between them, then move and train on 4 local ranks.

    \b
    Example:
      shardwise demo
    """
    before = draw_before()
    after = draw_after(before)
    explain_transfer(before, after)
    run_on_ranks()


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


def run_on_ranks() -> None:
    """Steps 4 and 5: the move on 4 processes, and a model trained sharded beside the same model whole."""
    job = import_module("shardwise.cli.demo_job")
    report = job.run_job(BEFORE, AFTER)
    verdict = "every element arrived" if report.exact else "WRONG VALUES"
    _print(f"4. The same move on 4 processes: {verdict}.", [])
    rows = [f"{'step':>4}  {'sharded':>10}  {'whole':>10}"]
    pairs = zip(report.losses, report.dense_losses, strict=True)
    rows += [f"{step:>4}  {ours:>10.6f}  {dense:>10.6f}" for step, (ours, dense) in enumerate(pairs)]
    rows.append(f"largest difference between the trained weights: {report.difference:.1e}")
    _print("5. A model of two layers is trained, cut over a 2 x 2 mesh and whole: the losses.", [line(r) for r in rows])
    operations = [line(text) for text in report.operations.splitlines()]
    _print("6. What one step did, and what it moved.", operations)
    if not report.exact or report.difference > TOLERANCE:
        raise SystemExit("the sharded run differs from the whole one")


def _print(heading: str, lines: list[Line]) -> None:
    print_lines([line(heading), line(), *lines, line()], sys.stdout)
