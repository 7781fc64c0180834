"""What is where? A `Layout` is a sharding spec applied to one shape; every such question goes to it.

Layouts are interned: one spec and one shape make one object. They are equal when they mean the same, that is when every
rank holds the same boxes in the same local tensors with the same reduction pending, however they were described.
"""

from __future__ import annotations

import hashlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from shardwise._notebook import draw_html
from shardwise.geometry.box import Box, Piece
from shardwise.geometry.cells import Cells, PieceTable, table_from_boxes, table_from_cells
from shardwise.geometry.coverage import check_coverage
from shardwise.geometry.errors import LayoutError, to_int_tuple
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.placements import Reduction

if TYPE_CHECKING:
    from typing import Self


class ShardingSpec(ABC):
    """A rule that lays out a tensor of any fitting shape. Subclasses are hashable values with at least `pieces`.

    >>> class OddRows(ShardingSpec):
    ...     def pieces(self, shape):
    ...         return [Piece(Box((row,), (1,)), rank=row % 2) for row in range(shape[0])]
    >>> OddRows().layout((3,)).ranks
    (0, 1)
    """

    @abstractmethod
    def pieces(self, shape: Sequence[int]) -> Sequence[Piece]:
        """The boxes of a tensor of this shape and the ranks that hold them, in the order of the local tensors."""

    def layout(self, shape: Sequence[int]) -> Layout:
        """This spec applied to a shape: the same object each time."""
        shape = check_shape(shape)
        key = _InternKey(self, shape)
        return _interned.get(key) or _intern(key, Layout(shape, self))

    def resolve(self, shape: tuple[int, ...]) -> Cells | PieceTable:
        """Where everything is: a product form where there is one, else a table of validated pieces."""
        return build_checked_table(shape, self.pieces(shape))

    def is_arithmetic(self, shape: tuple[int, ...]) -> bool:
        """Whether the spec fits a shape and `local_shapes` follows by arithmetic: then `resolve` can wait."""
        return False

    def local_shapes(self, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of a rank's local tensors, where the spec is arithmetic."""
        raise NotImplementedError

    def reduction(self) -> Reduction | None:
        """The reduction that this spec leaves pending."""
        return None

    def to_json(self) -> dict[str, Any] | None:
        """Plain data from which the spec is rebuilt; None: the layout is written as its pieces."""
        return None


class _InternKey:
    """A spec and a shape, hashed once: dropping a layout must not call a spec's own methods."""

    __slots__ = ("hash", "shape", "spec")

    def __init__(self, spec: ShardingSpec, shape: tuple[int, ...]) -> None:
        self.spec, self.shape = spec, shape
        self.hash = hash((type(spec), spec, shape))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _InternKey):
            return NotImplemented
        same_kind = type(self.spec) is type(other.spec) and self.shape == other.shape
        return same_kind and bool(self.spec == other.spec)


_interned: WeakValueDictionary[_InternKey, Layout] = WeakValueDictionary()
_interning = threading.RLock()


def _intern(key: _InternKey, made: Layout) -> Layout:
    """The one layout of a key: of two threads that made it at the same time, both get that of the first."""
    with _interning:
        found = _interned.get(key)
        if found is None:
            found = _interned[key] = made
        return found


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of ints, or an error."""
    if type(shape) is tuple and all(type(s) is int and s >= 0 for s in shape):
        return shape
    checked = to_int_tuple(shape, "a shape")
    if any(s < 0 for s in checked):
        raise LayoutError(f"a shape has no negative lengths, got {checked}")
    return checked


def build_checked_table(shape: Sequence[int], pieces: Sequence[Piece], replicated: bool = False) -> PieceTable:
    """The table of pieces that are checked to cover the tensor exactly once (each replica once)."""
    for piece in pieces:
        if piece.box.ndim != len(shape):
            raise LayoutError(f"{piece} has {piece.box.ndim} dims; the tensor's shape {tuple(shape)} has {len(shape)}")
    size = (len(pieces), len(shape))
    offsets = np.array([p.box.offsets for p in pieces], np.int64).reshape(size)
    sizes = np.array([p.box.sizes for p in pieces], np.int64).reshape(size)
    ranks = np.array([p.rank for p in pieces], np.int64)
    named = any(p.device is not None for p in pieces)
    devices = tuple(p.device for p in pieces) if named else None
    return check_piece_table(shape, table_from_boxes(offsets, sizes, ranks, devices), replicated)


def check_piece_table(shape: Sequence[int], table: PieceTable, replicated: bool) -> PieceTable:
    """The same table, checked."""
    rows = np.arange(len(table))
    if replicated:
        _check_replicas(table)
        rows = np.unique(table.cells, return_index=True)[1]

    def describe(row: int) -> str:
        return str(table.take(rows[row : row + 1]).pieces()[0])

    check_coverage(shape, table.offsets[rows], table.sizes[rows], describe)
    return table


def _check_replicas(table: PieceTable) -> None:
    pairs = np.stack([table.cells, table.ranks], axis=1)
    _, first, counts = np.unique(pairs, axis=0, return_index=True, return_counts=True)
    if len(counts) and counts.max() > 1:
        twice = table.take(first[counts.argmax()][None]).pieces()[0]
        raise LayoutError(f"{twice} is listed {int(counts.max())} times; a rank can have a box only once")


class Layout:
    """A spec applied to one shape; made by `ShardingSpec.layout(shape)`.

    >>> from shardwise.geometry.specs import ChunkSpec
    >>> layout = ChunkSpec(0, ranks=4).layout((10, 2))
    >>> layout.local_shapes(3)
    ((1, 2),)
    >>> print(layout.pieces[1])
    [3:6, 0:2] on rank 1
    """

    shape: tuple[int, ...]
    spec: ShardingSpec

    def __init__(self, shape: tuple[int, ...], spec: ShardingSpec) -> None:
        self.__dict__.update(shape=shape, spec=spec, _is_arithmetic=spec.is_arithmetic(shape))
        if not self.__dict__["_is_arithmetic"]:
            self.__dict__["_resolved"] = spec.resolve(shape)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Layout is frozen: {name} cannot be set")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _resolved(self) -> Cells | PieceTable:
        return self.spec.resolve(self.shape)

    @cached_property
    def cells(self) -> Cells | None:
        """The product form of a regular layout."""
        return self._resolved if isinstance(self._resolved, Cells) else None

    @cached_property
    def table(self) -> PieceTable:
        """All pieces as NumPy columns."""
        if isinstance(self._resolved, PieceTable):
            return self._resolved
        return table_from_cells(self._resolved, getattr(self.spec, "devices", None))

    @cached_property
    def pending(self) -> Reduction | None:
        """The pending reduction, or None."""
        return self.spec.reduction()

    @cached_property
    def depends_on_data(self) -> bool:
        """Whether values of tensors decided which rank has which rows: then nothing about the layout is remembered."""
        return any(getattr(p, "owners", None) is not None for p in getattr(self.spec, "placements", ()))

    @property
    def is_regular(self) -> bool:
        """Whether the layout is a product of per-dim cuts (mesh, chunk and grid layouts are)."""
        return self.cells is not None

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return self.table.pieces()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a piece (an empty one counts), ascending."""
        return tuple(np.unique(self.table.ranks).tolist())

    @cached_property
    def _by_rank(self) -> tuple[IntArray, IntArray]:
        order = np.argsort(self.table.ranks, kind="stable")
        return order, self.table.ranks[order]

    def rows_of(self, rank: int) -> IntArray:
        """The rows of `table` that a rank holds, in order."""
        order, ranks = self._by_rank
        low, high = np.searchsorted(ranks, (rank, rank + 1))
        return order[low:high]

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank holds, in the order of its local tensors."""
        return self.table.take(self.rows_of(rank)).pieces()

    def ranks_holding(self, box: Box) -> tuple[int, ...]:
        """The ranks that hold at least one element of a box."""
        if box.ndim != self.ndim:
            raise LayoutError(f"{box} has {box.ndim} dims; the tensor's shape {self.shape} has {self.ndim}")
        start, end = np.array(box.offsets, np.int64), np.array(box.ends, np.int64)
        low = np.maximum(self.table.offsets, start)
        high = np.minimum(self.table.offsets + self.table.sizes, end)
        return tuple(np.unique(self.table.ranks[(low < high).all(axis=1)]).tolist())

    @cached_property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that hold the same values, each once; a set of one has no copy elsewhere."""
        table = self.table
        key = np.stack([table.cells, table.addends], axis=1)
        _, group = np.unique(key, axis=0, return_inverse=True)
        order = np.lexsort((table.ranks, np.asarray(group).reshape(-1)))
        edges = np.flatnonzero(np.diff(np.asarray(group).reshape(-1)[order])) + 1
        return tuple(sorted({tuple(part.tolist()) for part in np.split(table.ranks[order], edges) if len(part)}))

    def local_shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of a rank's local tensors: none, one or many."""
        known = self._shapes.get(rank)
        if known is None:
            known = self._shapes[rank] = self._shapes_of(rank)
        return known

    @cached_property
    def _shapes(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        return {}

    def _shapes_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        if self.__dict__["_is_arithmetic"]:
            return self.spec.local_shapes(self.shape, rank)
        own = self.table.take(self.rows_of(rank))
        count = int(own.slots.max()) + 1 if len(own) else 0
        extents = np.zeros((count, self.ndim), np.int64)
        np.maximum.at(extents, own.slots, own.local_offsets + own.sizes)
        return tuple(tuple(row) for row in extents.tolist())

    def elements_per_rank(self) -> dict[int, int]:
        """How many elements each rank holds."""
        totals = np.zeros(len(self.ranks), np.int64)
        np.add.at(totals, np.searchsorted(self.ranks, self.table.ranks), self.table.sizes.prod(axis=1))
        return dict(zip(self.ranks, totals.tolist(), strict=True))

    def bytes_per_rank(self, itemsize: int) -> dict[int, int]:
        """How many bytes each rank holds."""
        return {rank: count * itemsize for rank, count in self.elements_per_rank().items()}

    @cached_property
    def _layout_digest(self) -> bytes:
        """A digest of all that decides what is where."""
        table = self.table
        order, ranks = self._by_rank
        lead = np.full(
            (int(table.cells.max(initial=-1)) + 1, int(table.addends.max(initial=0)) + 1), np.iinfo(np.int64).max
        )
        np.minimum.at(lead, (table.cells, table.addends), table.ranks)
        addends = lead[table.cells, table.addends] if self.pending else np.zeros(len(table), np.int64)
        digest = hashlib.blake2b(repr((self.shape, self.pending)).encode(), digest_size=16)
        for column in (table.slots, table.offsets, table.sizes, table.local_offsets, addends):
            digest.update(np.ascontiguousarray(column[order]).tobytes())
        digest.update(np.ascontiguousarray(ranks).tobytes())
        return digest.digest()

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self._layout_digest))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.shape == other.shape and self._layout_digest == other._layout_digest

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_layout, (self.spec, self.shape)

    def __repr__(self) -> str:
        return f"Layout(shape={self.shape}, spec={self.spec!r})"

    def _repr_html_(self) -> str:
        """A picture for notebooks."""
        return draw_html("layout_html", self)


def rebuild_layout(spec: ShardingSpec, shape: tuple[int, ...]) -> Layout:
    """Make the layout that pickle wrote."""
    return spec.layout(shape)


_rebuild = rebuild_layout  # pickles may name it so
