"""What does the page need to show a recorded step? The events of each rank as columns, and sums by what they do.

A trace is in Chrome's format, as `shardwise.trace` writes it: an event of phase X has a rank (`pid`), a track (`tid`),
a start and a duration in microseconds, and a category: "operator", "move" or "wait". Its arguments have bytes, layouts
(`from`, `to`), and the `line` of the user's program.

1. Events of one track that lie within each other are drawn below each other, and so are tracks: each event has a lane.
2. Equal events (name, category, arguments) are described once.
3. Of very many events the longest are sent; the sums are those of all.
4. A moment of a rank belongs to the event that began last: a move inside an operator counts as moving, an operator that
   runs while a move is under way as computing.

What does the page need to show a checkpoint? Its tensors as columns, its files, and the balance over ranks.

Tensors that are cut alike share one picture of their layout: the first so many pictures are part of the facts, others
are asked for by the number of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from shardwise._text import parse_json
from shardwise.checkpoint.index import TensorEntry
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.verify import StoredLayouts, measure_balance
from shardwise.geometry import Layout, LayoutError
from shardwise.page.layout_facts import rank_facts, shape_facts, shorten

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
