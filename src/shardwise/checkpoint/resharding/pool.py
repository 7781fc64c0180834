"""Segments assigned to workers: in this process for one, else to processes that know nothing but how to copy."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import Json
from shardwise.checkpoint.resharding.copy import Copier, VerifiedBlocks
from shardwise.checkpoint.resharding.plan import RangeSums, Segment
from shardwise.checkpoint.resharding.worker import copy_or_keep_segment, task_json
from shardwise.checkpoint.store import Store
from shardwise.geometry import find_dtype

PROCESS_BYTES = 48 << 20
_LEAST, _MOST = 16 << 20, 64 << 20
_WORKER = "shardwise.checkpoint.resharding.worker"


@dataclass(frozen=True)
class CopyJob:
    """What all workers receive: where from, where to, and how."""

    source: str
    digest: str
    folder: Path
    marks: Path
    verify: bool
    crc: bool
    conversion: Json
    dtype: str | None


@dataclass(frozen=True, slots=True)
class CopiedSegment:
    """A segment that is in place: its number, its checksums, and whether an earlier run had put it there."""

    number: int
    sums: list[RangeSums]
    kept: bool


def divide_memory(limit: int, workers: int) -> tuple[int, int]:
    """How many workers fit a limit on memory, interpreters included, and what each may use for buffers and pages.

    >>> divide_memory(256 << 20, 8), divide_memory(32 << 20, 8), divide_memory(8 << 30, 8)
    ((3, 22369621), (1, 16777216), (8, 67108864))
    """
    while workers > 1 and limit - (workers + 1) * PROCESS_BYTES < workers * _LEAST:
        workers -= 1
    processes = workers + 1 if workers > 1 else 1
    return workers, min(_MOST, max(_LEAST, (limit - processes * PROCESS_BYTES) // workers))


def copy_in_this_process(
    store: Store, job: CopyJob, segments: Sequence[Segment], known: Mapping[int, Sequence[RangeSums]]
) -> Generator[CopiedSegment, None, None]:
    """Copy all segments in this process."""
    marks = VerifiedBlocks(store.index, job.marks) if job.verify else None
    copier = Copier(store, job.folder, marks, job.crc, None if job.dtype is None else find_dtype(job.dtype))
    for number, segment in enumerate(segments):
        sums, kept = copy_or_keep_segment(copier, segment, known.get(number))
        yield CopiedSegment(number, sums, kept)


def copy_in_processes(
    job: CopyJob, segments: Sequence[Segment], known: Mapping[int, Sequence[RangeSums]], workers: int, limit: int
) -> Generator[CopiedSegment, None, None]:
    """Copy all segments in worker processes, in any order; all have ended when this does."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[CopiedSegment | BaseException | None] = queue.SimpleQueue()
    for number in range(len(segments)):
        todo.put(number)
    processes = [_start_worker(job, limit) for _ in range(workers)]
    threads = [
        threading.Thread(target=_feed_worker, args=(process, segments, known, todo, done), daemon=True)
        for process in processes
    ]
    try:
        for thread in threads:
            thread.start()
        running = workers
        while running:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            running -= found is None
            if found is not None:
                yield found
    finally:
        _stop_workers(processes)


def _start_worker(job: CopyJob, limit: int) -> subprocess.Popen[bytes]:
    """A worker in a session of its own: Ctrl-C reaches this process alone, which stops its workers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    about = {name: str(value) if isinstance(value, Path) else value for name, value in vars(job).items()}
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps({**about, "limit": limit}).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        pass  # it has ended already; the first request will say so
    return process


def _feed_worker(
    process: subprocess.Popen[bytes],
    segments: Sequence[Segment],
    known: Mapping[int, Sequence[RangeSums]],
    todo: queue.SimpleQueue[int],
    done: queue.SimpleQueue[CopiedSegment | BaseException | None],
) -> None:
    """Send one worker segment after segment until there are no more."""
    try:
        while True:
            number = todo.get_nowait()
            done.put(_request_segment(process, number, segments[number], known.get(number)))
    except queue.Empty:
        done.put(None)
    except BaseException as error:
        done.put(error)


def _request_segment(
    process: subprocess.Popen[bytes], number: int, segment: Segment, known: Sequence[RangeSums] | None
) -> CopiedSegment:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(task_json(segment, known)).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        line = b""
    if not line.endswith(b"\n"):
        raise CheckpointError(
            f"a worker ended with exit status {process.wait()} while it wrote {segment.name}; what was done is kept: "
            "run the same again to continue"
        )
    reply = json.loads(line)
    if "error" in reply:
        raise CheckpointError(reply["error"])
    sums, kept = reply["result"]
    return CopiedSegment(number, [(text, crc) for text, crc in sums], kept)


def _stop_workers(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                continue  # what was buffered for a worker that has ended
