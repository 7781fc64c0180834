"""What a layout answers, against counting; equality by meaning; interning, pickle and JSON."""

import copy
import json
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.geometry import (
    Box,
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Piece,
    Placement,
    Reduction,
    Replicate,
    Shard,
    ShardingSpec,
    layout_from_json,
    layout_to_json,
    parse_layout,
)
from shardwise.testing import assemble, global_values, scatter
from shardwise.testing import strategies as sw

many = settings(max_examples=200)
some_layouts = sw.layouts(ranks=5, pending=True)


def mesh(placements: Sequence[Placement], order: Sequence[str] | None = None, **axes: int) -> MeshSpec:
    return MeshSpec(Mesh.of(**axes), placements, order)


def rows(layout: Layout) -> list[str]:
    return [str(piece) for piece in layout.pieces]


# Answers against counting.


def owners(layout: Layout) -> dict[tuple[int, ...], set[int]]:
    """The ranks that hold each element."""
    found: dict[tuple[int, ...], set[int]] = {index: set() for index in np.ndindex(layout.shape)}
    for piece in layout.pieces:
        for index in np.ndindex(piece.box.sizes):
            found[tuple(o + i for o, i in zip(piece.box.offsets, index, strict=True))].add(piece.rank)
    return found


@many
@given(layout=some_layouts)
def test_elements_shapes_and_bytes(layout: Layout) -> None:
    found = owners(layout)
    counts = {rank: sum(rank in held for held in found.values()) for rank in layout.ranks}
    assert layout.elements_per_rank() == counts
    assert layout.bytes_per_rank(2) == {rank: 2 * n for rank, n in counts.items()}
    for rank in range(6):
        shapes = layout.local_shapes(rank)
        assert sum(int(np.prod(s)) for s in shapes) == counts.get(rank, 0)
        assert (rank in layout.ranks) == (len(layout.pieces_of(rank)) > 0) == (len(shapes) > 0)
        assert layout.pieces_of(rank) == tuple(p for p in layout.pieces if p.rank == rank)
        assert all(len(s) == layout.ndim for s in shapes)
    assert layout.numel == len(found)


@many
@given(data=st.data(), layout=some_layouts)
def test_ranks_holding_a_box(data: st.DataObject, layout: Layout) -> None:
    offsets = tuple(data.draw(st.integers(0, n)) for n in layout.shape)
    sizes = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(layout.shape, offsets, strict=True))
    box, found = Box(offsets, sizes), owners(layout)
    indices = [tuple(o + i for o, i in zip(offsets, index, strict=True)) for index in np.ndindex(sizes)]
    assert layout.ranks_holding(box) == tuple(sorted(set().union(*(found[i] for i in indices))))


@many
@given(layout=sw.layouts(ranks=5).filter(lambda layout: layout.numel > 0))
def test_replica_groups_hold_the_same_elements(layout: Layout) -> None:
    groups = set(layout.replica_groups)
    assert {tuple(sorted(held)) for held in owners(layout).values()} <= groups
    filled = {
        tuple(sorted(q.rank for q in layout.pieces if q.box == piece.box)) for piece in layout.pieces if piece.box.numel
    }
    empty = {(piece.rank,) for piece in layout.pieces if not piece.box.numel}
    assert filled <= groups
    assert {group for group in groups - filled if len(group) == 1} <= empty


@many
@given(layout=some_layouts)
def test_local_tensors_hold_every_box_once(layout: Layout) -> None:
    """What is scattered is read back: no two boxes share a place in a local tensor, none is left unfilled."""
    values = global_values(layout.shape)
    local = scatter(layout, values)
    assert np.array_equal(assemble(layout, local), values)
    if layout.pending is None:
        assert all((array > 0).all() for arrays in local.values() for array in arrays)


def test_replica_groups_of_a_mesh() -> None:
    layout = mesh((Replicate(), Shard(0)), dp=2, tp=2).layout((4,))
    assert layout.replica_groups == ((0, 2), (1, 3))
    pending = mesh((Partial(), Replicate()), dp=2, tp=2).layout((4,))
    assert pending.replica_groups == ((0, 1), (2, 3))
    assert pending.pending == Reduction("sum")
    assert mesh((Partial("avg"),), tp=4).layout((4,)).pending == Reduction("sum", 4)
    assert mesh((Partial(),), tp=1).layout((4,)).pending is None


# Splits.


def test_groups_split_each_on_its_own() -> None:
    """A fused QKV weight: each rank holds a third of the queries, keys and values, side by side in one local tensor."""
    layout = mesh((Shard(0, groups=(6, 3, 3)),), tp=3).layout((12, 2))
    assert rows(layout)[0::3] == ["[0:2, 0:2] on rank 0", "[6:7, 0:2] on rank 0", "[9:10, 0:2] on rank 0"]
    assert layout.local_shapes(0) == ((4, 2),)
    local = scatter(layout, global_values((12, 2)))
    assert local[1][0][:, 0].tolist() == [5, 7, 15, 21]


def test_gate_up_with_uneven_groups() -> None:
    layout = mesh((Shard(0, groups=(5, 2)),), tp=2).layout((7,))
    assert [a[0].tolist() for a in scatter(layout, global_values((7,))).values()] == [[1, 2, 3, 6], [4, 5, 7]]


def test_block_cyclic() -> None:
    layout = mesh((Shard(0, block=2),), tp=2).layout((9,))
    assert [a[0].tolist() for a in scatter(layout, global_values((9,))).values()] == [[1, 2, 5, 6, 9], [3, 4, 7, 8]]


def test_ragged_with_zeros() -> None:
    layout = mesh((Shard(-1, sizes=(3, 0, 5, 1)),), tp=4).layout((2, 9))
    assert [layout.local_shapes(r)[0] for r in range(4)] == [(2, 3), (2, 0), (2, 5), (2, 1)]


@pytest.mark.parametrize(
    ("order", "first_of"),
    [(None, [0, 2, 4, 6]), (("dp", "tp"), [0, 2, 4, 6]), (("tp", "dp"), [0, 4, 2, 6]), (("tp",), [0, 4, 2, 6])],
)
def test_two_axes_split_one_dim_in_both_orders(order: tuple[str, ...] | None, first_of: list[int]) -> None:
    layout = mesh((Shard(0), Shard(0)), order, dp=2, tp=2).layout((8,))
    assert [layout.pieces_of(r)[0].box.offsets[0] for r in range(4)] == first_of


def test_nested_splits_are_uneven_in_each_part() -> None:
    layout = mesh((Shard(0), Shard(0)), dp=2, tp=2).layout((5,))
    assert [layout.local_shapes(r)[0][0] for r in range(4)] == [2, 1, 1, 1]


def test_order_that_does_not_matter_is_forgotten() -> None:
    assert mesh((Shard(0), Shard(1)), ("tp", "dp"), dp=2, tp=2) == mesh((Shard(0), Shard(1)), dp=2, tp=2)


def test_order_of_dims_counted_from_both_ends_is_kept() -> None:
    spec = mesh((Shard(0), Shard(-1)), ("tp", "dp"), dp=2, tp=2)
    layout = spec.layout((8,))
    assert layout == mesh((Shard(0), Shard(0)), ("tp", "dp"), dp=2, tp=2).layout((8,))
    assert layout != mesh((Shard(0), Shard(-1)), dp=2, tp=2).layout((8,))
    assert layout_from_json(layout_to_json(layout)) == layout
    assert "order" in repr(spec)


# Edges.


def test_0_dim() -> None:
    layout = mesh((Replicate(),), tp=3).layout(())
    assert (layout.ndim, layout.numel, layout.local_shapes(1)) == (0, 1, ((),))
    assert layout.replica_groups == ((0, 1, 2),)
    assert layout == GridSpec((), [0, 1, 2]).layout(())
    assert ChunkSpec(0, 1).layout((1,)) != EnumerableSpec([Piece(Box((), ()), 0)]).layout(())


def test_zero_length_dims() -> None:
    layout = ChunkSpec(0, 3).layout((0, 4))
    assert [layout.local_shapes(r) for r in range(3)] == [((0, 4),)] * 3
    assert layout.elements_per_rank() == {0: 0, 1: 0, 2: 0}
    nothing = EnumerableSpec([]).layout((0, 4))
    assert (nothing.ranks, nothing.pieces, nothing.local_shapes(0)) == ((), (), ())
    assert nothing != layout


def test_more_ranks_than_rows() -> None:
    layout = ChunkSpec(0, 5).layout((3,))
    assert [layout.local_shapes(r)[0][0] for r in range(5)] == [1, 1, 1, 0, 0]
    assert rows(layout)[3:] == ["[3:3] on rank 3", "[3:3] on rank 4"]


def test_one_rank() -> None:
    layouts = [
        ChunkSpec(0, 1).layout((4, 2)),
        ChunkSpec(1, 1).layout((4, 2)),
        mesh((Replicate(),), a=1).layout((4, 2)),
        mesh((Shard(0, block=1),), a=1).layout((4, 2)),
        GridSpec((1, 1), [[0]]).layout((4, 2)),
        EnumerableSpec([Piece(Box((0, 0), (4, 2)), 0)]).layout((4, 2)),
    ]
    assert all(layout == layouts[0] and hash(layout) == hash(layouts[0]) for layout in layouts)


def test_a_rank_that_stands_twice_holds_two_local_tensors() -> None:
    layout = ChunkSpec(0, (1, 0, 1)).layout((5,))
    assert layout.local_shapes(1) == ((2,), (1,))
    assert layout.ranks == (0, 1)


# Equality by meaning.

HALVES = [Piece(Box((0, 0), (2, 6)), 0), Piece(Box((2, 0), (2, 6)), 1)]


def test_layouts_that_mean_the_same_are_equal() -> None:
    same = [
        ChunkSpec(0, 2).layout((4, 6)),
        ChunkSpec(-2, (0, 1), ("cpu", "cpu")).layout((4, 6)),
        mesh((Shard(0),), tp=2).layout((4, 6)),
        mesh((Shard(0, sizes=(2, 2)),), dp=2).layout((4, 6)),
        mesh((Shard(0, block=2),), dp=2).layout((4, 6)),
        mesh((Replicate(), Shard(-2)), one=1, dp=2).layout((4, 6)),
        GridSpec((2, 1), [[0], [1]]).layout((4, 6)),
        GridSpec(((2, 2), (6,)), [[[0]], [[1]]]).layout((4, 6)),
        EnumerableSpec(HALVES).layout((4, 6)),
        EnumerableSpec(HALVES[::-1]).layout((4, 6)),
        EnumerableSpec(HALVES, replicated=True).layout((4, 6)),
    ]
    for layout in same:
        assert layout == same[0]
        assert hash(layout) == hash(same[0])
    assert len(set(same)) == 1


def test_layouts_that_mean_something_else_differ() -> None:
    two, four = Mesh.of(a=2), Mesh.of(a=2, b=2)
    different = [
        ChunkSpec(0, 2).layout((4, 6)),
        ChunkSpec(0, 2).layout((4, 4)),
        ChunkSpec(1, 2).layout((4, 6)),
        ChunkSpec(0, (1, 0)).layout((4, 6)),
        ChunkSpec(0, (0, 2)).layout((4, 6)),
        ChunkSpec(0, (0, 1, 0, 1)).layout((4, 6)),
        ChunkSpec(0, 3).layout((4, 6)),
        MeshSpec(two, (Shard(0, block=1),)).layout((4, 6)),
        MeshSpec(two, (Shard(0, sizes=(1, 3)),)).layout((4, 6)),
        MeshSpec(two, (Replicate(),)).layout((4, 6)),
        MeshSpec(two, (Partial("sum"),)).layout((4, 6)),
        MeshSpec(two, (Partial("avg"),)).layout((4, 6)),
        MeshSpec(two, (Partial("max"),)).layout((4, 6)),
        MeshSpec(four, (Shard(0), Shard(0))).layout((4, 6)),
        MeshSpec(four, (Shard(0), Shard(0)), order=("b", "a")).layout((4, 6)),
        MeshSpec(four, (Partial(), Replicate())).layout((4, 6)),
        MeshSpec(four, (Replicate(), Partial())).layout((4, 6)),
        EnumerableSpec([Piece(Box((0, 0), (2, 3)), 0), Piece(Box((0, 3), (2, 3)), 0), HALVES[1]]).layout((4, 6)),
    ]
    for i, first in enumerate(different):
        for second in different[:i]:
            assert first != second
    assert len(set(different)) == len(different)
    assert different[0] != "a layout"


@many
@given(layout=sw.layouts(ranks=4))
def test_equal_to_its_own_pieces_when_each_is_a_local_tensor(layout: Layout) -> None:
    listed = EnumerableSpec(layout.pieces, replicated=len(set(layout.table.cells.tolist())) < len(layout.pieces))
    one_box_each = all(len(layout.pieces_of(r)) == len(layout.local_shapes(r)) for r in layout.ranks)
    try:
        again = listed.layout(layout.shape)
    except LayoutError:
        pytest.fail(f"the pieces of {layout} do not validate")
    assert (again == layout) == one_box_each


# Interning, pickle, JSON.


@many
@given(layout=some_layouts)
def test_one_spec_and_shape_give_one_object(layout: Layout) -> None:
    assert layout.spec.layout(layout.shape) is layout
    assert copy.copy(layout) is layout
    assert copy.deepcopy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout


@many
@given(layout=some_layouts)
def test_specs_are_values(layout: Layout) -> None:
    spec = pickle.loads(pickle.dumps(layout.spec))
    assert spec == layout.spec
    assert hash(spec) == hash(layout.spec)
    assert repr(spec) == repr(layout.spec)
    assert spec != 3
    assert copy.deepcopy(spec) == spec


@many
@given(layout=some_layouts)
def test_json_round_trip(layout: Layout) -> None:
    written = json.dumps(layout_to_json(layout))
    assert layout_from_json(json.loads(written)) == layout
    assert json.dumps(layout_to_json(layout_from_json(json.loads(written)))) == written


def test_arrays_stay_frozen_after_a_copy() -> None:
    for spec in (EnumerableSpec(HALVES), GridSpec((2,), [0, 1])):
        for again in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
            assert not again.ranks.flags.writeable


def test_devices_travel_and_do_not_count() -> None:
    pieces = [Piece(Box((0,), (2,)), 0, "cuda:0"), Piece(Box((2,), (2,)), 1, "cpu")]
    layout = EnumerableSpec(pieces).layout((4,))
    assert [p.device for p in layout.pieces] == ["cuda:0", "cpu"]
    assert [p.device for p in layout_from_json(layout_to_json(layout)).pieces] == ["cuda:0", "cpu"]
    assert layout == ChunkSpec(0, 2).layout((4,))
    chunk = ChunkSpec(0, 2, ("cpu", "cuda:1")).layout((4,))
    assert [p.device for p in layout_from_json(layout_to_json(chunk)).pieces] == ["cpu", "cuda:1"]


class Diagonal(ShardingSpec):
    """A user's spec: row i is on rank i % 2."""

    def pieces(self, shape: Sequence[int]) -> list[Piece]:
        return [Piece(Box((row,), (1,)), row % 2) for row in range(shape[0])]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Diagonal)

    def __hash__(self) -> int:
        return 7


def test_a_users_spec() -> None:
    layout = Diagonal().layout((5,))
    assert layout is Diagonal().layout((5,))
    assert not layout.is_regular
    assert layout.local_shapes(0) == ((1,), (1,), (1,))
    assert layout == ChunkSpec(0, (0, 1, 0, 1, 0)).layout((5,))
    assert layout_from_json(layout_to_json(layout)) == layout


@pytest.mark.parametrize("spec", [ChunkSpec(0, 2), GridSpec((2,), [0, 1]), mesh((Shard(0),), a=2)], ids=repr)
def test_product_specs_are_regular(spec: ShardingSpec) -> None:
    assert spec.layout((4,)).is_regular
    assert not EnumerableSpec(spec.pieces((4,))).layout((4,)).is_regular


# Boxes and meshes.


def test_boxes() -> None:
    box = Box.whole((3, 4))
    assert box.contains(Box((1, 1), (2, 3)))
    assert not box.contains(Box((1, 1), (3, 3)))
    assert box.contains(Box((9, 9), (0, 1)))
    assert box.shifted((1, 2)) == Box((1, 2), (3, 4))
    assert box.intersect(Box((3, 0), (1, 4))) is None
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    assert Box([np.int64(1)], [np.int64(2)]) == Box((1,), (2,))  # type: ignore[arg-type]  # lists are taken too
    assert np.zeros((5, 5))[Box((1, 2), (2, 3)).slices].shape == (2, 3)


def test_submeshes() -> None:
    cube = Mesh.of(a=2, b=3, c=4)
    sub = cube.submesh("c", "a", b=1)
    assert (sub.axes, sub.shape) == (("c", "a"), (4, 2))
    for i in range(4):
        for j in range(2):
            assert sub.ranks[i, j] == cube.ranks[j, 1, i]
    assert cube.submesh("b", "c", "a").ranks.tolist() == cube.ranks.transpose(1, 2, 0).tolist()


@given(mesh=sw.meshes(ranks=8))
def test_meshes(mesh: Mesh) -> None:
    for rank in mesh.ranks.reshape(-1).tolist():
        assert mesh.ranks[tuple(mesh.coordinates(rank).values())] == rank
    for axis in mesh.axes:
        groups = mesh.groups(axis)
        assert sorted(r for group in groups for r in group) == sorted(mesh.ranks.reshape(-1).tolist())
        assert {len(group) for group in groups} == {mesh.axis_size(axis)}
    assert pickle.loads(pickle.dumps(mesh)) == mesh == Mesh.from_json(json.loads(json.dumps(mesh.to_json())))


def test_a_tensor_on_one_rank_is_on_a_mesh_without_axes() -> None:
    layout = parse_layout("f32[4] @ 3").layout
    assert (layout.local_shapes(3), layout.local_shapes(0)) == (((4,),), ())
    assert Mesh((), 3).indices(3) == () and Mesh((), 3).indices(0) is None
