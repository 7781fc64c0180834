"""The plan as a value: what it moves, how it compares with the lower bound, how long it should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.serialize import layout_to_json
from shardwise.transfer.collectives import Collective, recognise_collective, recognise_from_totals
from shardwise.transfer.report import describe_transfer, format_transfer_table
from shardwise.transfer.routes import Routes, Step
from shardwise.transfer.steps import PlanOptions, outline_steps, plan_steps, reduction_lower_bound
from shardwise.transfer.topology import Topology
from shardwise.transfer.totals import (
    StepOutline,
    StepTotals,
    count_boxes,
    has_step_totals,
    total_step,
    total_within_hosts,
)

LISTED_BOXES = 1 << 18  # more moves than these are not listed to make a plan


@dataclass(frozen=True, eq=False)
class Transfer:
    """Who sends which box to whom, what is reduced, in which rounds; made by `plan_transfer`.

    `steps` are executed one after the other; all but the last end in a layout in between. With `rank`, the plan
    holds only the part of that rank, and all figures speak of that part.

    Between regular layouts of many ranks the moves are too many to list (`is_listed`): the figures are computed from
    the pieces, and `steps` and `bytes_by_edge` are listed only when they are used. A rank's own part is always listed.
    """

    src: Layout
    dst: Layout
    options: PlanOptions
    rank: int | None

    @cached_property
    def outlines(self) -> tuple[StepOutline, ...]:
        """What each step does."""
        return outline_steps(self.src, self.dst)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Each step with all its moves."""
        return plan_steps(self.outlines, self.options, self.rank)

    @cached_property
    def is_listed(self) -> bool:
        """Whether the moves were listed to make the plan."""
        if self.rank is not None or self.max_buffer_bytes is not None or self.src.cells is None:
            return True
        if self.dst.cells is None or len(self.src.table) * len(self.dst.table) <= LISTED_BOXES:
            return True
        return not all(map(has_step_totals, self.outlines)) or sum(map(count_boxes, self.outlines)) <= LISTED_BOXES

    @cached_property
    def totals(self) -> tuple[StepTotals, ...]:
        """What each step moves, by rank."""
        return tuple(map(total_routes, self.steps)) if self.is_listed else tuple(map(total_step, self.outlines))

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
        return sum(self.rounds_of(number) for number in range(len(self.outlines)))

    def rounds_of(self, number: int) -> int:
        """The number of exchanges of one step."""
        return self.steps[number].rounds if self.is_listed else int(self.totals[number].boxes_out.any())

    @cached_property
    def bytes_by_edge(self) -> Mapping[tuple[int, int], int]:
        """The bytes that go from one rank to another, for each pair of ranks that exchange any."""
        edges: dict[tuple[int, int], int] = {}
        for step in self.steps:
            sources, targets, nbytes = edge_bytes(step.routes, self.itemsize)
            for edge, amount in zip(zip(sources.tolist(), targets.tolist(), strict=True), nbytes.tolist(), strict=True):
                edges[edge] = edges.get(edge, 0) + amount
        return edges

    def first_edges(self, count: int) -> tuple[list[tuple[int, int, int]], int]:
        """The first edges as (source, destination, bytes), and how many edges there are.

        Where they are not listed, the number of boxes is given, which is larger if ranks hold several pieces.
        """
        if self.is_listed:
            columns = _merge_edges(self.steps, self.itemsize)
            return list(zip(*(column[:count].tolist() for column in columns), strict=True)), len(columns[0])
        shown: list[tuple[int, int, int]] = []
        for rank in self.sent_bytes:
            if len(shown) >= count:
                break
            part = Transfer(self.src, self.dst, self.options, rank)
            edges = zip(*(column.tolist() for column in _merge_edges(part.steps, self.itemsize)), strict=True)
            shown += [edge for edge in edges if edge[0] == rank]
        return shown[:count], sum(int(total.boxes_out.sum()) for total in self.totals)

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes that leave a rank, in all."""
        return sum(int(total.sent.sum()) for total in self.totals) * self.itemsize

    @cached_property
    def copied_bytes(self) -> int:
        """The bytes that are copied within ranks."""
        return sum(int(total.copied.sum()) for total in self.totals) * self.itemsize

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The fewest bytes that any plan between these layouts moves.

        Without pending reductions: what each rank needs and does not hold. Between two layouts with the same kind of
        reduction pending, addends keep their numbers.
        """
        if len(self.outlines) == 1 and (self.src.pending is None or self.dst.pending is not None):
            if self.rank is not None or not self.is_listed:
                return self.moved_bytes  # a source that is not replicated leaves no choice
            return _needed_elements(self.steps[0]) * self.itemsize
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
        totals = [total.received if side else total.sent for total in self.totals]
        amounts = np.zeros(max(map(len, totals)), np.int64)
        for total in totals:
            amounts[: len(total)] += total * self.itemsize
        ranks = np.flatnonzero(amounts)
        return dict(zip(ranks.tolist(), amounts[ranks].tolist(), strict=True))

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
        if self.rank is not None:
            return None
        if self.is_listed:
            return recognise_collective(self.src, self.dst, self.steps)
        return recognise_from_totals(self.src, self.dst, self.outlines, self.totals)

    def estimate(self, topology: Topology) -> float:
        """Seconds by an alpha-beta model: in each step the busiest port, within or between hosts, sets the time."""
        if self.is_listed:
            return sum(_step_seconds(step, self.itemsize, topology) for step in self.steps)
        return sum(
            _seconds_from_totals(outline, total, self.itemsize, topology)
            for outline, total in zip(self.outlines, self.totals, strict=True)
        )

    def inverse(self) -> Transfer:
        """The transfer back, from the destination to the source, with the same options."""
        return Transfer(self.dst, self.src, self.options, self.rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transfer):
            return NotImplemented
        if (self.src, self.dst, self.options, self.rank) != (other.src, other.dst, other.options, other.rank):
            return False
        return not self.is_listed or all(a.same_as(b) for a, b in zip(self.steps, other.steps, strict=True))

    def __hash__(self) -> int:
        return hash((self.src, self.dst, self.options, self.rank))

    def to_json(self, *, edges: bool | None = None) -> dict[str, Any]:
        """Plain data: the arguments, from which `transfer_from_json` plans again, and the figures.

        `edges` says whether the bytes of each edge are part of it; by default they are, if they are not too many.
        """
        topology = None if self.options.topology is None else self.options.topology.to_json()
        few = self.is_listed and sum(len(step.routes) for step in self.steps) <= LISTED_BOXES
        listed = few if edges is None else edges
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
            "bytes_by_edge": [[s, d, n] for (s, d), n in self.bytes_by_edge.items()] if listed else None,
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


def total_routes(step: Step) -> StepTotals:
    """The totals of a step whose moves are listed."""
    routes, copies = step.routes, step.copies
    columns = (routes.src_ranks, routes.dst_ranks, copies.dst_ranks)
    width = 1 + max(int(ranks.max(initial=0)) for ranks in columns)
    amounts = (routes.elements(), routes.elements(), copies.elements())
    sent, received, copied = (np.zeros(width, np.int64) for _ in columns)
    for total, ranks, elements in zip((sent, received, copied), columns, amounts, strict=True):
        np.add.at(total, ranks, elements)
    boxes_out, boxes_in = (np.bincount(ranks, minlength=width) for ranks in columns[:2])
    return StepTotals(sent, received, copied, boxes_out, boxes_in)


def _merge_edges(steps: Sequence[Step], itemsize: int) -> tuple[IntArray, IntArray, IntArray]:
    """The bytes between each two ranks over all steps, as columns: millions of edges are not worth a dictionary."""
    columns = [edge_bytes(step.routes, itemsize) for step in steps]
    sources, targets, nbytes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    width = int(targets.max(initial=0)) + 1
    edges, index = np.unique(sources * width + targets, return_inverse=True)
    totals = np.zeros(len(edges), np.int64)
    np.add.at(totals, index.reshape(-1), nbytes)
    return edges // width, edges % width, totals


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


def _seconds_from_totals(outline: StepOutline, total: StepTotals, itemsize: int, topology: Topology) -> float:
    """The same without listed edges; a rank sends one message for each box, at most one to each rank."""
    near = total_within_hosts(outline, total, topology)
    worst = 0.0
    for peers, all_boxes, near_boxes, elements, near_elements in (
        (outline.dst.ranks, total.boxes_out, near.boxes_out, total.sent, near.sent),
        (outline.src.ranks, total.boxes_in, near.boxes_in, total.received, near.received),
    ):
        for link, boxes, amount in (
            (topology.within, near_boxes, near_elements),
            (topology.between, all_boxes - near_boxes, elements - near_elements),
        ):
            times = np.minimum(boxes, len(peers)) * link.latency + amount * itemsize / link.bandwidth
            worst = max(worst, float(times.max(initial=0.0)))
    return worst
