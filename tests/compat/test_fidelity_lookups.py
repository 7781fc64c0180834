"""Tables of the namespace are looked up with this rank's own plain ids, in functions and modules alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compat.fidelity import Names, locals_of, ours_of, same_errors, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
ROWS, COLUMNS = 10, 6
SPECS: dict[str, Callable[[Names], Any]] = {
    "rows": lambda names: names.chunks(0),
    "columns": lambda names: names.chunks(1),
    "rows in another order": lambda names: names.chunks(0, 2, 0, 3, 1),
    "columns in another order": lambda names: names.chunks(1, 3, 1, 0, 2),
}


def table(requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, COLUMNS, generator=generator).requires_grad_(requires_grad)


def ids(*shape: int) -> Tensor:
    """Other ids on each rank."""
    generator = torch.Generator().manual_seed(20 + dist.get_rank())
    return torch.randint(ROWS, shape, generator=generator)


def rounded(value: Tensor) -> list[Any]:
    return list((value.detach() * 1e4).round().div(1e4).add(0.0).tolist())


def call(weight: Any, function: str, options: dict[str, Any]) -> Tensor:
    """A lookup with this rank's ids, as one of the kinds of calls below."""
    if function == "embedding":
        return F.embedding(ids(3, 4), weight, **options)
    if function == "bags of a matrix":
        return F.embedding_bag(ids(3, 4), weight, **options)
    if function == "weighted bags of a matrix":
        return F.embedding_bag(ids(3, 4), weight, per_sample_weights=torch.arange(12.0).reshape(3, 4), **options)
    offsets = torch.tensor([0, 2, 5] if not options.get("include_last_offset") else [0, 2, 5, 7])
    if function == "weighted bags with offsets":
        options = {"per_sample_weights": torch.arange(7.0), **options}
    return F.embedding_bag(ids(7), weight, offsets, **options)


def look_up(names: Names, spec: str, function: str, options: dict[str, Any]) -> tuple[str, list[Any], list[Any]]:
    """The kind of the result, its values, and the local part of the table afterwards (max_norm changes it)."""
    weight = names.shard(table(), SPECS[spec](names))
    result = call(weight, function, options)
    return type(result).__name__, rounded(result), [rounded(shard.tensor) for shard in weight.local_shards()]


def expected(function: str, options: dict[str, Any]) -> list[Any]:
    """On one rank: the same call on the whole table."""
    return rounded(call(table(), function, options))


LOOKUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedding": ("embedding", {}),
    "embedding, padding_idx": ("embedding", {"padding_idx": 4}),
    "embedding, max_norm": ("embedding", {"max_norm": 1.5}),
    "embedding, max_norm and norm_type": ("embedding", {"max_norm": 2.0, "norm_type": 1.0}),
    "bags, mean": ("bags of a matrix", {}),
    "bags, sum": ("bags of a matrix", {"mode": "sum"}),
    "bags, max": ("bags of a matrix", {"mode": "max"}),
    "bags, max_norm": ("bags of a matrix", {"mode": "sum", "max_norm": 1.5}),
    "bags, padding_idx": ("bags of a matrix", {"mode": "sum", "padding_idx": 4}),
    "bags, mean and padding_idx": ("bags of a matrix", {"mode": "mean", "padding_idx": 4}),
    "bags, per_sample_weights": ("weighted bags of a matrix", {"mode": "sum"}),
    "offsets, mean": ("bags with offsets", {"mode": "mean"}),
    "offsets, sum": ("bags with offsets", {"mode": "sum"}),
    "offsets, max": ("bags with offsets", {"mode": "max"}),
    "offsets, include_last_offset": ("bags with offsets", {"mode": "sum", "include_last_offset": True}),
    "offsets, per_sample_weights": ("weighted bags with offsets", {"mode": "sum"}),
    "offsets, max_norm": ("bags with offsets", {"mode": "sum", "max_norm": 1.5}),
}


CASES = [(lookup, spec) for lookup in LOOKUPS for spec in ("rows", "columns")]
CASES += [
    (lookup, f"{dim} in another order")
    for lookup in ("embedding, max_norm", "bags, max")
    for dim in ("rows", "columns")
]


@pytest.mark.parametrize(("lookup", "spec"), CASES)
def test_functions_look_up_this_ranks_own_ids(world: Ranks, lookup: str, spec: str) -> None:
    function, options = LOOKUPS[lookup]
    values = same_values(world, look_up, spec, function, options)
    assert [value[:2] for value in values] == [("Tensor", part) for part in world.run(expected, function, options)]


def gradients(names: Names, spec: str, function: str) -> list[Any]:
    weight = names.shard(table(requires_grad=True), SPECS[spec](names))
    call(weight, function, {}).square().sum().backward()
    return [rounded(shard.tensor.grad) for shard in weight.local_shards() if shard.tensor.numel()]


@pytest.mark.parametrize("spec", ["rows", "columns"])
@pytest.mark.parametrize("function", ["embedding", "bags of a matrix"])
def test_gradients_of_all_ranks_ids_reach_the_local_shards(world: Ranks, function: str, spec: str) -> None:
    same_values(world, gradients, spec, function)


def module_of(names: Names, kind: str, weight: Any, options: dict[str, Any]) -> Any:
    made: Any = getattr(nn, kind)(ROWS, COLUMNS, **options)
    made.weight = nn.Parameter(weight)
    return made


def look_up_in_a_module(names: Names, kind: str, spec: str, options: dict[str, Any]) -> list[Any]:
    module = module_of(names, kind, names.shard(table(), SPECS[spec](names)), options)
    return rounded(module(ids(3, 4)))


@pytest.mark.parametrize("spec", ["rows", "columns"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Embedding", {}),
        ("Embedding", {"max_norm": 1.5, "padding_idx": 2}),
        ("EmbeddingBag", {"mode": "sum"}),
        ("EmbeddingBag", {"mode": "max"}),
        ("EmbeddingBag", {"mode": "mean", "max_norm": 1.5}),
    ],
)
def test_modules_given_a_sharded_weight_look_up_own_ids(
    world: Ranks, kind: str, options: dict[str, Any], spec: str
) -> None:
    """Not by shard_parameter or shard_module: the weight is assigned."""
    same_values(world, look_up_in_a_module, kind, spec, options)


def look_up_in_a_loaded_module(names: Names) -> list[Any]:
    module, other = nn.Embedding(ROWS, COLUMNS), nn.Embedding(ROWS, COLUMNS)
    names.api.shard_parameter(module, "weight", names.chunks(0))
    other.weight = nn.Parameter(module.state_dict()["weight"])
    expected = rounded(module(ids(3)))
    return [rounded(other(ids(3))) == expected, rounded(F.embedding(ids(3), module.weight)) == expected]


def test_a_weight_of_a_state_dict_is_looked_up(world: Ranks) -> None:
    assert same_values(world, look_up_in_a_loaded_module) == [[True, True]] * 4


def look_up_created(names: Names) -> list[Any]:
    filled = names.sharded_tensor.full(names.chunks(0), (ROWS, COLUMNS), 3.0)
    shard = names.sharded_tensor.Shard.from_tensor_and_offsets(
        torch.full((2, COLUMNS), float(dist.get_rank())), [2 * dist.get_rank(), 0], dist.get_rank()
    )
    joined = names.sharded_tensor.init_from_local_shards([shard], 8, COLUMNS)
    return [F.embedding(ids(3) % 8, weight).tolist() for weight in (filled, joined)]


def test_tables_made_in_other_ways_are_looked_up(world: Ranks) -> None:
    same_values(world, look_up_created)


def look_up_after_reshard(names: Names) -> list[Any]:
    weight = names.shard(torch.arange(48.0).reshape(8, 6), names.chunks(0))
    weight.reshard(names.chunks(0, 1, 0, 3, 2))
    return list(F.embedding(ids(4) % 8, weight).tolist())


def test_a_resharded_table_is_looked_up(world: Ranks) -> None:
    same_values(world, look_up_after_reshard)


def look_up_pieces(names: Names) -> bool:
    """torch's code takes one chunk on each rank only."""
    spec = names.pieces(([0, 0], [4, 6], 1), ([4, 0], [6, 2], 0), ([4, 2], [6, 4], 1))
    weight = names.sharded_tensor.empty(spec, ROWS, COLUMNS)
    for shard in weight.local_shards():
        (top, left), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(table()[top : top + height, left : left + width])
    return torch.equal(F.embedding(ids(5), weight), F.embedding(ids(5), table()))


def test_a_table_of_any_spec_is_looked_up(world: Ranks) -> None:
    assert ours_of(world, look_up_pieces) == [True] * 4


def look_up_batches_of_each_length(names: Names) -> bool:
    """torch's code needs ids of one shape on all ranks."""
    weight = names.shard(table(), names.chunks(0))
    own = ids(dist.get_rank() + 1)
    return torch.equal(F.embedding(own, weight), F.embedding(own, table()))


def test_ranks_look_up_batches_of_different_lengths(world: Ranks) -> None:
    assert ours_of(world, look_up_batches_of_each_length) == [True] * 4


def look_up_a_missing_row(names: Names, function: str, row: int) -> None:
    weight = names.shard(table(), names.chunks(0))
    getattr(F, function)(torch.tensor([[0, row]]), weight)


@pytest.mark.parametrize("row", [ROWS, -1])
@pytest.mark.parametrize("function", ["embedding", "embedding_bag"])
def test_ids_out_of_range_are_refused_as_values(world: Ranks, function: str, row: int) -> None:
    same_errors(world, look_up_a_missing_row, function, row, words=("ndex out of range in",))


def bag(names: Names, options: dict[str, Any]) -> None:
    F.embedding_bag(torch.zeros(4, dtype=torch.int64), names.shard(table(), names.chunks(0)), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ("offsets",)),
        ({"offsets": torch.tensor([0]), "mode": "median"}, ("mode", "median")),
        ({"offsets": torch.tensor([0, 2]), "include_last_offset": True}, ("include_last_offset",)),
        (
            {"offsets": torch.tensor([0]), "mode": "sum", "per_sample_weights": torch.ones(3)},
            ("per_sample_weights",),
        ),
    ],
)
def test_wrong_bags_are_refused_as_values(world: Ranks, options: dict[str, Any], words: tuple[str, ...]) -> None:
    same_errors(world, bag, options, words=words)


def local_rows(names: Names) -> list[Any]:
    weight = names.shard(table(), names.chunks(0))
    F.embedding(ids(4), weight, max_norm=0.5)
    return [rounded(torch.tensor(part)) for part in locals_of(weight)]


def test_max_norm_changes_the_looked_up_rows_of_all_ranks_in_place(world: Ranks) -> None:
    same_values(world, local_rows)
