"""A trace of one step on all ranks, in one file.

1. All ranks enter together: a few small exchanges show how far their clocks are apart.
2. While the block runs, each rank notes its operators and moves (`shardwise.tensor.recorder`).
3. At the end the notes are sent to the first rank, which writes the file (`chrome`).

A rank that raises inside the block cannot wait for the others: it writes its own part next to the file, and the
exception says so. Ranks that it leaves alone do the same.

The file of a trace: JSON that Perfetto, Chrome's tracing page and `shardwise view` open.

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

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardwise.comm import Comm, CommError, agree, any_rank, default_comm, gather_values
from shardwise.ops.explain import active_watchers
from shardwise.tensor.recorder import FIRST_MOVES, OPERATORS, WAITS, StepRecorder, recorders

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


_CLOCK_ROUNDS = 4


@contextmanager
def trace(path: str | os.PathLike[str], comm: Comm | None = None) -> Iterator[None]:
    """Write what all ranks do inside a `with` block to a file for Perfetto, Chrome or `shardwise view`.

    Every rank enters and leaves the block; the first rank writes. Operators, forward and backward, and moves have their
    layouts and the line of your code; moves have their bytes, and waiting for other ranks is apart from moving.

    >>> import shardwise, tempfile
    >>> def body(comm):
    ...     x = shardwise.ones(shardwise.ChunkSpec(0, ranks=2), 4, 2)
    ...     with trace(path):
    ...         x.redistribute(shardwise.ChunkSpec(1, ranks=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "step.json"
    ...     _ = shardwise.run_local(body, 2)
    ...     events = json.loads(path.read_text())["traceEvents"]
    >>> sorted({(e["pid"], e["name"], e["args"]["bytes"]) for e in events if e.get("cat") == "move"})
    [(0, 'redistribute', 8), (1, 'redistribute', 8)]
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"trace takes the path of a file to write, such as 'step.json', got {type(path).__name__}")
    comm, target = comm or default_comm(), Path(path)
    recorder = StepRecorder(comm.rank)
    problem = None
    if comm.rank in recorders:
        problem = f"rank {comm.rank} is being traced already; a trace ends with its `with` block"
    elif not target.absolute().parent.is_dir():
        problem = f"{target} cannot be written: there is no folder {target.absolute().parent}; make it first"
    agree(comm, {"path": str(target)}, label="trace", problem=problem)
    clock = [_exchange_times(comm) for _ in range(_CLOCK_ROUNDS)]
    recorders[comm.rank] = recorder
    active_watchers[0] += 1
    try:
        yield
    except BaseException as error:
        _stop(comm)
        own = _write_part(target, recorder, clock)
        error.add_note(f"the trace of rank {comm.rank} up to here is in {own}")
        raise
    _stop(comm)
    _write_together(comm, target, recorder, clock)


def _stop(comm: Comm) -> None:
    active_watchers[0] -= 1
    recorders.pop(comm.rank, None)


def _exchange_times(comm: Comm) -> tuple[int, int]:
    before = time.monotonic_ns()
    any_rank(comm, False, label="trace: clocks")
    return before, time.monotonic_ns()


def _part_of(recorder: StepRecorder, clock: list[tuple[int, int]]) -> dict[str, Any]:
    return {"rank": recorder.rank, "clock": clock, "spans": [asdict(span) for span in recorder.spans]}


def _write_part(target: Path, recorder: StepRecorder, clock: list[tuple[int, int]]) -> Path:
    """Write the trace of one rank alone."""
    own = target.with_suffix(f".rank{recorder.rank}{target.suffix}")
    own.write_text(json.dumps(merge_parts([_part_of(recorder, clock)])))
    return own


def _write_together(comm: Comm, target: Path, recorder: StepRecorder, clock: list[tuple[int, int]]) -> None:
    """Send the notes of all ranks to the first, which writes the file; what goes wrong is raised on all of them."""
    try:
        parts = gather_bytes(comm, json.dumps(_part_of(recorder, clock)).encode())
    except CommError as error:
        own = _write_part(target, recorder, clock)
        error.add_note(f"the ranks could not put their traces together; that of rank {comm.rank} is in {own}")
        raise
    problem = None
    if parts:
        try:
            target.write_text(json.dumps(merge_parts([json.loads(part) for part in parts])))
        except OSError as error:
            problem = f"the trace cannot be written to {target}: {error.strerror or error}"
    agree(comm, {}, label="trace", problem=problem)


def gather_bytes(comm: Comm, data: bytes) -> list[bytes]:
    """The bytes of all ranks on the first one, in order; nothing on the others."""
    first, sizes = comm.ranks[0], gather_values(comm, len(data), label="trace: sizes")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
    if comm.rank != first:
        comm.exchange({first: [mine]}, {}, label="trace").wait()
        return []
    others = {r: torch.empty(n, dtype=torch.uint8, device=comm.device) for r, n in sizes.items()}
    comm.exchange({}, {r: [t] for r, t in others.items() if r != first}, label="trace").wait()
    others[first] = mine
    return [bytes(others[rank].cpu().numpy()) for rank in comm.ranks]
