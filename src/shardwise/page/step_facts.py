"""What does the page need to show a recorded step? The events of each rank as columns, and sums by what they do.

A trace is in Chrome's format, as `shardwise.trace` writes it: an event of phase X has a rank (`pid`), a start and a
duration in microseconds, and a category: "operator", "move" or "wait". Its arguments have bytes, layouts, and the line
of the user's program.

1. Events of one rank that lie within each other are drawn below each other: a depth is worked out for each.
2. Equal events (name, category, arguments) are described once.
3. Of very many events the longest are sent; the sums are those of all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.geometry import LayoutError
from shardwise.page.layout_facts import shorten

MOST_EVENTS = 40_000
KINDS = ("operator", "move", "wait", "other")
LONGEST_TEXT = 200


class StepEvent(NamedTuple):
    """One event: the rank, start and duration in microseconds, and the number of what it is."""

    rank: int
    start: float
    duration: float
    what: int


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
        data = json.loads(Path(path).read_text(encoding="utf-8"))
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
    last = max((event.start + event.duration for event in events), default=0.0)
    ranks = sorted({event.rank for event in events})
    depths = find_depths(events)
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
        "depths": [depths[i] for i in shown],
        "count": len(events),
        "totals": _totals(events, len(kinds)),
        "by_rank": _by_rank(events, kinds, places, depths),
    }


def read_events(found: Sequence[Any]) -> tuple[list[StepEvent], list[EventKind]]:
    """The complete events in order of rank and start, and the distinct descriptions."""
    numbers: dict[EventKind, int] = {}
    events = []
    for event in found:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        what = numbers.setdefault(_describe(event), len(numbers))
        try:
            events.append(StepEvent(int(event["pid"]), float(event["ts"]), float(event.get("dur", 0)), what))
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"an event named {str(event.get('name'))!r} has no numbers for pid and ts") from error
    events.sort(key=lambda event: (event.rank, event.start, -event.duration))
    return events, list(numbers)


def _describe(event: Mapping[str, Any]) -> EventKind:
    given = event.get("args")
    arguments: Mapping[str, Any] = given if isinstance(given, dict) else {}
    kind = str(event.get("cat", "other"))
    sent = arguments.get("bytes")
    layouts = [str(arguments[key]) for key in ("from", "to") if arguments.get(key)]
    return EventKind(
        shorten(str(event.get("name", "?")), LONGEST_TEXT),
        kind if kind in KINDS else "other",
        sent if isinstance(sent, int) else 0,
        shorten(str(arguments.get("source") or ""), LONGEST_TEXT),
        shorten(" -> ".join(layouts), 2 * LONGEST_TEXT),
    )


def find_depths(events: Sequence[StepEvent]) -> list[int]:
    """How many events of the same rank enclose each event; the events are sorted by rank and start.

    >>> find_depths([StepEvent(0, 0, 10, 0), StepEvent(0, 2, 3, 0), StepEvent(0, 6, 4, 0), StepEvent(1, 1, 1, 0)])
    [0, 1, 1, 0]
    """
    depths: list[int] = []
    open_ends: list[float] = []
    rank = None
    for event in events:
        if event.rank != rank:
            rank, open_ends = event.rank, []
        while open_ends and open_ends[-1] <= event.start:
            open_ends.pop()
        depths.append(len(open_ends))
        open_ends.append(event.start + event.duration)
    return depths


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
    events: Sequence[StepEvent], kinds: Sequence[EventKind], places: Mapping[int, int], depths: Sequence[int]
) -> dict[str, list[float]]:
    """Microseconds of each rank by kind; time within an event counts for the inner one only."""
    sums = {kind: [0.0] * len(places) for kind in KINDS}
    enclosing: list[StepEvent] = []
    for event, depth in zip(events, depths, strict=True):
        enclosing = [*enclosing[:depth], event]
        sums[kinds[event.what].kind][places[event.rank]] += event.duration
        if depth:
            outer = enclosing[depth - 1]
            sums[kinds[outer.what].kind][places[event.rank]] -= event.duration
    return {kind: [round(max(0.0, value), 2) for value in values] for kind, values in sums.items() if any(values)}
