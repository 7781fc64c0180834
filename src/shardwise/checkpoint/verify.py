"""What is wrong with a stored checkpoint? Every problem, not only the first, each with its file and its tensor.

1. Files: each is there, as long as the index says, and begins with the header that was written.
2. Boxes: the header of the file describes the same elements at the same place as the index.
3. Bytes: every block has the checksum of the index.

That the boxes of each tensor tile it is checked whenever an index is read.

What killed saves left next to a checkpoint is removed only when the one that stays has been read whole and found right.
Where it is broken, or there is none, every folder that has an index stays.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.checksums import block_count
from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.folders import find_checkpoint, is_complete, list_leftovers, recover_commit
from shardwise.checkpoint.formats.safetensors import HeaderEntry, parse_header, safetensors_code_and_shape
from shardwise.checkpoint.index import StoredCut, TensorEntry, stored_layout
from shardwise.checkpoint.storage.place import local_path
from shardwise.checkpoint.store import Store, open_store


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong in a file, with the tensor it concerns if it is one."""

    file: str
    tensor: str | None
    text: str

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f"tensor {self.tensor!r}: "
        return f"{self.file}: {tensor}{self.text}"


def count_checked_bytes(store: Store) -> int:
    """How many stored bytes have checksums, and are read by `find_problems`."""
    return sum(
        elements * entry.dtype.itemsize
        for entry in store.index.tensors.values()
        for (_, elements), sums in zip(entry.cut.extents, entry.sums, strict=True)
        if sums
    )


def find_problems(store: Store, on_bytes: Callable[[int], None] = lambda count: None) -> Iterator[Problem]:
    """Read everything and yield all problems; `on_bytes` is called with how much has been read."""
    headers: dict[int, dict[int, HeaderEntry] | None] = {}
    for number in range(len(store.index.files)):
        try:
            headers[number] = _read_file_header(store, number)
        except CheckpointError as error:
            yield Problem(store.index.files[number].name, None, _without_path(error, store, number))
            headers[number] = None
    layouts: dict[StoredCut, str | None] = {}
    for entry in store.index.tensors.values():
        if entry.cut not in layouts:
            layouts[entry.cut] = _layout_problem(entry)
        text = layouts[entry.cut]
        if text is not None:
            yield Problem("the index", entry.name, text)
        for box in range(len(entry.cut)):
            yield from _find_box_problems(store, entry, box, headers[entry.files[box]], on_bytes)


def _read_file_header(store: Store, number: int) -> dict[int, HeaderEntry]:
    """What the header of a file says, by first byte; nothing for files of a kind that has no such header."""
    file = store.index.files[number]
    data = store.reader(number)
    if file.header_sum is None:
        return {}
    store.verify_header(number)
    found = parse_header(data.read(0, file.data_start).tobytes(), file.bytes, str(store.folder / file.name))
    return {entry.begin: entry for entry in found.values() if 0 not in entry.shape}


def _without_path(error: CheckpointError, store: Store, number: int) -> str:
    return str(error).removeprefix(f"{store.folder / store.index.files[number].name}: ")


def _layout_problem(entry: TensorEntry) -> str | None:
    try:
        stored_layout(entry)
    except CheckpointError as error:
        return str(error).removeprefix(f"tensor {entry.name!r}: ")
    return None


def _find_box_problems(
    store: Store, entry: TensorEntry, box: int, header: dict[int, HeaderEntry] | None, on_bytes: Callable[[int], None]
) -> Iterator[Problem]:
    name, (sizes, elements) = store.index.files[entry.files[box]].name, entry.cut.extents[box]
    nbytes = entry.run_bytes(box)
    if header is None:
        on_bytes(nbytes if entry.sums[box] else 0)
        yield Problem(name, entry.name, f"{entry.cut.box(box)} is lost with its file")
        return
    if header and elements and not _agrees(header.get(entry.begins[box]), entry, sizes):
        yield Problem(name, entry.name, f"the header has no {entry.dtype}{list(sizes)} at byte {entry.begins[box]}")
    bad = list(_find_bad_blocks(store, entry, box, nbytes, on_bytes))
    if bad:
        text = f"{bad[0]}; {len(bad)} of {block_count(nbytes, store.index.block_bytes)} blocks of {entry.cut.box(box)}"
        yield Problem(name, entry.name, text)


def _agrees(found: HeaderEntry | None, entry: TensorEntry, sizes: tuple[int, ...]) -> bool:
    return found is not None and safetensors_code_and_shape(found.dtype, found.shape) == safetensors_code_and_shape(
        entry.dtype, sizes
    )


def _find_bad_blocks(
    store: Store, entry: TensorEntry, box: int, nbytes: int, on_bytes: Callable[[int], None]
) -> Iterator[str]:
    step = store.index.block_bytes
    for block in range(block_count(nbytes, step) if entry.sums[box] else 0):
        try:
            store.verify(entry, box, block, block + 1)
        except CheckpointError as error:
            text = _without_path(error, store, entry.files[box])
            yield text.removeprefix(f"tensor {entry.name!r}: ")
        on_bytes(min(step, nbytes - block * step))


def leftovers(path: str | os.PathLike[str]) -> list[Path]:
    """The temporary folders that killed saves and reshards left next to this checkpoint, to be removed.

    Where there is no checkpoint, complete ones are not among them: they are the only ones there are.

    >>> leftovers("no/such/checkpoint")
    []
    """
    whole = local_path(path)
    found = list_leftovers(whole)
    try:
        if is_complete(find_checkpoint(whole)):
            return found
    except CheckpointError:
        pass
    return [folder for folder in found if not is_complete(folder)]


def find_checkpoint_problem(path: Path, progress: Callable[[int, int], None] | None = None) -> str | None:
    """Read a checkpoint whole; what is wrong with it, or None. `progress` gets the bytes read so far, and all bytes."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    try:
        store = open_store(path)
        total = count_checked_bytes(store)
        try:
            return next((str(problem) for problem in find_problems(store, advance)), None)
        finally:
            store.close()
    except (CheckpointError, OSError) as error:
        return str(error)


def clean(path: str | os.PathLike[str]) -> list[Path]:
    """Complete a killed commit, remove what killed saves left, and return what was removed; see `leftovers`.

    The checkpoint is read and verified first; if it is damaged, nothing that has an index is removed. Do not call it
    while a save to this path is running.

    >>> clean("no/such/checkpoint")
    []
    """
    whole = local_path(path)
    recover_commit(whole)
    found = leftovers(path)
    complete = [folder for folder in found if is_complete(folder)]
    if complete and (problem := find_checkpoint_problem(whole)) is not None:
        raise CheckpointError(
            f"{whole} is damaged, so {', '.join(folder.name for folder in complete[:3])} may be needed and nothing was "
            f"removed: {problem}"
        )
    for folder in found:
        shutil.rmtree(folder)
    return found
