"""Is this transfer one of the known collectives? The answer is an optimisation for executors, never a need.

Ranks that exchange form groups (connected by edges). A transfer is a collective if every group shows the same pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.routes import Routes, Step
from shardwise.transfer.totals import StepOutline, StepTotals


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


def recognise_collective(src: Layout, dst: Layout, steps: Sequence[Step]) -> Collective | None:
    """The collective that these steps make up, or None."""
    if sum(len(step.routes) for step in steps) == 0:
        return None
    if len(steps) == 2:
        return _recognise_all_reduce(src, dst)
    groups = _connected_groups(steps[0].routes)
    if steps[0].op is not None and src.pending is not None and dst.pending is None:
        return Collective("reduce_scatter", groups) if _is_reduce_scatter(src, dst, groups) else None
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
        return _recognise_all_reduce(src, dst)
    if src.cells.replicas > 1:
        return None
    outline, total = outlines[0], totals[0]
    groups = _groups_of_cells(outline)
    if outline.op is not None and src.pending is not None and dst.pending is None:
        return Collective("reduce_scatter", groups) if _is_reduce_scatter(src, dst, groups) else None
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


def _recognise_all_reduce(src: Layout, dst: Layout) -> Collective | None:
    """Reduce, then hand out: an all-reduce if all ranks keep their boxes and no source is replicated."""
    if dst.pending is not None or src.cells is None or src.cells.replicas > 1 or not _has_same_boxes(src, dst):
        return None
    owners = src.cells.owners.reshape(-1, src.cells.addends)
    return Collective("all_reduce", tuple(sorted({tuple(sorted(row)) for row in owners.tolist()})))


def _is_reduce_scatter(src: Layout, dst: Layout, groups: tuple[tuple[int, ...], ...]) -> bool:
    """Whether the groups are the addends of a box each, and the results stay within the group."""
    if src.cells is None or src.cells.replicas > 1:
        return False
    owners = {tuple(sorted(row)) for row in src.cells.owners.reshape(-1, src.cells.addends).tolist()}
    return set(groups) <= owners and set(dst.ranks) <= set(src.ranks)


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
