"""How do the cuts of a tensor's dims become cuts of its dims after a view?

1. Dims of input and output are matched into groups of equal products; an unchanged dim keeps its cut.
2. In the other groups all dims are merged into one flat dim. A cut of one of them becomes a *pattern*: runs of these
   lengths, repeated with a period (the length of the dim times all that is inside it).
3. Each pattern is given to the output dim that has this period. A pattern without such a dim is kept as blocks or
   groups inside a longer dim; it is refused where a boundary falls inside a row of the output.

Which layout does a tensor take before a view that cannot carry its cuts over?

Each axis is decided on its own, from the lengths of the dims that are merged or split, so that a batch of any length is
treated alike. An axis takes the first of these for which the view can be expressed:

1. the cut that it has;
2. the same dim, cut in even chunks;
3. the same dim, cut so that one dim of the result is: one that the ranks divide evenly first, then any;
4. no cut: the axis replicates.

What computations over sharded dims need: which axes split a dim, pending values reduced, one row for each rank.

A reduction over a sharded dim that is not a plain sum or maximum takes two steps: each rank reduces what it has
to one row, the rows (one for each rank along the dim) are gathered, and the small result is reduced again.
Gradients follow from the tape: gathering rows is a move, and its backward sends nothing.

Where are this rank's local tensors in the global ones? What a strategy's function may ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardwise._cache import cache_by_identity
from shardwise.geometry import Layout, LayoutError, MeshSpec, Partial, Placement, Replicate, RowOwners, Shard
from shardwise.geometry.placements import chunk_sizes
from shardwise.ops.explain import check_may_communicate
from shardwise.ops.placement_cost import mesh_view
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import format_layout_text, move_to
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


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


def recut_for_view(spec: MeshSpec, before: Sequence[int], after: Sequence[int]) -> MeshSpec:
    """The spec to move a tensor of shape `before` to, so that it can be viewed as one of shape `after`.

    >>> from shardwise.geometry import Mesh
    >>> rows = MeshSpec(Mesh.of(tp=2), (Shard(1),))
    >>> recut_for_view(rows, (5, 24), (5, 3, 8))
    MeshSpec(tp=2, (Shard(1, block=4),))
    >>> recut_for_view(rows, (5, 9), (5, 3, 3))
    MeshSpec(tp=2, (Shard(1, sizes=(6, 3)),))
    """
    placements: list[Placement] = [Replicate() if isinstance(p, Shard) else p for p in spec.placements]
    for name in spec.order:
        axis = spec.mesh.axis_index(name)
        if isinstance(own := spec.placements[axis], Shard):
            placements[axis] = _first_that_fits(spec, placements, axis, own, (before, after))
    return MeshSpec(spec.mesh, placements, spec.order)


def _first_that_fits(
    spec: MeshSpec, chosen: Sequence[Placement], axis: int, own: Shard, shapes: tuple[Sequence[int], Sequence[int]]
) -> Placement:
    before, after = shapes
    for placement in (own, Shard(own.dim), *_cuts_of_result(spec, axis, own.dim, before, after)):
        tried = MeshSpec(spec.mesh, [placement if a == axis else p for a, p in enumerate(chosen)], spec.order)
        if _can_view(tried, before, after):
            return placement
    return Replicate()


def _can_view(spec: MeshSpec, before: Sequence[int], after: Sequence[int]) -> bool:
    try:
        spec.layout(before)
        view_spec(spec, before, after).layout(after)
    except (NoViewError, LayoutError):  # of sizes that fit a whole dim, where another axis cuts it first
        return False
    return True


def _cuts_of_result(
    spec: MeshSpec, axis: int, dim: int, before: Sequence[int], after: Sequence[int]
) -> Iterator[Placement]:
    """The cuts of a dim that are an even or, later, an uneven cut of a dim of the result."""
    group = next(g for g in match_dims(before, after) if dim in g.inputs)
    count = spec.mesh.shape[axis]
    for out in sorted((d for d in group.outputs if after[d] > 1), key=lambda d: after[d] % count != 0):
        alone = [Shard(out) if a == axis else Replicate() for a in range(spec.mesh.ndim)]
        try:
            found = view_spec(MeshSpec(spec.mesh, alone), after, before).placements[axis]
        except NoViewError:
            continue
        if isinstance(found, Shard) and found.dim == dim:
            yield found


DimRun: TypeAlias = tuple[int, int, int]


def all_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument means: None is all.

    >>> all_dims(None, 2), all_dims((-1,), 3), all_dims([], 1)
    ((0, 1), (2,), (0,))
    """
    if dim is None or (not isinstance(dim, int) and not dim):
        return tuple(range(ndim))
    return tuple(sorted({d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)})) if ndim else ()


def arguments_by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator's call by name, defaults filled in.

    >>> arguments_by_name(torch.ops.aten.argmax.default, (None, 1), {})
    {'self': None, 'dim': 1, 'keepdim': False}
    """
    declared = op._schema.arguments
    defaults = {a.name: a.default_value for a in declared}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def mesh_spec_of(tensor: ShardedTensor) -> MeshSpec | None:
    """The tensor's placements on a mesh, or None for irregular layouts."""
    return mesh_view(tensor.sharding)


def cutting_axes(layout: Layout, dims: Iterable[int]) -> tuple[int, ...]:
    """The mesh axes of more than one rank that cut one of these dims."""
    spec, wanted = mesh_view(layout), set(dims)
    if spec is None:
        return ()
    return tuple(
        axis
        for axis, placement in enumerate(spec.placements)
        if isinstance(placement, Shard) and placement.dim in wanted and spec.mesh.shape[axis] > 1
    )


def replace_placements(spec: MeshSpec, axes: Iterable[int], placement: Placement) -> MeshSpec:
    """The spec with another placement along some axes."""
    chosen = set(axes)
    return MeshSpec(spec.mesh, [placement if a in chosen else p for a, p in enumerate(spec.placements)], spec.order)


def redistribute_to(tensor: ShardedTensor, layout: Layout, name: str) -> ShardedTensor:
    """The tensor in another layout; all ranks come here with the same layouts, so they need not agree first."""
    if tensor.sharding == layout:
        return tensor
    check_may_communicate(name, tensor.sharding, layout)
    locals_, anchor = move_to(tensor, layout, name)
    return wrap(layout, locals_, tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=anchor)


def resolve_partial(tensor: ShardedTensor, name: str) -> ShardedTensor:
    """The tensor with its pending reductions resolved: replicated along those axes."""
    spec = mesh_spec_of(tensor)
    if spec is None:
        return tensor
    pending = [a for a, p in enumerate(spec.placements) if isinstance(p, Partial)]
    return (
        redistribute_to(tensor, replace_placements(spec, pending, Replicate()).layout(shape_tuple(tensor)), name)
        if pending
        else tensor
    )


def gather_dims(tensor: ShardedTensor, dims: Iterable[int], name: str) -> ShardedTensor:
    """The tensor with these dims whole on every rank."""
    spec = mesh_spec_of(tensor)
    assert spec is not None
    whole = replace_placements(spec, cutting_axes(tensor.sharding, dims), Replicate())
    return redistribute_to(tensor, whole.layout(shape_tuple(tensor)), name)


def shape_tuple(tensor: ShardedTensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def gather_rank_rows(
    tensor: ShardedTensor, dims: Sequence[int], reduce: Callable[[Tensor], Tensor], name: str
) -> ShardedTensor:
    """Reduce each rank's part along some dims to one row; the rows of all ranks, together on every rank.

    `reduce` keeps the dims, with length 1. The result's dims have one row for each rank along them.
    """
    spec = mesh_spec_of(tensor)
    assert spec is not None and tensor.sharding.pending is None
    axes = cutting_axes(tensor.sharding, dims)
    shape = list(tensor.shape)
    for dim in dims:
        shape[dim] = math.prod(spec.mesh.shape[a] for a in cutting_axes(tensor.sharding, (dim,)))
    rows = [
        Shard(p.dim) if a in axes and isinstance(p, Shard) else _whole_placement(p, dims)
        for a, p in _numbered_placements(spec)
    ]
    local = reduce(tensor.local_parts[0])
    layout = MeshSpec(spec.mesh, rows, spec.order).layout(shape)
    return gather_dims(wrap(layout, (local,), tensor.comm), dims, name)


def _numbered_placements(spec: MeshSpec) -> Iterable[tuple[int, Placement]]:
    return enumerate(spec.placements)


def _whole_placement(placement: Placement, dims: Sequence[int]) -> Placement:
    """Placements of dims that are reduced on an axis of one rank say nothing about the result."""
    return Replicate() if isinstance(placement, Shard) and placement.dim in dims else placement


@cache_by_identity
def find_runs(layout: Layout, rank: int, dim: int) -> tuple[DimRun, ...]:
    """The runs of a dim that a rank has, in the order of its local tensor: start, stop, and where it begins there.

    >>> from shardwise.geometry import Mesh
    >>> layout = MeshSpec(Mesh.of(tp=2), [Shard(0, block=2)]).layout((8,))
    >>> find_runs(layout, 1, 0)
    ((2, 4, 0), (6, 8, 2))
    """
    own = layout.table.take(layout.rows_of(rank))
    columns = (own.local_offsets[:, dim].tolist(), own.offsets[:, dim].tolist(), own.sizes[:, dim].tolist())
    runs = [(start, start + size, at) for at, start, size in sorted(set(zip(*columns, strict=True)))]
    return tuple(r for r in runs if r[0] < r[1]) or tuple(runs[:1])


def is_in_one_run(layout: Layout, dim: int) -> bool:
    """Whether each rank has one run of a dim."""
    return all(len(find_runs(layout, rank, dim)) == 1 for rank in layout.ranks)


def global_rows(layout: Layout, rank: int, dim: int, device: torch.device) -> Tensor:
    """For each local row of a dim its global number, also where a rank holds several runs of the dim."""
    rows = [row for start, stop, _ in find_runs(layout, rank, dim) for row in range(start, stop)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def empty_result_like(x: Tensor, *others: Tensor | None) -> Tensor:
    """The result of a rank without elements: as `x`, and on the tape of everything that the other ranks compute from.

    Every rank's backward pass has to meet the same moves.
    """
    assert x.numel() == 0
    return sum((t.sum() for t in others if t is not None), start=x * 1)


@dataclass(frozen=True, slots=True)
class LocalView:
    """What a strategy's `local` function may ask: this rank, and where its local tensors begin in the global ones."""

    rank: int
    layouts: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]

    def interval(self, tensor: int, dim: int) -> tuple[int, int]:
        """The rows of a dim that this rank's local tensor holds; each rank must have one run, else all raise."""
        layout = self.layouts[tensor]
        if not is_in_one_run(layout, dim):
            counts = [len(find_runs(layout, rank, dim)) for rank in layout.ranks]
            raise UnsupportedOpError(
                f"dim {dim} of {format_layout_text(layout)} is stored in several runs, {max(counts)} on some ranks; "
                f"redistribute to a plain Shard({dim})"
            )
        return self.runs(tensor, dim)[0][:2]

    def runs(self, tensor: int, dim: int) -> tuple[DimRun, ...]:
        """The runs of a dim that this rank has: start, stop, and where they begin in the local tensor."""
        return find_runs(self.layouts[tensor], self.rank, dim)
