"""ShardedTensorBase without a process group, and private attributes that count when they are assigned."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from tests.compat.fidelity import (
    OURS,
    TORCH,
    Ended,
    Names,
    assert_same_errors,
    assert_same_values,
    described,
    end_of,
    locals_of,
    numbers,
    ours_of,
    same_values,
)
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
STRIPS = [([2 * rank, 0], [2, 3], rank) for rank in range(4)]
TILES = [([0, 0], [4, 3], 2), ([4, 0], [4, 1], 0), ([4, 1], [4, 2], 0)]


def here(program: Callable[..., Any], *args: Any) -> tuple[list[Ended], list[Ended]]:
    """How a program ends in this process, which has no process group."""
    assert not dist.is_initialized()
    return [end_of(TORCH, program, *args)], [end_of(OURS, program, *args)]


# ShardedTensorBase


def shards_of(names: Names, pieces: list[Any]) -> list[Any]:
    """Shards of several ranks, all held by this process."""
    whole, shards = numbers(8, 3), []
    for offsets, sizes, rank in pieces:
        (top, left), (height, width) = offsets, sizes
        part = whole[top : top + height, left : left + width].contiguous()
        shards.append(names.sharded_tensor.Shard(part, names.piece(offsets, sizes, rank)))
    return shards


def metadata_of(names: Names, pieces: list[Any]) -> Any:
    return names.sharded_tensor.ShardedTensorMetadata(
        [names.piece(*piece) for piece in pieces],
        torch.Size([8, 3]),
        names.sharded_tensor.TensorProperties(dtype=torch.float32),
    )


def assembled(names: Names, shards: list[Any], metadata: Any, **options: Any) -> Any:
    make = names.sharded_tensor.ShardedTensorBase._init_from_local_shards_and_global_metadata
    return make(shards, metadata, **options)


def strips(names: Names, **options: Any) -> Any:
    return assembled(names, shards_of(names, STRIPS), metadata_of(names, STRIPS), **options)


def facts(sharded: Any) -> list[Any]:
    spec = sharded._sharding_spec
    return [
        type(spec).__name__,
        described(sharded.metadata()),
        [described_shard(shard) for shard in sharded.local_shards()],
        locals_of(sharded),
        list(sharded.metadata().size),
        str(sharded.metadata().tensor_properties.dtype),
        str(sharded.metadata().tensor_properties.layout),
    ]


def described_shard(shard: Any) -> tuple[list[int], list[int], str]:
    metadata = shard.metadata
    return list(metadata.shard_offsets), list(metadata.shard_sizes), str(metadata.placement)


def assemble(names: Names, pieces: list[Any]) -> list[Any]:
    return facts(assembled(names, shards_of(names, pieces), metadata_of(names, pieces)))


@pytest.mark.parametrize("pieces", [STRIPS, TILES, STRIPS[::-1]], ids=["strips", "tiles", "strips reversed"])
def test_the_base_takes_shards_of_several_ranks_without_a_process_group(pieces: list[Any]) -> None:
    theirs, ours = here(assemble, pieces)
    assert_same_values(theirs, ours)
    assert len(theirs[0].value[2]) == len(pieces)


@pytest.mark.parametrize("pieces", [STRIPS, TILES], ids=["strips", "tiles"])
def test_the_base_takes_shards_of_several_ranks_in_a_world(world: Ranks, pieces: list[Any]) -> None:
    same_values(world, assemble, pieces)


def assemble_none(names: Names) -> list[Any]:
    """The metadata of all shards, none of which is here."""
    return facts(assembled(names, [], metadata_of(names, STRIPS)))


def test_the_base_takes_no_shards_at_all() -> None:
    assert_same_values(*here(assemble_none))


def assemble_by_a_spec(names: Names) -> list[Any]:
    spec = names.chunks(0)
    sharded = strips(names, sharding_spec=spec)
    return [sharded._sharding_spec is spec, sharded.sharding_spec() is spec]


def test_the_base_keeps_the_spec_that_is_passed() -> None:
    assert_same_values(*here(assemble_by_a_spec))


def classes(names: Names) -> list[bool]:
    tensor, base = names.sharded_tensor.ShardedTensor, names.sharded_tensor.ShardedTensorBase
    sharded = strips(names)
    return [issubclass(tensor, base), base is tensor, isinstance(sharded, tensor), isinstance(sharded, base)]


def test_the_base_is_a_class_of_its_own() -> None:
    assert_same_values(*here(classes))


def test_a_tensor_of_the_base_is_a_native_one_that_knows_its_size() -> None:
    """torch's has no group, and so not even a size."""
    sharded = strips(Names(OURS))
    assert isinstance(sharded, shardwise.ShardedTensor)
    assert (sharded.size(), sharded.dtype, sharded.dim()) == (torch.Size([8, 3]), torch.float32, 2)


def make_by_new(names: Names) -> list[Any]:
    """Without local shards: metadata alone."""
    made = names.sharded_tensor.ShardedTensorBase.__new__(
        names.sharded_tensor.ShardedTensor,
        names.chunks(0),
        torch.Size([8, 3]),
        dtype=torch.float64,
        layout=torch.strided,
        pin_memory=False,
        requires_grad=False,
    )
    return facts(made)


def test_new_of_the_base_makes_metadata_without_shards() -> None:
    assert_same_values(*here(make_by_new))


def assemble_wrongly(names: Names, problem: str) -> None:
    metadata = metadata_of(names, STRIPS)
    if problem == "empty":
        metadata.shards_metadata = []
    elif problem == "layout":
        metadata.tensor_properties.layout = torch.sparse_coo
    elif problem == "overlap":
        metadata.shards_metadata[1].shard_offsets = [1, 0]
    elif problem == "volume":
        metadata.size = torch.Size([9, 3])
    elif problem == "outside":
        metadata.size = torch.Size([7, 3])
    assembled(names, [], metadata)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("empty", ("shards_metadata must not be empty!",)),
        ("layout", ("Only torch.strided layout is currently supported",)),
        ("overlap", ("overlap",)),
        ("volume", ("volume", "24", "27")),
        ("outside", ("exceeds tensor dim: 7",)),
    ],
)
def test_the_base_checks_its_metadata(problem: str, words: tuple[str, ...]) -> None:
    assert_same_errors(*here(assemble_wrongly, problem), words=words)


# Attributes that are read and assigned


def read(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    return [
        sharded._metadata is sharded.metadata(),
        sharded.metadata() is sharded.metadata(),
        sharded._local_shards is sharded.local_shards(),
        sharded._sharding_spec is sharded.sharding_spec(),
        sharded._process_group is dist.group.WORLD,
        sharded._init_rrefs,
        sharded._remote_shards,
        sharded._sharded_tensor_id,
        sharded.local_shards()[0].metadata in sharded.metadata().shards_metadata,
    ]


def test_private_attributes_are_what_the_methods_return(world: Ranks) -> None:
    same_values(world, read)


def properties(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    told = sharded.metadata().tensor_properties
    texts = [str(told.layout), str(told.dtype), str(told.memory_format)]
    return [*texts, told.requires_grad, told.pin_memory, told.layout is torch.strided]


def test_metadata_says_strided(world: Ranks) -> None:
    assert all(value[-1] for value in same_values(world, properties))


def layout_of(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    return [sharded.layout is torch.strided, torch.empty(1, layout=sharded.layout).layout is torch.strided]


def test_the_layout_of_a_tensor_of_the_namespace_is_strided(world: Ranks) -> None:
    assert same_values(world, layout_of) == [[True, True]] * 4


def assign_metadata(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    other = copy.deepcopy(sharded.metadata())
    other.tensor_properties.requires_grad = True
    other.shards_metadata.reverse()
    sharded._metadata = other
    return [
        sharded.metadata() is other,
        described(sharded.metadata()),
        sharded._metadata.tensor_properties.requires_grad,
    ]


def test_assigned_metadata_counts(world: Ranks) -> None:
    same_values(world, assign_metadata)


def change_metadata(names: Names) -> list[Any]:
    """What is changed inside of the metadata stays changed."""
    sharded = names.shard(numbers(8, 3), names.chunks(0, 3, 2, 1, 0))
    sharded._metadata.shards_metadata.sort(key=lambda shard: shard.placement.rank())
    sharded.metadata().tensor_properties.memory_format = torch.preserve_format
    return [described(sharded.metadata()), str(sharded.metadata().tensor_properties.memory_format)]


def test_changes_inside_of_metadata_count(world: Ranks) -> None:
    same_values(world, change_metadata)


def assign_shards(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    own = sharded.local_shards()[0]
    new = names.sharded_tensor.Shard(own.tensor + 100, own.metadata)
    sharded._local_shards = [new]
    out = torch.zeros(8, 3) if dist.get_rank() == 0 else None
    sharded.gather(0, out)
    return [
        sharded.local_shards()[0] is new,
        sharded.local_tensor() is new.tensor,
        locals_of(sharded.clone()),
        None if out is None else out.tolist(),
    ]


def test_assigned_local_shards_count(world: Ranks) -> None:
    assert same_values(world, assign_shards)[0][3] == (numbers(8, 3) + 100).tolist()


def change_the_list(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    own = sharded.local_shards()[0]
    sharded.local_shards()[0] = names.sharded_tensor.Shard(own.tensor * 2, own.metadata)
    doubled = [sharded.local_tensor().tolist(), locals_of(copy.deepcopy(sharded))]
    sharded._local_shards.clear()
    return [*doubled, len(sharded.local_shards())]


def test_changes_of_the_list_of_local_shards_count(world: Ranks) -> None:
    same_values(world, change_the_list)


def assign_a_shards_tensor(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    new = sharded.local_tensor() + 7
    sharded.local_shards()[0].tensor = new
    return [sharded.local_tensor() is new, locals_of(sharded.detach())]


def test_a_tensor_assigned_to_a_shard_counts(world: Ranks) -> None:
    same_values(world, assign_a_shards_tensor)


def assign_a_spec(names: Names) -> list[Any]:
    """Strips along dim 0 of a square are read as rows; torch's own spec.shard assigns the spec in this way."""
    spec = names.chunks(0)
    sharded = names.sharded_tensor.zeros(names.pieces(*STRIPS), 8, 3)
    before = type(sharded.sharding_spec()).__name__
    sharded._sharding_spec = spec
    copied = copy.deepcopy(sharded)
    return [before, sharded.sharding_spec() is spec, sharded._sharding_spec is spec, copied.sharding_spec() == spec]


def test_an_assigned_spec_counts(world: Ranks) -> None:
    same_values(world, assign_a_spec)


def reshard_after_assigning(names: Names) -> list[Any]:
    sharded = names.sharded_tensor.init_from_local_shards(
        [
            names.sharded_tensor.Shard(
                numbers(2, 4) + dist.get_rank(), names.piece([2 * dist.get_rank(), 0], [2, 4], dist.get_rank())
            )
        ],
        8,
        4,
    )
    sharded._sharding_spec = names.chunks(0)
    sharded.reshard(names.chunks(1))
    return [locals_of(sharded), described(sharded.metadata())]


def test_a_tensor_with_an_assigned_spec_is_resharded(world: Ranks) -> None:
    same_values(world, reshard_after_assigning)


def assign_a_group(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    group = dist.new_group(range(4))
    sharded._process_group = group
    out = torch.zeros(8, 3) if dist.get_rank() == 0 else None
    sharded.gather(0, out)
    return [sharded._process_group is group, sharded.clone()._process_group is group]


def test_an_assigned_group_counts(world: Ranks) -> None:
    same_values(world, assign_a_group)


def require_grad(names: Names) -> list[Any]:
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    described_before = sharded.metadata()
    sharded.requires_grad_()
    flags = [described_before.tensor_properties.requires_grad, sharded.local_tensor().requires_grad]
    sharded.requires_grad_(False)
    return [*flags, sharded.metadata().tensor_properties.requires_grad, sharded.requires_grad]


def test_requires_grad_is_written_into_the_metadata(world: Ranks) -> None:
    same_values(world, require_grad)


def copy_metadata(names: Names) -> list[Any]:
    sharded, same = (names.shard(numbers(8, 3), names.chunks(0)) for _ in range(2))
    copied = copy.deepcopy(sharded.metadata())
    equal = [copied == sharded.metadata(), same.metadata() == sharded.metadata()]
    copied.shards_metadata.pop()
    loaded = pickle.loads(pickle.dumps(sharded.metadata()))
    return [*equal, len(sharded.metadata().shards_metadata), loaded == sharded.metadata()]


def test_metadata_is_compared_copied_and_pickled(world: Ranks) -> None:
    assert same_values(world, copy_metadata) == [[True, True, 4, True]] * 4


def compute_after_assigning(names: Names) -> list[Any]:
    """Arithmetic, which torch's own class does not have, sees what was assigned."""
    sharded = names.shard(numbers(8, 3), names.chunks(0))
    own = sharded.local_shards()[0]
    sharded._local_shards = [names.sharded_tensor.Shard(own.tensor + 1, own.metadata)]
    return [(sharded * 2).local_tensor().tolist() == ((own.tensor + 1) * 2).tolist()]


def test_arithmetic_sees_assigned_shards(world: Ranks) -> None:
    assert ours_of(world, compute_after_assigning) == [[True]] * 4
