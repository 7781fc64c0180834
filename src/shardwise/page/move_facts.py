"""What does the page need to show a transfer? Figures, bytes by rank, a matrix of ranks, and the boxes of some ranks.

1. The matrix has at most 128 rows and columns: more ranks share them. Of a plan whose moves are not listed, one sender
   of each row is planned, and the row is that sender's.
2. The animation shows at most 16 ranks: what they hold before and after each step, and the boxes between them.
3. Another part of the matrix, or other ranks, are asked for with `MoveQuestion`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.geometry import Layout, TensorType
from shardwise.geometry.mesh import IntArray
from shardwise.page.layout_facts import layout_facts, shorten
from shardwise.transfer import Routes, Step, Topology, Transfer
from shardwise.transfer.steps import PlanOptions, plan_steps
from shardwise.transfer.totals import StepOutline
from shardwise.transfer.transfer import edge_bytes

MATRIX_CELLS = 128
SHOWN_RANKS = 16
MOST_MOVES = 3000
MOST_HELD = 512


@dataclass(frozen=True, slots=True)
class MoveQuestion:
    """Which ranks the matrix and the animation show: half-open ranges of positions in the list of ranks."""

    senders: tuple[int, int] | None = None
    receivers: tuple[int, int] | None = None
    animated: int = 0


def move_facts(
    source: TensorType, target: TensorType, transfer: Transfer, topology: Topology, question: MoveQuestion | None = None
) -> dict[str, Any]:
    """All that the page shows of a transfer, as plain data.

    >>> from shardwise.geometry import parse_layout
    >>> from shardwise.transfer import plan_transfer
    >>> a = parse_layout("f32[8,6] on tp=2: S(0)")
    >>> b = parse_layout("on tp=2: S(1)", like=a)
    >>> facts = move_facts(a, b, plan_transfer(a.layout, b.layout, itemsize=4), Topology(8))
    >>> facts["figures"]["moved_bytes"], facts["matrix"]["values"]
    (96, [[0, 48], [48, 0]])
    """
    question = question or MoveQuestion()
    per_host = topology.ranks_per_host or 1
    ranks = sorted({*source.layout.ranks, *target.layout.ranks})
    return {
        "kind": "move",
        "title": shorten(f"{source} -> {target}"),
        "from": layout_facts(source, per_host),
        "to": layout_facts(target, per_host),
        "figures": _figures(transfer, topology),
        "topology": topology.to_json(),
        "explain": transfer.explain().split("\n"),
        "by_rank": _bytes_by_rank(transfer, ranks),
        "matrix": matrix_facts(transfer, ranks, question),
        "lanes": lane_facts(transfer, ranks, question.animated),
    }


def _figures(transfer: Transfer, topology: Topology) -> dict[str, Any]:
    return {
        "moved_bytes": transfer.moved_bytes,
        "lower_bound_bytes": transfer.lower_bound_bytes,
        "copied_bytes": transfer.copied_bytes,
        "bytes_between_hosts": transfer.bytes_between_hosts,
        "lower_bound_between_hosts": transfer.lower_bound_between_hosts,
        "rounds": transfer.rounds,
        "max_buffer_bytes": transfer.max_buffer_bytes,
        "collective": None if transfer.collective is None else str(transfer.collective),
        "busiest_sender": transfer.busiest_sender,
        "busiest_receiver": transfer.busiest_receiver,
        "estimate_seconds": transfer.estimate(topology),
    }


def _bytes_by_rank(transfer: Transfer, ranks: Sequence[int]) -> dict[str, Any]:
    """What each rank sends and receives; `bound` is what it needs and does not hold, where nothing is pending."""
    sent, received = ([counts.get(r, 0) for r in ranks] for counts in (transfer.sent_bytes, transfer.received_bytes))
    plain = len(transfer.outlines) == 1 and transfer.src.pending is None and transfer.dst.pending is None
    contiguous = list(ranks) == list(range(len(ranks)))
    return {
        "numbers": None if contiguous else list(ranks),
        "sent": sent,
        "received": received,
        "bound": _needed_bytes(transfer, ranks) if plain else None,
    }


def _needed_bytes(transfer: Transfer, ranks: Sequence[int]) -> list[int]:
    """The volume of each rank's pieces in the destination, less what it holds of them in the source."""
    needed = transfer.dst.bytes_per_rank(transfer.itemsize)
    copied = transfer.totals[0].copied
    return [needed.get(r, 0) - (int(copied[r]) * transfer.itemsize if r < len(copied) else 0) for r in ranks]


def matrix_facts(transfer: Transfer, ranks: Sequence[int], question: MoveQuestion) -> dict[str, Any]:
    """Bytes from groups of senders to groups of receivers within the windows that are asked for."""
    rows, columns = (_window(window, len(ranks)) for window in (question.senders, question.receivers))
    row_step, column_step = (-(-(high - low) // MATRIX_CELLS) or 1 for low, high in (rows, columns))
    place = np.full(max(ranks, default=0) + 1, -1, np.int64)
    place[list(ranks)] = np.arange(len(ranks))
    values = np.zeros((-(-(rows[1] - rows[0]) // row_step), -(-(columns[1] - columns[0]) // column_step)), np.int64)
    largest: tuple[int, int, int] | None = None
    senders = range(rows[0], rows[1], row_step)
    for sources, targets, nbytes in _edges(transfer, [ranks[i] for i in senders]):
        y, x = place[sources], place[targets]
        inside = (y >= rows[0]) & (y < rows[1]) & (x >= columns[0]) & (x < columns[1])
        y, x, amount = y[inside], x[inside], nbytes[inside]
        np.add.at(values, ((y - rows[0]) // row_step, (x - columns[0]) // column_step), amount)
        if len(amount) and (largest is None or int(amount.max()) > largest[2]):
            most = int(amount.argmax())
            largest = (int(ranks[y[most]]), int(ranks[x[most]]), int(amount[most]))
    return {
        "count": len(ranks),
        "rows": [*rows, row_step],
        "columns": [*columns, column_step],
        "sampled": not transfer.is_listed and row_step > 1,
        "values": values.tolist(),
        "busiest_link": largest,
    }


def _window(window: tuple[int, int] | None, count: int) -> tuple[int, int]:
    low, high = window or (0, count)
    low = min(max(0, low), max(0, count - 1))
    return low, max(low + 1, min(high, count)) if count else low


def _edges(transfer: Transfer, senders: Sequence[int]) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Source, destination and bytes of edges: all of a listed plan, else those of some senders."""
    if transfer.is_listed:
        for step in transfer.unsplit_steps:
            yield edge_bytes(step.routes, transfer.itemsize)
        return
    options = PlanOptions(transfer.itemsize, transfer.options.topology)
    for rank in senders:
        for step in plan_steps(transfer.outlines, options, rank):
            mine = step.routes.take(np.flatnonzero(step.routes.src_ranks == rank))
            yield edge_bytes(mine, transfer.itemsize)


def lane_facts(transfer: Transfer, ranks: Sequence[int], first: int = 0) -> dict[str, Any]:
    """What some ranks hold before and after each step, and which boxes go between them in which round."""
    start = min(max(0, first), max(0, len(ranks) - 1))
    shown = list(ranks[start : start + SHOWN_RANKS])
    steps = []
    outlines: Sequence[Step | StepOutline] = transfer.steps if transfer.is_listed else transfer.outlines
    for number, outline in enumerate(outlines):
        moves, hidden = _moves_between(transfer, number, shown)
        steps.append(
            {
                "before": [_held(outline.src, rank) for rank in shown],
                "after": [_held(outline.dst, rank) for rank in shown],
                "op": outline.op if outline.src.pending is not None else None,
                "rounds": transfer.rounds_by_step[number],
                "moves": moves,
                "hidden": hidden,
            }
        )
    return {"first": start, "count": len(ranks), "ranks": shown, "shape": list(transfer.src.shape), "steps": steps}


def _held(layout: Layout, rank: int) -> list[list[list[int]]]:
    table = layout.table.take(layout.rows_of(rank)[:MOST_HELD])
    filled = (table.sizes > 0).all(axis=1)
    ends = table.offsets + table.sizes
    boxes = zip(table.offsets[filled].tolist(), ends[filled].tolist(), strict=True)
    return [[start, end] for start, end in boxes]


def _moves_between(transfer: Transfer, number: int, shown: Sequence[int]) -> tuple[list[list[Any]], int]:
    """Rows of source, destination, round, start and end: local copies first (round -1), then boxes that are sent."""
    wanted = np.asarray(shown, np.int64)
    found: list[list[Any]] = []
    for routes, local in _routes_from(transfer, number, shown):
        found += _rows(routes.take(np.flatnonzero(np.isin(routes.dst_ranks, wanted))), local)
    found.sort(key=lambda row: int(row[2]))
    return found[:MOST_MOVES], max(0, len(found) - MOST_MOVES)


def _routes_from(transfer: Transfer, number: int, shown: Sequence[int]) -> Iterator[tuple[Routes, bool]]:
    """The moves and the copies of one step that start at these ranks."""
    for rank in shown:
        listed = transfer.is_listed
        steps = transfer.steps if listed else plan_steps(transfer.outlines, transfer.options, rank)
        for routes, local in ((steps[number].routes, False), (steps[number].copies, True)):
            yield routes.take(np.flatnonzero(routes.src_ranks == rank)), local


def _rows(routes: Routes, local: bool) -> list[list[Any]]:
    ends = (routes.starts + routes.sizes).tolist()
    rounds = [-1] * len(routes) if local else routes.rounds.tolist()
    columns = (routes.src_ranks.tolist(), routes.dst_ranks.tolist(), rounds, routes.starts.tolist(), ends)
    return [list(row) for row in zip(*columns, strict=True)]
