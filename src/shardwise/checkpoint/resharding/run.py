"""Resharding a checkpoint on disk: from any layout, number of ranks and format to any other, without a process group.

1. Every tensor gets its layout; the files of the new checkpoint are planned, and cut into segments.
2. Workers copy segments from the mapped source, a block at a time, and check every block of the source on the way.
   Finished segments are noted, so a run that was killed is taken up where it stopped.
3. Headers and the index come last; then the folder is put in place atomically.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint import folders
from shardwise.checkpoint.assign import TensorToSave
from shardwise.checkpoint.checksums import checksum
from shardwise.checkpoint.converting.conversion import Conversion
from shardwise.checkpoint.converting.elements import converted_dtype, find_cast_dtype
from shardwise.checkpoint.converting.name_map import NameMap
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.files import PinnedFolder, PositionedFile, write_synced
from shardwise.checkpoint.formats.base import FilePlan, Format, SaveRequest, digest_files
from shardwise.checkpoint.formats.table import BUILT_IN, find_format
from shardwise.checkpoint.index import Json
from shardwise.checkpoint.resharding.companions import digest_companions, read_companions
from shardwise.checkpoint.resharding.layouts import ChosenLayouts, LayoutPlan, choose_layouts
from shardwise.checkpoint.resharding.plan import RangeSums, Segment, join_sums, plan_segments
from shardwise.checkpoint.resharding.pool import CopyJob, copy_in_processes, copy_in_this_process, divide_memory
from shardwise.checkpoint.resharding.work import ReshardWorkFolder, select_finished_segments
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES, Store, open_store
from shardwise.geometry import DType, ShardingSpec

_MIN_BYTES_PER_WORKER = 128 << 20
_MAX_WORKERS = 8


@dataclass(frozen=True)
class ReshardReport:
    """What a reshard did. `kept_bytes` of `bytes` were there from an earlier run; `seconds` are those of this one.

    `unfit`: tensors that one layout for all did not fit. `left_out`: entries that the
    format has no place for, or that cannot be read. `copied`: files that were copied along.
    """

    path: Path
    format: str
    tensors: int
    files: int
    ranks: tuple[int, ...]
    bytes: int
    kept_bytes: int
    seconds: float
    workers: int
    unfit: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()


def reshard(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    plan: LayoutPlan | None = None,
    layout: ShardingSpec | str | None = None,
    ranks: int | None = None,
    format: str = "shardwise",
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    names: NameMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    config: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    max_file_bytes: int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    resume: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ReshardReport:
    """Rewrite a checkpoint in another layout, for other ranks, names or another format. One process calls.

    - `plan` is a `shardwise.nn.ModelPlan`; or `layout` is one layout for all tensors, as a text such as "S(0)" (with
      `ranks`) or "on dp=2,tp=4: R, S(1)"; with neither, tensors keep their layouts.
    - `only`, `exclude`: globs of stored names to take, and not to take.
    - `names`: a `NameMap`, its TOML file, or a dict of patterns and new names. `dtype`: convert floats, as in "bf16".
    - `config`: the folder whose `config.json` and tokenizer files are copied along (format "hf"); else the source's.
    - `workers`: processes to copy with; one copies in this process. `max_buffer_bytes` bounds the memory of all.
    - `verify`: check every block of the source before it is used.
    - `resume`: resume a run with the same arguments that was killed; otherwise start over.
    - `progress` is called with the bytes done and the total bytes.

    >>> import tempfile, torch, shardwise
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shardwise.save({"w": torch.arange(6.0).reshape(3, 2), "step": 7}, f"{folder}/a")
    ...     report = reshard(f"{folder}/a", f"{folder}/b", layout="S(0)", ranks=2)
    ...     report.files, report.bytes, shardwise.open(f"{folder}/b")["w"].layout.local_shapes(1)
    (2, 24, ((1, 2),))
    """
    started = time.monotonic()
    _check_reshard_arguments(workers, max_buffer_bytes, max_file_bytes, ranks)
    source, target, kind = *_check_paths(src, dst), find_format(format)
    wanted, given = None if dtype is None else find_cast_dtype(dtype), None if names is None else NameMap.of(names)
    conversion = Conversion(tuple(only), tuple(exclude), given, kind.model_only)
    with closing(open_store(source, divide_memory(max_buffer_bytes, 1)[1])) as store:
        left_out, store.index = conversion.left_out(store.index), conversion.apply(store.index)
        chosen = _choose_target_layouts(store, plan, layout, ranks, kind)
        files = _plan_target(store, chosen, kind, max_file_bytes, wanted)
        beside = _read_beside(store, kind, config, wanted)
        request = ConversionRequest(source, target, kind, conversion, wanted, beside, overwrite, verify)
        kept, used = ReshardRun(store, files, request, workers, max_buffer_bytes, progress).run(resume)
    return ReshardReport(
        path=target,
        format=format,
        tensors=len(files.tensors),
        files=len(files.all_files()),
        ranks=chosen.ranks if kind.has_layouts else (),
        bytes=sum(tensor.nbytes for tensor in files.tensors),
        kept_bytes=kept,
        seconds=time.monotonic() - started,
        workers=used,
        unfit=chosen.unfit,
        left_out=(*left_out, *files.left_out),
        copied=tuple(beside),
    )


def _check_paths(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> tuple[Path, Path]:
    source, target = folders.absolute_path(src), folders.absolute_path(dst)
    if source == target:
        raise CheckpointError(f"{source} is both source and destination; choose another name for the new checkpoint")
    if source in target.parents:
        raise CheckpointError(f"{target} is inside the source {source}; choose a path outside it")
    return source, target


def _read_beside(
    store: Store, format: Format, config: str | os.PathLike[str] | None, dtype: DType | None
) -> dict[str, bytes]:
    """The files to copy along, from the folder that was named or from the source."""
    if config is None:
        return read_companions(store.pinned, format, dtype, required=False)
    if not format.companions:
        raise CheckpointError(f"a checkpoint of format {format.name!r} has no configuration beside it; omit config")
    with PinnedFolder(Path(config)) as folder:
        return read_companions(folder, format, dtype, required=True)


def _check_reshard_arguments(
    workers: int | None, max_buffer_bytes: int, max_file_bytes: int | None, ranks: int | None
) -> None:
    limits = {"workers": workers, "ranks": ranks, "max_file_bytes": max_file_bytes}
    for name, value in limits.items():
        if value is not None and value < 1:
            raise CheckpointError(f"{name} must be at least 1, got {value}")
    if max_buffer_bytes < 1 << 20:
        raise CheckpointError(f"max_buffer_bytes must be at least 1048576 (1 MiB), got {max_buffer_bytes}")


def _choose_target_layouts(
    store: Store, plan: LayoutPlan | None, layout: ShardingSpec | str | None, ranks: int | None, format: Format
) -> ChosenLayouts:
    if not format.has_layouts and not (plan is None and layout is None and ranks is None):
        raise CheckpointError(f"a {format.title} folder stores every tensor whole; omit plan, layout and ranks")
    return choose_layouts(store.index, plan, layout, ranks)


def _plan_target(
    store: Store, chosen: ChosenLayouts, format: Format, max_file_bytes: int | None, dtype: DType | None
) -> FilePlan:
    tensors = [
        TensorToSave(entry.name, converted_dtype(entry.dtype, dtype), chosen.layouts[entry.name])
        for entry in store.index.tensors.values()
    ]
    ranks = chosen.ranks if format.has_layouts and chosen.ranks else (0,)
    return format.plan_files(SaveRequest(tensors, store.index.tree, ranks, max_file_bytes, store.index.opaque))


def _check_destination(path: Path, overwrite: bool, besides: Collection[str]) -> None:
    folders.recover_commit(path)
    if overwrite:
        folders.check_target(path, besides)
    elif path.exists() and not folders.is_empty(path):
        raise CheckpointError(f"{path} exists; choose another name, or pass overwrite=True (--overwrite) to replace it")


def fingerprint_source(store: Store) -> str:
    """What identifies a source: its index, and the length and time of every file."""
    rows = digest_files(store.pinned, [file.name for file in store.index.files])
    return checksum(json.dumps([store.digest, rows]).encode())


@dataclass(frozen=True)
class ConversionRequest:
    """What is converted to what. `beside`: files that are copied along, by name."""

    source: Path
    path: Path
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

    def run(self, resume: bool) -> tuple[int, int]:
        """Do it; return the bytes that were there, and the number of workers."""
        segments, path = plan_segments(self.target, self.store.index), self.request.path
        asked = {**self.request.to_json(), **self._digests(segments)}
        with ReshardWorkFolder(path) as work:
            token = work.find_unfinished(asked) if resume else None
            if token is not None and work.finish_commit(token):
                work.remove()
                return sum(s.nbytes for s in segments), 0
            _check_destination(path, self.request.overwrite, self.request.beside)
            token, done = work.begin(asked, token if work.files.exists() else None)
            kept, workers = self._copy(work, segments, select_finished_segments(segments, done))
            if fingerprint_source(self.store) != asked["source state"]:
                raise CheckpointError(f"{self.store.folder} was changed while it was read; start over")
            work.commit(token)
        return kept, workers

    def _digests(self, segments: Sequence[Segment]) -> dict[str, str]:
        plan = json.dumps([[f.name, f.bytes] for f in self.target.all_files()]) + repr(segments)
        return {"source state": fingerprint_source(self.store), "files to write": checksum(plan.encode())}

    def _copy(self, work: ReshardWorkFolder, segments: Sequence[Segment], known: dict[int, Any]) -> tuple[int, int]:
        work.make_files(self.target.all_files())
        for number in range(len(self.store.index.files)):
            self.store.verify_header(number)
        total, finished, kept = sum(s.nbytes for s in segments), 0, 0
        job = self._job(work)
        workers, limit = divide_memory(self.max_buffer_bytes, self._choose_worker_count(total))
        if workers == 1:
            copied = copy_in_this_process(self.store, job, segments, known)
        else:
            copied = copy_in_processes(job, segments, known, workers, limit)
        found: dict[int, Sequence[RangeSums]] = {}
        with closing(copied):
            for one in copied:
                found[one.number] = one.sums
                if not one.kept:
                    work.log_segment(one.number, one.sums)
                size = segments[one.number].nbytes
                finished, kept = finished + size, kept + size * one.kept
                if self.progress is not None:
                    self.progress(finished, total)
        self._finish(work, segments, found)
        return kept, workers

    def _job(self, work: ReshardWorkFolder) -> CopyJob:
        asked = self.request
        return CopyJob(
            source=asked.source,
            digest=self.store.digest,
            folder=work.files,
            marks=work.marks,
            verify=asked.verify,
            crc=self.target.crc,
            conversion=asked.conversion.to_json(),
            dtype=None if asked.dtype is None else asked.dtype.torch_name,
        )

    def _choose_worker_count(self, total: int) -> int:
        if self.store.format not in BUILT_IN:
            if self.workers not in (None, 1):
                raise CheckpointError(
                    f"the source has the format {self.store.format.name!r}, which was added in this process: worker "
                    "processes do not know it; pass workers=1"
                )
            return 1
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(_MAX_WORKERS, cores, total // _MIN_BYTES_PER_WORKER))

    def _finish(
        self, work: ReshardWorkFolder, segments: Sequence[Segment], found: dict[int, Sequence[RangeSums]]
    ) -> None:
        """Write what surrounds the items, and the index."""
        written = join_sums(self.target, segments, found)
        for file, sums in written:
            with PositionedFile(work.files / file.name) as output:
                for position, data in self.target.finish_file(file, sums):
                    output.write(position, data)
        for name, data in self.request.beside.items():
            write_synced(work.files / name, data)
        index = self.target.make_index(written)
        if index is not None:
            write_synced(work.files / index[0], index[1])
