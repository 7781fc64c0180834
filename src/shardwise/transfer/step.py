"""How is one exchange planned? Intersect, choose senders, sort by edge.

A step takes addends of the source to addends of the destination: `terms[j]` lists the source addends that make up the
destination's addend j. An empty list means the reduction's identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.choose import choose_senders, owners_of
from shardwise.transfer.intersect import Overlaps, overlaps_with_cells, overlaps_with_layout
from shardwise.transfer.rounds import degree_bound, split_in_rounds
from shardwise.transfer.routes import Routes, Step, constant, volumes
from shardwise.transfer.topology import Topology


@dataclass(frozen=True)
class Options:
    """What decides a plan besides the two layouts."""

    itemsize: int
    topology: Topology | None = None
    max_buffer_bytes: int | None = None


def plan_step(
    src: Layout,
    dst: Layout,
    terms: Sequence[Sequence[int]],
    op: str | None,
    scale: tuple[int, int],
    options: Options,
    rank: int | None,
) -> Step:
    """The step from one layout to another; with `rank`, only this rank's part of it."""
    only = rank if rank is not None and _plannable_alone(src, dst, options) else None
    overlaps = _demands(src, dst, only)
    moves = _moves(src, dst, overlaps, terms, options)
    local, mine = moves.src_ranks == moves.dst_ranks, np.ones(len(moves), bool)
    if rank is not None:
        mine = (moves.src_ranks == rank) | (moves.dst_ranks == rank)
    routes, copies = _by_edge(moves, mine & ~local), _by_edge(moves, mine & local)
    if options.max_buffer_bytes is not None:
        degree = degree_bound(src, dst, max(map(len, terms))) or _degree(
            moves if rank is None else _moves(src, dst, _demands(src, dst, None), terms, options)
        )
        routes = split_in_rounds(routes, degree, options.itemsize, options.max_buffer_bytes)
    fills = _fills(dst, terms, rank)
    rounds = int(routes.rounds.max(initial=-1)) + 1
    return Step(src, dst, routes, copies, fills, op, scale, rounds)


def _plannable_alone(src: Layout, dst: Layout, options: Options) -> bool:
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
        return _joined(sending, taking)
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


def _joined(a: Overlaps, b: Overlaps) -> Overlaps:
    """Both lists, each (row, cell) pair once, in canonical order."""
    rows, cells = np.concatenate([a.boxes, b.boxes]), np.concatenate([a.cells, b.cells])
    _, first = np.unique(np.stack([rows, cells], axis=1), axis=0, return_index=True)
    return Overlaps(
        rows[first],
        cells[first],
        np.concatenate([a.starts, b.starts])[first],
        np.concatenate([a.sizes, b.sizes])[first],
    )


def _moves(src: Layout, dst: Layout, overlaps: Overlaps, terms: Sequence[Sequence[int]], options: Options) -> Routes:
    """One move for each demand and term, local ones included, in order of destination rows."""
    addends = 1 if src.cells is None else src.cells.addends
    counts = np.array([len(t) for t in terms], np.int64)
    table = np.zeros((len(terms), int(counts.max(initial=1))), np.int64)
    for j, listed in enumerate(terms):
        table[j, : len(listed)] = listed
    if (counts == 1).all() and len(terms) == 1:
        term = constant(int(table[0, 0]), len(overlaps.boxes))
    else:
        target = dst.table.addends[overlaps.boxes]
        items = np.repeat(np.arange(len(target)), counts[target])
        position = np.arange(len(items)) - np.repeat(np.cumsum(counts[target]) - counts[target], counts[target])
        overlaps, term = overlaps.take(items), table[target[items], position]
    dst_ranks = np.take(dst.table.ranks, overlaps.boxes)
    weights = volumes(overlaps.sizes) * options.itemsize
    src_rows = choose_senders(owners_of(src), overlaps.cells * addends + term, dst_ranks, weights, options.topology)
    src_ranks = np.take(src.table.ranks, src_rows)
    round_zero = constant(0, len(src_rows))
    return Routes(src_rows, overlaps.boxes, src_ranks, dst_ranks, overlaps.starts, overlaps.sizes, term, round_zero)


def _by_edge(moves: Routes, chosen: npt.NDArray[np.bool_]) -> Routes:
    """The chosen moves, sorted by source rank, then destination rank."""
    rows = np.flatnonzero(chosen)
    width = int(moves.dst_ranks.max(initial=0)) + 1
    return moves.take(rows[np.argsort(moves.src_ranks[rows] * width + moves.dst_ranks[rows], kind="stable")])


def _degree(moves: Routes) -> int:
    """The most messages that go in and out of one rank."""
    remote = moves.src_ranks != moves.dst_ranks
    edges = np.unique(np.stack([moves.src_ranks[remote], moves.dst_ranks[remote]], axis=1), axis=0)
    if len(edges) == 0:
        return 1
    return int(np.unique(edges, return_counts=True)[1].max())


def _fills(dst: Layout, terms: Sequence[Sequence[int]], rank: int | None) -> IntArray:
    """The destination rows that no term reaches."""
    empty = np.array([not t for t in terms])
    if not empty.any():
        return np.zeros(0, np.int64)
    rows = np.flatnonzero(empty[dst.table.addends])
    return rows if rank is None else rows[dst.table.ranks[rows] == rank]
