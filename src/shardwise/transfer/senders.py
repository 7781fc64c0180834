"""Of the replicas that hold a box, which one sends it?

1. The rank that needs it, if it is one of them: a local copy.
2. Else the replicas on its host, if the topology names hosts; else all of them. These form the demand's pool.
3. Within a pool, senders take equal shares of the bytes: demands in order, the first share to the first sender and so
   on. Pools that share ranks are filled one after the other, least-loaded senders first up to a common level.

The choice is a function of the layouts alone, so every rank makes the same one.

Between regular layouts of very many ranks: which replica sends a box, decided from the box alone?

`choose_senders` shares the bytes of a replica set by looking at all that is demanded of it. With millions of demands
that is too much to list, for a plan's figures and for one rank's part. Here a demand, a destination row and the source
that it needs, is decided alone:

1. The rank that needs it, if it holds it: a local copy.
2. Else a replica on its host, if the topology names hosts: they take turns by the number of the receiving rank.
   Or the replica in the receiver's own column, where a reduction is made in columns (`reductions.py`).
3. Else any: the demands of a source are numbered, in row-major order of the destination cells that it meets, then of
   their replicas. The first replica takes the first share of them, and so on, in shares of equal length.

Since a source meets a run of cells along each dim, numbers and the volume of a share follow from the runs.

The moves of a transfer, as columns: which box goes from which piece to which piece.

How much does a step move, and between whom, without listing who sends what to whom?

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
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.geometry.box import Box
from shardwise.geometry.layout import Cells, Layout, PieceTable
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.overlap import dim_runs, expand_runs, overlaps_with_layout, run_lengths
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
    """Index a layout's table by source; where copies are addends, a source that a cell does not have has no rows."""
    table, addends = layout.table, count_addends(layout)
    source = table.cells * addends + table.addends
    total = int(table.cells.max(initial=-1) + 1) * addends
    rows = np.arange(len(table)) if layout.cells is not None else np.argsort(source, kind="stable")
    starts = np.searchsorted(source[rows], np.arange(total + 1))
    return Owners(rows, starts, table.ranks)


def choose_senders(
    owners: Owners, sources: IntArray, dst_ranks: IntArray, weights: IntArray, topology: Topology | None, turn: int = 0
) -> IntArray:
    """The table row that each demand is served from. Demands come in canonical order.

    `turn` is the place of the replica that comes first: of many tensors each has another, so that replicas share them.
    """
    chosen = owners.rows[owners.starts[sources]] if len(sources) else np.zeros(0, np.int64)
    if int(owners.counts.max(initial=1)) <= 1:
        return chosen
    own = own_rows(owners, sources, dst_ranks)
    chosen = np.where(own >= 0, own, chosen)
    open_demands = np.flatnonzero((own < 0) & (owners.counts[sources] > 1))
    if len(open_demands) == 0:
        return chosen
    pools, members = _pools(owners, sources[open_demands], dst_ranks[open_demands], topology)
    senders = _share_pools(pools, members, weights[open_demands], turn)
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


def _share_pools(pools: IntArray, members: IntArray, weights: IntArray, turn: int) -> IntArray:
    """The sender rank of each demand, pools filled evenly."""
    order = np.argsort(pools, kind="stable")
    senders = np.empty(len(pools), np.int64)
    used = members[members >= 0]
    fill = _share_separate_pools if len(np.unique(used)) == len(used) else _share_overlapping_pools
    senders[order] = fill(pools[order], members, weights[order].astype(np.float64), turn)
    return senders


def _share_separate_pools(pools: IntArray, members: IntArray, weights: FloatArray, turn: int) -> IntArray:
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
    index = (index + turn) % counts[pools]
    senders: IntArray = compact[pools, counts[pools] - 1 - index]
    return senders


def _share_overlapping_pools(pools: IntArray, members: IntArray, weights: FloatArray, turn: int) -> IntArray:
    """Pools that share ranks: smallest pools first, each filled to a common level over what its ranks send already."""
    loads = np.zeros(int(members.max()) + 1)
    senders = np.empty(len(pools), np.int64)
    present = np.unique(pools)
    sizes = (members[present] >= 0).sum(axis=1)
    for pool in present[np.argsort(sizes, kind="stable")]:
        low, high = np.searchsorted(pools, (pool, pool + 1))
        ranks = np.sort(members[pool][members[pool] >= 0])
        ranks = np.roll(ranks, -(turn % len(ranks)))
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


class DemandNumbers:
    """The demands that the cells of a regular source meet in a regular destination, numbered for each source."""

    def __init__(self, src: Cells, dst: Cells) -> None:
        self.src, self.dst = src, dst
        self.shapes = [tuple(cut.count for cut in cells.dims) for cells in (src, dst)]
        self.runs = [dim_runs(a.starts, a.lengths, b) for a, b in zip(src.dims, dst.dims, strict=True)]

    def digits(self, side: int, cells: IntArray) -> list[IntArray]:
        """The number of each cell along each dim; side 0 is the source."""
        shape = self.shapes[side]
        return [np.asarray(digit) for digit in np.unravel_index(cells, shape)] if shape else []

    def counts(self, src_cells: IntArray) -> IntArray:
        """How many demands each of these sources has."""
        total = np.full(len(src_cells), self.dst.replicas, np.int64)
        for digit, (_, count, _) in zip(self.digits(0, src_cells), self.runs, strict=True):
            total *= count[digit]
        return total

    def numbers(self, src_cells: IntArray, dst_rows: IntArray) -> IntArray:
        """The number of each demand among those of its source."""
        number = np.zeros(len(dst_rows), np.int64)
        cells = dst_rows // (self.dst.addends * self.dst.replicas)
        pairs = zip(self.digits(0, src_cells), self.digits(1, cells), self.runs, self.dst.dims, strict=True)
        for source, target, (low, count, _), cut in pairs:
            place = np.cumsum(cut.lengths > 0) - 1
            number = number * count[source] + place[target] - low[source]
        return number * self.dst.replicas + dst_rows % self.dst.replicas

    def volume_before(self, src_cells: IntArray, numbers: IntArray) -> IntArray:
        """The elements of the demands of a source that come before a number."""
        cell, replica = np.divmod(numbers, self.dst.replicas)
        sources = self.digits(0, src_cells)
        steps: list[IntArray] = []
        for digit, (_, count, _) in zip(reversed(sources), reversed(self.runs), strict=True):
            cell, place = np.divmod(cell, np.maximum(count[digit], 1))
            steps.append(place)
        total = np.zeros(len(numbers), np.int64) if sources else cell
        area = np.ones(len(numbers), np.int64)
        for dim, (source, place) in enumerate(zip(sources, reversed(steps), strict=True)):
            rest = cell * self.runs[0][1][source] if dim == 0 else np.int64(0)
            step = np.asarray(place + rest, np.int64)
            before, after = (self._length_before(dim, source, step + i) for i in (0, 1))
            total = total * self.src.dims[dim].lengths[source] + area * before
            area = area * (after - before)
        return total * self.dst.replicas + area * replica

    def _length_before(self, dim: int, source: IntArray, step: IntArray) -> IntArray:
        """The part of a source's interval that is before the `step`-th cell that it meets."""
        cut, (low, _, filled) = self.src.dims[dim], self.runs[dim]
        last = self.dst.dims[dim].starts[-1] + self.dst.dims[dim].lengths[-1]
        begins = np.append(self.dst.dims[dim].starts[filled], last)
        start = np.take(begins, low[source] + step, mode="clip")
        length: IntArray = np.clip(start - cut.starts[source], 0, cut.lengths[source])
        return length


class SpreadSenders:
    """The table row of a regular source from which each demand of a regular destination is served."""

    def __init__(self, outline: StepOutline, topology: Topology | None, turn: int = 0) -> None:
        src, dst = outline.src, outline.dst
        assert src.cells is not None and dst.cells is not None
        self.src, self.dst, self.columns = src, dst, outline.columns
        self.replicas, self.addends = src.cells.replicas, src.cells.addends
        self.turn = turn % self.replicas
        self.numbering = DemandNumbers(src.cells, dst.cells)
        self.topology = topology if self.replicas > 1 and self.columns is None else None

    @cached_property
    def _owners(self) -> Owners:
        return index_owners(self.src)

    def choose(self, src_cells: IntArray, terms: IntArray, dst_rows: IntArray) -> IntArray:
        """The rows that send: a cell and an addend of the source for each destination row."""
        rows = self.choose_by_share(src_cells, terms, dst_rows)
        if self.replicas == 1 or len(rows) == 0 or self.columns is not None:
            return rows
        sources, ranks = src_cells * self.addends + terms, self.dst.table.ranks[dst_rows]
        if self.topology is not None:
            rows = self._prefer_near(rows, sources, ranks, self.topology)
        own = own_rows(self._owners, sources, ranks)
        return np.where(own >= 0, own, rows)

    def choose_by_share(self, src_cells: IntArray, terms: IntArray, dst_rows: IntArray) -> IntArray:
        """The same by rule 3 alone."""
        first = (src_cells * self.addends + terms) * self.replicas
        if self.replicas == 1:
            return first
        if self.columns is not None:
            return first + self.columns[self.dst.table.ranks[dst_rows]]
        number = self.numbering.numbers(src_cells, dst_rows)
        place = number * self.replicas // np.maximum(self.numbering.counts(src_cells), 1)
        return first + (place + self.turn) % self.replicas

    def _prefer_near(self, rows: IntArray, sources: IntArray, ranks: IntArray, topology: Topology) -> IntArray:
        table_hosts, hosts = topology.host_of(self.src.table.ranks), topology.host_of(ranks)
        width = 1 + max(int(table_hosts.max(initial=0)), int(hosts.max(initial=0)))
        keys = np.arange(len(table_hosts)) // self.replicas * width + table_hosts
        order = np.argsort(keys, kind="stable")
        low = np.searchsorted(keys[order], sources * width + hosts, side="left")
        count = np.searchsorted(keys[order], sources * width + hosts, side="right") - low
        near = np.take(order, low + (ranks + self.turn) % np.maximum(count, 1), mode="clip")
        return np.where(count > 0, near, rows)

    def shares(self, used: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """By rule 3 alone, the demands that each row of the source serves, and their elements; `used` marks rows."""
        rows = np.arange(len(self.src.table))
        cells, place = rows // (self.addends * self.replicas), rows % self.replicas
        counts = self.numbering.counts(cells)
        if self.columns is not None:  # each has as many receivers of a cell as any other
            volumes = self.numbering.volume_before(cells, counts) // self.replicas
            return np.where(used, counts // self.replicas, 0), np.where(used, volumes, 0)
        place = (place - self.turn) % self.replicas
        low, high = (-(-(place + i) * counts // self.replicas) for i in (0, 1))
        volumes = self.numbering.volume_before(cells, high) - self.numbering.volume_before(cells, low)
        return np.where(used, high - low, 0), np.where(used, volumes, 0)


RouteColumns: TypeAlias = tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]


def constant_column(value: int, length: int) -> IntArray:
    """A column that holds one value everywhere and takes no memory."""
    return np.broadcast_to(np.int64(value), (length,))


def take_column_rows(column: IntArray, rows: IntArray) -> IntArray:
    """These rows of a column; a constant column stays one."""
    if column.ndim == 1 and column.strides[0] == 0 and len(column):
        return constant_column(int(column[0]), len(rows))
    return np.take(column, rows, axis=0)


def box_volumes(sizes: IntArray) -> IntArray:
    """The number of elements of each box."""
    total = np.ones(len(sizes), np.int64)
    for d in range(sizes.shape[1]):
        total *= sizes[:, d]
    return total


@dataclass(frozen=True, eq=False, slots=True)
class Routes:
    """Columns over moves, sorted by source rank, then destination rank, then destination piece.

    `src_rows` and `dst_rows` are rows of the two layouts' tables, `starts` and `sizes` the region in global indices.
    `terms` numbers the addends of a reduction in the order in which they are combined, `rounds` the exchanges.
    """

    src_rows: IntArray
    dst_rows: IntArray
    src_ranks: IntArray
    dst_ranks: IntArray
    starts: IntArray
    sizes: IntArray
    terms: IntArray
    rounds: IntArray

    def __len__(self) -> int:
        return len(self.src_rows)

    def take(self, rows: IntArray) -> Routes:
        return Routes(*(take_column_rows(column, rows) for column in self.columns()))

    def columns(self) -> RouteColumns:
        return (
            self.src_rows,
            self.dst_rows,
            self.src_ranks,
            self.dst_ranks,
            self.starts,
            self.sizes,
            self.terms,
            self.rounds,
        )

    def elements(self) -> IntArray:
        """The number of elements of each move."""
        return box_volumes(self.sizes)

    def with_routes(self, other: Routes) -> Routes:
        """These, followed by others."""
        return Routes(*(np.concatenate(pair) for pair in zip(self.columns(), other.columns(), strict=True)))

    def same_as(self, other: Routes) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.columns(), other.columns(), strict=True))


@dataclass(frozen=True, slots=True)
class BoxMessage:
    """One box of a rank's local tensor number `slot`, to be sent to or received from `peer`."""

    peer: int
    slot: int
    box: Box
    term: int
    round: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One box to be copied from a rank's source tensor to its own destination tensor."""

    src_slot: int
    src_box: Box
    dst_slot: int
    dst_box: Box
    term: int


@dataclass(frozen=True, eq=False)
class Step:
    """One exchange: `routes` between ranks, `copies` within a rank, `fills` with the reduction's identity.

    With `op`, the terms that reach one destination are combined by it in ascending order of `term`; then every
    destination element is multiplied by `scale[0] / scale[1]`.

    A step that passes on (`in_place`) completes the destination of the step before it: ranks exchange boxes of it.
    """

    src: Layout
    dst: Layout
    routes: Routes
    copies: Routes
    fills: IntArray
    op: str | None
    scale: tuple[int, int]
    rounds: int
    in_place: bool = False

    def sends_of(self, rank: int) -> list[BoxMessage]:
        """What a rank sends, in the order in which its peers receive it."""
        routes = self.routes.take(np.flatnonzero(self.routes.src_ranks == rank))
        return _list_moves(routes, routes.dst_ranks, routes.src_rows, self.src.table)

    def receives_of(self, rank: int) -> list[BoxMessage]:
        """What a rank receives, in the order in which its peers send it."""
        routes = self.routes.take(np.flatnonzero(self.routes.dst_ranks == rank))
        return _list_moves(routes, routes.src_ranks, routes.dst_rows, self.dst.table)

    def copies_of(self, rank: int) -> list[Copy]:
        """What a rank copies within itself."""
        copies = self.copies.take(np.flatnonzero(self.copies.dst_ranks == rank))
        sources = _local_boxes(copies, copies.src_rows, self.src.table)
        targets = _local_boxes(copies, copies.dst_rows, self.dst.table)
        slots = zip(
            self.src.table.slots[copies.src_rows].tolist(), self.dst.table.slots[copies.dst_rows].tolist(), strict=True
        )
        terms = copies.terms.tolist()
        return [Copy(s, a, d, b, t) for (s, d), a, b, t in zip(slots, sources, targets, terms, strict=True)]

    def fills_of(self, rank: int) -> list[tuple[int, Box]]:
        """The (slot, box) pairs of a rank's destination tensors that get the reduction's identity."""
        table = self.dst.table.take(self.fills[self.dst.table.ranks[self.fills] == rank])
        boxes = zip(table.slots.tolist(), table.local_offsets.tolist(), table.sizes.tolist(), strict=True)
        return [(slot, Box(tuple(o), tuple(s))) for slot, o, s in boxes]

    def same_as(self, other: Step) -> bool:
        return (
            (self.src, self.dst, self.op, self.scale, self.rounds, self.in_place)
            == (other.src, other.dst, other.op, other.scale, other.rounds, other.in_place)
            and self.routes.same_as(other.routes)
            and self.copies.same_as(other.copies)
            and np.array_equal(self.fills, other.fills)
        )


def _local_boxes(routes: Routes, rows: IntArray, table: PieceTable) -> list[Box]:
    starts = routes.starts - table.offsets[rows] + table.local_offsets[rows]
    return [Box(tuple(o), tuple(s)) for o, s in zip(starts.tolist(), routes.sizes.tolist(), strict=True)]


def _list_moves(routes: Routes, peers: IntArray, rows: IntArray, table: PieceTable) -> list[BoxMessage]:
    boxes = _local_boxes(routes, rows, table)
    columns = zip(
        peers.tolist(), table.slots[rows].tolist(), boxes, routes.terms.tolist(), routes.rounds.tolist(), strict=True
    )
    return [BoxMessage(*values) for values in columns]


LISTED_BOXES = 1 << 18  # more moves than these are not listed to make a plan
LISTED_CHOICES = 1 << 20  # nor are they, if there are more pairs of a move and a replica that could send it
_PAIRS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class StepOutline:
    """What a step does, before it is planned: `terms[j]` lists the source addends of the destination's addend j.

    Moves that are too many to be listed (`is_listed`) have senders that are chosen one by one, as `spread` says.
    `columns` numbers ranks by the replica of the source that serves them, -1 for none: each replica is a column of
    ranks that exchange among themselves.
    """

    src: Layout
    dst: Layout
    terms: Sequence[Sequence[int]]
    op: str | None
    scale: tuple[int, int]
    is_listed: bool = True
    columns: IntArray | None = field(default=None, compare=False)

    @property
    def decides_alone(self) -> bool:
        """Whether the sender of each demand follows from the demand alone."""
        cells = self.src.cells
        return cells is not None and (cells.replicas == 1 or not self.is_listed or self.columns is not None)

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
    """How many addends the values of a layout have; where copies are addends, those with the most copies."""
    return int(layout.table.addends.max(initial=0)) + 1 if layout.cells is None else layout.cells.addends


@dataclass(frozen=True)
class StepTotals:
    """Elements and boxes that each rank sends to and receives from others, and copies within itself, by rank number."""

    sent: IntArray
    received: IntArray
    copied: IntArray
    boxes_out: IntArray
    boxes_in: IntArray

    def without(self, part: StepTotals) -> StepTotals:
        """What is left if a part of it, of equal width, is taken away."""
        names = ("sent", "received", "copied", "boxes_out", "boxes_in")
        return StepTotals(*(getattr(self, name) - getattr(part, name) for name in names))


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


def total_step(outline: StepOutline, topology: Topology | None, turn: int = 0) -> StepTotals:
    """The totals of a step between regular layouts that is not listed; with the topology that it is planned for."""
    src, dst = outline.src.table, outline.dst.table
    senders = SpreadSenders(outline, topology, turn)
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
    outline: StepOutline, totals: StepTotals, topology: Topology, planned_for: Topology | None, turn: int = 0
) -> StepTotals:
    """The part of the totals that stays within a host, without what stays within a rank."""
    src, dst, width = outline.src.table, outline.dst.table, len(totals.sent)
    sent, received, out, into = (np.zeros(width, np.int64) for _ in range(4))
    senders = SpreadSenders(outline, planned_for, turn)
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
