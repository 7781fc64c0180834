"""Saving a nested state from all ranks at once, in any format.

1. The first rank makes a temporary folder. The ranks agree on what is saved, in one small exchange, before a file is
   touched; the format plans the files.
2. Each rank writes its files into the temporary folder, and syncs them; one that does not see it is on a host that does
   not share the path. Formats of whole tensors gather them first, in batches, as many in one exchange as the buffer
   limit allows.
3. The checksums of all files make the index, which the first rank writes last; then it puts the folder in
   the checkpoint's place. If any rank fails before that, all raise and the previous checkpoint is as it was.

Saving in the background: a thread writes what was copied, and the folder itself shows who is done.

The comm belongs to the program, so the threads of the ranks do not talk through it. Each leaves a record of its share
in the temporary folder; the first rank's thread waits for all of them, writes the index and commits; the others wait
until the folder is gone. `wait()` is collective: until all threads have ended, the ranks tell each other how far they
are, so that a failure on one, on a full disk say, stops the others at once and is raised on all.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwise._lazy import collector_paused
from shardwise._progress import Progress, check_progress, show_progress
from shardwise._text import package_logger, public
from shardwise.checkpoint import commit as folders
from shardwise.checkpoint.commit import Place, find_place, new_save
from shardwise.checkpoint.files import CheckpointError, PositionedFile, SaveFolder, run_or_describe_error
from shardwise.checkpoint.formats import find_format
from shardwise.checkpoint.formats.base import (
    FileItem,
    FilePlan,
    Format,
    ItemSums,
    PlannedFile,
    SaveRequest,
    TensorToSave,
    write_item,
)
from shardwise.checkpoint.index import BLOCK_BYTES, Json, split_into_blocks
from shardwise.checkpoint.objects import expand_objects
from shardwise.checkpoint.state import (
    Leaf,
    agree_on_state,
    flat_bytes,
    flatten_state,
    gather_or_raise,
    make_leaf,
    raise_problems,
    reduce_pending,
    reduced_layout,
    torch_dtype,
)
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES
from shardwise.comm import Comm, gather_values
from shardwise.comm.current import GroupOrComm, resolve_comm
from shardwise.tensor import redistribute_many, wrap
from shardwise.tensor.execute import view_box
from shardwise.tensor.move import single_rank_layout
from shardwise.transfer.transfer import format_bytes

_FIRST_ROUND_SECONDS, _LONGEST_ROUND_SECONDS = 0.02, 0.5
_LABEL = "save in the background"
_STOPPED = "stopped: another rank failed"
_running_saves: WeakKeyDictionary[Comm, Saving] = WeakKeyDictionary()
_running_saves_lock = threading.Lock()
_host_buffers: WeakKeyDictionary[Comm, Tensor] = WeakKeyDictionary()  # what saves in the background write from
_ALIGNMENT = 64


class Saving:
    """A save running in the background; all ranks `wait()` for it.

    >>> import tempfile, torch, shardwise
    >>> path = f"{tempfile.mkdtemp()}/ckpt"
    >>> saving = shardwise.save({"w": torch.ones(4)}, path, async_op=True)
    >>> saving.wait()
    >>> saving.done()
    True
    """

    def __init__(
        self,
        comm: Comm,
        folder: SaveFolder,
        write: Callable[[Callable[[int], None]], Json],
        finish: Callable[[Sequence[Json]], None],
    ) -> None:
        self._comm, self._folder, self._write, self._finish = comm, folder, write, finish
        self._problem: str | None = None
        self._stop = threading.Event()
        self._waited = False
        self._thread = threading.Thread(target=self._run, name="shardwise save")
        self._thread.start()

    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is in place on disk; raise on every rank if that failed on any. Collective."""
        if self._waited:
            return
        self._waited = True
        unregister_save(self._comm, self)
        seconds = _FIRST_ROUND_SECONDS
        while True:
            self._thread.join(seconds)
            ended = self.done()
            everyone = self._exchange([ended, self._problem if ended else None])
            problems = [problem for _, problem in everyone]
            if any(problem is not None for problem in problems):
                self._give_up()
                raise_problems(self._comm, [None if p == _STOPPED else p for p in problems])
            if all(done for done, _ in everyone):
                return
            seconds = min(2 * seconds, _LONGEST_ROUND_SECONDS)

    def _exchange(self, given: Json) -> list[Json]:
        return list(gather_values(self._comm, given, label=_LABEL).values())

    def _give_up(self) -> None:
        """Stop this rank's thread; when all have stopped, nothing writes to the folder any more and it is removed."""
        self._stop.set()
        self._thread.join()
        self._exchange(None)
        if self._comm.rank == self._comm.ranks[0]:
            self._folder.remove()
        self._folder.close()
        self._exchange(None)

    def _check(self, nbytes: int = 0) -> None:
        if self._stop.is_set():
            raise CheckpointError(_STOPPED)

    def _run(self) -> None:
        _, self._problem = run_or_describe_error(self._share)
        self._write, self._finish = _write_nothing, _finish_nothing  # the copies of the tensors are free

    def _share(self) -> None:
        record, problem = run_or_describe_error(lambda: self._write(self._check))
        try:
            self._folder.write_note(self._record_of(self._comm.rank), json.dumps([problem, record]).encode())
        except (OSError, CheckpointError):
            if problem is None:
                raise
        if problem is not None:
            raise CheckpointError(problem)
        if self._comm.rank == self._comm.ranks[0]:
            self._complete()
        else:
            self._wait_until(self._folder.is_gone, "rank 0 did not complete the save")
            self._folder.close()

    def _complete(self) -> None:
        names = [self._record_of(rank) for rank in self._comm.ranks]
        found: dict[str, bytes] = {}

        def all_there() -> bool:
            for name in names[len(found) :]:
                note = self._folder.read_note(name)
                if note is None:
                    return False
                found[name] = note
            return True

        self._wait_until(all_there, "not all ranks wrote their share")
        shares = [json.loads(found[name]) for name in names]
        failed = [
            f"rank {rank}: {share[0]}"
            for rank, share in zip(self._comm.ranks, shares, strict=True)
            if share[0] is not None
        ]
        if failed:
            raise CheckpointError("; ".join(failed[:4]))
        for name in names:
            self._folder.remove_note(name)
        self._finish([record for _, record in shares])

    def _record_of(self, rank: int) -> str:
        return f"share{rank:05d}.json"

    def _wait_until(self, ready: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + self._comm.timeout
        while not ready():
            self._check()
            if time.monotonic() > deadline:
                raise CheckpointError(f"{self._folder.path}: {problem} within {self._comm.timeout} s")
            time.sleep(self._folder.poll_seconds)


def _write_nothing(before_block: Callable[[int], None]) -> Json:
    return None


def _finish_nothing(records: Sequence[Json]) -> None:
    return None


def register_save(saving: Saving) -> Saving:
    """Let the next save or load on its comm wait for it."""
    with _running_saves_lock:
        _running_saves[saving._comm] = saving
    return saving


def unregister_save(comm: Comm, saving: Saving) -> None:
    """It has been waited for."""
    with _running_saves_lock:
        if _running_saves.get(comm) is saving:
            del _running_saves[comm]


def wait_for_running_save(comm: Comm) -> None:
    """Wait for the save that is running on this comm, if there is one; collective as that save was."""
    with _running_saves_lock:
        saving = _running_saves.get(comm)
    if saving is not None:
        saving.wait()


_log = package_logger(__name__)
SAVE_LABEL = "save"


@dataclass(frozen=True, eq=False)
class SavePlan:
    """All that is decided before the first byte is written, and the local tensors of each tensor."""

    folder: SaveFolder
    files: FilePlan
    held: dict[str, tuple[Tensor, ...]]

    def bytes_of(self, rank: int) -> int:
        """The bytes of all items that this rank writes."""
        return sum(self.files.bytes_of(item) for file in self.files.files_of(rank) for item in file.items)

    def sources(self, rank: int) -> list[Tensor]:
        """The values of all items that this rank writes, in the order of its files."""
        items = [item for file in self.files.files_of(rank) for item in file.items]
        return [self._source(item, rank) for item in items]

    def _source(self, item: FileItem, rank: int) -> Tensor:
        name, holder = self.files.tensors[item.tensor].name, self.files.holder_of(item, rank)
        if holder is None:
            raise CheckpointError(f"tensor {name!r}: rank {rank} does not have its box {self.files.box_of(item)}")
        return view_box(self.held[name][holder.slot], holder.here)


STAGING_BYTES = 32 << 20


class FileWriter:
    """Writes the items of a planned file in order, straight from the tensors' memory, with checksums on the way.

    `before_block` is called with the bytes of each block before it is written, and may raise to stop.
    """

    def __init__(self, folder: Path, plan: FilePlan, file: PlannedFile, before_block: Callable[[int], None]) -> None:
        self._plan, self._file, self._before_block = plan, file, before_block
        self._output = PositionedFile(folder / file.name, create=True)
        self._sums: list[ItemSums] = []

    def add(self, values: Tensor) -> None:
        """Write the next item."""
        begin, data = self._file.items[len(self._sums)].begin, flat_bytes(values)
        whole = data is not None and 0 < len(data) <= BLOCK_BYTES
        self._before_block(values.nbytes if whole else 0)
        parts = data if whole and data is not None else self._parts(values)
        self._sums.append(write_item(self._output, begin, parts, self._plan.crc, lasting=True))

    def add_all(self, tensors: Iterable[Tensor]) -> None:
        """Write the next items."""
        for tensor in tensors:
            self.add(tensor)

    def _parts(self, values: Tensor) -> Iterator[memoryview]:
        for part in iterate_host_bytes(values):
            self._before_block(len(part))
            yield part

    def finish(self) -> list[ItemSums]:
        """Write what surrounds the items, and make all of it last."""
        for position, data in self._plan.finish_file(self._file, self._sums):
            self._output.write(position, data, lasting=True)
        self._output.close()
        return self._sums

    def abandon(self) -> None:
        """Close the file as it is."""
        self._output.close(sync=False)


def iterate_host_bytes(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, in parts of at most a block where they are ready in memory."""
    if values.numel() == 0:
        return
    data = flat_bytes(values)
    if data is not None:
        yield from split_into_blocks(data)
        return
    for part in _split_for_staging(values):
        yield from iterate_host_bytes(part.resolve_conj().resolve_neg().to("cpu").contiguous())


def _split_for_staging(values: Tensor) -> Iterator[Tensor]:
    """A tensor in row-major parts of at most the staging size."""
    if values.nbytes <= STAGING_BYTES:
        yield values
        return
    dim = next(d for d, size in enumerate(values.shape) if size > 1)
    half = values.shape[dim] // 2
    yield from _split_for_staging(values.narrow(dim, 0, half))
    yield from _split_for_staging(values.narrow(dim, half, values.shape[dim] - half))


@overload
def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    comm: GroupOrComm | None = None,
    async_op: Literal[False] = False,
    max_file_bytes: int | None = ...,
    format: str = ...,
    progress: Progress = ...,
) -> None: ...


@overload
def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    comm: GroupOrComm | None = None,
    async_op: Literal[True],
    max_file_bytes: int | None = ...,
    format: str = ...,
    progress: Progress = ...,
) -> Saving: ...


@overload
def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    comm: GroupOrComm | None = None,
    async_op: bool,
    max_file_bytes: int | None = ...,
    format: str = ...,
    progress: Progress = ...,
) -> Saving | None: ...


@public
def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    comm: GroupOrComm | None = None,
    async_op: bool = False,
    max_file_bytes: int | None = None,
    format: str = "shardwise",
    progress: Progress = None,
) -> Saving | None:
    """Save a nested state of tensors, numbers, strings, modules and optimizers. Every rank calls it.

    Objects with `state_dict` and `load_state_dict` are saved by it; state of optimizers is named by parameter.
    The folder `path` is replaced at once when everything is on disk. With `async_op`, the tensors are copied to host
    memory and written in the background; `wait()` of what is returned, or the next save or load, waits for it.
    `format` may also be "dcp" (torch.distributed.checkpoint) or "hf" (Hugging Face; see `save_hf`).
    `progress`: by default the first rank shows a bar on a terminal; True and False say so, and a function is called
    with the bytes that this rank has written and those it will write.

    >>> import tempfile, torch, shardwise
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.arange(4.0), "step": 3}, f"{folder}/ckpt")
    ...     checkpoint = shardwise.open(f"{folder}/ckpt")
    ...     checkpoint.names(), checkpoint["w"][1:3].tolist(), checkpoint.values()
    (['w'], [1.0, 2.0], {'step': 3})
    """
    comm = resolve_comm(comm)
    wait_for_running_save(comm)
    folders.wait_for_removals()
    plan = _plan_save(state, path, comm, max_file_bytes, async_op, find_format(format), progress)
    if not async_op:
        _save_now(plan, comm, DEFAULT_BUFFER_BYTES, progress)
        return None
    with _removed_on_failure(plan.folder, comm), collector_paused():
        if plan.files.gathers:
            raise CheckpointError(f"format {format!r} gathers whole tensors, which needs the comm; omit async_op")
        sources, problem = run_or_describe_error(lambda: copy_to_host(plan.sources(comm.rank), comm))
        gather_or_raise(comm, None, problem, SAVE_LABEL)
    return register_save(
        Saving(
            comm,
            plan.folder,
            write=lambda check: _write_in_background(plan, sources, comm, check, progress),
            finish=lambda records: _commit_save(plan, records, in_background=False),
        )
    )


@public
def save_hf(
    state: Any,
    path: str | os.PathLike[str],
    *,
    max_file_bytes: int | None = None,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    comm: GroupOrComm | None = None,
    progress: Progress = None,
) -> None:
    """Save tensors as a Hugging Face folder: `model.safetensors`, or numbered files and an index. All ranks call it.

    Entries that are not tensors are refused: the format cannot store them. `progress` is that of `save`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_hf({"w": torch.ones(4), "b": torch.ones(2)}, f"{folder}/model", max_file_bytes=16)
    ...     sorted(os.listdir(f"{folder}/model"))[:2]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    comm = resolve_comm(comm)
    wait_for_running_save(comm)
    folders.wait_for_removals()
    plan = _plan_save(state, path, comm, max_file_bytes, False, find_format("hf"), progress)
    _save_now(plan, comm, max_buffer_bytes, progress)


def copy_to_host(tensors: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    """Copies in host memory, all in one buffer that the next save on the comm takes again.

    Memory that is new to the process costs several times as much as the copy. A save begins after the one before it has
    ended, so nobody reads the buffer.
    """
    ends = list(accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors))
    needed, pinned = ends[-1] if ends else 0, any(tensor.is_cuda for tensor in tensors)
    with _running_saves_lock:
        buffer = _host_buffers.pop(comm, None)
    if buffer is None or not needed <= buffer.numel() <= 2 * needed or (pinned and not buffer.is_pinned()):
        buffer = None  # the old one is free before there is another
        buffer = torch.empty(needed, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    copies = []
    for tensor, end in zip(tensors, ends, strict=True):
        begin = end - -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        place = buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(place.copy_(tensor.detach(), non_blocking=tensor.is_cuda))
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    with _running_saves_lock:
        _host_buffers[comm] = buffer
    return copies


@collector_paused()
def _plan_save(
    state: Any,
    path: str | os.PathLike[str],
    comm: Comm,
    max_file_bytes: int | None,
    async_op: bool,
    format: Format,
    progress: Progress,
) -> SavePlan:
    def look() -> tuple[Place, Json, list[Leaf], dict[str, str]]:
        check_progress(progress)
        target, (plain, modules) = find_place(path), expand_objects(state)
        flat = flatten_state(plain)
        if max_file_bytes is not None and max_file_bytes < 1:
            raise CheckpointError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
        if flat.values and not format.has_values:
            raise CheckpointError(
                f"{next(iter(flat.values))} is not a tensor; {format.title} folders store only tensors"
            )
        leaves = [make_leaf(name, t, comm) for name, t in flat.tensors.items()]
        if comm.rank == comm.ranks[0]:
            new_save(target, token).make()
        return target, flat.tree, leaves, modules

    token = secrets.token_hex(8)
    found, problem = run_or_describe_error(look)
    target, tree, leaves, modules = found or (Path(), None, [], {})
    asked: Json = [str(target), async_op, max_file_bytes, format.name, token, modules]
    with _removed_on_failure(new_save(target, token) if found is not None else None, comm):
        tree, tensors, everyone = agree_on_state(comm, tree, leaves, asked, problem, SAVE_LABEL)
        _check_same_save(comm, everyone)
        tensors = [t if t.layout.pending is None else replace(t, layout=reduced_layout(t.layout)) for t in tensors]
        folder = new_save(target, everyone[0][4])
        files = format.plan_files(SaveRequest(tensors, tree, comm.ranks, max_file_bytes, prefix=folder.prefix))
        return SavePlan(folder, files, reduce_pending(leaves, comm))


@contextmanager
def _removed_on_failure(folder: SaveFolder | None, comm: Comm) -> Iterator[None]:
    """If the block raises, the first rank removes what it has made."""
    try:
        yield
    except BaseException:
        if folder is not None:
            if comm.rank == comm.ranks[0]:
                folder.remove()
            folder.close()
        raise


def _check_same_save(comm: Comm, everyone: Sequence[Json]) -> None:
    for number, what in enumerate(("path", "async_op", "max_file_bytes", "format")):
        for rank, asked in zip(comm.ranks, everyone, strict=True):
            if asked[number] != everyone[0][number]:
                raise CheckpointError(
                    f"save: {what} is {everyone[0][number]!r} on rank {comm.ranks[0]} and {asked[number]!r} on rank "
                    f"{rank}; pass the same on every rank"
                )
    owners: dict[str, tuple[int, str]] = {}
    for rank, asked in zip(comm.ranks, everyone, strict=True):
        for name, module in asked[5].items():
            first, other = owners.setdefault(name, (rank, module))
            if module != other:
                raise CheckpointError(
                    f"{name or 'the state'}: it optimizes the module {other!r} on rank {first} and {module!r} on rank "
                    f"{rank}; save the optimizers of different modules under names of their own"
                )


@collector_paused()
def _save_now(plan: SavePlan, comm: Comm, max_buffer_bytes: int, progress: Progress) -> None:
    first = comm.rank == comm.ranks[0]
    with _removed_on_failure(plan.folder, comm):
        with show_progress(progress, "saving", first=first) as meter:
            record: Json = None
            _, problem = run_or_describe_error(lambda: meter.expect(plan.bytes_of(comm.rank)))
            if plan.files.gathers:
                record, problem = _write_gathered(plan, comm, max_buffer_bytes, meter.advance)
            elif problem is None:
                record, problem = run_or_describe_error(
                    lambda: write_rank_files(plan, plan.sources(comm.rank), comm.rank, meter.advance)
                )
        records = gather_or_raise(comm, record, problem, SAVE_LABEL, wanted=first)
    commit = partial(_commit_save, plan, records, in_background=True)
    _, problem = run_or_describe_error(commit if first else plan.folder.close)
    gather_or_raise(comm, None, problem, SAVE_LABEL)


def _write_in_background(
    plan: SavePlan, sources: Sequence[Tensor], comm: Comm, check: Callable[[int], None], progress: Progress
) -> Json:
    """Write this rank's files. A bar would be drawn between the program's own lines: only where it is asked for."""
    first, shown = comm.rank == comm.ranks[0], False if progress is None else progress
    with show_progress(shown, "saving", plan.bytes_of(comm.rank), first=first) as meter:

        def before_block(nbytes: int) -> None:
            check(nbytes)
            meter.advance(nbytes)

        return write_rank_files(plan, sources, comm.rank, before_block)


def write_rank_files(plan: SavePlan, sources: Sequence[Tensor], rank: int, before_block: Callable[[int], None]) -> Json:
    """Write this rank's files from the values of its items; return what the index needs of them."""
    plan.folder.find()
    values = iter(sources)
    records = []
    for file in plan.files.files_of(rank):
        writer = _open_file(plan, file, before_block)
        try:
            writer.add_all(islice(values, len(file.items)))
            records.append(_record(file, writer.finish()))
            plan.folder.deliver(file.name)
        except BaseException:
            writer.abandon()
            raise
    return records


def _write_gathered(
    plan: SavePlan, comm: Comm, max_buffer_bytes: int, before_block: Callable[[int], None]
) -> tuple[Json, str | None]:
    """Bring the tensors of each file to the rank that writes it; a failure there leaves the others to go on."""
    owners = {file.name: rank for rank in plan.files.ranks for file in plan.files.files_of(rank)}
    records: list[Json] = []
    first_problem: str | None = None
    for file in plan.files.all_files():
        record, problem = _write_gathered_file(plan, file, owners[file.name], comm, max_buffer_bytes, before_block)
        records += [record] if record is not None else []
        first_problem = first_problem or problem
    return records, first_problem


def _write_gathered_file(
    plan: SavePlan,
    file: PlannedFile,
    owner: int,
    comm: Comm,
    max_buffer_bytes: int,
    before_block: Callable[[int], None],
) -> tuple[Json, str | None]:
    open_file = partial(_open_file, plan, file, before_block)
    writer, problem = run_or_describe_error(open_file) if comm.rank == owner else (None, None)
    for batch in _split_into_batches(plan.files, file.items, max_buffer_bytes):
        tensors = [plan.files.tensors[item.tensor] for item in batch]
        whole = _gather_on_owner(tensors, plan, owner, comm, max_buffer_bytes)
        if writer is not None and problem is None:
            _, problem = run_or_describe_error(partial(writer.add_all, whole))
    if writer is None:
        return None, problem
    if problem is not None:
        writer.abandon()
        return None, problem
    sums, problem = run_or_describe_error(writer.finish)
    if problem is None:
        _, problem = run_or_describe_error(partial(plan.folder.deliver, file.name))
    return None if problem else _record(file, sums), problem


def _open_file(plan: SavePlan, file: PlannedFile, before_block: Callable[[int], None]) -> FileWriter:
    plan.folder.find()
    plan.folder.forget_replaced(file.name)
    return FileWriter(plan.folder.work, plan.files, file, before_block)


def _split_into_batches(plan: FilePlan, items: Sequence[FileItem], max_bytes: int) -> Iterator[list[FileItem]]:
    batch: list[FileItem] = []
    size = 0
    for item in items:
        own = plan.bytes_of(item)
        if batch and size + own > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += own
    if batch:
        yield batch


def _gather_on_owner(
    tensors: Sequence[TensorToSave], plan: SavePlan, owner: int, comm: Comm, max_buffer_bytes: int
) -> list[Tensor]:
    """The whole tensors on the owner, nothing elsewhere."""
    sources = [wrap(t.layout, plan.held.get(t.name, ()), comm, dtype=torch_dtype(t.dtype)) for t in tensors]
    targets = [single_rank_layout(t.layout.shape, owner) for t in tensors]
    with torch.no_grad():
        moved = redistribute_many(sources, targets, max_buffer_bytes=max_buffer_bytes)
    return [tensor.local_parts[0] for tensor in moved] if comm.rank == owner else []


def _record(file: PlannedFile, sums: Sequence[ItemSums]) -> Json:
    """A written file as plain data; columns are shorter than rows."""
    return [file.name, file.bytes, file.data_start, file.header_sum, [*zip(*file.items)], [*zip(*sums)]]  # noqa: B905


def _parse_record(record: Json) -> tuple[PlannedFile, list[ItemSums]]:
    name, nbytes, data_start, header_sum, items, sums = record
    found = [FileItem(*item) for item in zip(*items, strict=True)]
    return PlannedFile(name, nbytes, found, data_start, header_sum), list(zip(*sums, strict=True))


@collector_paused()
def _commit_save(plan: SavePlan, records: Sequence[Json], in_background: bool) -> None:
    """Write the index and put the folder in place; before it is there, a failure removes it."""
    try:
        written = [_parse_record(record) for of_rank in records for record in of_rank]
        plan.folder.complete({file.name: file.bytes for file, _ in written}, plan.files.make_index(written))
    except BaseException:
        plan.folder.remove()
        raise
    plan.folder.commit(in_background)
    sizes = len(written), format_bytes(sum(file.bytes for file, _ in written))
    _log.info("saved %s: %d files, %s", plan.folder.path, *sizes)
