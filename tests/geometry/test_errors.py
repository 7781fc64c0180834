"""Every error of boxes, meshes, placements, specs and layouts, by its text."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    LayoutError,
    Mesh,
    MeshSpec,
    NotationError,
    Partial,
    Piece,
    Replicate,
    Shard,
    layout_from_json,
)

TP = Mesh.of(tp=2)
MESH = Mesh.of(dp=2, tp=4)
ONE = ChunkSpec(0, 1).layout((4,))


def pieces(*rows: tuple[int, int, int]) -> list[Piece]:
    """1-D pieces from (offset, size, rank)."""
    return [Piece(Box((o,), (s,)), r) for o, s, r in rows]


def enumerated(shape: tuple[int, ...], *rows: tuple[int, int, int], replicated: bool = False) -> object:
    return EnumerableSpec(pieces(*rows), replicated).layout(shape)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "shape with a fraction": (lambda: ChunkSpec(0, 2).layout((4.5,)), "a shape must contain integers, got (4.5,)"),  # type: ignore[arg-type]  # the mistake
    "shape that is none": (lambda: ChunkSpec(0, 2).layout(4), "a shape must be a sequence of integers, got 4"),  # type: ignore[arg-type]  # the mistake
    "dim with a fraction": (lambda: ChunkSpec(0.5, 2), "a dim must be an integer, got 0.5"),  # type: ignore[arg-type]  # the mistake
    "ranks in letters": (
        lambda: ChunkSpec(0, "ab"),
        "ChunkSpec takes ranks as numbers, a count such as 4 or a list such as [0, 1]; got 'ab'. Texts such as "
        "'rank:0/cpu' belong in the ChunkShardingSpec of shardwise.compat",
    ),  # type: ignore[arg-type]  # the mistake
    "sizes with a fraction": (
        lambda: Shard(0, sizes=(1.5, 2.5)),  # type: ignore[arg-type]  # the mistake
        "Shard(0, sizes=...) must contain integers, got (1.5, 2.5)",
    ),
    "box sizes": (
        lambda: Box((0, 1), (2,)),
        "a box needs as many sizes as offsets, got offsets (0, 1) and sizes (2,)",
    ),
    "box negative offset": (
        lambda: Box((-1,), (2,)),
        "a box has no negative numbers, got offsets (-1,) and sizes (2,)",
    ),
    "box negative size": (lambda: Box((0,), (-2,)), "a box has no negative numbers, got offsets (0,) and sizes (-2,)"),
    "box dims": (
        lambda: Box((0,), (2,)).intersect(Box((0, 0), (2, 2))),
        "boxes of 1 and 2 dims do not intersect: [0:2] and [0:2, 0:2]",
    ),
    "piece rank": (lambda: Piece(Box((0,), (2,)), -1), "a rank is 0 or more, got -1 for the piece [0:2]"),
    "mesh names": (lambda: Mesh(("a",), [[0, 1]]), "a mesh of shape (1, 2) needs 2 axis names, got ('a',)"),
    "mesh same names": (lambda: Mesh(("a", "a"), [[0, 1]]), "axis names must differ, got ('a', 'a')"),
    "mesh identifier": (
        lambda: Mesh(("a b",), [0]),
        "an axis name is a Python identifier such as 'dp', got 'a b'",
    ),
    "mesh empty": (lambda: Mesh(("a",), []), "a mesh needs at least one rank, got shape (0,)"),
    "mesh negative": (lambda: Mesh(("a",), [0, -3]), "a rank is 0 or more, got -3 in a mesh of shape (2,)"),
    "mesh twice": (lambda: Mesh(("a",), [0, 4, 4]), "rank 4 appears 2 times in the mesh"),
    "mesh of": (lambda: Mesh.of(dp=0), "axis 'dp' needs at least one rank, got 0"),
    "mesh axis": (lambda: MESH.axis_index("pp"), "no axis 'pp'; this mesh has 'dp', 'tp'"),
    "mesh axis number": (lambda: MESH.axis_index(2), "no axis 2; this mesh has 2 axes: ('dp', 'tp')"),
    "mesh coordinates": (lambda: MESH.coordinates(8), "rank 8 is not in the mesh dp=2,tp=4"),
    "submesh outside": (lambda: MESH.submesh("tp", dp=2), "axis 'dp' has 2 ranks, coordinate 2 is invalid"),
    "submesh missing": (
        lambda: MESH.submesh("tp"),
        "each axis of ('dp', 'tp') is either kept or fixed; got keep=('tp',), fixed={}",
    ),
    "shard two rules": (
        lambda: Shard(0, sizes=(1, 2), block=1),
        "Shard(0) takes one of sizes, groups, block, owners, got sizes and block",
    ),
    "shard sizes": (lambda: Shard(0, sizes=(1, -2)), "Shard(0, sizes=(1, -2)): lengths are 0 or more"),
    "shard groups": (lambda: Shard(0, groups=(-1,)), "Shard(0, groups=(-1,)): lengths are 0 or more"),
    "shard block": (lambda: Shard(1, block=0), "Shard(1, block=0): a block has at least one row"),
    "partial": (lambda: Partial("mean"), "Partial('mean'): the reduction is one of sum, avg, min, max, product"),
    "two reductions": (
        lambda: MeshSpec(MESH, (Partial("max"), Partial("avg"))),
        "axes with pending max and sum have no defined order of reduction; "
        "use one kind of Partial, or redistribute one axis first",
    ),
    "chunk ranks": (lambda: ChunkSpec(0, ()), "ChunkSpec needs at least one rank, all 0 or more; got ()"),
    "chunk negative": (lambda: ChunkSpec(0, (1, -1)), "ChunkSpec needs at least one rank, all 0 or more; got (1, -1)"),
    "chunk devices": (lambda: ChunkSpec(0, 2, ["cpu"]), "ChunkSpec over 2 ranks needs as many devices, got 1"),
    "chunk dim": (
        lambda: ChunkSpec(2, 2).layout((3, 4)),
        "ChunkSpec(dim=2): a tensor of shape (3, 4) has a dim from -2 to 1",
    ),
    "chunk 0-dim": (
        lambda: ChunkSpec(0, 2).layout(()),
        "ChunkSpec(dim=0): a tensor of shape () has no dim: a 0-dim tensor can only be replicated",
    ),
    "grid ranks": (
        lambda: GridSpec((2, (1, 3)), [0, 1]),
        "splits (2, (1, 3)) make a grid of shape (2, 2); pass a rank array of this shape "
        "(or with one more axis for replicas), got shape (2,)",
    ),
    "grid negative": (lambda: GridSpec((2,), [0, -1]), "GridSpec needs at least one rank for each cell, all 0 or more"),
    "grid replicas": (
        lambda: GridSpec((2,), [[0, 1], [2, 2]]),
        "GridSpec: the replicas of a cell are on different ranks; one rank appears twice for a cell",
    ),
    "grid dims": (
        lambda: GridSpec((2,), [0, 1]).layout((4, 4)),
        "GridSpec has splits for 1 dims; the shape (4, 4) has 2",
    ),
    "grid sizes": (
        lambda: GridSpec(((1, 2),), [0, 1]).layout((4,)),
        "dim 0 of length 4 is split into sizes (1, 2), which must sum to 4",
    ),
    "mesh placements": (
        lambda: MeshSpec(MESH, (Shard(0),)),
        "a mesh with axes ('dp', 'tp') needs 2 placements, one for each axis; got 1: (Shard(0),)",
    ),
    "mesh no placement": (
        lambda: MeshSpec(TP, (0,)),  # type: ignore[arg-type]  # the error under test
        "axis 'tp': a placement is Shard(dim), Replicate() or Partial(), of shardwise or of torch.distributed.tensor; "
        "got int: 0",
    ),
    "mesh order": (
        lambda: MeshSpec(MESH, (Shard(0), Shard(0)), order=("tp", "tp")),
        "an axis appears twice in order: ('tp', 'tp')",
    ),
    "mesh order axis": (
        lambda: MeshSpec(MESH, (Shard(0), Shard(0)), order=("pp",)),
        "no axis 'pp'; this mesh has 'dp', 'tp'",
    ),
    "mesh dim": (
        lambda: MeshSpec(TP, (Shard(-3),)).layout((3, 4)),
        "Shard(-3) on axis 'tp': a tensor of shape (3, 4) has a dim from -2 to 1",
    ),
    "mesh sizes": (
        lambda: MeshSpec(Mesh.of(tp=4), (Shard(0, sizes=(3, 3, 3)),)).layout((10,)),
        "dim 0 of length 10 is split into sizes (3, 3, 3) over axis 'tp' of 4 ranks; pass 4 sizes that add up to 10",
    ),
    "mesh groups": (
        lambda: MeshSpec(TP, (Shard(0, groups=(4, 2)),)).layout((8,)),
        "dim 0 of length 8 is declared as groups (4, 2), which add up to 6; pass groups that add up to 8",
    ),
    "shape": (lambda: ChunkSpec(0, 2).layout((3, -1)), "a shape has no negative lengths, got (3, -1)"),
    "pieces of two ndims": (
        lambda: EnumerableSpec([Piece(Box((0,), (2,)), 0), Piece(Box((0, 0), (2, 2)), 1)]),
        "pieces of one tensor have the same number of dims; [0:2] on rank 0 and [0:2, 0:2] on rank 1 differ",
    ),
    "pieces of other ndim": (
        lambda: enumerated((4, 4), (0, 4, 0)),
        "the pieces have 1 dims; the tensor's shape (4, 4) has 2",
    ),
    "arrays": (
        lambda: EnumerableSpec.from_arrays([[0], [2]], [[2]], [0]),
        "offsets and sizes have shape (pieces, ndim), ranks (pieces,); got (2, 1), (1, 1) and (1,)",
    ),
    "arrays rank": (lambda: EnumerableSpec.from_arrays([[0]], [[2]], [-2]), "a rank is 0 or more, got -2"),
    "overlap": (
        lambda: enumerated((6,), (0, 4, 0), (3, 3, 2)),
        "pieces of a tensor of shape (6,) overlap in [3:4]: [0:4] on rank 0 and [3:6] on rank 2",
    ),
    "replicas not declared": (
        lambda: enumerated((4,), (0, 4, 0), (0, 4, 1)),
        "pieces of a tensor of shape (4,) overlap in [0:4]: [0:4] on rank 0 and [0:4] on rank 1",
    ),
    "replicas that differ": (
        lambda: enumerated((4,), (0, 4, 0), (0, 3, 1), (3, 1, 1), replicated=True),
        "pieces of a tensor of shape (4,) overlap in [0:3]: [0:3] on rank 1 and [0:4] on rank 0",
    ),
    "box twice": (
        lambda: enumerated((4,), (0, 4, 1), (0, 4, 0), (0, 4, 1), replicated=True),
        "[0:4] on rank 1 is listed 2 times; a rank can have a box only once",
    ),
    "gap": (
        lambda: enumerated((6,), (0, 2, 0), (4, 2, 2)),
        "no piece covers [2:4] of a tensor of shape (6,); add one, or enlarge its neighbour",
    ),
    "nothing": (
        lambda: EnumerableSpec([]).layout((2, 3)),
        "no piece covers [0:2, 0:3] of a tensor of shape (2, 3); add one, or enlarge its neighbour",
    ),
    "out of bounds": (
        lambda: enumerated((6,), (0, 2, 0), (2, 5, 1)),
        "[2:7] on rank 1 is outside the tensor's shape (6,)",
    ),
    "empty out of bounds": (
        lambda: enumerated((6,), (0, 6, 0), (7, 0, 1)),
        "[7:7] on rank 1 is outside the tensor's shape (6,)",
    ),
    "ranks holding": (
        lambda: ONE.ranks_holding(Box((0, 0), (1, 1))),
        "[0:1, 0:1] has 2 dims; the tensor's shape (4,) has 1",
    ),
    "json": (lambda: layout_from_json({"shape": [4]}), "this is not a layout in JSON: KeyError: 'spec'"),
    "json kind": (
        lambda: layout_from_json({"shape": [4], "spec": {"kind": "round"}}),
        "unknown kind of spec 'round'; known: chunk, grid, mesh, enumerable",
    ),
    "json placement": (
        lambda: layout_from_json(
            {
                "shape": [4],
                "spec": {"kind": "mesh", "mesh": {"axes": ["a"], "ranks": [0]}, "placements": [{"kind": "x"}]},
            }
        ),
        "unknown kind of placement 'x'; known: replicate, partial, shard",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error_text(name: str) -> None:
    action, text = CASES[name]
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}$"):
        action()


def test_layout_errors_are_value_errors() -> None:
    assert issubclass(LayoutError, ValueError)
    assert issubclass(NotationError, LayoutError)


def test_notation_error_points_at_the_character() -> None:
    error = NotationError("expected a number", "f32[x]", 4)
    assert str(error) == "expected a number\n  f32[x]\n      ^"
    assert (error.text, error.position) == ("f32[x]", 4)


@pytest.mark.parametrize(
    "value",
    [
        TP,
        ONE,
        GridSpec((2,), [0, 1]),
        EnumerableSpec(pieces((0, 4, 0))),
    ],
    ids=lambda v: type(v).__name__,
)
def test_values_are_frozen(value: object) -> None:
    with pytest.raises(AttributeError, match=f"an? {type(value).__name__} is frozen: shape cannot be set"):
        value.shape = ()  # type: ignore[attr-defined]  # the error under test


@pytest.mark.parametrize(
    "value", [Box((0,), (1,)), Piece(Box((0,), (1,)), 0), Shard(0), Replicate(), Partial(), ChunkSpec(0, 1)]
)
def test_dataclasses_are_frozen(value: object) -> None:
    with pytest.raises((AttributeError, TypeError)):
        value.dim = 3  # type: ignore[attr-defined]  # the error under test


def test_arrays_are_frozen() -> None:
    arrays = [TP.ranks, GridSpec((2,), [0, 1]).ranks, EnumerableSpec(pieces((0, 4, 0))).offsets]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7
    assert np.array_equal(TP.ranks, [0, 1])
