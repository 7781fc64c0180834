"""Resharding a checkpoint on disk: from any layout, number of ranks and format to any other, without a process group.

1. Every tensor gets its layout; the files of the new checkpoint are planned, and cut into segments.
2. Workers copy segments from the mapped source, a block at a time, and check every block of the source on the way. A
   file whose last segment is there gets its header, and is delivered.
3. The index comes last; then the checkpoint is put in place as every save is.

A reshard to a URL makes its files in a local folder, one after another, and uploads them. Nothing is resumed: a run
that fails removes what it has uploaded, and one that is killed leaves files that no index names, which the next save or
reshard to the URL removes. A reshard to the local folder `ckpt` works in `.ckpt.resharding-work` next to it, and a run
finds out from what is there how far the one before it came:

- `manifest.json` records the request, with a digest of the source and of all that determines the result;
- `journal` has a line for each segment that is copied and synced, with its checksums;
- `files` is the checkpoint to be, which becomes `.ckpt.saving-TOKEN`, and `identity` its inode;
- `verified` are the marks of source blocks that were checked in this run.

Which layout does each tensor get when a checkpoint is resharded? From a plan, from one text, or the one it has.

One layout for all tensors has to define what happens to those it does not fit:

1. A tensor without the dim that an axis splits is replicated along that axis.
2. A tensor that still does not fit (sizes or groups that do not add up to its length, another grid, other pieces) is
   replicated on all ranks of the layout.

Which files are copied along with a model's tensors? Its configuration and tokenizer, so that it can be loaded.

They are small, and copied as they are; only the dtype in `config.json` follows that of the tensors.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from shardwise._progress import Progress, check_progress, show_progress
from shardwise._text import public
from shardwise.checkpoint import commit as folders
from shardwise.checkpoint.commit import (
    LocalSave,
    Place,
    check_apart,
    check_destination,
    find_place,
    new_save,
    open_plain_folder,
)
from shardwise.checkpoint.convert import Conversion, NameMap
from shardwise.checkpoint.files import (
    CheckpointError,
    PositionedFile,
    ReadableFolder,
    SaveFolder,
    make_folders,
    write_synced,
)
from shardwise.checkpoint.formats import BUILT_IN, find_format
from shardwise.checkpoint.formats.base import (
    FilePlan,
    Format,
    ItemSums,
    PlannedFile,
    SaveRequest,
    TensorToSave,
    digest_files,
)
from shardwise.checkpoint.index import Index, Json, checksum, stored_layout
from shardwise.checkpoint.remote import RemotePath
from shardwise.checkpoint.reshard_copy import (
    CopiedSegment,
    CopyJob,
    RangeSums,
    Segment,
    copy_in_processes,
    copy_in_this_process,
    divide_memory,
    join_sums,
    plan_segments,
)
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES, Store, converted_dtype, find_cast_dtype, open_store
from shardwise.geometry import (
    DType,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingSpec,
    parse_placements,
    parse_spec,
)

AXIS = "ranks"


class LayoutPlan(Protocol):
    """The interface of a plan by pattern, such as `shardwise.nn.ModelPlan`."""

    def specs_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, ShardingSpec]:
        """The spec of every tensor, by name."""


@dataclass(frozen=True)
class ChosenLayouts:
    """The layout of every tensor, and the names of those that one layout for all did not fit."""

    layouts: Mapping[str, Layout]
    unfit: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for layout in set(self.layouts.values()) for rank in layout.ranks}))


def choose_layouts(
    index: Index, plan: LayoutPlan | None, layout: ShardingSpec | str | None, ranks: int | None
) -> ChosenLayouts:
    """The layouts that the arguments ask for, checked against all tensors of a checkpoint."""
    shapes = {name: entry.shape for name, entry in index.tensors.items()}
    if plan is not None and layout is not None:
        raise CheckpointError("both a plan and a layout were passed; pass one of them")
    if plan is not None:
        chosen = ChosenLayouts({name: spec.layout(shapes[name]) for name, spec in plan.specs_of(shapes).items()})
    elif layout is not None:
        chosen = fit_layouts(spec_for(layout, ranks), shapes)
        if shapes and len(chosen.unfit) == len(shapes):
            longest = max(shapes.values(), key=len)
            raise CheckpointError(
                f"the layout {layout} fits none of the {len(shapes)} tensors, which have up to {len(longest)} dims, as "
                f"in {list(longest)}; choose another one"
            )
    elif ranks is not None:
        raise CheckpointError(f"{ranks} ranks, but no layout for them; pass one such as 'S(0)'")
    else:
        return ChosenLayouts({name: stored_layout(entry) for name, entry in index.tensors.items()})
    if ranks is not None and chosen.layouts and len(chosen.ranks) != ranks:
        raise CheckpointError(
            f"{ranks} ranks were requested, but the {'plan' if layout is None else f'layout {layout}'} covers "
            f"{len(chosen.ranks)}; omit the number of ranks, or make both agree"
        )
    return chosen


def spec_for(layout: ShardingSpec | str, ranks: int | None) -> ShardingSpec:
    """The spec of a layout's text: a rule of the notation, or one placement for a number of ranks.

    >>> spec_for("S(0)", 4), spec_for("on dp=2,tp=2: R, S(1)", None)
    (MeshSpec(ranks=4, (Shard(0),)), MeshSpec(dp=2,tp=2, (Replicate(), Shard(1))))
    """
    if isinstance(layout, ShardingSpec):
        spec = layout
    elif layout.lstrip().startswith(("on ", "as ", "@")):
        spec = parse_spec(layout)
    else:
        placements = parse_placements(layout)
        if ranks is None or len(placements) != 1:
            raise CheckpointError(
                f"the layout {layout!r} does not say which ranks it is for; pass the number of ranks with a single "
                "placement, or write the mesh, as in 'on dp=2,tp=4: R, S(0)'"
            )
        spec = MeshSpec(Mesh.of(**{AXIS: ranks}), placements)
    if spec.reduction() is not None:
        raise CheckpointError(f"the layout {layout} leaves a reduction pending; a checkpoint stores reduced tensors")
    return spec


def fit_layouts(spec: ShardingSpec, shapes: Mapping[str, tuple[int, ...]]) -> ChosenLayouts:
    """One spec for all tensors; those that it does not fit are replicated, as the module docstring says."""
    known: dict[tuple[int, ...], tuple[Layout, bool]] = {}
    for shape in shapes.values():
        if shape not in known:
            known[shape] = _fit_layout(spec, shape)
    unfit = tuple(name for name, shape in shapes.items() if not known[shape][1])
    return ChosenLayouts({name: known[shape][0] for name, shape in shapes.items()}, unfit)


def _fit_layout(spec: ShardingSpec, shape: tuple[int, ...]) -> tuple[Layout, bool]:
    try:
        return spec.layout(shape), True
    except LayoutError:
        if isinstance(spec, MeshSpec):
            kept = [_drop_missing_dim(p, len(shape)) for p in spec.placements]
            return _layout_or_copies(
                MeshSpec(spec.mesh, kept, spec.order), shape, spec.mesh.ranks.reshape(-1).tolist()
            ), False
        return _replicated_layout(_ranks_of(spec), shape), False


def _layout_or_copies(spec: MeshSpec, shape: tuple[int, ...], ranks: Iterable[int]) -> Layout:
    try:
        return spec.layout(shape)
    except LayoutError:
        return _replicated_layout(ranks, shape)


def _drop_missing_dim(placement: Placement, ndim: int) -> Placement:
    missing = isinstance(placement, Shard) and not -ndim <= placement.dim < ndim
    assert not isinstance(placement, Partial), "specs with a pending reduction are refused before"
    return Replicate() if missing else placement


def _replicated_layout(ranks: Iterable[int], shape: tuple[int, ...]) -> Layout:
    return MeshSpec(Mesh((AXIS,), list(ranks)), (Replicate(),)).layout(shape)


def _ranks_of(spec: ShardingSpec) -> list[int]:
    """The ranks of a chunk, grid or enumerable spec."""
    ranks = getattr(spec, "ranks", None)
    if ranks is None:
        raise CheckpointError(f"the layout {spec!r} fits only some tensors; pass a plan that says which")
    return [int(rank) for rank in np.unique(np.asarray(ranks))]


_CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")
_MAX_FILE_BYTES = 1 << 26


def read_companions(folder: ReadableFolder, format: Format, dtype: DType | None, required: bool) -> dict[str, bytes]:
    """The files of a folder that a format has beside its tensors; an error if some are `required` and there is none."""
    found = {name: folder.read(name, _MAX_FILE_BYTES) for name in format.companions if folder.has(name)}
    if required and _CONFIG not in found:
        raise CheckpointError(f"{folder.path}: it has no {_CONFIG}; pass the folder that has the model's")
    if dtype is not None and _CONFIG in found:
        found[_CONFIG] = _set_config_dtype(found[_CONFIG], dtype)
    return found


def _set_config_dtype(data: bytes, dtype: DType) -> bytes:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        return data  # copied as it is: whoever loads the model will say so
    keys = [key for key in _DTYPE_KEYS if isinstance(config, dict) and isinstance(config.get(key), str)]
    if not keys:
        return data
    return json.dumps({**config, **dict.fromkeys(keys, dtype.torch_name)}, indent=2).encode() + b"\n"


def digest_companions(files: dict[str, bytes]) -> list[list[str]]:
    """What identifies the files, for a run that is resumed."""
    return [[name, checksum(data)] for name, data in sorted(files.items())]


_MIN_BYTES_PER_WORKER = 128 << 20
_MAX_WORKERS = 8
_FREE_REPEATED_BYTES, _MOST_REPEATS = 64 << 20, 16


_TOKEN = "work"


def work_folder(path: Path) -> Path:
    """Where a reshard to `path` works.

    >>> work_folder(Path("runs/ckpt")).as_posix()
    'runs/.ckpt.resharding-work'
    """
    return folders.temporary_folder(path, folders.RESHARDING, _TOKEN)


class ReshardWork:
    """Where a run works: a save whose files are made in full length and filled. Nothing is resumed here.

    Use as a context manager: an error removes everything.
    """

    def __init__(self, place: Place, save: SaveFolder, folder: Path) -> None:
        self.save, self.files, self.marks = save, save.work, folder / "verified"
        self.lock = folders.new_lock(place, "reshard", save.token)

    def __enter__(self) -> Self:
        self.lock.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is not None:
                self.save.remove()
        finally:
            self.lock.release()
            self.save.close()

    def finish_earlier(self, asked: Mapping[str, Any]) -> bool:
        """Whether an earlier run of the same request had copied all, and its commit is now completed."""
        return False

    def begin(self, asked: Mapping[str, Any]) -> dict[int, list[RangeSums]]:
        """Start, or go on; return what is done of each segment."""
        return {}

    def make_files(self, files: Sequence[PlannedFile]) -> None:
        """Make all files in their full length; what is not written takes no room."""
        for file in files:
            handle = os.open(self.files / file.name, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.ftruncate(handle, file.bytes)
            finally:
                os.close(handle)

    def log_segment(self, number: int, sums: Sequence[RangeSums]) -> None:
        """Note that a segment is copied and synced."""

    def commit(self) -> None:
        """Put the files in place of the checkpoint."""
        self.save.commit(in_background=False)


class ResumableWork(ReshardWork):
    """The work folder of one run to a local folder, locked while it is open."""

    def __init__(self, path: Path, token: str, resume: bool) -> None:
        self.path, self.folder, self._resume = path, work_folder(path), resume
        super().__init__(path, LocalSave(path, token, self.folder / "files"), self.folder)
        self._journal = -1

    def __enter__(self) -> Self:
        make_folders(self.path.parent)
        self.lock.acquire()
        try:
            self.folder.mkdir(exist_ok=True)
        except BaseException:
            self.lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._journal >= 0:
            os.close(self._journal)
        if kind is not None and self._holds_nothing(kind):
            shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.release()

    def _holds_nothing(self, kind: type[BaseException]) -> bool:
        """Whether there is nothing to resume: no run, or one that failed before its first segment."""
        if not (self.folder / "manifest.json").exists():
            return True
        return (
            self._journal >= 0 and issubclass(kind, Exception) and _file_size_or_missing(self.folder / "journal") == 0
        )

    def finish_earlier(self, asked: Mapping[str, Any]) -> bool:
        token = self._find_unfinished(asked) if self._resume else None
        self._resume = token is not None and self.files.exists()
        if token is not None and self._resume:
            self.save = LocalSave(self.path, token, self.files)
            self.save.lock_token = self.lock.token
        if token is None or self._resume:
            return False
        folders.recover_commit(self.path)
        saving, replaced = (
            folders.temporary_folder(self.path, kind, token) for kind in (folders.SAVING, folders.REPLACED)
        )
        if self._is_new(saving):
            folders.commit_checkpoint(self.path, token)
        for old in (saving, replaced):  # after the swap of names, the folder of this run is that of the old one
            if old.exists() and self._is_new(self.path):
                folders.remove_folder(old)
        if not folders.is_complete(self.path):
            return False
        self.remove()
        return True

    def begin(self, asked: Mapping[str, Any]) -> dict[int, list[RangeSums]]:
        if not self._resume:
            self._clear()
            self.files.mkdir()
            manifest = {"version": 1, "token": self.save.token, **asked}
            write_synced(self.folder / "manifest.json", json.dumps(manifest).encode())
        done = self._read_journal()
        self._journal = os.open(self.folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.marks.unlink(missing_ok=True)
        return done

    def _find_unfinished(self, asked: Mapping[str, Any]) -> str | None:
        """The token of a run that was killed, if there is one; an error if its request was different."""
        try:
            known = json.loads((self.folder / "manifest.json").read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        if not isinstance(known, dict) or known.get("version") != 1 or not isinstance(known.get("token"), str):
            return None
        differs = [key for key in asked if known.get(key) != asked[key]]
        if differs:
            changes = "; ".join(f"{key} was {str(known.get(key))[:80]}, is {str(asked[key])[:80]}" for key in differs)
            raise CheckpointError(
                f"{self.folder} contains an unfinished reshard of something else: {changes}. Run it again as it was to "
                "finish it, or start over with resume=False (--restart), which removes it"
            )
        return str(known["token"])

    def _clear(self, keep: str = "") -> None:
        if not keep:  # first: a manifest without files would say that all is done
            (self.folder / "manifest.json").unlink(missing_ok=True)
        for entry in (e for e in list(self.folder.iterdir()) if e.name != keep):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                os.unlink(entry)

    def _read_journal(self) -> dict[int, list[RangeSums]]:
        """What the journal says; a line that was cut off by a kill, and all after it, does not count."""
        done: dict[int, list[RangeSums]] = {}
        try:
            lines = (self.folder / "journal").read_bytes().split(b"\n")
        except FileNotFoundError:
            return done
        whole = 0
        for line in lines[:-1]:
            try:
                number, sums = json.loads(line)
                done[int(number)] = [(str(text), int(crc)) for text, crc in sums]
            except (ValueError, TypeError):
                break
            whole += 1
        if lines[whole:] != [b""]:
            write_synced(self.folder / "journal", b"".join(line + b"\n" for line in lines[:whole]))
        return done

    def log_segment(self, number: int, sums: Sequence[RangeSums]) -> None:
        line = json.dumps([number, sums], separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._journal, line) :]
        os.fsync(self._journal)

    def make_files(self, files: Sequence[PlannedFile]) -> None:
        """The same, where there is room for them; those of an earlier run stay."""
        missing = [f for f in files if _file_size_or_missing(self.files / f.name) != f.bytes]
        needed, free = sum(f.bytes for f in missing), shutil.disk_usage(self.folder).free
        if needed > free:
            raise CheckpointError(
                f"{self.path}: {needed} bytes must be written, but only {free} are free there; free some space"
            )
        super().make_files(missing)

    def commit(self) -> None:
        """The same, and remove the work folder."""
        write_synced(self.folder / "identity", json.dumps(os.stat(self.files).st_ino).encode())
        self.save.work = folders.temporary_folder(self.path, folders.SAVING, self.save.token)
        os.rename(self.files, self.save.work)
        super().commit()
        self.remove()

    def _is_new(self, folder: Path) -> bool:
        """Whether a folder is the one that this run made, under whatever name."""
        try:
            return bool(folder.stat().st_ino == json.loads((self.folder / "identity").read_bytes()))
        except (FileNotFoundError, ValueError):
            return False

    def remove(self) -> None:
        """Remove the work folder, the manifest last: until then it says that all is done."""
        self._clear(keep="manifest.json")
        self._clear()
        os.rmdir(self.folder)


def fingerprint_source(store: Store) -> str:
    """What identifies a source: its index, and the length and time of every file."""
    rows = digest_files(store.pinned, [file.name for file in store.index.files])
    return checksum(json.dumps([store.digest, rows]).encode())


def _file_size_or_missing(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


@dataclass(frozen=True)
class ReshardRun:
    """One run: from an opened source and the plan of a target to the checkpoint in its place.

    `beside`: files that are copied along, by name.
    """

    source: Place
    path: Place
    format: Format
    conversion: Conversion
    dtype: DType | None
    beside: dict[str, bytes]
    overwrite: bool
    verify: bool
    store: Store
    target: FilePlan
    workers: int | None
    max_buffer_bytes: int
    progress: Progress

    def run(self, resume: bool, token: str) -> tuple[int, int]:
        """Do it; return the bytes that were there, and the number of workers."""
        segments = plan_segments(self.target, self.store.index, by_file=isinstance(self.path, RemotePath))
        asked = self._request(segments)
        with self._open_work(resume, token) as work:
            if work.finish_earlier(asked):
                return sum(s.nbytes for s in segments), 0
            check_destination(self.path, self.overwrite, self.beside)
            done = work.begin(asked)
            known = {n: s for n, s in done.items() if n < len(segments) and len(segments[n].ranges) == len(s)}
            written, kept, workers = self._copy(work, segments, known)
            if fingerprint_source(self.store) != asked["source state"]:
                raise CheckpointError(f"{self.store.folder} was changed while it was read; start over")
            files = self.target.all_files()
            index = self.target.make_index([(file, written[number]) for number, file in enumerate(files)])
            work.save.complete({file.name: file.bytes for file in files}, index, self.beside)
            work.commit()
        return kept, workers

    def _request(self, segments: Sequence[Segment]) -> Json:
        """All that determines the result."""
        plan = json.dumps([[f.name, f.bytes] for f in self.target.all_files()]) + repr(segments)
        return {
            "source": str(self.source),
            "format": self.format.name,
            "verify": self.verify,
            "names": self.conversion.to_json(),
            "files beside": digest_companions(self.beside),
            "source state": fingerprint_source(self.store),
            "files to write": checksum(plan.encode()),
        }

    def _open_work(self, resume: bool, token: str) -> ReshardWork:
        if isinstance(self.path, Path):
            return ResumableWork(self.path, token, resume)
        save = new_save(self.path, token)
        return ReshardWork(self.path, save, save.work)

    def _copy(
        self, work: ReshardWork, segments: Sequence[Segment], known: Mapping[int, Sequence[RangeSums]]
    ) -> tuple[dict[int, list[ItemSums]], int, int]:
        """Copy all segments, and complete each file when its last one is there.

        Returns the checksums of each file, the bytes that were there, and the number of workers.
        """
        files, left = self.target.all_files(), Counter(segment.file for segment in segments)
        found: list[dict[int, Sequence[RangeSums]]] = [{} for _ in files]
        written: dict[int, list[ItemSums]] = {}
        kept, total = 0, sum(s.nbytes for s in segments)

        def complete(number: int) -> None:
            written[number] = join_sums(self.target, files[number], segments, found[number])
            with PositionedFile(work.files / files[number].name) as output:
                for position, data in self.target.finish_file(files[number], written[number]):
                    output.write(position, data)
            work.save.deliver(files[number].name)

        work.make_files(files)
        copied, workers = self._start_copy(work, segments, known, total)
        with closing(copied), show_progress(self.progress, "resharding", total) as meter:
            for number in (n for n in range(len(files)) if not left[n]):
                complete(number)
            for one in copied:
                segment = segments[one.number]
                found[segment.file][one.number] = one.sums
                if one.kept:
                    kept += segment.nbytes
                else:
                    work.log_segment(one.number, one.sums)
                left[segment.file] -= 1
                if not left[segment.file]:
                    complete(segment.file)
                meter.advance(segment.nbytes)
        return written, kept, workers

    def _start_copy(
        self, work: ReshardWork, segments: Sequence[Segment], known: Mapping[int, Sequence[RangeSums]], total: int
    ) -> tuple[Generator[CopiedSegment, None, None], int]:
        """The segments as they are copied, and how many workers do so."""
        for number in range(len(self.store.index.files)):
            self.store.verify_header(number)
        workers, limit = divide_memory(self.max_buffer_bytes, self._choose_worker_count(total))
        job = CopyJob(
            source=str(self.source),
            digest=self.store.digest,
            folder=str(work.files),
            marks=str(work.marks) if self.verify else None,
            crc=self.target.crc,
            conversion=self.conversion.to_json(),
            dtype=None if self.dtype is None else self.dtype.torch_name,
            limit=limit,
        )
        if workers == 1:
            return copy_in_this_process(self.store, job, segments, known), 1
        return copy_in_processes(job, segments, known, workers), workers

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
        if isinstance(self.source, RemotePath) and self.source.is_of_this_process:
            return f"{self.source} is in the memory of this process"
        return None


@dataclass(frozen=True)
class ReshardReport:
    """What a reshard did. `kept_bytes` of `bytes` were there from an earlier run; `seconds` are those of this one.

    `repeated`: tensors that are the same bytes of the source as one before them, such as tied weights in a file of
    torch.save; they are written again. `unfit`: tensors that one layout for all did not fit. `left_out`: entries that
    the format has no place for, or that cannot be read. `copied`: files that were copied along.

    >>> import tempfile, torch, shardwise
    >>> folder = tempfile.mkdtemp()
    >>> shardwise.save({"w": torch.ones(4, 2)}, f"{folder}/one")
    >>> report = reshard(f"{folder}/one", f"{folder}/two", layout="S(0)", ranks=2)
    >>> report.tensors, report.ranks, report.bytes
    (1, (0, 1), 32)
    """

    path: Place
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
    repeated: tuple[str, ...] = ()


@public
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
    progress: Progress = None,
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
    - `progress`: by default a bar on a terminal; or True, False, a function of the bytes done and the total bytes.

    >>> import tempfile, torch, shardwise
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shardwise.save({"w": torch.arange(6.0).reshape(3, 2), "step": 7}, f"{folder}/a")
    ...     report = reshard(f"{folder}/a", f"{folder}/b", layout="S(0)", ranks=2)
    ...     report.files, report.bytes, shardwise.open(f"{folder}/b")["w"].layout.local_shapes(1)
    (2, 24, ((1, 2),))
    """
    started = time.monotonic()
    check_progress(progress)
    _check_reshard_arguments(workers, max_buffer_bytes, max_file_bytes, ranks)
    source, target, kind = find_place(src), find_place(dst), find_format(format)
    check_apart(source, target)
    wanted, given = None if dtype is None else find_cast_dtype(dtype), None if names is None else NameMap.of(names)
    conversion = Conversion(tuple(only), tuple(exclude), given, kind.model_only)
    with closing(open_store(src, divide_memory(max_buffer_bytes, 1)[1])) as store:
        left_out, store.index = conversion.left_out(store.index), conversion.apply(store.index)
        chosen = _choose_target_layouts(store, plan, layout, ranks, kind)
        token, beside = secrets.token_hex(8), _read_beside(store, kind, config, wanted)
        files = _plan_target(store, chosen, kind, max_file_bytes, wanted, new_save(target, token).prefix)
        repeated = _find_repeated(store, files)
        options = (beside, overwrite, verify, store, files, workers, max_buffer_bytes, progress)
        kept, used = ReshardRun(source, target, kind, conversion, wanted, *options).run(resume, token)
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
        repeated=repeated,
    )


def _find_repeated(store: Store, files: FilePlan) -> tuple[str, ...]:
    """The tensors that are the very bytes of another; an error where names would make much of few bytes."""
    seen: set[Any] = set()
    repeated: list[str] = []
    runs: dict[tuple[int, int], int] = {}
    for entry in store.index.tensors.values():
        views = None if entry.views is None else tuple(entry.views)
        key = (entry.dtype, entry.shape, tuple(entry.files), tuple(entry.begins), views)
        repeated += [entry.name] if key in seen and entry.files else []
        seen.add(key)
        runs |= {run: entry.run_bytes(n) for n, run in enumerate(zip(entry.files, entry.begins, strict=True))}
    there, wanted = sum(runs.values()), sum(tensor.nbytes for tensor in files.tensors)
    if wanted > _FREE_REPEATED_BYTES + _MOST_REPEATS * there:
        raise CheckpointError(
            f"{store.folder}: {len(files.tensors)} tensors of {wanted} bytes are made of {there} bytes, of which each "
            f"would be written about {wanted // max(1, there)} times; choose tensors with only= and exclude= (--only, "
            "--except)"
        )
    return tuple(repeated)


def _read_beside(
    store: Store, format: Format, config: str | os.PathLike[str] | None, dtype: DType | None
) -> dict[str, bytes]:
    """The files to copy along, from the folder that was named or from the source."""
    if config is None:
        return read_companions(store.pinned, format, dtype, required=False)
    if not format.companions:
        raise CheckpointError(f"a checkpoint of format {format.name!r} has no configuration beside it; omit config")
    with open_plain_folder(find_place(config), DEFAULT_BUFFER_BYTES) as folder:
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
    store: Store, chosen: ChosenLayouts, format: Format, max_file_bytes: int | None, dtype: DType | None, prefix: str
) -> FilePlan:
    tensors = [
        TensorToSave(entry.name, converted_dtype(entry.dtype, dtype), chosen.layouts[entry.name])
        for entry in store.index.tensors.values()
    ]
    ranks = chosen.ranks if format.has_layouts and chosen.ranks else (0,)
    return format.plan_files(SaveRequest(tensors, store.index.tree, ranks, max_file_bytes, store.index.opaque, prefix))
