"""Errors of methods, functions and modules on tensors of the namespace: torch's classes and key words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.fidelity import Names, both, numbers, same_errors, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
Program = Callable[[Names], Any]


def fail(names: Names, table: str, key: str) -> None:
    TABLES[table][key][0](names)


def rows(names: Names, *size: int, **options: Any) -> Any:
    return names.shard(numbers(*(size or (8, 3))), names.chunks(0), **options)


def two_shards(names: Names) -> Any:
    """Two shards on each rank."""
    return names.sharded_tensor.zeros(names.chunks(0, 0, 1, 2, 3, 0, 1, 2, 3), 16)


def twins(names: Names) -> tuple[Any, Any]:
    """Equal tensors of two groups of the same ranks."""
    group = dist.new_group(range(4))
    return rows(names), rows(names, process_group=group)


# Sizes


def sizes(names: Names) -> list[Any]:
    sharded = rows(names)
    return [list(sharded.size()), sharded.size(0), sharded.size(-1), sharded.size(dim=1), sharded.dim(), sharded.ndim]


def test_sizes_of_dims(world: Ranks) -> None:
    assert same_values(world, sizes) == [[[8, 3], 8, 3, 3, 2, 2]] * 4


def size_of(names: Names, dim: int) -> None:
    rows(names).size(dim)


@pytest.mark.parametrize("dim", [2, -3, 100])
def test_the_size_of_a_missing_dim_is_an_index_error(world: Ranks, dim: int) -> None:
    words = ("Dimension out of range", "expected to be in range of [-2, 1]", f"got {dim}")
    same_errors(world, size_of, dim, words=words)


# Methods

METHODS: dict[str, tuple[Program, tuple[str, ...]]] = {
    "local_tensor of two shards": (
        lambda names: two_shards(names).local_tensor(),
        ("Only single local shard is supported", "Number of shards: 2"),
    ),
    "references that were not asked for": (
        lambda names: rows(names).remote_shards(),
        ("ShardedTensor created with init_rrefs=False, no RRefs to remote shards available",),
    ),
    "to of a wrong argument": (lambda names: rows(names).to([1]), ()),
    "to an unknown device": (lambda names: rows(names).to("nowhere"), ("device",)),
    "cpu of another memory format": (
        lambda names: rows(names).cpu(memory_format=torch.channels_last),
        ("torch.contiguous_format", "torch.preserve_format"),
    ),
    "clone of another memory format": (
        lambda names: rows(names).clone(memory_format=torch.channels_last),
        ("torch.preserve_format",),
    ),
    "type_as of something that is not a tensor": (lambda names: rows(names).type_as(3), ()),
    "a state without a tensor": (lambda names: rows(names).__setstate__((1, 2)), ()),
}


@pytest.mark.parametrize("key", METHODS)
def test_errors_of_methods(world: Ranks, key: str) -> None:
    same_errors(world, fail, "methods", key, words=METHODS[key][1])


def gather_without_out(names: Names) -> None:
    """Before anything is sent, the destination raises; the others must not be left waiting for it."""
    check = names.module("sharded_tensor.utils")._validate_output_tensor_for_gather
    check(dist.get_rank(), dist.get_rank(), torch.Size([8, 3]), None)


def gather_into_a_wrong_size(names: Names) -> None:
    check = names.module("sharded_tensor.utils")._validate_output_tensor_for_gather
    check(0, 0, torch.Size([8, 3]), torch.zeros(3, 8))


def gather_with_out_elsewhere(names: Names) -> None:
    check = names.module("sharded_tensor.utils")._validate_output_tensor_for_gather
    check(0, 1, torch.Size([1]), torch.ones(1))


def test_errors_of_the_check_of_gather(world: Ranks) -> None:
    words = ("Argument ``dst_tensor`` must be specified on destination rank",)
    same_errors(world, gather_without_out, words=words)
    same_errors(world, gather_into_a_wrong_size, words=("Argument ``dst_tensor`` have size (3, 8)", "should be (8, 3)"))
    words = ("Argument ``dst_tensor`` must NOT be specified on non-destination ranks",)
    same_errors(world, gather_with_out_elsewhere, words=words)


def gather_wrongly(names: Names, size: tuple[int, ...]) -> None:
    """Every rank passes a tensor for the result, so every rank raises."""
    rows(names, 4).gather(dist.get_rank(), torch.ones(size))


def test_gather_into_a_tensor_of_another_size_is_refused(world: Ranks) -> None:
    same_errors(world, gather_wrongly, (5,), words=("Argument ``dst_tensor`` have size (5,)", "should be (4,)"))


# Functions

FUNCTIONS: dict[str, tuple[Program, tuple[str, ...]]] = {
    "equal in two groups": (
        lambda names: torch.equal(*twins(names)),
        ("All distributed tensors should use the same ProcessGroup if used together in an op",),
    ),
    "allclose in two groups": (
        lambda names: torch.allclose(*twins(names)),
        ("All distributed tensors should use the same ProcessGroup if used together in an op",),
    ),
    "copy_ in two groups": (
        lambda names: twins(names)[0].copy_(twins(names)[1]),
        ("All distributed tensors should use the same ProcessGroup if used together in an op",),
    ),
    "an operator on tensors of two groups": (
        lambda names: custom_operator(names)(*twins(names)),
        ("All distributed tensors should use the same ProcessGroup if used together in an op",),
    ),
    "equal with a plain tensor": (
        lambda names: torch.equal(rows(names), numbers(8, 3)),
        ("Both arguments to torch.equal need to be of type ShardedTensor",),
    ),
    "allclose with a plain tensor": (
        lambda names: torch.allclose(numbers(8, 3), rows(names)),
        ("Both arguments to torch.allclose need to be of type ShardedTensor",),
    ),
    "an algorithm without a rule": (lambda names: torch.lobpcg(rows(names, 8, 8)), ("ShardedTensor",)),
    "validation of nothing": (
        lambda names: names.common_op_utils._basic_validation(torch.add),
        ("No input for 'add'!",),
    ),
    "validation without a sharded tensor": (
        lambda names: names.common_op_utils._basic_validation(torch.add, (torch.ones(1),)),
        ("torch function 'add'", "called without any distributed tensor!"),
    ),
    "an operator function of three arguments": (
        lambda names: names.op_registry_utils._register_op(torch.add, lambda types, args, kwargs: None, {}),
        ("Custom sharded op function expects signature", "(types, args, kwargs, process_group)"),
    ),
    "an operator that no spec has": (
        lambda names: names.module("sharding_spec.api")._dispatch_custom_op(
            names.chunks(0), torch.atanh, (), (), {}, None
        ),
        ("Custom op", "not registered for ChunkShardingSpec"),
    ),
    "a rank that no placement names": (
        lambda names: names.module("sharded_tensor.reshard").get_idx_from_placements(names.chunks(0).placements, 9),
        ("current_rank not in the placement.",),
    ),
    "references for a tensor that is gone": (
        lambda names: names.module("sharded_tensor.api")._register_remote_shards(10**6, [], 1),
        ("Could not find sharded_tensor_id: 1000000 in map",),
    ),
    "no remote device": (
        lambda names: names.module("sharded_tensor.utils")._parse_and_validate_remote_device(dist.group.WORLD, None),
        ("remote device is None",),
    ),
    "init with a parameter of None": (lambda names: torch.nn.init.uniform_(rows(names), None, 1.0), ()),
}


def custom_operator(names: Names) -> Callable[..., Any]:
    names.sharded_tensor.custom_sharded_op_impl(torch.hypot)(lambda types, args, kwargs, process_group: 5)
    return torch.hypot


@pytest.mark.parametrize("key", FUNCTIONS)
def test_errors_of_functions(world: Ranks, key: str) -> None:
    same_errors(world, fail, "functions", key, words=FUNCTIONS[key][1])


# Modules


class Swap:
    """A sharder of each package, made where it is used."""

    @staticmethod
    def of(names: Names) -> Any:
        class Doubled(names.sharder.Sharder):  # type: ignore[name-defined,misc]  # one class of each package
            def shard(self, module: nn.Module) -> nn.Module:
                return module

        return Doubled()


def plan(names: Names, *args: Any, **options: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names.api.shard_module(model, names.sharding_plan.ShardingPlan(*args, **options))


def with_transposed_weight() -> nn.Module:
    model = nn.Linear(4, 8)
    model.weight = nn.Parameter(numbers(4, 8).t())
    return model


MODULES: dict[str, tuple[Program, tuple[str, ...]]] = {
    "a missing parameter": (
        lambda names: names.api.shard_parameter(nn.Linear(4, 4), "scale", names.chunks(0)),
        ("Linear has no attribute `scale`",),
    ),
    "a parameter that is not a tensor": (
        lambda names: names.api.shard_parameter(nn.Linear(4, 4), "in_features", names.chunks(0)),
        ("Expected Linear.in_features to be a Tensor, but found int",),
    ),
    "no bias": (
        lambda names: names.api.shard_parameter(nn.Linear(4, 4, bias=False), "bias", names.chunks(0)),
        ("Expected Linear.bias to be a Tensor, but found NoneType",),
    ),
    "a parameter that is not contiguous": (
        lambda names: names.api.shard_parameter(with_transposed_weight(), "weight", names.chunks(0)),
        ("param: weight is not a contiguous Tensor",),
    ),
    "a parameter with different sources": (
        lambda names: names.api.shard_parameter(nn.Linear(4, 4), "weight", names.chunks(0), src_rank=dist.get_rank()),
        ("does not match with src_rank=",),
    ),
    "a parameter with different specs": (
        lambda names: names.api.shard_parameter(nn.Linear(4, 4), "weight", names.chunks(dist.get_rank() % 2)),
        ("does not match with sharding_spec=",),
    ),
    "a plan that holds a text": (
        lambda names: plan(names, {"0.weight": "rows"}),
        ("Only `ShardingSpec` and `Sharder` are supported to shard '0.weight'",),
    ),
    "a plan of a missing module": (lambda names: plan(names, {"5.weight": names.chunks(0)}), ("5",)),
    "a plan of a missing parameter": (
        lambda names: plan(names, {"0.scale": names.chunks(0)}),
        ("Linear has no attribute `scale`",),
    ),
    "a plan whose sharder covers a parameter": (
        lambda names: plan(names, {"0": Swap.of(names), "0.weight": names.chunks(0)}),
        ("trying to shard a parameter: 0.weight", "already a Sharder entry for module 0"),
    ),
    "a sharder for the root": (
        lambda names: plan(names, {"": Swap.of(names)}),
        ("Module path must not be empty for custom sharder!",),
    ),
    "an output plan that holds a text": (
        lambda names: plan(names, {}, output_plan={"0": "rows"}),
        ("Only `ShardingSpec` is supported as output_plan for '0'",),
    ),
    "an output plan of a missing module": (
        lambda names: plan(names, {}, output_plan={"7": names.chunks(0)}),
        ("7",),
    ),
    "local results of a missing module": (lambda names: plan(names, {}, return_local_tensor=["7"]), ("7",)),
}


@pytest.mark.parametrize("key", MODULES)
def test_errors_of_modules(world: Ranks, key: str) -> None:
    same_errors(world, fail, "modules", key, words=MODULES[key][1])


def copy_across(names: Names) -> Any:
    """torch refuses; a copy between layouts moves the values here."""
    columns = names.sharded_tensor.zeros(names.chunks(1), 4, 4)
    columns.copy_(names.shard(numbers(4, 4), names.chunks(0)))
    return columns.local_tensor().tolist()


def test_a_copy_between_two_layouts_moves_the_values(world: Ranks) -> None:
    theirs, ours = both(world, copy_across)
    assert all("inplace copy can only happen between two ShardedTensor with same metadata" in e.text for e in theirs)
    assert [ended.shown for ended in ours] == [numbers(4, 4)[:, rank : rank + 1].tolist() for rank in range(4)]


TABLES = {"methods": METHODS, "functions": FUNCTIONS, "modules": MODULES}
