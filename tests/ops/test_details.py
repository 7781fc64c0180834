"""Details of operators that one changed comparison, sign or constant would break, or make slower, unseen by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import Comm, Partial, Replicate, Shard, ShardedTensor, from_local, run_local
from shardwise.ops import explain, no_communication
from shardwise.ops.discovery import find_recombinations, widen_dtype
from shardwise.ops.registration import CONDITIONS, SHIFTS
from shardwise.ops.rules.random import _count_events
from tests.dense import BOXES, S0, S1, P, R, assert_ends_alike, assert_same, check, ends, lay, numbers


@pytest.mark.parametrize("layout", ["on tp=2: S(1)", "on tp=2: S(2)"])
def test_counts_of_a_dim_keep_later_cuts(layout: str) -> None:
    check(lambda x: torch.count_nonzero(x > 0, 0), [layout], [numbers(3, 4, 6)], grad=False)


def test_groups_are_normalized_where_a_rank_has_no_channels() -> None:
    x, weight = numbers(2, 3, 5), numbers(3, seed=1)
    check(lambda x, w: F.group_norm(x, 3, w), ["on tp=4: S(1)", "on tp=4: R"], [x, weight], world=4)


@pytest.mark.parametrize("triangle", [torch.tril, torch.triu])
def test_triangles_of_rows_in_groups(triangle: Callable[[Tensor], Tensor]) -> None:
    """Rows of several runs do not start at one row."""

    def program(x: Any) -> Any:
        return triangle(torch.cat([x, x]))  # rows of each rank in two runs

    check(program, ["on tp=2: S(0) sizes(1,2)"], [numbers(3, 6)])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_split_dim_of_one_row_gives_one_part(size: int) -> None:
    check(lambda x: x.split(size), [S0], [numbers(1, 4)])


@pytest.mark.parametrize("kernel", [torch.rand_like, torch.randn_like])
def test_random_tensors_like_others_take_all_options(kernel: Callable[..., Any]) -> None:
    def body(comm: Comm) -> None:
        x = lay(numbers(4, 4), S0)
        drawn = kernel(x, memory_format=torch.preserve_format, dtype=torch.float32, requires_grad=False)
        assert drawn.dtype == torch.float32 and drawn.sharding is x.sharding

    run_local(body, 2, timeout=60)


def test_a_mask_of_replicated_attention_stays_whole() -> None:
    q = numbers(2, 2, 4, 8)
    mask = numbers(2, 2, 4, 4) > 0
    mask[..., 0] = True
    check(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), [R, R], [q, mask])


def test_rows_of_a_pending_table_are_not_scaled() -> None:
    def body(comm: Comm) -> None:
        F.embedding(lay(torch.tensor([0, 1]), R), lay(numbers(4, 4), P), max_norm=0.1)

    assert ends(body, 2) == ["UnsupportedOpError"] * 2


def test_pieces_that_meet_a_cut_tensor_are_cut_alike() -> None:
    """The result keeps the cut, and one rank's part of each is enough."""

    def body(comm: Comm) -> None:
        x, odd = lay(numbers(4, 4), S0), lay(numbers(4, 4, seed=1), BOXES)
        x.add_(odd)
        assert_same(x, numbers(4, 4) + numbers(4, 4, seed=1))
        with explain() as log:
            x.mul_(odd)
        assert sum(entry.moved_bytes for entry in log.entries) < 3 * 16 * 8  # whole on both ranks would be more

    run_local(body, 2, timeout=60)


@pytest.mark.parametrize(
    ("function", "layout"),
    [
        (lambda x: x.unsqueeze(1).expand(-1, 3, -1), S0),
        (lambda x: x.expand(5, -1, 4), S1),
        (lambda x: x[0].index_select(0, _ids(x)), S1),
        (lambda x: x / 2, P),
        (lambda x: x.div(4.0), P),
    ],
)
def test_nothing_moves(function: Callable[[Any], Any], layout: str) -> None:
    def body(comm: Comm) -> None:
        x = lay(numbers(4, 4), layout)
        with no_communication():
            found = function(x)
        assert_same(found, function(numbers(4, 4)))

    run_local(body, 2, timeout=60)


def _ids(x: Any) -> Any:
    ids = torch.tensor([3, 0, 0])
    return lay(ids, R) if isinstance(x, ShardedTensor) else ids


def test_numbers_are_drawn_for_tensors_that_leave_out_a_rank() -> None:
    def body(comm: Comm) -> Any:
        x = lay(torch.ones(4, 4), "on tp=2: S(0)")
        return torch.dropout(x, 0.5, True)

    assert_ends_alike(body, 3)


def test_functions_without_tensors_as_results_are_asked_each_time() -> None:
    def body(comm: Comm) -> None:
        for whole in (torch.ones(4, 4), torch.zeros(4, 4), torch.full((4, 4), 2.0)):
            x = lay(whole, S0)
            assert torch.equal(x, x) and x.sum().item() == whole.sum().item()
            assert torch.allclose(x, x + 1) is False
            assert bool((x == 1).all()) == bool((whole == 1).all())

    run_local(body, 2, timeout=60)


def test_events_are_counted_at_the_edges_of_chance() -> None:
    """All events have happened with certainty at rate 0, and a chance of 0 needs no event."""
    assert _count_events(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 5.0])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("text", [*CONDITIONS, *SHIFTS])
def test_the_source_of_a_rule_means_what_was_tried(text: str) -> None:
    meant = {**CONDITIONS, **SHIFTS}[text]
    for d in range(3):
        for dim in range(3):
            assert meant(d, dim) == eval(text.format(dim=dim) or "True", {"d": d})


def test_trials_are_made_in_wide_numbers() -> None:
    wide = [widen_dtype(d) for d in (torch.complex64, torch.bfloat16, torch.int32)]
    assert wide == [torch.complex128, torch.float64, torch.int32]


def test_parts_of_another_dtype_are_not_the_whole() -> None:
    whole = torch.ones(4)
    assert Replicate() in find_recombinations([whole, whole], whole, None)
    assert find_recombinations([whole.double(), whole.double()], whole, None) == set()
    assert find_recombinations([whole[None], whole[None]], whole, None) == set()
    assert Partial("sum") in find_recombinations([whole / 2, whole / 2], whole, None)
    assert Shard(0) in find_recombinations([whole[:2], whole[2:]], whole, [2, 2])


@pytest.mark.parametrize("op", ["max", "min", "sum", "avg", "product"])
def test_a_pending_tensor_is_converted_only_to_what_its_reduction_is_defined_for(op: str) -> None:
    """Complex numbers have no largest one, and booleans no sum."""

    def body(comm: Comm) -> None:
        values = [torch.tensor([2.0, -1.0, 0.0]) + rank for rank in range(2)]
        pending = from_local([values[comm.rank]], f"on tp=2: P({op})", (3,))
        whole = pending.full()
        for dtype in (torch.complex64, torch.bool, torch.int64, torch.float64, torch.bfloat16):
            try:
                converted = pending.to(dtype)
            except ValueError as error:
                assert "do not yield the converted value" in str(error)
                continue
            torch.testing.assert_close(converted.full(), whole.to(dtype))

    run_local(body, 2, timeout=60)
