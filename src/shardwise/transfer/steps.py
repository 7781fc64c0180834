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

Is this transfer one of the known collectives? The answer is an optimisation for executors, never a need.

Ranks that exchange form groups (connected by edges). A transfer is a collective if every group shows the same pattern.

How does a transfer stay within a buffer limit? By rounds: boxes are cut small and shared out over them.

With at most `degree` messages in and out of a rank, each message of a round may hold `limit / degree` bytes.

1. Cut every box into parts of at most a quarter of that.
2. Along each edge, deal the parts to rounds by the bytes before them; a round starts every three quarters.

Both sides of an edge compute the same rounds from the edge's own boxes. To count the rounds, parts
are not listed: what comes before the last part of an edge decides.

Where local tensors are known to be contiguous, only what passes through a buffer counts: an edge of one box that is one
run of memory on both sides, and that nothing is combined with, goes straight from tensor to tensor in one round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.geometry.box import LayoutError
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.overlap import (
    Overlaps,
    are_long_runs,
    concatenate_overlaps,
    expand_runs,
    overlaps_with_cells,
    overlaps_with_layout,
)
from shardwise.transfer.reductions import (
    column_layout,
    has_replicas,
    may_relay,
    number_columns,
    place_on_holders,
    reduction_layout,
    relay_moves,
    sum_within_hosts,
)
from shardwise.transfer.senders import (
    Routes,
    SpreadSenders,
    Step,
    StepOutline,
    StepTotals,
    box_volumes,
    can_be_listed,
    choose_senders,
    constant_column,
    count_addends,
    index_owners,
    overlapping_pairs,
)
from shardwise.transfer.topology import Topology

_MOST_SIZES = 1 << 16


class BufferTooSmallError(LayoutError):
    """A buffer limit under which not one element fits in each message; `needed` is the least that works."""

    def __init__(self, limit: int, degree: int, itemsize: int) -> None:
        self.needed = degree * itemsize
        super().__init__(
            f"max_buffer_bytes={limit} is too small: a rank exchanges up to {degree} messages at a time with elements "
            f"of {itemsize} bytes; pass at least {self.needed} bytes"
        )


def split_in_rounds(routes: Routes, degree: int, itemsize: int, limit: int) -> Routes:
    """The same moves split into rounds so that a rank's messages of one round add up to at most `limit` bytes."""
    per_message, part = _message_sizes(degree, itemsize, limit)
    cut = _cut_boxes(routes, part)
    return _assign_rounds(cut, per_message - part + 1)


def split_buffered(routes: Routes, outline: StepOutline, itemsize: int, limit: int, least_run: int) -> Routes:
    """The same for contiguous local tensors, where a limit holds for buffers alone.

    An edge of several boxes is packed and unpacked; of one box, on the side where it is not one run of memory.
    A box of an edge of its own is cut into one part for each round, which needs no packing where the box is a run.
    """
    if len(routes) == 0:
        return routes
    edge, first = _number_edges(routes)
    alone = np.bincount(edge) == 1
    least = -(-least_run // itemsize)
    packed = ~(alone & are_long_runs(outline.src, routes.src_rows, routes.sizes, least)[first])
    unpacked = ~(alone & are_long_runs(outline.dst, routes.dst_rows, routes.sizes, least)[first])
    if outline.op is not None and max(map(len, outline.terms)) > 1:
        unpacked[:] = True
    sent, received = np.bincount(routes.src_ranks[first[packed]]), np.bincount(routes.dst_ranks[first[unpacked]])
    buffers = np.zeros(max(len(sent), len(received)), np.int64)
    buffers[: len(sent)] += sent
    buffers[: len(received)] += received
    degree = int(buffers.max(initial=0))
    if degree == 0:
        return routes
    per_message, part = _message_sizes(degree, itemsize, limit)
    buffered = packed | unpacked
    straight = routes.take(np.flatnonzero(~buffered[edge]))
    boxes = _cut_boxes(routes.take(np.flatnonzero((buffered & alone)[edge])), per_message)
    number, start = _number_edges(boxes)
    boxes = replace(boxes, rounds=np.arange(len(boxes)) - start[number])
    packs = _assign_rounds(_cut_boxes(routes.take(np.flatnonzero((~alone)[edge])), part), per_message - part + 1)
    together = straight.with_routes(boxes).with_routes(packs)
    return _sort_by_edge(together, np.ones(len(together), bool))


def _number_edges(routes: Routes) -> tuple[IntArray, IntArray]:
    """The number of the edge that each move goes along, and the first move of each edge; moves are sorted by edge."""
    if len(routes) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    new = (np.diff(routes.src_ranks) != 0) | (np.diff(routes.dst_ranks) != 0)
    return np.concatenate([[0], np.cumsum(new)]), np.concatenate([[0], np.flatnonzero(new) + 1])


def _message_sizes(degree: int, itemsize: int, limit: int) -> tuple[int, int]:
    """The most elements of a message, and of a part."""
    per_message = limit // max(1, degree * itemsize)
    if per_message < 1:
        raise BufferTooSmallError(limit, degree, itemsize)
    return per_message, max(1, per_message // 4)


def _cut_boxes(routes: Routes, limit: int) -> Routes:
    """Cut boxes of more than `limit` elements, keeping rows of the last dims whole where they fit."""
    if len(routes) == 0 or int(routes.elements().max()) <= limit:
        return routes
    part = _part_sizes(routes.sizes, limit)
    counts = -(-routes.sizes // part)
    items, digits = expand_runs([counts[:, d] for d in range(counts.shape[1])])
    shift = np.stack(digits, axis=1) * part[items]
    taken = routes.take(items)
    sizes = np.minimum(part[items], taken.sizes - shift)
    return replace(taken, starts=taken.starts + shift, sizes=sizes)


def _part_sizes(sizes: IntArray, limit: int) -> IntArray:
    """The sizes of the parts into which boxes are cut; the last ones of a box may be smaller."""
    part = np.empty_like(sizes)
    left = np.full(len(sizes), limit, np.int64)
    for d in reversed(range(sizes.shape[1])):
        part[:, d] = np.minimum(sizes[:, d], left)
        left = np.maximum(1, left // np.maximum(1, part[:, d]))
    return part


def _assign_rounds(routes: Routes, step: int) -> Routes:
    """Number the rounds along each edge; the routes are sorted by edge already."""
    elements = routes.elements()
    before = np.cumsum(elements) - elements
    edge, first = _number_edges(routes)
    rounds = (before - before[first][edge]) // step
    return replace(routes, rounds=rounds)


def degree_bound(src: Layout, dst: Layout, terms: int) -> int | None:
    """An upper bound of the messages in and out of a rank between two regular layouts, from their cuts alone."""
    if src.cells is None or dst.cells is None:
        return None
    out, into = 1, 1
    for a, b in zip(src.cells.dims, dst.cells.dims, strict=True):
        out *= _most_met(a.starts, a.lengths, b.starts, b.lengths)
        into *= _most_met(b.starts, b.lengths, a.starts, a.lengths)
    sends = out * dst.cells.addends * dst.cells.replicas * most_cells(src)
    receives = into * terms * most_cells(dst)
    return min(sends, _most_peers(src, dst)) + min(receives, _most_peers(dst, src))


def _most_peers(ours: Layout, theirs: Layout) -> int:
    """How many other ranks of the second layout a rank of the first may meet: one less if it is always one of them."""
    return len(theirs.ranks) - bool(np.isin(ours.ranks, theirs.ranks).all())


def _most_met(starts: IntArray, lengths: IntArray, other_starts: IntArray, other_lengths: IntArray) -> int:
    begins = other_starts[other_lengths > 0]
    filled = lengths > 0
    low = np.searchsorted(begins, starts[filled], side="right")
    high = np.searchsorted(begins, (starts + lengths)[filled], side="left")
    return int((high - low + 1).max(initial=1))


def most_cells(layout: Layout) -> int:
    """The most pieces that a rank holds."""
    return int(np.unique(layout.table.ranks, return_counts=True)[1].max())


def count_rounds(routes: Routes, degree: int, itemsize: int, limit: int) -> int:
    """The number of rounds into which `split_in_rounds` would split these moves, which are sorted by edge."""
    per_message, most = _message_sizes(degree, itemsize, limit)
    if len(routes) == 0:
        return 0
    first = _number_edges(routes)[1]
    last = np.append(first[1:], len(routes)) - 1
    sizes = routes.sizes[last]
    part = _part_sizes(sizes, most)
    before_last_part = np.add.reduceat(routes.elements(), first) - box_volumes(sizes - (-(-sizes // part) - 1) * part)
    return int(before_last_part.max()) // (per_message - most + 1) + 1


def _boxes_of_sizes(sizes: IntArray) -> Routes:
    """Moves of these sizes, each along an edge of its own."""
    column, zero = np.arange(len(sizes)), constant_column(0, len(sizes))
    return Routes(column, column, column, column, np.zeros_like(sizes), sizes, zero, zero)


def bound_rounds(outline: StepOutline, degree: int, itemsize: int, limit: int) -> int:
    """The same for a step whose moves are not listed; at most so many, if ranks hold several pieces."""
    boxes = _distinct_boxes(outline)
    rounds = count_rounds(boxes, degree, itemsize, limit)
    per_edge = most_cells(outline.src) * most_cells(outline.dst)
    if per_edge == 1 or rounds == 0:
        return rounds
    held = min(max(layout.elements_per_rank().values()) for layout in (outline.src, outline.dst))
    per_message, part = _message_sizes(degree, itemsize, limit)
    return min(per_edge * int(boxes.elements().max()), held) // (per_message - part + 1) + 1


def _distinct_boxes(outline: StepOutline) -> Routes:
    """Moves of the distinct sizes that boxes between ranks have; if these are very many, of the largest."""
    src, dst = outline.src, outline.dst
    assert src.cells is not None and dst.cells is not None
    lengths: list[IntArray] = []
    counts = np.full(1, int(outline.term_counts.sum()) * dst.cells.replicas)
    for a, b in zip(src.cells.dims, dst.cells.dims, strict=True):
        cuts = np.unique(np.concatenate([a.starts, a.starts + a.lengths, b.starts, b.starts + b.lengths]))
        length, count = np.unique(np.diff(cuts), return_counts=True)
        lengths.append(length)
        counts = np.multiply.outer(counts, count)
    if counts.size > _MOST_SIZES:
        return _boxes_of_sizes(np.array([[length.max() for length in lengths]]))
    sizes = np.stack([grid.reshape(-1) for grid in np.meshgrid(*lengths, indexing="ij")], axis=1)
    _, index, number = np.unique(
        np.concatenate([sizes, *_copied_sizes(outline)]), axis=0, return_index=True, return_counts=True
    )
    return _boxes_of_sizes(sizes[index[counts.reshape(-1)[index] > number - 1]])


def _copied_sizes(outline: StepOutline) -> list[IntArray]:
    """The sizes of the boxes that are copied within a rank."""
    src, dst = outline.src.table, outline.dst.table
    sizes = []
    for x, y, _ in overlapping_pairs(outline, src.ranks, dst.ranks):
        a, b = src.take(x), dst.take(y)
        sizes.append(np.minimum(a.offsets + a.sizes, b.offsets + b.sizes) - np.maximum(a.offsets, b.offsets))
    return sizes


T = TypeVar("T")


@dataclass(frozen=True)
class PlanOptions:
    """What determines a plan besides the two layouts."""

    itemsize: int
    topology: Topology | None = None
    max_buffer_bytes: int | None = None
    contiguous: bool = False
    """Whether local tensors are, so that only what passes through buffers counts; for whole plans."""
    least_run: int = 0
    """Boxes whose runs of memory have at least so many bytes need no buffers either, unless it is 0."""
    turn: int = 0
    """The place of the replica that comes first; of many tensors each has another, so that replicas share them."""


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
    routes, copies = _routes_of(moves, options, rank, degree, outline)
    fills, rounds = unreached_rows(outline, rank), int(routes.rounds.max(initial=-1)) + 1
    steps = [Step(src, dst, routes, copies, fills, outline.op, outline.scale, rounds)]
    if len(passed_on):
        routes, none = _routes_of(passed_on, options, rank, _max_degree(passed_on), replace(outline, src=dst, op=None))
        rounds = int(routes.rounds.max(initial=-1)) + 1
        steps.append(Step(dst, dst, routes, none, none.dst_rows, None, (1, 1), rounds, in_place=True))
    return steps


def _routes_of(
    moves: Routes, options: PlanOptions, rank: int | None, degree: int, outline: StepOutline
) -> tuple[Routes, Routes]:
    """The moves between ranks, in rounds if buffers are limited, and those within a rank; with `rank`, its part."""
    local, mine = moves.src_ranks == moves.dst_ranks, np.ones(len(moves), bool)
    if rank is not None:
        mine = (moves.src_ranks == rank) | (moves.dst_ranks == rank)
    routes, copies = _sort_by_edge(moves, mine & ~local), _sort_by_edge(moves, mine & local)
    limit = options.max_buffer_bytes
    if limit is not None and options.contiguous:
        assert rank is None
        routes = split_buffered(routes, outline, options.itemsize, limit, options.least_run)
    elif limit is not None:
        routes = split_in_rounds(routes, degree, options.itemsize, limit)
    return routes, copies


def _can_plan_alone(outline: StepOutline, options: PlanOptions) -> bool:
    """Whether one rank's part follows from the pieces around it: regular layouts whose replica sets do not overlap."""
    src, dst = outline.src, outline.dst
    if src.cells is None or dst.cells is None or may_relay(outline, options.topology):
        return False
    if outline.decides_alone:
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
    if outline.decides_alone:
        sending = _rows_of_cells(_source_overlaps(src, dst, np.unique(held)), dst)
        taking = Overlaps(rows[taking.boxes], taking.cells, taking.starts, taking.sizes)
        both = concatenate_overlaps(sending, taking)
        return both.take(np.unique(np.stack([both.boxes, both.cells], axis=1), axis=0, return_index=True)[1])
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


def _build_moves(outline: StepOutline, overlaps: Overlaps, options: PlanOptions, only: int | None = None) -> Routes:
    """One move for each demand and term, local ones included, in order of destination rows; with `only`, a rank's."""
    src, dst = outline.src, outline.dst
    if only is not None and count_addends(src) > 1 and outline.decides_alone:
        overlaps, term = _expand_terms_of_rank(outline, overlaps, only)
    else:
        overlaps, term = _expand_terms(outline, overlaps)
    sources = overlaps.cells * count_addends(src) + term
    if src.cells is None and count_addends(src) > 1:  # of copies that are addends some cells have fewer
        there = np.flatnonzero(index_owners(src).counts[sources])
        overlaps, term, sources = overlaps.take(there), term[there], sources[there]
    dst_ranks = np.take(dst.table.ranks, overlaps.boxes)
    weights = box_volumes(overlaps.sizes) * options.itemsize
    if outline.is_listed and outline.columns is None:
        src_rows = choose_senders(index_owners(src), sources, dst_ranks, weights, options.topology, options.turn)
    else:
        src_rows = SpreadSenders(outline, options.topology, options.turn).choose(overlaps.cells, term, overlaps.boxes)
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


def outline_candidates(src: Layout, dst: Layout, topology: Topology | None) -> list[tuple[StepOutline, ...]]:
    """What the steps from `src` to `dst` may do, and whether their moves are listed.

    There is one candidate, or two where addends have replicas: each replica makes the reduction by itself, or all ranks
    share it, first those of a host.
    """
    columns = outline_columns(src, dst)
    shared = _outline_shared(src, dst, topology)
    return [shared] if columns is None else [_mark_listed(columns), shared]


def _mark_listed(outlines: tuple[StepOutline, ...]) -> tuple[StepOutline, ...]:
    if all(map(can_be_listed, outlines)):
        return outlines
    return tuple(replace(outline, is_listed=False) for outline in outlines)


def _outline_shared(src: Layout, dst: Layout, topology: Topology | None) -> tuple[StepOutline, ...]:
    """The steps with the fewest bytes; between hosts too, if they are known."""
    outlines = _mark_listed(_outline_steps(src, dst))
    if not all(outline.is_listed for outline in outlines):
        return outlines
    within = None if topology is None else _outline_within_hosts(src, dst, topology)
    return within if within is not None and all(map(can_be_listed, within)) else outlines


def outline_columns(src: Layout, dst: Layout) -> tuple[StepOutline, ...] | None:
    """The steps of a reduction that each replica of the addends makes by itself; None where there is no such one."""
    if src.pending is None or dst.pending is not None:
        return None
    columns = number_columns(src, dst)
    if columns is None:
        return None
    everything, scale = [range(count_addends(src))], (1, src.pending.divisor)
    first = StepOutline(src, dst, everything, src.pending.op, scale, columns=columns)
    if dst.cells is not None and src.cells is not None and dst.cells.replicas == src.cells.replicas:
        return (first,)
    middle = column_layout(src)
    if middle is None or not _has_same_boxes(src, dst):
        return None
    return replace(first, dst=middle), StepOutline(middle, dst, [[0]], None, (1, 1), columns=columns)


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
    if dst.pending is not None and dst.pending.op == src.pending.op and _keep_addends(src, dst):
        return (_outline_addend_by_addend(src, dst),)
    everything, op = [range(count_addends(src))], src.pending.op
    scale = (1, src.pending.divisor)
    if dst.pending is None and not has_replicas(dst):
        return (StepOutline(src, dst, everything, op, scale),)
    middle = reduction_layout(src, dst)
    return StepOutline(src, middle, everything, op, scale), _outline_first_addend(middle, dst)


def _keep_addends(src: Layout, dst: Layout) -> bool:
    """Whether each addend has a place: where copies are addends, some cells have fewer than others, the same ones."""
    if all(each.cells is not None or index_owners(each).counts.all() for each in (src, dst)):
        return True
    a, b = (each.table.take(np.unique(each.table.cells, return_index=True)[1]) for each in (src, dst))
    count = count_addends(dst)
    ours, theirs = (np.unique(each.table.cells * count + each.table.addends % count) for each in (src, dst))
    return all(map(np.array_equal, (a.offsets, a.sizes, ours), (b.offsets, b.sizes, theirs)))


def plan_steps(outlines: Sequence[StepOutline], options: PlanOptions, rank: int | None) -> tuple[Step, ...]:
    """The steps with their moves (with `rank`, its part); of limits that are too small, errors name the largest."""
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
    if dst.cells is None and dst.pending is not None:
        dst = place_on_holders(src, dst)
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


@dataclass(frozen=True, slots=True)
class Collective:
    """A kind and the rank groups in which it runs side by side.

    Kinds: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, scatter, gather, permute.

    >>> str(Collective("all_to_all", ((0, 1), (2, 3, 4))))
    '2 x all_to_all of 2 to 3 ranks'
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "groups": [list(g) for g in self.groups]}

    def __str__(self) -> str:
        times = "" if len(self.groups) == 1 else f"{len(self.groups)} x "
        few, many = min(map(len, self.groups)), max(map(len, self.groups))
        return f"{times}{self.kind} of {few if few == many else f'{few} to {many}'} ranks"


def recognise_collective(
    src: Layout, dst: Layout, outlines: Sequence[StepOutline], steps: Sequence[Step]
) -> Collective | None:
    """The collective that these steps make up, or None."""
    if sum(len(step.routes) for step in steps) == 0:
        return None
    if len(steps) == 2:
        return _recognise_all_reduce(src, dst, outlines)
    groups = _connected_groups(steps[0].routes)
    if steps[0].op is not None and src.pending is not None and dst.pending is None:
        return Collective("reduce_scatter", groups) if _is_reduce_scatter(src, dst, outlines, groups) else None
    if steps[0].op is not None:
        return None
    width = 1 + max(max(src.ranks, default=0), max(dst.ranks, default=0))
    held, wanted = (_held_by_rank(layout, width) for layout in (src, dst))
    kinds = set()
    for group, routes in zip(groups, _split_by_group(steps[0].routes, groups), strict=True):
        kinds.add(_collective_kind(np.array(group), routes, held, wanted))
        if len(kinds) > 1 or None in kinds:
            return None
    kind = kinds.pop()
    return None if kind is None else Collective(kind, groups)


def _split_by_group(routes: Routes, groups: Sequence[tuple[int, ...]]) -> Iterator[Routes]:
    """The moves of each group."""
    number = np.zeros(int(routes.src_ranks.max(initial=0)) + 1, np.int64)
    for place, group in enumerate(groups):
        inside = [rank for rank in group if rank < len(number)]
        number[inside] = place
    of_route = number[routes.src_ranks]
    order = np.argsort(of_route, kind="stable")
    ends = np.searchsorted(of_route[order], np.arange(len(groups) + 1))
    for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        yield routes.take(order[low:high])


def recognise_from_totals(
    src: Layout, dst: Layout, outlines: Sequence[StepOutline], totals: Sequence[StepTotals]
) -> Collective | None:
    """The same for steps whose moves are not listed; with a replicated source, senders make up no known pattern."""
    if not any(total.boxes_out.any() for total in totals) or src.cells is None:
        return None
    if len(outlines) == 2:
        return _recognise_all_reduce(src, dst, outlines)
    outline, total = outlines[0], totals[0]
    if outline.columns is None and src.cells.replicas > 1:
        return None
    groups = _groups_of_cells(outline) if outline.columns is None else _list_groups(find_addend_groups(src, outlines))
    if outline.op is not None and src.pending is not None and dst.pending is None:
        return Collective("reduce_scatter", groups) if _is_reduce_scatter(src, dst, outlines, groups) else None
    if outline.op is not None:
        return None
    held, wanted = (_held_by_rank(layout, len(total.sent)) for layout in (src, dst))
    kinds = {_kind_from_totals(np.array(group), held, wanted, total, dst) for group in groups}
    kind = kinds.pop()
    return Collective(kind, groups) if not kinds and kind is not None else None


def _groups_of_cells(outline: StepOutline) -> tuple[tuple[int, ...], ...]:
    """The sets of ranks that exchange: ranks whose pieces lie between the same cuts that both layouts have."""
    src, dst = outline.src.table, outline.dst.table
    used = np.flatnonzero((outline.target_addends[src.addends] >= 0) & (src.sizes > 0).all(axis=1))
    reached = np.flatnonzero((outline.term_counts[dst.addends] > 0) & (dst.sizes > 0).all(axis=1))
    region = np.zeros(len(used) + len(reached), np.int64)
    for d in range(outline.src.ndim):
        begins = [src.offsets[used, d], dst.offsets[reached, d]]
        common = np.intersect1d(*begins)
        region = region * (len(common) + 1) + np.searchsorted(common, np.concatenate(begins), side="right")
    ranks, index = np.unique(np.concatenate([src.ranks[used], dst.ranks[reached]]), return_inverse=True)
    regions = np.unique(region, return_inverse=True)[1].reshape(-1) + len(ranks)
    label = _spread_labels(index.reshape(-1), regions, len(ranks) + int(regions.max()) + 1)[: len(ranks)]
    return tuple(group for group in _split_by_label(ranks, label) if len(group) > 1)


def _kind_from_totals(group: IntArray, held: IntArray, wanted: IntArray, total: StepTotals, dst: Layout) -> str | None:
    senders, receivers = group[total.sent[group] > 0], group[total.received[group] > 0]
    assert dst.cells is not None
    replicas = dst.cells.replicas  # of two, one may always be where the source is
    once = replicas == 1 or (replicas == 2 and total.sent[group].sum() == total.copied[group].sum())
    if len(senders) == 1 and len(receivers) > 1:
        whole = (total.received[receivers] == held[senders[0]]).all()
        return "broadcast" if whole else "scatter" if once else None
    if len(receivers) == 1 and len(senders) > 1:
        return "gather"
    if (wanted[group] == held[group].sum()).all():
        return "all_gather"
    alone = total.boxes_out[group].max() == 1 and total.boxes_in[group].max() == 1
    if alone and (total.sent[senders] == held[senders]).all():
        return "permute"
    return "all_to_all" if len(senders) > 1 and once else None


def _held_by_rank(layout: Layout, width: int) -> IntArray:
    held = np.zeros(width, np.int64)
    np.add.at(held, layout.table.ranks, layout.table.sizes.prod(axis=1))
    return held


def _connected_groups(routes: Routes) -> tuple[tuple[int, ...], ...]:
    """The sets of ranks connected by edges."""
    ranks, index = np.unique(np.concatenate([routes.src_ranks, routes.dst_ranks]), return_inverse=True)
    a, b = index.reshape(-1)[: len(routes)], index.reshape(-1)[len(routes) :]
    return _split_by_label(ranks, _spread_labels(a, b, len(ranks)))


def _spread_labels(a: IntArray, b: IntArray, count: int) -> IntArray:
    """A label for each of `count` nodes, equal for those that edges connect: the smallest spreads until it rests."""
    label = np.arange(count)
    while True:
        low = np.minimum(label[a], label[b])
        new = label.copy()
        np.minimum.at(new, a, low)
        np.minimum.at(new, b, low)
        new = new[new]
        if np.array_equal(new, label):
            return label
        label = new


def _split_by_label(ranks: IntArray, label: IntArray) -> tuple[tuple[int, ...], ...]:
    order = np.argsort(label, kind="stable")
    edges = np.flatnonzero(np.diff(label[order])) + 1
    return tuple(tuple(part.tolist()) for part in np.split(ranks[order], edges))


def _has_same_boxes(src: Layout, dst: Layout) -> bool:
    """Whether every rank holds the same boxes in both layouts."""
    a, b = src.table, dst.table
    if len(a) != len(b):
        return False
    first, second = np.argsort(a.ranks, kind="stable"), np.argsort(b.ranks, kind="stable")
    columns = ((a.ranks, b.ranks), (a.offsets, b.offsets), (a.sizes, b.sizes), (a.local_offsets, b.local_offsets))
    return all(np.array_equal(x[first], y[second]) for x, y in columns)


def find_addend_groups(src: Layout, outlines: Sequence[StepOutline]) -> IntArray | None:
    """The ranks that have the addends of a box and reduce it among themselves, a row for each group; None: all do."""
    if src.cells is None or (src.cells.replicas > 1 and outlines[0].columns is None):
        return None
    owners = src.cells.owners.reshape(-1, src.cells.addends, src.cells.replicas)
    groups: IntArray = np.sort(owners.transpose(0, 2, 1).reshape(-1, src.cells.addends), axis=1)
    return groups


def _list_groups(groups: IntArray | None) -> tuple[tuple[int, ...], ...]:
    return () if groups is None else tuple(sorted(set(map(tuple, groups.tolist()))))


def _recognise_all_reduce(src: Layout, dst: Layout, outlines: Sequence[StepOutline]) -> Collective | None:
    """Reduce, then hand out: an all-reduce if all ranks keep their boxes, and addends have no replicas or columns."""
    groups = find_addend_groups(src, outlines)
    if dst.pending is not None or groups is None or not _has_same_boxes(src, dst):
        return None
    return Collective("all_reduce", _list_groups(groups))


COMM_WORKSPACE_BYTES = 8 << 20  # what a comm's reduction may use for each rank


def find_comm_collective(
    src: Layout,
    dst: Layout,
    outlines: Sequence[StepOutline],
    ranks: Sequence[int],
    limit: int | None,
    workspace: int | None = None,
) -> Collective | None:
    """The collective by which a comm of these ranks makes the steps by itself: all_reduce or reduce_scatter, in groups.

    Each rank is in one group, starts from one box, and ends with it, or the i-th rank of a group with its i-th part of
    equally many rows. None where it is not so, or a buffer limit leaves a comm too little room: that of all ranks takes
    `workspace` bytes, if it is known, and any other so many for each rank of a group.
    """
    groups = find_addend_groups(src, outlines)
    if src.pending is None or dst.pending is not None or groups is None or groups.shape[1] == 1:
        return None
    if not np.array_equal(np.sort(groups, axis=None), np.sort(np.asarray(ranks))):
        return None
    if workspace is None or len(groups) > 1:
        workspace = groups.shape[1] * COMM_WORKSPACE_BYTES
    if limit is not None and limit < workspace:
        return None
    if _has_same_boxes(src, dst):
        return Collective("all_reduce", _list_groups(groups))
    ordered = np.asarray([ranks]) if len(groups) == 1 else groups  # a comm of its own lists ranks in its own order
    return Collective("reduce_scatter", _list_groups(groups)) if _ends_in_equal_runs(src, dst, ordered) else None


def _ends_in_equal_runs(src: Layout, dst: Layout, groups: IntArray) -> bool:
    """Whether the i-th rank of each group ends with the i-th of equally many rows of the box that it starts from."""
    a, b, count = src.table, dst.table, groups.shape[1]
    if len(a) != len(b) or src.ndim == 0 or (a.sizes[:, 0] % count).any():
        return False
    first, second = np.argsort(a.ranks, kind="stable"), np.argsort(b.ranks, kind="stable")
    if not np.array_equal(a.ranks[first], b.ranks[second]):
        return False
    place = np.zeros(int(groups.max()) + 1, np.int64)
    place[groups] = np.arange(count)
    offsets, sizes = a.offsets[first].copy(), a.sizes[first].copy()
    sizes[:, 0] //= count
    offsets[:, 0] += place[a.ranks[first]] * sizes[:, 0]
    filled = bool((sizes[:, 0] > 0).all())
    return filled and np.array_equal(b.offsets[second], offsets) and np.array_equal(b.sizes[second], sizes)


def _is_reduce_scatter(
    src: Layout, dst: Layout, outlines: Sequence[StepOutline], groups: tuple[tuple[int, ...], ...]
) -> bool:
    """Whether the groups are the addends of a box each, and the results stay within the group."""
    known = find_addend_groups(src, outlines)
    return known is not None and set(groups) <= set(_list_groups(known)) and set(dst.ranks) <= set(src.ranks)


def _collective_kind(group: IntArray, routes: Routes, held: IntArray, wanted: IntArray) -> str | None:
    """The pattern of one group, which has these moves; `held` and `wanted` are elements by rank."""
    senders, receivers = np.unique(routes.src_ranks), np.unique(routes.dst_ranks)
    if len(senders) == 1 and len(receivers) > 1:
        return _one_sender_kind(routes, int(held[senders[0]]), receivers)
    if len(receivers) == 1 and len(senders) > 1:
        return "gather"
    held, wanted = held[group], wanted[group]
    sources, targets, amounts = _group_edges(routes, group)
    every = len(amounts) == int((held > 0).sum()) * (len(group) - 1) and (amounts == held[sources]).all()
    if every and (wanted == held.sum()).all():
        return "all_gather"
    sent = np.zeros_like(held)
    np.add.at(sent, sources, amounts)
    if np.bincount(sources).max() == 1 and np.bincount(targets).max() == 1 and (sent == held)[sent > 0].all():
        return "permute"
    if len(senders) > 1 and (sent <= held).all() and _is_sent_once(routes):
        return "all_to_all"
    return None


def _one_sender_kind(routes: Routes, held: int, receivers: IntArray) -> str | None:
    amounts = np.zeros(len(receivers), np.int64)
    np.add.at(amounts, np.searchsorted(receivers, routes.dst_ranks), routes.elements())
    if (amounts == held).all():
        return "broadcast"
    return "scatter" if _is_sent_once(routes) else None


def _group_edges(routes: Routes, members: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The edges of a group: the places of source and destination in it, and the elements."""
    sources, targets = np.searchsorted(members, routes.src_ranks), np.searchsorted(members, routes.dst_ranks)
    edges, index = np.unique(sources * len(members) + targets, return_inverse=True)
    amounts = np.zeros(len(edges), np.int64)
    np.add.at(amounts, index.reshape(-1), routes.elements())
    return edges // len(members), edges % len(members), amounts


def _is_sent_once(routes: Routes) -> bool:
    """Whether no part of a source piece is sent twice: the regions sent from a piece are disjoint."""
    start = np.concatenate([routes.src_rows[:, None], routes.starts], axis=1)
    return len(np.unique(start, axis=0)) == len(start)
