"""The plan as a value: what it moves, how it compares with the lower bound, how long it should take.

A transfer in words and as a table, for people.

Which bytes go where, to turn one layout into another? `plan_transfer` answers for every pair of layouts.

Nothing is sent to make a plan, and planning is a function of its arguments: every rank makes the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise._text import count_of, draw_html, package_logger, public
from shardwise.geometry.box import LayoutError
from shardwise.geometry.layout import Layout
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.notation import TensorType, parse_layout
from shardwise.geometry.serialize import layout_from_json, layout_to_json
from shardwise.transfer.cost import LinkLoad, collective_seconds, exchange_seconds
from shardwise.transfer.reductions import HostSumsSpec, lower_bound_between_hosts, reduction_lower_bound
from shardwise.transfer.senders import (
    LISTED_BOXES,
    Routes,
    Step,
    StepOutline,
    StepTotals,
    count_addends,
    count_boxes,
    total_step,
    total_within_hosts,
)
from shardwise.transfer.steps import (
    Collective,
    PlanOptions,
    find_comm_collective,
    outline_candidates,
    plan_rounds,
    plan_steps,
    recognise_collective,
    recognise_from_totals,
    unreached_rows,
)
from shardwise.transfer.topology import Topology

SHOWN_EDGES = 16
PRICED_BOXES = 1 << 14
CLEARLY_FASTER = 0.9  # of the time that the fewest bytes take
EACH_ON_ITS_OWN = Topology(ranks_per_host=1)


def format_bytes(count: int | float) -> str:
    """A number of bytes with a fitting unit.

    >>> format_bytes(16), format_bytes(268435456)
    ('16 B', '268.4 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def format_transfer_table(transfer: Transfer) -> str:
    """The figures of a transfer, then its edges."""
    limit = transfer.max_buffer_bytes
    within = "" if limit is None else f" (buffers of {format_bytes(limit)})"
    rows = [
        ("shape", str(transfer.src.shape)),
        ("from", repr(transfer.src.spec)),
        ("to", repr(transfer.dst.spec)),
        ("moved", f"{format_bytes(transfer.moved_bytes)} (lower bound {format_bytes(transfer.lower_bound_bytes)})"),
        *([("between hosts", text)] if (text := format_between_hosts(transfer)) else []),
        ("copied locally", format_bytes(transfer.copied_bytes)),
        ("exchanges", f"{transfer.rounds}{within}"),
        ("collective", str(transfer.collective or "none")),
        ("busiest sender", _busiest_text(transfer.busiest_sender)),
        ("busiest receiver", _busiest_text(transfer.busiest_receiver)),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join(lines + _edge_lines(transfer, width))


def format_between_hosts(transfer: Transfer) -> str | None:
    """The bytes between hosts and their lower bound, if it is known; None for a plan without a topology.

    >>> from shardwise.geometry import parse_spec
    >>> from shardwise.transfer import Topology, plan_transfer
    >>> src, dst = (parse_spec(f"on x=4: {text}").layout((8,)) for text in ("S(0)", "R"))
    >>> format_between_hosts(plan_transfer(src, dst, itemsize=4, topology=Topology(ranks_per_host=2)))
    '32 B (lower bound 32 B)'
    """
    passing, bound = transfer.bytes_between_hosts, transfer.lower_bound_between_hosts
    if passing is None:
        return None
    return format_bytes(passing) + ("" if bound is None else f" (lower bound {format_bytes(bound)})")


def _busiest_text(entry: tuple[int, int] | None) -> str:
    return "none" if entry is None else f"rank {entry[0]}, {format_bytes(entry[1])}"


def _edge_lines(transfer: Transfer, width: int) -> list[str]:
    edges, count = transfer.first_edges(SHOWN_EDGES)
    lines = [f"{f'{s} -> {d}':<{width}}  {format_bytes(n)}" for s, d, n in edges]
    hidden = count - len(edges)
    return lines if hidden <= 0 else [*lines, f"and {hidden} more edges"]


def describe_transfer(transfer: Transfer) -> str:
    """What happens, step by step, in plain words."""
    fills = [len(unreached_rows(outline, transfer.rank)) for outline in transfer.outlines]
    if transfer.moved_bytes == 0 and not any(fills):
        return (
            f"Nothing is sent: every rank has what it needs and copies {format_bytes(transfer.copied_bytes)} locally."
        )
    lines = [_describe_step(transfer, number) for number in range(len(transfer.totals))]
    if len(lines) > 1:
        lines = [f"{number}. {line}" for number, line in enumerate(lines, start=1)]
    if transfer.collective is not None:
        lines.append(f"Together this is: {transfer.collective}.")
    met = transfer.moved_bytes == transfer.lower_bound_bytes
    bound = "the lower bound" if met else f"where {format_bytes(transfer.lower_bound_bytes)} is the lower bound"
    passing = transfer.bytes_between_hosts
    among = "" if passing is None else f", {format_bytes(passing)} of it between hosts"
    lines.append(f"In total {format_bytes(transfer.moved_bytes)} move, {bound}{among}.")
    return "\n".join(lines)


def _describe_step(transfer: Transfer, number: int) -> str:
    step: Step | StepOutline = transfer.unsplit_steps[number] if transfer.is_listed else transfer.outlines[number]
    total, rounds = transfer.totals[number], transfer.rounds_by_step[number]
    sent = format_bytes(int(total.sent.sum()) * transfer.itemsize)
    senders, receivers = int((total.sent > 0).sum()), int((total.received > 0).sum())
    boxes = count_of(int(total.boxes_out.sum()), "box", "boxes")
    text = f"{count_of(senders, 'rank')} {'sends' if senders == 1 else 'send'} {sent} in {boxes} to "
    text += count_of(receivers, "rank")
    if isinstance(step, Step) and step.in_place:
        text += " of their hosts, which pass on what came from another host"
    if step.op is not None and step.src.pending is not None:
        text += f", which combine what arrives by {step.op}"
    if step.scale != (1, 1):
        text += f" and multiply it by {step.scale[0]}/{step.scale[1]}"
    filled = len(step.fills) if isinstance(step, Step) else len(unreached_rows(step, transfer.rank))
    if filled:
        text += f"; {count_of(filled, 'piece')} {'is' if filled == 1 else 'are'} filled with the identity of {step.op}"
    if rounds > 1:
        text += f", in {rounds} rounds"
    return text + "."


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
        """What each step does, the same on every rank: the fewest bytes, unless another candidate is clearly faster.

        Where the hosts are not known, all ranks are taken to be far from each other.
        """
        *others, fewest = outline_candidates(self.src, self.dst, self.options.topology)
        if not others:
            return fewest
        links = self.options.topology or EACH_ON_ITS_OWN
        seconds = [self._estimate_candidate(candidate, links) for candidate in others]
        wins = min(seconds) < CLEARLY_FASTER * self._estimate_candidate(fewest, links)
        return others[seconds.index(min(seconds))] if wins else fewest

    def _estimate_candidate(self, outlines: tuple[StepOutline, ...], links: Topology) -> float:
        """Seconds of the whole transfer with these steps; where moves are many, of totals that list none."""
        if sum(map(count_boxes, outlines)) > PRICED_BOXES:
            outlines = tuple(replace(outline, is_listed=False) for outline in outlines)
        return self._with_outlines(outlines, self.options.topology).estimate(links)

    def _with_outlines(self, outlines: tuple[StepOutline, ...], topology: Topology | None) -> Transfer:
        """The whole transfer, made by these steps."""
        made = Transfer(self.src, self.dst, PlanOptions(self.itemsize, topology), None)
        made.__dict__["outlines"] = outlines
        return made

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
        return replace(self.options, max_buffer_bytes=None, contiguous=False, least_run=0)

    @cached_property
    def is_listed(self) -> bool:
        """Whether the moves were listed to make the plan."""
        return self.rank is not None or self.outlines[0].is_listed

    @property
    def _has_steps_for_hosts(self) -> bool:
        """Whether there are steps within hosts, which make no other transfer of it."""
        if self.outlines[0].columns is not None:
            return False
        return self._passes_on or any(isinstance(outline.dst.spec, HostSumsSpec) for outline in self.outlines)

    @property
    def _passes_on(self) -> bool:
        return self.options.topology is not None and self.is_listed and any(s.in_place for s in self.unsplit_steps)

    @cached_property
    def totals(self) -> tuple[StepTotals, ...]:
        """What each step moves, by rank."""
        if self.is_listed:
            return tuple(map(total_routes, self.unsplit_steps))
        return tuple(total_step(outline, self.options.topology, self.options.turn) for outline in self.outlines)

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
        if self.max_buffer_bytes is not None and not self._passes_on and not self.options.contiguous:
            return plan_rounds(self.outlines, self.options, self.unsplit_steps if self.is_listed else None)
        if self.is_listed or self.max_buffer_bytes is not None:
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
        return reduction_lower_bound(self.src, self.outlines[-1].dst) * self.itemsize

    @cached_property
    def bytes_between_hosts(self) -> int | None:
        """The bytes that go from a rank to one of another host; None for a plan without a topology."""
        topology = self.options.topology
        if topology is None:
            return None
        if not self.is_listed:
            near = [
                total_within_hosts(o, t, topology, topology, self.options.turn)
                for o, t in zip(self.outlines, self.totals, strict=True)
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
            return self._with_outlines(outline_candidates(self.src, self.dst, None)[-1], None).collective
        if self.is_listed:
            return recognise_collective(self.src, self.dst, self.outlines, self.unsplit_steps)
        return recognise_from_totals(self.src, self.dst, self.outlines, self.totals)

    def collective_of_comm(
        self,
        ranks: Sequence[int] | None = None,
        *,
        wider: int = 1,
        topology: Topology | None = None,
        workspace: int | None = None,
    ) -> Collective | None:
        """The collective by which a comm of these ranks makes this by itself: all_reduce or reduce_scatter, in groups.

        Addends are combined as they are, or in elements that are `wider`: that costs bytes, so it is done only where it
        takes less time than exchanges do on this topology. The ranks are by default those of both layouts. The
        comm needs `workspace` bytes of buffers, if that is known.
        """
        members = tuple(sorted({*self.src.ranks, *self.dst.ranks})) if ranks is None else tuple(ranks)
        found = find_comm_collective(self.src, self.dst, self.outlines, members, self.max_buffer_bytes, workspace)
        if found is None or wider == 1:
            return found
        links = topology or self.options.topology or EACH_ON_ITS_OWN
        whole = wider * self.src.table.sizes.prod(axis=1).max() * self.itemsize
        if self.max_buffer_bytes is not None and self.max_buffer_bytes < 2 * whole:
            return None  # wider copies of the tensors are buffers too
        made = collective_seconds(found.kind, float(whole), found.groups, links)
        return found if made < self._estimate_exchanges(links) else None

    def estimate(self, topology: Topology, *, wider: int | None = None) -> float:
        """Seconds by the rows of `transfer/cost.py`: as a collective where a comm makes it by itself, else exchanges.

        `wider` as in `collective_of_comm`, 0 for addends that no comm combines; it follows from the itemsize if None.
        """
        width = {8: 1, 4: 1, 2: 2, 1: 4}.get(self.itemsize, 0) if wider is None else wider
        if width and self.src.pending is not None:
            found = self.collective_of_comm(wider=width, topology=topology)
            if found is not None:
                whole = width * self.src.table.sizes.prod(axis=1).max() * self.itemsize
                return collective_seconds(found.kind, float(whole), found.groups, topology)
        return self._estimate_exchanges(topology)

    def _estimate_exchanges(self, topology: Topology) -> float:
        return sum(self._step_seconds(number, rounds, topology) for number, rounds in enumerate(self.rounds_by_step))

    def loads_of_step(self, number: int, topology: Topology) -> tuple[LinkLoad, LinkLoad]:
        """What one step sends within hosts and between them; with a topology that it may not be planned for."""
        if self.is_listed:
            return load_links(self.unsplit_steps[number], self.itemsize, topology)
        outline, total = self.outlines[number], self.totals[number]
        inside = total_within_hosts(outline, total, topology, self.options.topology, self.options.turn)
        near, far = (load_from_totals(outline, t, self.itemsize) for t in (inside, total.without(inside)))
        return near, far

    def _step_seconds(self, number: int, rounds: int, topology: Topology) -> float:
        """Seconds of one step that is carried out by exchanges; with a topology that it may not be planned for."""
        step: Step | StepOutline = self.unsplit_steps[number] if self.is_listed else self.outlines[number]
        total = self.totals[number]
        near, far = self.loads_of_step(number, topology)
        combines = step.op is not None and step.src.pending is not None
        copied, received = (int(t.max(initial=0)) * self.itemsize for t in (total.copied, total.received))
        return exchange_seconds(near, far, topology, rounds=rounds, copied=copied, combined=received if combines else 0)

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
            "contiguous": self.options.contiguous,
            "least_run": self.options.least_run,
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
    terms = 1 if step.op is None else count_addends(step.src)
    filled = np.setdiff1d(np.arange(len(table)), step.fills, assume_unique=True)
    needed = int(table.sizes[filled].prod(axis=1).sum())
    if step.op is not None and terms > 1:
        needed = sum(int(each.routes.elements().sum() + each.copies.elements().sum()) for each in steps)
    return needed - int(step.copies.elements().sum())


def load_links(step: Step, itemsize: int, topology: Topology) -> tuple[LinkLoad, LinkLoad]:
    """What a step whose moves are listed sends within hosts and between them."""
    sources, targets, nbytes = edge_bytes(step.routes, itemsize)
    near = topology.host_of(sources) == topology.host_of(targets)
    width = 1 + max(int(sources.max(initial=0)), int(targets.max(initial=0)))

    def load(chosen: npt.NDArray[np.bool_]) -> LinkLoad:
        columns = []
        for ranks in (sources[chosen], targets[chosen]):
            columns.append(np.bincount(ranks, minlength=width))
            columns.append(np.bincount(ranks, weights=nbytes[chosen], minlength=width))
        return LinkLoad(np.arange(width), columns[0], columns[2], columns[1], columns[3])

    return load(near), load(~near)


def load_from_totals(outline: StepOutline, total: StepTotals, itemsize: int) -> LinkLoad:
    """The same without listed moves: a rank sends one message for each box, at most one to each rank."""
    out, into = np.minimum(total.boxes_out, len(outline.dst.ranks)), np.minimum(total.boxes_in, len(outline.src.ranks))
    return LinkLoad(np.arange(len(total.sent)), out, into, total.sent * itemsize, total.received * itemsize)


_log = package_logger(__name__)


@public
def plan_transfer(
    src: Layout | TensorType | str,
    dst: Layout | TensorType | str,
    *,
    itemsize: int | None = None,
    topology: Topology | None = None,
    max_buffer_bytes: int | None = None,
    contiguous: bool = False,
    least_run: int = 0,
    rank: int | None = None,
) -> Transfer:
    """Plan the move from layout `src` to layout `dst` of the same shape, on the same ranks or others. Sends nothing.

    - `src`, `dst`: layouts, or tensors in notation; the second text may leave out the type and shape.
    - `itemsize`: bytes per element; a tensor in notation says it.
    - `topology`: which ranks share a host; replicas on the receiver's host are preferred.
    - `max_buffer_bytes`: the most bytes a rank has in flight, in and out together; the exchange is cut into rounds.
    - `contiguous`: local tensors are, so that the limit holds for buffers alone: what goes from one run of memory to
      another needs none, and travels in one round.
    - `least_run`: so does what is made of runs of at least so many bytes, unless it is 0.
    - `rank`: plan only the part that this rank takes in.

    >>> from shardwise.geometry import ChunkSpec
    >>> transfer = plan_transfer(ChunkSpec(0, 2).layout((4, 4)), ChunkSpec(1, 2).layout((4, 4)), itemsize=4)
    >>> transfer.bytes_by_edge
    {(0, 1): 16, (1, 0): 16}
    >>> plan_transfer("f32[4,4] on tp=2: S(0)", "on tp=2: S(1)") == transfer
    True
    """
    source, target, width = _read_plan_texts(src, dst, itemsize)
    _check_plan_arguments(source, target, width, max_buffer_bytes)
    if contiguous and rank is not None and max_buffer_bytes is not None:
        raise LayoutError("a plan for contiguous tensors within a limit is of all ranks; leave out rank=")
    contiguous = contiguous and max_buffer_bytes is not None
    options = PlanOptions(width, topology, max_buffer_bytes, contiguous, least_run if contiguous else 0)
    transfer = Transfer(source, target, options, rank)
    if transfer.is_listed or max_buffer_bytes is not None:
        _ = transfer.rounds  # what cannot be planned is refused here
    _log.debug("planned %r", transfer)
    return transfer


def _read_plan_texts(src: Any, dst: Any, itemsize: int | None) -> tuple[Any, Any, int]:
    """Texts as layouts, and the bytes of an element if they say them."""
    source = parse_layout(src) if isinstance(src, str) else src
    typed = source if isinstance(source, TensorType) else None
    target = parse_layout(dst, like=typed) if isinstance(dst, str) else dst
    sizes = {t.itemsize for t in (source, target) if isinstance(t, TensorType)}
    sizes |= set() if itemsize is None else {itemsize}
    if len(sizes) != 1:
        found = "none is known" if not sizes else f"got {' and '.join(map(str, sorted(sizes)))}"
        raise LayoutError(f"a transfer needs the bytes of an element, and {found}; pass itemsize=4 for f32")
    layouts = [t.layout if isinstance(t, TensorType) else t for t in (source, target)]
    return layouts[0], layouts[1], sizes.pop()


def _check_plan_arguments(src: Layout, dst: Layout, itemsize: int, max_buffer_bytes: int | None) -> None:
    for name, given in (("source", src), ("destination", dst)):
        if not isinstance(given, Layout):
            raise LayoutError(_describe_other_kind(name, given))
    if src.shape != dst.shape:
        raise LayoutError(f"a transfer keeps the shape; the source has {src.shape}, the destination {dst.shape}")
    if itemsize < 1:
        raise LayoutError(f"itemsize is the number of bytes of an element, got {itemsize}")
    if max_buffer_bytes is not None and max_buffer_bytes < 1:
        raise LayoutError(f"max_buffer_bytes must be at least one element, got {max_buffer_bytes}")


def _describe_other_kind(name: str, given: object) -> str:
    """What to pass in place of something that is not a layout."""
    fix = "a spec lays out a shape: spec.layout((8, 4))"
    if isinstance(getattr(given, "sharding", None), Layout):
        fix = "pass its .sharding"
    return f"plan_transfer takes layouts, and the {name} is {type(given).__name__}: {str(given)[:80]}; {fix}"


@public
def transfer_from_json(data: dict[str, Any]) -> Transfer:
    """The transfer that `Transfer.to_json` wrote: planned again from its arguments, checked against its figures.

    >>> import json, shardwise
    >>> rows, columns = (shardwise.ChunkSpec(dim, ranks=2).layout((4, 6)) for dim in (0, 1))
    >>> written = json.dumps(plan_transfer(rows, columns, itemsize=4).to_json())
    >>> transfer_from_json(json.loads(written)).moved_bytes
    48
    """
    topology = None if data["topology"] is None else Topology.from_json(data["topology"])
    transfer = plan_transfer(
        layout_from_json(data["src"]),
        layout_from_json(data["dst"]),
        itemsize=data["itemsize"],
        topology=topology,
        max_buffer_bytes=data["max_buffer_bytes"],
        contiguous=data.get("contiguous", False),
        least_run=data.get("least_run", 0),
        rank=data["rank"],
    )
    listed = data["bytes_by_edge"]
    same = int(data["moved_bytes"]) == transfer.moved_bytes
    if not same or (listed is not None and {(s, d): n for s, d, n in listed} != dict(transfer.bytes_by_edge)):
        raise LayoutError("this JSON describes a transfer with other routes than this version of shardwise plans")
    return transfer


# Of many tensors


@dataclass(frozen=True)
class BusyLink:
    """The port that carries most, of the ranks that share it, and in which direction; made by `StateTransfer`."""

    between_hosts: bool
    sends: bool
    ranks: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        first, *others = self.ranks
        who = f"rank {first}" if not others else f"ranks {first} to {others[-1]}"
        verb = ("sends" if self.sends else "receives") if not others else ("send" if self.sends else "receive")
        where = ("to" if self.sends else "from") + " other hosts" if self.between_hosts else "within a host"
        return f"{who} {verb} {format_bytes(self.nbytes)} {where}"


@dataclass(frozen=True, eq=False)
class StateTransfer:
    """The transfers of all tensors of a state in shared exchanges; made by `plan_state`.

    `parts` has each transfer once, with the number of tensors that take it. Replicas of a tensor take turns.
    """

    parts: tuple[tuple[Transfer, int], ...]
    topology: Topology

    @property
    def count(self) -> int:
        """The number of tensors."""
        return sum(count for _, count in self.parts)

    @cached_property
    def moved_bytes(self) -> int:
        """The bytes that leave a rank, in all."""
        return sum(part.moved_bytes * count for part, count in self.parts)

    @cached_property
    def copied_bytes(self) -> int:
        """The bytes that are copied within ranks."""
        return sum(part.copied_bytes * count for part, count in self.parts)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The fewest bytes that any plan between these layouts moves."""
        return sum(part.lower_bound_bytes * count for part, count in self.parts)

    @cached_property
    def loads(self) -> tuple[LinkLoad, LinkLoad]:
        """What goes within hosts and between them, by rank: tensors share messages, and add bytes."""
        pairs = [
            (part.loads_of_step(number, self.topology), count)
            for part, count in self.parts
            for number in range(len(part.totals))
        ]
        near, far = (_add_loads([(both[side], count) for both, count in pairs]) for side in (0, 1))
        return near, far

    @property
    def bytes_between_hosts(self) -> int:
        return int(self.loads[1].bytes_out.sum())

    def busiest_rank(self, *, sends: bool) -> tuple[int, int] | None:
        """The rank that sends (or receives) most and how many bytes; None if nothing is sent."""
        near, far = self.loads
        amounts = near.bytes_out + far.bytes_out if sends else near.bytes_in + far.bytes_in
        best = int(amounts.argmax()) if len(amounts) else 0
        return (best, int(amounts[best])) if len(amounts) and amounts[best] else None

    @cached_property
    def busiest_links(self) -> tuple[BusyLink, ...]:
        """For each kind of link and direction that is used, the port that carries most."""
        found = []
        for far, load in enumerate(self.loads):
            ports = self.topology.port_of(load.ranks, self.topology.between if far else self.topology.within)
            for sends, amounts in ((True, load.bytes_out), (False, load.bytes_in)):
                sums = np.bincount(ports, weights=amounts, minlength=1)
                best = int(sums.argmax())
                if sums[best]:
                    ranks = load.ranks[(ports == best) & (amounts > 0)]
                    found.append(BusyLink(bool(far), sends, tuple(ranks.tolist()), int(sums[best])))
        return tuple(found)

    @cached_property
    def seconds(self) -> float:
        """What one exchange of all of it takes on the topology."""
        busiest = [max(int(total.copied.max(initial=0)) for total in part.totals) for part, _ in self.parts]
        copied = sum(n * part.itemsize * count for n, (part, count) in zip(busiest, self.parts, strict=True))
        rounds = max((len(part.totals) for part, _ in self.parts), default=1)
        return exchange_seconds(*self.loads, self.topology, rounds=rounds, copied=copied)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "tensors": self.count,
            "moved_bytes": self.moved_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "copied_bytes": self.copied_bytes,
            "bytes_between_hosts": self.bytes_between_hosts,
            "busiest_sender": self.busiest_rank(sends=True),
            "busiest_receiver": self.busiest_rank(sends=False),
            "busiest_links": [
                {"between_hosts": b.between_hosts, "sends": b.sends, "ranks": list(b.ranks), "bytes": b.nbytes}
                for b in self.busiest_links
            ],
            "estimate_seconds": self.seconds,
            "topology": self.topology.to_json(),
        }


def _add_loads(loads: Sequence[tuple[LinkLoad, int]]) -> LinkLoad:
    """Loads together, each as often as it says; messages to one rank are joined."""
    width = max((len(load.ranks) for load, _ in loads), default=0)
    sums = [np.zeros(width, np.int64) for _ in range(4)]
    for load, count in loads:
        own = len(load.ranks)
        for total, messages in zip(sums[:2], (load.messages_out, load.messages_in), strict=True):
            total[:own] = np.maximum(total[:own], messages)
        for total, nbytes in zip(sums[2:], (load.bytes_out, load.bytes_in), strict=True):
            total[:own] += np.asarray(nbytes).astype(np.int64) * count
    return LinkLoad(np.arange(width), *sums)


def plan_state(pairs: Iterable[tuple[Layout, Layout, int]], topology: Topology) -> StateTransfer:
    """The transfer of a whole state: for each tensor its two layouts and the bytes of an element.

    Tensors with equal layouts are planned once; where several replicas could send, each tensor takes the next one.

    >>> from shardwise.geometry import parse_spec
    >>> copied, alone = (parse_spec(text).layout((8,)) for text in ("on x=4: R", "on x=1 @ 4: R"))
    >>> found = plan_state([(copied, alone, 4)] * 300, Topology(ranks_per_host=1))
    >>> found.moved_bytes, found.busiest_rank(sends=True), found.busiest_rank(sends=False)
    (9600, (0, 2400), (4, 9600))
    """
    counts: dict[tuple[Layout, Layout, int], int] = {}
    for pair in pairs:
        counts[pair] = counts.get(pair, 0) + 1
    parts: list[tuple[Transfer, int]] = []
    for (src, dst, itemsize), count in counts.items():
        _check_plan_arguments(src, dst, itemsize, None)
        replicas = 1 if src.cells is None else src.cells.replicas
        turns = min(count, replicas)
        for turn in range(turns):
            share = count // turns + (turn < count % turns)
            parts.append((Transfer(src, dst, PlanOptions(itemsize, topology, turn=turn), None), share))
    return StateTransfer(tuple(parts), topology)
