"""What holds for every transfer: values, bytes, rounds, parts and JSON, over random pairs of layouts."""

import json
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.geometry import Layout, LayoutError
from shardwise.testing import assemble, global_values, scatter, simulate
from shardwise.testing import strategies as sw
from shardwise.transfer import Topology, Transfer, plan_transfer, transfer_from_json

Pair = tuple[Layout, Layout]
few = settings(max_examples=60)
many = settings(max_examples=150)

plain_pairs = sw.layout_pairs()


@st.composite
def pending_pairs(draw: st.DrawFn) -> Pair:
    """The source leaves a reduction pending; the ranks may be the same or others."""
    shape, ranks = draw(sw.shapes()), draw(st.permutations(range(5)))
    first, second = ranks[: draw(st.integers(2, 5))], draw(sw.rank_lists(5))
    return draw(sw.pending_specs(shape, first)).layout(shape), draw(sw.layouts(shape, second))


@st.composite
def pairs_with_pending_target(draw: st.DrawFn) -> Pair:
    """Both sides may leave reductions pending."""
    shape = draw(sw.shapes())
    return draw(sw.layouts(shape, 4, pending=True)), draw(sw.layouts(shape, 4, pending=True, kinds=["mesh"]))


topologies = st.one_of(st.none(), st.builds(Topology, ranks_per_host=st.integers(1, 3)))


def held(layout: Layout, addend: int | None = None) -> dict[int, set[int]]:
    """The elements, numbered in row-major order, that each rank holds: of any addend, or of one."""
    index = np.arange(layout.numel).reshape(layout.shape)
    found: dict[int, set[int]] = {rank: set() for rank in layout.ranks}
    for row, piece in enumerate(layout.pieces):
        if addend is None or layout.table.addends[row] == addend:
            found[piece.rank] |= set(index[piece.box.slices].reshape(-1).tolist())
    return found


@many
@given(pair=plain_pairs, topology=topologies)
def test_every_rank_gets_its_values(pair: Pair, topology: Topology | None) -> None:
    src, dst = pair
    values = global_values(src.shape)
    got = simulate(plan_transfer(src, dst, itemsize=8, topology=topology), scatter(src, values))
    wanted = scatter(dst, values)
    assert got.keys() == wanted.keys()
    for rank, arrays in wanted.items():
        assert all(np.array_equal(a, b) for a, b in zip(got[rank], arrays, strict=True))


@many
@given(pair=pending_pairs())
def test_pending_reductions_are_resolved(pair: Pair) -> None:
    src, dst = pair
    values = global_values(src.shape)
    got = simulate(plan_transfer(src, dst, itemsize=8), scatter(src, values))
    assert np.array_equal(assemble(dst, got), values)


@many
@given(pair=pairs_with_pending_target(), topology=topologies)
def test_pending_targets_reduce_to_the_values(pair: Pair, topology: Topology | None) -> None:
    src, dst = pair
    values = global_values(src.shape)
    got = simulate(plan_transfer(src, dst, itemsize=8, topology=topology), scatter(src, values))
    assert np.array_equal(assemble(dst, got), values)


@few
@given(pair=pending_pairs())
def test_the_source_is_not_changed(pair: Pair) -> None:
    local = scatter(pair[0], global_values(pair[0].shape))
    before = {rank: [a.copy() for a in arrays] for rank, arrays in local.items()}
    simulate(plan_transfer(*pair, itemsize=8), local)
    for rank, arrays in before.items():
        assert all(np.array_equal(a, b) for a, b in zip(arrays, local[rank], strict=True))


@many
@given(pair=plain_pairs, topology=topologies)
def test_bytes_are_what_is_needed_and_not_held(pair: Pair, topology: Topology | None) -> None:
    src, dst = pair
    transfer = plan_transfer(src, dst, itemsize=4, topology=topology)
    has, needs = held(src), held(dst)
    missing = {rank: len(wanted - has.get(rank, set())) * 4 for rank, wanted in needs.items()}
    assert transfer.lower_bound_bytes == sum(missing.values())
    assert transfer.moved_bytes == transfer.lower_bound_bytes
    assert dict(transfer.received_bytes) == {rank: n for rank, n in sorted(missing.items()) if n}
    assert transfer.copied_bytes == sum(dst.bytes_per_rank(4).values()) - transfer.moved_bytes


@many
@given(pair=pending_pairs())
def test_bytes_of_reductions_are_the_fewest(pair: Pair) -> None:
    """For each element: one message less than addends, one for each rank in need, less one if such a rank has one."""
    src, dst = pair
    transfer = plan_transfer(src, dst, itemsize=1)
    holders, needing = Counter[int](), Counter[int]()
    has, needs = held(src), held(dst)
    met = set()
    for rank, wanted in needs.items():
        needing.update(wanted)
        met |= wanted & has.get(rank, set())
    for addend in range(int(src.table.addends.max(initial=0)) + 1):
        holders.update(set().union(*held(src, addend).values()))
    expected = sum(holders[i] - 1 + needing[i] - (i in met) for i in range(src.numel))
    assert transfer.lower_bound_bytes == expected
    assert transfer.moved_bytes == expected


@few
@given(data=st.data(), shape=sw.shapes())
def test_bytes_to_a_pending_target_are_those_of_its_first_addend(data: st.DataObject, shape: tuple[int, ...]) -> None:
    src, dst = data.draw(sw.layouts(shape)), data.draw(sw.pending_specs(shape)).layout(shape)
    has = held(src)
    missing = sum(len(wanted - has.get(rank, set())) for rank, wanted in held(dst, 0).items())
    transfer = plan_transfer(src, dst, itemsize=1)
    assert transfer.lower_bound_bytes == transfer.moved_bytes == missing


@few
@given(pair=pairs_with_pending_target())
def test_sends_are_receives_transposed(pair: Pair) -> None:
    transfer = plan_transfer(*pair, itemsize=2)
    edges: Counter[tuple[int, int]] = Counter()
    ranks = sorted({*pair[0].ranks, *pair[1].ranks})
    for step in transfer.steps:
        sends = {rank: step.sends_of(rank) for rank in ranks}
        receives = {rank: step.receives_of(rank) for rank in ranks}
        for a in ranks:
            for b in ranks:
                sent = [(m.box.sizes, m.term, m.round) for m in sends[a] if m.peer == b]
                taken = [(m.box.sizes, m.term, m.round) for m in receives[b] if m.peer == a]
                assert sent == taken
                assert not (a == b and sent)
                edges[a, b] += sum(2 * m.box.numel for m in sends[a] if m.peer == b)
    assert dict(+edges) == dict(transfer.bytes_by_edge)
    assert sum(transfer.sent_bytes.values()) == sum(transfer.received_bytes.values()) == transfer.moved_bytes


@few
@given(pair=plain_pairs)
def test_inverse_after_forward_is_the_identity(pair: Pair) -> None:
    forward = plan_transfer(*pair, itemsize=8)
    local = scatter(pair[0], global_values(pair[0].shape))
    back = forward.inverse()
    assert (back.src, back.dst, back.options) == (forward.dst, forward.src, forward.options)
    again = simulate(back, simulate(forward, local))
    for rank, arrays in local.items():
        assert all(np.array_equal(a, b) for a, b in zip(arrays, again[rank], strict=True))
    assert back.inverse() == forward


@few
@given(pair=pairs_with_pending_target())
def test_inverse_keeps_the_values_when_reductions_are_pending(pair: Pair) -> None:
    values = global_values(pair[0].shape)
    forward = plan_transfer(*pair, itemsize=8)
    again = simulate(forward.inverse(), simulate(forward, scatter(pair[0], values)))
    assert np.array_equal(assemble(pair[0], again), values)


@few
@given(pair=pairs_with_pending_target(), topology=topologies, limit=st.sampled_from([None, 10**6]))
def test_json_round_trip(pair: Pair, topology: Topology | None, limit: int | None) -> None:
    transfer = plan_transfer(*pair, itemsize=2, topology=topology, max_buffer_bytes=limit)
    again = transfer_from_json(json.loads(json.dumps(transfer.to_json())))
    assert again == transfer
    assert hash(again) == hash(transfer)
    assert str(again) == str(transfer)
    assert again.explain() == transfer.explain()


def smallest_limit(src: Layout, dst: Layout, itemsize: int, topology: Topology | None = None) -> int:
    """The smallest buffer limit the planner accepts, as its error names it."""
    try:
        plan_transfer(src, dst, itemsize=itemsize, max_buffer_bytes=1, topology=topology)
    except LayoutError as error:
        return int(str(error).rsplit(" bytes", 1)[0].rsplit(" ", 1)[1])
    return 1


def in_flight(transfer: Transfer) -> list[int]:
    """The bytes that each rank sends and receives in each round."""
    totals: Counter[tuple[int, int, int]] = Counter()
    for number, step in enumerate(transfer.steps):
        for rank in {*step.src.ranks, *step.dst.ranks}:
            for move in step.sends_of(rank) + step.receives_of(rank):
                totals[number, move.round, rank] += move.box.numel * transfer.itemsize
    return list(totals.values())


@many
@given(pair=pairs_with_pending_target(), extra=st.integers(0, 100), topology=topologies)
def test_buffer_limit_is_respected(pair: Pair, extra: int, topology: Topology | None) -> None:
    src, dst = pair
    limit = smallest_limit(src, dst, 4, topology) + extra
    transfer = plan_transfer(src, dst, itemsize=4, max_buffer_bytes=limit, topology=topology)
    assert max(in_flight(transfer), default=0) <= limit
    assert transfer.max_buffer_bytes == limit
    whole = plan_transfer(src, dst, itemsize=4, topology=topology)
    assert dict(whole.bytes_by_edge) == dict(transfer.bytes_by_edge)
    values = global_values(src.shape, np.int64)
    assert np.array_equal(assemble(dst, simulate(transfer, scatter(src, values))), values)


@many
@given(pair=pairs_with_pending_target(), topology=topologies, limit=st.sampled_from([None, 64, 1000]))
def test_one_ranks_plan_is_its_part_of_the_whole(pair: Pair, topology: Topology | None, limit: int | None) -> None:
    if limit is not None and limit < smallest_limit(*pair, itemsize=2, topology=topology):
        limit = None
    whole = plan_transfer(*pair, itemsize=2, topology=topology, max_buffer_bytes=limit)
    for rank in {*pair[0].ranks, *pair[1].ranks, 9}:
        part = plan_transfer(*pair, itemsize=2, topology=topology, max_buffer_bytes=limit, rank=rank)
        assert len(part.steps) == len(whole.steps)
        for mine, step in zip(part.steps, whole.steps, strict=True):
            assert mine.sends_of(rank) == step.sends_of(rank)
            assert mine.receives_of(rank) == step.receives_of(rank)
            assert mine.copies_of(rank) == step.copies_of(rank)
            assert mine.fills_of(rank) == step.fills_of(rank)
            assert (mine.op, mine.scale, mine.src, mine.dst) == (step.op, step.scale, step.src, step.dst)
        assert all(rank in edge for edge in part.bytes_by_edge)


@few
@given(pair=plain_pairs, ranks_per_host=st.integers(1, 3))
def test_senders_on_the_same_host_are_preferred(pair: Pair, ranks_per_host: int) -> None:
    src, dst = pair
    topology = Topology(ranks_per_host=ranks_per_host)
    transfer = plan_transfer(src, dst, itemsize=1, topology=topology)
    holders: dict[int, set[int]] = {}
    for rank, wanted in held(src).items():
        for index in wanted:
            holders.setdefault(index, set()).add(rank // ranks_per_host)
    numbers = np.arange(src.numel).reshape(src.shape)
    routes = transfer.steps[0].routes
    for row in range(len(routes)):
        box = tuple(
            slice(o, o + s) for o, s in zip(routes.starts[row].tolist(), routes.sizes[row].tolist(), strict=True)
        )
        home = int(routes.dst_ranks[row]) // ranks_per_host
        if all(home in holders[int(i)] for i in numbers[box].reshape(-1)):
            assert int(routes.src_ranks[row]) // ranks_per_host == home


@few
@given(pair=pairs_with_pending_target(), topology=topologies)
def test_planning_is_a_function_of_its_arguments(pair: Pair, topology: Topology | None) -> None:
    first = plan_transfer(*pair, itemsize=2, topology=topology)
    assert first == plan_transfer(*pair, itemsize=2, topology=topology)
    assert first != plan_transfer(*pair, itemsize=4, topology=topology)
    assert first.estimate(Topology(ranks_per_host=2)) >= 0.0
    assert (first.estimate(Topology(ranks_per_host=2)) == 0.0) == (first.moved_bytes == 0)
