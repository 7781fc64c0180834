"""A trace of one step on all ranks, in one file.

1. All ranks enter together: a few small exchanges show how far their clocks are apart.
2. While the block runs, each rank notes its operators and moves (`shardwise.tensor.recorder`).
3. At the end the notes are sent to the first rank, which writes the file (`chrome`).

A rank that raises inside the block cannot wait for the others: it writes its own part next to the file, and the
exception says so. Ranks that it leaves alone do the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardwise.comm import Comm, CommError, agree, default_comm
from shardwise.ops.engine.explain import active_watchers
from shardwise.tensor.recorder import StepRecorder, recorders
from shardwise.tracing.chrome import merge_parts

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
    comm, target = comm or default_comm(), Path(path)
    recorder = StepRecorder(comm.rank)
    problem = None
    if comm.rank in recorders:
        problem = f"rank {comm.rank} is being traced already; a trace ends with its `with` block"
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
    comm.all_gather_bytes(b"", label="trace: clocks")
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
    first, sizes = comm.ranks[0], comm.all_gather_bytes(str(len(data)).encode(), label="trace: sizes")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
    if comm.rank != first:
        comm.exchange({first: [mine]}, {}, label="trace").wait()
        return []
    others = {
        r: torch.empty(int(n), dtype=torch.uint8, device=comm.device) for r, n in zip(comm.ranks, sizes, strict=True)
    }
    comm.exchange({}, {r: [t] for r, t in others.items() if r != first}, label="trace").wait()
    others[first] = mine
    return [bytes(others[rank].cpu().numpy()) for rank in comm.ranks]
