"""The file of a trace: JSON that Perfetto, Chrome's tracing page and `shardwise view` open.

- `pid` is the rank, and metadata names it; `tid` 0 are operators, 1 and on moves that run at the same
  time, 1000 waiting outside of moves.
- `cat` is "operator", "move" or "wait". A move is cut in two: *wait* until the last of the ranks that it receives from
  has begun the same move, *move* from then on. So a rank that comes late shows as the others' waiting.
  Agreements before a move ("redistribute: agree") are waiting as well, and so is the time in which the
  program has to wait for a move in the background ("linear, ahead: wait").
- `ts` and `dur` are microseconds on the clock of the first rank. `args` of operators: `from` and `to` in the notation,
  the user's `line`, and `pass`; of moves also `bytes` that the rank receives, `sent_bytes`, `moved_bytes` of all ranks.
  Exchanges of rows that values decide about (lookups, tokens of experts) have neither layouts nor `moved_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.tensor.recorder import FIRST_MOVES, OPERATORS, WAITS

MOVE, WAIT = "move", "wait"


def merge_parts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document from the parts of all ranks, the first of which has the clock that counts.

    >>> span = {"name": "f", "category": "operator", "begin": 1000, "end": 3000, "track": 0, "details": {}}
    >>> merged = merge_parts([{"rank": 0, "clock": [[0, 10]], "spans": [span]}])
    >>> merged["traceEvents"][-1]["dur"]
    2.0
    """
    offsets = {part["rank"]: find_offset(parts[0]["clock"], part["clock"]) for part in parts}
    begins = _find_begins(parts, offsets)
    zero = min((span["begin"] + offsets[p["rank"]] for p in parts for span in p["spans"]), default=0)
    events: list[dict[str, Any]] = []
    for part in parts:
        events += _name_tracks(part)
        for span in part["spans"]:
            events += _make_events(part["rank"], span, offsets[part["rank"]], zero, begins)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"made_by": "shardwise.trace", "version": 1}}


def find_offset(clock: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """What to add to another rank's times to have those of the first, from exchanges that both took part in.

    An exchange ends after every rank began it, so each gives a bound in both directions. Clocks for which no difference
    is proved are taken as one: ranks of a host share their clock.

    >>> find_offset([[0, 10], [20, 30]], [[1000, 1010], [1020, 1030]])
    -1000
    >>> find_offset([[0, 10]], [[2, 12]])
    0
    """
    low = max((mine[0] - theirs[1] for mine, theirs in zip(clock, other, strict=True)), default=0)
    high = min((mine[1] - theirs[0] for mine, theirs in zip(clock, other, strict=True)), default=0)
    return 0 if low <= 0 <= high else (low + high) // 2


def _find_begins(parts: Sequence[Mapping[str, Any]], offsets: Mapping[int, int]) -> dict[tuple[str, int], int]:
    """When each rank began each move."""
    found: dict[tuple[str, int], int] = {}
    for part in parts:
        for span in part["spans"]:
            if span.get("move"):
                found[span["move"], part["rank"]] = span["begin"] + offsets[part["rank"]]
    return found


def _name_tracks(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rank = part["rank"]
    yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for track in sorted({span["track"] for span in part["spans"]} | {0}):
        name = {OPERATORS: "operators", FIRST_MOVES: "moves", WAITS: "waiting"}.get(track, f"moves {track}")
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _make_events(
    rank: int, span: Mapping[str, Any], offset: int, zero: int, begins: Mapping[tuple[str, int], int]
) -> Iterator[dict[str, Any]]:
    begin, end = span["begin"] + offset, span["end"] + offset
    if span["category"] != MOVE:
        yield _make_event(rank, span, span["category"], begin - zero, end - zero)
        return
    others = [begins[span["move"], source] for source in span["sources"] if (span["move"], source) in begins]
    ready = min(end, max([begin, *others]))
    if ready > begin:
        yield _make_event(rank, span, WAIT, begin - zero, ready - zero)
    yield _make_event(rank, span, MOVE, ready - zero, end - zero)


def _make_event(rank: int, span: Mapping[str, Any], category: str, begin: int, end: int) -> dict[str, Any]:
    return {
        "name": span["name"],
        "cat": category,
        "ph": "X",
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "pid": rank,
        "tid": span["track"],
        "args": span["details"],
    }
