"""A planner that places whole tables and splits those that do not fit, so that ranks hold about equal bytes.

1. What is not a table is held by every rank and fills all of them alike.
2. Tables are taken from the largest to the smallest. One that fits on the emptiest rank goes there whole.
3. Those that do not fit come last and are cut by rows, like water that is poured over the ranks: it levels them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

from torch import Tensor, nn

from shardwise.geometry import Box, EnumerableSpec, Piece
from shardwise.nn.plan import ShardingPlan, ShardingPlanner, owners_of
from shardwise.transfer.transfer import format_bytes

IsTable: TypeAlias = Callable[[str, nn.Module], bool]
Heap: TypeAlias = list[tuple[int, int]]  # the bytes of a rank and its place among the ranks, the emptiest first
BAR = 40


def is_embedding_table(name: str, owner: nn.Module) -> bool:
    """Whether a parameter is the table of an nn.Embedding or nn.EmbeddingBag."""
    return isinstance(owner, nn.Embedding | nn.EmbeddingBag)


@dataclass(frozen=True)
class TablePlacement:
    """Where one table goes: ranks and the number of rows of each, in the order of the rows."""

    name: str
    shape: tuple[int, ...]
    row_bytes: int
    parts: tuple[tuple[int, int], ...]

    def spec(self) -> EnumerableSpec:
        """The boxes of rows."""
        pieces, start = [], 0
        for rank, rows in self.parts:
            pieces.append(Piece(Box((start, *(0,) * (len(self.shape) - 1)), (rows, *self.shape[1:])), rank))
            start += rows
        return EnumerableSpec(pieces)


@dataclass(frozen=True)
class Balance:
    """What a planner found: the bytes of each rank, and where each table goes; prints as a table with bars.

    >>> found = BalancedPlanner(2).balance(nn.ModuleList([nn.Embedding(100, 4), nn.Embedding(50, 4)]))
    >>> found.bytes_by_rank, round(found.ratio, 2)
    ({0: 1600, 1: 800}, 1.33)
    """

    bytes_by_rank: dict[int, int]
    replicated_bytes: int
    placings: tuple[TablePlacement, ...]

    @property
    def ratio(self) -> float:
        """The bytes of the fullest rank over the mean: 1.0 is perfect."""
        held = self.bytes_by_rank.values()
        return max(held) * len(held) / sum(held) if any(held) else 1.0

    def __str__(self) -> str:
        largest = max(self.bytes_by_rank.values()) or 1
        lines = [
            f"rank {rank:>4}  {format_bytes(held):>10}  {'#' * round(BAR * held / largest)}"
            for rank, held in self.bytes_by_rank.items()
        ]
        split = sum(len(p.parts) > 1 for p in self.placings)
        told = f"{len(self.placings)} tables, {split} of them split; fullest rank / mean: {self.ratio:.3f}"
        return "\n".join([*lines, told])


class BalancedPlanner(ShardingPlanner):
    """Places tables whole, splits by rows those that do not fit in `memory_limit` bytes, and balances the ranks.

    `is_table(name, owner)` says which parameters are placed; by default those of nn.Embedding and nn.EmbeddingBag. All
    others count on every rank. `bytes_per_byte` is what training holds for each byte of a parameter: 3 with its
    gradient and one momentum.

    >>> tables = nn.ModuleList([nn.Embedding(100, 4), nn.Embedding(60, 4), nn.Embedding(50, 4)])
    >>> print(BalancedPlanner(2, memory_limit=1700).balance(tables))
    rank    0      1.7 kB  ########################################
    rank    1      1.7 kB  ########################################
    3 tables, 1 of them split; fullest rank / mean: 1.000
    >>> BalancedPlanner(2, memory_limit=1000).build_plan(tables)
    Traceback (most recent call last):
    ...
    ValueError: 3,360 bytes do not fit in 2 ranks of 1,000 bytes: ...
    """

    def __init__(
        self,
        ranks: int | Sequence[int],
        memory_limit: int | None = None,
        *,
        is_table: IsTable = is_embedding_table,
        bytes_per_byte: float = 1.0,
    ) -> None:
        self.ranks = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"BalancedPlanner needs distinct ranks; got {list(self.ranks)}")
        self.memory_limit, self.is_table, self.bytes_per_byte = memory_limit, is_table, bytes_per_byte

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return where each table goes."""
        return ShardingPlan({placing.name: placing.spec() for placing in self.balance(module).placings})

    def balance(self, module: nn.Module) -> Balance:
        """Return the placing of all tables and what each rank then holds; nothing is allocated or sent."""
        tables, rest = self._sorted_tables(module)
        self._check_total(sum(map(self.bytes_of, tables.values())), rest)
        loads = dict.fromkeys(self.ranks, rest)
        heap = [(held, place) for place, held in enumerate(loads.values())]
        placings = [self._place(name, tensor, loads, heap) for name, tensor in tables.items()]
        placings = [
            placing if placing.parts else self._split(placing, loads, self.memory_limit or 0) for placing in placings
        ]
        return Balance(loads, rest, tuple(placings))

    def bytes_of(self, tensor: Tensor) -> int:
        """What a parameter takes on a rank that holds it."""
        return round(tensor.numel() * tensor.dtype.itemsize * self.bytes_per_byte)

    def _sorted_tables(self, module: nn.Module) -> tuple[dict[str, Tensor], int]:
        """The tables from the largest to the smallest, and the bytes of all other parameters."""
        tables: dict[str, Tensor] = {}
        rest, owners = 0, owners_of(module)
        for name, tensor in module.named_parameters():
            if tensor.dim() and any(self.is_table(name, owner) for owner in owners[id(tensor)]):
                tables[name] = tensor
            else:
                rest += self.bytes_of(tensor)
        return dict(sorted(tables.items(), key=lambda item: (-self.bytes_of(item[1]), item[0]))), rest

    def _check_total(self, tables: int, rest: int) -> None:
        limit, count = self.memory_limit, len(self.ranks)
        if limit is not None and tables + rest * count > limit * count:
            raise ValueError(
                f"{tables + rest * count:,} bytes do not fit in {count} ranks of {limit:,} bytes: {tables:,} bytes of "
                f"tables and {rest:,} bytes of other parameters on each rank; pass a memory_limit of at least "
                f"{-(-tables // count) + rest:,} bytes, or more ranks"
            )

    def _place(self, name: str, tensor: Tensor, loads: dict[int, int], heap: Heap) -> TablePlacement:
        """Put a table on the emptiest rank, the first of the heap; one that does not fit there has no parts yet."""
        rows = tensor.shape[0]
        row_bytes = -(-self.bytes_of(tensor) // rows) if rows else 0
        held, place = heap[0]
        if self.memory_limit is not None and held + rows * row_bytes > self.memory_limit:
            return TablePlacement(name, tuple(tensor.shape), row_bytes, ())
        emptiest = self.ranks[place]
        loads[emptiest] += rows * row_bytes
        heapreplace(heap, (loads[emptiest], place))
        return TablePlacement(name, tuple(tensor.shape), row_bytes, ((emptiest, rows),))

    def _split(self, placing: TablePlacement, loads: dict[int, int], limit: int) -> TablePlacement:
        """Give each rank rows so that the emptiest are filled to one level."""
        rows, row_bytes = placing.shape[0], placing.row_bytes
        room = {rank: (limit - loads[rank]) // row_bytes for rank in self.ranks}
        if sum(room.values()) < rows:
            raise ValueError(
                f"{placing.name} has {rows:,} rows of {row_bytes:,} bytes, and the ranks have room for "
                f"{sum(room.values()):,} of them within {limit:,} bytes each; pass a larger memory_limit or more ranks"
            )
        level = _find_fill_level(sorted(loads.values()), rows * row_bytes)
        given = {r: max(0, min(room[r], int((level - loads[r]) // row_bytes))) for r in self.ranks}
        heap = [(loads[r] + given[r] * row_bytes, i) for i, r in enumerate(self.ranks) if given[r] < room[r]]
        heapify(heap)
        for _ in range(rows - sum(given.values())):
            height, place = heappop(heap)
            given[self.ranks[place]] += 1
            if given[self.ranks[place]] < room[self.ranks[place]]:
                heappush(heap, (height + row_bytes, place))
        for rank, count in given.items():
            loads[rank] += count * row_bytes
        return replace(placing, parts=tuple((rank, count) for rank, count in given.items() if count))


def _find_fill_level(loads: Sequence[int], size: int) -> float:
    """The height that `size` reaches when it is poured over ascending loads.

    >>> _find_fill_level([0, 10, 50], 30)
    20.0
    """
    total = size
    for count, load in enumerate(loads, start=1):
        total += load
        if count == len(loads) or total / count <= loads[count]:
            return total / count
    raise AssertionError("a level is found at the last rank at the latest")
