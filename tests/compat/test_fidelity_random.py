"""Random values of the namespace come from this rank's generator, as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from tests.compat.fidelity import Names, locals_of, numbers, ours_of, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
CASES: dict[str, Callable[[Names], Any]] = {
    "rows": lambda names: names.chunks(0),
    "columns": lambda names: names.chunks(1),
    "last dim": lambda names: names.chunks(-1),
    "reversed": lambda names: names.chunks(0, 3, 2, 1, 0),
    "several shards": lambda names: names.pieces(
        ([0, 0], [2, 3], 0), ([2, 0], [3, 6], 1), ([0, 3], [2, 3], 0), ([5, 0], [1, 6], 3)
    ),
}
SHAPE = (6, 6)


def spec_of(names: Names, case: str) -> Any:
    return CASES[case](names)


def seed() -> None:
    """A seed of this rank's own."""
    torch.manual_seed(100 + dist.get_rank())


def after(sharded: Any) -> tuple[list[Any], float]:
    """The local values, and the next number of this rank's generator: it tells how many were drawn."""
    return locals_of(sharded), torch.rand(()).item()


def create(names: Names, function: str, case: str, dtype: torch.dtype) -> Any:
    seed()
    return after(getattr(names.sharded_tensor, function)(spec_of(names, case), *SHAPE, dtype=dtype))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("function", ["rand", "randn"])
def test_rand_and_randn_draw_from_the_ranks_generator(world: Ranks, function: str, case: str) -> None:
    same_values(world, create, function, case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", ["rand", "randn"])
def test_random_values_of_each_dtype_are_those_of_a_local_tensor(
    world: Ranks, function: str, dtype: torch.dtype
) -> None:
    same_values(world, create, function, "rows", dtype)


def create_and_draw_beside(names: Names) -> bool:
    seed()
    sharded = names.sharded_tensor.randn(names.chunks(0), 8, 3)
    seed()
    return torch.equal(sharded.local_tensor(), torch.nn.init.normal_(torch.empty(2, 3)))


def test_a_shard_gets_what_a_local_tensor_of_its_size_gets(world: Ranks) -> None:
    assert same_values(world, create_and_draw_beside) == [True] * 4


def create_twice(names: Names) -> list[Any]:
    seed()
    return [locals_of(names.sharded_tensor.rand(names.chunks(0), 4, 2)) for _ in range(2)]


def test_the_next_tensor_gets_the_next_numbers(world: Ranks) -> None:
    for first, second in same_values(world, create_twice):
        assert first != second


def create_with_one_seed(names: Names) -> list[Any]:
    torch.manual_seed(5)
    return locals_of(names.sharded_tensor.rand(names.chunks(0), 4, 2))


def test_ranks_of_one_seed_and_equal_shards_hold_equal_values(world: Ranks) -> None:
    values = same_values(world, create_with_one_seed)
    assert values == [values[0]] * 4


def create_a_leaf(names: Names) -> Any:
    seed()
    sharded = names.sharded_tensor.rand(names.chunks(0), 4, 2, requires_grad=True)
    return sharded.requires_grad, sharded.local_tensor().is_leaf, after(sharded)


def test_a_random_tensor_that_requires_grad_is_a_leaf(world: Ranks) -> None:
    assert all(value[:2] == (True, True) for value in same_values(world, create_a_leaf))


def like(names: Names, function: str, case: str, options: dict[str, Any]) -> Any:
    sharded = names.sharded_tensor.zeros(spec_of(names, case), *SHAPE)
    seed()
    made = getattr(torch, function)(sharded, **options)
    return after(made), str(made.dtype), made.requires_grad


@pytest.mark.parametrize(
    ("case", "options"),
    [("rows", {"dtype": torch.float64}), ("columns", {"requires_grad": True}), ("several shards", {})],
)
@pytest.mark.parametrize("function", ["rand_like", "randn_like"])
def test_rand_like_and_randn_like_draw_from_the_ranks_generator(
    world: Ranks, function: str, case: str, options: dict[str, Any]
) -> None:
    same_values(world, like, function, case, options)


def initialise(names: Names, function: str, case: str, options: dict[str, Any]) -> Any:
    sharded = names.sharded_tensor.zeros(spec_of(names, case), *SHAPE)
    seed()
    result = getattr(torch.nn.init, function)(sharded, **options)
    return result is sharded, after(sharded)


INITS: list[tuple[str, dict[str, Any]]] = [
    ("uniform_", {}),
    ("uniform_", {"a": -2.0, "b": 3.0}),
    ("normal_", {}),
    ("normal_", {"mean": 4.0, "std": 0.5}),
    ("kaiming_uniform_", {}),
    ("kaiming_uniform_", {"a": 1.0, "mode": "fan_in", "nonlinearity": "leaky_relu"}),
    ("kaiming_uniform_", {"mode": "fan_out", "nonlinearity": "relu"}),
    ("constant_", {"val": 10}),
]


@pytest.mark.parametrize("case", ["rows", "columns", "several shards"])
@pytest.mark.parametrize(("function", "options"), INITS)
def test_init_functions_fill_each_shard_as_a_local_tensor(
    world: Ranks, function: str, options: dict[str, Any], case: str
) -> None:
    assert all(same for same, _ in same_values(world, initialise, function, case, options))


def initialise_a_parameter(names: Names) -> Any:
    linear = torch.nn.Linear(6, 8)
    names.api.shard_parameter(linear, "weight", names.chunks(0))
    seed()
    torch.nn.init.kaiming_uniform_(linear.weight, a=1.0)
    return after(linear.weight)


def test_init_functions_fill_a_sharded_parameter(world: Ranks) -> None:
    same_values(world, initialise_a_parameter)


def initialise_from_a_generator(names: Names) -> bool:
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    sharded = names.sharded_tensor.zeros(names.chunks(0), 8, 3)
    torch.nn.init.uniform_(sharded, generator=generator)
    generator.manual_seed(11 + dist.get_rank())
    return torch.equal(sharded.local_tensor(), torch.nn.init.uniform_(torch.empty(2, 3), generator=generator))


def test_a_generator_that_is_passed_is_used(world: Ranks) -> None:
    """torch's own code ignores it."""
    assert ours_of(world, initialise_from_a_generator) == [True] * 4


def draw_a_copy(names: Names) -> Any:
    """Tensors made from one of the namespace are of the namespace too."""
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    seed()
    copies = sharded.clone(), sharded.detach(), sharded.to(torch.float64)
    return [after(torch.nn.init.normal_(copy)) for copy in copies]


def test_copies_of_a_tensor_draw_in_the_same_way(world: Ranks) -> None:
    same_values(world, draw_a_copy)


def draw_in_the_core(names: Names) -> bool:
    """The native names keep numbers that do not depend on the layout, also for specs of the namespace."""
    rows, columns = (shardwise.rand(names.chunks(dim), 8, 8, seed=3) for dim in (0, 1))
    return torch.equal(rows.full(), columns.full())


def test_native_names_keep_values_that_do_not_depend_on_the_layout(world: Ranks) -> None:
    assert ours_of(world, draw_in_the_core) == [True] * 4
