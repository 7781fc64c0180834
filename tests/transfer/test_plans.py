"""Transfers of known shape: collectives, balance, hosts, rounds, figures, words and errors."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from shardwise.geometry import (
    ChunkSpec,
    EnumerableSpec,
    GridSpec,
    Layout,
    LayoutError,
    Mesh,
    MeshSpec,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from shardwise.testing import assemble, global_values, scatter, simulate
from shardwise.transfer import Collective, Link, Topology, plan_transfer, transfer_from_json

SHAPE = (8, 8)
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
FOUR = ((0, 1, 2, 3),)


def on(mesh: Mesh, *placements: Placement) -> Layout:
    return MeshSpec(mesh, placements).layout(SHAPE)


def tp(placement: Placement) -> Layout:
    return on(Mesh.of(tp=4), placement)


def square(first: Placement, second: Placement) -> Layout:
    return on(Mesh.of(dp=2, tp=2), first, second)


def chunk(*ranks: int, dim: int = 0) -> Layout:
    return ChunkSpec(dim, ranks).layout(SHAPE)


ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
COLLECTIVES: dict[str, tuple[Layout, Layout, Collective | None]] = {
    "all_gather": (tp(S0), tp(R), Collective("all_gather", FOUR)),
    "all_gather, last dim": (tp(S1), tp(R), Collective("all_gather", FOUR)),
    "all_gather, uneven": (tp(Shard(0, sizes=(1, 0, 5, 2))), tp(R), Collective("all_gather", FOUR)),
    "all_gather, rows": (square(S0, S0), square(S0, R), Collective("all_gather", ROWS)),
    "all_gather, columns": (square(S0, S1), square(R, S1), Collective("all_gather", COLUMNS)),
    "reduce_scatter": (tp(P), tp(S0), Collective("reduce_scatter", FOUR)),
    "reduce_scatter, rows": (square(S0, P), square(S0, S1), Collective("reduce_scatter", ROWS)),
    "all_reduce": (tp(P), tp(R), Collective("all_reduce", FOUR)),
    "all_reduce, max": (tp(Partial("max")), tp(R), Collective("all_reduce", FOUR)),
    "all_reduce, columns": (square(P, S1), square(R, S1), Collective("all_reduce", COLUMNS)),
    "all_reduce, both axes": (square(P, P), square(R, R), Collective("all_reduce", FOUR)),
    "all_to_all": (tp(S0), tp(S1), Collective("all_to_all", FOUR)),
    "all_to_all, rows": (square(S0, S0), square(S0, S1), Collective("all_to_all", ROWS)),
    "broadcast": (chunk(0), tp(R), Collective("broadcast", FOUR)),
    "broadcast elsewhere": (
        chunk(3),
        on(Mesh(("a",), [0, 1]), R),
        Collective("broadcast", ((0, 1, 3),)),
    ),
    "scatter": (chunk(2), tp(S0), Collective("scatter", FOUR)),
    "gather": (tp(S1), chunk(1), Collective("gather", FOUR)),
    "permute": (chunk(0, 1, 2), chunk(1, 2, 0), Collective("permute", ((0, 1, 2),))),
    "permute, pairs": (chunk(0, 1, 2, 3), chunk(1, 0, 3, 2), Collective("permute", ROWS)),
    "permute to others": (chunk(0, 1), chunk(2, 3), Collective("permute", COLUMNS)),
    "nothing moves": (tp(R), tp(S0), None),
    "the same": (tp(S0), tp(S0), None),
    "patterns that differ": (chunk(0, 1, 2, 3), chunk(1, 0, 4, 4), None),
    "pending in the target": (tp(S0), tp(P), None),
    "pending on both sides": (tp(P), square(P, P), None),
    "reduced elsewhere": (tp(P), on(Mesh(("a",), [4, 5]), R), None),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str) -> None:
    src, dst, expected = COLLECTIVES[name]
    transfer = plan_transfer(src, dst, itemsize=4)
    assert transfer.collective == expected
    assert transfer.to_json()["collective"] == (None if expected is None else expected.to_json())
    values = global_values(SHAPE)
    assert np.array_equal(assemble(dst, simulate(transfer, scatter(src, values))), values)


def test_a_ranks_part_names_no_collective() -> None:
    assert plan_transfer(tp(S0), tp(R), itemsize=4, rank=0).collective is None


def test_collectives_in_words() -> None:
    assert str(Collective("all_gather", FOUR)) == "all_gather of 4 ranks"
    assert str(Collective("permute", ROWS)) == "2 x permute of 2 ranks"


# Balance: replicas share the sending.


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("receivers", [1, 3, 4, 6])
def test_replicas_share_uniform_demand(replicas: int, shards: int, receivers: int) -> None:
    shape = (24, 5)
    src = MeshSpec(Mesh.of(r=replicas, s=shards), (R, S0)).layout(shape)
    dst = ChunkSpec(0, range(20, 20 + receivers)).layout(shape)
    transfer = plan_transfer(src, dst, itemsize=4)
    box = int(transfer.steps[0].routes.elements().max()) * 4
    busiest = transfer.busiest_sender
    assert busiest is not None
    assert transfer.moved_bytes == 24 * 5 * 4
    assert busiest[1] <= transfer.moved_bytes / shards / replicas + box


def test_replicas_share_replicated_demand() -> None:
    """Two holders of all, eight ranks that need all: each sends half."""
    src = MeshSpec(Mesh.of(r=2), (R,)).layout((16,))
    dst = MeshSpec(Mesh(("a",), range(2, 10)), (R,)).layout((16,))
    transfer = plan_transfer(src, dst, itemsize=1)
    assert dict(transfer.sent_bytes) == {0: 64, 1: 64}


def test_overlapping_replica_sets_share() -> None:
    src = GridSpec((3,), [[0, 1], [1, 2], [2, 0]]).layout((30,))
    dst = ChunkSpec(0, range(3, 33)).layout((30,))
    sent = plan_transfer(src, dst, itemsize=1).sent_bytes
    assert sum(sent.values()) == 30
    assert max(sent.values()) <= 30 / 3 + 2


# Hosts.


def test_same_host_is_preferred() -> None:
    src = MeshSpec(Mesh(("a",), [0, 4]), (R,)).layout((6,))
    dst = MeshSpec(Mesh(("a",), [1, 2, 5]), (R,)).layout((6,))
    near = plan_transfer(src, dst, itemsize=1, topology=Topology(ranks_per_host=4))
    assert dict(near.bytes_by_edge) == {(0, 1): 6, (0, 2): 6, (4, 5): 6}
    listed = plan_transfer(src, dst, itemsize=1, topology=Topology(hosts=(0, 1, 1, 9, 1, 0)))
    assert dict(listed.bytes_by_edge) == {(0, 5): 6, (4, 1): 6, (4, 2): 6}


def test_own_copy_comes_before_the_host() -> None:
    src, dst = tp(R), tp(S0)
    transfer = plan_transfer(src, dst, itemsize=1, topology=Topology(ranks_per_host=2))
    assert transfer.moved_bytes == 0
    assert transfer.busiest_sender is None
    assert transfer.busiest_receiver is None


def test_estimate_is_latency_plus_bytes_over_bandwidth() -> None:
    links = Link(1.0, 10.0, overhead=0.25, call=0.5), Link(100.0, 2.0, overhead=0.0, call=0.0)
    topology = Topology(ranks_per_host=2, within=links[0], between=links[1])
    near = plan_transfer(chunk(0), chunk(1), itemsize=1)
    far = plan_transfer(chunk(0), chunk(2), itemsize=1)
    assert near.estimate(topology) == pytest.approx(0.5 + 1.0 + 0.25 + 64 / 10)
    assert far.estimate(topology) == pytest.approx(100.0 + 64 / 2)
    assert plan_transfer(chunk(0), chunk(0), itemsize=1).estimate(topology) == 0.0


def test_topology_json() -> None:
    for topology in (Topology(ranks_per_host=4, within=Link(1.0, 2.0)), Topology(hosts=(0, 0, 1))):
        assert Topology.from_json(topology.to_json()) == topology


# Figures and rounds.


def test_figures() -> None:
    transfer = plan_transfer(chunk(0, 1), chunk(0, 1, dim=1), itemsize=4)
    assert dict(transfer.bytes_by_edge) == {(0, 1): 64, (1, 0): 64}
    assert (transfer.moved_bytes, transfer.copied_bytes, transfer.lower_bound_bytes) == (128, 128, 128)
    assert transfer.rounds == 1
    assert transfer.busiest_sender == (0, 64)
    assert transfer.busiest_receiver == (0, 64)
    assert (transfer.itemsize, transfer.max_buffer_bytes, transfer.rank) == (4, None, None)
    assert repr(transfer) == (
        "Transfer(ChunkSpec(dim=0, ranks=0-1) -> ChunkSpec(dim=1, ranks=0-1), shape=(8, 8), moved_bytes=128)"
    )


@pytest.mark.parametrize("limit", [8, 10, 16, 20, 32, 64, 100, 128, 1000])
def test_more_rounds_for_smaller_buffers(limit: int) -> None:
    src, dst = chunk(0, 1), chunk(0, 1, dim=1)
    transfer = plan_transfer(src, dst, itemsize=4, max_buffer_bytes=limit)
    assert transfer.rounds >= 128 / limit
    assert transfer.rounds <= 2 * 128 / limit + 1
    values = global_values(SHAPE)
    assert np.array_equal(assemble(dst, simulate(transfer, scatter(src, values))), values)


def test_average_divides_and_multiplies() -> None:
    values = global_values(SHAPE)
    for src, dst in [(tp(Partial("avg")), tp(R)), (tp(R), tp(Partial("avg"))), (tp(Partial("avg")), square(P, P))]:
        assert np.array_equal(
            assemble(dst, simulate(plan_transfer(src, dst, itemsize=8), scatter(src, values))), values
        )


@pytest.mark.parametrize("dst", [tp(S0), tp(R), chunk(5), chunk(3, 1, dim=1)], ids=str)
def test_addends_are_combined_in_order(dst: Layout) -> None:
    """Floating-point sums are the same on every rank and for every target: first addend to last."""
    random = np.random.default_rng(1)
    addends = [random.normal(size=SHAPE).astype(np.float32) for _ in range(4)]
    got = simulate(plan_transfer(tp(P), dst, itemsize=4), {rank: [array] for rank, array in enumerate(addends)})
    expected = ((addends[0] + addends[1]) + addends[2]) + addends[3]
    assert np.array_equal(assemble(dst, got), expected)


def test_a_wrong_plan_is_seen() -> None:
    """The oracle can fail: local arrays of another layout, and replicas that differ."""
    src, dst = tp(S0), tp(R)
    local = scatter(src, global_values(SHAPE))
    with pytest.raises(AssertionError, match=re.escape("rank 0 has arrays of shapes ((2, 8),); the layout assigns it")):
        simulate(plan_transfer(tp(S1), dst, itemsize=8), local)
    got = simulate(plan_transfer(src, dst, itemsize=8), local)
    got[2][0][3, 3] += 1
    with pytest.raises(AssertionError, match=re.escape("replicas differ: ranks 1 and 2 in [0:8, 0:8]")):
        assemble(dst, got)
    with pytest.raises(AssertionError, match="this plan is the part of rank 1 only"):
        simulate(plan_transfer(src, dst, itemsize=8, rank=1), local)


def test_words() -> None:
    assert plan_transfer(tp(R), tp(S0), itemsize=4).explain() == (
        "Nothing is sent: every rank has what it needs and copies 256 B locally."
    )
    text = plan_transfer(tp(P), tp(R), itemsize=4).explain()
    assert text.startswith("1. 4 ranks send 768 B in 12 boxes to 4 ranks, which combine what arrives by sum.\n2. ")
    assert "Together this is: all_reduce of 4 ranks." in text
    assert text.endswith("In total 1.5 kB move, the lower bound.")
    table = str(plan_transfer(tp(S0), tp(S1), itemsize=4, max_buffer_bytes=1000))
    assert "moved             192 B (lower bound 192 B)" in table
    assert "collective        all_to_all of 4 ranks" in table
    assert "0 -> 1            16 B" in table


# Errors.

ROWS_OF_4 = ChunkSpec(0, 2).layout((4,))
ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "shape": (
        lambda: plan_transfer(ROWS_OF_4, ChunkSpec(0, 2).layout((5,)), itemsize=4),
        "a transfer keeps the shape; the source has (4,), the destination (5,)",
    ),
    "itemsize": (
        lambda: plan_transfer(ROWS_OF_4, ROWS_OF_4, itemsize=0),
        "itemsize is the number of bytes of an element, got 0",
    ),
    "limit": (
        lambda: plan_transfer(ROWS_OF_4, ROWS_OF_4, itemsize=4, max_buffer_bytes=0),
        "max_buffer_bytes must be at least one element, got 0",
    ),
    "limit too small": (
        lambda: plan_transfer(chunk(0, 1), chunk(0, 1, dim=1), itemsize=4, max_buffer_bytes=7),
        "max_buffer_bytes=7 is too small: a rank exchanges up to 2 messages at a time with elements of 4 bytes; "
        "pass at least 8 bytes",
    ),
    "topology": (lambda: Topology(), "a Topology needs ranks_per_host, or hosts with the host number of each rank"),
    "topology both": (
        lambda: Topology(2, (0, 1)),
        "a Topology needs ranks_per_host, or hosts with the host number of each rank",
    ),
    "topology host": (lambda: Topology(0), "a host has at least one rank, got ranks_per_host=0"),
    "topology ranks": (
        lambda: plan_transfer(chunk(0), chunk(5), itemsize=1).estimate(Topology(hosts=(0, 1))),
        "the topology names the hosts of 2 ranks; rank 5 has none",
    ),
    "json": (
        lambda: transfer_from_json({**plan_transfer(chunk(0), chunk(5), itemsize=1).to_json(), "bytes_by_edge": []}),
        "this JSON describes a transfer with other routes than this version of shardwise plans",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_text(name: str) -> None:
    action, text = ERRORS[name]
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}$"):
        action()


# Scale: plans of thousands of ranks are ordinary values.


def test_many_ranks() -> None:
    side, shape = 32, (4096, 4096)
    src = ChunkSpec(0, side * side).layout(shape)
    dst = MeshSpec(Mesh.of(a=side, b=side), (S0, S1)).layout(shape)
    transfer = plan_transfer(src, dst, itemsize=2)
    assert transfer.moved_bytes == transfer.lower_bound_bytes
    assert len(transfer.steps[0].routes) + len(transfer.steps[0].copies) == side * side * side
    part = plan_transfer(src, dst, itemsize=2, rank=77)
    assert part.steps[0].sends_of(77) == transfer.steps[0].sends_of(77)
    assert part.steps[0].receives_of(77) == transfer.steps[0].receives_of(77)


def test_irregular_to_irregular_at_scale() -> None:
    """Thousands of pieces on both sides without a product form, counted element by element."""
    shape, random = (120, 90), np.random.default_rng(3)
    owners = np.zeros((2, *shape), np.int64)
    layouts = []
    for side in range(2):
        offsets, sizes = np.array([[0, 0]]), np.array([list(shape)])
        while len(offsets) < 2000:
            dim = int(random.integers(2))
            at = np.where(sizes[:, dim] > 1, random.integers(1, np.maximum(2, sizes[:, dim])), sizes[:, dim])
            low, high, shift = sizes.copy(), sizes.copy(), offsets.copy()
            low[:, dim], high[:, dim] = at, sizes[:, dim] - at
            shift[:, dim] += at
            offsets, sizes = np.concatenate([offsets, shift]), np.concatenate([low, high])
        ranks = random.integers(0, 16, len(offsets))
        layouts.append(EnumerableSpec.from_arrays(offsets, sizes, ranks).layout(shape))
        for (i, j), (h, w), rank in zip(offsets.tolist(), sizes.tolist(), ranks.tolist(), strict=True):
            owners[side, i : i + h, j : j + w] = rank
    transfer = plan_transfer(layouts[0], layouts[1], itemsize=1)
    moved = owners[0] != owners[1]
    edges, counts = np.unique(np.stack([owners[0][moved], owners[1][moved]]), axis=1, return_counts=True)
    expected = {(s, d): n for s, d, n in zip(*edges.tolist(), counts.tolist(), strict=True)}
    assert dict(transfer.bytes_by_edge) == expected
