"""What does a plan cost? A table of names, shapes, layouts, memory on a rank, and bytes that a training step moves.

The figures for communication are estimates from the plan alone, in bytes that the busiest rank receives:

- *gradient traffic*, for each step. An axis that cuts the batch and replicates a parameter sums its gradients: twice
  its bytes. One that cuts both gathers the parameter as well, unless an operator finds something that moves less.
  Parts that are on several ranks (`each`) are summed among these.
- *traffic per row*, for each row (token) of a layer's input. A weight cut along its inputs leaves sums of its outputs
  pending in the forward pass, one cut along its outputs those of its inputs in the backward pass; a table cut in rows,
  rows. Layers that read the same input (queries, keys and values) share its sum, which counts for each of them here.

Below the table: how much of the parameters is split at all, what stays whole if that is less than half, and heads of
attention that are cut apart (`nn/heads.py` keeps most plans from it): the results are right, but each use gathers them.

A planner that places whole tables and splits those that do not fit, so that ranks hold about equal bytes.

1. What is not a table is held by every rank and fills all of them alike.
2. Tables are taken from the largest to the smallest. One that fits on the emptiest rank goes there whole.
3. Those that do not fit come last and are cut by rows, like water that is poured over the ranks: it levels them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

from torch import Tensor, nn

from shardwise._text import draw_html, public
from shardwise.geometry import Box, EnumerableSpec, Layout, MeshSpec, Piece, Placement, Replicate, Shard
from shardwise.geometry.notation import format_placement
from shardwise.nn.heads import find_projections
from shardwise.nn.plan import STAGE_AXIS, ModelPlan, ShardingPlan, ShardingPlanner, owners_of
from shardwise.transfer.transfer import format_bytes

MOST_WHOLE = 4  # shown of the parameters that stay whole
HEAD = ("parameter", "count", "shape", "layout", "memory", "gradient traffic", "traffic per row")
_NUMBER = re.compile(r"\b\d+\b")


@dataclass(frozen=True)
class PlanRow:
    """One parameter; `count` of them in a table where equal layers are one row; `place` is that of its stage."""

    name: str
    shape: tuple[int, ...]
    layout: str
    elements: int
    rank_bytes: int
    gradient_bytes: int
    row_bytes: int
    whole_bytes: int
    place: int = 0
    count: int = 1

    @property
    def costs(self) -> tuple[object, ...]:
        """All that must be equal for two parameters to share a row."""
        return (*self.__dict__.values(),)[1:-1]


@dataclass(frozen=True)
class PlanTable:
    """The rows of a plan for one model; prints as a table in which equal layers are one row.

    >>> from shardwise.geometry import Mesh
    >>> table = describe_plan(ModelPlan(Mesh.of(tp=2), {"weight": "S(0)"}), nn.Linear(4, 8))
    >>> table.elements, table.rank_bytes
    (40, 96)
    """

    mesh: str
    rows: tuple[PlanRow, ...]
    warnings: tuple[str, ...] = ()

    @property
    def split_share(self) -> float:
        """The share of the parameters' bytes that is split: no rank has all of such a parameter."""
        total = sum(row.whole_bytes for row in self.rows)
        return sum(row.whole_bytes for row in self.rows if row.rank_bytes < row.whole_bytes) / total if total else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """How much the plan splits, what stays whole if that is less than half, and heads that are cut apart."""
        split = sum(row.rank_bytes < row.whole_bytes for row in self.rows)
        share = f"split: {split} of {len(self.rows)} parameters, {100 * self.split_share:.1f} % of the bytes"
        if not split or self.split_share >= 0.5:
            return (share, *self.warnings)
        whole = [row for row in self.folded() if row.rank_bytes == row.whole_bytes]
        largest = sorted(whole, key=lambda row: -row.whole_bytes * row.count)[:MOST_WHOLE]
        names = ", ".join(f"{row.name} ({format_bytes(row.whole_bytes * row.count)})" for row in largest)
        return (f"{share}; whole on every rank, as their patterns say or without one: {names}", *self.warnings)

    @property
    def elements(self) -> int:
        """The parameters of the model."""
        return sum(row.elements for row in self.rows)

    @property
    def rank_bytes(self) -> int:
        """The bytes of parameters on the fullest rank."""
        return self._most("rank_bytes")

    @property
    def gradient_bytes(self) -> int:
        """The bytes that the busiest rank receives for gradients in a step."""
        return self._most("gradient_bytes")

    @property
    def row_bytes(self) -> int:
        """The bytes that the busiest rank receives for activations, for each row of the layers' inputs."""
        return self._most("row_bytes")

    def _most(self, name: str) -> int:
        """The largest sum of any place along the axis of stages."""
        sums = Counter[int]()
        for row in self.rows:
            sums[row.place] += getattr(row, name)
        return max(sums.values(), default=0)

    def folded(self) -> tuple[PlanRow, ...]:
        """The rows with equal layers folded: 'blocks.{0-79}.up.weight'."""
        groups: dict[tuple[object, ...], list[PlanRow]] = {}
        for row in self.rows:
            groups.setdefault((_NUMBER.sub("#", row.name), row.costs), []).append(row)
        return tuple(_fold_plan_rows(rows) for rows in groups.values())

    def _table(self) -> list[tuple[str, ...]]:
        total = (f"all on {self.mesh}", f"{len(self.rows):,}", f"{self.elements:,}", "")
        sizes = map(format_bytes, (self.rank_bytes, self.gradient_bytes, self.row_bytes))
        return [*map(_format_plan_row, self.folded()), (*total, *sizes)]

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        return draw_html("table_html", f"plan on {self.mesh}", HEAD, self._table())

    def __str__(self) -> str:
        lines = [HEAD, *self._table()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
        texts = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*texts, *self.notes])


def _format_plan_row(row: PlanRow) -> tuple[str, ...]:
    sizes = (row.rank_bytes, row.gradient_bytes, row.row_bytes)
    shape = "x".join(map(str, row.shape)) or "scalar"
    return (row.name, f"{row.count:,}", shape, row.layout, *(format_bytes(b * row.count) if b else "-" for b in sizes))


def _fold_plan_rows(rows: list[PlanRow]) -> PlanRow:
    """One row for parameters whose names differ in numbers only."""
    if len(rows) == 1:
        return rows[0]
    numbers = list(zip(*(map(int, _NUMBER.findall(row.name)) for row in rows), strict=True))
    texts = iter(str(n[0]) if min(n) == max(n) else f"{{{min(n)}-{max(n)}}}" for n in numbers)
    return replace(rows[0], name=_NUMBER.sub(lambda _: next(texts), rows[0].name), count=len(rows))


@public
def describe_plan(plan: ModelPlan, module: nn.Module) -> PlanTable:
    """Show what a plan does to a model: layouts, memory and traffic. Needs no process group and no memory.

    >>> from shardwise.geometry import Mesh
    >>> plan = ModelPlan(Mesh.of(dp=2, tp=2), {"*.weight": "tp: S(0)"}, input_plan="dp: S(0)")
    >>> print(describe_plan(plan, nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8, bias=False))))
    parameter         count  shape  layout   memory  gradient traffic  traffic per row
    0.weight          1      8x4    R, S(0)  64 B    64 B              16 B
    0.bias            1      8      R, R     32 B    32 B              -
    1.weight          1      8x8    R, S(0)  128 B   128 B             32 B
    all on dp=2,tp=2  3      104             224 B   224 B             48 B
    split: 2 of 3 parameters, 92.3 % of the bytes
    """
    owners = owners_of(module)
    rows = (
        _make_plan_row(plan, name, owners[id(tensor)], layout, tensor.dtype.itemsize)
        for name, tensor, layout in plan.layouts(module)
    )
    return PlanTable(str(plan.mesh), tuple(rows), tuple(find_cut_heads(plan, module)))


def _make_plan_row(plan: ModelPlan, name: str, owners: list[nn.Module], layout: Layout, itemsize: int) -> PlanRow:
    spec = layout.spec
    assert isinstance(spec, MeshSpec)
    held = _most_elements(layout) * itemsize
    return PlanRow(
        name,
        layout.shape,
        ", ".join(map(format_placement, spec.placements)),
        layout.numel,
        held,
        round(sum(count for _, count in gradient_bytes_by_axis(plan, spec, held))),
        round(sum(b for owner in owners for b in _row_bytes(plan, spec, owner, layout.shape)) * itemsize),
        layout.numel * itemsize,
        0 if plan.stages is None else plan.mesh.coordinates(int(spec.mesh.ranks.reshape(-1)[0]))[STAGE_AXIS],
    )


def find_cut_heads(plan: ModelPlan, module: nn.Module) -> list[str]:
    """What a plan does to heads of attention that it cuts apart, a text for each kind of layer.

    Plans with an `input_plan` cut linear layers by heads (`nn/heads.py`); others, and other layers, are named here.
    Along axes that split the batch as well, parameters are gathered before they are used.

    >>> from shardwise.geometry import Mesh
    >>> attention = nn.MultiheadAttention(6, 3)
    >>> find_cut_heads(ModelPlan(Mesh.of(tp=2), {"out_proj.weight": "S(1)"}), attention)[0]
    'out_proj.weight: 3 heads of 2 along dim 1 are cut apart by S(1) on tp=2, as rank 0 holds 3 of 6; ...'
    """
    found = dict[str, str]()
    batch = plan.input_placements or (Replicate(),) * plan.mesh.ndim
    layouts = {name: (tensor, layout) for name, tensor, layout in plan.layouts(module)}
    for one in find_projections(module, ((name, tensor) for name, (tensor, _) in layouts.items())):
        layout, name, dim, length, size = layouts[one.name][1], one.name, one.dim, one.length, one.size
        spec = layout.spec
        assert isinstance(spec, MeshSpec)
        kept = [Replicate() if isinstance(b, Shard) else p for p, b in zip(spec.placements, batch, strict=True)]
        if Shard not in map(type, kept):
            continue
        used = MeshSpec(spec.mesh, kept).layout(layout.shape)
        table = used.table
        cut = (table.offsets[:, dim] % length > 0) | ((table.offsets[:, dim] + table.sizes[:, dim]) % length > 0)
        if size == length or not cut.any():
            continue
        rank = int(table.ranks[cut][0])
        held = sum(p.box.sizes[dim] for p in used.pieces_of(rank))
        found.setdefault(
            _NUMBER.sub("*", name),
            f"{name}: {size // length} heads of {length} along dim {dim} are cut apart by "
            f"{', '.join(map(format_placement, kept))} on {spec.mesh}, as rank {rank} holds {held} of {size}; each use "
            "gathers them: split it over a number of ranks that divides the heads, or leave it whole",
        )
    return list(found.values())


def _most_elements(layout: Layout) -> int:
    return max(layout.elements_per_rank().values())


def _iterate_axes(plan: ModelPlan, spec: MeshSpec) -> Iterator[tuple[Placement, Placement, float]]:
    """For each axis: what it does to inputs, what it does to the parameter, and the share that other ranks hold."""
    inputs = plan.input_placements or (Replicate(),) * spec.mesh.ndim
    for given, placed, size in zip(inputs, spec.placements, spec.mesh.shape, strict=True):
        yield given, placed, (size - 1) / size


def gradient_bytes_by_axis(plan: ModelPlan, spec: MeshSpec, held: int) -> Iterator[tuple[str, float]]:
    """The bytes that a rank receives along each axis for the gradient of a parameter of which it holds `held` bytes."""
    axes = zip(spec.mesh.axes, _iterate_axes(plan, spec), spec.mesh.shape, strict=True)
    for axis, (given, placed, share), size in axes:
        if isinstance(given, Shard):
            yield axis, share * held * (3 * size if isinstance(placed, Shard) else 2)
        elif isinstance(placed, Shard) and placed.each is not None:  # the copies of a part are summed among themselves
            parts = [(n * copies, copies) for n, copies in zip(placed.groups or (1,), placed.each, strict=True)]
            yield axis, held * sum(2 * n * (1 - 1 / copies) for n, copies in parts) / max(1, sum(n for n, _ in parts))


def _row_bytes(plan: ModelPlan, spec: MeshSpec, owner: nn.Module, shape: tuple[int, ...]) -> Iterator[float]:
    """The elements that a rank receives for one row of the layer's input."""
    for given, placed, share in _iterate_axes(plan, spec):
        if not isinstance(placed, Shard) or isinstance(given, Shard) or len(shape) != 2:
            continue
        dim = placed.dim % 2
        if isinstance(owner, nn.Linear) or (isinstance(owner, nn.Embedding | nn.EmbeddingBag) and dim == 0):
            yield 2 * share * (shape[1] if dim == 0 else shape[0])


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
        summary = f"{len(self.placings)} tables, {split} of them split; fullest rank / mean: {self.ratio:.3f}"
        return "\n".join([*lines, summary])


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

    @public
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
            raise ValueError(
                f"BalancedPlanner takes a number of ranks, 1 or more, or a list of different ranks; got {ranks!r}"
            )
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
