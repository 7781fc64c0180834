"""Between regular layouts of very many ranks: which replica sends a box, decided from the box alone?

`choose_senders` shares the bytes of a replica set by looking at all that is demanded of it. With millions of demands
that is too much to list, for a plan's figures and for one rank's part. Here a demand, a destination row and the source
that it needs, is decided alone:

1. The rank that needs it, if it holds it: a local copy.
2. Else a replica on its host, if the topology names hosts: they take turns by the number of the receiving rank.
3. Else any: the demands of a source are numbered, in row-major order of the destination cells that it meets, then of
   their replicas. The first replica takes the first share of them, and so on, in shares of equal length.

Since a source meets a run of cells along each dim, numbers and the volume of a share follow from the runs.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardwise.geometry.cells import Cells
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.transfer.choose import Owners, index_owners, own_rows
from shardwise.transfer.intersect import dim_runs
from shardwise.transfer.topology import Topology


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

    def __init__(self, src: Layout, dst: Layout, topology: Topology | None) -> None:
        assert src.cells is not None and dst.cells is not None
        self.src, self.dst = src, dst
        self.replicas, self.addends = src.cells.replicas, src.cells.addends
        self.numbering = DemandNumbers(src.cells, dst.cells)
        self.topology = topology if self.replicas > 1 else None

    @cached_property
    def _owners(self) -> Owners:
        return index_owners(self.src)

    def choose(self, src_cells: IntArray, terms: IntArray, dst_rows: IntArray) -> IntArray:
        """The rows that send: a cell and an addend of the source for each destination row."""
        rows = self.choose_by_share(src_cells, terms, dst_rows)
        if self.replicas == 1 or len(rows) == 0:
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
        number = self.numbering.numbers(src_cells, dst_rows)
        return first + number * self.replicas // np.maximum(self.numbering.counts(src_cells), 1)

    def _prefer_near(self, rows: IntArray, sources: IntArray, ranks: IntArray, topology: Topology) -> IntArray:
        table_hosts, hosts = topology.host_of(self.src.table.ranks), topology.host_of(ranks)
        width = 1 + max(int(table_hosts.max(initial=0)), int(hosts.max(initial=0)))
        keys = np.arange(len(table_hosts)) // self.replicas * width + table_hosts
        order = np.argsort(keys, kind="stable")
        low = np.searchsorted(keys[order], sources * width + hosts, side="left")
        count = np.searchsorted(keys[order], sources * width + hosts, side="right") - low
        near = np.take(order, low + ranks % np.maximum(count, 1), mode="clip")
        return np.where(count > 0, near, rows)

    def shares(self, used: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """By rule 3 alone, the demands that each row of the source serves, and their elements; `used` marks rows."""
        rows = np.arange(len(self.src.table))
        cells, place = rows // (self.addends * self.replicas), rows % self.replicas
        counts = self.numbering.counts(cells)
        low, high = (-(-(place + i) * counts // self.replicas) for i in (0, 1))
        volumes = self.numbering.volume_before(cells, high) - self.numbering.volume_before(cells, low)
        return np.where(used, high - low, 0), np.where(used, volumes, 0)
