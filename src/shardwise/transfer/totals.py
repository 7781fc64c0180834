"""How much does a step move, and between whom, without listing who sends what to whom?

Between regular layouts of many ranks nearly every rank exchanges with every other one: the moves are too many to list.
The totals follow from the pieces and from the rule in `spread`, which decides each demand alone:

1. A rank receives the volume of its destination pieces, once for each addend that is combined there.
2. A rank sends its share of the demands of its source pieces.
3. Both less what meets on the rank itself, and with replicas a demand that a host serves itself is not part of the
   shares. Pairs of pieces with the same rank are few; so are those of one host.

Counts of boxes are found in the same way, from the runs of cells that a piece meets along each dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.intersect import expand_runs, overlaps_with_layout, run_lengths
from shardwise.transfer.routes import box_volumes
from shardwise.transfer.spread import SpreadSenders
from shardwise.transfer.topology import Topology

LISTED_BOXES = 1 << 18  # more moves than these are not listed to make a plan
LISTED_CHOICES = 1 << 20  # nor are they, if there are more pairs of a move and a replica that could send it
_PAIRS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class StepOutline:
    """What a step does, before it is planned: `terms[j]` lists the source addends of the destination's addend j.

    Moves that are too many to be listed (`is_listed`) have senders that are chosen one by one, as `spread` says.
    """

    src: Layout
    dst: Layout
    terms: Sequence[Sequence[int]]
    op: str | None
    scale: tuple[int, int]
    is_listed: bool = True

    @cached_property
    def target_addends(self) -> IntArray:
        """The destination addend that each source addend becomes part of, -1 for none."""
        targets = np.full(count_addends(self.src), -1)
        for target, listed in enumerate(self.terms):
            targets[np.asarray(listed, np.int64)] = target
        return targets

    @cached_property
    def term_counts(self) -> IntArray:
        """How many source addends each destination addend is made of."""
        return np.array([len(listed) for listed in self.terms], np.int64)


def count_addends(layout: Layout) -> int:
    """How many addends the values of a layout have."""
    return 1 if layout.cells is None else layout.cells.addends


@dataclass(frozen=True)
class StepTotals:
    """Elements and boxes that each rank sends to and receives from others, and copies within itself, by rank number."""

    sent: IntArray
    received: IntArray
    copied: IntArray
    boxes_out: IntArray
    boxes_in: IntArray


def count_boxes(outline: StepOutline) -> int:
    """How many boxes the step moves or copies."""
    return int((_boxes_met(outline.dst, outline.src) * _weights_in(outline)).sum())


def can_be_listed(outline: StepOutline) -> bool:
    """Whether the moves are few, or the layouts have no product form that would do without a list."""
    src, dst = outline.src, outline.dst
    if src.cells is None or dst.cells is None or len(src.table) * len(dst.table) <= LISTED_BOXES:
        return True
    boxes = count_boxes(outline)
    return boxes <= LISTED_BOXES and boxes * src.cells.replicas <= LISTED_CHOICES


def total_step(outline: StepOutline, topology: Topology | None) -> StepTotals:
    """The totals of a step between regular layouts that is not listed; with the topology that it is planned for."""
    src, dst = outline.src.table, outline.dst.table
    senders = SpreadSenders(outline.src, outline.dst, topology)
    width = 1 + max(int(src.ranks.max(initial=0)), int(dst.ranks.max(initial=0)))
    boxes, elements = senders.shares(outline.target_addends[src.addends] >= 0)
    into = _weights_in(outline)
    received = _sum_by_rank(dst.ranks, box_volumes(dst.sizes) * into, width)
    boxes_in = _sum_by_rank(dst.ranks, _boxes_met(outline.dst, outline.src) * into, width)
    copied = np.zeros(width, np.int64)
    for demands in _near_demands(outline, senders, senders.topology):
        np.subtract.at(elements, demands.by_share, demands.volumes)
        np.subtract.at(boxes, demands.by_share, 1)
        ranks = dst.ranks[demands.rows]
        own = src.ranks[demands.senders] == ranks
        np.add.at(elements, demands.senders[~own], demands.volumes[~own])
        np.add.at(boxes, demands.senders[~own], 1)
        np.add.at(copied, ranks[own], demands.volumes[own])
        np.subtract.at(boxes_in, ranks[own], 1)
    sent, boxes_out = (_sum_by_rank(src.ranks, amounts, width) for amounts in (elements, boxes))
    return StepTotals(sent, received - copied, copied, boxes_out, boxes_in)


def total_within_hosts(
    outline: StepOutline, totals: StepTotals, topology: Topology, planned_for: Topology | None
) -> StepTotals:
    """The part of the totals that stays within a host, without what stays within a rank."""
    src, dst, width = outline.src.table, outline.dst.table, len(totals.sent)
    sent, received, out, into = (np.zeros(width, np.int64) for _ in range(4))
    senders = SpreadSenders(outline.src, outline.dst, planned_for)
    for demands in _near_demands(outline, senders, topology):
        a, b = src.ranks[demands.senders], dst.ranks[demands.rows]
        near = (a != b) & (topology.host_of(a) == topology.host_of(b))
        for ranks, elements, boxes in ((a[near], sent, out), (b[near], received, into)):
            np.add.at(elements, ranks, demands.volumes[near])
            np.add.at(boxes, ranks, 1)
    return StepTotals(sent, received, np.zeros(width, np.int64), out, into)


@dataclass(frozen=True, slots=True)
class Demands:
    """Columns over demands: destination row, elements, the source row that serves it, and the one by share alone."""

    rows: IntArray
    volumes: IntArray
    senders: IntArray
    by_share: IntArray


def _near_demands(outline: StepOutline, senders: SpreadSenders, topology: Topology | None) -> Iterator[Demands]:
    """The demands that a rank of the same host (without a topology: the same rank) could serve, each once."""
    src, dst = outline.src.table, outline.dst.table
    keys = (src.ranks, dst.ranks)
    if topology is not None:
        keys = (topology.host_of(src.ranks), topology.host_of(dst.ranks))
    for a, b, volumes in overlapping_pairs(outline, *keys):
        if senders.replicas > 1 and len(b):
            sources = a // senders.replicas
            first = np.unique(sources * len(dst) + b, return_index=True)[1]
            a, b, volumes = a[first], b[first], volumes[first]
        chosen, by_share = (
            choose(src.cells[a], src.addends[a], b) for choose in (senders.choose, senders.choose_by_share)
        )
        yield Demands(b, volumes, chosen, by_share)


def overlapping_pairs(
    outline: StepOutline, src_keys: IntArray, dst_keys: IntArray
) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """The rows of source and destination that have equal keys and move something, and the elements, part by part."""
    src, dst = outline.src.table, outline.dst.table
    order = np.argsort(src_keys, kind="stable")
    low = np.searchsorted(src_keys[order], dst_keys, side="left")
    counts = np.searchsorted(src_keys[order], dst_keys, side="right") - low
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(dst_keys):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _PAIRS_AT_ONCE, side="right")))
        items, (turn,) = expand_runs([counts[begin:end]])
        b, a = items + begin, order[low[begin:end][items] + turn]
        meant = outline.target_addends[src.addends[a]] == dst.addends[b]
        a, b = a[meant], b[meant]
        starts = np.maximum(src.offsets[a], dst.offsets[b])
        sizes = np.minimum(src.offsets[a] + src.sizes[a], dst.offsets[b] + dst.sizes[b]) - starts
        found = np.flatnonzero((sizes > 0).all(axis=1))
        yield a[found], b[found], box_volumes(sizes[found])
        begin = end


def _weights_in(outline: StepOutline) -> IntArray:
    """How often each destination row is reached: once for each addend that is combined there."""
    return outline.term_counts[outline.dst.table.addends]


def _boxes_met(layout: Layout, other: Layout) -> IntArray:
    """For each row of a layout, how many cells of the other one it meets."""
    table = layout.table
    if other.cells is not None:
        return run_lengths(table.offsets, table.sizes, other.cells)
    first, index = np.unique(table.cells, return_index=True, return_inverse=True)[1:]
    found = overlaps_with_layout(table.offsets[first], table.sizes[first], other)
    return np.bincount(found.boxes, minlength=len(first))[index.reshape(-1)]


def _sum_by_rank(ranks: IntArray, amounts: IntArray, width: int) -> IntArray:
    totals = np.zeros(width, np.int64)
    np.add.at(totals, ranks, amounts)
    return totals
