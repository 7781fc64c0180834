"""Loading a checkpoint into the tensors of a state, from all ranks at once, in any layout.

1. Every rank pins the checkpoint, reads the index and finds what it needs; the ranks agree, and a misfit on any is
   raised on all. Where a save has replaced it meanwhile, all ranks start over.
2. Checksums are verified before anything is written. Where all ranks load the same state, each block is checked by one
   of the ranks that need it.
3. Each rank reads what it needs, file by file, into its local tensors.

Stored tensors are matched with those of the state by name, shape and dtype; errors list near misses.

Looking into a checkpoint from one process: names, shapes, layouts, and any slice of any tensor.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardwise._lazy import collector_paused
from shardwise._progress import Meter, Progress, check_progress, show_progress
from shardwise._text import draw_html, package_logger, public
from shardwise.checkpoint.changes import VersionTarget, apply_versions, list_versions, start_chain_at
from shardwise.checkpoint.convert import NameMap, rename_index
from shardwise.checkpoint.digests import digest_leaves
from shardwise.checkpoint.files import CheckpointError, run_or_describe_error
from shardwise.checkpoint.index import (
    Index,
    Scalar,
    StoredCut,
    TensorEntry,
    block_count,
    build_state,
    checksum,
    stored_layout,
    stored_names,
)
from shardwise.checkpoint.objects import ObjectLoad, plan_objects, replace_objects
from shardwise.checkpoint.saving import save, wait_for_running_save
from shardwise.checkpoint.state import (
    Leaf,
    copy_target,
    describe_state,
    fill_state,
    flatten_state,
    gather_or_raise,
    leaf_to_sharded,
    make_leaf,
    raise_problems,
    redistribute_by_comm,
    reduced_layout,
    torch_dtype,
)
from shardwise.checkpoint.store import DEFAULT_BUFFER_BYTES, Store, copy_reads, open_store, plan_reads, run_in_threads
from shardwise.comm import Comm, LocalComm
from shardwise.comm.current import GroupOrComm, resolve_comm
from shardwise.geometry import Box, Layout, shorten_layout
from shardwise.tensor import wrap
from shardwise.transfer.overlap import BoxOverlap, overlaps_with_boxes
from shardwise.transfer.transfer import format_bytes

StateNames: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None] | NameMap | None
_log = package_logger(__name__)
_MAX_LISTED_PROBLEMS = 5
_COMPARED_NAMES = 2000


@dataclass(frozen=True)
class MatchedState:
    """The tensors to fill, each with what is stored for it, and the values to put in place.

    `unexpected`: what is stored and not in the state, if it has to be in that of a rank; `own` are the state's names.
    """

    tensors: Sequence[tuple[Leaf, TensorEntry]]
    values: Mapping[str, Scalar]
    unexpected: Sequence[str] = ()
    own: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """What ranks compare of the tensors that they load."""
        leaves, stored = [leaf for leaf, _ in self.tensors], [entry.name for _, entry in self.tensors]
        return checksum(json.dumps([describe_state(None, leaves), stored]).encode())


def match_state(
    index: Index,
    tensors: Sequence[Leaf],
    values: Mapping[str, Scalar],
    *,
    strict: bool,
    rename: Callable[[str], str | None],
    cast: bool,
) -> MatchedState:
    """Find what is stored for every entry of a state; raise one error that lists all that does not fit."""
    held_tensors = stored_names(index)
    own = [*(leaf.name for leaf in tensors), *values]
    wanted = {name: source for name in own if (source := rename(name)) is not None}
    for name in _find_tied_names(tensors, wanted, held_tensors):
        del wanted[name]
    sources = set(wanted.values())
    held_values = {name: value for name, value in index.values if name in sources}
    problems = _kind_problems(wanted, {leaf.name for leaf in tensors}, held_tensors, held_values)
    unexpected: list[str] = []
    if strict:
        every = (*held_tensors, *islice((name for name, _ in index.values), _COMPARED_NAMES))
        problems += _missing_problems(wanted, {**held_tensors, **held_values}, every)
        unexpected = [name for name in held_tensors if name not in sources]
        unexpected += islice((name for name, _ in index.values if name not in sources), _COMPARED_NAMES)
    found = [
        (leaf, index.tensors[held_tensors[wanted[leaf.name]]])
        for leaf in tensors
        if leaf.name in wanted and wanted[leaf.name] in held_tensors
    ]
    problems += [text for leaf, entry in found if (text := _misfit_problem(leaf, entry, cast))]
    if problems:
        raise _misfit_error(problems, unexpected, list(wanted))
    chosen = {name: held_values[wanted[name]] for name in values if name in wanted and wanted[name] in held_values}
    return MatchedState(found, chosen, unexpected, list(wanted))


def _misfit_error(problems: Sequence[str], unexpected: Sequence[str], own: Sequence[str]) -> CheckpointError:
    """All that does not fit, what is stored and in no state last."""
    every = [*problems, *_unexpected_problems(unexpected, own)]
    more = f"; and {len(every) - _MAX_LISTED_PROBLEMS} more" if len(every) > _MAX_LISTED_PROBLEMS else ""
    text = "; ".join(every[:_MAX_LISTED_PROBLEMS]) + more + _explain_optimizer_state(unexpected, own)
    return CheckpointError(f"the checkpoint does not fit the state: {text}")


def _find_tied_names(tensors: Sequence[Leaf], wanted: Mapping[str, str], held: Mapping[str, object]) -> list[str]:
    """The entries that are not stored but are the very memory of one that is: a tied weight is stored once."""

    def memory(leaf: Leaf) -> tuple[object, ...]:
        return leaf.layout, leaf.dtype, tuple((t.data_ptr(), t.stride()) for t in leaf.locals)

    missing = [leaf for leaf in tensors if leaf.name in wanted and wanted[leaf.name] not in held]
    stored = {memory(leaf) for leaf in tensors if leaf.name in wanted and wanted[leaf.name] in held} if missing else ()
    return [leaf.name for leaf in missing if memory(leaf) in stored]


def _make_renamer(names: StateNames) -> Callable[[str], str | None]:
    if names is None or isinstance(names, NameMap):
        return lambda name: name
    if callable(names):
        return names
    mapping = names
    return lambda name: mapping.get(name, name)


def _kind_problems(
    wanted: Mapping[str, str], tensors: set[str], held_tensors: Mapping[str, str], held_values: Mapping[str, Scalar]
) -> list[str]:
    problems = []
    for name, source in wanted.items():
        if name in tensors and source in held_values:
            problems.append(f"{name} is a tensor in the state and the value {held_values[source]!r:.40} in it")
        if name not in tensors and source in held_tensors:
            problems.append(f"{name} is not a tensor in the state but is one in the checkpoint")
    return problems


def _missing_problems(wanted: Mapping[str, str], held: Mapping[str, object], every: Sequence[str]) -> list[str]:
    missing = [(name, source) for name, source in wanted.items() if source not in held]
    return [
        f"{_format_both_names(name, source)} is missing from it{_suggest_names(source, every, number)}"
        for number, (name, source) in enumerate(missing)
    ]


def _unexpected_problems(unexpected: Sequence[str], own: Sequence[str]) -> list[str]:
    return [
        f"it has {name}, which the state does not have{_suggest_names(name, own, number)} (strict=False skips it)"
        for number, name in enumerate(unexpected)
    ]


def _explain_optimizer_state(unexpected: Collection[str], own: Sequence[str]) -> str:
    """A hint where the checkpoint has the state of an optimizer and the program none."""
    if not any(".state." in f".{name}" for name in unexpected) or any(".state." in f".{name}" for name in own):
        return ""
    return (
        "; an optimizer has no state before its first step: pass the module and the optimizer themselves, "
        'load({"model": model, "optimizer": optimizer}, path), which makes what is stored'
    )


def _format_both_names(name: str, source: str) -> str:
    return name if name == source else f"{source} (for {name})"


def _suggest_names(name: str, others: Sequence[str], number: int) -> str:
    """Names that are nearly the same, for the first problems: a comparison with thousands of names takes a while."""
    if number >= _MAX_LISTED_PROBLEMS:
        return ""
    near = difflib.get_close_matches(name, others[:_COMPARED_NAMES], n=2, cutoff=0.75)
    return f" (near: {', '.join(near)})" if near else ""


def _misfit_problem(leaf: Leaf, entry: TensorEntry, cast: bool) -> str | None:
    if leaf.layout.shape != entry.shape:
        return f"{leaf.name} has the shape {leaf.layout.shape} in the state and {entry.shape} in it"
    if any(size > 1 and step == 0 for t in leaf.locals for size, step in zip(t.shape, t.stride(), strict=True)):
        return (
            f"{leaf.name} is expanded in the state: several elements share their memory; load into a tensor of its own"
        )
    if leaf.dtype != entry.dtype and not cast:
        return f"{leaf.name} is {leaf.dtype} in the state and {entry.dtype} in it (cast=True converts)"
    return None


LOAD_LABEL = "load"
_MAX_TRIES = 100
_BLOCKS_PER_CHECK = 8
BlockRange: TypeAlias = tuple[int, int, int]  # a stored box, its first block and the one after the last


@public
@collector_paused()
def load(
    state: Any,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    names: StateNames = None,
    cast: bool = False,
    verify: bool = True,
    version: int | None = None,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    comm: GroupOrComm | None = None,
    progress: Progress = None,
) -> Any:
    """Fill a state from a checkpoint that was saved in any layout, by any number of ranks; return the state.

    Every rank calls it. Numbers and strings are replaced by the stored ones. Modules, optimizers and other
    objects with `load_state_dict` get what is stored for them; state that an optimizer does not have yet is made.

    - `strict`: every entry of the state is stored, and all that is stored is in a rank's state; else what both have.
    - `names`: a dict or function from names in the state to stored names; None for a name leaves the entry as it is.
      Or a `NameMap`: the checkpoint is loaded as what it makes of it, with tensors split, fused and transposed.
    - `cast`: convert dtypes; else a dtype that differs is an error.
    - `verify`: check all checksums before the first tensor is changed.
    - `version`: a version of a chain that `shardwise.sync.publish_files` wrote: its changes are applied to the full
      checkpoint. With `verify`, digests of the result are compared with those of the version.
    - `max_buffer_bytes`: a limit on memory used besides the tensors themselves.
    - `progress`: by default the first rank shows a bar on a terminal; True and False say so, and a function is called
      with the bytes that this rank has checked and read and those it will.

    >>> import tempfile, torch
    >>> from shardwise import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.arange(4.0), "step": 3}, f"{folder}/ckpt")
    ...     load({"w": torch.zeros(4, dtype=torch.float64), "step": 0}, f"{folder}/ckpt", cast=True)
    {'w': tensor([0., 1., 2., 3.], dtype=torch.float64), 'step': 3}
    """
    comm = resolve_comm(comm)
    wait_for_running_save(comm)
    before: list[Any] = []
    for _ in range(_MAX_TRIES):
        found, problem = run_or_describe_error(
            lambda: _open_and_match(state, path, comm, strict, names, cast, version, max_buffer_bytes, progress)
        )
        asked = None
        if found is not None:
            asked = [found[0].digest, verify, cast, found[1].digest, bool(found[2]), version, found[1].unexpected]
        everyone = gather_or_raise(comm, asked, problem, LOAD_LABEL)
        store, matched, objects = found
        try:
            if _agree_on_load(comm, everyone, before, matched):
                loader = Loader(store, matched.tensors, comm, shared=len({one[3] for one in everyone}) == 1)
                first = comm.rank == comm.ranks[0]
                with show_progress(progress, "loading", loader.bytes_to_read(), first=first) as meter:
                    read = loader.run_or_start_over(partial(loader.check, verify, meter)) and loader.run_or_start_over(
                        partial(loader.copy, meter), "; tensors may be half-loaded"
                    )
                if read:
                    if version is not None:
                        loader.apply_version(path, version, verify, max_buffer_bytes)
                    loader.settle()
                    if any(one[4] for one in everyone):
                        _, problem = run_or_describe_error(partial(_finish_objects, objects, matched.values))
                        gather_or_raise(comm, None, problem, LOAD_LABEL)
                    if first:
                        _log.info("loaded %s: %d tensors", path, len(matched.tensors))
                    return fill_state(state, matched.values)
        finally:
            store.close()
        before = everyone
    raise CheckpointError(f"load: {path} was replaced {_MAX_TRIES} times while it was loaded; try again later")


def _open_and_match(
    state: Any,
    path: str | os.PathLike[str],
    comm: Comm,
    strict: bool,
    names: StateNames,
    cast: bool,
    version: int | None,
    max_buffer_bytes: int,
    progress: Progress,
) -> tuple[Store, MatchedState, list[ObjectLoad]]:
    check_progress(progress)
    if max_buffer_bytes < 1 << 16:
        raise CheckpointError(f"max_buffer_bytes must be at least 65536, got {max_buffer_bytes}")
    if version is not None and isinstance(names, NameMap):
        raise CheckpointError("load: a version is loaded under stored names: pass names= as a dict or a function")
    store = open_store(path, max_buffer_bytes)
    if state is None and store.index.tensors:
        raise CheckpointError("load fills the tensors of a state, such as model.state_dict(), got None")
    if isinstance(names, NameMap):
        store.index = rename_index(store.index, names)
    rename = _make_renamer(names)
    objects = plan_objects(state, store.index, rename, strict=strict, cast=cast)
    flat = flatten_state(replace_objects(state, {each.path: each.state for each in objects}))
    tensors = [make_leaf(name, tensor, comm) for name, tensor in flat.tensors.items()]
    moved = [each for each in objects if each.stored_name is not None]

    def find_stored(name: str) -> str | None:
        return next((found for each in moved if (found := each.stored(name)) is not None), None) or rename(name)

    matched = match_state(store.index, tensors, flat.values, strict=strict, rename=find_stored, cast=cast)
    return store, matched, objects


def _finish_objects(objects: Sequence[ObjectLoad], values: Mapping[str, Scalar]) -> None:
    for each in objects:
        fill_state(each.state, values, each.path)
        each.finish()


def _agree_on_load(comm: Comm, everyone: Sequence[Any], before: Sequence[Any], matched: MatchedState) -> bool:
    """Whether all ranks load the same; False if a save replaced the checkpoint after some of them had opened it."""
    for number, what in ((1, "verify"), (2, "cast"), (5, "version"), (0, "the checkpoint")):
        for rank, asked in zip(comm.ranks, everyone, strict=True):
            if asked[number] != everyone[0][number] and (number or everyone == before):
                raise CheckpointError(
                    f"load: {what} is not the same on ranks {comm.ranks[0]} and {rank}; pass the same path and options"
                )
    if len({one[0] for one in everyone}) > 1:
        return False
    # Stages of a pipeline have other parts of a model on other ranks.
    if left := set(everyone[0][6]).intersection(*(one[6] for one in everyone)):
        raise _misfit_error([], [name for name in matched.unexpected if name in left], matched.own)
    return True


@dataclass(frozen=True, eq=False, slots=True)
class TensorLoad:
    """A tensor to fill: what is stored, what this rank reads of it, and where to."""

    leaf: Leaf
    entry: TensorEntry
    reads: Sequence[BoxOverlap]
    targets: tuple[Tensor, ...]


class Loader:
    """What one rank does in a load. `shared`: all ranks load the same tensors and divide the checking."""

    def __init__(self, store: Store, tensors: Sequence[tuple[Leaf, TensorEntry]], comm: Comm, shared: bool) -> None:
        self.store, self.comm, self.shared = store, comm, shared
        self._reads: dict[tuple[int, Layout], Sequence[BoxOverlap]] = {}
        self._takers: dict[tuple[int, Layout], Sequence[Sequence[int]]] = {}
        self._shares: dict[tuple[int, Layout, int, int], list[BlockRange]] = {}
        self.work = [self._work(leaf, entry) for leaf, entry in tensors]

    def _work(self, leaf: Leaf, entry: TensorEntry) -> TensorLoad:
        layout = reduced_layout(leaf.layout)
        reads = self._once(self._reads, entry.cut, layout, lambda: self._plan(entry.cut, layout))
        if layout is leaf.layout:
            return TensorLoad(leaf, entry, reads, leaf.locals)
        shapes = layout.local_shapes(self.comm.rank)
        device = leaf.locals[0].device if leaf.locals else self.comm.device
        fresh = [torch.empty(shape, dtype=torch_dtype(leaf.dtype), device=device) for shape in shapes]
        return TensorLoad(leaf, entry, reads, tuple(fresh))

    def _plan(self, cut: StoredCut, layout: Layout) -> list[BoxOverlap]:
        own = layout.table.take(layout.rows_of(self.comm.rank))
        return plan_reads(cut, own.offsets, own.sizes, own.slots, own.local_offsets)

    def _once(
        self, kept: dict[tuple[int, Layout], Any], cut: StoredCut, layout: Layout, make: Callable[[], Any]
    ) -> Any:
        key = (id(cut), layout)
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def run_or_start_over(self, work: Callable[[], None], note: str = "") -> bool:
        """Do a step on all ranks; False if it failed on any because a save replaced the checkpoint meanwhile."""
        _, problem = run_or_describe_error(work)
        stale = self.store.is_stale() if problem is not None else self.store.pinned.has_changed_files()
        everyone = gather_or_raise(self.comm, [problem and problem + note, stale], None, LOAD_LABEL)
        if any(one[1] for one in everyone):
            return False
        raise_problems(self.comm, [one[0] for one in everyone])
        return True

    def bytes_to_read(self) -> int:
        """The bytes that this rank copies."""
        return sum(read.there.numel * work.entry.dtype.itemsize for work in self.work for read in work.reads)

    def check(self, verify: bool, meter: Meter) -> None:
        """See that all files are there in full length; with `verify`, check the blocks that are this rank's."""
        needed = {work.entry.files[read.cell] for work in self.work for read in work.reads}
        for number in sorted(needed):
            self.store.reader(number)
            if verify:
                self.store.verify_header(number)
        if not verify:
            return
        step = self.store.index.block_bytes
        blocks = [
            (work.entry, box, block, min(last, block + _BLOCKS_PER_CHECK))
            for number, work in enumerate(self.work)
            for box, first, last in (self._share(number, work) if self.shared else self._own_blocks(work))
            for block in range(first, last, _BLOCKS_PER_CHECK)
        ]
        sizes = [min((last - first) * step, entry.nbytes) for entry, _, first, last in blocks]
        meter.expect(sum(sizes))

        def check_blocks(some: Sequence[tuple[TensorEntry, int, int, int]]) -> None:
            for entry, box, first, last in some:
                self.store.verify(entry, box, first, last)
                meter.advance(min((last - first) * step, entry.nbytes))

        run_in_threads(check_blocks, blocks, sizes, len(self.comm.ranks))
        self.store.release_pages()

    def _own_blocks(self, work: TensorLoad) -> list[BlockRange]:
        step = self.store.index.block_bytes
        return [(read.cell, *work.entry.touched_blocks(read.cell, read.there, step)) for read in work.reads]

    def _share(self, number: int, work: TensorLoad) -> list[BlockRange]:
        """The blocks of tensor `number` that this rank checks; small tensors that are cut alike go round the ranks."""
        cut, itemsize = work.entry.cut, work.entry.dtype.itemsize
        turn = number % len(self.comm.ranks)
        key = (id(cut), work.leaf.layout, itemsize, turn)
        if key not in self._shares:
            layout = reduced_layout(work.leaf.layout)
            takers = self._once(self._takers, cut, layout, lambda: ranks_needing_boxes(cut, layout))
            counts = [block_count(work.entry.run_bytes(n), self.store.index.block_bytes) for n in range(len(cut))]
            found = [
                (box, *blocks_to_check(takers[box], self.comm.rank, n, turn + box)) for box, n in enumerate(counts)
            ]
            self._shares[key] = [blocks for blocks in found if blocks[1] < blocks[2]]
        return self._shares[key]

    def copy(self, meter: Meter) -> None:
        """Fill the tensors."""
        jobs = ((w.entry, w.reads, [copy_target(t, w.entry.dtype) for t in w.targets]) for w in self.work)
        copy_reads(self.store, jobs, len(self.comm.ranks), meter.advance if meter.active else None)
        torch.autograd.graph.increment_version([local for work in self.work for local in work.leaf.locals])
        self.store.release_pages()

    def apply_version(self, path: str | os.PathLike[str], version: int, verify: bool, max_buffer_bytes: int) -> None:
        """Bring what was read to a version of a chain; all ranks compare digests with those of the version."""
        targets = [
            VersionTarget(w.entry.name, w.entry.dtype.name, reduced_layout(w.leaf.layout), w.targets) for w in self.work
        ]
        digests, problem = run_or_describe_error(
            lambda: apply_versions(path, version, targets, self.comm.rank, max_buffer_bytes)
        )
        gather_or_raise(self.comm, None, problem and f"{problem}; tensors may be half-loaded", LOAD_LABEL)
        if not verify or not self.shared:
            return
        alike = [w for w in self.work if w.leaf.dtype == w.entry.dtype and w.leaf.layout.pending is None]
        found = digest_leaves([w.leaf for w in alike], self.comm)
        wrong = [w.entry.name for w in alike if found[w.leaf.name] != digests.get(w.entry.name)]
        if wrong:
            raise CheckpointError(
                f"{path}: {', '.join(wrong[:4])} ({len(wrong)} of {len(alike)} tensors) are not those of version "
                f"{version}, their digests differ: the full checkpoint was replaced by another one, or the chain is "
                "damaged; tensors may be half-loaded"
            )

    def settle(self) -> None:
        """Give tensors with a pending reduction addends that reduce to what was read; all their ranks take part."""
        pending = [work for work in self.work if work.leaf.layout.pending is not None]
        read = [
            wrap(
                reduced_layout(w.leaf.layout),
                w.targets,
                leaf_to_sharded(w.leaf, self.comm).comm,
                dtype=w.leaf.tensor.dtype,
            )
            for w in pending
        ]
        for work, moved in zip(pending, redistribute_by_comm(read, [w.leaf.layout for w in pending]), strict=True):
            for mine, addend in zip(work.leaf.locals, moved.local_parts, strict=True):
                mine.copy_(addend)


def ranks_needing_boxes(cut: StoredCut, layout: Layout) -> list[list[int]]:
    """For each stored box the ranks that need some of it, in the order of what they need.

    >>> from shardwise.geometry import ChunkSpec
    >>> cut = StoredCut((4,), np.array([[0], [1]]), np.array([[1], [3]]))
    >>> ranks_needing_boxes(cut, ChunkSpec(0, 2).layout((4,)))
    [[0], [0, 1]]
    """
    table = layout.table
    takers: list[dict[int, None]] = [{} for _ in range(len(cut))]
    if len(cut):
        found = overlaps_with_boxes(cut.shape, cut.offsets, cut.sizes, table.offsets, table.sizes)
        order = np.lexsort((table.ranks[found.cells], *reversed(found.starts.T), found.boxes))
        for box, row in zip(found.boxes[order].tolist(), found.cells[order].tolist(), strict=True):
            takers[box][int(table.ranks[row])] = None
    return [list(ranks) for ranks in takers]


def blocks_to_check(takers: Sequence[int], rank: int, blocks: int, turn: int) -> tuple[int, int]:
    """The first block that a rank checks, and the one after the last; every block is one rank's.

    >>> three = [blocks_to_check([4, 5, 6], rank, 7, 0) for rank in (4, 5, 6)]
    >>> three, [blocks_to_check([4, 5], rank, 1, 1) for rank in (4, 5)]
    ([(0, 2), (2, 4), (4, 7)], [(0, 0), (0, 1)])
    """
    if rank not in takers:
        return 0, 0
    place, count = takers.index(rank), len(takers)
    if blocks < count:
        place = (place - turn) % count
        return (place, place + 1) if place < blocks else (0, 0)
    return blocks * place // count, blocks * (place + 1) // count


SHOWN_TENSORS = 40


class StoredTensor:
    """A tensor of a checkpoint; `stored[...]` reads a slice, and only that.

    >>> import tempfile, shardwise
    >>> path = f"{tempfile.mkdtemp()}/ckpt"
    >>> shardwise.save({"w": torch.arange(6.0).reshape(3, 2)}, path)
    >>> with shardwise.open(path) as checkpoint:
    ...     checkpoint["w"].shape, checkpoint["w"][1:].tolist()
    (torch.Size([3, 2]), [[2.0, 3.0], [4.0, 5.0]])
    """

    def __init__(self, store: Store, entry: TensorEntry, verify: bool) -> None:
        self._store, self._entry, self._verify = store, entry, verify

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self._entry.dtype)

    @property
    def nbytes(self) -> int:
        return self._entry.nbytes

    @property
    def layout(self) -> Layout:
        """The layout it was saved with; a tensor of a Hugging Face folder is whole on rank 0."""
        return stored_layout(self._entry)

    @property
    def boxes(self) -> list[tuple[Box, str]]:
        """The stored boxes, each with the name of its file."""
        files = self._store.index.files
        return [(self._entry.cut.box(i), files[n].name) for i, n in enumerate(self._entry.files)]

    def __getitem__(self, index: Any) -> Tensor:
        box, after = index_to_box(index, self._entry.shape)
        return self.read(box)[after]

    def read(self, box: Box | None = None) -> Tensor:
        """A box of the tensor, or all of it, in fresh memory."""
        box = box or Box.whole(self._entry.shape)
        target = torch.empty(box.sizes, dtype=self.dtype, device="cpu")
        zeros = np.zeros((1, box.ndim), np.int64)
        offsets, sizes = (np.array([v], np.int64).reshape(1, box.ndim) for v in (box.offsets, box.sizes))
        reads = plan_reads(self._entry.cut, offsets, sizes, np.zeros(1, np.int64), zeros)
        try:
            for read in reads if self._verify else ():
                blocks = self._entry.touched_blocks(read.cell, read.there, self._store.index.block_bytes)
                self._store.verify(self._entry, read.cell, *blocks)
            copy_reads(self._store, [(self._entry, reads, [copy_target(target, self._entry.dtype)])])
            if self._store.pinned.has_changed_files():
                raise CheckpointError(f"{self._store.folder}: its files have changed while they were read")
        except CheckpointError as error:
            if not self._store.is_stale():
                raise
            raise CheckpointError(f"{error}; a save has replaced the checkpoint since: open it again") from error
        return target

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, {self._entry.dtype}{list(self._entry.shape)})"


def index_to_box(index: Any, shape: Sequence[int]) -> tuple[Box, tuple[Any, ...]]:
    """The box that an index of ints and slices covers, and the index to apply to what was read.

    >>> index_to_box((slice(1, 9, 2), ..., 3), (10, 4, 5))
    (Box(offsets=(1, 0, 3), sizes=(8, 4, 1)), (slice(None, None, 2), slice(None, None, 1), 0))
    """
    given = index if isinstance(index, tuple) else (index,)
    if sum(i is ... for i in given) > 1 or len([i for i in given if i is not ...]) > len(shape):
        raise IndexError(f"{index!r} has more entries than a tensor of shape {tuple(shape)} has dims")
    at = next((i for i, entry in enumerate(given) if entry is ...), len(given))
    fill = len(shape) - len(given) + (at < len(given))
    entries = (*given[:at], *([slice(None)] * fill), *given[at + 1 :])
    ranges = [_range(entry, length, index) for entry, length in zip(entries, shape, strict=True)]
    box = Box(tuple(r[0] for r in ranges), tuple(r[1] for r in ranges))
    return box, tuple(r[2] for r in ranges)


def _range(entry: Any, length: int, index: Any) -> tuple[int, int, Any]:
    if isinstance(entry, slice):
        start, stop, step = entry.indices(length)
        if step < 1:
            raise IndexError(f"{index!r}: steps must be 1 or more")
        return start, max(0, stop - start), slice(None, None, step)
    if not isinstance(entry, int) or isinstance(entry, bool):
        raise IndexError(f"{index!r}: a stored tensor is indexed by ints, slices and ..., got {type(entry).__name__}")
    if not -length <= entry < length:
        raise IndexError(f"{index!r}: {entry} is out of range for a dim of length {length}")
    return entry % length, 1, 0


class Checkpoint:
    """An opened checkpoint; only what is requested is read.

    >>> import tempfile, shardwise
    >>> path = f"{tempfile.mkdtemp()}/ckpt"
    >>> shardwise.save({"w": torch.ones(3), "step": 7}, path)
    >>> with shardwise.open(path) as checkpoint:
    ...     checkpoint.names(), checkpoint.values()
    (['w'], {'step': 7})
    """

    @public
    def __init__(self, store: Store, verify: bool = True) -> None:
        self._store, self._verify = store, verify
        self._names = stored_names(store.index)

    def _repr_html_(self) -> str:
        """The tensors as a table for notebooks; only the index is read."""
        shown = [self[name] for name in self.names()[:SHOWN_TENSORS]]
        rows = [(t.name, shorten_layout(t.layout, t._entry.dtype.name), format_bytes(t.nbytes)) for t in shown]
        count = len(self.names())
        title = f"{self._store.folder}: {count} tensors" + (f", the first {len(rows)}" if count > len(rows) else "")
        return draw_html("table_html", title, ("tensor", "layout", "bytes"), rows)

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._store.index.tensors)

    def values(self) -> dict[str, Scalar]:
        """Everything that is not a tensor, by name."""
        return dict(self._store.index.values)

    def __getitem__(self, name: str) -> StoredTensor:
        if name not in self._names:
            raise CheckpointError(f"{self._store.folder}: no tensor {name!r}; it has {self.names()[:8]}")
        return StoredTensor(self._store, self._store.index.tensors[self._names[name]], self._verify)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._store.index.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def files(self) -> dict[str, int]:
        """The names and lengths of all files."""
        return {file.name: file.bytes for file in self._store.index.files}

    def state(self) -> Any:
        """The nested state as it was saved, every tensor whole."""
        return build_state(self._store.index.tree, lambda name: self[name].read())

    def verify(self) -> None:
        """Check every byte against its checksum; raise for the first that differs."""
        index = self._store.index
        for number in range(len(index.files)):
            self._store.verify_header(number)
        for entry in index.tensors.values():
            for box in range(len(entry.cut)):
                self._store.verify(entry, box, 0, block_count(entry.run_bytes(box), index.block_bytes))

    def close(self) -> None:
        """Release the mapped files."""
        self._store.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self._store.folder)!r}, {len(self)} tensors)"


@public
def open(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    names: NameMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
) -> Checkpoint:
    """Open a checkpoint (or a Hugging Face folder, or a safetensors file) and read any slice of it from one process.

    With `names`, a `NameMap` or its TOML file, its tensors are renamed, split, fused and transposed by patterns.

    >>> import tempfile
    >>> from shardwise import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"w": torch.arange(6).reshape(2, 3)}, f"{folder}/ckpt")
    ...     open(f"{folder}/ckpt")["w"][:, 1].tolist()
    [1, 4]
    """
    renaming = None if names is None else NameMap.of(names)
    store = open_store(path, max_buffer_bytes)
    if renaming is not None:
        store.index = rename_index(store.index, renaming)
    return Checkpoint(store, verify)


def compact(path: str | os.PathLike[str], version: int | None = None) -> int:
    """Make a version of a chain, the newest by default, the full checkpoint, and remove older ones; returns its step.

    One process calls it, which needs memory for all tensors. Whoever publishes to the chain may go on meanwhile. If it
    is killed, all versions from this one on can be loaded as before; call it again.

    >>> import tempfile, shardwise
    >>> weights, path = {"w": torch.zeros(3)}, f"{tempfile.mkdtemp()}/ckpt"
    >>> link = shardwise.sync.publish_files(weights, path)
    >>> for step in range(3):
    ...     weights["w"][step] = step
    ...     link.push(step)
    >>> compact(path), open(path)["w"][:].tolist()
    (2, [0.0, 1.0, 2.0])
    """
    steps = list_versions(path)
    if not steps:
        raise CheckpointError(f"{path} has no versions; shardwise.sync.publish_files writes them")
    chosen = steps[-1] if version is None else version
    with open(path) as checkpoint:
        state = build_state(
            checkpoint._store.index.tree,
            lambda name: torch.empty(checkpoint[name].shape, dtype=checkpoint[name].dtype, device="cpu"),
        )
    alone = LocalComm.alone()
    load(state, path, version=chosen, comm=alone)
    save(state, path, comm=alone)
    start_chain_at(path, chosen)
    return chosen
