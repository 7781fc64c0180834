"""Plans that do not list their moves: the same figures as listed ones in small worlds, and plans of 16,384 ranks."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from shardwise.geometry import ChunkSpec, GridSpec, Layout, LayoutError, Mesh, MeshSpec, parse_spec
from shardwise.geometry.placements import Partial, Placement, Replicate, Shard
from shardwise.testing.oracle import assemble, global_values, scatter, simulate
from shardwise.transfer import Topology, Transfer, plan_transfer, steps, transfer_from_json
from shardwise.transfer import senders as totals
from shardwise.transfer.steps import PlanOptions, plan_steps
from shardwise.transfer.transfer import edge_bytes, plan_state, total_routes

SHAPE = (7, 6)
SPECS = [
    "on x=4: S(0)",
    "on x=4: S(1)",
    "on x=4: R",
    "on x=4: P(sum)",
    "on x=4: P(avg)",
    "on x=4: P(max)",
    "on x=4: S(0) sizes(0,3,4,0)",
    "on x=4: S(0) block(1)",
    "on x=2 @ 1,3: S(1)",
    "on x=2 @ 5,6: R",
    "on x=3 @ 2,0,1: S(0)",
    "on x=2 @ 3,1: P(sum)",
    "on a=2,b=2: S(0), S(1)",
    "on a=2,b=2: S(1), S(0)",
    "on a=2,b=2: S(0), R",
    "on a=2,b=2: R, S(0)",
    "on a=2,b=2: R, S(1)",
    "on a=2,b=2: P(sum), S(0)",
    "on a=2,b=2: S(1), P(sum)",
    "on a=2,b=2: P(sum), R",
    "as chunk(0) over 0,1,0,2",
    "as chunk(1) over 6",
]
LAYOUTS: dict[str, Layout] = {text: parse_spec(text).layout(SHAPE) for text in SPECS}
LAYOUTS["grid"] = GridSpec(((3, 4), (2, 1, 3)), [[0, 1, 2], [3, 0, 1]]).layout(SHAPE)
LAYOUTS["grid of replicas"] = GridSpec((2, 2), [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]).layout(SHAPE)
HOSTS = Topology(ranks_per_host=2)


@pytest.fixture
def no_steps_within_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only listed plans have steps within hosts; these tests compare the two kinds of plans without them."""
    monkeypatch.setattr(steps, "may_relay", lambda outline, topology: False)
    monkeypatch.setattr(steps, "sum_within_hosts", lambda src, dst, topology: None)


def unlisted(src: Layout, dst: Layout, monkeypatch: pytest.MonkeyPatch, limit: int | None = None) -> Transfer:
    """A plan that lists as little as it can."""
    with monkeypatch.context() as patched:
        patched.setattr(totals, "LISTED_BOXES", 0)
        plan = plan_transfer(src, dst, itemsize=4, topology=HOSTS, max_buffer_bytes=limit)
        assert plan.is_listed or "steps" not in plan.__dict__
    return plan


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.usefixtures("no_steps_within_hosts")
def test_figures_are_those_of_the_listed_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    src, computed = LAYOUTS[name], 0
    for other, dst in LAYOUTS.items():
        listed, plan = plan_transfer(src, dst, itemsize=4, topology=HOSTS), unlisted(src, dst, monkeypatch)
        assert listed.is_listed
        computed += not plan.is_listed
        for figure in ("moved_bytes", "copied_bytes", "lower_bound_bytes", "received_bytes", "rounds"):
            assert getattr(plan, figure) == getattr(listed, figure), (other, figure)
        check_totals_against_moves(plan)
        if src.cells is not None and src.cells.replicas > 1 and not plan.is_listed:
            continue  # other replicas send than in a listed plan
        assert plan.sent_bytes == listed.sent_bytes, other
        assert plan.collective == listed.collective, other
        assert plan.explain() == listed.explain(), other
        assert plan.first_edges(1000)[0] == listed.first_edges(1000)[0], other
        layouts = [layout for outline in plan.outlines for layout in (outline.src, outline.dst)]
        assert plan.estimate(HOSTS) >= 0.999999 * listed.estimate(HOSTS), other
        if all(len(layout.pieces_of(rank)) <= 1 for layout in layouts for rank in layout.ranks):
            assert plan.estimate(HOSTS) == pytest.approx(listed.estimate(HOSTS)), other
        assert dict(plan.bytes_by_edge) == dict(listed.bytes_by_edge), other
    assert computed > 10


def check_totals_against_moves(plan: Transfer) -> None:
    """The totals of each step, and each rank's part, are those of its moves, and these are right."""
    values = global_values(SHAPE)
    assert np.array_equal(assemble(plan.dst, simulate(plan, scatter(plan.src, values))), values), plan
    for step, total in zip(plan.steps, plan.totals, strict=True):
        moves = total_routes(step)
        for figure in ("sent", "received", "copied", "boxes_out", "boxes_in"):
            width = max(len(getattr(moves, figure)), len(getattr(total, figure)))
            found = [np.pad(getattr(t, figure), (0, width - len(getattr(t, figure)))) for t in (total, moves)]
            assert np.array_equal(*found), (plan, figure)
    whole = dict(plan.bytes_by_edge)
    for rank in range(8):
        edges: Counter[tuple[int, int]] = Counter()
        for step in plan_steps(plan.outlines, plan.options, rank):
            for source, target, nbytes in zip(*edge_bytes(step.routes, 4), strict=True):
                edges[int(source), int(target)] += int(nbytes)
        assert edges == {edge: nbytes for edge, nbytes in whole.items() if rank in edge}, (plan, rank)


@pytest.mark.parametrize("name", ["on x=4: R", "on a=2,b=2: R, S(0)", "on x=2 @ 5,6: R", "grid of replicas"])
@pytest.mark.parametrize("boxes", [0, totals.LISTED_BOXES])
@pytest.mark.usefixtures("no_steps_within_hosts")
def test_each_replica_may_come_first(name: str, boxes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals, "LISTED_BOXES", boxes)
    for dst in LAYOUTS.values():
        for turn in range(1, 4):
            check_totals_against_moves(Transfer(LAYOUTS[name], dst, PlanOptions(4, HOSTS, turn=turn), None))


def test_replicas_share_many_tensors() -> None:
    copied, one = LAYOUTS["on x=4: R"], parse_spec("on x=2 @ 5,6: R").layout(SHAPE)
    found = plan_state([(copied, one, 4)] * 300, Topology(ranks_per_host=1))
    each = 300 * 42 * 4
    near, far = found.loads
    assert not near.is_used and far.bytes_out[:4].tolist() == [2 * each // 4] * 4
    assert (found.count, found.moved_bytes, found.bytes_between_hosts) == (300, 2 * each, 2 * each)
    assert [str(link) for link in found.busiest_links] == [
        "rank 0 sends 25.2 kB to other hosts",
        "rank 5 receives 50.4 kB from other hosts",
    ]


def test_a_state_is_the_sum_of_its_tensors() -> None:
    pairs = [(LAYOUTS[a], LAYOUTS[b], 4) for a, b in itertools.permutations(SPECS, 2) if "P" not in a + b]
    found, parts = plan_state(pairs, HOSTS), [plan_transfer(a, b, itemsize=n, topology=HOSTS) for a, b, n in pairs]
    for figure in ("moved_bytes", "copied_bytes", "lower_bound_bytes", "bytes_between_hosts"):
        assert getattr(found, figure) == sum(getattr(part, figure) for part in parts), figure
    sent: Counter[int] = Counter()
    for part in parts:
        sent.update(part.sent_bytes)
    near, far = found.loads
    assert dict(enumerate((near.bytes_out + far.bytes_out).tolist())) == {rank: sent[rank] for rank in range(7)}
    assert max(part.estimate(HOSTS) for part in parts) < found.seconds < sum(part.estimate(HOSTS) for part in parts)
    assert found.to_json()["busiest_sender"] == max(sent.items(), key=lambda item: item[1])


def test_a_thousand_tensors_from_1024_to_256_ranks() -> None:
    src, dst = Mesh.of(dp=8, fsdp=16, tp=8), Mesh(("dp", "tp"), np.arange(1024, 1280).reshape(32, 8))
    placed = [(Shard(1), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())]
    pairs = [
        (MeshSpec(src, (Replicate(), *here)).layout(shape), MeshSpec(dst, (Replicate(), here[1])).layout(shape), 2)
        for here in placed
        for shape in ((8192, 8192), (28672, 8192))
    ]
    found = plan_state(pairs * 167, Topology(ranks_per_host=8))
    assert found.count == 1002
    assert found.moved_bytes == 167 * 2 * (8192 + 28672) * 8192 * (32 + 32 + 256)
    assert found.busiest_rank(sends=False) == (1024, found.moved_bytes // 256)
    sent = found.loads[1].bytes_out[:1024]
    assert 1024 * sent.max() < 1.1 * sent.sum() and sent.sum() == found.bytes_between_hosts


@pytest.mark.parametrize("limit", [4, 100])
@pytest.mark.usefixtures("no_steps_within_hosts")
def test_rounds_are_those_of_the_listed_plan(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0
    for src, dst in itertools.permutations(LAYOUTS.values(), 2):
        listed, plan = (attempt(make, src, dst, limit, monkeypatch) for make in (listed_plan, unlisted))
        if isinstance(listed, str) or isinstance(plan, str):
            assert listed == plan
            continue
        for step, rounds in zip(plan.steps, plan.rounds_by_step, strict=True):
            pieces = max(len(x.pieces_of(rank)) for x in (step.src, step.dst) for rank in x.ranks)
            assert step.rounds == rounds if plan.is_listed or pieces == 1 else step.rounds <= rounds
        assert tuple(step.rounds for step in listed.steps) == listed.rounds_by_step
        computed += not plan.is_listed
    assert computed > 100 or limit == 4


def listed_plan(src: Layout, dst: Layout, _: pytest.MonkeyPatch, limit: int) -> Transfer:
    return plan_transfer(src, dst, itemsize=4, topology=HOSTS, max_buffer_bytes=limit)


def attempt(
    make: Callable[..., Transfer], src: Layout, dst: Layout, limit: int, patch: pytest.MonkeyPatch
) -> Transfer | str:
    try:
        return make(src, dst, patch, limit)
    except LayoutError as error:
        return str(error)


MANY = 16_384
PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial("sum")]


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(PLACEMENTS, 2)), ids=str)
def test_plans_of_many_ranks(one: Placement, other: Placement) -> None:
    """None of them lists the 268 million moves that the densest of them have."""
    shape = (2 * MANY, MANY)
    src, dst = (MeshSpec(Mesh.of(x=MANY), (placement,)).layout(shape) for placement in (one, other))
    plan = plan_transfer(src, dst, itemsize=2, topology=Topology(ranks_per_host=8))
    assert plan.moved_bytes == plan.lower_bound_bytes
    assert plan.estimate(Topology(ranks_per_host=8)) >= 0
    assert str(plan).count("\n") < 40
    data = plan.to_json()
    assert transfer_from_json(data) == plan
    assert plan.is_listed or data["bytes_by_edge"] is None
    part = plan_transfer(src, dst, itemsize=2, rank=77)
    assert sum(len(step.routes) for step in part.steps) <= 4 * MANY
    assert part.sent_bytes.get(77, 0) == plan.sent_bytes.get(77, 0)
    assert part.received_bytes.get(77, 0) == plan.received_bytes.get(77, 0)


def test_all_to_all_of_many_ranks() -> None:
    rows, columns = (ChunkSpec(dim, MANY).layout((MANY, MANY)) for dim in (0, 1))
    plan = plan_transfer(rows, columns, itemsize=4)
    assert plan.moved_bytes == 4 * MANY * (MANY - 1)
    assert plan.busiest_sender == plan.busiest_receiver == (0, 4 * (MANY - 1))
    assert str(plan.collective) == "all_to_all of 16384 ranks"
    assert plan.first_edges(2) == ([(0, 1, 4), (0, 2, 4)], MANY * (MANY - 1))


MESHES = [("x=16384", 16), ("a=128,b=128", 6), ("a=16,b=32,c=32", 4)]


@pytest.mark.parametrize(("mesh", "count"), MESHES, ids=str)
@pytest.mark.parametrize("limit", [None, 1 << 28])
def test_regular_pairs_of_many_ranks_take_little_memory(mesh: str, count: int, limit: int | None) -> None:
    """Pairs of all placements (a sample where they are thousands): no list of moves, at most 300 MB for a plan."""
    axes = mesh.count("=")
    texts = [", ".join(p) for p in itertools.product(("S(0)", "S(1)", "R", "P(sum)"), repeat=axes)]
    pairs = random.Random(axes).sample(list(itertools.product(texts, repeat=2)), count)
    for one, other in pairs:
        src, dst = (parse_spec(f"on {mesh}: {text}").layout((65536, 65536)) for text in (one, other))
        tracemalloc.start()
        plan = plan_transfer(src, dst, itemsize=4, topology=Topology(ranks_per_host=8), max_buffer_bytes=limit)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert str(plan).count("\n") < 40 and plan.estimate(Topology(ranks_per_host=8)) >= 0
        assert plan.moved_bytes == plan.lower_bound_bytes, (one, other)
        moves = sum(len(step.routes) for step in plan.unsplit_steps) if plan.is_listed else 0
        assert (moves <= totals.LISTED_BOXES and "steps" not in plan.__dict__) or limit is None, (one, other)
        assert peak < 300e6, (one, other, peak)


@pytest.mark.parametrize(
    ("shape", "mesh"),
    [((32000, 8192), "dp=2048,tp=8"), ((32000, 100), "dp=2048,tp=8")],
    ids=["another dim is even", "no dim is even"],
)
def test_all_ranks_take_their_share_of_a_sum(shape: tuple[int, int], mesh: str) -> None:
    source, target = (parse_spec(f"on {mesh}: {p}, S(0)").layout(shape) for p in ("P(sum)", "R"))
    found = plan_transfer(source, target, itemsize=4)
    assert found.busiest_sender is not None and found.busiest_receiver is not None
    mean = found.moved_bytes / len(source.ranks)
    assert max(found.busiest_sender[1], found.busiest_receiver[1]) <= 1.2 * mean
