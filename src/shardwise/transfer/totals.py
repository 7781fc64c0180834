"""How much does a step move, and between whom, without listing who sends what to whom?

Between layouts of many ranks nearly every rank exchanges with every other one: the moves are too many to list. Where no
source is replicated, each demand has one sender, and the totals follow from the pieces alone:

1. A rank receives the volume of its destination pieces, once for each addend that is combined there.
2. A rank sends the volume of its source pieces, once for each destination replica: the pieces cover the tensor.
3. Both less what meets on the rank itself. Pairs of pieces with the same rank are few; so are those of one host.

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
from shardwise.transfer.topology import Topology

_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class StepOutline:
    """What a step does, before it is planned: `terms[j]` lists the source addends of the destination's addend j."""

    src: Layout
    dst: Layout
    terms: Sequence[Sequence[int]]
    op: str | None
    scale: tuple[int, int]

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


def count_replicas(layout: Layout) -> int:
    """How many ranks hold each value of a layout at most."""
    if layout.cells is not None:
        return layout.cells.replicas
    filled = layout.table.cells[(layout.table.sizes > 0).all(axis=1)]
    return int(np.bincount(filled).max(initial=1))


@dataclass(frozen=True)
class StepTotals:
    """Elements and boxes that each rank sends to and receives from others, and copies within itself, by rank number."""

    sent: IntArray
    received: IntArray
    copied: IntArray
    boxes_out: IntArray
    boxes_in: IntArray


def has_step_totals(outline: StepOutline) -> bool:
    """Whether the totals follow from the pieces alone: no source is replicated, and destination replicas are alike."""
    return count_replicas(outline.src) == 1 and (outline.dst.cells is not None or count_replicas(outline.dst) == 1)


def count_boxes(outline: StepOutline) -> int:
    """How many boxes the step moves or copies."""
    return int((_boxes_met(outline.dst, outline.src) * _weights_in(outline)).sum())


def total_step(outline: StepOutline) -> StepTotals:
    """The totals of a step for which `has_step_totals`."""
    src, dst = outline.src.table, outline.dst.table
    width = 1 + max(int(src.ranks.max(initial=0)), int(dst.ranks.max(initial=0)))
    copied, copies = (np.zeros(width, np.int64) for _ in range(2))
    for _, b, volumes in overlapping_pairs(outline, src.ranks, dst.ranks):
        np.add.at(copied, dst.ranks[b], volumes)
        np.add.at(copies, dst.ranks[b], 1)
    into, out = _weights_in(outline), _weights_out(outline)
    return StepTotals(
        sent=_sum_by_rank(src.ranks, box_volumes(src.sizes) * out, width) - copied,
        received=_sum_by_rank(dst.ranks, box_volumes(dst.sizes) * into, width) - copied,
        copied=copied,
        boxes_out=_sum_by_rank(src.ranks, _boxes_met(outline.src, outline.dst) * out, width) - copies,
        boxes_in=_sum_by_rank(dst.ranks, _boxes_met(outline.dst, outline.src) * into, width) - copies,
    )


def total_within_hosts(outline: StepOutline, totals: StepTotals, topology: Topology) -> StepTotals:
    """The part of the totals that stays within a host, without what stays within a rank."""
    src, dst, width = outline.src.table, outline.dst.table, len(totals.sent)
    sent, received, out, into = (np.zeros(width, np.int64) for _ in range(4))
    for a, b, volumes in overlapping_pairs(outline, topology.host_of(src.ranks), topology.host_of(dst.ranks)):
        other = src.ranks[a] != dst.ranks[b]
        for ranks, elements, boxes in ((src.ranks[a], sent, out), (dst.ranks[b], received, into)):
            np.add.at(elements, ranks[other], volumes[other])
            np.add.at(boxes, ranks[other], 1)
    return StepTotals(sent, received, np.zeros(width, np.int64), out, into)


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


def _weights_out(outline: StepOutline) -> IntArray:
    """How often each source row is needed: by every destination replica, if its addend is used at all."""
    replicas = 1 if outline.dst.cells is None else outline.dst.cells.replicas
    return np.where(outline.target_addends[outline.src.table.addends] >= 0, replicas, 0)


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
