"""Errors of making specs, metadata and tensors: torch's classes and key words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.fidelity import Names, numbers, same_errors
from tests.world import Ranks, world_fixture

world = world_fixture(4, shared=True)
Program = Callable[[Names], Any]


def fail(names: Names, table: str, key: str) -> None:
    TABLES[table][key][0](names)


# Specs and metadata: no rank talks to another.

SPECS: dict[str, tuple[Program, tuple[str, ...]]] = {
    "a named dim": (
        lambda names: names.sharding_spec.ChunkShardingSpec("N", ["rank:0/cpu"]),
        ("does not support named dimension",),
    ),
    "a dim that is not a number": (
        lambda names: names.sharding_spec.ChunkShardingSpec(1.5, ["rank:0/cpu"]),
        ("Sharding dim needs to be an integer", "1.5"),
    ),
    "a missing dim": (
        lambda names: names.chunks(2).build_metadata(torch.Size([4, 4]), names.sharded_tensor.TensorProperties()),
        ("Invalid sharding dim: 2",),
    ),
    "a missing negative dim": (
        lambda names: names.chunks(-3).build_metadata(torch.Size([4, 4]), names.sharded_tensor.TensorProperties()),
        ("Invalid sharding dim: -3",),
    ),
    "a placement that is not a rank": (
        lambda names: names.sharding_spec.ChunkShardingSpec(0, ["rank:x/cpu"]),
        (),
    ),
    "a placement on an unknown device": (
        lambda names: names.sharding_spec.DevicePlacementSpec("rank:0/gpu"),
        (),
    ),
    "no pieces": (lambda names: names.pieces(), ("Empty shard list provided",)),
    "pieces of different ndim": (
        lambda names: names.pieces(([0], [4], 0), ([4, 0], [4, 4], 1)),
        ("Found inconsistent ranks for shards: 1 and 2",),
    ),
    "pieces that overlap": (lambda names: names.pieces(([0], [4], 0), ([3], [4], 1)), ("overlap", "shard_offsets=[3]")),
    "pieces that overlap in two dims": (
        lambda names: names.pieces(([0, 0], [3, 3], 0), ([2, 2], [3, 3], 1), ([5, 0], [1, 5], 2)),
        ("overlap", "shard_offsets=[2, 2]"),
    ),
    "pieces that leave a gap": (
        lambda names: names.pieces(([0], [4], 0), ([5], [3], 1)).build_metadata(
            torch.Size([8]), names.sharded_tensor.TensorProperties()
        ),
        ("Total volume of shards: 7 does not match tensor volume: 8", "do not cover the entire tensor"),
    ),
    "pieces beyond the end": (
        lambda names: names.pieces(([0], [4], 0), ([4], [5], 1)).build_metadata(
            torch.Size([8]), names.sharded_tensor.TensorProperties()
        ),
        ("Shard offset 4 and length 5 exceeds tensor dim: 8",),
    ),
    "pieces of another ndim than the tensor": (
        lambda names: names.pieces(([0], [4], 0)).build_metadata(
            torch.Size([2, 2]), names.sharded_tensor.TensorProperties()
        ),
        ("Rank of tensor is 2, but shards rank is 1",),
    ),
    "offsets and sizes of different lengths": (
        lambda names: names.metadata.ShardMetadata([0], [1, 1], "rank:0/cpu"),
        ("shard_offsets and shard_sizes should have the same number of elements", "found", "[1, 1]"),
    ),
    "a negative offset": (
        lambda names: names.metadata.ShardMetadata([-1], [1], "rank:0/cpu"),
        ("shard_offsets should be >=0",),
    ),
    "a negative size": (
        lambda names: names.metadata.ShardMetadata([0], [-1], "rank:0/cpu"),
        ("shard_sizes should be >= 0",),
    ),
    "a shard of another size than its metadata": (
        lambda names: names.sharded_tensor.Shard(torch.zeros(3), names.piece([0], [2], 0)),
        ("Shard tensor size does not match with metadata.shard_lengths!", "[3]", "[2]"),
    ),
    "a shard on another device than its metadata": (
        lambda names: names.sharded_tensor.Shard(torch.zeros(2, device="meta"), names.piece([0], [2], 0)),
        ("Local shard tensor device does not match with local Shard's placement!", "meta", "cpu"),
    ),
    "an abstract spec": (lambda names: names.sharding_spec.ShardingSpec(), ("ShardingSpec",)),
    "an abstract sharder": (lambda names: names.sharder.Sharder(), ("Sharder",)),
    "an abstract planner": (lambda names: names.sharding_plan.ShardingPlanner(), ("ShardingPlanner",)),
    "a custom operator of three arguments": (
        lambda names: names.sharded_tensor.custom_sharded_op_impl(torch.asinh)(lambda types, args, kwargs: None)(
            (), (torch.zeros(1),), {}
        ),
        (),
    ),
    "no worker of a name without rpc": (
        lambda names: names.sharded_tensor.empty(names.sharding_spec.ChunkShardingSpec(0, ["worker7/cpu"]), 4),
        ("RPC framework needs to be initialized for using worker names: worker7",),
    ),
}


@pytest.mark.parametrize("key", SPECS)
def test_errors_of_specs_and_metadata(world: Ranks, key: str) -> None:
    same_errors(world, fail, "specs", key, words=SPECS[key][1])


# Creation: every rank does the same.


def rank_piece(names: Names, rank: int | None = None) -> Any:
    return names.piece([2 * dist.get_rank()], [2], dist.get_rank() if rank is None else rank)


def joined(names: Names, tensor: torch.Tensor, metadata: Any = None, size: Any = (8,)) -> Any:
    """The tensor of one shard of 2 elements on each rank."""
    shard = names.sharded_tensor.Shard(tensor, metadata or rank_piece(names))
    return names.sharded_tensor.init_from_local_shards([shard], *size)


def described(names: Names, tensor: torch.Tensor, **properties: Any) -> Any:
    """The same by metadata, which is not compared between ranks."""
    metadata = names.sharded_tensor.ShardedTensorMetadata(
        [names.piece([2 * rank], [2], rank) for rank in range(4)],
        torch.Size([8]),
        names.sharded_tensor.TensorProperties(**properties),
    )
    shard = names.sharded_tensor.Shard(tensor, rank_piece(names))
    make = names.sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata
    return make([shard], metadata)


def from_metadata(names: Names, pieces: list[Any], size: list[int], shards: int = 1, **properties: Any) -> Any:
    metadata = names.sharded_tensor.ShardedTensorMetadata(
        [names.piece(*piece) for piece in pieces],
        torch.Size(size),
        names.sharded_tensor.TensorProperties(**properties),
    )
    own = [piece for piece in metadata.shards_metadata if piece.placement.rank() == dist.get_rank()][:shards]
    local = [names.sharded_tensor.Shard(torch.zeros(piece.shard_sizes), piece) for piece in own]
    return names.sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


QUARTERS = [([2 * rank], [2], rank) for rank in range(4)]
STRIDED = torch.zeros(4)[::2]
MAKING: dict[str, tuple[Program, tuple[str, ...]]] = {
    "a text as size": (
        lambda names: names.sharded_tensor.empty(names.chunks(0), "foo"),
        ("size has to be a sequence of ints",),
    ),
    "a float as size": (
        lambda names: names.sharded_tensor.zeros(names.chunks(0), 4, 2.5),
        ("size has to be a sequence of ints, found: [4, 2.5]",),
    ),
    "floats in a list as size": (
        lambda names: names.sharded_tensor.rand(names.chunks(0), [4.0, 2]),
        ("size has to be a sequence of ints, found: [4.0, 2]",),
    ),
    "something that is not a spec": (
        lambda names: names.sharded_tensor.empty("rows", 8),
        ("Expecting ShardingSpec but got",),
    ),
    "a sparse layout": (
        lambda names: names.sharded_tensor.empty(names.chunks(0), 8, layout=torch.sparse_coo),
        (),
    ),
    "another memory format": (
        lambda names: names.sharded_tensor.empty(names.chunks(0), 8, 1, 1, 1, memory_format=torch.channels_last),
        ("Only torch.contiguous_format memory_format is currently supported",),
    ),
    "a rank that does not exist": (
        lambda names: names.sharded_tensor.empty(names.chunks(0, 0, 1, 2, 7), 8),
        ("Global rank 7 does not exist in input process group",),
    ),
    "references without rpc": (
        lambda names: names.sharded_tensor.empty(names.chunks(0), 8, init_rrefs=True),
        ("RPC Framework needs to be initialized using", "init_rpc", "init_rrefs"),
    ),
    "shards of a sparse layout": (
        lambda names: joined(names, torch.zeros(2).to_sparse()),
        ("Only torch.strided layout is currently supported", "sparse"),
    ),
    "shards that are not contiguous": (
        lambda names: joined(names, STRIDED),
        ("Only torch.contiguous_format memory_format is currently supported",),
    ),
    "shards placed on another rank": (
        lambda names: joined(names, torch.zeros(2), rank_piece(names, (dist.get_rank() + 1) % 4)),
        ("Local shard metadata's rank does not match with the rank in its process group!",),
    ),
    "shards placed outside of the world": (
        lambda names: joined(names, torch.zeros(2), rank_piece(names, 9)),
        ("Global rank 9 does not exist in input process group",),
    ),
    "shards of different dtypes between ranks": (
        lambda names: joined(names, torch.zeros(2, dtype=torch.float64 if dist.get_rank() == 2 else torch.float32)),
        ("ShardedTensor dtype property does not match from different ranks!", "float64", "rank:2"),
    ),
    "shards of different requires_grad between ranks": (
        lambda names: joined(names, torch.zeros(2, requires_grad=dist.get_rank() == 1)),
        ("ShardedTensor requires_grad property does not match from different ranks!",),
    ),
    "different global sizes between ranks": (
        lambda names: joined(names, torch.zeros(2), size=(8 + dist.get_rank(),)),
        ("ShardedTensor global_size property does not match from different ranks!",),
    ),
    "shards that overlap between ranks": (
        lambda names: joined(names, torch.zeros(2), names.piece([dist.get_rank()], [2], dist.get_rank()), size=(5,)),
        ("overlap",),
    ),
    "shards that leave a gap": (
        lambda names: joined(names, torch.zeros(2), size=(9,)),
        ("Total volume of shards: 8 does not match tensor volume: 9",),
    ),
    "no shards anywhere": (
        lambda names: names.sharded_tensor.init_from_local_shards([], 8),
        ("ShardedTensor have no local shards on all ranks!",),
    ),
    "a shard too few for its metadata": (
        lambda names: from_metadata(names, QUARTERS, [8], shards=0),
        ("Number of local shards (0) does not match number of local shards metadata", "(1)"),
    ),
    "metadata without shards": (lambda names: from_metadata(names, [], [8]), ("shards_metadata must not be empty!",)),
    "metadata of a sparse layout": (
        lambda names: from_metadata(names, QUARTERS, [8], layout=torch.sparse_coo),
        ("Only torch.strided layout is currently supported",),
    ),
    "metadata of shards that overlap": (
        lambda names: from_metadata(names, [*QUARTERS[:3], ([5], [2], 3)], [8]),
        ("overlap",),
    ),
    "metadata of shards that leave a gap": (
        lambda names: from_metadata(names, QUARTERS, [9]),
        ("Total volume of shards: 8 does not match tensor volume: 9",),
    ),
    "metadata of shards beyond the end": (
        lambda names: from_metadata(names, QUARTERS, [7]),
        ("Shard offset 6 and length 2 exceeds tensor dim: 7",),
    ),
    "a sparse shard beside metadata": (
        lambda names: described(names, torch.zeros(2).to_sparse()),
        ("Local shards' tensor layout property is incompatible with tensor property", "sparse"),
    ),
    "a strided shard beside metadata": (
        lambda names: described(names, STRIDED),
        ("Only torch.contiguous_format memory_format is currently supported",),
    ),
    "a shard of another dtype than its metadata": (
        lambda names: described(names, torch.zeros(2, dtype=torch.int64), dtype=torch.float32),
        ("Local shards' tensor dtype property is incompatible with tensor property", "int64"),
    ),
    "a shard of another requires_grad than its metadata": (
        lambda names: described(names, torch.zeros(2), requires_grad=True),
        ("Local shards' tensor requires_grad property is incompatible with tensor property",),
    ),
    "a shard of another pin_memory than its metadata": (
        lambda names: described(names, torch.zeros(2), pin_memory=True),
        ("Local shards' tensor pin_memory property is incompatible with tensor property",),
    ),
    "a local tensor that is not contiguous": (
        lambda names: names.sharded_tensor.ShardedTensor._init_from_local_tensor(STRIDED, names.chunks(0), [8]),
        ("local_tensor is not a contiguous Tensor",),
    ),
    "a local tensor of another size": (
        lambda names: names.sharded_tensor.ShardedTensor._init_from_local_tensor(numbers(3), names.chunks(0), [8]),
        ("Shard tensor size does not match with metadata.shard_lengths!", "[3]", "[2]"),
    ),
}


@pytest.mark.parametrize("key", MAKING)
def test_errors_of_making_tensors(world: Ranks, key: str) -> None:
    same_errors(world, fail, "making", key, words=MAKING[key][1])


# Sharding: ranks compare what they pass.


def shard_part(names: Names, tensor: torch.Tensor) -> Any:
    return names.shard(tensor, names.chunks(0))


SHARDING: dict[str, tuple[Program, tuple[str, ...]]] = {
    "a tensor that is not contiguous": (
        lambda names: shard_part(names, numbers(4, 8).t()),
        ("input tensor is not a contiguous Tensor",),
    ),
    "different sources": (
        lambda names: names.shard(numbers(8), names.chunks(0), src_rank=dist.get_rank()),
        ("does not match with src_rank=", "on rank: "),
    ),
    "one different source": (
        lambda names: names.shard(numbers(8), names.chunks(0), src_rank=int(dist.get_rank() == 2)),
        ("does not match with src_rank=", "on rank: "),
    ),
    "specs of different dims": (
        lambda names: names.shard(numbers(8, 8), names.chunks(dist.get_rank() % 2)),
        ("does not match with sharding_spec=", "ChunkShardingSpec(dim="),
    ),
    "specs of different placements": (
        lambda names: names.shard(numbers(8), names.chunks(0, *((1, 0, 2, 3) if dist.get_rank() == 3 else range(4)))),
        ("does not match with sharding_spec=",),
    ),
    "specs of different kinds": (
        lambda names: names.shard(numbers(8), names.pieces(*QUARTERS) if dist.get_rank() == 1 else names.chunks(0)),
        ("does not match with sharding_spec=",),
    ),
    "a missing dim": (
        lambda names: names.shard(numbers(8), names.chunks(1)),
        ("Invalid sharding dim: 1",),
    ),
}


@pytest.mark.parametrize("key", SHARDING)
def test_errors_of_sharding(world: Ranks, key: str) -> None:
    same_errors(world, fail, "sharding", key, words=SHARDING[key][1])


TABLES = {"specs": SPECS, "making": MAKING, "sharding": SHARDING}
