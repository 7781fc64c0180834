"""Every pair of small layouts of small shapes over 3 ranks, carried out exactly.

Renaming the ranks of both sides at once changes no pair in kind, so sources are taken once up to renaming and
destinations under every naming. For the smallest shapes all pairs are tried as they stand.
"""

from collections.abc import Hashable

import numpy as np
import pytest

from shardwise.geometry import Layout
from shardwise.testing import assemble, global_values, scatter, simulate, small_layouts
from shardwise.transfer import plan_transfer

RANKS = 3


def up_to_renaming(layouts: list[Layout]) -> list[Layout]:
    """One layout of each kind: two are of one kind if the same sets of local tensors are held, whoever holds which."""
    kinds: dict[Hashable, Layout] = {}
    for layout in layouts:
        table = layout.table
        rows = np.concatenate(
            [table.slots[:, None], table.offsets, table.sizes, table.local_offsets, table.addends[:, None]], axis=1
        )
        holdings = sorted(str(rows[layout.rows_of(rank)].tolist()) for rank in layout.ranks)
        kinds.setdefault((tuple(holdings), layout.pending), layout)
    return list(kinds.values())


def failures(shape: tuple[int, ...], sources: list[Layout], targets: list[Layout]) -> list[str]:
    """The pairs that end with wrong values or move more bytes than they must."""
    values = global_values(shape)
    wanted = {target: scatter(target, values) for target in targets if target.pending is None}
    found = []
    for source in sources:
        local = scatter(source, values)
        for target in targets:
            transfer = plan_transfer(source, target, itemsize=8)
            got = simulate(transfer, local)
            if target in wanted:
                right = all(
                    np.array_equal(a, b)
                    for rank, arrays in wanted[target].items()
                    for a, b in zip(got[rank], arrays, strict=True)
                )
            else:
                right = np.array_equal(assemble(target, got), values)
            if not right or transfer.moved_bytes != transfer.lower_bound_bytes:
                found.append(f"{source} -> {target}")
    return found


@pytest.mark.parametrize("shape", [(), (0,), (1,)], ids=str)
def test_every_pair(shape: tuple[int, ...]) -> None:
    layouts = small_layouts(shape, RANKS)
    assert failures(shape, layouts, layouts) == []


@pytest.mark.parametrize("shape", [(2,), (3,), (0, 2), (2, 3)], ids=str)
def test_every_pair_up_to_renaming(shape: tuple[int, ...]) -> None:
    layouts = small_layouts(shape, RANKS)
    sources = up_to_renaming(layouts)
    assert len(sources) < len(layouts) / 2
    assert failures(shape, sources, layouts) == []


def test_the_list_holds_every_kind() -> None:
    layouts = small_layouts((2, 3), RANKS)
    assert len(set(layouts)) == len(layouts) > 300
    specs = {type(layout.spec).__name__ for layout in layouts}
    assert specs == {"ChunkSpec", "MeshSpec", "GridSpec", "EnumerableSpec"}
    assert any(layout.pending for layout in layouts)
    assert any(len(layout.local_shapes(0)) == 0 for layout in layouts)
    assert any(len(layout.local_shapes(0)) > 1 for layout in layouts)
    assert any(len(group) == RANKS for layout in layouts for group in layout.replica_groups)
