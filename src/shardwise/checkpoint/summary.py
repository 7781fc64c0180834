"""What is in a checkpoint, in short? The layouts of its tensors in the notation, and how evenly it is spread.

Tensors that are cut alike share one description. The balance has the bytes that each rank had and wrote, as far as the
format records it, and the number of tensors in each file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.checkpoint.errors import CheckpointError
from shardwise.checkpoint.index import StoredCut, TensorEntry, stored_layout
from shardwise.checkpoint.store import Store
from shardwise.geometry import Layout, LayoutError, format_rule


@dataclass(frozen=True, eq=False, slots=True)
class _KnownCut:
    """What is known of a cut; it is kept with its cut, so that the id of this is not used again."""

    cut: StoredCut
    layout: Layout | None
    rule: str
    elements: Mapping[int, int]


class StoredLayouts:
    """The layouts of stored tensors, worked out once for all that are cut alike."""

    def __init__(self) -> None:
        self._known: dict[int, _KnownCut] = {}

    def layout(self, entry: TensorEntry) -> Layout | None:
        """The layout a tensor was saved with; None where the format has no layouts, or it is damaged."""
        return None if entry.cut.spec is None else self._look(entry).layout

    def notation(self, entry: TensorEntry) -> str | None:
        """The rule of the layout in the notation, without dtype and shape; None where the format has no layouts."""
        return None if entry.cut.spec is None else self._look(entry).rule

    def elements_per_rank(self, entry: TensorEntry) -> Mapping[int, int]:
        """How many elements each rank held, as far as that is known."""
        return {} if entry.cut.spec is None else self._look(entry).elements

    def _look(self, entry: TensorEntry) -> _KnownCut:
        if id(entry.cut) not in self._known:
            self._known[id(entry.cut)] = _describe_cut(entry)
        return self._known[id(entry.cut)]


def _describe_cut(entry: TensorEntry) -> _KnownCut:
    try:
        layout = stored_layout(entry)
    except CheckpointError:
        return _KnownCut(entry.cut, None, "damaged", {})
    return _KnownCut(entry.cut, layout, rule_of(layout), layout.elements_per_rank())


def rule_of(layout: Layout) -> str:
    """How a layout cuts, in the notation; a tensor that is whole on rank 0 has the rule "@ 0".

    >>> from shardwise.geometry import ChunkSpec
    >>> rule_of(ChunkSpec(0, 4).layout((8, 2)))
    'as chunk(0) over 0-3'
    """
    try:
        return format_rule(layout) or "@ 0"
    except LayoutError:  # pieces with a pending reduction have no notation
        return repr(layout.spec)


@dataclass(frozen=True)
class CheckpointBalance:
    """Bytes by rank, as far as the format records it, and the number of tensors in each file."""

    held: Mapping[int, int]
    written: Mapping[int, int]
    tensors_by_file: Sequence[int]

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.held, *self.written})


def measure_balance(store: Store, layouts: StoredLayouts) -> CheckpointBalance:
    """How a checkpoint is spread, as far as its format records who stored copies of what."""
    index = store.index
    held: dict[int, int] = {}
    in_file = [0] * len(index.files)
    tensors = [0] * len(index.files)
    for entry in index.tensors.values():
        elements_per_rank = layouts.elements_per_rank(entry) if store.format.has_copies else {}
        for rank, elements in elements_per_rank.items():
            held[rank] = held.get(rank, 0) + elements * entry.dtype.itemsize
        for number, (_, elements) in zip(entry.files, entry.cut.extents, strict=True):
            in_file[number] += elements * entry.dtype.itemsize
        for number in set(entry.files):
            tensors[number] += 1
    written: dict[int, int] = {}
    for file, nbytes in zip(index.files, in_file, strict=True):
        writer = store.format.writer_of(file.name)
        if writer is not None:
            written[writer] = written.get(writer, 0) + nbytes
    return CheckpointBalance(held, written, tensors)
