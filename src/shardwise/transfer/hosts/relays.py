"""How does a box that several ranks of a host need get there over the link between hosts once?

1. The moves from other hosts that bring the same box to ranks of one host make a group. One of the ranks receives the
   box, straight into its destination, from the sender that was chosen for it. They take turns; if there are fewer
   groups than ranks, a box is cut in parts, and several ranks receive one each.
2. A second exchange, within the host, passes on what came: out of the destination of the rank that received it.

So each byte enters a host once, all ranks of the host take part, and no rank receives more than it would otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.routes import Routes, constant_column
from shardwise.transfer.topology import Topology
from shardwise.transfer.totals import StepOutline


class RelayedMoves(NamedTuple):
    """The moves of a step, and those within hosts that pass on what it brought there."""

    moves: Routes
    passed_on: Routes


def may_relay(outline: StepOutline, topology: Topology | None) -> bool:
    """Whether several ranks of a host may need the same box from another host."""
    if topology is None or not outline.is_listed or int(outline.term_counts.max(initial=0)) > 1 or not outline.src.ndim:
        return False  # a single element is not worth a second exchange
    hosts = topology.host_of(np.union1d(outline.src.table.ranks, outline.dst.table.ranks))
    return len(np.unique(hosts)) > 1 and _has_copies_on_a_host(outline.dst, topology)


def _has_copies_on_a_host(layout: Layout, topology: Topology) -> bool:
    table = layout.table
    keys = np.stack([table.cells, table.addends, topology.host_of(table.ranks)], axis=1)
    return len(np.unique(keys, axis=0)) < len(keys)


def relay_moves(moves: Routes, outline: StepOutline, topology: Topology) -> RelayedMoves:
    """Send what several ranks of another host need to one of them, or a part to each; the rest stays as it is."""
    far = _group_far_moves(moves, outline, topology)
    shared = far.members > 1
    far = FarMoves(*(column[shared] for column in far))
    starts, sizes = _cut_parts(moves.starts[far.rows], moves.sizes[far.rows], far.parts, far.part)
    taken = (far.part < far.parts) & (sizes > 0).all(axis=1)
    parts = moves.take(far.rows)
    cut = Routes(*parts.columns()[:4], starts, sizes, *parts.columns()[6:]).take(np.flatnonzero(taken))
    rest = np.ones(len(moves), bool)
    rest[far.rows] = False
    both = _concatenate(moves.take(np.flatnonzero(rest)), cut)
    order = np.argsort(both.dst_rows, kind="stable")
    return RelayedMoves(both.take(order), _pass_on(parts, starts, sizes, far, np.flatnonzero(taken)))


class FarMoves(NamedTuple):
    """Columns over moves between hosts, group by group.

    `rows` of the moves; how many `members` the group has, and the `place` of this one; in how many `parts` its box is
    cut, and the `part` that this member receives, if there are so many.
    """

    rows: IntArray
    members: IntArray
    place: IntArray
    parts: IntArray
    part: IntArray


def _group_far_moves(moves: Routes, outline: StepOutline, topology: Topology) -> FarMoves:
    """The moves between hosts by what they bring where. The ranks of a host take turns from group to group."""
    hosts = topology.host_of(moves.dst_ranks)
    far = np.flatnonzero(topology.host_of(moves.src_ranks) != hosts)
    src, dst = outline.src.table, outline.dst.table
    a, b = moves.src_rows[far], moves.dst_rows[far]
    keys = np.stack([hosts[far], src.cells[a], moves.terms[far], dst.cells[b], dst.addends[b]], axis=1)
    groups, group = np.unique(keys, axis=0, return_inverse=True)
    group = np.asarray(group).reshape(-1)
    order = np.lexsort((moves.dst_ranks[far], group))
    group = group[order]
    members = np.bincount(group, minlength=len(groups))[group]
    place = np.arange(len(order)) - np.searchsorted(group, group, side="left")
    low, high = (np.searchsorted(groups[:, 0], groups[:, 0], side=side) for side in ("left", "right"))
    parts = np.minimum(-(-members // (high - low)[group]), members)  # one, if there are as many groups as members
    turn = group - low[group]
    return FarMoves(far[order], members, place, parts, (place - turn * parts) % np.maximum(members, 1))


def _cut_parts(starts: IntArray, sizes: IntArray, count: IntArray, place: IntArray) -> tuple[IntArray, IntArray]:
    """The part of each box at a place of so many, along the first dim that is long enough, else the longest."""
    starts, sizes = starts.copy(), sizes.copy()
    if not len(starts):
        return starts, sizes
    enough = sizes >= count[:, None]
    dim = np.where(enough.any(axis=1), enough.argmax(axis=1), sizes.argmax(axis=1))
    rows = np.arange(len(starts))
    length = sizes[rows, dim]
    low, high = length * place // count, length * (place + 1) // count
    starts[rows, dim] += low
    sizes[rows, dim] = high - low
    return starts, sizes


def _pass_on(parts: Routes, starts: IntArray, sizes: IntArray, far: FarMoves, givers: IntArray) -> Routes:
    """Each part from the rank that got it to the others of its group."""
    count = far.members[givers]
    giver = np.repeat(givers, count)
    turn = np.arange(len(giver)) - np.repeat(np.cumsum(count) - count, count)
    taker = giver - far.place[giver] + turn
    used = np.flatnonzero(taker != giver)
    giver, taker = giver[used], taker[used]
    zero = constant_column(0, len(giver))
    passed = Routes(
        parts.dst_rows[giver],
        parts.dst_rows[taker],
        parts.dst_ranks[giver],
        parts.dst_ranks[taker],
        starts[giver],
        sizes[giver],
        zero,
        zero,
    )
    return passed.take(np.argsort(passed.dst_rows, kind="stable"))


def _concatenate(a: Routes, b: Routes) -> Routes:
    return Routes(*(np.concatenate(pair) for pair in zip(a.columns(), b.columns(), strict=True)))
