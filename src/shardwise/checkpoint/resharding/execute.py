"""One run of a reshard: segments are copied by workers, then files are completed and put in place.

To a local folder: everything is written in a work folder, from which a run that was killed is resumed.
To a URL: one file after another is made in a local folder, and uploaded when its last segment is there; the index comes
last.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.converting.conversion import Conversion
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import PositionedFile, write_synced
from shardwise.checkpoint.formats.base import FilePlan, Format, ItemSums, PlannedFile, digest_files
from shardwise.checkpoint.formats.table import BUILT_IN
from shardwise.checkpoint.index import Json
from shardwise.checkpoint.resharding.companions import digest_companions
from shardwise.checkpoint.resharding.plan import RangeSums, Segment, join_file_sums, join_sums, plan_segments
from shardwise.checkpoint.resharding.pool import (
    CopiedSegment,
    CopyJob,
    copy_in_processes,
    copy_in_this_process,
    divide_memory,
)
from shardwise.checkpoint.resharding.staging import ReshardStaging
from shardwise.checkpoint.resharding.work import ReshardWorkFolder, select_finished_segments
from shardwise.checkpoint.storage.place import Place, check_destination
from shardwise.checkpoint.storage.remote_path import RemotePath
from shardwise.checkpoint.store import Store
from shardwise.geometry import DType

_MIN_BYTES_PER_WORKER = 128 << 20
_MAX_WORKERS = 8


def fingerprint_source(store: Store) -> str:
    """What identifies a source: its index, and the length and time of every file."""
    rows = digest_files(store.pinned, [file.name for file in store.index.files])
    return checksum(json.dumps([store.digest, rows]).encode())


@dataclass(frozen=True)
class ConversionRequest:
    """What is converted to what. `beside`: files that are copied along, by name."""

    source: Place
    path: Place
    format: Format
    conversion: Conversion
    dtype: DType | None
    beside: dict[str, bytes]
    overwrite: bool
    verify: bool

    def to_json(self) -> Json:
        """All that determines the result, besides the content of the source and the plan of the files."""
        return {
            "source": str(self.source),
            "format": self.format.name,
            "verify": self.verify,
            "names": self.conversion.to_json(),
            "files beside": digest_companions(self.beside),
        }


@dataclass(frozen=True)
class ReshardRun:
    """One run: from the plan of a target to the checkpoint in its place."""

    store: Store
    target: FilePlan
    request: ConversionRequest
    workers: int | None
    max_buffer_bytes: int
    progress: Callable[[int, int], None] | None

    def run(self, resume: bool, token: str) -> tuple[int, int]:
        """Do it; return the bytes that were there, and the number of workers."""
        path = self.request.path
        return self._run_local(path, resume) if isinstance(path, Path) else (0, self._run_remote(path, token))

    def _run_local(self, path: Path, resume: bool) -> tuple[int, int]:
        segments = plan_segments(self.target, self.store.index)
        asked = {**self.request.to_json(), **self._digests(segments)}
        with ReshardWorkFolder(path) as work:
            token = work.find_unfinished(asked) if resume else None
            if token is not None and work.finish_commit(token):
                work.remove()
                return sum(s.nbytes for s in segments), 0
            check_destination(path, self.request.overwrite, self.request.beside)
            token, done = work.begin(asked, token if work.files.exists() else None)
            kept, workers = self._copy_to_folder(work, segments, select_finished_segments(segments, done))
            self._check_source(asked["source state"])
            work.commit(token)
        return kept, workers

    def _digests(self, segments: Sequence[Segment]) -> dict[str, str]:
        plan = json.dumps([[f.name, f.bytes] for f in self.target.all_files()]) + repr(segments)
        return {"source state": fingerprint_source(self.store), "files to write": checksum(plan.encode())}

    def _check_source(self, before: str) -> None:
        if fingerprint_source(self.store) != before:
            raise CheckpointError(f"{self.store.folder} was changed while it was read; start over")

    def _copy_to_folder(
        self, work: ReshardWorkFolder, segments: Sequence[Segment], known: dict[int, Any]
    ) -> tuple[int, int]:
        work.make_files(self.target.all_files())
        copied, workers = self._start_copy(work.files, work.marks, segments, known)
        found: dict[int, Sequence[RangeSums]] = {}
        kept = 0
        with closing(copied):
            for one in copied:
                found[one.number] = one.sums
                if not one.kept:
                    work.log_segment(one.number, one.sums)
                kept += segments[one.number].nbytes * one.kept
        written = join_sums(self.target, segments, found)
        for file, sums in written:
            self._finish_file(work.files, file, sums)
        for name, data in self.request.beside.items():
            write_synced(work.files / name, data)
        index = self.target.make_index(written)
        if index is not None:
            write_synced(work.files / index[0], index[1])
        return kept, workers

    def _run_remote(self, path: RemotePath, token: str) -> int:
        segments, source_state = (
            plan_segments(self.target, self.store.index, by_file=True),
            fingerprint_source(self.store),
        )
        check_destination(path, self.request.overwrite, self.request.beside)
        files, left = self.target.all_files(), Counter(segment.file for segment in segments)
        written: dict[int, list[ItemSums]] = {}
        found: dict[int, dict[int, Sequence[RangeSums]]] = {number: {} for number in range(len(files))}
        with ReshardStaging(path, token) as staging:
            staging.make_files(files)
            copied, workers = self._start_copy(staging.files, staging.marks, segments, {})
            with closing(copied):
                for number in (n for n in range(len(files)) if not left[n]):
                    written[number] = self._upload_file(staging, files[number], segments, {})
                for one in copied:
                    number = segments[one.number].file
                    found[number][one.number] = one.sums
                    left[number] -= 1
                    if not left[number]:
                        written[number] = self._upload_file(staging, files[number], segments, found.pop(number))
            self._check_source(source_state)
            index = self.target.make_index([(file, written[number]) for number, file in enumerate(files)])
            staging.commit(files, index, self.request.beside)
        return workers

    def _upload_file(
        self,
        staging: ReshardStaging,
        file: PlannedFile,
        segments: Sequence[Segment],
        done: Mapping[int, Sequence[RangeSums]],
    ) -> list[ItemSums]:
        sums = join_file_sums(self.target, file, segments, done)
        self._finish_file(staging.files, file, sums)
        staging.deliver(file.name)
        return sums

    def _finish_file(self, folder: Path, file: PlannedFile, sums: Sequence[ItemSums]) -> None:
        """Write what surrounds the items."""
        with PositionedFile(folder / file.name) as output:
            for position, data in self.target.finish_file(file, sums):
                output.write(position, data)

    def _start_copy(
        self, folder: Path, marks: Path, segments: Sequence[Segment], known: Mapping[int, Sequence[RangeSums]]
    ) -> tuple[Generator[CopiedSegment, None, None], int]:
        """The segments as they are copied, and how many workers do so."""
        for number in range(len(self.store.index.files)):
            self.store.verify_header(number)
        total = sum(s.nbytes for s in segments)
        job = self._job(folder, marks)
        workers, limit = divide_memory(self.max_buffer_bytes, self._choose_worker_count(total))
        if workers == 1:
            copied = copy_in_this_process(self.store, job, segments, known)
        else:
            copied = copy_in_processes(job, segments, known, workers, limit)
        return self._show_progress(copied, segments, total), workers

    def _show_progress(
        self, copied: Generator[CopiedSegment, None, None], segments: Sequence[Segment], total: int
    ) -> Generator[CopiedSegment, None, None]:
        finished = 0
        with closing(copied):
            for one in copied:
                yield one
                finished += segments[one.number].nbytes
                if self.progress is not None:
                    self.progress(finished, total)

    def _job(self, folder: Path, marks: Path) -> CopyJob:
        asked = self.request
        return CopyJob(
            source=str(asked.source),
            digest=self.store.digest,
            folder=folder,
            marks=marks,
            verify=asked.verify,
            crc=self.target.crc,
            conversion=asked.conversion.to_json(),
            dtype=None if asked.dtype is None else asked.dtype.torch_name,
        )

    def _choose_worker_count(self, total: int) -> int:
        reason = self._reason_for_one_process()
        if reason is not None:
            if self.workers not in (None, 1):
                raise CheckpointError(f"{reason}: worker processes do not know it; pass workers=1")
            return 1
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(_MAX_WORKERS, cores, total // _MIN_BYTES_PER_WORKER))

    def _reason_for_one_process(self) -> str | None:
        """What other processes could not read of the source."""
        if self.store.format not in BUILT_IN:
            return f"the source has the format {self.store.format.name!r}, which was added in this process"
        source = self.request.source
        if isinstance(source, RemotePath) and source.is_of_this_process:
            return f"{source} is in the memory of this process"
        return None
