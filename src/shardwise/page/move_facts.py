"""What does the page need to show a transfer? Figures, bytes by rank, a matrix of ranks, and the boxes of some ranks.

1. The matrix is that of `matrix_facts`.
2. The animation shows at most 16 ranks: what they hold before and after each step, and the boxes between them.
3. Another part of the matrix, or other ranks, are asked for with `MoveQuestion`. A file has nobody to ask, so it has
   the matrix rank by rank as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.geometry import Layout, TensorType
from shardwise.page.layout_facts import layout_facts, shorten
from shardwise.page.matrix_facts import RankWindow, matrix_detail, matrix_facts
from shardwise.transfer import Routes, Step, Topology, Transfer
from shardwise.transfer.steps import plan_steps
from shardwise.transfer.totals import StepOutline

SHOWN_RANKS = 16
MOST_MOVES = 3000
MOST_HELD = 512


@dataclass(frozen=True, slots=True)
class MoveQuestion:
    """Which ranks the matrix and the animation show, by position in the list of ranks; `written`: for a file."""

    senders: RankWindow | None = None
    receivers: RankWindow | None = None
    animated: int = 0
    written: bool = False


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
    matrix = matrix_facts(transfer, ranks, question.senders, question.receivers)
    if question.written:
        matrix["detail"] = matrix_detail(transfer, ranks)
    return {
        "kind": "move",
        "title": shorten(f"{source} -> {target}"),
        "from": layout_facts(source, per_host),
        "to": layout_facts(target, per_host),
        "figures": _figures(transfer, topology),
        "topology": topology.to_json(),
        "explain": transfer.explain().split("\n"),
        "by_rank": _bytes_by_rank(transfer, ranks),
        "matrix": matrix,
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
