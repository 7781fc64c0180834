"""Two parts of a dim for each rank, one from each end: against counting in small cases; words, views, transfers."""

from __future__ import annotations

import re
from itertools import chain, product

import numpy as np
import pytest

from shardwise.geometry import (
    LayoutError,
    Mesh,
    MeshSpec,
    Replicate,
    Shard,
    format_layout,
    layout_from_json,
    layout_to_json,
    parse_layout,
)
from shardwise.geometry.placements import Placement
from shardwise.testing import assemble, global_values, scatter, simulate
from shardwise.transfer import plan_transfer
from tests.geometry.test_units import deal_units, rows_of

ZIGZAG = Shard(0, zigzag=True)


def deal(rows: list[int], ranks: int, unit: int = 1) -> list[list[int]]:
    """The rows of each rank: parts i and 2 n - 1 - i of those that `torch.chunk` makes of them."""
    parts = deal_units(rows, unit, 2 * ranks)
    return [parts[i] + parts[2 * ranks - 1 - i] for i in range(ranks)]


def test_each_rank_has_a_part_from_each_end() -> None:
    for length, ranks, unit in product(range(14), range(1, 5), range(1, 4)):
        cut = Shard(0, unit=unit, zigzag=True)
        layout = MeshSpec(Mesh.of(cp=ranks), [cut]).layout((length,))
        wanted = deal(list(range(length)), ranks, unit)
        assert [rows_of(layout, rank) for rank in range(ranks)] == wanted
        assert [layout.local_shapes(rank) for rank in range(ranks)] == [((len(rows),),) for rows in wanted]


def test_groups_are_dealt_each_on_its_own() -> None:
    for groups, ranks in product(product(range(5), repeat=2), range(1, 4)):
        layout = MeshSpec(Mesh.of(cp=ranks), [Shard(0, groups=groups, zigzag=True)]).layout((sum(groups),))
        dealt = [deal(list(range(s, s + n)), ranks) for s, n in zip((0, groups[0]), groups, strict=True)]
        assert [rows_of(layout, r) for r in range(ranks)] == [[*chain(*(d[r] for d in dealt))] for r in range(ranks)]


@pytest.mark.parametrize("other", [Shard(0), Shard(0, block=1), ZIGZAG], ids=str)
def test_two_axes_deal_what_the_first_has_dealt(other: Shard) -> None:
    for length in range(13):
        layout = MeshSpec(Mesh.of(a=2, b=2), [other, ZIGZAG]).layout((length,))
        outer = MeshSpec(Mesh.of(a=2), [other]).layout((length,))
        wanted = [rows for half in (0, 1) for rows in deal(rows_of(outer, half), 2)]
        assert [rows_of(layout, rank) for rank in range(4)] == wanted


def test_every_transfer_moves_the_lower_bound() -> None:
    others: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(0, block=1), ZIGZAG, Shard(1, zigzag=True)]
    for shape, ranks in product([(0, 3), (1, 3), (5, 3), (8, 2)], (2, 3)):
        meshes = [Mesh.of(cp=ranks), Mesh(("cp",), list(range(ranks))[::-1])]
        layouts = [MeshSpec(mesh, [p]).layout(shape) for mesh, p in product(meshes, others)]
        values = global_values(shape)
        for source, target in product(layouts, layouts):
            transfer = plan_transfer(source, target, itemsize=8)
            assert transfer.moved_bytes == transfer.lower_bound_bytes
            assert np.array_equal(assemble(target, simulate(transfer, scatter(source, values))), values)


TEXTS = [
    "f32[2,8] on cp=2: S(1) zigzag",
    "f32[896] on cp=2: S(0) zigzag unit(64)",
    "f32[16] on dp=2,cp=2: R, S(-1) groups(8,8) zigzag",
]


@pytest.mark.parametrize("text", TEXTS)
def test_words_and_json_read_back_the_same(text: str) -> None:
    layout = parse_layout(text).layout
    assert format_layout(layout) == text and layout_from_json(layout_to_json(layout)).spec == layout.spec
    last = layout.spec.placements[-1]  # type: ignore[attr-defined]  # of a mesh
    assert eval(repr(last)) == last


def test_it_is_a_cut_of_its_own() -> None:
    assert not ZIGZAG.is_plain and not ZIGZAG.is_even and not ZIGZAG.is_in_runs and Shard(0) != ZIGZAG
    assert ZIGZAG.along(2) == Shard(2, zigzag=True) and ZIGZAG.dual is ZIGZAG


@pytest.mark.parametrize("rule", [{"sizes": (4, 4)}, {"block": 2}])
def test_other_rules_do_not_go_with_it(rule: dict[str, object]) -> None:
    said = f"Shard(0, {next(iter(rule))}=..., zigzag=True): zigzag goes with groups only, or alone"
    with pytest.raises(LayoutError, match=re.escape(said)):
        Shard(0, zigzag=True, **rule)  # type: ignore[arg-type]  # that it is refused is the point
