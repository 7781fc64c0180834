"""Which exchanges turn one layout into another? One, or two where a pending reduction goes to several ranks.

1. Without pending reductions: one step. Every destination piece is intersected with the source pieces; each part
   comes from the best replica.
2. Pending in the source, not in the destination: if no destination box is replicated, one step that reduces on
   arrival; else one step that reduces every region on one rank, and one that hands the results out.
3. Pending in the destination: the same kind of reduction moves addend by addend; otherwise the value becomes the
   first addend and the others are filled with the reduction's identity.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from shardwise.geometry.layout import Layout
from shardwise.transfer.reduce import has_replicas, reducing_layout
from shardwise.transfer.rounds import BufferTooSmallError
from shardwise.transfer.routes import Step
from shardwise.transfer.step import Options, plan_step


def plan_steps(src: Layout, dst: Layout, options: Options, rank: int | None) -> tuple[Step, ...]:
    """The steps from `src` to `dst`; with `rank`, only this rank's part of them."""
    if src.pending is None:
        return (_first_addend(src, dst, options, rank),)
    if dst.pending is not None and dst.pending.op == src.pending.op:
        return (_addend_by_addend(src, dst, options, rank),)
    everything = [list(range(_addends(src)))]
    scale = (1, src.pending.divisor)
    if dst.pending is None and not has_replicas(dst):
        return (plan_step(src, dst, everything, src.pending.op, scale, options, rank),)
    middle, op = reducing_layout(src, dst), src.pending.op
    return _both(
        lambda: plan_step(src, middle, everything, op, scale, options, rank),
        lambda: _first_addend(middle, dst, options, rank),
    )


def _both(*plans: Callable[[], Step]) -> tuple[Step, ...]:
    """All steps; if the buffer limit is too small for some, the error of the one that needs most."""
    steps: list[Step] = []
    refused: list[BufferTooSmallError] = []
    for plan in plans:
        try:
            steps.append(plan())
        except BufferTooSmallError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: error.needed)
    return tuple(steps)


def _addends(layout: Layout) -> int:
    return 1 if layout.cells is None else layout.cells.addends


def _first_addend(src: Layout, dst: Layout, options: Options, rank: int | None) -> Step:
    """The value goes to the destination's first addend; the others are filled with the identity."""
    terms = [[0]] + [[] for _ in range(_addends(dst) - 1)]
    op = None if dst.pending is None else dst.pending.op
    scale = (1 if dst.pending is None else dst.pending.divisor, 1)
    return plan_step(src, dst, terms, op, scale, options, rank)


def _addend_by_addend(src: Layout, dst: Layout, options: Options, rank: int | None) -> Step:
    """Source addend i becomes part of destination addend i, counted round."""
    assert src.pending is not None and dst.pending is not None
    count = _addends(dst)
    terms = [list(range(j, _addends(src), count)) for j in range(count)]
    common = gcd(dst.pending.divisor, src.pending.divisor)
    scale = (dst.pending.divisor // common, src.pending.divisor // common)
    return plan_step(src, dst, terms, src.pending.op, scale, options, rank)
