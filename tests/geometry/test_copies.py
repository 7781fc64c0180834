"""Groups whose parts are on several ranks: what each rank has, against lists of rows; words, JSON, errors, plans."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from shardwise.geometry import (
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Replicate,
    Shard,
    format_layout,
    layout_from_json,
    layout_to_json,
    parse_layout,
    parse_placements,
)
from shardwise.geometry.notation import read_placements
from shardwise.testing import assemble, global_values, scatter, simulate
from shardwise.transfer import Topology, plan_transfer

FUSED = "S(0) groups(32,8 each 2,8 each 2) unit(4)"


def deal(groups: tuple[int, ...], each: tuple[int, ...], unit: int, ranks: int) -> list[list[int]]:
    """The rows of each rank: every group is cut for a part of the ranks, and each part goes to so many of them."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for length, copies in zip(groups, each, strict=True):
        units = [list(range(start + a, min(start + a + unit, start + length))) for a in range(0, length, unit)]
        step = max(1, -(-len(units) // (ranks // copies)))
        for rank in range(ranks):
            part = rank // copies
            found[rank] += [row for run in units[part * step : (part + 1) * step] for row in run]
        start += length
    return found


def rows_of(layout: Layout, rank: int) -> list[int]:
    table = layout.table.take(layout.rows_of(rank))
    columns = zip(table.local_offsets[:, 0], table.offsets[:, 0], table.sizes[:, 0], strict=True)
    return [row for _, start, size in sorted(columns) for row in range(start, start + size)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_small_case(ranks: int) -> None:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for unit, groups in product((1, 2), [(n,) for n in range(9)] + list(product((0, 2, 4), (2, 4, 6)))):
        for each in product(divisors, repeat=len(groups)):
            cut = Shard(0, groups=groups, each=each, unit=unit)
            layout = MeshSpec(Mesh.of(tp=ranks), [cut]).layout((sum(groups),))
            wanted = deal(groups, each, unit, ranks)
            assert [rows_of(layout, rank) for rank in range(ranks)] == wanted
            assert [layout.local_shapes(rank) for rank in range(ranks)] == [((len(rows),),) for rows in wanted]
            assert layout_from_json(layout_to_json(layout)).spec == layout.spec
            assert parse_layout(format_layout(layout)).layout.spec == layout.spec
            addends = MeshSpec(Mesh.of(tp=ranks), [cut.dual]).layout((sum(groups),))
            assert [rows_of(addends, rank) for rank in range(ranks)] == wanted
            values = global_values((sum(groups),))
            assert np.array_equal(assemble(addends, scatter(addends, values)), values)


def test_two_axes_cut_one_dim_and_others_another() -> None:
    """Parts that overlap only in some rows, where another axis cuts what copies have beside them, are cut there."""
    for text in (
        "on tp=4,fsdp=2: S(0) groups(6,4 each 2), S(0)",
        "on fsdp=2,tp=4: S(0), S(0) groups(6,4 each 2)",
        "on fsdp=2,tp=4: S(1), S(0) groups(6,4 each 4)",
        "on a=2,b=2: S(0) each 2, S(1) each 2",
        "on a=2,b=2: R, S(0) groups(4,6 each 2)",
        "on a=2,b=2: P(sum), S(0) groups(4,6 each 2)",
        "on a=2,b=2: P(avg), S(0) groups(4,6 each 2)",
        "on a=2,b=2: P(max), S(0) groups(4,6 each 2)",
    ):
        layout = parse_layout(f"f32[10,4] {text}").layout
        values = 4 * global_values((10, 4))
        assert np.array_equal(assemble(layout, scatter(layout, values)), values)
        for other in ("R, R", "S(0), S(1)"):
            plain = MeshSpec(layout.spec.mesh, parse_placements(other)).layout((10, 4))  # type: ignore[attr-defined]
            for source, target in ((plain, layout), (layout, plain)):
                transfer = plan_transfer(source, target, itemsize=4)
                assert np.array_equal(assemble(target, simulate(transfer, scatter(source, values))), values)
                assert transfer.moved_bytes == transfer.lower_bound_bytes


TEXTS = [
    "R", "P(sum)", "P(avg)", "S(0)", "S(1)", "S(0) groups(16,4,4)", "S(0) groups(16,4 each 2,4 each 2) unit(2)",
    "S(0) groups(16,4 each 4,4 each 2)", "S(0) each 2", "S(0) each 4 unit(3)", "S(1) each 2",
]  # fmt: skip
TEXTS += [f"{text} addends" for text in TEXTS if "each" in text]


@pytest.mark.parametrize("host", [None, 2])
def test_every_move_reaches_the_lower_bound(host: int | None) -> None:
    layouts = [parse_layout(f"f32[24,6] on tp=4: {text}").layout for text in TEXTS]
    values, topology = global_values((24, 6)), None if host is None else Topology(ranks_per_host=host)
    for source, target in product(layouts, repeat=2):
        transfer = plan_transfer(source, target, itemsize=4, topology=topology)
        moved = simulate(transfer, scatter(source, values))
        assert np.array_equal(assemble(target, moved), values), f"{source} -> {target}"
        if host is None:
            assert transfer.moved_bytes == transfer.lower_bound_bytes, f"{source} -> {target}"


@pytest.mark.parametrize("limit", [64, 400])
def test_moves_within_a_buffer_limit(limit: int) -> None:
    layouts = [
        parse_layout(f"f32[24,6] on tp=4: {text}").layout for text in (TEXTS[1], TEXTS[3], *TEXTS[6:8], TEXTS[-5])
    ]
    values = global_values((24, 6))
    for source, target in product(layouts, repeat=2):
        transfer = plan_transfer(source, target, itemsize=4, max_buffer_bytes=limit)
        assert np.array_equal(assemble(target, simulate(transfer, scatter(source, values))), values)


def test_a_copy_that_is_cut_again_stays_where_it_is() -> None:
    whole, shared = (parse_layout(f"f32[48,2] on tp=4: {text}").layout for text in (FUSED, "S(0) groups(32,8,8)"))
    there, back = plan_transfer(whole, shared, itemsize=4), plan_transfer(shared, _dual(whole), itemsize=4)
    assert there.moved_bytes == back.moved_bytes == 0


def _dual(layout: Layout) -> Layout:
    spec = layout.spec
    assert isinstance(spec, MeshSpec)
    return MeshSpec(spec.mesh, [p.dual for p in spec.placements]).layout(layout.shape)


def test_sums_beside_copies_keep_the_addends_of_copies() -> None:
    """As gradients of a batch that another axis splits: each rank's copy has its own sum."""
    texts = (f"{kind}, S(0) groups(4,6 each 2) addends" for kind in ("P(sum)", "R"))
    source, target = (parse_layout(f"f32[10,4] on dp=2,tp=2: {text}").layout for text in texts)
    transfer, values = plan_transfer(source, target, itemsize=1), global_values((10, 4))
    assert np.array_equal(assemble(target, simulate(transfer, scatter(source, values))), values)
    assert transfer.moved_bytes == transfer.lower_bound_bytes == 4 * (2 * 4 + 4 * 6)


def test_one_group_is_where_a_mesh_with_an_axis_of_replicas_has_it() -> None:
    for text, other in (("each 2", "R"), ("each 2 addends", "P(sum)")):
        copies = parse_layout(f"f32[8,3] on tp=4: S(0) {text}").layout
        axes = parse_layout(f"f32[8,3] on kv=2,rep=2: S(0), {other}").layout
        assert [copies.pieces_of(rank) for rank in range(4)] == [axes.pieces_of(rank) for rank in range(4)]
        assert copies.replica_groups == axes.replica_groups and copies.pending == axes.pending
        assert copies == axes and hash(copies) == hash(axes)
        assert copies.is_used_as(axes) == (other == "P(sum)")  # the gradient of a copy is an addend, of a replica all


def test_who_has_copies() -> None:
    layout = parse_layout(f"f32[48] on tp=4: {FUSED}").layout
    assert layout.replica_groups == ((0,), (0, 1), (1,), (2,), (2, 3), (3,))
    assert layout.elements_per_rank() == dict.fromkeys(range(4), 16)
    assert str(layout.pieces_of(1)[1].box) == "[32:36]" and str(layout.pieces_of(2)[2].box) == "[44:48]"


def test_words() -> None:
    mesh, lengths = Mesh.of(tp=4), {"q": 32, "kv": 8, "hd": 4}
    fused = Shard(0, groups=(32, 8, 8), each=(1, 2, 2), unit=4)
    assert read_placements("tp: S(0) groups(q, kv each 2, kv each 2) unit(hd)", mesh, lengths=lengths) == (fused,)
    assert parse_placements(FUSED) == (fused,) and fused.format() == FUSED and eval(repr(fused)) == fused
    assert parse_placements("S(-1) each 2 unit(4)") == (Shard(-1, each=(2,), unit=4),)
    assert Shard(0, each=(1,)) == Shard(0) and Shard(0, each=(1,)).is_plain and not Shard(0, each=(2,)).is_in_runs
    assert fused.dual == Shard(0, groups=(32, 8, 8), each=(1, 2, 2), unit=4, addends=True) and fused.dual.dual == fused
    assert parse_placements(f"{FUSED} addends") == (fused.dual,) and fused.along(1).dim == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: parse_layout("f32[40] on tp=4: S(0) groups(32,8 each 3)"),
            "S(0) groups(32,8 each 3) puts each part of group 1 on 3 ranks, and axis 'tp' has 4; write each with a "
            "divisor of 4",
        ),
        (
            lambda: Shard(0, groups=(4, 2), each=(2,)),
            "Shard(0, each=(2,)): pass 2 numbers of ranks, one for each group",
        ),
        (lambda: Shard(0, each=(0,)), "Shard(0, each=(0,)): pass 1 number of ranks"),
        (
            lambda: Shard(0, sizes=(4, 2), each=(2,)),
            "Shard(0, sizes=..., each=(2,)): each goes with groups and unit only",
        ),
        (lambda: Shard(0, zigzag=True, each=(2,)), "Shard(0, zigzag=..., each=(2,)): each goes with groups and unit"),
        (
            lambda: Shard(0, addends=True),
            "Shard(0, addends=True): only copies are addends; pass each=(2,), or Partial()",
        ),
        (lambda: parse_placements("S(0) each"), "expected the number of ranks that have each part, an integer"),
        (
            lambda: MeshSpec(Mesh.of(a=2, b=2), [Shard(0, each=(2,)), Shard(1, each=(2,), addends=True)]),
            "the copies of all axes are addends, or those of none",
        ),
        (
            lambda: MeshSpec(Mesh.of(a=2, b=2), [Partial("max"), Shard(1, each=(2,), addends=True)]),
            "axes with pending max and sum have no defined order of reduction",
        ),
    ],
)
def test_errors_say_the_numbers(make: object, said: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(said)):
        make()  # type: ignore[operator]


def test_copies_beside_replicas() -> None:
    spec = MeshSpec(Mesh.of(dp=2, tp=2), [Replicate(), Shard(0, groups=(4, 2), each=(1, 2))])
    layout = spec.layout((6,))
    assert layout.replica_groups == ((0, 1, 2, 3), (0, 2), (1, 3)) and layout.cells is None
