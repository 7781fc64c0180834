"""Plans for several hosts: right values, the fewest bytes between hosts, no more bytes in all, and what they show."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardwise.geometry import GridSpec, Layout, parse_spec
from shardwise.testing.oracle import assemble, global_values, scatter, simulate
from shardwise.transfer import Link, Topology, Transfer, plan_transfer

SHAPE = (8, 6)
# Links where bytes alone count: of few bytes, fewer messages are worth more than the bounds that are tested here.
LINKS = Link(0.0, 300e9, overhead=0.0, call=0.0), Link(0.0, 25e9, overhead=0.0, call=0.0)
TWO_BY_TWO = Topology(2, None, *LINKS)
SPECS = [
    "on x=4: S(0)",
    "on x=4: S(1)",
    "on x=4: R",
    "on x=4: P(sum)",
    "on x=4: P(avg)",
    "on x=4: P(max)",
    "on x=4: S(0) sizes(0,3,4,1)",
    "on a=2,b=2: S(0), R",
    "on a=2,b=2: R, S(1)",
    "on a=2,b=2: S(0), S(1)",
    "on a=2,b=2: P(sum), S(0)",
    "on a=2,b=2: S(1), P(sum)",
    "on a=2,b=2: P(sum), R",
    "on a=2,b=2: R, P(sum)",
    "on x=3: S(1)",
    "as chunk(0) over 0,1,0,2",
]
LAYOUTS: dict[str, Layout] = {text: parse_spec(text).layout(SHAPE) for text in SPECS}
LAYOUTS["grid of replicas"] = GridSpec((2, 2), [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]).layout(SHAPE)
PAIRS = list(itertools.permutations(LAYOUTS, 2))


def plan(src: str, dst: str, topology: Topology = TWO_BY_TWO) -> Transfer:
    return plan_transfer(LAYOUTS[src], LAYOUTS[dst], itemsize=4, topology=topology)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 0, 1)], ids=str)
def test_every_pair_is_moved_right_with_the_fewest_bytes(hosts: tuple[int, ...]) -> None:
    topology, even = Topology(None, hosts, *LINKS), hosts.count(1) == 2
    values = global_values(SHAPE)
    for src, dst in PAIRS:
        made = plan(src, dst, topology)
        got = simulate(made, scatter(made.src, values))
        assert np.array_equal(assemble(made.dst, got), values), (src, dst)
        assert made.moved_bytes == made.lower_bound_bytes or not even, (src, dst)
        if (bound := made.lower_bound_between_hosts) is not None:
            passing = made.bytes_between_hosts
            assert passing is not None and passing >= bound, (src, dst)
            known = even and made.dst.pending is None and (made.src.pending is None or dst != "grid of replicas")
            assert passing == bound or not known, (src, dst)


def test_what_a_host_needs_and_does_not_hold_enters_it_once() -> None:
    """The bound without pending reductions, counted element by element."""
    numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    plain = [name for name in LAYOUTS if LAYOUTS[name].pending is None]
    for src, dst in itertools.permutations(plain, 2):
        held: list[dict[int, set[int]]] = [{}, {}]
        for side, name in enumerate((src, dst)):
            for piece in LAYOUTS[name].pieces:
                held[side].setdefault(piece.rank // 2, set()).update(numbers[piece.box.slices].reshape(-1).tolist())
        entering = sum(len(needed - held[0].get(host, set())) for host, needed in held[1].items())
        assert plan(src, dst).bytes_between_hosts == 4 * entering, (src, dst)


@pytest.mark.parametrize(
    ("src", "dst", "share"),
    [("S(0)", "S(1)", 0.5), ("S(0)", "R", 1.0), ("P(sum)", "S(0)", 1.0), ("P(sum)", "S(1)", 1.0), ("P(sum)", "R", 2.0)],
)
@pytest.mark.parametrize("per_host", [2, 4])
def test_bytes_between_two_hosts(src: str, dst: str, share: float, per_host: int) -> None:
    """As a share of the tensor, however many ranks a host has; all of them send to the other host."""
    ranks = 2 * per_host
    layouts = [parse_spec(f"on x={ranks}: {text}").layout((64, 64)) for text in (src, dst)]
    made = plan_transfer(layouts[0], layouts[1], itemsize=4, topology=Topology(ranks_per_host=per_host))
    assert made.bytes_between_hosts == share * 64 * 64 * 4 == made.lower_bound_between_hosts
    far = {s for s, d in made.bytes_by_edge if s // per_host != d // per_host}
    assert far == set(range(ranks))


def test_a_sum_within_each_host_passes_nothing_between_hosts() -> None:
    assert plan("on a=2,b=2: R, P(sum)", "on x=4: R").bytes_between_hosts == 0
    apart = plan("on a=2,b=2: P(sum), R", "on x=4: R")
    assert apart.bytes_between_hosts == apart.lower_bound_between_hosts == 2 * 8 * 6 * 4


@pytest.mark.parametrize("dst", ["R, R", "S(0), R", "R, S(1)"])
def test_replicas_of_addends_share_the_sum_of_their_host(dst: str) -> None:
    """Two of four addends are on each host, with two replicas each: one sum of each host goes on."""
    topology = Topology(4, None, *LINKS)
    made = plan_transfer("f32[8,6] on a=4,b=2: P(sum), R", f"on a=4,b=2: {dst}", topology=topology)
    values = global_values((8, 6))
    assert np.array_equal(assemble(made.dst, simulate(made, scatter(made.src, values))), values)
    assert made.moved_bytes == made.lower_bound_bytes
    assert made.bytes_between_hosts == made.lower_bound_between_hosts
    assert dst != "R, R" or {d for s, d in made.bytes_by_edge if s // 4 != d // 4} == set(range(8))


def test_one_box_for_many_ranks_of_a_host_is_cut_for_them() -> None:
    """Of few boxes each rank of the other host receives a part; of many, each receives some of them."""
    src, dst = GridSpec((1, 1), [[0]]).layout((8, 8)), parse_spec("on x=8: R").layout((8, 8))
    made = plan_transfer(src, dst, itemsize=1, topology=Topology(ranks_per_host=4))
    assert {edge: n for edge, n in made.bytes_by_edge.items() if edge[0] // 4 != edge[1] // 4} == {
        (0, 4): 16,
        (0, 5): 16,
        (0, 6): 16,
        (0, 7): 16,
    }
    src, dst = (parse_spec(f"on x=8: {text}").layout((8, 8)) for text in ("S(0)", "R"))
    made = plan_transfer(src, dst, itemsize=1, topology=Topology(ranks_per_host=4))
    far = [edge for edge in made.bytes_by_edge if edge[0] // 4 != edge[1] // 4]
    assert sorted(s for s, _ in far) == sorted(d for _, d in far) == list(range(8))


def test_the_plan_says_what_passes_between_hosts() -> None:
    made = plan("on x=4: S(0)", "on x=4: R")
    assert "between hosts     192 B (lower bound 192 B)" in str(made)
    assert made.explain().split("\n") == [
        "1. 4 ranks send 384 B in 8 boxes to 4 ranks.",
        "2. 4 ranks send 192 B in 4 boxes to 4 ranks of their hosts, which pass on what came from another host.",
        "Together this is: all_gather of 4 ranks.",
        "In total 576 B move, the lower bound, 192 B of it between hosts.",
    ]
    assert made.to_json()["bytes_between_hosts"] == 192
    assert plan_transfer(made.src, made.dst, itemsize=4).bytes_between_hosts is None
