"""Specs, metadata and pure functions of the namespace beside torch's: no rank is needed, and no process group."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.remote_device import _remote_device

from tests.compat.fidelity import OURS, TORCH, Names, assert_same_errors, assert_same_values, end_of, numbers

Program = Callable[[Names], Any]


def piece_of(shard: Any) -> tuple[list[int], list[int], str]:
    return list(shard.shard_offsets), list(shard.shard_sizes), str(shard.placement)


def built(names: Names, spec: Any, *size: int) -> list[Any]:
    properties = names.sharded_tensor.TensorProperties(dtype=torch.int64)
    metadata = spec.build_metadata(torch.Size(size), properties)
    kept = metadata.tensor_properties is properties
    return [[piece_of(shard) for shard in metadata.shards_metadata], metadata.size == torch.Size(size), kept]


def inferred(names: Names, *pieces: tuple[list[int], list[int], int]) -> list[Any]:
    shards = [names.piece(*piece) for piece in pieces]
    spec = names.sharding_spec._infer_sharding_spec_from_shards_metadata(shards)
    return [type(spec).__name__, getattr(spec, "dim", None), [str(place) for place in getattr(spec, "placements", [])]]


def internals(names: Names) -> Any:
    return names.module("sharding_spec._internals")


def own_spec(names: Names) -> Any:
    """A user's own spec, with torch's two methods."""

    class FirstRowAlone(names.sharding_spec.ShardingSpec):  # type: ignore[name-defined,misc]  # one of each package
        def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: Any) -> Any:
            rest = names.piece([1], [tensor_sizes[0] - 1], 1)
            return names.sharded_tensor.ShardedTensorMetadata(
                [names.piece([0], [1], 0), rest], tensor_sizes, tensor_properties
            )

        def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
            raise NotImplementedError

    return FirstRowAlone()


def slots(names: Names) -> str:
    shard = names.piece([0], [1], 0)
    try:
        shard.size = 3
    except AttributeError as error:
        return type(error).__name__
    return "taken"


SPECS: dict[str, Program] = {
    "chunks of an uneven dim": lambda names: built(names, names.chunks(0), 10, 3),
    "chunks of a negative dim": lambda names: built(names, names.chunks(-1), 3, 10),
    "chunks on one rank": lambda names: built(names, names.chunks(0, 2), 5),
    "chunks on a rank twice": lambda names: built(names, names.chunks(0, 1, 0, 1), 6),
    "chunks of nothing": lambda names: built(names, names.chunks(0), 0, 3),
    "chunks of three rows": lambda names: built(names, names.chunks(0, 3, 2, 1, 0), 3),
    "pieces": lambda names: built(names, names.pieces(([0, 0], [2, 1], 3), ([0, 1], [2, 4], 0)), 2, 5),
    "a user's spec": lambda names: built(names, own_spec(names), 5),
    "fields of chunks": lambda names: [f.name for f in dataclasses.fields(names.chunks(0))],
    "fields of pieces": lambda names: [f.name for f in dataclasses.fields(names.pieces(([0], [1], 0)))],
    "repr of chunks": lambda names: repr(names.chunks(0)),
    "repr of pieces": lambda names: repr(names.pieces(([0], [1], 0))),
    "placements are remote devices": lambda names: [
        isinstance(place, _remote_device) for place in names.chunks(1).placements
    ],
    "remote devices stay": lambda names: [
        str(place)
        for place in names.sharding_spec.ChunkShardingSpec(0, [_remote_device("rank:1/cpu"), "rank:0/cpu"]).placements
    ],
    "a placement without a device": lambda names: [
        str(names.sharding_spec.ChunkShardingSpec(0, ["rank:1"]).placements[0].device())
    ],
    "a placement of a device": lambda names: str(names.sharding_spec.DevicePlacementSpec("rank:1/cuda:2").device),
    "specs are specs": lambda names: [
        issubclass(names.sharding_spec.ChunkShardingSpec, names.sharding_spec.ShardingSpec),
        issubclass(names.sharding_spec.EnumerableShardingSpec, names.sharding_spec.ShardingSpec),
        issubclass(names.sharding_spec.DevicePlacementSpec, names.sharding_spec.PlacementSpec),
    ],
    "pickled specs": lambda names: [
        pickle.loads(pickle.dumps(spec)) == spec for spec in (names.chunks(1), names.pieces(([0], [1], 0)))
    ],
    "copied specs": lambda names: [
        copy.deepcopy(spec) == spec for spec in (names.chunks(1), names.pieces(([0], [1], 0)))
    ],
    "a changed spec": lambda names: [
        dataclasses.replace(names.chunks(0), dim=1) == names.chunks(1),
        dataclasses.replace(names.chunks(0), dim=1) == names.chunks(0),
    ],
    "inferred rows": lambda names: inferred(names, *[([2 * r, 0], [2, 3], r) for r in range(4)]),
    "inferred rows, last first": lambda names: inferred(names, *[([2 * r, 0], [2, 3], r) for r in (3, 0, 2, 1)]),
    "inferred columns": lambda names: inferred(names, *[([0, 2 * r], [3, 2], 3 - r) for r in range(4)]),
    "inferred uneven rows": lambda names: inferred(names, ([0], [3], 0), ([3], [3], 1), ([6], [1], 2)),
    "inferred rows that are no chunks": lambda names: inferred(names, ([0], [1], 0), ([1], [3], 1)),
    "inferred tiles": lambda names: inferred(names, *[([i, j], [1, 1], 2 * i + j) for i in (0, 1) for j in (0, 1)]),
    "inferred from one shard": lambda names: inferred(names, ([0, 0], [2, 2], 0)),
}
VALUES: dict[str, Program] = {
    "a shard of metadata": lambda names: repr(names.piece([0, 4], [2, 3], 1)),
    "a shard without a placement": lambda names: str(names.metadata.ShardMetadata([0], [1]).placement),
    "shards are equal": lambda names: [
        names.piece([0], [1], 0) == names.piece([0], [1], 0),
        names.piece([0], [1], 0) != names.piece([0], [2], 0),
        len({names.piece([0], [1], 0), names.piece([0], [1], 0), names.piece([0], [1], 1)}),
    ],
    "a shard takes no other attributes": slots,
    "a changed shard": lambda names: (
        shard := names.piece([0], [1], 0),
        setattr(shard, "placement", _remote_device("rank:3/cpu")),
        piece_of(shard),
    )[2],
    "a pickled shard": lambda names: piece_of(pickle.loads(pickle.dumps(names.piece([0], [1], 2)))),
    "properties by default": lambda names: repr(names.sharded_tensor.TensorProperties()),
    "properties by position": lambda names: repr(
        names.sharded_tensor.TensorProperties(torch.int8, torch.strided, True, torch.preserve_format, True)
    ),
    "properties of a tensor": lambda names: repr(
        names.sharded_tensor.TensorProperties.create_from_tensor(torch.zeros(2, dtype=torch.float64).requires_grad_())
    ),
    "pickled properties": lambda names: repr(
        pickle.loads(pickle.dumps(names.sharded_tensor.TensorProperties(memory_format=torch.channels_last)))
    ),
    "state of properties": lambda names: [  # of torch 2.15 the strides come sixth, also where there are none
        str(value) for value in names.sharded_tensor.TensorProperties().__getstate__()[:5]
    ],
    "metadata by default": lambda names: repr(names.sharded_tensor.ShardedTensorMetadata()),
    "encodings of memory formats": lambda names: [
        (code.name, code.value) for code in names.module("sharded_tensor.metadata").MEM_FORMAT_ENCODING
    ],
    "a Shard": lambda names: (
        shard := names.sharded_tensor.Shard.from_tensor_and_offsets(numbers(2, 3), [4, 0], 1),
        piece_of(shard.metadata),
        shard.tensor.tolist(),
    )[1:],
    "split sizes": lambda names: [
        internals(names).get_split_size(length, chunks) for length in (0, 1, 5, 8) for chunks in (1, 3, 4)
    ],
    "chunk lengths": lambda names: [
        internals(names).get_chunked_dim_size(length, 2, i) for length in (0, 3, 8) for i in range(4)
    ],
    "where chunks start": lambda names: [
        internals(names).get_chunk_sharding_params(10, 4, names.chunks(0, 2, 0, 3, 1), rank) for rank in range(4)
    ],
    "overlaps of pairs": lambda names: [
        internals(names)._check_shard_metadata_pair_overlap(names.piece([0, 0], [2, 2], 0), names.piece(at, [2, 2], 1))
        for at in ([1, 1], [2, 0], [0, 2], [0, 0])
    ],
    "empty shards do not overlap": lambda names: internals(names).validate_non_overlapping_shards_metadata(
        [names.piece([0, 0], [0, 4], 0), names.piece([0, 0], [0, 4], 1)]
    ),
    "shards that tile": lambda names: internals(names).check_tensor(
        [names.piece([0, 0], [1, 4], 0), names.piece([1, 0], [2, 4], 1)], (3, 4)
    ),
    "narrowing": lambda names: [
        names._utils.narrow_tensor(numbers(4, 4), names.piece([1, 0], [2, 3], 0)).tolist(),
        names._utils.narrow_tensor_by_index(numbers(4, 4), [0, 2], [4, 1]).tolist(),
    ],
    "flat sizes": lambda names: [
        list(names.module("sharded_tensor.utils")._flatten_tensor_size(size))
        for size in ((2, 3), ([2, 3],), (torch.Size([2, 3]),), ((2, 3),), (4,))
    ],
    "the logger": lambda names: names.module("sharded_tensor.logger")._get_or_create_logger().name,
    "a plan": lambda names: repr(names.sharding_plan.ShardingPlan({})),
    "a plan by position": lambda names: repr(names.sharding_plan.ShardingPlan({}, {}, [""])),
    "state of a group": lambda names: dataclasses.asdict(
        names.sharded_tensor.ShardedTensor.ProcessGroupState(0, 1, 2, 3)
    ),
    "tensors made of parameters": lambda names: [
        str(value)
        for made in [
            names.module("sharded_tensor.api")._create_tensor_from_params(
                2, 3, local_device=torch.device("cpu"), tensor_properties=names.sharded_tensor.TensorProperties()
            )
        ]
        for value in (made.shape, made.dtype, made.device)
    ],
}


def modules(names: Names) -> list[bool]:
    """Modules that are reached as attributes of a package after one import of it."""
    package = names.sharded_tensor
    below = [hasattr(package, name) for name in ("api", "metadata", "shard", "utils", "reshard", "logger")]
    root = importlib.import_module(names.root)
    top = ("api", "metadata", "sharded_tensor", "sharding_spec", "sharder", "sharding_plan", "op_registry_utils")
    return below + [hasattr(root, name) for name in top]


@pytest.mark.parametrize("key", SPECS)
def test_specs(key: str) -> None:
    assert_same_values([end_of(TORCH, SPECS[key])], [end_of(OURS, SPECS[key])])


@pytest.mark.parametrize("key", VALUES)
def test_metadata_and_pure_functions(key: str) -> None:
    assert_same_values([end_of(TORCH, VALUES[key])], [end_of(OURS, VALUES[key])])


def test_modules_are_reached_as_attributes() -> None:
    assert_same_values([end_of(TORCH, modules)], [end_of(OURS, modules)])


ERRORS: dict[str, tuple[Program, tuple[str, ...]]] = {
    "a memory format that cannot be pickled": (
        lambda names: pickle.dumps(names.sharded_tensor.TensorProperties(memory_format=torch.channels_last_3d)),
        ("Invalid torch.memory_format",),
    ),
    "properties of one argument too many": (
        lambda names: names.sharded_tensor.TensorProperties(torch.int8, torch.strided, True, None, True, None, 1),
        (),
    ),
    "chunks without placements": (lambda names: names.sharding_spec.ChunkShardingSpec(0), ()),
    "shards of text": (lambda names: names.metadata.ShardMetadata("a", "b"), ()),
}


@pytest.mark.parametrize("key", ERRORS)
def test_errors_of_values(key: str) -> None:
    program, words = ERRORS[key]
    assert_same_errors([end_of(TORCH, program)], [end_of(OURS, program)], words=words)
