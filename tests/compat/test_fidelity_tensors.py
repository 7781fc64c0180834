"""Properties, conversions, copies and gather of tensors of the namespace beside torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.fidelity import Names, described, locals_of, numbers, ours_of, same_errors, same_values
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
Program = Callable[[Names], Any]


def run(names: Names, table: str, key: str) -> Any:
    return TABLES[table][key](names)


def rows(names: Names, *size: int, requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    values = numbers(*(size or (8, 3)), dtype=dtype).requires_grad_(requires_grad)
    return names.shard(values, names.chunks(0))


def facts(sharded: Any) -> list[Any]:
    """What tells two tensors apart, apart from their values."""
    local = sharded.local_shards()[0].tensor if sharded.local_shards() else None
    told = sharded.metadata().tensor_properties
    return [
        type(sharded).__name__,
        list(sharded.size()),
        str(sharded.dtype),
        str(sharded.device),
        sharded.requires_grad,
        type(sharded.sharding_spec()).__name__,
        described(sharded.metadata()),
        [str(told.dtype), told.requires_grad, told.pin_memory],
        None if local is None else [local.requires_grad, local.is_leaf],
        locals_of(sharded),
    ]


# Properties

PROPERTIES: dict[str, Program] = {
    "device": lambda names: str(rows(names).device),
    "is_meta": lambda names: rows(names).is_meta,
    "is_pinned": lambda names: rows(names).is_pinned(),
    "grad": lambda names: str(rows(names, requires_grad=True).grad),
    "grad_fn": lambda names: str(rows(names, requires_grad=True).grad_fn),
    "is_leaf": lambda names: [rows(names).is_leaf, rows(names, requires_grad=True).is_leaf],
    "is_contiguous": lambda names: rows(names).is_contiguous(),
    "contiguous": lambda names: (made := rows(names), made.contiguous() is made)[1],
    "is_floating_point": lambda names: [
        rows(names).is_floating_point(),
        rows(names, dtype=torch.int64).is_floating_point(),
    ],
    "shape": lambda names: [rows(names).shape == torch.Size([8, 3]), type(rows(names).size()).__name__],
    "hash": lambda names: (made := rows(names), [hash(made) == id(made), made in {made}])[1],
    "isinstance": lambda names: [isinstance(rows(names), torch.Tensor), isinstance(rows(names), torch.nn.Parameter)],
    "preferred device": lambda names: str(rows(names)._get_preferred_device()),
    "requires_grad_": lambda names: (made := rows(names), [made.requires_grad_() is made, facts(made)])[1],
    "requires_grad_ of False": lambda names: facts(rows(names, requires_grad=True).requires_grad_(False)),
    "a sharded leaf": lambda names: facts(rows(names, requires_grad=True)),
    "its spec": lambda names: (spec := names.chunks(0), names.shard(numbers(8), spec).sharding_spec() is spec)[1],
    "the spec of a created tensor": lambda names: (
        spec := names.chunks(0),
        names.sharded_tensor.zeros(spec, 8).sharding_spec() is spec,
    )[1],
    "the default dtype": lambda names: str(names.sharded_tensor.full(names.chunks(0), (8,), 7).dtype),
    "creation by a Size": lambda names: facts(names.sharded_tensor.ones(names.chunks(0), torch.Size([8, 2]))),
    "creation by a list": lambda names: facts(names.sharded_tensor.zeros(names.chunks(0), [8, 2], dtype=torch.int8)),
    "creation of a leaf": lambda names: facts(names.sharded_tensor.ones(names.chunks(0), 8, requires_grad=True)),
    "creation on fewer ranks": lambda names: [
        len(names.sharded_tensor.ones(names.chunks(0, 2, 0), 8).local_shards()),
        locals_of(names.sharded_tensor.ones(names.chunks(0, 2, 0), 8)),
    ],
    "creation on meta": lambda names: [
        names.sharded_tensor.zeros(
            names.sharding_spec.ChunkShardingSpec(0, [f"rank:{rank}/meta" for rank in range(4)]), 8
        )
        .local_tensor()
        .is_meta
    ],
    "in a group, by the number in the group": lambda names: shard_in_a_group(names),
}


def shard_in_a_group(names: Names) -> Any:
    """The source is counted in the group: 1 is rank 3."""
    group = dist.new_group((2, 3))
    if dist.get_rank() < 2:
        return None
    return locals_of(names.shard(numbers(4) + dist.get_rank(), names.chunks(0, 2, 3), src_rank=1, process_group=group))


@pytest.mark.parametrize("key", PROPERTIES)
def test_properties(world: Ranks, key: str) -> None:
    same_values(world, run, "properties", key)


# Conversions


def converted(names: Names, *args: Any, **options: Any) -> list[Any]:
    made = rows(names)
    result = made.to(*args, **options)
    return [result is made, facts(result), facts(made)[2]]


CONVERSIONS: dict[str, Program] = {
    "to the same dtype": lambda names: converted(names, torch.float32),
    "to a dtype": lambda names: converted(names, torch.float64),
    "to the same device": lambda names: converted(names, "cpu"),
    "to a device": lambda names: converted(names, torch.device("cpu")),
    "to a device and a dtype": lambda names: converted(names, "cpu", torch.int64),
    "to a tensor": lambda names: converted(names, torch.zeros(1, dtype=torch.float16)),
    "to a sharded tensor": lambda names: converted(names, rows(names, dtype=torch.float64)),
    "to by names": lambda names: converted(names, device="cpu", dtype=torch.int32),
    "to a copy": lambda names: converted(names, torch.float32, copy=True),
    "to of a leaf": lambda names: facts(rows(names, requires_grad=True).to(torch.float64)),
    "to of pieces": lambda names: facts(
        names.sharded_tensor.ones(names.pieces(([0], [3], 1), ([3], [5], 0)), 8).to(torch.float64)
    ),
    "cpu": lambda names: (made := rows(names), made.cpu() is made)[1],
    "cpu of another group": lambda names: (
        made := rows(names),
        [made.cpu(process_group=dist.group.WORLD) is made, made.cpu(torch.contiguous_format) is made],
    )[1],
    "type_as of the same dtype": lambda names: (made := rows(names), made.type_as(torch.zeros(1)) is made)[1],
    "type_as": lambda names: facts(rows(names).type_as(torch.zeros(1, dtype=torch.float64))),
    "type_as of a sharded tensor": lambda names: facts(rows(names).type_as(rows(names, dtype=torch.int64))),
}


@pytest.mark.parametrize("key", CONVERSIONS)
def test_conversions(world: Ranks, key: str) -> None:
    same_values(world, run, "conversions", key)


# Copies


def shares(one: Any, other: Any) -> bool:
    return bool(one.local_tensor().data_ptr() == other.local_tensor().data_ptr())


COPIES: dict[str, Program] = {
    "clone": lambda names: (made := rows(names), copied := made.clone(), [facts(copied), shares(made, copied)])[2],
    "clone of a leaf": lambda names: facts(rows(names, requires_grad=True).clone()),
    "detach": lambda names: (
        made := rows(names, requires_grad=True),
        copied := made.detach(),
        [facts(copied), shares(made, copied), facts(made)],
    )[2],
    "deepcopy": lambda names: (
        made := rows(names, requires_grad=True),
        copied := copy.deepcopy(made),
        [facts(copied), shares(made, copied), copied._process_group is made._process_group],
    )[2],
    "deepcopy of pieces": lambda names: facts(
        copy.deepcopy(names.sharded_tensor.ones(names.pieces(([0], [3], 1), ([3], [5], 0)), 8))
    ),
    "copy_": lambda names: (made := rows(names), [made.copy_(rows(names).clone()) is made, facts(made)])[1],
    "pickle": lambda names: facts(pickle.loads(pickle.dumps(rows(names, requires_grad=True)))),
    "a local tensor": lambda names: facts(
        names.sharded_tensor.ShardedTensor._init_from_local_tensor(numbers(2, 3), names.chunks(0), [8, 3])
    ),
    "a local tensor's spec": lambda names: (
        spec := names.chunks(0),
        names.sharded_tensor.ShardedTensor._init_from_local_tensor(numbers(2), spec, 8).sharding_spec() is spec,
    )[1],
    "local shards are kept": lambda names: local_shards_are_kept(names),
    "sizes found from shards": lambda names: sizes_found(names),
    "zeros_like": lambda names: facts(torch.zeros_like(rows(names))),
    "ones_like of a dtype": lambda names: facts(torch.ones_like(rows(names), dtype=torch.int64)),
    "full_like": lambda names: facts(torch.full_like(rows(names), 7.0)),
    "full_like of a leaf": lambda names: facts(torch.full_like(rows(names), 7.0, requires_grad=True)),
    "a subclass": lambda names: subclass(names),
}


def local_shards_are_kept(names: Names) -> list[bool]:
    """The list and the tensors that were passed are those of the tensor: no copy."""
    rank = dist.get_rank()
    own = [names.sharded_tensor.Shard.from_tensor_and_offsets(numbers(2), [2 * rank], rank)]
    made = names.sharded_tensor.init_from_local_shards(own, 8)
    return [made.local_shards() is own, made.local_shards()[0] is own[0], made.local_tensor() is own[0].tensor]


def sizes_found(names: Names) -> list[Any]:
    """A global size with None: the ranks' shards are stacked along dim 0, and offsets follow."""
    rank = dist.get_rank()
    own = names.sharded_tensor.Shard.from_tensor_and_offsets(numbers(rank + 1, 3), [0, 0], rank)
    made = names.sharded_tensor.init_from_local_shards([own], None, 3)
    return [facts(made), own.metadata.shard_offsets]


def subclass(names: Names) -> list[str]:
    class Named(names.sharded_tensor.ShardedTensor):  # type: ignore[name-defined,misc]  # one of each package
        pass

    rank = dist.get_rank()
    own = names.sharded_tensor.Shard.from_tensor_and_offsets(numbers(2), [2 * rank], rank)
    options = {"dtype": torch.float32, "layout": torch.strided, "requires_grad": False, "pin_memory": False}
    made = Named(names.chunks(0), 8, **options), Named._init_from_local_shards([own], 8)
    return [type(tensor).__name__ for tensor in made]


@pytest.mark.parametrize("key", COPIES)
def test_copies(world: Ranks, key: str) -> None:
    same_values(world, run, "copies", key)


# Gather


def gathered(names: Names, dst: int, kind: torch.dtype = torch.float32, **options: Any) -> Any:
    """What `out` holds; torch returns nothing, ours the tensor."""
    out = torch.zeros(8, 3, dtype=kind) if dist.get_rank() == dst else None
    rows(names).gather(dst, out, **options)
    return None if out is None else out.tolist()


GATHER: dict[str, Program] = {
    "gather": lambda names: gathered(names, 0),
    "gather elsewhere": lambda names: gathered(names, 2),
    "gather in a dtype": lambda names: gathered(names, 1, torch.float64, dtype=torch.float64),
    "gather into another dtype": lambda names: gathered(names, 1, torch.float64),
    "gather by the dtype of the result": lambda names: gathered(names, 0, enforce_dtype=True),
}


@pytest.mark.parametrize("key", GATHER)
def test_gather(world: Ranks, key: str) -> None:
    same_values(world, run, "gather", key)


# Where ours is better


def like_keeps_dtype_and_group(names: Names) -> list[Any]:
    """torch's takes the default dtype and the default group."""
    group = dist.new_group(range(4))
    made = names.shard(numbers(8, dtype=torch.int64), names.chunks(0), process_group=group)
    like = torch.zeros_like(made)
    return [str(like.dtype), like._process_group is group]


def test_tensors_made_like_another_keep_its_dtype_and_group(world: Ranks) -> None:
    assert ours_of(world, like_keeps_dtype_and_group) == [["torch.int64", True]] * 4


def spec_of_a_result(names: Names) -> list[Any]:
    """Old programs read `dim` and `placements` of a tensor's spec."""
    spec = (rows(names) * 2 + rows(names)).sharding_spec()
    return [isinstance(spec, names.sharding_spec.ChunkShardingSpec), spec == names.chunks(0)]


def test_results_of_arithmetic_have_specs_of_the_namespace(world: Ranks) -> None:
    assert ours_of(world, spec_of_a_result) == [[True, True]] * 4


ERRORS: dict[str, Program] = {
    "no size": lambda names: names.sharded_tensor.zeros(names.chunks(0)),
    "a leaf of integers": lambda names: names.sharded_tensor.zeros(
        names.chunks(0), 8, dtype=torch.int64, requires_grad=True
    ),
    "cuda without a GPU": lambda names: rows(names).cuda(),
    "to cuda without a GPU": lambda names: rows(names).to("cuda"),
    "pinned memory without a GPU": lambda names: names.sharded_tensor.zeros(names.chunks(0), 8, pin_memory=True),
}


@pytest.mark.parametrize("key", ERRORS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_errors_of_what_this_machine_or_dtype_lacks(world: Ranks, key: str) -> None:
    same_errors(world, run, "errors", key, words=())


TABLES: dict[str, dict[str, Program]] = {
    "properties": PROPERTIES,
    "conversions": CONVERSIONS,
    "copies": COPIES,
    "gather": GATHER,
    "errors": ERRORS,
}
