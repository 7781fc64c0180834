"""What does the page need to show a checkpoint? Its tensors as columns, its files, and the balance over ranks.

Tensors that are cut alike share one picture of their layout: the first so many pictures are part of the facts, others
are asked for by the number of the tensor.
"""

from __future__ import annotations

from typing import Any

from shardwise.checkpoint.index import TensorEntry, stored_values
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.summary import StoredLayouts, measure_balance
from shardwise.geometry import Layout
from shardwise.page.layout_facts import rank_facts, shape_facts, shorten

MOST_PICTURES, MOST_PICTURE_OWNERS = 64, 4096
MOST_VALUES, LONGEST_VALUE = 1000, 200


def checkpoint_facts(title: str, store: Store) -> dict[str, Any]:
    """All that the page shows of a checkpoint, as plain data; only its index is read."""
    index, layouts = store.index, StoredLayouts()
    balance = measure_balance(store, layouts)
    entries = list(index.tensors.values())
    pictures = _Pictures(layouts)
    return {
        "kind": "checkpoint",
        "title": title,
        "format": store.format_title,
        "bytes": sum(entry.nbytes for entry in entries),
        "tensors": [[*_row(entry, layouts), pictures.number_of(entry)] for entry in entries],
        "columns": ["name", "dtype", "shape", "layout", "bytes", "files", "picture"],
        "pictures": pictures.facts,
        "files": [
            [file.name, file.bytes, count] for file, count in zip(index.files, balance.tensors_by_file, strict=True)
        ],
        "ranks": [[rank, balance.held.get(rank), balance.written.get(rank)] for rank in balance.ranks],
        "values": _value_rows(stored_values(index)),
        "opaque": list(index.opaque)[:MOST_VALUES],
    }


def tensor_facts(store: Store, number: int) -> dict[str, Any] | None:
    """The layout of a tensor, by its number; None where the format has no layouts, or there is no such tensor."""
    entries = list(store.index.tensors.values())
    layout = StoredLayouts().layout(entries[number]) if 0 <= number < len(entries) else None
    return None if layout is None else picture_facts(layout)


def picture_facts(layout: Layout) -> dict[str, Any]:
    """A layout without element type: tensors of several types may share it."""
    return {**shape_facts(layout), "ranks": rank_facts(layout), "ranks_per_host": 8}


def _row(entry: TensorEntry, layouts: StoredLayouts) -> list[Any]:
    files = sorted(set(entry.files))
    return [entry.name, entry.dtype.name, list(entry.shape), layouts.notation(entry), entry.nbytes, files]


def _value_rows(values: dict[str, Any]) -> list[list[str]]:
    return [[name, shorten(repr(value), LONGEST_VALUE)] for name, value in list(values.items())[:MOST_VALUES]]


class _Pictures:
    """The distinct layouts that are small enough to be part of the facts."""

    def __init__(self, layouts: StoredLayouts) -> None:
        self.layouts = layouts
        self.facts: list[dict[str, Any]] = []
        self._numbers: dict[tuple[int, tuple[int, ...]], int | None] = {}

    def number_of(self, entry: TensorEntry) -> int | None:
        """The number of a tensor's picture; None: it has none here."""
        key = (id(entry.cut), entry.shape)
        if key not in self._numbers:
            self._numbers[key] = self._add(entry)
        return self._numbers[key]

    def _add(self, entry: TensorEntry) -> int | None:
        layout = self.layouts.layout(entry)
        if layout is None or len(self.facts) >= MOST_PICTURES or len(layout.table) > MOST_PICTURE_OWNERS:
            return None
        self.facts.append(picture_facts(layout))
        return len(self.facts) - 1
