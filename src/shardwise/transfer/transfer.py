"""The plan as a value: what it moves, how it compares with the lower bound, how long it should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise._notebook import draw_html
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.serialize import layout_to_json
from shardwise.transfer.collectives import Collective, recognise_collective, recognise_from_totals
from shardwise.transfer.hosts.bounds import lower_bound_between_hosts
from shardwise.transfer.hosts.sums import HostSumsSpec
from shardwise.transfer.reduction import reduction_lower_bound
from shardwise.transfer.report import describe_transfer, format_transfer_table
from shardwise.transfer.routes import Routes, Step
from shardwise.transfer.steps import PlanOptions, outline_steps, plan_rounds, plan_steps
from shardwise.transfer.topology import Topology
from shardwise.transfer.totals import LISTED_BOXES, StepOutline, StepTotals, total_step, total_within_hosts


@dataclass(frozen=True, eq=False)
class Transfer:
    """Who sends which box to whom, what is reduced, in which rounds; made by `plan_transfer`.

    `steps` are executed one after the other; all but the last end in a layout in between. With `rank`, the plan
    holds only the part of that rank, and all figures speak of that part.

    Between regular layouts of many ranks the moves are too many to list (`is_listed`): the figures are computed from
    the pieces, and `steps` and `bytes_by_edge` are listed only when they are used. A rank's own part is always listed.

    >>> import shardwise
    >>> rows, columns = (shardwise.ChunkSpec(dim, ranks=2).layout((4, 6)) for dim in (0, 1))
    >>> move = shardwise.plan_transfer(rows, columns, itemsize=4)
    >>> move.moved_bytes, move.lower_bound_bytes, move.bytes_by_edge
    (48, 48, {(0, 1): 24, (1, 0): 24})
    """

    src: Layout
    dst: Layout
    options: PlanOptions
    rank: int | None

    @cached_property
    def outlines(self) -> tuple[StepOutline, ...]:
        """What each step does."""
        return outline_steps(self.src, self.dst, self.options.topology)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Each step with all its moves."""
        return plan_steps(self.outlines, self.options, self.rank)

    @cached_property
    def unsplit_steps(self) -> tuple[Step, ...]:
        """The same before a buffer limit splits the moves in rounds; the figures are computed from these."""
        return self.steps if self.max_buffer_bytes is None else plan_steps(self.outlines, self._unlimited, self.rank)

    @property
    def _unlimited(self) -> PlanOptions:
        return replace(self.options, max_buffer_bytes=None)

    @cached_property
    def is_listed(self) -> bool:
        """Whether the moves were listed to make the plan."""
        return self.rank is not None or self.outlines[0].is_listed

    @property
    def _has_steps_for_hosts(self) -> bool:
        """Whether there are steps within hosts, which make no other transfer of it."""
        return self._passes_on or any(isinstance(outline.dst.spec, HostSumsSpec) for outline in self.outlines)

    @property
    def _passes_on(self) -> bool:
        return self.options.topology is not None and self.is_listed and any(s.in_place for s in self.unsplit_steps)

    @cached_property
    def totals(self) -> tuple[StepTotals, ...]:
        """What each step moves, by rank."""
        if self.is_listed:
            return tuple(map(total_routes, self.unsplit_steps))
        return tuple(total_step(outline, self.options.topology) for outline in self.outlines)

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
        return sum(self.rounds_by_step)

    @cached_property
    def rounds_by_step(self) -> tuple[int, ...]:
        """The number of exchanges of each step; at most so many, if moves are not listed and ranks hold many pieces."""
        if self.max_buffer_bytes is not None and not self._passes_on:
            return plan_rounds(self.outlines, self.options, self.unsplit_steps if self.is_listed else None)
        if self.is_listed:
            return tuple(step.rounds for step in self.steps)
        return tuple(int(total.boxes_out.any()) for total in self.totals)

    @cached_property
    def bytes_by_edge(self) -> Mapping[tuple[int, int], int]:
        """The bytes that go from one rank to another, for each pair of ranks that exchange any."""
        edges: dict[tuple[int, int], int] = {}
        for step in self.unsplit_steps:
            sources, targets, nbytes = edge_bytes(step.routes, self.itemsize)
            for edge, amount in zip(zip(sources.tolist(), targets.tolist(), strict=True), nbytes.tolist(), strict=True):
                edges[edge] = edges.get(edge, 0) + amount
        return edges

    def first_edges(self, count: int) -> tuple[list[tuple[int, int, int]], int]:
        """The first edges as (source, destination, bytes), and how many edges there are.

        Where they are not listed, the number of boxes is given, which is larger if ranks hold several pieces.
        """
        if self.is_listed:
            columns = _merge_edges(self.unsplit_steps, self.itemsize)
            return list(zip(*(column[:count].tolist() for column in columns), strict=True)), len(columns[0])
        shown: list[tuple[int, int, int]] = []
        for rank in self.sent_bytes:
            if len(shown) >= count:
                break
            steps = plan_steps(self.outlines, self._unlimited, rank)
            edges = zip(*(column.tolist() for column in _merge_edges(steps, self.itemsize)), strict=True)
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
                return self.moved_bytes  # all that is needed, less what is copied locally
            return _needed_elements(self.unsplit_steps) * self.itemsize
        return reduction_lower_bound(self.src, self.dst) * self.itemsize

    @cached_property
    def bytes_between_hosts(self) -> int | None:
        """The bytes that go from a rank to one of another host; None for a plan without a topology."""
        topology = self.options.topology
        if topology is None:
            return None
        if not self.is_listed:
            near = [
                total_within_hosts(o, t, topology, topology) for o, t in zip(self.outlines, self.totals, strict=True)
            ]
            return self.moved_bytes - sum(int(total.sent.sum()) for total in near) * self.itemsize
        far = 0
        for step in self.unsplit_steps:
            sources, targets, nbytes = edge_bytes(step.routes, self.itemsize)
            far += int(nbytes[topology.host_of(sources) != topology.host_of(targets)].sum())
        return far

    @cached_property
    def lower_bound_between_hosts(self) -> int | None:
        """The fewest bytes that any plan sends between hosts; None without a topology, and where it is not known."""
        topology = self.options.topology
        if topology is None or self.rank is not None or not self.is_listed:
            return None
        elements = lower_bound_between_hosts(self.src, self.dst, topology)
        return None if elements is None else elements * self.itemsize

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
        if self.is_listed and self._has_steps_for_hosts:
            return replace(self, options=PlanOptions(self.itemsize)).collective
        if self.is_listed:
            return recognise_collective(self.src, self.dst, self.unsplit_steps)
        return recognise_from_totals(self.src, self.dst, self.outlines, self.totals)

    def estimate(self, topology: Topology) -> float:
        """Seconds by an alpha-beta model: in each step the busiest port, within or between hosts, sets the time."""
        if self.is_listed:
            steps = zip(self.unsplit_steps, self.rounds_by_step, strict=True)
            return sum(_step_seconds(step, rounds, self.itemsize, topology) for step, rounds in steps)
        return sum(self._estimate_unlisted(number, topology) for number in range(len(self.outlines)))

    def _estimate_unlisted(self, number: int, topology: Topology) -> float:
        outline, total = self.outlines[number], self.totals[number]
        near = total_within_hosts(outline, total, topology, self.options.topology)
        return _seconds_from_totals(outline, total, near, self.rounds_by_step[number], self.itemsize, topology)

    def inverse(self) -> Transfer:
        """The transfer back, from the destination to the source, with the same options."""
        return Transfer(self.dst, self.src, self.options, self.rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transfer):
            return NotImplemented
        if (self.src, self.dst, self.options, self.rank) != (other.src, other.dst, other.options, other.rank):
            return False
        return not self.is_listed or all(
            a.same_as(b) for a, b in zip(self.unsplit_steps, other.unsplit_steps, strict=True)
        )

    def __hash__(self) -> int:
        return hash((self.src, self.dst, self.options, self.rank))

    def to_json(self, *, edges: bool | None = None) -> dict[str, Any]:
        """Plain data: the arguments, from which `transfer_from_json` plans again, and the figures.

        `edges` says whether the bytes of each edge are part of it; by default they are, if they are not too many.
        """
        topology = None if self.options.topology is None else self.options.topology.to_json()
        few = self.is_listed and sum(len(step.routes) for step in self.unsplit_steps) <= LISTED_BOXES
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
            "bytes_between_hosts": self.bytes_between_hosts,
            "lower_bound_between_hosts": self.lower_bound_between_hosts,
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

    def _repr_html_(self) -> str:
        """A picture for notebooks."""
        return draw_html("transfer_html", self)

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


def _needed_elements(steps: Sequence[Step]) -> int:
    """What the ranks need and do not hold, counted from the layouts: everything, less what local copies provide."""
    step, table = steps[0], steps[0].dst.table
    terms = 1 if step.src.cells is None or step.op is None else step.src.cells.addends
    filled = np.setdiff1d(np.arange(len(table)), step.fills, assume_unique=True)
    needed = int(table.sizes[filled].prod(axis=1).sum())
    if step.op is not None and terms > 1:
        needed = sum(int(each.routes.elements().sum() + each.copies.elements().sum()) for each in steps)
    return needed - int(step.copies.elements().sum())


def _step_seconds(step: Step, rounds: int, itemsize: int, topology: Topology) -> float:
    sources, targets, nbytes = edge_bytes(step.routes, itemsize)
    near = topology.host_of(sources) == topology.host_of(targets)
    worst = 0.0
    for link, chosen in ((topology.within, near), (topology.between, ~near)):
        for ranks in (sources[chosen], targets[chosen]):
            distinct, index, messages = np.unique(ranks, return_inverse=True, return_counts=True)
            totals = np.zeros(len(distinct), np.int64)
            np.add.at(totals, index.reshape(-1), nbytes[chosen])
            times = [
                link.seconds(m * max(1, rounds), b) for m, b in zip(messages.tolist(), totals.tolist(), strict=True)
            ]
            worst = max(worst, max(times, default=0.0))
    return worst


def _seconds_from_totals(
    outline: StepOutline, total: StepTotals, near: StepTotals, rounds: int, itemsize: int, topology: Topology
) -> float:
    """The same without listed edges; a rank sends one message for each box, at most one to each rank in a round."""
    worst = 0.0
    for peers, all_boxes, near_boxes, elements, near_elements in (
        (outline.dst.ranks, total.boxes_out, near.boxes_out, total.sent, near.sent),
        (outline.src.ranks, total.boxes_in, near.boxes_in, total.received, near.received),
    ):
        for link, boxes, amount in (
            (topology.within, near_boxes, near_elements),
            (topology.between, all_boxes - near_boxes, elements - near_elements),
        ):
            messages = np.minimum(boxes, len(peers)) * max(1, rounds)
            times = messages * link.latency + amount * itemsize / link.bandwidth
            worst = max(worst, float(times.max(initial=0.0)))
    return worst
