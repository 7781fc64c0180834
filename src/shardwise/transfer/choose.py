"""Of the replicas that hold a box, which one sends it?

1. The rank that needs it, if it is one of them: a local copy.
2. Else the replicas on its host, if the topology names hosts; else all of them. These form the demand's pool.
3. Within a pool, senders take equal shares of the bytes: demands in order, the first share to the first sender and so
   on. Pools that share ranks are filled one after the other, least-loaded senders first up to a common level.

The choice is a function of the layouts alone, so every rank makes the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.topology import Topology

FloatArray: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Owners:
    """The rows of a layout's table by source: source `cell * addends + addend` has rows[starts[s]:starts[s + 1]]."""

    rows: IntArray
    starts: IntArray
    ranks: IntArray

    @property
    def counts(self) -> IntArray:
        return np.diff(self.starts)

    def members(self, sources: IntArray) -> IntArray:
        """The owner ranks of these sources, ascending, padded with -1 behind."""
        counts = self.counts[sources]
        width = int(counts.max(initial=1))
        columns = np.arange(width)
        inside = columns < counts[:, None]
        index = np.where(inside, self.starts[sources][:, None] + columns, 0)
        ranks = np.where(inside, self.ranks[self.rows[index]], np.iinfo(np.int64).max)
        ranks = np.sort(ranks, axis=1)
        return np.where(ranks == np.iinfo(np.int64).max, -1, ranks)


def index_owners(layout: Layout) -> Owners:
    """Index a layout's table by source."""
    table = layout.table
    addends = 1 if layout.cells is None else layout.cells.addends
    source = table.cells * addends + table.addends
    total = int(table.cells.max(initial=-1) + 1) * addends
    rows = np.arange(len(table)) if layout.cells is not None else np.argsort(source, kind="stable")
    starts = np.searchsorted(source[rows], np.arange(total + 1))
    return Owners(rows, starts, table.ranks)


def choose_senders(
    owners: Owners, sources: IntArray, dst_ranks: IntArray, weights: IntArray, topology: Topology | None
) -> IntArray:
    """The table row that each demand is served from. Demands come in canonical order."""
    chosen = np.take(owners.rows[owners.starts[:-1]], sources) if len(sources) else np.zeros(0, np.int64)
    if int(owners.counts.max(initial=1)) <= 1:
        return chosen
    own = own_rows(owners, sources, dst_ranks)
    chosen = np.where(own >= 0, own, chosen)
    open_demands = np.flatnonzero((own < 0) & (owners.counts[sources] > 1))
    if len(open_demands) == 0:
        return chosen
    pools, members = _pools(owners, sources[open_demands], dst_ranks[open_demands], topology)
    senders = _share_pools(pools, members, weights[open_demands])
    chosen[open_demands] = own_rows(owners, sources[open_demands], senders)
    return chosen


def own_rows(owners: Owners, sources: IntArray, ranks: IntArray) -> IntArray:
    """The row of the source that this rank holds, or -1."""
    width = int(max(owners.ranks.max(initial=0), ranks.max(initial=0))) + 1
    source_of_row = np.repeat(np.arange(len(owners.counts)), owners.counts)
    keys = source_of_row * width + owners.ranks[owners.rows]
    order = np.argsort(keys, kind="stable")
    wanted = sources * width + ranks
    found = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    return np.where(keys[order][found] == wanted, owners.rows[order][found], -1)


def _pools(
    owners: Owners, sources: IntArray, dst_ranks: IntArray, topology: Topology | None
) -> tuple[IntArray, IntArray]:
    """For each demand the number of its pool, and the member ranks of each pool (padded with -1)."""
    distinct, which = np.unique(sources, return_inverse=True)
    members = owners.members(distinct)
    if topology is None:
        sets, label = np.unique(members, axis=0, return_inverse=True)
        return label.reshape(-1)[which.reshape(-1)], sets
    hosts = topology.host_of(dst_ranks)
    width = int(hosts.max(initial=0)) + 1
    keys, which = np.unique(which.reshape(-1) * width + hosts, return_inverse=True)
    pairs = np.stack([keys // width, keys % width], axis=1)
    members = members[pairs[:, 0]]
    near = (members >= 0) & (
        topology.host_of(np.maximum(members, 0).reshape(-1)).reshape(members.shape) == pairs[:, 1:]
    )
    near |= ~near.any(axis=1, keepdims=True) & (members >= 0)
    members = -np.sort(-np.where(near, members, -1), axis=1)
    sets, label = np.unique(members, axis=0, return_inverse=True)
    return label.reshape(-1)[which.reshape(-1)], sets


def _share_pools(pools: IntArray, members: IntArray, weights: IntArray) -> IntArray:
    """The sender rank of each demand, pools filled evenly."""
    order = np.argsort(pools, kind="stable")
    senders = np.empty(len(pools), np.int64)
    used = members[members >= 0]
    fill = _share_separate_pools if len(np.unique(used)) == len(used) else _share_overlapping_pools
    senders[order] = fill(pools[order], members, weights[order].astype(np.float64))
    return senders


def _share_separate_pools(pools: IntArray, members: IntArray, weights: FloatArray) -> IntArray:
    """Pools without common ranks: equal shares of each pool's bytes, by position in its demands."""
    compact = -np.sort(-members, axis=1)
    counts = (compact >= 0).sum(axis=1)
    ends = np.cumsum(weights)
    first = np.flatnonzero(np.concatenate([[True], pools[1:] != pools[:-1]]))
    run = np.cumsum(np.concatenate([[0], (pools[1:] != pools[:-1]).astype(np.int64)]))
    before = (ends - weights)[first]
    last = np.concatenate([first[1:], [len(pools)]]) - 1
    totals = ends[last] - before
    position = (ends - weights - before[run]) / totals[run]
    index = np.minimum((position * counts[pools]).astype(np.int64), counts[pools] - 1)
    senders: IntArray = compact[pools, counts[pools] - 1 - index]
    return senders


def _share_overlapping_pools(pools: IntArray, members: IntArray, weights: FloatArray) -> IntArray:
    """Pools that share ranks: smallest pools first, each filled to a common level over what its ranks send already."""
    loads = np.zeros(int(members.max()) + 1)
    senders = np.empty(len(pools), np.int64)
    present = np.unique(pools)
    sizes = (members[present] >= 0).sum(axis=1)
    for pool in present[np.argsort(sizes, kind="stable")]:
        low, high = np.searchsorted(pools, (pool, pool + 1))
        ranks = np.sort(members[pool][members[pool] >= 0])
        ranks = ranks[np.argsort(loads[ranks], kind="stable")]
        part = weights[low:high]
        room = _fill_level(loads[ranks], part.sum()) - loads[ranks]
        edges = np.cumsum(np.maximum(room, 0.0))
        index = np.searchsorted(edges, np.cumsum(part) - part, side="right")
        chosen = ranks[np.minimum(index, len(ranks) - 1)]
        np.add.at(loads, chosen, part)
        senders[low:high] = chosen
    return senders


def _fill_level(loads: FloatArray, amount: float) -> float:
    """The common level to which these ascending loads rise when `amount` is poured over them."""
    counts = np.arange(1, len(loads) + 1)
    levels = (np.cumsum(loads) + amount) / counts
    fits = np.flatnonzero(levels >= loads)
    return float(levels[fits[-1]])
