"""All small layouts of a shape, so that tests try every one of them instead of a few at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

import numpy as np

from shardwise.geometry.box import Box, Piece
from shardwise.geometry.layout import Layout, ShardingSpec
from shardwise.geometry.mesh import Mesh
from shardwise.geometry.placements import Partial, Placement, Replicate, Shard
from shardwise.geometry.specs import ChunkSpec, EnumerableSpec, GridSpec, MeshSpec


def small_layouts(shape: Sequence[int], ranks: int, pending: bool = True) -> list[Layout]:
    """Every chunk, ragged, grouped, cyclic, replicated, pending, grid and T-shaped layout of a small shape, each once.

    Layouts that mean the same are listed once, whatever spec they come from.

    >>> len(small_layouts((2,), ranks=1)), len(small_layouts((2,), ranks=2))
    (2, 14)
    """
    shape = tuple(shape)
    sources = [
        _chunks(shape, ranks),
        _meshes(shape, ranks, pending),
        _grids(shape, ranks),
        _t_shaped_layouts(shape, ranks),
    ]
    found = {spec.layout(shape): None for specs in sources for spec in specs}
    return list(found)


def _chunks(shape: tuple[int, ...], ranks: int) -> Iterator[ShardingSpec]:
    for dim in range(len(shape)):
        for count in range(1, ranks + 1):
            for chosen in product(range(ranks), repeat=count):
                yield ChunkSpec(dim, chosen)


def _meshes(shape: tuple[int, ...], ranks: int, pending: bool) -> Iterator[ShardingSpec]:
    for count in range(1, ranks + 1):
        for chosen in permutations(range(ranks), count):
            mesh = Mesh(("a",), chosen)
            for placement in _placements(shape, count, pending):
                yield MeshSpec(mesh, (placement,))
    if ranks >= 4:
        for first, second in product(_placements(shape, 2, pending, plain=True), repeat=2):
            for order in (("a", "b"), ("b", "a")):
                yield MeshSpec(Mesh.of(a=2, b=2), (first, second), order)


def _placements(shape: tuple[int, ...], count: int, pending: bool, plain: bool = False) -> Iterator[Placement]:
    yield Replicate()
    if pending:
        yield Partial("sum")
    for dim, length in enumerate(shape):
        yield Shard(dim)
        if plain:
            continue
        yield Shard(dim, block=1)
        yield from (Shard(dim, groups=sizes) for sizes in _sizes(length, 2))
        yield from (Shard(dim, sizes=sizes) for sizes in _sizes(length, count))


def _sizes(length: int, count: int) -> Iterator[tuple[int, ...]]:
    """All splits of a length into `count` parts, including empty ones."""
    if count == 1:
        yield (length,)
        return
    for first in range(length + 1):
        yield from ((first, *rest) for rest in _sizes(length - first, count - 1))


def _grids(shape: tuple[int, ...], ranks: int) -> Iterator[ShardingSpec]:
    """Each dim whole or halved, every choice of owners."""
    for counts in product(*[(1, 2) if length > 1 else (1,) for length in shape]):
        cells = int(np.prod(counts, dtype=np.int64))
        for owners in product(range(ranks), repeat=cells):
            yield GridSpec(counts, np.array(owners).reshape((*counts, 1)))


def _t_shaped_layouts(shape: tuple[int, ...], ranks: int) -> Iterator[ShardingSpec]:
    """One cut right through, and one cut of the second part only: no grid explains it."""
    if len(shape) < 2 or min(shape[:2]) < 2:
        return
    rest = shape[2:]
    zeros = (0,) * len(rest)
    boxes = (
        Box((0, 0, *zeros), (1, shape[1], *rest)),
        Box((1, 0, *zeros), (shape[0] - 1, 1, *rest)),
        Box((1, 1, *zeros), (shape[0] - 1, shape[1] - 1, *rest)),
    )
    for owners in product(range(ranks), repeat=3):
        yield EnumerableSpec([Piece(box, rank) for box, rank in zip(boxes, owners, strict=True)])
