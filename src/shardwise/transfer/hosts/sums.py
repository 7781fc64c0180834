"""Where are the addends of each host combined, before anything passes between hosts?

A pending reduction whose addends are on several hosts, several of them on each, is resolved in two steps: each host
combines its own addends, then the sums of the hosts are combined as any other addends are. So one addend of each host
passes between hosts, not one of each rank.

1. Each region, where a source cell meets a destination cell, is combined on one rank of each host: one that needs the
   result, else they take turns. If there are fewer regions than ranks they are cut in parts, so that all take part.
2. Where hosts hold all addends of a region, those that need the result combine them, and nothing passes between hosts;
   if none needs it, one of them combines them, and the result is sent.

Only regular layouts whose regions have their addends on hosts in the same manner are planned so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from shardwise.geometry.box import Piece
from shardwise.geometry.cells import Cells, PieceTable, grid_cells
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import IntArray, freeze_array
from shardwise.geometry.placements import Reduction
from shardwise.transfer.intersect import Overlaps
from shardwise.transfer.reduction import overlap_regions
from shardwise.transfer.topology import Topology

MOST_REGIONS = 1 << 12


class HostSumsSpec(ShardingSpec):
    """A grid whose cell (i, j, ...) is held by `owners[i, j, ..., addend, replica]`, with a reduction pending."""

    def __init__(self, splits: Sequence[Sequence[int]], owners: IntArray, op: str) -> None:
        self.splits = tuple(tuple(split) for split in splits)
        self.owners, self.op = freeze_array(owners), op

    def pieces(self, shape: Sequence[int]) -> Sequence[Piece]:
        return self.layout(shape).pieces

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        *grid, addends, replicas = self.owners.shape
        flat = grid_cells(self.splits, self.owners.reshape((*grid, addends * replicas)))
        assert flat.slots is not None
        return Cells(flat.dims, self.owners, flat.slots.reshape(self.owners.shape))

    def reduction(self) -> Reduction | None:
        return Reduction(self.op) if self.owners.shape[-2] > 1 else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostSumsSpec):
            return NotImplemented
        return (self.splits, self.op) == (other.splits, other.op) and np.array_equal(self.owners, other.owners)

    def __hash__(self) -> int:
        return hash((self.splits, self.op, self.owners.tobytes()))

    def __repr__(self) -> str:
        return f"HostSumsSpec(splits={self.splits}, addends={self.owners.shape[-2]})"


@dataclass(frozen=True)
class HostSums:
    """The layout of the hosts' sums; `terms[j]` lists the source addends that make up its addend j."""

    layout: Layout
    terms: tuple[tuple[int, ...], ...]


def sum_within_hosts(src: Layout, dst: Layout, topology: Topology) -> HostSums | None:
    """Where the addends of each host are combined on the way to `dst`; None where that saves nothing, or is not known.

    >>> from shardwise.geometry import parse_spec
    >>> pending, rows = (parse_spec(text).layout((4,)) for text in ("on x=4: P(sum)", "on x=4: S(0)"))
    >>> sums = sum_within_hosts(pending, rows, Topology(ranks_per_host=2))
    >>> sums.terms, sums.layout.cells.owners[:, :, 0].tolist()
    (((0, 1), (2, 3)), [[0, 2], [1, 3], [0, 2], [1, 3]])
    """
    if src.cells is None or dst.cells is None or src.pending is None or not src.ndim:
        return None
    found, first = overlap_regions(src, dst)
    begins = [np.unique(found.starts[:, d], return_index=True) for d in range(src.ndim)]
    if not 0 < len(found.cells) <= MOST_REGIONS or math.prod(len(at) for at, _ in begins) != len(found.cells):
        return None
    regions = _list_regions(src, dst, found, dst.table.cells[first])
    terms, combining = _sum_where_complete(regions, topology) or _sum_by_host(src, regions, topology) or ((), [])
    if not combining:
        return None
    splits = [found.sizes[rows, d].tolist() for d, (_, rows) in enumerate(begins)]
    most = max(len(ranks) for region in combining for ranks in region)
    dim, parts = _choose_parts(splits, -(-most // len(combining)))
    owners = np.array(_take_turns(combining, parts))
    owners = owners[np.lexsort(found.starts.T[::-1])].reshape(*map(len, splits), parts, owners.shape[-1])
    splits[dim] = [n * (i + 1) // parts - n * i // parts for n in splits[dim] for i in range(parts)]
    owners = np.moveaxis(owners, src.ndim, dim + 1).reshape(*map(len, splits), owners.shape[-1])
    owners = owners[..., None, :] if len(terms) == 1 else owners[..., None]
    return HostSums(HostSumsSpec(splits, owners, src.pending.op).layout(src.shape), terms)


class _Region(NamedTuple):
    """Where a source cell meets a destination cell: the ranks with each addend, and those that need the result."""

    addends: list[list[int]]
    needing: set[int]


Terms: TypeAlias = tuple[tuple[int, ...], ...]
CombiningRanks: TypeAlias = list[list[list[int]]]


def _list_regions(src: Layout, dst: Layout, found: Overlaps, dst_cells: IntArray) -> list[_Region]:
    assert src.cells is not None and dst.cells is not None
    owners = src.cells.owners.reshape(-1, src.cells.addends, src.cells.replicas)
    needing = dst.cells.owners.reshape(-1, dst.cells.addends, dst.cells.replicas)[:, 0]
    pairs = zip(found.cells.tolist(), dst_cells[found.boxes].tolist(), strict=True)
    return [_Region(owners[cell].tolist(), set(needing[target].tolist())) for cell, target in pairs]


def _sum_where_complete(regions: Sequence[_Region], topology: Topology) -> tuple[Terms, CombiningRanks] | None:
    """Each region is summed on every host that has all of its addends and needs it, else on the first that has them.

    None where a region has no such host, or where that is what happens anyway: it goes to one rank of such a host.
    """
    chosen: CombiningRanks = []
    useful = False
    for region in regions:
        by_host = [_group_by_host(ranks, topology) for ranks in region.addends]
        complete = set.intersection(*map(set, by_host))
        needed = complete & set(_group_by_host(region.needing, topology))
        if not complete:
            return None
        useful = useful or len(needed) != 1
        holders = [sorted({r for ranks in by_host for r in ranks[host]}) for host in sorted(needed or {min(complete)})]
        chosen.append([_prefer(ranks, region.needing) for ranks in holders])
    same_count = len({len(groups) for groups in chosen}) == 1
    return ((tuple(range(len(regions[0].addends))),), chosen) if useful and same_count else None


def _sum_by_host(src: Layout, regions: Sequence[_Region], topology: Topology) -> tuple[Terms, CombiningRanks] | None:
    """Each host sums the addends that it has; None unless every region has the same addends together on a host."""
    assert src.cells is not None
    if src.cells.replicas > 1:
        return None
    hosts = topology.host_of(src.cells.owners.reshape(-1)).reshape(-1, src.cells.addends)
    first = (hosts[:, :, None] == hosts[:, None, :]).argmax(axis=2)  # the first addend on the same host
    leads = np.unique(first[0])
    if (first != first[0]).any() or len(leads) in (1, src.cells.addends):
        return None
    terms = tuple(tuple(np.flatnonzero(first[0] == lead).tolist()) for lead in leads)
    return terms, [
        [_prefer(sorted(region.addends[addend][0] for addend in listed), region.needing) for listed in terms]
        for region in regions
    ]


def _group_by_host(ranks: Iterable[int], topology: Topology) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    listed = sorted(ranks)
    for rank, host in zip(listed, topology.host_of(np.array(listed, np.int64)).tolist(), strict=True):
        groups.setdefault(host, []).append(rank)
    return groups


def _prefer(ranks: list[int], needing: set[int]) -> list[int]:
    """Those of these ranks that need the result; all of them if none does."""
    return [rank for rank in ranks if rank in needing] or ranks


def _take_turns(combining: CombiningRanks, parts: int) -> list[list[list[int]]]:
    """For each region, part and host the rank that combines it: the ranks of a host take turns."""
    turns: Counter[tuple[int, ...]] = Counter()
    owners = []
    for region in combining:
        owners.append([[ranks[(turns[tuple(ranks)] + i) % len(ranks)] for ranks in region] for i in range(parts)])
        turns.update({tuple(ranks): parts for ranks in region})
    return owners


def _choose_parts(splits: Sequence[Sequence[int]], wanted: int) -> tuple[int, int]:
    """The dim along which every region is cut, and in how many parts: as many as wanted, if they are long enough."""
    shortest = [min(split) for split in splits]
    enough = [dim for dim, length in enumerate(shortest) if length >= wanted]
    dim = enough[0] if enough else int(np.argmax(shortest))
    return dim, max(1, min(wanted, shortest[dim]))
