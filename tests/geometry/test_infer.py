"""The spec that explains given pieces: it gives them back exactly, and it is the simplest kind that does."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings

from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Piece,
    Placement,
    Replicate,
    Shard,
    ShardingSpec,
    infer_spec,
)
from shardwise.testing import small_layouts
from shardwise.testing import strategies as sw


def mesh(placements: Sequence[Placement], **axes: int) -> MeshSpec:
    return MeshSpec(Mesh.of(**axes), placements)


def listed(layout: Layout) -> Layout:
    """The layout with each piece as a local tensor of its own."""
    return EnumerableSpec(layout.pieces, replicated=True).layout(layout.shape)


def inferred(spec: ShardingSpec, shape: tuple[int, ...]) -> ShardingSpec:
    layout = spec.layout(shape)
    found = infer_spec(shape, layout.pieces)
    assert found.layout(shape) == listed(layout)
    return found


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 2)], ids=str)
def test_every_small_layout_is_explained(shape: tuple[int, ...]) -> None:
    for layout in small_layouts(shape, 3, pending=False):
        assert infer_spec(shape, layout.pieces).layout(shape) == listed(layout), layout


@settings(max_examples=300)
@given(layout=sw.layouts(ranks=5))
def test_every_layout_is_explained(layout: Layout) -> None:
    assert infer_spec(layout.shape, layout.pieces).layout(layout.shape) == listed(layout)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("ranks", [*permutations(range(3)), (4, 2), (0, 1, 0), (7,), (0, 1, 2, 3, 4)])
def test_chunks_are_found_on_every_dim(dim: int, ranks: tuple[int, ...]) -> None:
    shape = (6, 7, 8)
    found = inferred(ChunkSpec(dim, ranks), shape)
    assert found == ChunkSpec(dim if len(ranks) > 1 else 0, ranks)


def test_chunks_are_found_behind_other_specs() -> None:
    assert inferred(mesh((Shard(1),), tp=3), (4, 7)) == ChunkSpec(1, 3)
    assert inferred(GridSpec((1, 2), [[3, 1]]), (4, 6)) == ChunkSpec(1, (3, 1))
    pieces = [Piece(Box((5,), (5,)), 0), Piece(Box((0,), (5,)), 1)]
    assert inferred(EnumerableSpec(pieces), (10,)) == ChunkSpec(0, (1, 0))


def test_empty_chunks_are_found() -> None:
    assert inferred(ChunkSpec(0, 5), (3,)) == ChunkSpec(0, 5)
    assert inferred(ChunkSpec(0, (2, 0, 1)), (0,)).layout((0,)) == ChunkSpec(0, (2, 0, 1)).layout((0,))
    assert isinstance(inferred(ChunkSpec(1, 5), (4, 3)), ChunkSpec)


def test_devices_are_kept() -> None:
    pieces = [Piece(Box((2,), (2,)), 1, "cuda:1"), Piece(Box((0,), (2,)), 0, "cuda:0")]
    assert infer_spec((4,), pieces) == ChunkSpec(0, 2, ("cuda:0", "cuda:1"))


def test_ragged_is_a_grid() -> None:
    found = inferred(mesh((Shard(0, sizes=(1, 4, 2)),), tp=3), (7, 2))
    assert found == GridSpec(((1, 4, 2), (2,)), [[0], [1], [2]])


def test_two_cut_dims_are_a_grid() -> None:
    found = inferred(mesh((Shard(0), Shard(1)), a=2, b=3), (4, 6))
    assert found == GridSpec(((2, 2), (2, 2, 2)), [[0, 1, 2], [3, 4, 5]])


def test_replicas_are_a_mesh() -> None:
    found = inferred(mesh((Replicate(), Shard(0)), dp=2, tp=2), (6, 2))
    assert isinstance(found, MeshSpec)
    assert found.placements == (Shard(0), Replicate())
    assert found.mesh.ranks.tolist() == [[0, 2], [1, 3]]
    everywhere = inferred(mesh((Replicate(),), dp=3), (6, 2))
    assert everywhere == MeshSpec(Mesh(("r",), [0, 1, 2]), (Replicate(),))
    ragged = inferred(mesh((Replicate(), Shard(0, sizes=(1, 5))), dp=2, tp=2), (6, 2))
    assert isinstance(ragged, MeshSpec)
    assert ragged.placements == (Shard(0, sizes=(1, 5)), Replicate())


def test_replicas_with_several_cells_a_rank_are_a_grid() -> None:
    found = inferred(GridSpec((2,), [[0, 1], [0, 1]]), (4,))
    assert found == GridSpec(((2, 2),), [[0, 1], [0, 1]])


def test_irregular_is_enumerable() -> None:
    boxes = [Box((0, 0), (1, 3)), Box((1, 0), (1, 1)), Box((1, 1), (1, 2))]
    found = inferred(EnumerableSpec([Piece(box, rank) for rank, box in enumerate(boxes)]), (2, 3))
    assert isinstance(found, EnumerableSpec)
    uneven_copies = EnumerableSpec(
        [Piece(Box((0,), (2,)), 0), Piece(Box((0,), (2,)), 1), Piece(Box((2,), (2,)), 2)], replicated=True
    )
    assert isinstance(inferred(uneven_copies, (4,)), EnumerableSpec)


def test_local_tensors_in_another_order_are_enumerable() -> None:
    """The rank holds the second half first, which no chunk or grid says."""
    found = inferred(EnumerableSpec([Piece(Box((2,), (2,)), 0), Piece(Box((0,), (2,)), 0)]), (4,))
    assert isinstance(found, EnumerableSpec)


def test_wrong_pieces_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"^no piece covers \[2:4\] of a tensor of shape \(4,\)"):
        infer_spec((4,), [Piece(Box((0,), (2,)), 0)])
    with pytest.raises(LayoutError, match=r"^\[0:2\] on rank 0 has 1 dims; the tensor's shape \(4, 4\) has 2$"):
        infer_spec((4, 4), [Piece(Box((0,), (2,)), 0)])
