"""Plans that do not list their moves: the same figures as listed ones in small worlds, and plans of 16,384 ranks."""

from __future__ import annotations

import itertools

import pytest

from shardwise.geometry import ChunkSpec, GridSpec, Layout, Mesh, MeshSpec, parse_spec
from shardwise.geometry.placements import Partial, Placement, Replicate, Shard
from shardwise.transfer import Topology, Transfer, plan_transfer, transfer, transfer_from_json

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


def unlisted(src: Layout, dst: Layout, monkeypatch: pytest.MonkeyPatch) -> Transfer:
    """A plan that lists as little as it can."""
    with monkeypatch.context() as patched:
        patched.setattr(transfer, "LISTED_BOXES", 0)
        plan = plan_transfer(src, dst, itemsize=4, topology=HOSTS)
        assert plan.is_listed or "steps" not in plan.__dict__
    return plan


@pytest.mark.parametrize("name", LAYOUTS)
def test_figures_are_those_of_the_listed_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    src, computed = LAYOUTS[name], 0
    for other, dst in LAYOUTS.items():
        listed, plan = plan_transfer(src, dst, itemsize=4, topology=HOSTS), unlisted(src, dst, monkeypatch)
        assert listed.is_listed
        computed += not plan.is_listed
        for figure in ("moved_bytes", "copied_bytes", "lower_bound_bytes", "sent_bytes", "received_bytes", "rounds"):
            assert getattr(plan, figure) == getattr(listed, figure), (other, figure)
        assert plan.collective == listed.collective, other
        assert plan.explain() == listed.explain(), other
        assert plan.first_edges(1000)[0] == listed.first_edges(1000)[0], other
        layouts = [layout for outline in plan.outlines for layout in (outline.src, outline.dst)]
        assert plan.estimate(HOSTS) >= 0.999999 * listed.estimate(HOSTS), other
        if all(len(layout.pieces_of(rank)) <= 1 for layout in layouts for rank in layout.ranks):
            assert plan.estimate(HOSTS) == pytest.approx(listed.estimate(HOSTS)), other
        assert dict(plan.bytes_by_edge) == dict(listed.bytes_by_edge), other
    replicated = any(text in name for text in ("R", "replicas"))
    assert bool(computed) is not replicated


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
