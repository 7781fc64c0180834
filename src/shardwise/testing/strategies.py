"""Random layouts for property tests with Hypothesis: every kind of spec, on any set of ranks.

1. A shape is drawn, then a set of ranks, then one kind of spec that fits both.
2. Mesh layouts are drawn axis by axis in the order of their splits, so that explicit sizes always add up.
3. Enumerable layouts come from random guillotine cuts, assigned to the ranks in random order.

A property of your own code over all layouts of a shape:

>>> from hypothesis import given, settings
>>> @settings(derandomize=True, deadline=None, max_examples=20)
... @given(layout=layouts(shape=(4, 6), ranks=3))
... def test_every_element_is_somewhere(layout):
...     assert sum(layout.elements_per_rank().values()) >= 24
>>> test_every_element_is_somewhere()

Hypothesis is not a dependency of Shardwise: install it to use this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from shardwise.geometry.box import Box, Piece
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import Mesh
from shardwise.geometry.placements import DimIntervals, Partial, Placement, Replicate, Shard, split_part
from shardwise.geometry.specs import ChunkSpec, EnumerableSpec, GridSpec, MeshSpec

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("shardwise.testing.strategies needs Hypothesis; run: pip install hypothesis") from error

Shape: TypeAlias = tuple[int, ...]
Ranks: TypeAlias = int | Sequence[int]

KINDS = ("chunk", "grid", "mesh", "enumerable")
_AXES = ("a", "b", "c", "d")
_OPS = (("sum", "avg"), ("min",), ("max",), ("product",))


def shapes(max_dims: int = 3, max_length: int = 6, min_dims: int = 0) -> st.SearchStrategy[Shape]:
    """Small shapes, 0-dim and zero-length ones among them.

    >>> from hypothesis import find
    >>> find(shapes(), lambda shape: len(shape) == 2 and 0 in shape)
    (0, 0)
    """
    return st.lists(st.integers(0, max_length), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def rank_lists(draw: st.DrawFn, ranks: Ranks) -> tuple[int, ...]:
    """One or more distinct ranks out of those passed (a number n means 0 to n-1), in any order."""
    order = draw(st.permutations(_pool(ranks)))
    return tuple(order[: draw(st.integers(1, len(order)))])


def _pool(ranks: Ranks) -> list[int]:
    return list(range(ranks)) if isinstance(ranks, int) else list(ranks)


@st.composite
def meshes(draw: st.DrawFn, ranks: Ranks = 4, max_axes: int = 3) -> Mesh:
    """Meshes of one to `max_axes` axes over some of the ranks, in any order.

    >>> from hypothesis import find
    >>> print(find(meshes(ranks=4), lambda mesh: mesh.shape == (2, 2)))
    a=2,b=2
    """
    pool = _pool(ranks)
    sizes = draw(st.sampled_from(_mesh_shapes(len(pool), max_axes)))
    order = draw(st.permutations(pool))
    return Mesh(_AXES[: len(sizes)], np.array(order[: math.prod(sizes)]).reshape(sizes))


@cache
def _mesh_shapes(count: int, max_axes: int) -> list[Shape]:
    """Mesh shapes of at most `count` ranks with at most one axis of a single rank, the simplest first."""
    found: list[Shape] = [()]
    for _ in range(max_axes):
        longest = [s for s in found if len(s) == len(found[-1])]
        found += [(*s, n) for s in longest for n in range(1, count // math.prod(s) + 1) if n > 1 or 1 not in s]
    return found[1:]


@st.composite
def placements(
    draw: st.DrawFn, shape: Sequence[int], mesh: Mesh, order: Sequence[str] | None = None, pending: bool = False
) -> tuple[Placement, ...]:
    """One placement for each axis of a mesh, fitting a shape; `order` lists the axes from the outermost split inwards.

    All rules of `Shard` are drawn; `Partial` only when `pending` is true.

    >>> from hypothesis import find
    >>> find(placements((6,), Mesh.of(tp=2)), lambda p: p[0] != Replicate())
    (Shard(0),)
    """
    ops = draw(st.sampled_from(_OPS))
    held: dict[int, list[DimIntervals]] = {d: [((0, n),)] for d, n in enumerate(shape)}
    chosen: dict[str, Placement] = {}
    for axis in order or mesh.axes:
        kind = draw(st.sampled_from(["copy", *["shard"] * 3 * bool(shape), *["pending"] * pending]))
        if kind == "copy":
            chosen[axis] = Replicate()
        elif kind == "pending":
            chosen[axis] = Partial(draw(st.sampled_from(ops)))
        else:
            dim = draw(st.integers(0, len(shape) - 1))
            chosen[axis] = rule = draw(_shards(dim, shape, held[dim], mesh.axis_size(axis)))
            held[dim] = [sub for part in held[dim] for sub in split_part(part, rule, mesh.axis_size(axis), axis)]
    return tuple(chosen[axis] for axis in mesh.axes)


@st.composite
def _shards(draw: st.DrawFn, dim: int, shape: Sequence[int], held: Sequence[DimIntervals], count: int) -> Shard:
    """A rule that splits every held part of a dim among `count` ranks."""
    lengths = {sum(stop - start for start, stop in part) for part in held}
    rules = ["chunk", "groups", "block", *["sizes"] * (len(lengths) == 1)]
    rule, unit = draw(st.sampled_from(rules)), draw(st.sampled_from((1, 1, 2, 3)))
    named = dim - len(shape) if draw(st.booleans()) else dim
    zigzag = draw(st.booleans())
    if rule == "groups":
        lengths_of_groups = draw(_cuts_at_units(shape[dim], draw(st.integers(1, 3)), unit))
        divisors = [1] if zigzag else [n for n in range(1, count + 1) if count % n == 0]
        each = tuple(draw(st.sampled_from(divisors)) for _ in lengths_of_groups)
        return Shard(named, groups=lengths_of_groups, unit=unit, zigzag=zigzag, each=each)
    if rule in ("sizes", "block"):
        unit = unit if list(held) == [((0, shape[dim]),)] else 1  # what other axes have cut may begin inside a unit
    if rule == "sizes":
        return Shard(dim, sizes=draw(_cuts_at_units(lengths.pop(), count, unit)), unit=unit)
    if rule == "block":
        return Shard(dim, block=unit * draw(st.integers(1, 3)), unit=unit)
    return Shard(named, unit=unit, zigzag=zigzag)


@st.composite
def _cuts_at_units(draw: st.DrawFn, length: int, count: int, unit: int) -> tuple[int, ...]:
    """Lengths of parts between units, of which the last may be short."""
    edges = [0, *accumulate(draw(cuts(-(-length // unit), count)))]
    return tuple(min(b * unit, length) - min(a * unit, length) for a, b in pairwise(edges))


@st.composite
def cuts(draw: st.DrawFn, length: int, count: int) -> tuple[int, ...]:
    """Lengths of `count` parts, zeros among them, that add up to `length`."""
    edges = sorted(draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1)))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, length], strict=True))


@st.composite
def mesh_specs(draw: st.DrawFn, shape: Sequence[int], ranks: Ranks = 4, pending: bool = False) -> MeshSpec:
    """Mesh specs that fit a shape, in every order of splits."""
    mesh = draw(meshes(ranks))
    order = draw(st.permutations(mesh.axes))
    return MeshSpec(mesh, draw(placements(shape, mesh, order, pending)), order)


@st.composite
def pending_specs(draw: st.DrawFn, shape: Sequence[int], ranks: Ranks = 4) -> MeshSpec:
    """Mesh specs over two ranks or more that always leave a reduction pending; the outermost axis holds two addends."""
    order = np.array(draw(st.permutations(_pool(ranks))))
    half = len(order) // 2
    inner = draw(meshes(half, max_axes=2))
    rest = draw(placements(shape, inner, pending=True))
    ops = [p.op for p in rest if isinstance(p, Partial)] or draw(st.sampled_from(_OPS))
    mesh = Mesh(("p", *inner.axes), order[np.stack([inner.ranks, inner.ranks + half])])
    return MeshSpec(mesh, (Partial(draw(st.sampled_from(ops))), *rest))


@st.composite
def chunk_specs(draw: st.DrawFn, shape: Sequence[int], ranks: Ranks = 4) -> ChunkSpec:
    """Chunk specs that fit a shape of at least one dim; a rank may stand several times, or not at all."""
    pool = _pool(ranks)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    order = draw(st.one_of(rank_lists(pool), st.lists(st.sampled_from(pool), min_size=1, max_size=len(pool) + 2)))
    return ChunkSpec(dim, order)


@st.composite
def grid_specs(draw: st.DrawFn, shape: Sequence[int], ranks: Ranks = 4) -> GridSpec:
    """Grid specs that fit a shape: counts or ragged sizes in each dim, and replicas of every cell."""
    counts = tuple(draw(st.integers(1, 3)) for _ in shape)
    splits = [draw(st.one_of(st.just(n), cuts(length, n))) for n, length in zip(counts, shape, strict=True)]
    pool = _pool(ranks)
    replicas = draw(st.integers(1, min(3, len(pool))))
    owners = [draw(st.permutations(pool))[:replicas] for _ in range(math.prod(counts))]
    return GridSpec(splits, np.array(owners).reshape((*counts, replicas)))


@st.composite
def enumerable_specs(draw: st.DrawFn, shape: Sequence[int], ranks: Ranks = 4, max_cuts: int = 5) -> EnumerableSpec:
    """Enumerable specs that fit a shape: guillotine cuts, zero or many pieces a rank, replicas or none."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, max_cuts)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        boxes += _halves(box, dim, draw(st.integers(0, box.sizes[dim])))
    pool, replicated = _pool(ranks), draw(st.booleans())
    holders = [draw(rank_lists(pool)) if replicated else (draw(st.sampled_from(pool)),) for _ in boxes]
    pieces = [Piece(box, rank) for box, group in zip(boxes, holders, strict=True) for rank in group]
    if 0 in shape and draw(st.booleans()):
        pieces = []
    return EnumerableSpec(draw(st.permutations(pieces)), replicated)


def _halves(box: Box, dim: int, at: int) -> list[Box]:
    low = tuple(at if d == dim else s for d, s in enumerate(box.sizes))
    high = tuple(s - at if d == dim else s for d, s in enumerate(box.sizes))
    return [Box(box.offsets, low), Box(tuple(o + at * (d == dim) for d, o in enumerate(box.offsets)), high)]


def specs(
    shape: Sequence[int], ranks: Ranks = 4, pending: bool = False, kinds: Sequence[str] = KINDS
) -> st.SearchStrategy[ShardingSpec]:
    """Specs of these kinds that fit a shape."""
    known: dict[str, st.SearchStrategy[ShardingSpec]]
    known = {"grid": grid_specs(shape, ranks), "enumerable": enumerable_specs(shape, ranks)}
    if shape:
        known["chunk"] = chunk_specs(shape, ranks)
    known["mesh"] = mesh_specs(shape, ranks, pending)
    if pending and len(_pool(ranks)) > 1:
        known["mesh"] |= pending_specs(shape, ranks)
    return st.one_of([known[kind] for kind in kinds if kind in known])


@st.composite
def layouts(
    draw: st.DrawFn,
    shape: Sequence[int] | None = None,
    ranks: Ranks = 4,
    pending: bool = False,
    kinds: Sequence[str] = KINDS,
) -> Layout:
    """Layouts of a shape (any small one by default) over some of the ranks.

    `ranks` is a number of ranks or a list of them; `pending` allows pending reductions; `kinds` narrows the specs down.

    >>> from hypothesis import find
    >>> layout = find(layouts(shape=(4,), ranks=2, kinds=["chunk"]), lambda found: len(found.ranks) == 2)
    >>> [str(piece) for piece in layout.pieces]
    ['[0:2] on rank 0', '[2:4] on rank 1']
    """
    chosen = draw(shapes()) if shape is None else tuple(shape)
    return draw(specs(chosen, ranks, pending, kinds)).layout(chosen)


@st.composite
def layout_pairs(
    draw: st.DrawFn,
    shape: Sequence[int] | None = None,
    ranks: int = 5,
    pending: bool = False,
    kinds: Sequence[str] = KINDS,
) -> tuple[Layout, Layout]:
    """Two layouts of one shape, on the same, overlapping or disjoint ranks; `pending` concerns the first one only.

    >>> from hypothesis import find
    >>> source, target = find(layout_pairs(), lambda pair: not set(pair[0].ranks) & set(pair[1].ranks))
    >>> source.shape == target.shape
    True
    """
    chosen = draw(shapes()) if shape is None else tuple(shape)
    order = draw(st.permutations(range(ranks)))
    middle = draw(st.integers(1, max(1, ranks - 1)))
    kind = draw(st.sampled_from(["same", "overlapping", "disjoint"]))
    first = order if kind == "same" else order[:middle]
    second = order if kind == "same" or ranks < 2 else order[middle:] if kind == "disjoint" else order[middle - 1 :]
    source = draw(layouts(chosen, first, pending, kinds))
    return source, draw(layouts(chosen, second, False, kinds))
