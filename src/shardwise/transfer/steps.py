"""How is one exchange planned? Intersect, choose senders, sort by edge.

A step takes addends of the source to addends of the destination: `terms[j]` lists the source addends that make up the
destination's addend j. An empty list means the reduction's identity.

One exchange turns one layout into another, or two where a pending reduction goes to several ranks:

1. Without pending reductions: one step. Every destination piece is intersected with the source pieces; each part
   comes from the best replica.
2. Pending in the source, not in the destination: if no destination box is replicated, one step that reduces on
   arrival; else one step that reduces every region on one rank (`reduction`), and one that hands the results out.
   With a topology, the addends of each host are combined first (`hosts/sums`), and what several ranks of a host need
   from another one goes there once and is passed on (`hosts/relays`).
3. Pending in the destination: the same kind of reduction moves addend by addend; otherwise the value becomes the
   first addend and the others are filled with the reduction's identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.choose import choose_senders, index_owners
from shardwise.transfer.hosts.relays import may_relay, relay_moves
from shardwise.transfer.hosts.sums import sum_within_hosts
from shardwise.transfer.intersect import (
    Overlaps,
    concatenate_overlaps,
    expand_runs,
    overlaps_with_cells,
    overlaps_with_layout,
)
from shardwise.transfer.reduction import has_replicas, reduction_layout
from shardwise.transfer.rounds import BufferTooSmallError, bound_rounds, count_rounds, degree_bound, split_in_rounds
from shardwise.transfer.routes import Routes, Step, box_volumes, constant_column
from shardwise.transfer.spread import SpreadSenders
from shardwise.transfer.topology import Topology
from shardwise.transfer.totals import StepOutline, can_be_listed, count_addends

T = TypeVar("T")


@dataclass(frozen=True)
class PlanOptions:
    """What determines a plan besides the two layouts."""

    itemsize: int
    topology: Topology | None = None
    max_buffer_bytes: int | None = None


def plan_step(outline: StepOutline, options: PlanOptions, rank: int | None) -> list[Step]:
    """The step from one layout to another, and one that passes on within hosts where that saves bytes between them.

    With `rank`, only this rank's part of it.
    """
    src, dst, topology = outline.src, outline.dst, options.topology
    only = rank if rank is not None and _can_plan_alone(outline, options) else None
    moves = _build_moves(outline, _demands(outline, only), options, only)
    passed_on = moves.take(np.zeros(0, np.int64))
    if topology is not None and may_relay(outline, topology):
        moves, passed_on = relay_moves(moves, outline, topology)
    degree = 0
    if options.max_buffer_bytes is not None:
        degree = _max_degree(moves) if len(passed_on) else _degree(outline, options, moves if rank is None else None)
    routes, copies = _routes_of(moves, options, rank, degree)
    fills, rounds = unreached_rows(outline, rank), int(routes.rounds.max(initial=-1)) + 1
    steps = [Step(src, dst, routes, copies, fills, outline.op, outline.scale, rounds)]
    if len(passed_on):
        routes, none = _routes_of(passed_on, options, rank, _max_degree(passed_on))
        rounds = int(routes.rounds.max(initial=-1)) + 1
        steps.append(Step(dst, dst, routes, none, none.dst_rows, None, (1, 1), rounds, in_place=True))
    return steps


def _routes_of(moves: Routes, options: PlanOptions, rank: int | None, degree: int) -> tuple[Routes, Routes]:
    """The moves between ranks, in rounds if buffers are limited, and those within a rank; with `rank`, its part."""
    local, mine = moves.src_ranks == moves.dst_ranks, np.ones(len(moves), bool)
    if rank is not None:
        mine = (moves.src_ranks == rank) | (moves.dst_ranks == rank)
    routes, copies = _sort_by_edge(moves, mine & ~local), _sort_by_edge(moves, mine & local)
    if options.max_buffer_bytes is not None:
        routes = split_in_rounds(routes, degree, options.itemsize, options.max_buffer_bytes)
    return routes, copies


def _can_plan_alone(outline: StepOutline, options: PlanOptions) -> bool:
    """Whether one rank's part follows from the pieces around it: regular layouts whose replica sets do not overlap."""
    src, dst = outline.src, outline.dst
    if src.cells is None or dst.cells is None or may_relay(outline, options.topology):
        return False
    if src.cells.replicas == 1 or not outline.is_listed:
        return True
    if options.topology is not None:
        return False
    sets = np.unique(np.sort(src.cells.owners.reshape(-1, src.cells.replicas), axis=1), axis=0)
    return len(np.unique(sets)) == sets.size


def _demands(outline: StepOutline, rank: int | None) -> Overlaps:
    """Which destination rows need which source cells; with `rank`, those that bear on this rank's part."""
    src, dst = outline.src, outline.dst
    reached = np.flatnonzero(outline.term_counts[dst.table.addends] > 0)
    if rank is None:
        if src.cells is None and dst.cells is not None:
            return _rows_of_cells(_source_overlaps(src, dst, None), dst)
        found = overlaps_with_layout(dst.table.offsets[reached], dst.table.sizes[reached], src)
        return Overlaps(reached[found.boxes], found.cells, found.starts, found.sizes)
    assert src.cells is not None and dst.cells is not None
    rows = dst.rows_of(rank)
    taking = overlaps_with_cells(dst.table.offsets[rows], dst.table.sizes[rows], src.cells)
    held = src.table.cells[src.rows_of(rank)]
    if src.cells.replicas == 1 or not outline.is_listed:
        sending = _rows_of_cells(_source_overlaps(src, dst, np.unique(held)), dst)
        taking = Overlaps(rows[taking.boxes], taking.cells, taking.starts, taking.sizes)
        return _join_overlaps(sending, taking)
    return _rows_of_cells(_source_overlaps(src, dst, _same_owners(src, np.concatenate([taking.cells, held]))), dst)


def _same_owners(src: Layout, cells: IntArray) -> IntArray:
    """All cells whose replica sets also hold one of these cells, since they share senders."""
    assert src.cells is not None
    lead = np.sort(src.cells.owners.reshape(-1, src.cells.addends, src.cells.replicas), axis=2)[:, :, 0]
    return np.flatnonzero(np.isin(lead, lead[cells]).any(axis=1))


def _source_overlaps(src: Layout, dst: Layout, cells: IntArray | None) -> Overlaps:
    """The destination cells that meet these source cells (all without `cells`), seen from the destination."""
    assert dst.cells is not None
    first = np.unique(src.table.cells, return_index=True)[1]
    cells = np.arange(len(first)) if cells is None else cells
    found = overlaps_with_cells(src.table.offsets[first[cells]], src.table.sizes[first[cells]], dst.cells)
    return Overlaps(cells[found.boxes], found.cells, found.starts, found.sizes).swapped()


def _rows_of_cells(overlaps: Overlaps, dst: Layout) -> Overlaps:
    """Turn destination cells into table rows: one for each addend and replica of a regular layout."""
    assert dst.cells is not None
    copies = dst.cells.addends * dst.cells.replicas
    if copies == 1:
        return overlaps
    repeated = overlaps.take(np.repeat(np.arange(len(overlaps.boxes)), copies))
    rows = repeated.boxes * copies + np.tile(np.arange(copies), len(overlaps.boxes))
    order = np.lexsort((repeated.cells, rows))
    return Overlaps(rows[order], repeated.cells[order], repeated.starts[order], repeated.sizes[order])


def _join_overlaps(a: Overlaps, b: Overlaps) -> Overlaps:
    """Both lists, each (row, cell) pair once, in canonical order."""
    both = concatenate_overlaps(a, b)
    return both.take(np.unique(np.stack([both.boxes, both.cells], axis=1), axis=0, return_index=True)[1])


def _build_moves(outline: StepOutline, overlaps: Overlaps, options: PlanOptions, only: int | None = None) -> Routes:
    """One move for each demand and term, local ones included, in order of destination rows; with `only`, a rank's."""
    src, dst = outline.src, outline.dst
    alone = src.cells is not None and (src.cells.replicas == 1 or not outline.is_listed)
    if only is not None and count_addends(src) > 1 and alone:
        overlaps, term = _expand_terms_of_rank(outline, overlaps, only)
    else:
        overlaps, term = _expand_terms(outline, overlaps)
    dst_ranks = np.take(dst.table.ranks, overlaps.boxes)
    weights = box_volumes(overlaps.sizes) * options.itemsize
    sources = overlaps.cells * count_addends(src) + term
    if outline.is_listed:
        src_rows = choose_senders(index_owners(src), sources, dst_ranks, weights, options.topology)
    else:
        src_rows = SpreadSenders(src, dst, options.topology).choose(overlaps.cells, term, overlaps.boxes)
    src_ranks = np.take(src.table.ranks, src_rows)
    round_zero = constant_column(0, len(src_rows))
    return Routes(src_rows, overlaps.boxes, src_ranks, dst_ranks, overlaps.starts, overlaps.sizes, term, round_zero)


def _expand_terms(outline: StepOutline, overlaps: Overlaps) -> tuple[Overlaps, IntArray]:
    """Each demand once for each source addend that it is made of, and the addends."""
    counts = outline.term_counts
    if len(counts) == 1 and counts[0] == 1:
        return overlaps, constant_column(outline.terms[0][0], len(overlaps.boxes))
    table = np.zeros((len(counts), int(counts.max(initial=1))), np.int64)
    for target, listed in enumerate(outline.terms):
        table[target, : len(listed)] = listed
    targets = outline.dst.table.addends[overlaps.boxes]
    items, (position,) = expand_runs([counts[targets]])
    return overlaps.take(items), table[targets[items], position]


def _expand_terms_of_rank(outline: StepOutline, overlaps: Overlaps, rank: int) -> tuple[Overlaps, IntArray]:
    """The same for one rank whose part is planned alone: what it needs, and of the rest only addends that it holds."""
    src, dst = outline.src.table, outline.dst.table
    needed = dst.ranks[overlaps.boxes] == rank
    own, own_terms = _expand_terms(outline, overlaps.take(np.flatnonzero(needed)))
    others = overlaps.take(np.flatnonzero(~needed))
    rows = outline.src.rows_of(rank)
    rows = rows[np.argsort(src.cells[rows], kind="stable")]
    low = np.searchsorted(src.cells[rows], others.cells, side="left")
    items, (turn,) = expand_runs([np.searchsorted(src.cells[rows], others.cells, side="right") - low])
    terms = src.addends[rows[low[items] + turn]]
    meant = np.flatnonzero(outline.target_addends[terms] == dst.addends[others.boxes[items]])
    both = concatenate_overlaps(own, others.take(items[meant]))
    terms = np.concatenate([own_terms, terms[meant]])
    order = np.lexsort((terms, both.cells, both.boxes))
    return both.take(order), terms[order]


def _sort_by_edge(moves: Routes, chosen: npt.NDArray[np.bool_]) -> Routes:
    """The chosen moves, sorted by source rank, then destination rank."""
    rows = np.flatnonzero(chosen)
    width = int(moves.dst_ranks.max(initial=0)) + 1
    return moves.take(rows[np.argsort(moves.src_ranks[rows] * width + moves.dst_ranks[rows], kind="stable")])


def _degree(outline: StepOutline, options: PlanOptions, moves: Routes | None) -> int:
    """The most messages in and out of a rank; `moves` are all moves of the step, if they are known."""
    bound = degree_bound(outline.src, outline.dst, max(map(len, outline.terms)))
    if bound is None:
        bound = _max_degree(_build_moves(outline, _demands(outline, None), options) if moves is None else moves)
    return bound


def _max_degree(moves: Routes) -> int:
    """The most messages that go in and out of one rank."""
    remote = moves.src_ranks != moves.dst_ranks
    sources, targets = moves.src_ranks[remote], moves.dst_ranks[remote]
    width = 1 + max(int(sources.max(initial=0)), int(targets.max(initial=0)))
    edges = np.unique(sources * width + targets)
    return max(
        1, int((np.bincount(edges // width, minlength=width) + np.bincount(edges % width, minlength=width)).max())
    )


def unreached_rows(outline: StepOutline, rank: int | None) -> IntArray:
    """The destination rows that no term reaches."""
    empty, table = outline.term_counts == 0, outline.dst.table
    if not empty.any():
        return np.zeros(0, np.int64)
    rows = np.flatnonzero(empty[table.addends])
    return rows if rank is None else rows[table.ranks[rows] == rank]


def outline_steps(src: Layout, dst: Layout, topology: Topology | None) -> tuple[StepOutline, ...]:
    """What the steps from `src` to `dst` do, and whether their moves are listed."""
    outlines = _outline_steps(src, dst)
    if not all(map(can_be_listed, outlines)):
        return tuple(replace(outline, is_listed=False) for outline in outlines)
    within = None if topology is None else _outline_within_hosts(src, dst, topology)
    return within if within is not None and all(map(can_be_listed, within)) else outlines


def _outline_within_hosts(src: Layout, dst: Layout, topology: Topology) -> tuple[StepOutline, ...] | None:
    """The steps of a reduction that first combines the addends of each host; None where that saves nothing."""
    if src.pending is None or (dst.pending is not None and dst.pending.op == src.pending.op):
        return None
    sums = sum_within_hosts(src, dst, topology)
    if sums is None:
        return None
    scale = (1, src.pending.divisor)
    if len(sums.terms) == 1:
        return StepOutline(src, sums.layout, sums.terms, src.pending.op, scale), _outline_first_addend(sums.layout, dst)
    first, *rest = StepOutline(src, sums.layout, sums.terms, src.pending.op, (1, 1)), *_outline_steps(sums.layout, dst)
    return first, replace(rest[0], scale=scale), *rest[1:]


def _outline_steps(src: Layout, dst: Layout) -> tuple[StepOutline, ...]:
    if src.pending is None:
        return (_outline_first_addend(src, dst),)
    if dst.pending is not None and dst.pending.op == src.pending.op:
        return (_outline_addend_by_addend(src, dst),)
    everything, op = [range(count_addends(src))], src.pending.op
    scale = (1, src.pending.divisor)
    if dst.pending is None and not has_replicas(dst):
        return (StepOutline(src, dst, everything, op, scale),)
    middle = reduction_layout(src, dst)
    return StepOutline(src, middle, everything, op, scale), _outline_first_addend(middle, dst)


def plan_steps(outlines: Sequence[StepOutline], options: PlanOptions, rank: int | None) -> tuple[Step, ...]:
    """The steps with their moves (with `rank`, its part); of several limits that are too small, the largest is told."""
    planned = _try_each(lambda outline: plan_step(outline, options, rank), outlines)
    return tuple(step for steps in planned for step in steps)


def plan_rounds(outlines: Sequence[StepOutline], options: PlanOptions, steps: Sequence[Step] | None) -> tuple[int, ...]:
    """The number of rounds of each step; `steps` are its moves before they are split, or None if not listed."""
    limit = options.max_buffer_bytes
    assert limit is not None

    def count(outline: StepOutline) -> int:
        degree = _degree(outline, options, None)
        if steps is None:
            return bound_rounds(outline, degree, options.itemsize, limit)
        return count_rounds(steps[outlines.index(outline)].routes, degree, options.itemsize, limit)

    return _try_each(count, outlines)


def _try_each(call: Callable[[StepOutline], T], outlines: Sequence[StepOutline]) -> tuple[T, ...]:
    done: list[T] = []
    refused: list[BufferTooSmallError] = []
    for outline in outlines:
        try:
            done.append(call(outline))
        except BufferTooSmallError as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: error.needed)
    return tuple(done)


def _outline_first_addend(src: Layout, dst: Layout) -> StepOutline:
    """The value goes to the destination's first addend; the others are filled with the identity."""
    terms = [[0]] + [[] for _ in range(count_addends(dst) - 1)]
    op = None if dst.pending is None else dst.pending.op
    scale = (1 if dst.pending is None else dst.pending.divisor, 1)
    return StepOutline(src, dst, terms, op, scale)


def _outline_addend_by_addend(src: Layout, dst: Layout) -> StepOutline:
    """Source addend i becomes part of destination addend i, counted round."""
    assert src.pending is not None and dst.pending is not None
    count = count_addends(dst)
    terms = [range(j, count_addends(src), count) for j in range(count)]
    common = math.gcd(dst.pending.divisor, src.pending.divisor)
    scale = (dst.pending.divisor // common, src.pending.divisor // common)
    return StepOutline(src, dst, terms, src.pending.op, scale)
