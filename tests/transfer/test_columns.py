"""Reductions whose addends have replicas: who reduces is chosen by bytes and messages, and every choice is right."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardwise.geometry import Layout, parse_spec
from shardwise.testing.oracle import assemble, global_values, scatter, simulate
from shardwise.transfer import Link, Topology, Transfer, plan_transfer
from shardwise.transfer.steps import outline_candidates, plan_steps
from shardwise.transfer.transfer import edge_bytes

BYTES_ONLY = Link(0.0, 1.0, overhead=0.0, call=0.0)
MESSAGES_ONLY = Link(1.0, 1e30, overhead=1.0, call=0.0)
SHAPES = {"a=2,b=2": (8, 6), "a=3,b=2": (7, 6), "a=2,b=3": (6, 5), "a=2,b=2,c=2": (8, 8)}
KINDS = ("S(0)", "S(1)", "R", "P(sum)")


def pairs(mesh: str) -> list[tuple[Layout, Layout]]:
    """Each pair of a pending layout with replicas and one without anything pending, on a mesh."""
    kinds = [k for k in KINDS if mesh.count("=") < 3 or k != "S(1)"]
    texts = [", ".join(chosen) for chosen in itertools.product(kinds, repeat=mesh.count("="))]
    layouts = {text: parse_spec(f"on {mesh}: {text}").layout(SHAPES[mesh]) for text in texts}
    sources = [text for text in texts if "P" in text and "R" in text]
    return [(layouts[a], layouts[b]) for a in sources for b in texts if "P" not in b]


def made_in_columns(src: Layout, dst: Layout, *, listed: bool = True) -> Transfer | None:
    """The transfer in which each replica of the addends makes the reduction by itself, if there is one."""
    candidates = outline_candidates(src, dst, None)
    if len(candidates) == 1:
        return None
    made = plan_transfer(src, dst, itemsize=4)
    fresh = Transfer(src, dst, made.options, None)
    fresh.__dict__["outlines"] = tuple(replace(outline, is_listed=listed) for outline in candidates[0])
    return fresh


@pytest.mark.parametrize("mesh", SHAPES)
def test_columns_reduce_right_and_exchange_among_themselves(mesh: str) -> None:
    found, values = 0, global_values(SHAPES[mesh])
    for src, dst in pairs(mesh):
        made = made_in_columns(src, dst)
        if made is None:
            continue
        found += 1
        got = simulate(made, scatter(src, values))
        assert np.array_equal(assemble(dst, got), values), made
        columns = made.outlines[0].columns
        assert columns is not None and all(columns[s] == columns[d] for s, d in made.bytes_by_edge), made
        closed = made_in_columns(src, dst, listed=False)
        assert closed is not None
        for figure in ("moved_bytes", "copied_bytes", "sent_bytes", "received_bytes", "collective"):
            assert getattr(closed, figure) == getattr(made, figure), (made, figure)
        assert closed.estimate(Topology(ranks_per_host=2)) == pytest.approx(made.estimate(Topology(ranks_per_host=2)))
        whole = dict(made.bytes_by_edge)
        for rank in src.ranks:  # planned alone, a rank finds its part of the whole
            edges: Counter[tuple[int, int]] = Counter()
            for step in plan_steps(made.outlines, made.options, rank):
                for s, d, nbytes in zip(*edge_bytes(step.routes, 4), strict=True):
                    edges[int(s), int(d)] += int(nbytes)
            assert edges == {edge: nbytes for edge, nbytes in whole.items() if rank in edge}, (made, rank)
    assert found >= 2


@pytest.mark.parametrize("mesh", SHAPES)
def test_bytes_decide_where_messages_cost_nothing(mesh: str) -> None:
    """And messages where bytes cost nothing: never more than any other candidate has."""
    for src, dst in pairs(mesh):
        for link in (BYTES_ONLY, MESSAGES_ONLY):
            topology = Topology(ranks_per_host=1, between=link)
            made = plan_transfer(src, dst, itemsize=4, topology=topology)
            values = global_values(src.shape)
            assert np.array_equal(assemble(dst, simulate(made, scatter(src, values))), values), made
            if link is BYTES_ONLY:
                assert made.moved_bytes == made.lower_bound_bytes, made
            elif (columns := made_in_columns(src, dst)) is not None:
                assert made.estimate(topology) <= columns.estimate(topology), made


def test_a_small_sum_of_many_ranks_is_an_all_reduce_of_each_replica() -> None:
    """1,024 ranks would each reduce 16 bytes, and receive 1,150 messages; 128 ranks reduce among themselves instead."""
    pending = "bf16[8192] on fsdp=128,tp=8: P(sum), R"
    for topology in (None, Topology(ranks_per_host=8)):
        made = plan_transfer(pending, "on fsdp=128,tp=8: R, R", topology=topology)
        assert str(made.collective) == str(made.collective_of_comm()) == "8 x all_reduce of 128 ranks"
        assert {group[1] - group[0] for group in made.collective.groups} == {8}  # type: ignore[union-attr]
        most = max(int(total.boxes_in.max()) for total in made.totals)
        assert most == 127
        assert made.estimate(Topology(ranks_per_host=8)) < 0.3e-3
        # One rank's part of the plan is made by the same collective.
        part = plan_transfer(pending, "on fsdp=128,tp=8: R, R", topology=topology, rank=9)
        assert part.collective_of_comm() == made.collective


def test_a_large_sum_of_many_ranks_is_shared_by_all_of_them() -> None:
    pending, whole = (f"f32[65536,8192] on fsdp=16,tp=8: {text}" for text in ("P(sum), R", "R, R"))
    made = plan_transfer(pending, whole, topology=Topology(ranks_per_host=8))
    assert made.moved_bytes == made.lower_bound_bytes and made.collective_of_comm() is None


def test_a_single_element_is_reduced_on_one_rank_of_each_column() -> None:
    made = plan_transfer("f32[] on a=3,b=2: P(sum), R", "on a=3,b=2: R, R")
    assert np.array_equal(assemble(made.dst, simulate(made, scatter(made.src, global_values(())))), global_values(()))
    assert str(made.collective_of_comm()) == "2 x all_reduce of 3 ranks" and made.moved_bytes == 2 * 2 * 2 * 4


def test_rows_of_each_replica_are_scattered_by_itself() -> None:
    made = plan_transfer("f32[8,6] on a=4,b=2: P(sum), R", "on a=4,b=2: S(0), R")
    assert str(made.collective) == str(made.collective_of_comm()) == "2 x reduce_scatter of 4 ranks"
    uneven = plan_transfer("f32[7,6] on a=4,b=2: P(sum), R", "on a=4,b=2: S(0), R")
    assert str(uneven.collective) == "2 x reduce_scatter of 4 ranks" and uneven.collective_of_comm() is None


def test_a_comm_reduces_in_groups_that_make_up_all_of_its_ranks() -> None:
    made = plan_transfer("f32[8] on a=2,b=2: S(0), P(sum)", "on a=2,b=2: S(0), R")
    assert str(made.collective_of_comm()) == "2 x all_reduce of 2 ranks"
    assert made.collective_of_comm((0, 1, 2, 3, 4)) is None
    limited = plan_transfer("f32[8] on a=2: P(sum)", "on a=2: R", max_buffer_bytes=1 << 20)
    assert limited.collective_of_comm() is None
    # Sums of low precision take twice the bytes there: worth it where latency is what they cost.
    small, large = (plan_transfer(f"bf16[{n}] on x=64: P(sum)", "on x=64: R") for n in (8, 1 << 24))
    assert str(small.collective_of_comm(wider=2)) == "all_reduce of 64 ranks"
    assert large.collective_of_comm(wider=2) is None
