"""Rows with owners: cuts, words, and transfers to and from every other layout of a few rows."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import pytest

from shardwise.geometry import (
    LayoutError,
    Mesh,
    MeshSpec,
    Placement,
    Replicate,
    RowOwners,
    Shard,
    format_layout,
    layout_from_json,
    layout_to_json,
    parse_layout,
    parse_placements,
)
from shardwise.geometry.placements import split_part
from shardwise.transfer import plan_transfer

EVERY_OWNER = [RowOwners(ranks) for ranks in product((0, 1), repeat=4)]


def test_runs_are_joined_and_empty_ones_dropped() -> None:
    owners = RowOwners.from_runs([1, 1, 0, 2, 0], [1, 2, 0, 1, 3])
    assert owners == RowOwners([1, 1, 1, 2, 0, 0, 0]) and hash(owners) == hash(RowOwners([1, 1, 1, 2, 0, 0, 0]))
    assert owners.holders.tolist() == [1, 2, 0] and owners.lengths.tolist() == [3, 1, 3]
    assert len(owners) == 7 and owners.count == 3 and owners != RowOwners([1]) and owners != (1,)
    assert len(RowOwners([])) == 0 and RowOwners([]).count == 0
    assert repr(RowOwners(range(10))) == "RowOwners((0, 1, 2, 3, 4, 5, 6, 7, ...))"


@pytest.mark.parametrize("owners", EVERY_OWNER, ids=str)
def test_one_axis_and_two_axes_cut_alike(owners: RowOwners) -> None:
    """The cells of one axis are worked out by arrays, those of nested axes part by part."""
    alone = MeshSpec(Mesh.of(a=2), [Shard(0, owners=owners)]).layout((4, 3))
    rows = [[r for r in range(4) if owners.ranks[r] == rank] for rank in (0, 1)]
    assert [alone.local_shapes(rank) for rank in (0, 1)] == [((len(r), 3),) for r in rows]
    parts = split_part(((0, 4),), Shard(0, owners=owners), 2, "a")
    assert [[r for start, stop in part for r in range(start, stop)] for part in parts] == rows
    nested = MeshSpec(Mesh.of(a=2, b=1), [Shard(0, owners=owners), Shard(0)]).layout((4, 3))
    assert nested == alone


def test_two_axes_with_owners_do_not_depend_on_their_order() -> None:
    one, other = RowOwners([1, 0, 0, 1, 1, 0]), RowOwners([0, 0, 1, 1, 0, 1])
    placements = [Shard(0, owners=one), Shard(0, owners=other)]
    mesh = Mesh.of(a=2, b=2)
    assert MeshSpec(mesh, placements).layout((6,)) == MeshSpec(mesh, placements, order=("b", "a")).layout((6,))


@pytest.mark.parametrize("owners", EVERY_OWNER, ids=str)
def test_words_numbers_and_copies_mean_the_same(owners: RowOwners) -> None:
    layout = MeshSpec(Mesh.of(a=2), [Shard(0, owners=owners)]).layout((4, 3))
    assert parse_layout(format_layout(layout)).layout == layout
    assert layout_from_json(layout_to_json(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert layout.depends_on_data


def test_words() -> None:
    assert parse_placements("S(0) owners(1,0,0)") == (Shard(0, owners=RowOwners([1, 0, 0])),)
    assert Shard(0, owners=RowOwners([1, 0])).along(2) == Shard(2, owners=RowOwners([1, 0]))
    assert not MeshSpec(Mesh.of(a=2), [Shard(0, sizes=(3, 1))]).layout((4,)).depends_on_data


def test_every_transfer_of_a_few_rows_sends_what_is_missing() -> None:
    cuts: list[Placement] = [Shard(0, owners=owners) for owners in EVERY_OWNER]
    others: list[Placement] = [Replicate(), Shard(0), Shard(0, sizes=(0, 4)), Shard(1)]
    mesh = Mesh.of(a=2)
    for one, other in product(cuts, cuts + others):
        for before, after in ((one, other), (other, one)):
            src, dst = (MeshSpec(mesh, [p]).layout((4, 2)) for p in (before, after))
            plan = plan_transfer(src, dst, itemsize=4)
            assert plan.moved_bytes == plan.lower_bound_bytes


@pytest.mark.parametrize(
    ("owners", "text"),
    [
        (RowOwners([0, 1]), "dim 0 of length 4 has owners for 2 rows; pass one for each"),
        (RowOwners([0, 1, 2, 0]), "dim 0 has owners 0 to 2 for 4 rows over axis 'a' of 2 ranks; pass an owner below 2"),
    ],
)
def test_owners_that_do_not_fit(owners: RowOwners, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        MeshSpec(Mesh.of(a=2), [Shard(0, owners=owners)]).layout((4, 2))


def test_owners_are_not_negative() -> None:
    with pytest.raises(LayoutError, match="owners of rows are numbers of ranks"):
        RowOwners(np.array([0, -1]))
    with pytest.raises(LayoutError, match="takes one of sizes, groups, block, owners, got block and owners"):
        Shard(0, block=1, owners=RowOwners([0]))
