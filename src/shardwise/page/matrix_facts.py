"""Who sends how much to whom? A matrix of at most 128 rows of senders and 128 columns of receivers.

1. More ranks than that share rows and columns; a window of fewer ranks has them one by one.
2. Of a plan whose moves are not listed, one sender of each row is planned, and the row is that sender's.
3. A page in a file has nobody to ask for a window. It gets the matrix rank by rank, as runs of equal cells along each
   row; if these are too many, only one sender of each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from shardwise.geometry.mesh import IntArray
from shardwise.transfer import Transfer
from shardwise.transfer.steps import PlanOptions, plan_steps
from shardwise.transfer.transfer import edge_bytes

MATRIX_CELLS = 128
MOST_RUNS = 1 << 16
RankWindow: TypeAlias = tuple[int, int]


def matrix_facts(
    transfer: Transfer, ranks: Sequence[int], senders: RankWindow | None = None, receivers: RankWindow | None = None
) -> dict[str, Any]:
    """Bytes from groups of senders to groups of receivers within windows: half-open ranges of positions."""
    rows, columns = (_window(window, len(ranks)) for window in (senders, receivers))
    row_step, column_step = (_step(high - low) for low, high in (rows, columns))
    place = _places(ranks)
    values = np.zeros((-(-(rows[1] - rows[0]) // row_step), -(-(columns[1] - columns[0]) // column_step)), np.int64)
    largest: tuple[int, int, int] | None = None
    for sources, targets, nbytes in _edges(transfer, [ranks[i] for i in range(*rows, row_step)]):
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


def _step(count: int) -> int:
    """How many of so many ranks share a row or a column."""
    return -(-count // MATRIX_CELLS) or 1


def _places(ranks: Sequence[int]) -> IntArray:
    """The position of each rank in the list, by rank."""
    place = np.full(max(ranks, default=0) + 1, -1, np.int64)
    place[list(ranks)] = np.arange(len(ranks))
    return place


def matrix_detail(transfer: Transfer, ranks: Sequence[int]) -> dict[str, Any] | None:
    """The matrix rank by rank: runs of equal cells of every `step`-th sender; None if `matrix_facts` has them all.

    >>> from shardwise.geometry import parse_layout
    >>> from shardwise.transfer import plan_transfer
    >>> a, b = (parse_layout(f"f32[1024,256] on tp=256: S({dim})").layout for dim in (0, 1))
    >>> found = matrix_detail(plan_transfer(a, b, itemsize=4), range(256))
    >>> found["step"], found["ends"][:2], found["starts"][:3], found["lengths"][:3], found["bytes"][:3]
    (1, [1, 3], [1, 0, 2], [255, 1, 254], [16, 16, 16])
    """
    coarse = _step(len(ranks))
    if coarse == 1:
        return None
    for step in (1, coarse) if transfer.is_listed else (coarse,):
        runs = _runs(transfer, ranks, step)
        if len(runs[0]) <= MOST_RUNS:
            rows, starts, lengths, amounts = runs
            ends = np.searchsorted(rows, np.arange(0, len(ranks), step), side="right")
            columns = {"ends": ends, "starts": starts, "lengths": lengths, "bytes": amounts}
            return {"step": step, **{name: values.tolist() for name, values in columns.items()}}
    return None


def _runs(transfer: Transfer, ranks: Sequence[int], step: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Sender, first receiver, number of receivers and bytes to each of them, by position; sorted."""
    place, count = _places(ranks), len(ranks)
    keys, amounts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for sources, targets, nbytes in _edges(transfer, [ranks[i] for i in range(0, count, step)]):
        taken = place[sources] % step == 0
        keys.append(place[sources[taken]] * count + place[targets[taken]])
        amounts.append(nbytes[taken])
    cells, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    total = np.zeros(len(cells), np.int64)
    np.add.at(total, inverse, np.concatenate(amounts))
    cells, total = cells[total > 0], total[total > 0]
    rows, columns = np.divmod(cells, count)
    follows = (np.diff(cells) == 1) & (np.diff(rows) == 0) & (np.diff(total) == 0)
    first = np.flatnonzero(np.concatenate([np.ones(min(1, len(cells)), bool), ~follows]))
    return rows[first], columns[first], np.diff(np.append(first, len(cells))), total[first]
