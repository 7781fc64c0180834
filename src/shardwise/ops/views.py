"""A layout seen on a mesh, what views do to it, and which of their results are views of the whole tensor.

1. `mesh_view`: the placements that mean a layout. What computations over sharded dims ask of them: which axes split a
   dim, where this rank's local tensors are in the global ones (`LocalView`), pending values reduced, one row for each
   rank. A reduction over a sharded dim that is not a plain sum or maximum takes two steps: each rank reduces its part
   to one row, the rows (one for each rank along the dim) are gathered, and the small result is reduced again.
2. `view_spec`: how cuts of dims become cuts of dims after a view. Dims of input and output are matched into groups of
   equal products; an unchanged dim keeps its cut. In the other groups all dims are merged into one flat dim. A cut of
   one of them becomes a *pattern*: runs of these lengths, repeated with a period (the length of the dim times all that
   is inside it). Each pattern is given to the output dim that has this period. A pattern without such a dim is kept as
   blocks or groups inside a longer dim; it is refused where a boundary falls inside a row of the output.
3. `recut_for_view`: which layout a tensor takes before a view that cannot carry its cuts over. Each axis is decided on
   its own, from the lengths of the dims that are merged or split, so that a batch of any length is treated alike. It
   takes the first of these for which the view can be expressed: the cut that it has; the same dim, cut in even chunks;
   the same dim, cut so that one dim of the result is, one that the ranks divide evenly first; no cut, it replicates.
4. `note_strides`: which strides the results of an operator would have as whole tensors (`tensor/autograd_mixin.py`).
   Torch answers: it runs the operator once for each kind of call on tensors without memory.
5. `allow_writes`: what is written to a copied view is written to the tensor that it was taken from. A row of a sharded
   dim, a slice of a dim cut in blocks or a view in another cut is a copy, where torch returns a view. Each operator
   that takes such a view has one that puts values in its place, by which `x[2] += 1` reaches `x`. Where a mesh leaves
   out ranks, writes stay refused: those ranks have no copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardwise._cache import Cache, cache_by_identity, cached
from shardwise._torch import aten, no_dispatch_modes, pointwise_strides
from shardwise.comm import Comm
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Partial, Placement, Replicate, RowOwners, Shard
from shardwise.geometry.layout import Cells
from shardwise.geometry.placements import bounds, chunk_sizes, split_part
from shardwise.ops.explain import check_may_communicate
from shardwise.ops.rule import OperatorCall, is_pointwise, written_slots
from shardwise.tensor.autograd_mixin import Strides, find_strides, make_stand_in
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import format_layout_text, move_to
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap
from shardwise.tensor.writes import gives_views, share


@cache_by_identity
def mesh_view(layout: Layout) -> MeshSpec | None:
    """The mesh spec with one local tensor per rank for this layout, or None for irregular layouts.

    >>> from shardwise.geometry import ChunkSpec
    >>> mesh_view(ChunkSpec(0, (2, 0)).layout((4,)))
    MeshSpec(chunks=2 @ 2,0, (Shard(0),))
    """
    spec = layout.spec
    if isinstance(spec, MeshSpec):
        return spec.resolved(layout.shape)
    return None if layout.cells is None or layout.cells.replicas > 1 else find_mesh(layout)


@cache_by_identity
def find_mesh(layout: Layout) -> MeshSpec | None:
    """The mesh spec with one local tensor per rank that means this layout, also where pieces or replicas are listed.

    >>> from shardwise.geometry import Box, EnumerableSpec, Piece
    >>> find_mesh(EnumerableSpec([Piece(Box((0,), (3,)), 1), Piece(Box((3,), (1,)), 0)]).layout((4,)))
    MeshSpec(chunks=2 @ 1,0, (Shard(0, sizes=(3, 1)),))
    """
    if isinstance(layout.spec, MeshSpec):
        return mesh_view(layout)
    if len(set(layout.table.ranks.tolist())) != len(layout.table):
        return None
    found = _boxes_view(layout) if layout.cells is None else _cells_view(layout, layout.cells)
    return found if found is not None and found.layout(layout.shape) == layout else None


def _cells_view(layout: Layout, cells: Cells) -> MeshSpec:
    """Cells of a grid, one on each rank: an axis for each dim that is cut, and one for replicas."""
    cut = [d for d, c in enumerate(cells.dims) if c.count > 1]
    if not cut and layout.shape and cells.replicas == 1:
        cut = [0]
    names = ["chunks"] if len(cut) == 1 else [f"cells{d}" for d in cut]
    counts = [cells.dims[d].count for d in cut]
    if cells.replicas > 1:
        names, counts = [*names, "replicas"], [*counts, cells.replicas]
    sizes = {d: tuple(cells.dims[d].lengths.tolist()) for d in cut}
    placements = [Shard(d, None if s == chunk_sizes(sum(s), len(s)) else s) for d, s in sizes.items()]
    more = [Replicate()] if cells.replicas > 1 else []
    return MeshSpec(Mesh(names, cells.owners.reshape(counts)), [*placements, *more])


def _boxes_view(layout: Layout) -> MeshSpec | None:
    """Boxes, one on each rank, that are the runs of one dim: an axis for this dim."""
    table = layout.table
    cut = [d for d in range(layout.ndim) if len(set(table.offsets[:, d].tolist())) > 1]
    if len(cut) > 1 or not len(table) or not layout.shape:
        return None
    dim = cut[0] if cut else 0
    order = np.argsort(table.offsets[:, dim], kind="stable")
    sizes = tuple(table.sizes[order, dim].tolist())
    plain = sizes == chunk_sizes(sum(sizes), len(sizes))
    if sum(sizes) != layout.shape[dim]:
        return None
    return MeshSpec(Mesh(("chunks",), table.ranks[order]), [Shard(dim, None if plain else sizes)])


@cache_by_identity
def view_on_mesh(layout: Layout, mesh: Mesh) -> MeshSpec | None:
    """The placements on a mesh that mean this layout, which may be described on another one; None if there are none.

    >>> layout = MeshSpec(Mesh.of(dp=2), (Shard(0),)).layout((4,))
    >>> view_on_mesh(layout, Mesh.of(pp=1, tp=2))
    MeshSpec(pp=1,tp=2, (Replicate(), Shard(0)))
    """
    own = mesh_view(layout)
    found = own if own is None or own.mesh == mesh else _carry_to_mesh(own, mesh)
    return found if found is not None and found.layout(layout.shape) == layout else None


def _carry_to_mesh(spec: MeshSpec, mesh: Mesh) -> MeshSpec | None:
    """The placements of axes that differ in name only, or that all replicate; axes of one rank do not count."""
    own, axes = ([a for a, n in enumerate(m.shape) if n > 1] for m in (spec.mesh, mesh))
    placements: list[Placement] = [Replicate()] * mesh.ndim
    kinds = {spec.placements[a] for a in own}
    if np.array_equal(spec.mesh.ranks.squeeze(), mesh.ranks.squeeze()):
        for a, b in zip(own, axes, strict=True):
            placements[b] = spec.placements[a]
        names = {spec.mesh.axes[a]: mesh.axes[b] for a, b in zip(own, axes, strict=True)}
        return MeshSpec(mesh, placements, [names[n] for n in spec.order if n in names])
    if len(kinds) != 1 or isinstance(next(iter(kinds)), Shard):
        return None
    return MeshSpec(mesh, [next(iter(kinds)) if a in axes else p for a, p in enumerate(placements)])


def mesh_spec(mesh: Mesh, placements: tuple[Placement, ...], order: tuple[str, ...]) -> MeshSpec:
    """A mesh spec, made and checked once unless rows have owners."""
    if any(isinstance(p, Shard) and p.owners is not None for p in placements):
        return MeshSpec(mesh, placements, order)
    return _known_spec(mesh, placements, order)


@cached(8192)
def _known_spec(mesh: Mesh, placements: tuple[Placement, ...], order: tuple[str, ...]) -> MeshSpec:
    return MeshSpec(mesh, placements, order)


class NoViewError(Exception):
    """Why a cut cannot be carried over; the caller says it in its own words."""


@dataclass(frozen=True, slots=True)
class Level:
    """What one mesh axis does in a pattern: the sizes it gives its ranks, for each run of the level above.

    In a zigzag there are two sizes for each rank: first those of all ranks in order, then in the reverse order.
    """

    axis: int
    sizes: tuple[tuple[int, ...], ...]
    zigzag: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """Nested cuts of a flat dim that repeat with a period."""

    period: int
    levels: tuple[Level, ...]

    def times(self, factor: int) -> Pattern:
        """The same pattern of longer rows."""
        return Pattern(self.period * factor, self._with_sizes(lambda size: size * factor))

    def fits(self, row: int) -> bool:
        """Whether all boundaries fall between rows of this length."""
        return self.period % row == 0 and all(s % row == 0 for v in self.levels for sizes in v.sizes for s in sizes)

    def over(self, row: int) -> Pattern:
        """The same pattern counted in rows of this length."""
        return Pattern(self.period // row, self._with_sizes(lambda size: size // row))

    def _with_sizes(self, change: Callable[[int], int]) -> tuple[Level, ...]:
        return tuple(replace(v, sizes=tuple(tuple(map(change, sizes)) for sizes in v.sizes)) for v in self.levels)


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
    if any(_has_copies(spec.placements[a]) for d in group.inputs for a in split_axes(spec, d)):
        return [_carry_copies(spec, before, after, group)]
    patterns = []
    for dim in group.inputs:
        inner = math.prod(before[d] for d in group.inputs if d > dim)
        patterns += [p.times(inner) for p in dim_patterns(spec, dim, before[dim])]
    return [found for pattern in patterns for found in _place_pattern(pattern, after, group.outputs, spec)]


def _has_copies(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.each is not None


def _carry_copies(
    spec: MeshSpec, before: Sequence[int], after: Sequence[int], group: DimGroup
) -> tuple[int, Placement]:
    """The placement of the only axis that splits the dims of a group, in parts with copies: on the first dim of it."""
    axes = [a for d in group.inputs for a in split_axes(spec, d)]
    shard, count = spec.placements[axes[0]], spec.mesh.shape[axes[0]]
    assert isinstance(shard, Shard)
    own, new = shard.dim, next((d for d in group.outputs if after[d] > 1), next(iter(group.outputs), None))
    if new is None or len(axes) > 1 or any(before[d] > 1 for d in group.inputs if d < own):
        raise NoViewError(f"{shard} has copies, and is not all that splits the dims")
    within = math.prod(before[d] for d in group.inputs if d > own)
    inner = math.prod(after[d] for d in group.outputs if d > new)
    unit = (shard.unit or 1) * within
    lengths = [n * within for n in shard.groups or (before[own],)]
    if any(n % inner for n in lengths):
        raise NoViewError(f"a group of {shard} ends inside a row of the result")
    groups = None if shard.groups is None else tuple(n // inner for n in lengths)
    cut = replace(shard, dim=new, groups=groups, unit=None if unit % inner else unit // inner)
    ends = [
        [(a * times, b * times) for part in split_part(((0, length),), one, count, "") for a, b in part]
        for one, length, times in ((shard, before[own], within), (cut, after[new], inner))
    ]
    if ends[0] != ends[1]:
        raise NoViewError("a boundary falls inside a row of the result")
    return axes[0], cut


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
        if levels and levels[-1].zigzag:
            raise NoViewError(f"{shard} splits what another axis has in several runs")
        if shard.each is not None:
            raise NoViewError(f"{shard} has copies")
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
        starts = bounds(runs)
        sizes = tuple(_cut_sizes(shard, count, run, start) for run, start in zip(runs, starts, strict=False))
        levels.append(Level(axis, sizes, shard.zigzag))
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


def _cut_sizes(shard: Shard, count: int, run: int, start: int) -> tuple[int, ...]:
    if shard.block is not None:
        return (shard.block,) * count
    return Shard(shard.dim, shard.sizes, unit=shard.unit).lengths(run, count * (1 + shard.zigzag), start)


def _place_pattern(
    pattern: Pattern, after: Sequence[int], dims: Sequence[int], spec: MeshSpec
) -> list[tuple[int, Placement]]:
    """The placements that express a pattern on one of the output dims."""
    inner = {d: math.prod(after[e] for e in dims if e > d) for d in dims}
    own = [d for d in dims if after[d] * inner[d] == pattern.period and after[d] > 1 and pattern.fits(inner[d])]
    if own:
        levels = pattern.over(inner[own[0]]).levels
        return [(v.axis, express_shard(own[0], v.sizes, spec.mesh.axes[v.axis], v.zigzag)) for v in levels]
    longer = [d for d in dims if after[d] * inner[d] % pattern.period == 0 and pattern.fits(inner[d])]
    if not longer:
        raise NoViewError("a boundary falls inside a row of the result")
    dim = longer[-1]
    return [(v.axis, _express_repeated(dim, v, pattern.over(inner[dim]), after[dim])) for v in pattern.levels]


def express_shard(dim: int, sizes: Sequence[tuple[int, ...]], axis: str = "", zigzag: bool = False) -> Shard:
    """The Shard by which an axis cuts runs in these sizes, one tuple for each run; two sizes for a rank in a zigzag.

    >>> express_shard(0, [(2, 1), (2, 1)]), express_shard(0, [(1, 2), (1, 2)])
    (Shard(0), Shard(0, sizes=(1, 2)))
    """
    if all(s == chunk_sizes(sum(s), len(s)) for s in sizes):
        return Shard(dim, zigzag=zigzag)
    if zigzag:
        raise NoViewError(f"dim {dim} would be cut in a zigzag of other parts than even ones")
    if len(set(sizes)) > 1:
        shown = " and ".join(map(str, dict.fromkeys(sizes)))
        raise NoViewError(
            f"axis {axis!r} would cut the parts of dim {dim} that the axes before it make in {shown}, and a Shard "
            f"gives all of them the same sizes (even parts, or Replicate() for axis {axis!r}, can be viewed so)"
        )
    return Shard(dim, sizes[0])


def _express_repeated(dim: int, level: Level, pattern: Pattern, length: int) -> Shard:
    """The Shard that cuts a dim in a pattern that repeats."""
    sizes = next(v for v in pattern.levels if v.axis == level.axis).sizes
    flat = {s for parent in sizes for s in parent}
    if len(flat) == 1 and 0 not in flat and not level.zigzag:
        return Shard(dim, block=flat.pop())
    if len(pattern.levels) > 1 or sizes[0] != chunk_sizes(pattern.period, len(sizes[0])):
        raise NoViewError(f"dim {dim} would be cut in repeating runs of different lengths")
    return Shard(dim, groups=(pattern.period,) * (length // pattern.period), zigzag=level.zigzag)


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
    for placement in (own, own.without_copies(), Shard(own.dim), *_cuts_of_result(spec, axis, own.dim, before, after)):
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
    if tensor.sharding.is_used_as(layout):
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
    if not pending:
        return tensor
    layout = replace_placements(spec, pending, Replicate()).layout(shape_tuple(tensor))
    found = redistribute_to(tensor, layout, name)
    if found is not tensor:
        return found
    return wrap(  # a sum over one rank, which steps that ask for the same operator again must not find pending
        layout, tensor.local_parts, tensor.comm, dtype=tensor.dtype, device=tensor.device, anchor=tensor._anchor
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
    """The result of a rank without elements: as `x`, on the tape of everything that the other ranks compute from."""
    assert x.numel() == 0
    return put_on_tape(torch.zeros_like(x), x, *(t for t in others if t is not None))


def put_on_tape(result: Tensor, *inputs: Tensor) -> Tensor:
    """A result, computed from all inputs by no linear function.

    So the gradient of each depends on all, as on other ranks, and every rank's backward pass meets the same moves, also
    that of a gradient.
    """
    nothing = sum((t.flatten()[:0].sum() for t in inputs), start=result.new_zeros(()))
    return result + nothing.expm1().to(result.dtype)


def fill_empty(tensor: Tensor, *lengths: int) -> Tensor:
    """The tensor with this many zeros along each dim that has no elements, or with one.

    What an operator makes of it, cut to the length it should have, is what it would make of nothing, but with the same
    operators on the tape as on ranks that have something.

    >>> fill_empty(torch.ones(0, 2, 0)).shape, fill_empty(torch.ones(2, 0), 5, 3).shape
    (torch.Size([1, 2, 1]), torch.Size([2, 3]))
    """
    wanted = lengths or (1,) * tensor.ndim
    missing = [0 if have else want for have, want in zip(tensor.shape, wanted, strict=True)]
    return torch.nn.functional.pad(tensor, [n for count in reversed(missing) for n in (0, count)])


@dataclass(frozen=True, slots=True)
class LocalView:
    """What a strategy's `local` function may ask: the comm, and where its local tensors begin in the global ones."""

    comm: Comm
    layouts: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def rank(self) -> int:
        return self.comm.rank

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


_KEEP_CONTIGUOUS = {
    aten.view.default,
    aten.reshape.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.detach.default,
    aten.alias.default,
}
_GIVE_PERMUTED = {aten.einsum.default}  # the product is a view of a batch of matrix products
_COPIES = {aten.clone.default, aten._to_copy.default}
_known: Cache[Hashable, tuple[Strides | None, ...]] = Cache(16384, on_change=True)


def note_strides(call: OperatorCall, given: Sequence[ShardedTensor], result: Any) -> None:
    """Note on the results of a call which strides they would have as whole tensors, unless contiguous ones."""
    op, args = call.op, call.args
    if all(t._dense_strides is None for t in given):
        keeps = op in _KEEP_CONTIGUOUS or not (gives_views(op) or op in _GIVE_PERMUTED)
        if keeps or _cuts_first_dim(op, args):
            return
    elif not (gives_views(op) or op in _COPIES | _GIVE_PERMUTED or is_pointwise(op)) or written_slots(op):
        return
    outputs = result if isinstance(result, list | tuple) else (result,)
    for output, strides in zip(outputs, _ask_torch(call), strict=False):
        if strides is not None and isinstance(output, ShardedTensor):
            output._dense_strides, output._fingerprint = strides, None


def _cuts_first_dim(op: Any, args: Sequence[Any]) -> bool:
    """Whether consecutive rows are taken, which are contiguous."""
    return op is aten.slice.Tensor and (len(args) < 2 or args[1] == 0) and len(args) < 5


def _ask_torch(call: OperatorCall) -> tuple[Strides | None, ...]:
    """The strides of all results."""
    kinds = tuple((tuple(t.shape), _strides_of(t), t.dtype) for t in call.tensors)
    key = (call.key, kinds)
    found = _known.get(key)
    return _known.put(key, _run_without_memory(call, kinds)) if found is None else found


def _strides_of(tensor: Tensor) -> Strides | None:
    return tensor._dense_strides if isinstance(tensor, ShardedTensor) else find_strides(tensor)


def _run_without_memory(
    call: OperatorCall, kinds: Sequence[tuple[tuple[int, ...], Strides | None, torch.dtype]]
) -> tuple[Strides | None, ...]:
    """What torch returns has these strides; what it refuses to view it copies, and copies are contiguous."""
    with no_dispatch_modes(), torch.no_grad():
        op: Any = call.op
        stand_ins = [make_stand_in(*kind) for kind in kinds]
        if is_pointwise(op) and op not in _COPIES:  # without data torch runs them in Python, and loads dynamo
            spread = torch.broadcast_tensors(*stand_ins)  # type: ignore[no-untyped-call]  # untyped in torch
            made = make_stand_in(spread[0].shape, pointwise_strides(*spread), torch.uint8)
            return (find_strides(made),) * len(op._schema.returns)
        args, kwargs = call.fill_slots(stand_ins)
        try:
            result = call.op(*args, **{**kwargs, **({"device": "meta"} if kwargs.get("device") is not None else {})})
        except (RuntimeError, NotImplementedError, TypeError):
            return ()
        outputs = result if isinstance(result, list | tuple) else (result,)
        return tuple(find_strides(o) if isinstance(o, Tensor) else None for o in outputs)


Scatter = Callable[..., Any]


def _reshape_back(base: ShardedTensor, value: ShardedTensor, *size: Any) -> Any:
    return aten.reshape.default(value, tuple(base.shape))


def _permute_back(base: ShardedTensor, value: ShardedTensor, dims: Sequence[int]) -> Any:
    order = [d % base.ndim for d in dims]
    return aten.permute.default(value, [order.index(d) for d in range(base.ndim)])


_SCATTERS: dict[Any, Scatter] = {
    aten.alias.default: lambda base, value: value,  # `x[:]`, a slice of all rows
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.view.default: _reshape_back,
    aten.reshape.default: _reshape_back,
    aten.unsqueeze.default: _reshape_back,
    aten.squeeze.default: _reshape_back,
    aten.squeeze.dim: _reshape_back,
    aten.squeeze.dims: _reshape_back,
    aten.t.default: lambda base, value: aten.t.default(value),
    aten.transpose.int: lambda base, value, one, other: aten.transpose.int(value, one, other),
    aten.permute.default: _permute_back,
}


def allow_writes(call: OperatorCall, given: Sequence[ShardedTensor], result: Any) -> None:
    """Let writes to what a call returned as a copy be written to the tensor it was taken from."""
    op, args, kwargs = call.op, call.args, call.kwargs
    if len(given) != 1:
        return
    if op is aten.unbind.int:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        for row, output in enumerate(result):
            _allow_writes_to(given[0], output, aten.select_scatter.default, (dim, row), {})
    elif op in _SCATTERS:
        _allow_writes_to(given[0], result, _SCATTERS[op], args[1:], kwargs)
    if isinstance(result, list | tuple):
        views = [o._copied_from for o in result if isinstance(o, ShardedTensor) and o._copied_from is not None]
        for view in views:
            view.siblings = tuple(v for v in views if v is not view)


def _allow_writes_to(
    base: ShardedTensor, copy: ShardedTensor, scatter: Scatter, rest: Sequence[Any], options: Mapping[str, Any]
) -> None:
    view, parts = copy._copied_from, copy.local_parts
    spec = mesh_view(base.sharding)
    reaches_all = spec is None or spec.mesh.ranks.size == base.comm.world_size
    repeats = any(n > 1 and step == 0 for n, step in zip(base.shape, base._dense_strides or base.shape, strict=True))
    if view is None or view is base._copied_from or view.write is not None or repeats or not reaches_all:
        return

    def put(x: ShardedTensor, value: ShardedTensor) -> Any:
        return scatter(x, value, *rest, **options)

    view.allow_writes(parts, partial(_write_copy, share(base), copy.sharding, parts, put, base.comm))


def _write_copy(base: ShardedTensor, layout: Layout, parts: tuple[Tensor, ...], put: Scatter, comm: Comm) -> None:
    aten.copy_.default(base, put(base, wrap(layout, parts, comm)))
