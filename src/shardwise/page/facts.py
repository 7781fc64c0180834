"""What does the page need to draw layouts, transfers, steps and checkpoints? Facts as JSON, for each of the four.

A layout: cuts along each dim and owners of the cells, or a list of boxes.

1. A regular layout is sent as its product form: a tensor over 16,384 ranks is two lists of cuts and one of owners.
2. If the cells are too many, neighbours along the dim with most cells are merged until they are not; the first one
   stands for all of them, and the facts say how many were merged.
3. An irregular layout is sent as its boxes, the first so many.

Who sends how much to whom? A matrix of at most 128 rows of senders and 128 columns of receivers.

1. More ranks than that share rows and columns; a window of fewer ranks has them one by one.
2. Of a plan whose moves are not listed, one sender of each row is planned, and the row is that sender's.
3. A page in a file has nobody to ask for a window. It gets the matrix rank by rank, as runs of equal cells along each
   row; if these are too many, only one sender of each row.

What does the page need to show a transfer? Figures, bytes by rank, a matrix of ranks, and the boxes of some ranks.

1. The matrix is that of `matrix_facts`.
2. The animation shows at most 16 ranks: what they hold before and after each step, and the boxes between them.
3. Another part of the matrix, or other ranks, are asked for with `MoveQuestion`. A file has nobody to ask, so it has
   the matrix rank by rank as well.

A recorded step: the events of each rank as columns, and sums by what they do. A trace is in Chrome's format, as
`shardwise.trace` writes it: an event of phase X has a rank (`pid`), a track (`tid`), a start and a duration in
microseconds, and a category: "operator", "move" or "wait". Its arguments have bytes, layouts (`from`, `to`), and the
`line` of the user's program.

1. Events of one track that lie within each other are drawn below each other, and so are tracks: each event has a lane.
2. Equal events (name, category, arguments) are described once.
3. Of very many events the longest are sent; the sums are those of all.
4. A moment of a rank belongs to the event that began last: a move inside an operator counts as moving, an operator that
   runs while a move is under way as computing.

A checkpoint: its tensors as columns, its files, and the balance over ranks. Tensors that are cut alike share one
picture of their layout: the first so many pictures are part of the facts, others are asked for by the number of the
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardwise._text import parse_json
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.verify import StoredLayouts, measure_balance
from shardwise.geometry import Layout, LayoutError, MeshSpec, Partial, Placement, Replicate, Shard, TensorType
from shardwise.geometry.layout import Cells
from shardwise.geometry.mesh import IntArray
from shardwise.transfer import Routes, Step, Topology, Transfer
from shardwise.transfer.senders import StepOutline
from shardwise.transfer.steps import PlanOptions, plan_steps
from shardwise.transfer.transfer import edge_bytes

MOST_OWNERS = 1 << 17
MOST_BOXES = 8192
LONGEST_TITLE = 240


def layout_facts(tensor: TensorType, ranks_per_host: int = 8) -> dict[str, Any]:
    """All that the page shows of a tensor and its layout, as plain data.

    >>> from shardwise.geometry import parse_layout
    >>> facts = layout_facts(parse_layout("f32[8,6] on dp=2,tp=2: S(0), R"))
    >>> facts["regular"]["owners"], facts["axes"][1]["words"]
    ([0, 1, 2, 3], 'has replicas')
    """
    layout = tensor.layout
    notation = str(tensor)
    return {
        "kind": "layout",
        "title": shorten(notation),
        "notation": notation,
        "dtype": tensor.dtype,
        "itemsize": tensor.itemsize,
        "bytes": layout.numel * tensor.itemsize,
        "ranks_per_host": ranks_per_host,
        **shape_facts(layout),
        "ranks": rank_facts(layout),
    }


def shorten(text: str, longest: int = LONGEST_TITLE) -> str:
    """A title that stays readable."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def shape_facts(layout: Layout) -> dict[str, Any]:
    """Who holds what, without element types and bytes."""
    regular = None if layout.cells is None else _cell_facts(layout.cells)
    return {
        "shape": list(layout.shape),
        "pending": None if layout.pending is None else str(layout.pending),
        "axes": _axis_facts(layout),
        "mesh_ranks": _mesh_ranks(layout),
        "groups": _group_facts(layout),
        "regular": regular,
        "boxes": _box_facts(layout) if regular is None else None,
    }


def rank_facts(layout: Layout) -> dict[str, Any]:
    """The elements that each rank holds; `numbers` is None if the ranks are 0, 1, 2..."""
    elements = layout.elements_per_rank()
    numbers = list(elements)
    return {
        "count": len(numbers),
        "numbers": None if numbers == list(range(len(numbers))) else numbers,
        "elements": list(elements.values()),
    }


def _axis_facts(layout: Layout) -> list[dict[str, Any]]:
    spec = layout.spec
    if not isinstance(spec, MeshSpec):
        return []
    placed = zip(spec.mesh.axes, spec.mesh.shape, spec.placements, strict=True)
    return [{"name": name, "size": size, "words": _words(placement, layout.ndim)} for name, size, placement in placed]


def _words(placement: Placement, ndim: int) -> str:
    """What an axis does, in words."""
    if isinstance(placement, Replicate):
        return "has replicas"
    if isinstance(placement, Partial):
        return f"has addends of a pending {placement.op}"
    assert isinstance(placement, Shard)
    text = f"splits dim {placement.dim % max(1, ndim)}"
    text += "" if placement.unit is None else f" between units of {placement.unit}"
    text += ", two parts for each rank, one from each end" * placement.zigzag
    if placement.sizes is not None:
        return f"{text} in given sizes"
    if placement.groups is not None:
        text += f", each of {len(placement.groups)} groups on its own"
        copied = [str(number) for number, copies in enumerate(placement.each or ()) if copies > 1]
        return text + (f"; parts of group {' and '.join(copied)} are on several ranks" if copied else "")
    if placement.each is not None:
        return f"{text}, each part on {placement.each[0]} ranks"
    if placement.block is not None:
        return f"{text} in turns of {placement.block}"
    return f"{text} by the owners of its rows" if placement.owners is not None else text


def _mesh_ranks(layout: Layout) -> list[int] | None:
    """The ranks of the mesh in row-major order; None: 0, 1, 2..., or no mesh."""
    spec = layout.spec
    if not isinstance(spec, MeshSpec) or spec.mesh.is_contiguous:
        return None
    ranks: list[int] = spec.mesh.ranks.reshape(-1).tolist()
    return ranks


def _group_facts(layout: Layout) -> list[dict[str, Any]]:
    """The dims that are fused from groups, and the lengths of these."""
    placements = layout.spec.placements if isinstance(layout.spec, MeshSpec) else ()
    fused = [p for p in placements if isinstance(p, Shard) and p.groups is not None]
    return [{"dim": p.dim % layout.ndim, "lengths": list(p.groups or ())} for p in fused]


def _cell_facts(cells: Cells) -> dict[str, Any]:
    copies = cells.addends * cells.replicas
    shown = min(copies, MOST_OWNERS)
    counts = [dim.count for dim in cells.dims]
    steps = _merge_steps(counts, MOST_OWNERS // shown)
    taken = tuple(slice(None, None, step) for step in steps)
    owners = cells.owners[taken].reshape(-1, cells.addends, cells.replicas)
    cuts = []
    for dim, step in zip(cells.dims, steps, strict=True):
        first = np.arange(0, dim.count, step)
        last = np.minimum(first + step, dim.count) - 1
        ends = (dim.starts + dim.lengths)[last]
        cuts.append({"starts": dim.starts[first].tolist(), "ends": ends.tolist()})
    return {
        "cuts": cuts,
        "owners": owners.reshape(-1)[: MOST_OWNERS * 2].tolist(),
        "addends": cells.addends,
        "replicas": cells.replicas,
        "merged": steps,
    }


def _merge_steps(counts: list[int], most: int) -> list[int]:
    """How many neighbours are merged along each dim so that at most so many cells remain."""
    steps = [1] * len(counts)

    def left() -> list[int]:
        return [-(-count // step) for count, step in zip(counts, steps, strict=True)]

    while int(np.prod(left(), dtype=np.int64)) > max(1, most):
        steps[int(np.argmax(left()))] *= 2
    return steps


def _box_facts(layout: Layout) -> dict[str, Any]:
    """The distinct boxes and their holders: for each addend, the ranks."""
    table = layout.table
    boxes, first = np.unique(table.cells, return_index=True)
    first = first[(table.sizes[first] > 0).all(axis=1)]
    shown = first[:MOST_BOXES]
    holders = _holders(table.cells, table.addends, table.ranks)
    return {
        "starts": table.offsets[shown].tolist(),
        "ends": (table.offsets + table.sizes)[shown].tolist(),
        "holders": [holders[cell] for cell in table.cells[shown].tolist()],
        "hidden": len(first) - len(shown),
        "empty": len(boxes) - len(first),
    }


def _holders(cells: IntArray, addends: IntArray, ranks: IntArray) -> dict[int, list[list[int]]]:
    found: dict[int, dict[int, list[int]]] = {}
    for cell, addend, rank in zip(cells.tolist(), addends.tolist(), ranks.tolist(), strict=True):
        found.setdefault(cell, {}).setdefault(addend, []).append(rank)
    return {cell: [sorted(ranks) for _, ranks in sorted(by.items())] for cell, by in found.items()}


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


SHOWN_RANKS = 16
MOST_MOVES = 3000
MOST_HELD = 512
MOST_SPANS = 64  # of a block of ranks


@dataclass(frozen=True, slots=True)
class MoveQuestion:
    """Which ranks the matrix and the animation show, by position in the list of ranks; `written`: for a file.

    Without `animated` more ranks than are drawn are shown in blocks.
    """

    senders: RankWindow | None = None
    receivers: RankWindow | None = None
    animated: int | None = None
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
        "lanes": _lanes(transfer, ranks, question.animated, per_host),
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


Span = tuple[tuple[int, ...], tuple[int, ...]]  # where a box begins and ends


def _lanes(transfer: Transfer, ranks: Sequence[int], first: int | None, per_host: int) -> dict[str, Any]:
    blocks = block_lanes(transfer, ranks, per_host) if first is None and len(ranks) > SHOWN_RANKS else None
    return blocks or lane_facts(transfer, ranks, first or 0)


def block_lanes(transfer: Transfer, ranks: Sequence[int], per_host: int) -> dict[str, Any] | None:
    """The move between blocks of whole hosts, each drawn as one; None where a block's part has too many boxes.

    A block holds what its ranks hold together. What it needs and does not hold comes from the next block that has it,
    or, of a pending sum, from all that have an addend.
    """
    size = per_host * -(-len(ranks) // (SHOWN_RANKS * per_host))
    blocks = [list(ranks[at : at + size]) for at in range(0, len(ranks), size)]
    steps = []
    for outline in transfer.steps if transfer.is_listed else transfer.outlines:
        before, after = (_held_by_blocks(layout, ranks, size, len(blocks)) for layout in (outline.src, outline.dst))
        if max(map(len, (*before, *after))) > MOST_SPANS:
            return None
        pending = outline.src.pending is not None
        moves = [row for target, spans in enumerate(after) for row in _moves_to_block(target, spans, before, pending)]
        steps.append(
            {
                "before": [[[list(start), list(end)] for start, end in spans] for spans in before],
                "after": [[[list(start), list(end)] for start, end in spans] for spans in after],
                "op": outline.op if pending else None,
                "rounds": 1,
                "moves": sorted(moves, key=lambda row: int(row[2]))[:MOST_MOVES],
                "hidden": max(0, len(moves) - MOST_MOVES),
            }
        )
    labels = [f"ranks {block[0]}-{block[-1]}" if len(block) > 1 else f"rank {block[0]}" for block in blocks]
    counts = {"first": 0, "count": len(ranks), "block": size, "hosts": size // per_host, "labels": labels}
    return {**counts, "ranks": list(range(len(blocks))), "shape": list(transfer.src.shape), "steps": steps}


def _held_by_blocks(layout: Layout, ranks: Sequence[int], size: int, count: int) -> list[list[Span]]:
    """The boxes that the ranks of each block hold together, adjacent ones as one."""
    table = layout.table
    filled = (table.sizes > 0).all(axis=1)
    places = np.searchsorted(np.asarray(ranks), table.ranks) // size
    found: list[list[Span]] = []
    for block in range(count):
        rows = filled & (places == block)
        both = np.unique(np.hstack([table.offsets[rows], (table.offsets + table.sizes)[rows]]), axis=0).tolist()
        spans = [(tuple(row[: len(row) // 2]), tuple(row[len(row) // 2 :])) for row in both]
        for dim in reversed(range(len(layout.shape))):
            spans = _join(spans, dim)
        found.append(spans)
    return found


def _join(spans: list[Span], dim: int) -> list[Span]:
    """The same boxes, those that touch along a dim as one.

    >>> _join([((0, 0), (2, 2)), ((0, 2), (2, 4)), ((2, 0), (4, 2))], 1)
    [((0, 0), (2, 4)), ((2, 0), (4, 2))]
    """

    def others(span: Span) -> Span:
        return span[0][:dim] + span[0][dim + 1 :], span[1][:dim] + span[1][dim + 1 :]

    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (others(span), span[0][dim])):
        last = joined[-1] if joined else span
        if joined and others(last) == others(span) and last[1][dim] >= span[0][dim]:
            joined[-1] = (last[0], max(last[1], span[1], key=lambda end: end[dim]))
        else:
            joined.append(span)
    return joined


def _moves_to_block(target: int, spans: list[Span], before: list[list[Span]], pending: bool) -> list[list[Any]]:
    """Rows of source, target, round, start and end; a block keeps what it holds, in round -1."""
    rows: list[list[Any]] = []
    left = spans
    for turn in range(len(before)):
        source = (target + turn) % len(before)
        for held in before[source]:
            rest: list[Span] = []
            for span in left:
                start = tuple(map(max, span[0], held[0]))
                end = tuple(map(min, span[1], held[1]))
                if any(a >= b for a, b in zip(start, end, strict=True)):
                    rest.append(span)
                    continue
                rows.append([source, target, -1 if turn == 0 else 0, list(start), list(end)])
                rest += [span] if pending else _subtract(span, (start, end))
            left = rest
    return rows


def _subtract(span: Span, part: Span) -> list[Span]:
    """What is left of a box without a part of it.

    >>> _subtract(((0, 0), (4, 4)), ((0, 2), (2, 4)))
    [((2, 0), (4, 4)), ((0, 0), (2, 2))]
    """
    left: list[Span] = []
    start, end = list(span[0]), list(span[1])
    for dim, (low, high) in enumerate(zip(*part, strict=True)):
        if start[dim] < low:
            left.append((tuple(start), (*end[:dim], low, *end[dim + 1 :])))
        if high < end[dim]:
            left.append(((*start[:dim], high, *start[dim + 1 :]), tuple(end)))
        start[dim], end[dim] = low, high
    return left


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


MOST_EVENTS = 40_000
KINDS = ("operator", "move", "wait", "other")
LONGEST_TEXT = 200
_TOUCHING = 1e-3  # microseconds: the end of one event and the start of the next are sums of rounded numbers


class StepEvent(NamedTuple):
    """One event: the rank and its track, start and duration in microseconds, and the number of what it is."""

    rank: int
    track: int
    start: float
    duration: float
    what: int

    @property
    def end(self) -> float:
        return self.start + self.duration


class EventKind(NamedTuple):
    """What events are that have the same description."""

    name: str
    kind: str
    bytes: int
    source: str
    layouts: str


def read_trace(path: str | Path) -> dict[str, Any]:
    """The document of a trace file, or an error that says what it is not."""
    try:
        data = parse_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise LayoutError(f"{path} is not valid JSON: {error}") from error
    if isinstance(data, list):
        data = {"traceEvents": data}
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise LayoutError(f"{path} has no traceEvents; record a step with shardwise.trace")
    return data


def step_facts(title: str, trace: Mapping[str, Any]) -> dict[str, Any]:
    """All that the page shows of a trace, as plain data.

    >>> event = {"ph": "X", "pid": 0, "ts": 5.0, "dur": 2.0, "name": "mm", "cat": "operator"}
    >>> facts = step_facts("step.json", {"traceEvents": [event, {**event, "pid": 1, "ts": 6.0}]})
    >>> facts["ranks"], facts["seconds"], facts["starts"], facts["kinds"][0][:2]
    ([0, 1], 3e-06, [0.0, 1.0], ['mm', 'operator'])
    """
    events, kinds = read_events(trace["traceEvents"])
    first = min((event.start for event in events), default=0.0)
    last = max((event.end for event in events), default=0.0)
    ranks = sorted({event.rank for event in events})
    lanes = find_lanes(events)
    shown = _longest(range(len(events)), events)
    places = {rank: place for place, rank in enumerate(ranks)}
    return {
        "kind": "step",
        "title": shorten(title),
        "seconds": round((last - first) * 1e-6, 9),
        "ranks": ranks,
        "kinds": [list(kind) for kind in kinds],
        "places": [places[events[i].rank] for i in shown],
        "starts": [round(events[i].start - first, 2) for i in shown],
        "durations": [round(events[i].duration, 2) for i in shown],
        "whats": [events[i].what for i in shown],
        "lanes": [lanes[i] for i in shown],
        "count": len(events),
        "totals": _totals(events, len(kinds)),
        "by_rank": _by_rank(events, kinds, places),
    }


def read_events(found: Sequence[Any]) -> tuple[list[StepEvent], list[EventKind]]:
    """The complete events in order of rank, track and start, and the distinct descriptions."""
    numbers: dict[EventKind, int] = {}
    events = []
    for event in found:
        if not isinstance(event, dict):
            raise LayoutError(f"traceEvents has {shorten(repr(event), 40)}, which is not an event, a JSON object")
        if event.get("ph") != "X":
            continue
        what = numbers.setdefault(_describe(event), len(numbers))
        try:
            places = int(event["pid"]), int(event.get("tid", 0))
            start, duration = float(event["ts"]), float(event.get("dur", 0))
        except (KeyError, TypeError, ValueError, OverflowError):
            start = duration = math.nan
        if not math.isfinite(start + duration):
            given = ", ".join(f"{name} {shorten(repr(event.get(name)), 40)}" for name in ("pid", "tid", "ts", "dur"))
            raise LayoutError(
                f"the event {str(event.get('name'))!r} has {given}; pid and tid are integers, ts and dur finite numbers"
            )
        events.append(StepEvent(*places, start, max(0.0, duration), what))
    events.sort(key=lambda event: (event.rank, event.track, event.start, -event.duration))
    return events, list(numbers)


def _describe(event: Mapping[str, Any]) -> EventKind:
    given = event.get("args")
    arguments: Mapping[str, Any] = given if isinstance(given, dict) else {}
    kind = str(event.get("cat", "other"))
    sent = arguments.get("bytes")
    layouts = [str(arguments[key]) for key in ("from", "to") if arguments.get(key)]
    backward = ", backward" if arguments.get("pass") == "backward" else ""
    return EventKind(
        shorten(str(event.get("name", "?")), LONGEST_TEXT) + backward,
        kind if kind in KINDS else "other",
        sent if isinstance(sent, int) else 0,
        shorten(str(arguments.get("line") or ""), LONGEST_TEXT),
        shorten(" -> ".join(layouts), 2 * LONGEST_TEXT),
    )


def find_lanes(events: Sequence[StepEvent]) -> list[int]:
    """The lane of each event: those of its track, then how many events of the track enclose it; events are sorted.

    >>> spans = [(0, 0, 0, 10), (0, 0, 2, 3), (0, 0, 6, 4), (0, 1, 1, 1), (1, 0, 1, 1)]
    >>> find_lanes([StepEvent(*span, 0) for span in spans])
    [0, 1, 1, 2, 0]
    """
    depths: list[int] = []
    deepest: dict[int, int] = {}
    open_ends: list[float] = []
    place = None
    for event in events:
        if event[:2] != place:
            place, open_ends = event[:2], []
        while open_ends and open_ends[-1] <= event.start + _TOUCHING:
            open_ends.pop()
        depths.append(len(open_ends))
        deepest[event.track] = max(deepest.get(event.track, 0), len(open_ends))
        open_ends.append(event.end)
    counts = [deepest[track] + 1 for track in sorted(deepest)]
    firsts = dict(zip(sorted(deepest), accumulate(counts, initial=0), strict=False))
    return [firsts[event.track] + depth for event, depth in zip(events, depths, strict=True)]


def _longest(indices: Sequence[int], events: Sequence[StepEvent]) -> list[int]:
    """All events, or the longest ones, in their order."""
    if len(indices) <= MOST_EVENTS:
        return list(indices)
    return sorted(sorted(indices, key=lambda i: -events[i].duration)[:MOST_EVENTS])


def _totals(events: Sequence[StepEvent], count: int) -> list[list[float]]:
    """For each description: how many events, their microseconds in all, and the longest."""
    totals = [[0, 0.0, 0.0] for _ in range(count)]
    for event in events:
        total = totals[event.what]
        total[0] += 1
        total[1] = round(total[1] + event.duration, 3)
        total[2] = max(total[2], event.duration)
    return totals


def _by_rank(
    events: Sequence[StepEvent], kinds: Sequence[EventKind], places: Mapping[int, int]
) -> dict[str, list[float]]:
    """Microseconds of each rank by kind."""
    sums = {kind: [0.0] * len(places) for kind in KINDS}
    for rank, own in groupby(events, key=lambda event: event.rank):
        for what, time in _attribute_time(list(own)):
            sums[kinds[what].kind][places[rank]] += time
    return {kind: [round(value, 2) for value in values] for kind, values in sums.items() if any(values)}


def _attribute_time(events: Sequence[StepEvent]) -> Iterator[tuple[int, float]]:
    """Which events a rank's time belongs to: at every moment the one that began last."""
    waiting = sorted(events, key=lambda event: (-event.start, event.duration))  # the next one is at the end
    active: list[tuple[float, float, int]] = []
    now = 0.0
    while waiting or active:
        if not active:
            now = waiting[-1].start
        while waiting and waiting[-1].start <= now:
            event = waiting.pop()
            heappush(active, (-event.start, event.duration, event.what))
        start, duration, what = active[0]
        until = min(duration - start, waiting[-1].start if waiting else math.inf)
        if until > now:
            yield what, until - now
            now = until
        if duration - start <= now:
            heappop(active)


MOST_PICTURES, MOST_PICTURE_OWNERS = 64, 4096
MOST_VALUES, LONGEST_VALUE = 1000, 200


def checkpoint_facts(title: str, store: Store) -> dict[str, Any]:
    """All that the page shows of a checkpoint, as plain data; only its index is read."""
    index, layouts = store.index, StoredLayouts()
    balance = measure_balance(store, layouts)
    entries = list(index.tensors.values())
    pictures = _Pictures(layouts)
    return {
        "kind": "checkpoint",
        "title": title,
        "format": store.format_title,
        "bytes": sum(entry.nbytes for entry in entries),
        "tensors": [[*_row(entry, layouts), pictures.number_of(entry)] for entry in entries],
        "columns": ["name", "dtype", "shape", "layout", "bytes", "files", "picture"],
        "pictures": pictures.facts,
        "files": [
            [file.name, file.bytes, count] for file, count in zip(index.files, balance.tensors_by_file, strict=True)
        ],
        "ranks": [[rank, balance.held.get(rank), balance.written.get(rank)] for rank in balance.ranks],
        "values": [[n, shorten(repr(value), LONGEST_VALUE)] for n, value in islice(index.values, MOST_VALUES)],
        "opaque": list(index.opaque)[:MOST_VALUES],
    }


def tensor_facts(store: Store, number: int) -> dict[str, Any] | None:
    """The layout of a tensor, by its number; None where the format has no layouts, or there is no such tensor."""
    entries = list(store.index.tensors.values())
    layout = StoredLayouts().layout(entries[number]) if 0 <= number < len(entries) else None
    return None if layout is None else picture_facts(layout)


def picture_facts(layout: Layout) -> dict[str, Any]:
    """A layout without element type: tensors of several types may share it."""
    return {**shape_facts(layout), "ranks": rank_facts(layout), "ranks_per_host": 8}


def _row(entry: TensorEntry, layouts: StoredLayouts) -> list[Any]:
    files = sorted(set(entry.files))
    return [entry.name, entry.dtype.name, list(entry.shape), layouts.notation(entry), entry.nbytes, files]


class _Pictures:
    """The distinct layouts that are small enough to be part of the facts."""

    def __init__(self, layouts: StoredLayouts) -> None:
        self.layouts = layouts
        self.facts: list[dict[str, Any]] = []
        self._numbers: dict[tuple[int, tuple[int, ...]], int | None] = {}

    def number_of(self, entry: TensorEntry) -> int | None:
        """The number of a tensor's picture; None: it has none here."""
        key = (id(entry.cut), entry.shape)
        if key not in self._numbers:
            self._numbers[key] = self._add(entry)
        return self._numbers[key]

    def _add(self, entry: TensorEntry) -> int | None:
        layout = self.layouts.layout(entry)
        if layout is None or len(self.facts) >= MOST_PICTURES or len(layout.table) > MOST_PICTURE_OWNERS:
            return None
        self.facts.append(picture_facts(layout))
        return len(self.facts) - 1
