"""Where are pending reductions computed, if their results go to several ranks?

On ranks that have an addend and, if there is one, need the result. Each region, where a source cell meets a destination
cell, is reduced on one rank, which receives the other addends; then the result goes to whoever else needs it. Regions
that several ranks could reduce are cut in even parts, so that all take their share (an all-reduce becomes a
reduce-scatter and an all-gather). This moves addends - 1 messages per element, and then only what is needed: the lower
bound.

Where this makes too many parts, whole regions go to the ranks in turn, and cut only if a source cell has
fewer regions than ranks that could reduce them.

Where are the addends of each host combined, before anything passes between hosts?

A pending reduction whose addends are on several hosts, several of them on each, is resolved in two steps: each host
combines its own addends, then the sums of the hosts are combined as any other addends are. So one addend of each host
passes between hosts, not one of each rank.

1. Each region, where a source cell meets a destination cell, is combined on one rank of each host: one that needs the
   result, else they take turns. If there are fewer regions than ranks they are cut in parts, so that all take part.
2. Where hosts hold all addends of a region, those that need the result combine them, and nothing passes between hosts;
   if none needs it, one of them combines them, and the result is sent.

Only regular layouts whose regions have their addends on hosts in the same manner are planned so.

How does a box that several ranks of a host need get there over the link between hosts once?

1. The moves from other hosts that bring the same box to ranks of one host make a group. One of the ranks receives the
   box, straight into its destination, from the sender that was chosen for it. They take turns; if there are fewer
   groups than ranks, a box is cut in parts, and several ranks receive one each.
2. A second exchange, within the host, passes on what came: out of the destination of the rank that received it.

So each byte enters a host once, all ranks of the host take part, and no rank receives more than it would otherwise.

How few bytes can pass between hosts? A bound from the layouts and the hosts alone, to hold a plan against.

For each region, where a source cell meets a destination cell:

1. Hosts that hold all addends of it (of a value without a pending reduction: that hold it) need nothing from others.
   Every other host that needs the result receives it once.
2. If no host has all addends, one of those that have some, if possible one that needs the result, receives the sum of
   each of the others; then every other host that needs the result receives it once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from shardwise.geometry.box import Piece
from shardwise.geometry.layout import Cells, Layout, PieceTable, ShardingSpec, grid_cells
from shardwise.geometry.mesh import IntArray, freeze_array
from shardwise.geometry.placements import Reduction, bounds, chunk_sizes
from shardwise.geometry.specs import EnumerableSpec, GridSpec
from shardwise.transfer.overlap import Overlaps, overlaps_with_layout
from shardwise.transfer.senders import (
    Routes,
    StepOutline,
    box_volumes,
    constant_column,
    count_addends,
    index_owners,
    overlapping_pairs,
    own_rows,
)
from shardwise.transfer.topology import Topology

CUT_REGIONS = 1 << 15  # more parts than these are not made by cutting every region for all that could reduce it
IRREGULAR_PARTS = 1 << 13  # nor more than these, if they make no grid: only regular layouts have plans without a list


def has_replicas(layout: Layout) -> bool:
    """Whether some box of the layout is held by several ranks with the same values."""
    return bool((index_owners(layout).counts > 1).any())


def overlap_regions(src: Layout, dst: Layout) -> tuple[Overlaps, IntArray]:
    """The regions where destination cells meet source cells, and the first table row of each destination cell."""
    first = np.unique(dst.table.cells, return_index=True)[1]
    return overlaps_with_layout(dst.table.offsets[first], dst.table.sizes[first], src), first


def reduction_layout(src: Layout, dst: Layout) -> Layout:
    """The layout in which each region is on the ranks that reduce it: a grid where the regions make one."""
    found, first = overlap_regions(src, dst)
    parts = 0  # of regular layouts
    if src.cells is not None and dst.cells is not None:
        parts = len(found.cells) * src.cells.addends * src.cells.replicas
    if parts > CUT_REGIONS:
        return deal_regions(src, dst, found).layout(src.shape)
    needing = {box: _holders(dst, int(dst.table.cells[first[box]]), 0) for box in set(found.boxes.tolist())}
    reducers = [
        _reducers(src, cell, needing[box]) for cell, box in zip(found.cells.tolist(), found.boxes.tolist(), strict=True)
    ]
    grid = _grid_of_regions(found.starts, found.sizes, reducers)
    if grid is None and parts > IRREGULAR_PARTS:
        grid = deal_regions(src, dst, found)
    if grid is not None:
        return grid.layout(src.shape)
    offsets, sizes, ranks = [], [], []
    for start, size, members in zip(found.starts, found.sizes, reducers, strict=True):
        for rank, begin, extent in _split_region(start, size, members):
            offsets.append(begin)
            sizes.append(extent)
            ranks.append(rank)
    columns = (len(ranks), src.ndim)
    return EnumerableSpec.from_arrays(
        np.array(offsets, np.int64).reshape(columns),
        np.array(sizes, np.int64).reshape(columns),
        np.array(ranks, np.int64),
    ).layout(src.shape)


def number_columns(src: Layout, dst: Layout) -> IntArray | None:
    """The column of each rank, -1 for others: the number of its replica of an addend, of which each rank has one.

    None where columns cannot make the reduction by themselves: a rank needs what its own column does not have, or the
    columns do not need the same.
    """
    if src.cells is None or dst.cells is None or src.cells.replicas == 1 or src.cells.addends == 1:
        return None
    a, b, replicas = src.table, dst.table, src.cells.replicas
    own = np.full(1 + max(int(a.ranks.max()), int(b.ranks.max(initial=0))), -1, np.int64)
    own[a.ranks] = np.arange(len(a))
    rows = own[b.ranks]
    if len(np.unique(a.ranks)) < len(a) or (rows < 0).any() or dst.cells.replicas % replicas:
        return None
    ends = b.offsets + b.sizes <= a.offsets[rows] + a.sizes[rows]
    if not ((b.offsets >= a.offsets[rows]) & ends).all():
        return None
    columns = np.where(own < 0, -1, own % replicas)
    needing = np.sort(columns[dst.cells.owners.reshape(-1, dst.cells.replicas)], axis=1)
    each = np.repeat(np.arange(replicas), dst.cells.replicas // replicas)
    return columns if (needing == each).all() else None


def column_layout(src: Layout) -> Layout | None:
    """Where each column reduces the boxes of a layout: cut for its ranks, the same part on each column."""
    assert src.cells is not None
    splits = [cut.lengths.tolist() for cut in src.cells.dims]
    if any(not split or min(split) == 0 for split in splits):
        return None
    owners = src.cells.owners.reshape(*map(len, splits), src.cells.addends, src.cells.replicas)
    if not src.ndim:
        return HostSumsSpec(splits, owners[:1], "sum").layout(src.shape)
    dim, parts = _choose_parts(splits, src.cells.addends)
    splits[dim] = [length for whole in splits[dim] for length in _cut_evenly(whole, parts)]
    owners = np.moveaxis(owners[..., :parts, :], src.ndim, dim + 1)
    owners = owners.reshape(*map(len, splits), 1, src.cells.replicas)
    return HostSumsSpec(splits, owners, "sum").layout(src.shape)


def _cut_evenly(length: int, parts: int) -> list[int]:
    """Lengths of parts that differ by one at most.

    >>> _cut_evenly(10, 4)
    [2, 3, 2, 3]
    """
    return [length * (i + 1) // parts - length * i // parts for i in range(parts)]


def deal_regions(src: Layout, dst: Layout, found: Overlaps) -> GridSpec:
    """The regions of two regular layouts as a grid, each region, or the same number of parts of each, on one rank."""
    assert src.cells is not None
    holders = src.cells.addends * src.cells.replicas
    common = _ranks_in_both(src, dst, found)
    count = np.diff(common.starts)
    able = np.where(count > 0, count, holders)
    turn, regions = _turns_within(found.cells)
    parts, dim = _common_parts(found.sizes, _parts_for_all(found.cells, common, able, regions))
    owners = []
    for part in range(parts):
        place = (turn * parts + part) % able
        own = np.take(common.ranks, np.take(common.starts, np.arange(len(able))) + place, mode="clip")
        owners.append(np.where(count > 0, own, src.table.ranks[found.cells * holders + place]))
    at = [np.unique(found.starts[:, d], return_index=True)[1] for d in range(src.ndim)]
    splits = [found.sizes[rows, d].tolist() for d, rows in enumerate(at)]
    table = np.stack(owners, axis=1)[np.lexsort(found.starts.T[::-1])].reshape(*map(len, splits), parts)
    splits[dim] = [length for whole in splits[dim] for length in chunk_sizes(whole, parts)]
    return GridSpec(splits, np.moveaxis(table, -1, dim + 1).reshape([len(split) for split in splits]))


def _parts_for_all(cells: IntArray, common: _RanksOfRegions, able: IntArray, regions: IntArray) -> int:
    """In how many parts each region is cut, so that all ranks that could reduce a region of its source cell take part.

    Some regions of a cell may be for other ranks than the rest.
    """
    if not len(able):
        return 1
    of_region = np.repeat(cells, np.diff(common.starts))
    width = int(common.ranks.max(initial=0)) + 1
    each = np.bincount(np.unique(of_region * width + common.ranks) // width, minlength=int(cells.max()) + 1)
    return int((-(-np.maximum(able, each[cells]) // regions)).min())


def _turns_within(cells: IntArray) -> tuple[IntArray, IntArray]:
    """For each region its turn among those of the same source cell, and how many there are."""
    order = np.argsort(cells, kind="stable")
    first = np.searchsorted(cells[order], cells, side="left")
    turn = np.empty_like(cells)
    turn[order] = np.arange(len(cells))
    return turn - first, np.searchsorted(cells[order], cells, side="right") - first


def _common_parts(sizes: IntArray, wanted: int) -> tuple[int, int]:
    """The parts in which every region can be cut, at most as many as wanted, and the dim that has the most."""
    found = [min(_count_parts(n, wanted) for n in np.unique(sizes[:, d]).tolist()) for d in range(sizes.shape[1])]
    parts = max(found, default=0)
    return (parts, found.index(parts)) if parts > 1 else (1, 0)


class _RanksOfRegions(NamedTuple):
    """The ranks of region i are ranks[starts[i]:starts[i + 1]]."""

    ranks: IntArray
    starts: IntArray


def _ranks_in_both(src: Layout, dst: Layout, found: Overlaps) -> _RanksOfRegions:
    """For each region the ranks that hold an addend of it and need the result."""
    every = StepOutline(src, dst, [range(count_addends(src))], None, (1, 1))
    width = int(src.table.cells.max(initial=0)) + 1
    regions = found.boxes * width + found.cells
    order = np.argsort(regions, kind="stable")
    at, ranks = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for a, b, _ in overlapping_pairs(every, src.table.ranks, dst.table.ranks):
        at.append(order[np.searchsorted(regions[order], dst.table.cells[b] * width + src.table.cells[a])])
        ranks.append(dst.table.ranks[b])
    pairs = np.unique(np.stack([np.concatenate(at), np.concatenate(ranks)], axis=1), axis=0)
    starts = np.searchsorted(pairs[:, 0], np.arange(len(regions) + 1))
    return _RanksOfRegions(pairs[:, 1], starts)


def _grid_of_regions(starts: IntArray, sizes: IntArray, reducers: Sequence[IntArray]) -> GridSpec | None:
    """The regions, each cut for its reducers, as a grid; None if they are cut in different numbers or dims."""
    count = len(reducers[0]) if reducers else 0
    if not count or starts.shape[1] == 0 or any(len(members) != count for members in reducers):
        return None
    at = [np.unique(starts[:, d], return_index=True) for d in range(starts.shape[1])]
    dims = {_split_dim(size, count) for size in np.unique(sizes, axis=0)}
    if math.prod(len(begins) for begins, _ in at) != len(starts) or len(dims) > 1:
        return None
    (dim,) = dims
    splits = [sizes[rows, d].tolist() for d, (_, rows) in enumerate(at)]
    cut = [chunk_sizes(length, count) for length in splits[dim]]
    if min(map(min, cut)) == 0:
        return None
    order = np.lexsort(starts.T[::-1])
    owners = np.array(reducers)[order].reshape(*(len(begins) for begins, _ in at), count)
    splits[dim] = [length for part in cut for length in part]
    return GridSpec(splits, np.moveaxis(owners, -1, dim + 1).reshape([len(split) for split in splits]))


def _split_dim(size: IntArray, count: int) -> int:
    """The dim along which a region is cut for so many ranks: the first that has a part for each, else the longest."""
    enough = [d for d, length in enumerate(size.tolist()) if _count_parts(length, count) == count]
    return enough[0] if enough else int(size.argmax())


def _count_parts(length: int, wanted: int) -> int:
    """How many parts have elements if a length is cut for `wanted` ranks.

    >>> _count_parts(4000, 2048)
    2000
    """
    return -(-length // -(-length // wanted)) if length else 0


def _holders(layout: Layout, cell: int, addend: int | None) -> IntArray:
    """The ranks that hold a cell: any addend of it, or one."""
    if layout.cells is None:
        held = layout.table.cells == cell
        return np.unique(layout.table.ranks[held if addend is None else held & (layout.table.addends == addend)])
    owners = layout.cells.owners.reshape(-1, layout.cells.addends, layout.cells.replicas)[cell]
    return np.unique(owners if addend is None else owners[addend])


def _reducers(src: Layout, src_cell: int, needing: IntArray) -> IntArray:
    """The ranks that reduce a region: those that hold an addend and need the result, else all that hold one."""
    holders = _holders(src, src_cell, None)
    place = np.minimum(np.searchsorted(needing, holders), len(needing) - 1)
    wanted = holders[needing[place] == holders] if len(needing) else needing
    return wanted if len(wanted) else holders


def _split_region(start: IntArray, size: IntArray, ranks: IntArray) -> Iterator[tuple[int, list[int], list[int]]]:
    """Cut a region in even parts."""
    if len(size) == 0 or len(ranks) == 1:
        yield int(ranks[0]), start.tolist(), size.tolist()
        return
    dim = _split_dim(size, len(ranks))
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
    needing = dst.table.take(np.flatnonzero(dst.table.addends == 0))
    addends = src.table.take(np.unique(src.table.cells * count_addends(src) + src.table.addends, return_index=True)[1])
    total = int(box_volumes(addends.sizes).sum()) - src.numel + int(box_volumes(needing.sizes).sum())
    return total - _elements_that_meet(src, dst)


def _elements_that_meet(src: Layout, dst: Layout) -> int:
    """The elements of which a rank that needs the result holds an addend, each once."""
    every = StepOutline(src, dst, [range(count_addends(src))], None, (1, 1))
    width = int(src.table.cells.max(initial=0)) + 1
    met: dict[int, int] = {}
    for a, b, volumes in overlapping_pairs(every, src.table.ranks, dst.table.ranks):
        regions, first = np.unique(dst.table.cells[b] * width + src.table.cells[a], return_index=True)
        met.update(zip(regions.tolist(), volumes[first].tolist(), strict=True))
    return sum(met.values())


MOST_REGIONS = 1 << 12


class _PlacedSpec(ShardingSpec):
    """A table of pieces, with a reduction pending."""

    def __init__(self, table: PieceTable, pending: Reduction | None) -> None:
        self.table, self.pending = table, pending

    def pieces(self, shape: Sequence[int]) -> Sequence[Piece]:
        return self.table.pieces()

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        return self.table

    def reduction(self) -> Reduction | None:
        return self.pending


def place_on_holders(src: Layout, dst: Layout) -> Layout:
    """The destination, whose copies are addends, cut where the source is, so that a rank with the value is first.

    Any one of the copies may become the value if the others become zero: one that is there already need not be sent.

    >>> from shardwise.geometry import parse_spec
    >>> rows, copies = (parse_spec(f"on x=2: {text}").layout((4,)) for text in ("S(0)", "S(0) each 2 addends"))
    >>> table = place_on_holders(rows, copies).table
    >>> table.offsets[:, 0].tolist(), table.ranks.tolist(), table.addends.tolist()
    ([0, 0, 2, 2], [0, 1, 1, 0], [0, 1, 0, 1])
    """
    table = dst.table
    found = overlaps_with_layout(table.offsets, table.sizes, src)
    rows, empty = found.boxes, np.flatnonzero((table.sizes == 0).any(axis=1))
    has = own_rows(index_owners(src), found.cells * count_addends(src), table.ranks[rows]) >= 0
    regions = np.unique(
        table.cells[rows] * (int(src.table.cells.max(initial=0)) + 1) + found.cells, return_inverse=True
    )
    cells, count = regions[1].reshape(-1), count_addends(dst)
    places = cells * count + table.addends[rows]
    near = np.zeros(len(regions[0]) * count, bool)
    near[places[has]] = True
    order = np.lexsort((places, ~near[places], cells))
    rows, cells, places, starts, sizes = (c[order] for c in (rows, cells, places, found.starts, found.sizes))
    new = np.concatenate([np.ones(min(1, len(rows)), bool), places[1:] != places[:-1]])
    turns = np.cumsum(new) - np.cumsum(new)[np.searchsorted(cells, cells, side="left")]
    whole, none = table.take(np.concatenate([rows, empty])), len(empty)
    return _PlacedSpec(
        PieceTable(
            np.concatenate([starts, table.offsets[empty]]),
            np.concatenate([sizes, table.sizes[empty]]),
            whole.ranks,
            np.concatenate([cells, int(cells.max(initial=-1)) + 1 + np.arange(none)]),
            np.concatenate([turns, np.zeros(none, np.int64)]),
            whole.slots,
            whole.local_offsets + np.concatenate([starts - table.offsets[rows], np.zeros((none, dst.ndim), np.int64)]),
        ),
        dst.pending,
    ).layout(dst.shape)


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
    splits[dim] = [length for whole in splits[dim] for length in _cut_evenly(whole, parts)]
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
    ranks = sorted({r for region in regions for ranks in (*region.addends, region.needing) for r in ranks})
    hosts = dict(zip(ranks, topology.host_of(np.array(ranks, np.int64)).tolist(), strict=True))
    for region in regions:
        by_host = [_group_by_host(ranks, hosts) for ranks in region.addends]
        complete = set.intersection(*map(set, by_host))
        needed = complete & {hosts[rank] for rank in region.needing}
        if not complete:
            return None
        useful = useful or len(needed) != 1
        holders = [sorted({r for ranks in by_host for r in ranks[host]}) for host in sorted(needed or {min(complete)})]
        chosen.append([_prefer(ranks, region.needing) for ranks in holders])
    same_count = len({len(groups) for groups in chosen}) == 1
    return ((tuple(range(len(regions[0].addends))),), chosen) if useful and same_count else None


def _sum_by_host(src: Layout, regions: Sequence[_Region], topology: Topology) -> tuple[Terms, CombiningRanks] | None:
    """Each host sums the addends that it has, all ranks with one of them take part.

    None unless every region has the same addends together on a host, each with all of its replicas.
    """
    assert src.cells is not None
    holding = topology.host_of(src.cells.owners.reshape(-1)).reshape(-1, src.cells.addends, src.cells.replicas)
    hosts = holding[:, :, 0]
    first = (hosts[:, :, None] == hosts[:, None, :]).argmax(axis=2)  # the first addend on the same host
    leads = np.unique(first[0])
    if (holding != hosts[:, :, None]).any() or (first != first[0]).any() or len(leads) in (1, src.cells.addends):
        return None
    terms = tuple(tuple(np.flatnonzero(first[0] == lead).tolist()) for lead in leads)
    return terms, [
        [_prefer(sorted({rank for a in listed for rank in region.addends[a]}), region.needing) for listed in terms]
        for region in regions
    ]


def _group_by_host(ranks: Iterable[int], hosts: Mapping[int, int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(hosts[rank], []).append(rank)
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


class RelayedMoves(NamedTuple):
    """The moves of a step, and those within hosts that pass on what it brought there."""

    moves: Routes
    passed_on: Routes


def may_relay(outline: StepOutline, topology: Topology | None) -> bool:
    """Whether several ranks of a host may need the same box from another host."""
    if topology is None or not outline.is_listed or outline.columns is not None:
        return False
    if int(outline.term_counts.max(initial=0)) > 1 or not outline.src.ndim:
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
    both = moves.take(np.flatnonzero(rest)).with_routes(cut)
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


MOST_BOUND_REGIONS = 1 << 15


def lower_bound_between_hosts(src: Layout, dst: Layout, topology: Topology) -> int | None:
    """The fewest elements that pass between hosts; None where this is not known.

    >>> from shardwise.geometry import parse_spec
    >>> src, dst = (parse_spec(f"on x=4: {text}").layout((8,)) for text in ("S(0)", "R"))
    >>> lower_bound_between_hosts(src, dst, Topology(ranks_per_host=2))
    8
    """
    if src.pending is not None and dst.pending is not None and src.pending.op == dst.pending.op:
        return None  # addends keep their numbers
    found, first = overlap_regions(src, dst)
    if len(found.cells) > MOST_BOUND_REGIONS:
        return None
    holding, needing = _hosts_by_addend(src, topology), _hosts_by_addend(dst, topology)
    volumes = box_volumes(found.sizes).tolist()
    targets = dst.table.cells[first][found.boxes] if len(found.boxes) else found.boxes
    total = 0
    for cell, target, volume in zip(found.cells.tolist(), targets.tolist(), volumes, strict=True):
        count = _count_entries(list(holding[cell].values()), needing[target][0])
        if count is None:
            return None
        total += count * volume
    return total


def _count_entries(addends: list[set[int]], needing: set[int]) -> int | None:
    """How often a region, or an addend of it, enters a host; `addends` lists the hosts of each addend."""
    complete = set.intersection(*addends)
    if complete:
        return len(needing - complete)
    if any(len(hosts) > 1 for hosts in addends):
        return None  # which hosts contribute is a choice
    some = set.union(*addends)
    return len(some) - 1 + len(needing) - bool(some & needing)


def _hosts_by_addend(layout: Layout, topology: Topology) -> dict[int, dict[int, set[int]]]:
    """For each cell and each of its addends, the hosts that hold it."""
    table = layout.table
    found: dict[int, dict[int, set[int]]] = {}
    hosts: IntArray = topology.host_of(table.ranks)
    rows = np.unique(np.stack([table.cells, table.addends, hosts], axis=1), axis=0)
    for cell, addend, host in rows.tolist():
        found.setdefault(cell, {}).setdefault(addend, set()).add(host)
    return found
