"""Cuts that never fall inside a unit: against counting units row by row, in every small case; words and errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, groupby, product

import pytest

from shardwise.geometry import (
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Replicate,
    RowOwners,
    Shard,
    format_layout,
    layout_from_json,
    layout_to_json,
    parse_layout,
    parse_placements,
)
from shardwise.geometry.notation import read_placements
from shardwise.geometry.placements import split_part

LENGTHS, RANKS, UNITS = range(13), range(1, 5), range(1, 6)


def deal_units(rows: Sequence[int], unit: int, ranks: int) -> list[list[int]]:
    """The rows of each rank if as many units as `torch.chunk` says follow each other on a rank, counted one by one."""
    units = [list(run) for _, run in groupby(rows, key=lambda row: row // unit)]
    step = max(1, -(-len(units) // ranks))
    return [[row for run in units[i * step : (i + 1) * step] for row in run] for i in range(ranks)]


def rows_of(layout: Layout, rank: int, dim: int = 0) -> list[int]:
    """The rows of a rank, in the order of its local tensor."""
    table = layout.table.take(layout.rows_of(rank))
    columns = zip(table.local_offsets[:, dim], table.offsets[:, dim], table.sizes[:, dim], strict=True)
    return [row for _, start, size in sorted(columns) for row in range(start, start + size)]


@pytest.mark.parametrize("unit", UNITS)
def test_one_axis(unit: int) -> None:
    for length, ranks in product(LENGTHS, RANKS):
        cut, mesh = Shard(0, unit=unit), Mesh.of(tp=ranks)
        layout = MeshSpec(mesh, [cut]).layout((length,))
        wanted = deal_units(range(length), unit, ranks)
        assert [rows_of(layout, rank) for rank in range(ranks)] == wanted
        assert cut.lengths(length, ranks) == tuple(map(len, wanted))
        assert [layout.local_shapes(rank) for rank in range(ranks)] == [((len(rows),),) for rows in wanted]
        parts = split_part(((0, length),), cut, ranks, "tp")  # the general way, which arithmetic takes the place of
        assert [[row for start, stop in part for row in range(start, stop)] for part in parts] == wanted
        assert MeshSpec(mesh, [Shard(-1, unit=unit)]).layout((length,)) == layout


@pytest.mark.parametrize("outer", [2, 3])
@pytest.mark.parametrize("inner", [2, 3])
def test_two_axes_count_units_of_the_whole_dim(outer: int, inner: int) -> None:
    for length, one, other in product(range(11), (1, 2, 3), (2, 3, 4)):
        spec = MeshSpec(Mesh.of(a=outer, b=inner), [Shard(0, unit=one), Shard(0, unit=other)])
        layout = spec.layout((length,))
        wanted = [
            own for rows in deal_units(range(length), one, outer) for own in deal_units(rows, other, inner)
        ]  # fmt: skip
        assert [rows_of(layout, rank) for rank in range(outer * inner)] == wanted
        assert [layout.local_shapes(r) for r in range(outer * inner)] == [((len(rows),),) for rows in wanted]


@pytest.mark.parametrize(
    "first", [Shard(0, block=1), Shard(0, block=3), Shard(0, groups=(5, 7)), Shard(0, sizes=(7, 5))]
)
def test_what_another_rule_leaves_is_cut_at_units_of_the_whole_dim(first: Shard) -> None:
    """Also parts of several runs, of which two may be of one unit: it stays together."""
    for unit, ranks in product(UNITS, RANKS):
        spec = MeshSpec(Mesh.of(a=2, b=ranks), [first, Shard(0, unit=unit)])
        for outer in (0, 1):
            rows = rows_of(MeshSpec(Mesh.of(a=2), [first]).layout((12,)), outer)
            found = [rows_of(spec.layout((12,)), outer * ranks + i) for i in range(ranks)]
            assert found == deal_units(rows, unit, ranks)


def test_groups_are_dealt_by_units_each_on_its_own() -> None:
    for unit, groups, ranks in product((2, 3), product(range(3), repeat=3), RANKS):
        lengths = tuple(unit * n for n in groups)
        layout = MeshSpec(Mesh.of(tp=ranks), [Shard(0, groups=lengths, unit=unit)]).layout((sum(lengths),))
        starts = [sum(lengths[:i]) for i in range(3)]
        dealt = [deal_units(range(s, s + n), unit, ranks) for s, n in zip(starts, lengths, strict=True)]
        assert [rows_of(layout, r) for r in range(ranks)] == [[*chain(*(d[r] for d in dealt))] for r in range(ranks)]


def test_a_unit_of_one_row_says_nothing() -> None:
    assert Shard(0, unit=1) == Shard(0) and Shard(0, unit=1).is_plain and Shard(0, unit=2).is_even
    assert (
        not Shard(0, unit=2).is_plain and Shard(0, unit=2).is_in_runs and Shard(1, unit=3).along(0) == Shard(0, unit=3)
    )
    assert hash(Shard(0, unit=2)) != hash(Shard(0)) and Shard(0, sizes=(4, 2), unit=2).lengths(6, 2) == (4, 2)


TEXTS = [
    "f32[896,8] on tp=4: S(0) unit(64)",
    "f32[896,8] on tp=2: S(0) sizes(512,384) unit(64)",
    "f32[48] on tp=4: S(0) groups(32,8,8) unit(4)",
    "f32[48] on tp=4: S(-1) block(8) unit(4)",
    "f32[6] on tp=2: S(0) owners(0,0,1,1,0,0) unit(2)",
    "f32[96,4] on fsdp=2,tp=2: S(0), S(0) unit(16) split tp>fsdp",
]


@pytest.mark.parametrize("text", TEXTS)
def test_words_and_json_read_back_the_same(text: str) -> None:
    layout = parse_layout(text).layout
    assert format_layout(layout) == text and layout_from_json(layout_to_json(layout)).spec == layout.spec
    assert eval(repr(layout.spec.placements[-1])) == layout.spec.placements[-1]  # type: ignore[attr-defined]


def test_equal_cuts_are_equal_layouts() -> None:
    mesh = Mesh.of(tp=4)
    assert MeshSpec(mesh, [Shard(0, unit=2)]).layout((16,)) == MeshSpec(mesh, [Shard(0)]).layout((16,))
    uneven = MeshSpec(mesh, [Shard(0, unit=4)]).layout((14,))
    assert uneven == MeshSpec(mesh, [Shard(0, sizes=(4, 4, 4, 2))]).layout((14,))
    assert uneven == MeshSpec(mesh, [Shard(0)]).layout((14,)) != MeshSpec(mesh, [Shard(0, unit=5)]).layout((14,))


def test_lengths_of_plans_have_names() -> None:
    mesh, lengths = Mesh.of(tp=4), {"hd": 64, "q": 896}
    assert read_placements("S(0) unit(hd)", mesh, lengths=lengths) == (Shard(0, unit=64),)
    assert read_placements("tp: S(0) groups(q,q) unit(hd)", mesh, lengths=lengths) == (
        Shard(0, groups=(896, 896), unit=64),
    )
    with pytest.raises(LayoutError, match=re.escape("names the length 'head'; the plan's lengths are: hd, q")):
        read_placements("S(0) unit(head)", mesh, lengths=lengths)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Shard(0, sizes=(450, 446), unit=64),
            "S(0) sizes(450,446) unit(64) cuts inside a unit: 450 rows are 7 units of 64 and 2 rows; give sizes in "
            "multiples of 64, or write S(0) unit(64)",
        ),
        (
            lambda: Shard(0, groups=(30, 8), unit=4),
            "30 rows are 7 units of 4 and 2 rows; give groups in multiples of 4",
        ),
        (lambda: Shard(0, block=6, unit=4), "6 rows are 1 unit of 4 and 2 rows; give block in multiples of 4"),
        (lambda: Shard(0, owners=RowOwners([0, 0, 0, 1]), unit=2), "3 rows are 1 unit of 2 and 1 row; give owners"),
        (lambda: Shard(0, unit=0), "Shard(0, unit=0): a unit has at least one row"),
        (lambda: Shard(0, unit=2.5), "Shard(0, unit=...) must contain integers, got (2.5,)"),
        (
            lambda: parse_layout("f32[10] on a=2,b=2: S(0), S(0) sizes(4,1) unit(4)"),
            "S(0) sizes(4,1) unit(4) cuts dim 0 over axis 'b' at row 9, inside a unit: 9 rows are 2 units of 4 and 1 "
            "row; cut at a multiple of 4, or write S(0) unit(4)",
        ),
        (lambda: parse_placements("S(0) unit 4"), "expected '(' after unit, as in unit(16); found '4'"),
        (lambda: parse_placements("S(0) unit(4"), "expected ')' after the length of a unit; the text ends here"),
        (lambda: parse_placements("S(0) unit(4) groups(8)"), "expected nothing more after the last placement"),
    ],
)
def test_errors_say_the_numbers(make: object, said: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(said)):
        make()  # type: ignore[operator]


def test_the_last_unit_may_be_short() -> None:
    assert Shard(0, sizes=(4, 0, 3), unit=4).lengths(7, 3) == (4, 0, 3)
    assert parse_layout("f32[11] on tp=2: S(0) groups(8,3) unit(4)").layout.local_shapes(0) == ((7,),)
    assert Replicate() in parse_placements("R, S(0) unit(4)")
