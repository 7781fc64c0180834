"""torch.equal and torch.allclose of two tensors of the namespace.

torch's own code asks for the current accelerator to exchange its answers; here it is given the CPU, so that it runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.compat.fidelity import Names, numbers, ours_of, same_errors, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)


def rows(names: Names, values: torch.Tensor | None = None, **options: Any) -> Any:
    return names.shard(numbers(8, 4) if values is None else values, names.chunks(0), **options)


def changed_on(rank: int, by: float = 1.0) -> torch.Tensor:
    """Values that differ in the rows of one rank."""
    values = numbers(8, 4)
    values[2 * rank, 0] += by
    return values


def empty_on_rank_2(names: Names) -> Any:
    return names.sharded_tensor.ones(names.chunks(0, 0, 1, 3), 6)


PAIRS: dict[str, tuple[Callable[[Names], tuple[Any, Any]], bool]] = {
    "the same tensor": (lambda names: (made := rows(names), made), True),
    "equal values": (lambda names: (rows(names), rows(names)), True),
    "a copy": (lambda names: (made := rows(names), copy.deepcopy(made)), True),
    "a clone": (lambda names: (made := rows(names), made.clone()), True),
    "values that differ on the first rank": (lambda names: (rows(names), rows(names, changed_on(0))), False),
    "values that differ on the last rank": (lambda names: (rows(names), rows(names, changed_on(3))), False),
    "values that differ a little": (lambda names: (rows(names), rows(names, changed_on(1, 0.01))), False),
    "another dim": (lambda names: (rows(names), names.shard(numbers(8, 4), names.chunks(1))), False),
    "another order of ranks": (
        lambda names: (rows(names), names.shard(numbers(8, 4), names.chunks(0, 1, 0, 2, 3))),
        False,
    ),
    "other values in another order of ranks": (
        lambda names: (rows(names), names.shard(numbers(8, 4).flip(0), names.chunks(0, 3, 2, 1, 0))),
        False,
    ),
    "another shape": (lambda names: (rows(names), rows(names, numbers(8, 5))), False),
    "another shape of as many elements": (lambda names: (rows(names), rows(names, numbers(4, 8))), False),
    "another number of dims": (lambda names: (rows(names), rows(names, numbers(8))), False),
    "another dtype": (lambda names: (rows(names), rows(names, numbers(8, 4, dtype=torch.float64))), False),
    "another requires_grad": (lambda names: (rows(names), rows(names).requires_grad_()), False),
    "the same requires_grad": (lambda names: (rows(names).requires_grad_(), rows(names).requires_grad_()), True),
    "a detached tensor": (lambda names: (made := rows(names).requires_grad_(), made.detach()), False),
    "other pieces": (
        lambda names: (
            names.sharded_tensor.ones(names.chunks(0), 8),
            names.sharded_tensor.ones(names.pieces(*[([2 * r], [2], 3 - r) for r in range(4)]), 8),
        ),
        False,
    ),
    "several shards on a rank": (
        lambda names: (
            names.sharded_tensor.ones(names.chunks(0, 0, 1, 2, 3, 0, 1, 2, 3), 16),
            names.sharded_tensor.ones(names.chunks(0, 0, 1, 2, 3, 0, 1, 2, 3), 16),
        ),
        True,
    ),
    "ranks without shards": (lambda names: (empty_on_rank_2(names), empty_on_rank_2(names)), True),
    "resharded alike": (
        lambda names: (
            rows(names).reshard(names.chunks(1)),
            rows(names).reshard(names.chunks(0, 3, 2, 1, 0)).reshard(names.chunks(1)),
        ),
        True,
    ),
    "resharded and not": (lambda names: (rows(names).reshard(names.chunks(1)), rows(names)), False),
}


def compare(names: Names, key: str, function: str, options: dict[str, Any]) -> bool:
    one, other = PAIRS[key][0](names)
    with patch("torch.accelerator.current_device_index", return_value="cpu"):
        return bool(getattr(torch, function)(one, other, **options))


@pytest.mark.parametrize("function", ["equal", "allclose"])
@pytest.mark.parametrize("key", PAIRS)
def test_two_tensors_are_compared_with_their_metadata(world: Ranks, key: str, function: str) -> None:
    assert same_values(world, compare, key, function, {}) == [PAIRS[key][1]] * 4


@pytest.mark.parametrize(
    ("options", "close"), [({"atol": 0.1}, True), ({"rtol": 0.5}, True), ({"atol": 0.0, "rtol": 1e-6}, False)]
)
def test_allclose_takes_tolerances(world: Ranks, options: dict[str, float], close: bool) -> None:
    assert same_values(world, compare, "values that differ a little", "allclose", options) == [close] * 4


def compare_nans(names: Names, equal_nan: bool) -> bool:
    values = numbers(8, 4)
    values[5, 1] = float("nan")
    with patch("torch.accelerator.current_device_index", return_value="cpu"):
        return bool(torch.allclose(rows(names, values), rows(names, values), equal_nan=equal_nan))


@pytest.mark.parametrize("equal_nan", [True, False])
def test_allclose_takes_equal_nan(world: Ranks, equal_nan: bool) -> None:
    assert same_values(world, compare_nans, equal_nan) == [equal_nan] * 4


def compare_with_positional_tolerances(names: Names) -> bool:
    """torch's own code takes two arguments by position."""
    return bool(torch.allclose(rows(names), rows(names, changed_on(1, 0.01)), 0.0, 0.1))


def test_allclose_takes_tolerances_by_position(world: Ranks) -> None:
    assert ours_of(world, compare_with_positional_tolerances) == [True] * 4


def compare_in_two_groups(names: Names, function: str) -> bool:
    twin = dist.new_group(range(4))
    return bool(getattr(torch, function)(rows(names), rows(names, process_group=twin)))


@pytest.mark.parametrize("function", ["equal", "allclose"])
def test_tensors_of_two_groups_are_not_compared(world: Ranks, function: str) -> None:
    words = ("All distributed tensors should use the same ProcessGroup",)
    same_errors(world, compare_in_two_groups, function, words=words)


def compare_in_a_group(names: Names) -> bool:
    """Members of a group compare without rank 0, where torch answers True at once."""
    group = dist.new_group((1, 2, 3))
    one, other = (names.sharded_tensor.ones(names.chunks(0, 1, 2, 3), 6, process_group=group) for _ in range(2))
    with patch("torch.accelerator.current_device_index", return_value="cpu"):
        return bool(torch.equal(one, other))


def test_tensors_of_a_group_are_compared_by_its_members(world: Ranks) -> None:
    assert same_values(world, compare_in_a_group) == [True] * 4


def compare_metadata_alone(names: Names) -> list[bool]:
    """Equality of specs and metadata, on which that of tensors rests."""
    spec = names.chunks(0)
    placements = [f"rank:{rank}/cpu" for rank in range(4)]
    same = names.sharding_spec.ChunkShardingSpec(0, placements)
    other = names.sharding_spec.ChunkShardingSpec(-2, placements)
    pieces = names.pieces(([0], [2], 0), ([2], [2], 1)), names.pieces(([2], [2], 1), ([0], [2], 0))
    properties = names.sharded_tensor.TensorProperties
    return [
        spec == same,
        spec == other,
        pieces[0] == pieces[1],
        spec == pieces[0],
        names.piece([0], [2], 1) == names.piece([0], [2], 1),
        names.piece([0], [2], 1) == names.piece([0], [2], 0),
        hash(names.piece([0], [2], 1)) == hash(names.piece([0], [2], 1)),
        properties(dtype=torch.int8) == properties(dtype=torch.int8),
        properties(dtype=torch.int8) == properties(dtype=torch.int16),
    ]


def test_specs_and_metadata_are_compared(world: Ranks) -> None:
    same_values(world, compare_metadata_alone)
