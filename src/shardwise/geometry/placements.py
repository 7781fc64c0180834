"""What does one mesh axis do to a tensor? It shards a dim, replicates, or leaves a reduction pending.

All arithmetic on 1-D splits is here too; every spec shares it. A part is a tuple of intervals `(start, stop)`, in their
order in the owner's local tensor. Splitting a part among n ranks:

1. cut the part at group boundaries, if the placement declares groups;
2. share out each group's rows: as torch.chunk does, by given sizes, block by block, or each row to its owner. With a
   unit, chunk counts units of rows in place of rows, and other rules are checked: no cut falls inside a unit. In
   zigzag, chunk makes 2 n parts, of which rank i gets the i-th from the front and the i-th from the end;
3. a rank's new part is the concatenation of what it got from each group, without empty intervals unless all are empty.

A group may be cut for fewer parts than there are ranks, each part then for several ranks that follow each other: copies
(heads of keys and values, of which a model has fewer than ranks). The gradients of copies are addends: each rank uses
its copy by itself. So the dual of a split with copies is the same split with a sum of the copies pending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise._text import count_of
from shardwise.geometry.box import LayoutError, to_int_tuple

IntArray: TypeAlias = npt.NDArray[np.int64]
Interval: TypeAlias = tuple[int, int]
DimIntervals: TypeAlias = tuple[Interval, ...]


def chunk_sizes(length: int, count: int) -> tuple[int, ...]:
    """The lengths that `torch.chunk` produces, with zeros for the chunks it omits.

    >>> chunk_sizes(10, 4), chunk_sizes(5, 4), chunk_sizes(2, 4)
    ((3, 3, 3, 1), (2, 2, 1, 0), (1, 1, 0, 0))
    """
    step = -(-length // count)
    return tuple(min(step, max(0, length - i * step)) for i in range(count))


def even_edges(start: Any, end: Any, count: int, unit: int, number: Any) -> Any:
    """Where part `number` begins of the rows from `start` to `end` of a dim, if chunks of units are cut; also arrays.

    >>> [even_edges(0, 14, 3, 4, number) for number in range(4)]
    [0, 8, 14, 14]
    """
    first, last = start // unit, -(-end // unit)
    row = (first + number * -((first - last) // count)) * unit
    if isinstance(row, int):
        return max(start, min(end, row))
    return np.clip(row, start, end)


def bounds(sizes: Sequence[int]) -> list[int]:
    """Where the parts of these sizes begin and end: `[0, s0, s0+s1, ...]`."""
    return list(accumulate(sizes, initial=0))


def split_part(part: DimIntervals, shard: Shard, count: int, axis: str) -> list[DimIntervals]:
    """Split what one rank holds of a dim among the `count` ranks of an axis.

    >>> split_part(((0, 10),), Shard(0), 4, "tp")
    [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]
    >>> split_part(((0, 8),), Shard(0, groups=(4, 2, 2)), 2, "tp")
    [((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8))]
    >>> split_part(((0, 8),), Shard(0, block=2), 2, "tp")
    [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    >>> split_part(((0, 10),), Shard(0, unit=4), 2, "tp")
    [((0, 8),), ((8, 10),)]
    >>> split_part(((0, 8),), Shard(0, zigzag=True), 2, "tp")
    [((0, 2), (6, 8)), ((2, 6),)]
    >>> split_part(((0, 6),), Shard(0, groups=(4, 2), each=(1, 2)), 2, "tp")
    [((0, 2), (4, 6)), ((2, 6),)]
    """
    if shard.owners is not None:
        return [_merge_intervals(p, part) for p in _deal_to_owners(part, shard, shard.owners, count, axis)]
    parts: list[list[Interval]] = [[] for _ in range(count)]
    for number, group in _cut_at_groups(part, shard):
        copies = 1 if shard.each is None else shard.each[number]
        if count % copies:
            raise LayoutError(
                f"{shard.format()} puts each part of group {number} on {count_of(copies, 'rank')}, and axis {axis!r} "
                f"has {count}; write each with a divisor of {count}"
            )
        for index, start, stop in _deal_rows(group, shard, count // copies, axis):
            for rank in range(index * copies, (index + 1) * copies):
                parts[rank].extend(_take_interval_rows(group, start, stop))
    return [_merge_intervals(p, part) for p in parts]


def _intervals_length(part: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in part)


def _cut_at_groups(part: DimIntervals, shard: Shard) -> list[tuple[int, DimIntervals]]:
    """The groups that a part has rows of, with their numbers."""
    if shard.groups is None:
        return [(0, part)]
    edges = bounds(shard.groups)
    cut = [tuple((max(a, s), min(b, e)) for s, e in part if max(a, s) < min(b, e)) for a, b in pairwise(edges)]
    return [(number, c) for number, c in enumerate(cut) if c]


def _deal_to_owners(part: DimIntervals, shard: Shard, owners: RowOwners, count: int, axis: str) -> list[list[Interval]]:
    """The rows of a part by owner; owners are those of the whole dim, whatever other axes have made of it before."""
    if owners.count > count or max((stop for _, stop in part), default=0) > len(owners):
        raise LayoutError(
            f"dim {shard.dim} has owners 0 to {owners.count - 1} for {len(owners)} rows over axis {axis!r} of "
            f"{count} ranks; pass an owner below {count} for every row"
        )
    parts: list[list[Interval]] = [[] for _ in range(count)]
    ends = owners.starts + owners.lengths
    for first, last in part:
        low, high = np.searchsorted(ends, first, side="right"), np.searchsorted(owners.starts, last, side="left")
        for run in range(int(low), int(high)):
            start, stop = max(first, int(owners.starts[run])), min(last, int(ends[run]))
            parts[int(owners.holders[run])].append((start, stop))
    return parts


def _deal_rows(part: DimIntervals, shard: Shard, count: int, axis: str) -> list[tuple[int, int, int]]:
    """(rank index, first row, last row + 1) of every run of rows of a part, in order."""
    length = _intervals_length(part)
    if shard.block is not None:
        starts = range(0, length, shard.block)
        edges, ranks = [*starts, length], [i % count for i in range(len(starts))]
    elif shard.zigzag:
        edges, ranks = _chunk_edges(part, shard.unit or 1, 2 * count), [*range(count), *reversed(range(count))]
    elif shard.sizes is None:
        edges, ranks = _chunk_edges(part, shard.unit or 1, count), list(range(count))
    else:
        edges, ranks = bounds(shard.sizes), list(range(count))
        if len(shard.sizes) != count or edges[-1] != length:
            raise LayoutError(
                f"dim {shard.dim} of length {length} is split into sizes {shard.sizes} over axis {axis!r} of {count} "
                f"ranks; pass {count} sizes that add up to {length}"
            )
    if shard.unit is not None and not shard.is_even:
        _check_edges(part, edges, shard, axis)
    return [(rank, start, stop) for rank, (start, stop) in zip(ranks, pairwise(edges), strict=True)]


def _chunk_edges(part: DimIntervals, unit: int, count: int) -> list[int]:
    """Where `torch.chunk` cuts a part in so many, counted in units of the dim; as rows of the part.

    Units begin at multiples of their length in the dim, whatever part of it this is: the first may be short as well.
    """
    if unit == 1:
        return bounds(chunk_sizes(_intervals_length(part), count))
    runs: list[tuple[int, int, int, int]] = []  # of each interval: units before it, its first row, last + 1, position
    total, position, last_unit = 0, 0, -1
    for start, stop in part:
        before = total - (start // unit == last_unit)
        runs.append((before, start, stop, position))
        total = before - (-stop // unit) - start // unit
        last_unit, position = (stop - 1) // unit, position + stop - start
    step = -(-total // count)
    edges = [0]
    for number in (min(i * step, total) for i in range(1, count)):
        before, start, stop, begins = next((run for run in reversed(runs) if run[0] < number), (0, 0, 0, 0))
        edges.append(begins + min((start // unit + number - before) * unit, stop) - start)
    return [*edges, position]


def _check_edges(part: DimIntervals, edges: Sequence[int], shard: Shard, axis: str) -> None:
    """Raise where a cut falls inside a unit."""
    assert shard.unit is not None
    ends = {edge for interval in part for edge in interval}
    for edge in edges:
        row = next(iter(_take_interval_rows(part, edge, edge + 1)), (0, 0))[0]
        if row % shard.unit and row not in ends:
            raise LayoutError(
                f"{shard.format()} cuts dim {shard.dim} over axis {axis!r} at row {row}, inside a unit: "
                f"{count_units(row, shard.unit)}; cut at a multiple of {shard.unit}, or write S({shard.dim}) "
                f"unit({shard.unit})"
            )


def _take_interval_rows(part: DimIntervals, start: int, stop: int) -> list[Interval]:
    """Rows `start` to `stop` of the concatenation of a part's intervals; an empty range returns an empty interval."""
    if len(part) == 1:
        return [(part[0][0] + start, part[0][0] + stop)]
    rows: list[Interval] = []
    position = 0
    for first, last in part:
        low, high = max(start, position), min(stop, position + last - first)
        if low < high:
            rows.append((first + low - position, first + high - position))
        position += last - first
    return rows


def _merge_intervals(intervals: list[Interval], whole: DimIntervals) -> DimIntervals:
    """Join intervals that touch, drop empty ones, but keep one so that every rank holds something."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    if joined:
        return tuple(joined)
    at = intervals[0][0] if intervals else (whole[-1][1] if whole else 0)
    return ((at, at),)


def count_units(rows: int, unit: int) -> str:
    """How many whole units rows are, and what is left over, in words.

    >>> count_units(450, 64)
    '450 rows are 7 units of 64 and 2 rows'
    """
    return f"{rows} rows are {count_of(rows // unit, 'unit')} of {unit} and {count_of(rows % unit, 'row')}"


class RowOwners:
    """For every row of a dim the rank of the axis that has it, kept as runs of rows with one owner; hashed once.

    >>> RowOwners([1, 0, 0, 1]), RowOwners.from_runs([1, 0, 1], [1, 2, 1]) == RowOwners([1, 0, 0, 1])
    (RowOwners((1, 0, 0, 1)), True)
    """

    __slots__ = ("_hash", "holders", "lengths", "starts")
    holders: IntArray
    lengths: IntArray
    starts: IntArray

    def __init__(self, ranks: npt.ArrayLike) -> None:
        rows = np.asarray(ranks, np.int64).reshape(-1)
        self._set(rows, np.ones(len(rows), np.int64))

    @classmethod
    def from_runs(cls, holders: npt.ArrayLike, lengths: npt.ArrayLike) -> RowOwners:
        """The owners of runs of these lengths."""
        made = cls.__new__(cls)
        made._set(np.asarray(holders, np.int64).reshape(-1), np.asarray(lengths, np.int64).reshape(-1))
        return made

    def _set(self, holders: IntArray, lengths: IntArray) -> None:
        """Join runs of one owner, so that equal owners have equal runs."""
        if holders.min(initial=0) < 0 or lengths.min(initial=0) < 0:
            raise LayoutError("owners of rows are numbers of ranks along an axis, and runs have no negative lengths")
        holders, lengths = holders[lengths > 0], lengths[lengths > 0]
        first = np.flatnonzero(np.concatenate([[True], holders[1:] != holders[:-1]])[: len(holders)])
        self.holders, self.lengths = holders[first], np.add.reduceat(lengths, first) if len(first) else lengths
        self.starts = np.cumsum(self.lengths) - self.lengths
        for array in (self.holders, self.lengths, self.starts):
            array.flags.writeable = False
        self._hash = hash((self.holders.tobytes(), self.lengths.tobytes()))

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @property
    def ranks(self) -> IntArray:
        """The owner of each row."""
        return np.repeat(self.holders, self.lengths)

    @property
    def count(self) -> int:
        """One more than the largest owner."""
        return int(self.holders.max(initial=-1)) + 1

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowOwners):
            return NotImplemented
        return np.array_equal(self.holders, other.holders) and np.array_equal(self.lengths, other.lengths)

    def __reduce__(self) -> tuple[type[RowOwners], tuple[list[int]]]:
        return RowOwners, (self.ranks.tolist(),)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8].tolist()))
        return f"RowOwners(({shown}{', ...' if len(self) > 8 else ''}))"


REDUCE_OPS = ("sum", "avg", "min", "max", "product")


CUT_RULES = ("sizes", "groups", "block", "owners")


class _Questions:
    """What torch's placements answer about themselves."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it splits a dim, or this one."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether every rank of the axis holds the same values."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether a reduction is pending, or this one."""
        return isinstance(self, Partial) and reduce_op in (None, self.op)


@dataclass(frozen=True, slots=True)
class Shard(_Questions):
    """The axis splits dim `dim`: as `torch.chunk` does, or by the given rule.

    - `sizes`: the length each rank of the axis gets; zeros are fine.
    - `groups`: the dim is a concatenation of groups of these lengths (a fused QKV weight), each split on its own.
    - `block`: blocks of this length are assigned to the ranks in turn (block-cyclic).
    - `owners`: every row has an owner. Operators make such placements where values decide which rank has a row, as
      tokens that are routed to experts; what is worked out for them is not remembered.

    With any of them `unit=u` keeps rows 0 to u-1, u to 2u-1 and so on together (heads of attention, blocks that share a
    scale): `torch.chunk` counts units, and other rules have to cut between them. The last unit may be short.

    With `zigzag=True` the dim, or each group of it, is cut in 2 n parts for n ranks, and rank i gets parts i and
    2 n - 1 - i: of a sequence every rank then has as much to do for causal attention.

    With `each` every part of a group is on as many ranks as it says for that group, one after the other: 2 heads of
    keys on 4 ranks are `each=(2,)`. `addends=True` is how their gradients are: the value is the sum of the copies.

    >>> Shard(0), Shard(-1, sizes=(3, 0, 5, 1)), Shard(0, groups=(8, 4, 4)), Shard(0, block=2)
    (Shard(0), Shard(-1, sizes=(3, 0, 5, 1)), Shard(0, groups=(8, 4, 4)), Shard(0, block=2))
    >>> Shard(0, groups=(32, 8, 8), each=(1, 2, 2), unit=4).format()
    'S(0) groups(32,8 each 2,8 each 2) unit(4)'
    >>> Shard(0, unit=64).lengths(14 * 64, 4)
    (256, 256, 256, 128)
    """

    dim: int
    sizes: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    block: int | None = None
    owners: RowOwners | None = None
    unit: int | None = None
    zigzag: bool = False
    each: tuple[int, ...] | None = None
    addends: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int):
            raise LayoutError(
                f"Shard takes the number of a tensor's dim, as in Shard(0); got {type(self.dim).__name__}: {self.dim!r}"
            )
        if self.is_plain and not self.addends:
            return
        given = [n for n in CUT_RULES if getattr(self, n) is not None]
        if len(given) > 1:
            raise LayoutError(f"Shard({self.dim}) takes one of {', '.join(CUT_RULES)}, got {' and '.join(given)}")
        for name in ("sizes", "groups"):
            value = getattr(self, name)
            if value is None:
                continue
            object.__setattr__(self, name, to_int_tuple(value, f"Shard({self.dim}, {name}=...)"))
            if any(v < 0 for v in value):
                raise LayoutError(f"Shard({self.dim}, {name}={tuple(value)}): lengths are 0 or more")
        if self.block is not None and self.block < 1:
            raise LayoutError(f"Shard({self.dim}, block={self.block}): a block has at least one row")
        if self.zigzag and given not in ([], ["groups"]):
            raise LayoutError(f"Shard({self.dim}, {given[0]}=..., zigzag=True): zigzag goes with groups only, or alone")
        if self.each is not None or self.addends:
            self._check_copies(given)
        if self.unit is not None:
            self._check_unit(to_int_tuple((self.unit,), f"Shard({self.dim}, unit=...)")[0])

    def _check_copies(self, given: list[str]) -> None:
        """Raise unless every group has a number of copies; one copy of each says nothing."""
        each = to_int_tuple(self.each or (1,), f"Shard({self.dim}, each=...)")
        groups = 1 if self.groups is None else len(self.groups)
        object.__setattr__(self, "each", each if max(each) > 1 else None)
        if self.each is not None and (given not in ([], ["groups"]) or self.zigzag):
            other = "zigzag" if self.zigzag else given[0]
            raise LayoutError(f"Shard({self.dim}, {other}=..., each={each}): each goes with groups and unit only")
        if (self.each is not None and len(each) != groups) or min(each) < 1:
            raise LayoutError(
                f"Shard({self.dim}, each={each}): pass {count_of(groups, 'number')} of ranks, one for each group, all "
                "1 or more"
            )
        if max(each) == 1 and self.addends:
            raise LayoutError(f"Shard({self.dim}, addends=True): only copies are addends; pass each=(2,), or Partial()")

    def _check_unit(self, unit: int) -> None:
        """Raise unless the lengths of the rule are whole units, but for the last; units of one row say nothing."""
        if unit < 1:
            raise LayoutError(f"Shard({self.dim}, unit={unit}): a unit has at least one row")
        object.__setattr__(self, "unit", None if unit == 1 else unit)
        runs = [n for n in self.sizes or self.groups or () if n][:-1]
        runs += [] if self.block is None else [self.block]
        runs += [] if self.owners is None else self.owners.lengths[:-1].tolist()
        broken = next((n for n in runs if n % unit), None)
        if broken is not None:
            rule = next(n for n in CUT_RULES if getattr(self, n) is not None)
            raise LayoutError(
                f"{self.format()} cuts inside a unit: {count_units(broken, unit)}; give {rule} in multiples of {unit}, "
                f"or write S({self.dim}) unit({unit})"
            )

    @property
    def is_even(self) -> bool:
        """Whether the dim is split as `torch.chunk` does, counted in rows or in units of rows."""
        return self.is_in_runs and self.sizes is None

    @property
    def is_plain(self) -> bool:
        """Whether the dim is split as `torch.chunk` does, counted in rows."""
        return self.is_in_runs and self.sizes is None and self.unit is None

    @property
    def is_in_runs(self) -> bool:
        """Whether each rank gets one run of the rows, in the order of the axis."""
        cut_by_rules = self.groups is not None or self.block is not None or self.owners is not None
        return not (cut_by_rules or self.each is not None or self.zigzag)

    def along(self, dim: int) -> Shard:
        """The same split of another dim.

        >>> Shard(0, sizes=(3, 1)).along(1)
        Shard(1, sizes=(3, 1))
        """
        return self if dim == self.dim else replace(self, dim=dim)

    def without_copies(self) -> Shard:
        """The same groups, cut for all ranks: what ranks with copies share among themselves.

        >>> Shard(0, groups=(32, 8), each=(1, 2), unit=4).without_copies(), Shard(1, each=(2,)).without_copies()
        (Shard(0, groups=(32, 8)), Shard(1))
        """
        return self if self.each is None else replace(self, each=None, unit=None, addends=False)

    def is_on_all(self, count: int) -> bool:
        """Whether each of `count` ranks has a copy of everything.

        >>> Shard(0, each=(4,)).is_on_all(4), Shard(0, groups=(2, 2), each=(4, 2)).is_on_all(4)
        (True, False)
        """
        return self.each is not None and set(self.each) == {count}

    def lengths(self, length: int, count: int, start: int = 0) -> tuple[int, ...]:
        """How many of `length` rows from row `start` of the dim each of `count` ranks gets, where `is_in_runs`.

        >>> Shard(0).lengths(10, 4), Shard(0, sizes=(7, 3)).lengths(10, 2), Shard(0, unit=4).lengths(9, 3, start=3)
        ((3, 3, 3, 1), (7, 3), (1, 4, 4))
        """
        if self.sizes is not None:
            return self.sizes
        edges = [even_edges(start, start + length, count, self.unit or 1, i) for i in range(count + 1)]
        return tuple(b - a for a, b in pairwise(edges))

    @property
    def dual(self) -> Placement:
        """The placement of a gradient: the same, but for copies, of which each has an addend.

        >>> Shard(0).dual, Shard(0, each=(2,)).dual
        (Shard(0), Shard(0, each=(2,), addends=True))
        """
        return self if self.each is None else replace(self, addends=not self.addends)

    def format(self) -> str:
        """Write it in the notation.

        >>> Shard(0, groups=(8, 4, 4)).format(), Partial("max").format(), Replicate().format()
        ('S(0) groups(8,4,4)', 'P(max)', 'R')
        """
        return f"S({self.dim}){self.format_rule()}"

    def format_rule(self) -> str:
        """How it splits a dim, in the words after the dim.

        >>> Shard(0, unit=4).format_rule(), Shard(0).format_rule()
        (' unit(4)', '')
        """
        numbers: dict[str, Sequence[Any]] = {n: v for n in ("sizes", "groups") if (v := getattr(self, n)) is not None}
        numbers |= {} if self.block is None else {"block": (self.block,)}
        numbers |= {} if self.owners is None else {"owners": self.owners.ranks.tolist()}
        text, copies = "", [f" each {n}" if n > 1 else "" for n in self.each or ()]
        if copies and self.groups is not None:
            numbers["groups"] = [f"{n}{c}" for n, c in zip(self.groups, copies, strict=True)]
        elif copies:
            text += copies[0]
        text += "".join(f" {name}({','.join(map(str, listed))})" for name, listed in numbers.items())
        text += " zigzag" * self.zigzag + ("" if self.unit is None else f" unit({self.unit})")
        return text + " addends" * self.addends

    def to_json(self) -> dict[str, Any]:
        """Itself as plain data, which `placement_from_json` reads."""
        rule = {n: list(v) for n in ("sizes", "groups", "each") if (v := getattr(self, n)) is not None}
        rule |= {} if self.owners is None else {"owners": self.owners.ranks.tolist()}
        numbers = {n: v for n in ("block", "unit") if (v := getattr(self, n)) is not None}
        flags = {n: True for n in ("zigzag", "addends") if getattr(self, n)}
        return {"kind": "shard", "dim": self.dim, **rule, **numbers, **flags}

    def __repr__(self) -> str:
        named = (*CUT_RULES, "unit", "each")
        rule = "".join(f", {n}={getattr(self, n)}" for n in named if getattr(self, n) is not None)
        return f"Shard({self.dim}{rule}{', zigzag=True' * self.zigzag}{', addends=True' * self.addends})"


@dataclass(frozen=True, slots=True)
class Replicate(_Questions):
    """Every rank of the axis holds the same values.

    >>> from shardwise.geometry import Mesh, MeshSpec
    >>> MeshSpec(Mesh.of(tp=2), [Replicate()]).layout((3,)).local_shapes(1)
    ((3,),)
    """

    @property
    def dual(self) -> Placement:
        """The placement of a gradient: the same."""
        return self

    def format(self) -> str:
        """Write it in the notation."""
        return "R"

    def to_json(self) -> dict[str, Any]:
        """Itself as plain data, which `placement_from_json` reads."""
        return {"kind": "replicate"}

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial(_Questions):
    """Every rank of the axis holds an addend; the value is their reduction, which is still pending.

    >>> Partial(), Partial("max")
    (Partial('sum'), Partial('max'))
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise LayoutError(f"Partial({self.op!r}): the reduction is one of {', '.join(REDUCE_OPS)}")

    @property
    def reduce_op(self) -> str:
        """The reduction, by torch's name for it."""
        return self.op

    @property
    def dual(self) -> Placement:
        """The placement of a gradient: every addend has that of their sum."""
        return Replicate()

    def format(self) -> str:
        """Write it in the notation."""
        return f"P({self.op})"

    def to_json(self) -> dict[str, Any]:
        """Itself as plain data, which `placement_from_json` reads."""
        return {"kind": "partial", "op": self.op}

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"


Placement: TypeAlias = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True)
class Reduction:
    """A pending reduction in its plainest form: an average is a sum with a divisor.

    >>> str(Reduction("sum", divisor=4))
    'sum / 4'
    """

    op: str
    divisor: int = 1

    def __str__(self) -> str:
        return self.op if self.divisor == 1 else f"{self.op} / {self.divisor}"


def pending_reduction(placements: Sequence[Placement], axis_sizes: Sequence[int]) -> Reduction | None:
    """The one reduction that several `Partial` axes leave pending together, or None.

    >>> pending_reduction((Partial("avg"), Partial("sum")), (4, 2))
    Reduction(op='sum', divisor=4)
    """
    pending = [(p.op, n) for p, n in zip(placements, axis_sizes, strict=True) if isinstance(p, Partial) and n > 1]
    for placement in placements:
        if placement.__class__ is Shard and placement.addends:
            pending.append(("sum", 1))
    ops = {"sum" if op == "avg" else op for op, _ in pending}
    if not ops:
        return None
    if len(ops) > 1:
        raise LayoutError(
            f"axes with pending {' and '.join(sorted(ops))} have no defined order of reduction; "
            "use one kind of Partial, or redistribute one axis first"
        )
    divisor = 1
    for op, size in pending:
        divisor *= size if op == "avg" else 1
    return Reduction(ops.pop(), divisor)


def resolve_dim(dim: int, shape: Sequence[int], what: str) -> int:
    """A dim counted from the end, resolved against the shape.

    >>> resolve_dim(-1, (4, 6), "Shard(-1)")
    1
    """
    ndim = len(shape)
    if not -ndim <= dim < ndim:
        fits = f"a dim from {-ndim} to {ndim - 1}" if ndim else "no dim: a 0-dim tensor can only be replicated"
        raise LayoutError(f"{what}: a tensor of shape {tuple(shape)} has {fits}")
    return dim % ndim


class PlacementLike(Protocol):
    """What torch's placements answer; those of its kinds are read as ours."""

    def is_replicate(self) -> bool: ...


def to_placement(value: Any, where: str = "") -> Placement:
    """A placement, or torch's as one of ours; a strided shard is a Shard, and `read_order` says what its stride means.

    >>> to_placement(Shard(0)), to_placement("S(0)")
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: a placement is Shard(dim), Replicate() or Partial(), ...got str: 'S(0)'; ...
    """
    if isinstance(value, Shard | Replicate | Partial):
        return value
    kind = type(value).__name__
    if any(c.__module__.startswith("torch.") for c in type(value).__mro__):
        if kind in ("Shard", "_StridedShard"):
            return Shard(value.dim)
        if kind == "Replicate":
            return Replicate()
        if kind == "Partial":
            return Partial(value.reduce_op)
        raise LayoutError(f"{where}{value!r} has no counterpart; redistribute it to Shard, Replicate or Partial first")
    if isinstance(value, type) and issubclass(value, Shard | Replicate | Partial):
        called = f"{value.__name__}(0)" if value is Shard else f"{value.__name__}()"
        raise LayoutError(f"{where}a placement is an object, and this is the class {value.__name__}; write {called}")
    fix = "; parse_placements reads the notation" if isinstance(value, str) else ""
    raise LayoutError(
        f"{where}a placement is Shard(dim), Replicate() or Partial(), of shardwise or of torch.distributed.tensor; got "
        f"{type(value).__name__}: {value!r}{fix}"
    )
