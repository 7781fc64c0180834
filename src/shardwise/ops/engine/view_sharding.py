"""How do the cuts of a tensor's dims become cuts of its dims after a view?

1. Dims of input and output are matched into groups of equal products; an unchanged dim keeps its cut.
2. In the other groups all dims are merged into one flat dim. A cut of one of them becomes a *pattern*: runs of these
   lengths, repeated with a period (the length of the dim times all that is inside it).
3. Each pattern is given to the output dim that has this period. A pattern without such a dim is kept as blocks or
   groups inside a longer dim; it is refused where a boundary falls inside a row of the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.geometry import MeshSpec, Placement, Replicate, RowOwners, Shard
from shardwise.geometry.placements import chunk_sizes


class NoViewError(Exception):
    """Why a cut cannot be carried over; the caller says it in its own words."""


@dataclass(frozen=True, slots=True)
class Level:
    """What one mesh axis does in a pattern: the sizes it gives its ranks, for each run of the level above."""

    axis: int
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Nested cuts of a flat dim that repeat with a period."""

    period: int
    levels: tuple[Level, ...]

    def times(self, factor: int) -> Pattern:
        """The same pattern of longer rows."""
        levels = [Level(v.axis, tuple(tuple(s * factor for s in sizes) for sizes in v.sizes)) for v in self.levels]
        return Pattern(self.period * factor, tuple(levels))

    def fits(self, row: int) -> bool:
        """Whether all boundaries fall between rows of this length."""
        return self.period % row == 0 and all(s % row == 0 for v in self.levels for sizes in v.sizes for s in sizes)

    def over(self, row: int) -> Pattern:
        """The same pattern counted in rows of this length."""
        levels = [Level(v.axis, tuple(tuple(s // row for s in sizes) for sizes in v.sizes)) for v in self.levels]
        return Pattern(self.period // row, tuple(levels))


@dataclass(frozen=True, slots=True)
class DimGroup:
    """Dims of the input and of the output that hold the same elements in the same order."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def match_dims(before: Sequence[int], after: Sequence[int]) -> list[DimGroup]:
    """The smallest groups of dims with equal products, from left to right; no length is 0.

    >>> match_dims((2, 3, 4), (6, 1, 4))
    [DimGroup(inputs=(0, 1), outputs=(0,)), DimGroup(inputs=(), outputs=(1,)), DimGroup(inputs=(2,), outputs=(2,))]
    """
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        left, right = (before[i] if i < len(before) else None), (after[j] if j < len(after) else None)
        if left != right and 1 in (left, right):
            groups.append(DimGroup((i,), ()) if left == 1 else DimGroup((), (j,)))
            i, j = i + (left == 1), j + (left != 1)
            continue
        assert left is not None and right is not None
        first, last = i + 1, j + 1
        while left != right:
            if left < right:
                left, first = left * before[first], first + 1
            else:
                right, last = right * after[last], last + 1
        groups.append(DimGroup(tuple(range(i, first)), tuple(range(j, last))))
        i, j = first, last
    return groups


def view_spec(spec: MeshSpec, before: Sequence[int], after: Sequence[int]) -> MeshSpec:
    """The spec of a view of a tensor of shape `before` as one of shape `after`; nothing is moved.

    >>> from shardwise.geometry import Mesh
    >>> mesh = Mesh.of(tp=2)
    >>> view_spec(MeshSpec(mesh, (Shard(0),)), (3, 4), (12,))
    MeshSpec(tp=2, (Shard(0, sizes=(8, 4)),))
    >>> view_spec(MeshSpec(mesh, (Shard(1),)), (3, 4), (12,))
    MeshSpec(tp=2, (Shard(0, block=2),))
    >>> view_spec(MeshSpec(mesh, (Shard(0, block=2),)), (12,), (3, 4))
    MeshSpec(tp=2, (Shard(1),))
    """
    placements: list[Placement] = [Replicate() if isinstance(p, Shard) else p for p in spec.placements]
    order: list[str] = []
    for group in match_dims(before, after):
        for axis, placement in _carry_over(spec, before, after, group):
            placements[axis] = placement
            order.append(spec.mesh.axes[axis])
    return MeshSpec(spec.mesh, placements, order)


def split_axes(spec: MeshSpec, dim: int) -> list[int]:
    """The axes that split a dim, from the outermost split to the innermost."""
    axes = [spec.mesh.axis_index(name) for name in spec.order]
    return [a for a in axes if isinstance(p := spec.placements[a], Shard) and p.dim == dim]


def _carry_over(
    spec: MeshSpec, before: Sequence[int], after: Sequence[int], group: DimGroup
) -> list[tuple[int, Placement]]:
    """The placements of the axes that split the dims of a group."""
    if len(group.inputs) == len(group.outputs) == 1:
        return [(a, _move_to_dim(spec.placements[a], group.outputs[0])) for a in split_axes(spec, group.inputs[0])]
    patterns = []
    for dim in group.inputs:
        inner = math.prod(before[d] for d in group.inputs if d > dim)
        patterns += [p.times(inner) for p in dim_patterns(spec, dim, before[dim])]
    return [found for pattern in patterns for found in _place_pattern(pattern, after, group.outputs, spec)]


def _move_to_dim(placement: Placement, dim: int) -> Placement:
    assert isinstance(placement, Shard)
    return placement.along(dim)


def dim_patterns(spec: MeshSpec, dim: int, length: int) -> list[Pattern]:
    """The patterns in which a dim is cut: plain cuts first, then those that repeat."""
    found: list[Pattern] = []
    period, runs, levels = length, [length], list[Level]()
    for axis in split_axes(spec, dim):
        shard, count = spec.placements[axis], spec.mesh.shape[axis]
        assert isinstance(shard, Shard)
        if shard.owners is not None:
            if period < length:
                raise NoViewError(f"{shard} splits what another axis has in several runs")
            levels.append(Level(axis, _sizes_of_owners(shard.owners, runs, count)))
            runs = [s for parent in levels[-1].sizes for s in parent]
            continue
        if shard.groups is not None or (shard.block is not None and any(r != shard.block * count for r in runs)):
            cycle = _cut_period(shard, count, runs, period < length)
            found, levels = [*found, *_close_pattern(period, levels)], []
            period, runs = cycle, [cycle]
        elif period < length and shard.block is None:
            raise NoViewError(f"{shard} splits what another axis has in several runs")
        sizes = tuple(_cut_sizes(shard, count, run) for run in runs)
        levels.append(Level(axis, sizes))
        runs = [s for parent in sizes for s in parent]
    return [*found, *_close_pattern(period, levels)]


def _sizes_of_owners(owners: RowOwners, runs: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """How many rows of each run the ranks own, where these follow each other in the order of the ranks."""
    found, start = [], 0
    for run in runs:
        own = owners.ranks[start : start + run]
        if (own[1:] < own[:-1]).any():
            raise NoViewError("rows that follow each other have owners in another order")
        found.append(tuple(np.bincount(own, minlength=count).tolist()))
        start += run
    return tuple(found)


def _close_pattern(period: int, levels: Sequence[Level]) -> list[Pattern]:
    return [Pattern(period, tuple(levels))] if levels else []


def _cut_period(shard: Shard, count: int, runs: Sequence[int], repeats: bool) -> int:
    """The period of a cut in blocks or groups."""
    lengths = {shard.block * count} if shard.block is not None else set(shard.groups or ())
    cycle = next(iter(lengths))
    if repeats or len(lengths) > 1 or any(run % cycle for run in runs):
        raise NoViewError(f"{shard} does not repeat evenly")
    return cycle


def _cut_sizes(shard: Shard, count: int, run: int) -> tuple[int, ...]:
    if shard.block is not None:
        return (shard.block,) * count
    return shard.sizes if shard.sizes is not None else chunk_sizes(run, count)


def _place_pattern(
    pattern: Pattern, after: Sequence[int], dims: Sequence[int], spec: MeshSpec
) -> list[tuple[int, Placement]]:
    """The placements that express a pattern on one of the output dims."""
    inner = {d: math.prod(after[e] for e in dims if e > d) for d in dims}
    own = [d for d in dims if after[d] * inner[d] == pattern.period and after[d] > 1 and pattern.fits(inner[d])]
    if own:
        levels = pattern.over(inner[own[0]]).levels
        return [(v.axis, express_shard(own[0], v.sizes, spec.mesh.axes[v.axis])) for v in levels]
    longer = [d for d in dims if after[d] * inner[d] % pattern.period == 0 and pattern.fits(inner[d])]
    if not longer:
        raise NoViewError("a boundary falls inside a row of the result")
    dim = longer[-1]
    return [(v.axis, _express_repeated(dim, v, pattern.over(inner[dim]), after[dim])) for v in pattern.levels]


def express_shard(dim: int, sizes: Sequence[tuple[int, ...]], axis: str = "") -> Shard:
    """The Shard by which an axis cuts runs in these sizes, one tuple for each run.

    >>> express_shard(0, [(2, 1), (2, 1)]), express_shard(0, [(1, 2), (1, 2)])
    (Shard(0), Shard(0, sizes=(1, 2)))
    """
    if all(s == chunk_sizes(sum(s), len(s)) for s in sizes):
        return Shard(dim)
    if len(set(sizes)) > 1:
        told = " and ".join(map(str, dict.fromkeys(sizes)))
        raise NoViewError(
            f"axis {axis!r} would cut the parts of dim {dim} that the axes before it make in {told}, and a Shard gives "
            f"all of them the same sizes (even parts, or Replicate() for axis {axis!r}, can be viewed so)"
        )
    return Shard(dim, sizes[0])


def _express_repeated(dim: int, level: Level, pattern: Pattern, length: int) -> Shard:
    """The Shard that cuts a dim in a pattern that repeats."""
    sizes = next(v for v in pattern.levels if v.axis == level.axis).sizes
    flat = {s for parent in sizes for s in parent}
    if len(flat) == 1 and 0 not in flat:
        return Shard(dim, block=flat.pop())
    if len(pattern.levels) > 1 or sizes[0] != chunk_sizes(pattern.period, len(sizes[0])):
        raise NoViewError(f"dim {dim} would be cut in repeating runs of different lengths")
    return Shard(dim, groups=(pattern.period,) * (length // pattern.period))
