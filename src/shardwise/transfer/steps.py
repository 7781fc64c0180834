"""How is one exchange planned? Intersect, choose senders, sort by edge.

A step takes addends of the source to addends of the destination: `terms[j]` lists the source addends that make up the
destination's addend j. An empty list means the reduction's identity.

Pending reductions are computed on ranks that have an addend and, if there is one, need the result. Each region is
reduced on one rank, which receives the other addends; then the result goes to whoever else needs it. Regions that
several ranks could reduce are cut in even parts, so that all take their share (an all-reduce becomes a reduce-scatter
and an all-gather). This moves addends - 1 messages per element, and then only what is needed: the lower bound.

One exchange turns one layout into another, or two where a pending reduction goes to several ranks:

1. Without pending reductions: one step. Every destination piece is intersected with the source pieces; each part
   comes from the best replica.
2. Pending in the source, not in the destination: if no destination box is replicated, one step that reduces on
   arrival; else one step that reduces every region on one rank, and one that hands the results out.
3. Pending in the destination: the same kind of reduction moves addend by addend; otherwise the value becomes the
   first addend and the others are filled with the reduction's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import bounds, chunk_sizes
from shardwise.geometry.specs import EnumerableSpec
from shardwise.transfer.choose import choose_senders, index_owners
from shardwise.transfer.intersect import Overlaps, overlaps_with_cells, overlaps_with_layout
from shardwise.transfer.routes import (
    BufferTooSmallError,
    Routes,
    Step,
    box_volumes,
    constant_column,
    degree_bound,
    split_in_rounds,
)
from shardwise.transfer.topology import Topology


@dataclass(frozen=True)
class PlanOptions:
    """What determines a plan besides the two layouts."""

    itemsize: int
    topology: Topology | None = None
    max_buffer_bytes: int | None = None


def plan_step(
    src: Layout,
    dst: Layout,
    terms: Sequence[Sequence[int]],
    op: str | None,
    scale: tuple[int, int],
    options: PlanOptions,
    rank: int | None,
) -> Step:
    """The step from one layout to another; with `rank`, only this rank's part of it."""
    only = rank if rank is not None and _can_plan_alone(src, dst, options) else None
    overlaps = _demands(src, dst, only)
    moves = _build_moves(src, dst, overlaps, terms, options)
    local, mine = moves.src_ranks == moves.dst_ranks, np.ones(len(moves), bool)
    if rank is not None:
        mine = (moves.src_ranks == rank) | (moves.dst_ranks == rank)
    routes, copies = _sort_by_edge(moves, mine & ~local), _sort_by_edge(moves, mine & local)
    if options.max_buffer_bytes is not None:
        degree = degree_bound(src, dst, max(map(len, terms))) or _max_degree(
            moves if rank is None else _build_moves(src, dst, _demands(src, dst, None), terms, options)
        )
        routes = split_in_rounds(routes, degree, options.itemsize, options.max_buffer_bytes)
    fills = _unreached_rows(dst, terms, rank)
    rounds = int(routes.rounds.max(initial=-1)) + 1
    return Step(src, dst, routes, copies, fills, op, scale, rounds)


def _can_plan_alone(src: Layout, dst: Layout, options: PlanOptions) -> bool:
    """Whether one rank's part follows from the pieces around it: regular layouts whose replica sets do not overlap."""
    if src.cells is None or dst.cells is None:
        return False
    if src.cells.replicas == 1:
        return True
    if options.topology is not None:
        return False
    sets = np.unique(np.sort(src.cells.owners.reshape(-1, src.cells.replicas), axis=1), axis=0)
    return len(np.unique(sets)) == sets.size


def _demands(src: Layout, dst: Layout, rank: int | None) -> Overlaps:
    """Which destination rows need which source cells; with `rank`, those that bear on this rank's part."""
    if rank is None:
        if src.cells is None and dst.cells is not None:
            return _rows_of_cells(_source_overlaps(src, dst, None), dst)
        return overlaps_with_layout(dst.table.offsets, dst.table.sizes, src)
    assert src.cells is not None and dst.cells is not None
    rows = dst.rows_of(rank)
    needed = overlaps_with_cells(dst.table.offsets[rows], dst.table.sizes[rows], src.cells).cells
    held = src.table.cells[src.rows_of(rank)]
    if src.cells.replicas == 1:
        sending = _rows_of_cells(_source_overlaps(src, dst, np.unique(held)), dst)
        taking = overlaps_with_cells(dst.table.offsets[rows], dst.table.sizes[rows], src.cells)
        taking = Overlaps(rows[taking.boxes], taking.cells, taking.starts, taking.sizes)
        return _join_overlaps(sending, taking)
    return _rows_of_cells(_source_overlaps(src, dst, _same_owners(src, np.concatenate([needed, held]))), dst)


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
    rows, cells = np.concatenate([a.boxes, b.boxes]), np.concatenate([a.cells, b.cells])
    _, first = np.unique(np.stack([rows, cells], axis=1), axis=0, return_index=True)
    return Overlaps(
        rows[first],
        cells[first],
        np.concatenate([a.starts, b.starts])[first],
        np.concatenate([a.sizes, b.sizes])[first],
    )


def _build_moves(
    src: Layout, dst: Layout, overlaps: Overlaps, terms: Sequence[Sequence[int]], options: PlanOptions
) -> Routes:
    """One move for each demand and term, local ones included, in order of destination rows."""
    addends = 1 if src.cells is None else src.cells.addends
    counts = np.array([len(t) for t in terms], np.int64)
    table = np.zeros((len(terms), int(counts.max(initial=1))), np.int64)
    for j, listed in enumerate(terms):
        table[j, : len(listed)] = listed
    if (counts == 1).all() and len(terms) == 1:
        term = constant_column(int(table[0, 0]), len(overlaps.boxes))
    else:
        target = dst.table.addends[overlaps.boxes]
        items = np.repeat(np.arange(len(target)), counts[target])
        position = np.arange(len(items)) - np.repeat(np.cumsum(counts[target]) - counts[target], counts[target])
        overlaps, term = overlaps.take(items), table[target[items], position]
    dst_ranks = np.take(dst.table.ranks, overlaps.boxes)
    weights = box_volumes(overlaps.sizes) * options.itemsize
    src_rows = choose_senders(index_owners(src), overlaps.cells * addends + term, dst_ranks, weights, options.topology)
    src_ranks = np.take(src.table.ranks, src_rows)
    round_zero = constant_column(0, len(src_rows))
    return Routes(src_rows, overlaps.boxes, src_ranks, dst_ranks, overlaps.starts, overlaps.sizes, term, round_zero)


def _sort_by_edge(moves: Routes, chosen: npt.NDArray[np.bool_]) -> Routes:
    """The chosen moves, sorted by source rank, then destination rank."""
    rows = np.flatnonzero(chosen)
    width = int(moves.dst_ranks.max(initial=0)) + 1
    return moves.take(rows[np.argsort(moves.src_ranks[rows] * width + moves.dst_ranks[rows], kind="stable")])


def _max_degree(moves: Routes) -> int:
    """The most messages that go in and out of one rank."""
    remote = moves.src_ranks != moves.dst_ranks
    edges = np.unique(np.stack([moves.src_ranks[remote], moves.dst_ranks[remote]], axis=1), axis=0)
    if len(edges) == 0:
        return 1
    return int(np.unique(edges, return_counts=True)[1].max())


def _unreached_rows(dst: Layout, terms: Sequence[Sequence[int]], rank: int | None) -> IntArray:
    """The destination rows that no term reaches."""
    empty = np.array([not t for t in terms])
    if not empty.any():
        return np.zeros(0, np.int64)
    rows = np.flatnonzero(empty[dst.table.addends])
    return rows if rank is None else rows[dst.table.ranks[rows] == rank]


def has_replicas(layout: Layout) -> bool:
    """Whether some box of the layout is held by several ranks with the same values."""
    return bool((index_owners(layout).counts > 1).any())


def overlap_regions(src: Layout, dst: Layout) -> tuple[Overlaps, IntArray]:
    """The regions where destination cells meet source cells, and the first table row of each destination cell."""
    first = np.unique(dst.table.cells, return_index=True)[1]
    return overlaps_with_layout(dst.table.offsets[first], dst.table.sizes[first], src), first


def reduction_layout(src: Layout, dst: Layout) -> Layout:
    """The layout in which each region is on the ranks that reduce it."""
    found, first = overlap_regions(src, dst)
    offsets, sizes, ranks = [], [], []
    for row, start, size in zip(range(len(found.boxes)), found.starts, found.sizes, strict=True):
        reducers = _reducers(src, dst, int(found.cells[row]), int(dst.table.cells[first[found.boxes[row]]]))
        for rank, begin, extent in _split_region(start, size, reducers):
            offsets.append(begin)
            sizes.append(extent)
            ranks.append(rank)
    columns = (len(ranks), src.ndim)
    return EnumerableSpec.from_arrays(
        np.array(offsets, np.int64).reshape(columns),
        np.array(sizes, np.int64).reshape(columns),
        np.array(ranks, np.int64),
    ).layout(src.shape)


def _holders(layout: Layout, cell: int, addend: int | None) -> IntArray:
    """The ranks that hold a cell: any addend of it, or one."""
    if layout.cells is None:
        return np.unique(layout.table.ranks[layout.table.cells == cell])
    owners = layout.cells.owners.reshape(-1, layout.cells.addends, layout.cells.replicas)[cell]
    return np.unique(owners if addend is None else owners[addend])


def _reducers(src: Layout, dst: Layout, src_cell: int, dst_cell: int) -> IntArray:
    holders = _holders(src, src_cell, None)
    wanted = np.intersect1d(holders, _holders(dst, dst_cell, 0), assume_unique=True)
    return wanted if len(wanted) else holders


def _split_region(start: IntArray, size: IntArray, ranks: IntArray) -> Iterator[tuple[int, list[int], list[int]]]:
    """Cut a region in even parts along the first dim that is long enough, else along the longest."""
    if len(size) == 0 or len(ranks) == 1:
        yield int(ranks[0]), start.tolist(), size.tolist()
        return
    long_enough = np.flatnonzero(size >= len(ranks))
    dim = int(long_enough[0]) if len(long_enough) else int(size.argmax())
    cuts = chunk_sizes(int(size[dim]), len(ranks))
    for rank, offset, length in zip(ranks.tolist(), bounds(cuts), cuts, strict=False):
        if length:
            begin, extent = start.copy(), size.copy()
            begin[dim] += offset
            extent[dim] = length
            yield rank, begin.tolist(), extent.tolist()


def reduction_lower_bound(src: Layout, dst: Layout) -> int:
    """The fewest elements that must move to resolve what is pending in `src` into `dst`.

    For each element: one message less than it has addends, and one for each rank that needs the result, less one if
    such a rank holds an addend.
    """
    found, first = overlap_regions(src, dst)
    addends = 1 if src.cells is None else src.cells.addends
    total = 0
    for row, size in zip(range(len(found.boxes)), found.sizes, strict=True):
        needing = _holders(dst, int(dst.table.cells[first[found.boxes[row]]]), 0)
        meets = len(np.intersect1d(_holders(src, int(found.cells[row]), None), needing)) > 0
        total += int(size.prod()) * (addends - 1 + len(needing) - meets)
    return total


def plan_steps(src: Layout, dst: Layout, options: PlanOptions, rank: int | None) -> tuple[Step, ...]:
    """The steps from `src` to `dst`; with `rank`, only this rank's part of them."""
    if src.pending is None:
        return (_plan_first_addend(src, dst, options, rank),)
    if dst.pending is not None and dst.pending.op == src.pending.op:
        return (_plan_addend_by_addend(src, dst, options, rank),)
    everything = [list(range(_count_addends(src)))]
    scale = (1, src.pending.divisor)
    if dst.pending is None and not has_replicas(dst):
        return (plan_step(src, dst, everything, src.pending.op, scale, options, rank),)
    middle, op = reduction_layout(src, dst), src.pending.op
    return _plan_all(
        lambda: plan_step(src, middle, everything, op, scale, options, rank),
        lambda: _plan_first_addend(middle, dst, options, rank),
    )


def _plan_all(*plans: Callable[[], Step]) -> tuple[Step, ...]:
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


def _count_addends(layout: Layout) -> int:
    return 1 if layout.cells is None else layout.cells.addends


def _plan_first_addend(src: Layout, dst: Layout, options: PlanOptions, rank: int | None) -> Step:
    """The value goes to the destination's first addend; the others are filled with the identity."""
    terms = [[0]] + [[] for _ in range(_count_addends(dst) - 1)]
    op = None if dst.pending is None else dst.pending.op
    scale = (1 if dst.pending is None else dst.pending.divisor, 1)
    return plan_step(src, dst, terms, op, scale, options, rank)


def _plan_addend_by_addend(src: Layout, dst: Layout, options: PlanOptions, rank: int | None) -> Step:
    """Source addend i becomes part of destination addend i, counted round."""
    assert src.pending is not None and dst.pending is not None
    count = _count_addends(dst)
    terms = [list(range(j, _count_addends(src), count)) for j in range(count)]
    common = gcd(dst.pending.divisor, src.pending.divisor)
    scale = (dst.pending.divisor // common, src.pending.divisor // common)
    return plan_step(src, dst, terms, src.pending.op, scale, options, rank)
