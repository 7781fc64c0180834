"""Does the planner place whole tables, split what does not fit, keep to the limit, and say so when it cannot?"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.comm import Comm, run_local
from shardwise.nn import BalancedPlanner, shard_module
from shardwise.tensor import ShardedTensor

WIDTH = 4
ROW = WIDTH * 4


def tables(*rows: int) -> nn.ModuleList:
    return nn.ModuleList(nn.EmbeddingBag(n, WIDTH, mode="sum") for n in rows)


def test_tables_go_whole_to_the_emptiest_rank() -> None:
    balance = BalancedPlanner(2).balance(tables(10, 30, 15))
    assert {p.name: p.parts for p in balance.placings} == {
        "1.weight": ((0, 30),),
        "2.weight": ((1, 15),),
        "0.weight": ((1, 10),),
    }
    assert balance.bytes_by_rank == {0: 30 * ROW, 1: 25 * ROW}
    assert balance.ratio == pytest.approx(30 / 27.5)


def test_a_table_that_does_not_fit_is_split_by_rows_over_the_emptiest() -> None:
    balance = BalancedPlanner((4, 7, 9), memory_limit=22 * ROW).balance(tables(40, 20))
    assert [p.parts for p in balance.placings] == [((7, 20), (9, 20)), ((4, 20),)]
    assert balance.bytes_by_rank == {4: 20 * ROW, 7: 20 * ROW, 9: 20 * ROW}
    assert "2 tables, 1 of them split; fullest rank / mean: 1.000" in str(balance)


def test_other_parameters_count_on_every_rank() -> None:
    net = nn.Sequential(nn.EmbeddingBag(8, WIDTH), nn.Linear(WIDTH, 2))
    balance = BalancedPlanner(2).balance(net)
    assert balance.replicated_bytes == 40 and balance.bytes_by_rank == {0: 8 * ROW + 40, 1: 40}
    assert list(BalancedPlanner(2, is_table=lambda name, _: name.endswith("weight")).build_plan(net).plan) == [
        "0.weight",
        "1.weight",
    ]
    assert BalancedPlanner(1, bytes_per_byte=3).balance(net).bytes_by_rank == {0: 3 * (8 * ROW + 40)}


def test_limits_that_cannot_be_kept_are_told_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"640 bytes do not fit in 2 ranks of 300 bytes.* at least 320 bytes"):
        BalancedPlanner(2, 300).build_plan(tables(40))
    with pytest.raises(ValueError, match=r"0.weight has 3 rows of 16 bytes, and the ranks have room for 2 of them"):
        BalancedPlanner(2, 31).build_plan(tables(3))
    with pytest.raises(ValueError, match=r"a list of different ranks; got \[1, 1\]"):
        BalancedPlanner([1, 1])


def test_rows_that_are_left_over_go_to_the_emptiest_with_room() -> None:
    # 7 rows over loads of 4, 2 and 0 rows level them at 4; the one that is left over goes to the first of equals.
    balance = BalancedPlanner(3, memory_limit=5 * ROW).balance(tables(7, 4, 2))
    assert [p.parts for p in balance.placings] == [((0, 1), (1, 2), (2, 4)), ((0, 4),), ((1, 2),)]
    assert balance.bytes_by_rank == {0: 5 * ROW, 1: 4 * ROW, 2: 4 * ROW}


@settings(max_examples=30)
@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 5), st.integers(0, 40))
def test_plans_cover_every_row_once_and_keep_to_the_limit(rows: list[int], ranks: int, spare: int) -> None:
    with torch.device("meta"):
        net = tables(*rows)
    limit = (sum(rows) // ranks + 1 + spare) * ROW
    balance = BalancedPlanner(ranks, limit).balance(net)
    assert max(balance.bytes_by_rank.values()) <= limit
    assert sum(balance.bytes_by_rank.values()) == sum(rows) * ROW
    for placing in balance.placings:
        layout = placing.spec().layout(placing.shape)
        held = layout.bytes_per_rank(4)
        assert sum(held.values()) == placing.shape[0] * ROW


def test_a_planned_collection_looks_up_as_the_whole_one() -> None:
    torch.manual_seed(0)
    net = tables(9, 40, 3)
    copies = [copy.deepcopy(net) for _ in range(3)]

    def ids(rank: int, table: nn.Module) -> Tensor:
        rows = next(table.parameters()).shape[0]
        return torch.arange(rank, rank + 6).reshape(2, 3) % rows

    def body(comm: Comm) -> list[Tensor]:
        mine = copies[comm.rank]
        shard_module(mine, BalancedPlanner(3, memory_limit=20 * ROW).build_plan(mine))
        assert all(isinstance(table.weight, ShardedTensor) for table in mine)
        return [table(ids(comm.rank, table)).detach() for table in mine]

    for rank, found in enumerate(run_local(body, 3)):
        for table, result in zip(net, found, strict=True):
            torch.testing.assert_close(result, table(ids(rank, table)).detach())
