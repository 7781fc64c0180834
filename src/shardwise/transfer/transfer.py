"""The plan as a value: what it moves, how it compares with the lower bound, how long it should take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.serialize import layout_to_json
from shardwise.transfer.collectives import Collective, recognise_collective
from shardwise.transfer.report import describe_transfer, format_transfer_table
from shardwise.transfer.routes import Routes, Step
from shardwise.transfer.steps import PlanOptions, plan_steps, reduction_lower_bound
from shardwise.transfer.topology import Topology


@dataclass(frozen=True, eq=False)
class Transfer:
    """Who sends which box to whom, what is reduced, in which rounds; made by `plan_transfer`.

    `steps` are executed one after the other; all but the last end in a layout in between. With `rank`, the plan
    holds only the part of that rank, and all figures speak of that part.
    """

    src: Layout
    dst: Layout
    options: PlanOptions
    rank: int | None
    steps: tuple[Step, ...]

    @property
    def itemsize(self) -> int:
        return self.options.itemsize

    @property
    def max_buffer_bytes(self) -> int | None:
        """The limit on what a rank has in flight, or None."""
        return self.options.max_buffer_bytes

    @property
    def rounds(self) -> int:
        """The number of exchanges, over all steps."""
        return sum(step.rounds for step in self.steps)

    @cached_property
    def bytes_by_edge(self) -> Mapping[tuple[int, int], int]:
        """The bytes that go from one rank to another, for each pair of ranks that exchange any."""
        edges: dict[tuple[int, int], int] = {}
        for step in self.steps:
            sources, targets, nbytes = edge_bytes(step.routes, self.itemsize)
            for edge, amount in zip(zip(sources.tolist(), targets.tolist(), strict=True), nbytes.tolist(), strict=True):
                edges[edge] = edges.get(edge, 0) + amount
        return edges

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes that leave a rank, in all."""
        return sum(int(step.routes.elements().sum()) for step in self.steps) * self.itemsize

    @cached_property
    def copied_bytes(self) -> int:
        """The bytes that are copied within ranks."""
        return sum(int(step.copies.elements().sum()) for step in self.steps) * self.itemsize

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The fewest bytes that any plan between these layouts moves.

        Without pending reductions: what each rank needs and does not hold. See `reduce.py` for pending ones. Between
        two layouts with the same kind of reduction pending, addends keep their numbers.
        """
        if len(self.steps) == 1 and (self.src.pending is None or self.dst.pending is not None):
            return self.moved_bytes if self.rank is not None else _needed_elements(self.steps[0]) * self.itemsize
        return reduction_lower_bound(self.src, self.dst) * self.itemsize

    @cached_property
    def sent_bytes(self) -> Mapping[int, int]:
        """The bytes each rank sends, for ranks that send any."""
        return self._by_rank(0)

    @cached_property
    def received_bytes(self) -> Mapping[int, int]:
        """The bytes each rank receives, for ranks that receive any."""
        return self._by_rank(1)

    def _by_rank(self, side: int) -> Mapping[int, int]:
        totals: dict[int, int] = {}
        for step in self.steps:
            ranks = step.routes.dst_ranks if side else step.routes.src_ranks
            distinct, index = np.unique(ranks, return_inverse=True)
            sums = np.zeros(len(distinct), np.int64)
            np.add.at(sums, index.reshape(-1), step.routes.elements() * self.itemsize)
            for rank, amount in zip(distinct.tolist(), sums.tolist(), strict=True):
                totals[rank] = totals.get(rank, 0) + amount
        return dict(sorted(totals.items()))

    @property
    def busiest_sender(self) -> tuple[int, int] | None:
        """The rank that sends most and how many bytes, or None if nothing is sent."""
        return max(self.sent_bytes.items(), key=lambda item: (item[1], -item[0]), default=None)

    @property
    def busiest_receiver(self) -> tuple[int, int] | None:
        """The rank that receives most and how many bytes, or None if nothing is sent."""
        return max(self.received_bytes.items(), key=lambda item: (item[1], -item[0]), default=None)

    @cached_property
    def collective(self) -> Collective | None:
        """The collective that this transfer is, or None if it is not a known one."""
        return recognise_collective(self.src, self.dst, self.steps) if self.rank is None else None

    def estimate(self, topology: Topology) -> float:
        """Seconds by an alpha-beta model: in each step the busiest port, within or between hosts, sets the time."""
        return sum(_step_seconds(step, self.itemsize, topology) for step in self.steps)

    def inverse(self) -> Transfer:
        """The transfer back, from the destination to the source, with the same options."""
        return Transfer(
            self.dst, self.src, self.options, self.rank, plan_steps(self.dst, self.src, self.options, self.rank)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transfer):
            return NotImplemented
        return (
            (self.src, self.dst, self.options, self.rank) == (other.src, other.dst, other.options, other.rank)
            and len(self.steps) == len(other.steps)
            and all(a.same_as(b) for a, b in zip(self.steps, other.steps, strict=True))
        )

    def __hash__(self) -> int:
        return hash((self.src, self.dst, self.options, self.rank))

    def to_json(self) -> dict[str, Any]:
        """Plain data: the arguments, from which `transfer_from_json` plans again, and the figures."""
        topology = None if self.options.topology is None else self.options.topology.to_json()
        edges = [[s, d, n] for (s, d), n in self.bytes_by_edge.items()]
        return {
            "src": layout_to_json(self.src),
            "dst": layout_to_json(self.dst),
            "itemsize": self.itemsize,
            "topology": topology,
            "max_buffer_bytes": self.max_buffer_bytes,
            "rank": self.rank,
            "moved_bytes": self.moved_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "copied_bytes": self.copied_bytes,
            "rounds": self.rounds,
            "collective": None if self.collective is None else self.collective.to_json(),
            "bytes_by_edge": edges,
        }

    def explain(self) -> str:
        """The plan in plain words."""
        return describe_transfer(self)

    def __str__(self) -> str:
        return format_transfer_table(self)

    def __repr__(self) -> str:
        part = "" if self.rank is None else f", rank={self.rank}"
        figures = f"shape={self.src.shape}, moved_bytes={self.moved_bytes}{part}"
        return f"Transfer({self.src.spec!r} -> {self.dst.spec!r}, {figures})"


def edge_bytes(routes: Routes, itemsize: int) -> tuple[IntArray, IntArray, IntArray]:
    """Source, destination and bytes of each edge; the routes are sorted by edge."""
    if len(routes) == 0:
        none = np.zeros(0, np.int64)
        return none, none, none
    new = (np.diff(routes.src_ranks) != 0) | (np.diff(routes.dst_ranks) != 0)
    first = np.concatenate([[0], np.flatnonzero(new) + 1])
    return routes.src_ranks[first], routes.dst_ranks[first], np.add.reduceat(routes.elements(), first) * itemsize


def _needed_elements(step: Step) -> int:
    """What the ranks need and do not hold, counted from the layouts: everything, less what local copies provide."""
    table = step.dst.table
    terms = 1 if step.src.cells is None or step.op is None else step.src.cells.addends
    filled = np.setdiff1d(np.arange(len(table)), step.fills, assume_unique=True)
    needed = int(table.sizes[filled].prod(axis=1).sum())
    if step.op is not None and terms > 1:
        needed = int(step.routes.elements().sum() + step.copies.elements().sum())
    return needed - int(step.copies.elements().sum())


def _step_seconds(step: Step, itemsize: int, topology: Topology) -> float:
    sources, targets, nbytes = edge_bytes(step.routes, itemsize)
    near = topology.host_of(sources) == topology.host_of(targets)
    worst = 0.0
    for link, chosen in ((topology.within, near), (topology.between, ~near)):
        for ranks in (sources[chosen], targets[chosen]):
            distinct, index, messages = np.unique(ranks, return_inverse=True, return_counts=True)
            totals = np.zeros(len(distinct), np.int64)
            np.add.at(totals, index.reshape(-1), nbytes[chosen])
            times = [
                link.seconds(m * max(1, step.rounds), b)
                for m, b in zip(messages.tolist(), totals.tolist(), strict=True)
            ]
            worst = max(worst, max(times, default=0.0))
    return worst
