"""The names of `torch.distributed._shard`, module by module: one table, of which the modules are made.

`import shardwise.compat._shard.sharded_tensor.api` works as for files: importing this module puts those of the table
into `sys.modules`, where Python looks again after it has imported a parent. The functions here are those that exist
under torch's names only.
"""

# ruff: noqa: F401  # most imported names are used by the table
from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

import shardwise.ops  # what sharded tensors can compute
from shardwise._torch import DisableTorchFunctionSubclass, _remote_device
from shardwise.comm.current import GroupOrComm, load_with_process_group, resolve_comm
from shardwise.comm.current import get_current_process_group as _get_current_process_group
from shardwise.compat.creation import (
    ReplicatedTensor,
    empty,
    full,
    init_from_local_shards,
    ones,
    rand,
    randn,
    shard_module,
    shard_parameter,
    zeros,
)
from shardwise.compat.creation import TorchPartialTensor as _PartialTensor
from shardwise.compat.creation import TorchShardedOptimizer as ShardedOptimizer
from shardwise.compat.creation import check_before as _sharded_op_common
from shardwise.compat.creation import check_chunk_spec as _chunk_sharding_spec_check
from shardwise.compat.creation import register_on_local_shards as _register_sharded_op_on_local_shards
from shardwise.compat.creation import register_on_local_tensor as _register_sharded_op_on_local_tensor
from shardwise.compat.creation import reshard_output as _reshard_output
from shardwise.compat.creation import shard_tensor as _shard_tensor
from shardwise.compat.custom_ops import (
    Decorator,
    Impl,
    Op,
    Table,
    check_signature,
    custom_sharded_op_impl,
    custom_sharding_spec_op,
)
from shardwise.compat.custom_ops import check_op_arguments as _basic_validation
from shardwise.compat.custom_ops import dispatch_custom_op as _dispatch_custom_op
from shardwise.compat.custom_ops import has_custom_op as _has_custom_op
from shardwise.compat.custom_ops import sharded_op_impl as _sharded_op_impl
from shardwise.compat.sharded_tensor import TorchShardedTensor as ShardedTensor
from shardwise.compat.sharded_tensor import TorchShardedTensorBase as ShardedTensorBase
from shardwise.compat.sharded_tensor import _sharded_tensor_map, pre_load_state_dict_hook, state_dict_hook
from shardwise.compat.sharded_tensor import register_remote_shards as _register_remote_shards
from shardwise.compat.specs import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    rank_of,
)
from shardwise.compat.specs import PlacementShardingSpec as ShardingSpec
from shardwise.compat.specs import check_gather_output as _validate_output_tensor_for_gather
from shardwise.compat.specs import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.compat.specs import check_tiles as check_tensor
from shardwise.compat.specs import flatten_size as _flatten_tensor_size
from shardwise.compat.specs import global_metadata as build_global_metadata
from shardwise.compat.specs import infer_sharding_spec as _infer_sharding_spec_from_shards_metadata
from shardwise.compat.specs import metadata_from_local_shards as build_metadata_from_local_shards
from shardwise.compat.specs import pair_overlaps as _check_shard_metadata_pair_overlap
from shardwise.compat.specs import rank_and_device as _parse_and_validate_remote_device
from shardwise.compat.specs import stack_along_dim as recalc_global_sharded_tensor_metadata
from shardwise.nn.optimizer import named_params_with_sharded_tensor
from shardwise.nn.plan import Sharder, ShardingPlan, ShardingPlanner
from shardwise.nn.shard_module import collect_local_shard as _collect_local_shard
from shardwise.tensor.sharded_tensor import wrap
from shardwise.tensor.shards import (
    MEM_FORMAT_ENCODING,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    describe_layout,
)

# The names of each module below this one; "" names none, for modules that hold others only.
TABLE = {
    "_utils": "narrow_tensor narrow_tensor_by_index",
    "api": """ChunkShardingSpec ShardedTensor Sharder ShardingPlan ShardingSpec _collect_local_shard
        _get_current_process_group _reshard_output _shard_tensor load_with_process_group shard_module
        shard_parameter""",
    "checkpoint": "",
    "common_op_utils": "_basic_validation _register_default_op",
    "metadata": "ShardMetadata",
    "op_registry_utils": "_decorator_func _register_op",
    "partial_tensor": "_PartialTensor",  # of torch 1.13, as the next one
    "replicated_tensor": "ReplicatedTensor",
    "sharded_optim": "ShardedOptimizer named_params_with_sharded_tensor",
    "sharded_optim.api": "ShardedOptimizer ShardedTensor named_params_with_sharded_tensor",
    "sharded_tensor": """Shard ShardMetadata ShardedTensor ShardedTensorBase ShardedTensorMetadata TensorProperties
        _sharded_op_impl custom_sharded_op_impl empty full init_from_local_shards ones pre_load_state_dict_hook rand
        randn state_dict_hook zeros""",
    "sharded_tensor._ops": "",
    "sharded_tensor._ops._common": "_register_sharded_op_on_local_shards _sharded_op_common",
    "sharded_tensor.api": """Shard ShardedTensor ShardedTensorBase ShardedTensorMetadata TensorProperties
        _create_tensor_from_params _flatten_tensor_size _parse_and_validate_remote_device _register_remote_shards
        _sharded_tensor_map _validate_output_tensor_for_gather build_global_metadata build_metadata_from_local_shards
        check_tensor validate_non_overlapping_shards_metadata""",
    "sharded_tensor.logger": "_get_or_create_logger",
    "sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardMetadata ShardedTensorMetadata TensorProperties",
    "sharded_tensor.reshard": """build_reshard_metadata get_idx_from_placements reshard_local_shard
        reshuffle_local_shard""",
    "sharded_tensor.shard": "Shard ShardMetadata",
    "sharded_tensor.utils": """Shard ShardedTensorMetadata TensorProperties _flatten_tensor_size
        _parse_and_validate_remote_device _validate_output_tensor_for_gather build_global_metadata
        build_metadata_from_local_shards check_tensor recalc_global_sharded_tensor_metadata
        validate_non_overlapping_shards_metadata""",
    "sharder": "Sharder",
    "sharding_plan": "ShardingPlan ShardingPlanner",
    "sharding_plan.api": "Sharder ShardingPlan ShardingPlanner ShardingSpec",
    "sharding_spec": """ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata
        ShardingSpec _infer_sharding_spec_from_shards_metadata""",
    "sharding_spec._internals": """ShardMetadata _check_shard_metadata_pair_overlap check_tensor
        get_chunk_sharding_params get_chunked_dim_size get_split_size validate_non_overlapping_shards_metadata""",
    "sharding_spec.api": """ChunkShardingSpec DevicePlacementSpec EnumerableShardingSpec PlacementSpec ShardMetadata
        ShardingSpec _dispatch_custom_op _has_custom_op _infer_sharding_spec_from_shards_metadata check_tensor
        custom_sharding_spec_op get_chunked_dim_size get_split_size validate_non_overlapping_shards_metadata""",
    "sharding_spec.chunk_sharding_spec": """ChunkShardingSpec Shard ShardMetadata ShardingSpec
        _parse_and_validate_remote_device get_chunked_dim_size get_split_size narrow_tensor""",
    "sharding_spec.chunk_sharding_spec_ops": "",
    "sharding_spec.chunk_sharding_spec_ops._common": """_chunk_sharding_spec_check
        _register_sharded_op_on_local_tensor _sharded_op_common""",
}


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the box of a tensor at these offsets, as a view.

    >>> narrow_tensor_by_index(torch.arange(6).reshape(2, 3), [0, 1], [2, 2]).tolist()
    [[1, 2], [4, 5]]
    """
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=False)):
        if size < tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """Return the part of a whole tensor that a shard holds, as a view."""
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)


def _register_default_op(op: Op, decorator: Callable[[Op], Decorator]) -> None:
    @decorator(op)
    def tensor_default_op(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            return op(*args, **(kwargs or {}))


def _register_op(op: Op, func: Impl, op_table: Table) -> None:
    check_signature(op, func)
    op_table[op] = func


def _decorator_func(wrapped_func: Impl, op: Op, op_table: Table) -> Impl:
    @functools.wraps(wrapped_func)
    def wrapper(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        _basic_validation(op, args, kwargs)
        return wrapped_func(types, args, kwargs, process_group)

    _register_op(op, wrapper, op_table)
    return wrapper


def _create_tensor_from_params(
    *size: int, local_device: torch.device | str, tensor_properties: TensorProperties
) -> torch.Tensor:
    return torch.empty(
        *size,
        dtype=tensor_properties.dtype,
        layout=tensor_properties.layout,
        device=local_device,
        requires_grad=tensor_properties.requires_grad,
        memory_format=tensor_properties.memory_format,
        pin_memory=tensor_properties.pin_memory,
    )


def _get_or_create_logger() -> logging.Logger:
    logger = logging.getLogger("sharding-spec-NullHandler")
    if not logger.handlers:
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
    return logger


def get_idx_from_placements(placements: Sequence[_remote_device], current_rank: int) -> int:
    """Return the position of a rank among placements."""
    ranks = [rank_of(placement) for placement in placements]
    if current_rank not in ranks:
        raise RuntimeError(f"current_rank not in the placement. Found rank {current_rank} and placements {placements}")
    return ranks.index(current_rank)


def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: Any, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """Return the shards of a spec by rank, and the ranks in the order of the spec, which says how many there are."""
    shards = describe_layout(sharding_spec.layout(st_size), TensorProperties()).shards_metadata
    return _by_rank(shards), [rank_of(shard.placement) for shard in shards]


def _by_rank(shards: Sequence[ShardMetadata]) -> list[ShardMetadata]:
    return sorted(shards, key=lambda shard: rank_of(shard.placement))


def reshard_local_shard(
    local_tensor: torch.Tensor, st_size: torch.Size, sharding_spec: Any, resharding_spec: Any, pg: GroupOrComm
) -> tuple[list[Shard], list[ShardMetadata]]:
    """Return this rank's shards after a move between any two specs, and all shards by rank; differentiable."""
    whole = wrap(sharding_spec.layout(st_size), (local_tensor,), resolve_comm(pg))
    moved = whole.redistribute(resharding_spec, label="reshard")
    return moved.local_shards(), _by_rank(moved.metadata().shards_metadata)


def reshuffle_local_shard(
    local_shard: torch.Tensor, st_size: torch.Size, sharding_spec: Any, resharding_spec: Any, pg: GroupOrComm
) -> tuple[list[Shard], list[ShardMetadata]]:
    """Return the same as `reshard_local_shard`; torch distinguishes moves along one dim, here all are the same."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)


def _load_checkpoint_name(name: str) -> Any:
    if name.startswith("__"):  # `inspect` asks every module for its file
        raise AttributeError(name)
    return getattr(importlib.import_module("torch.distributed.checkpoint"), name)


def _make_module(path: str, names: Sequence[str]) -> ModuleType:
    """A module that is imported as one in a file is: in `sys.modules`, and an attribute of its parent."""
    name = f"{__name__}.{path}"
    module = ModuleType(name, f"The names of `torch.distributed._shard.{path}`.")
    is_package = any(other.startswith(path + ".") for other in TABLE)
    module.__spec__ = ModuleSpec(name, None, is_package=is_package)
    module.__package__ = name if is_package else name.rpartition(".")[0]
    if is_package:
        module.__path__ = []
    module.__dict__.update({n: globals()[n] for n in names}, __all__=list(names))
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, module)
    return module


MODULES = {path: _make_module(path, names.split()) for path, names in TABLE.items()}
MODULES["checkpoint"].__getattr__ = _load_checkpoint_name  # type: ignore[method-assign]  # loaded on first use
sharded_tensor, sharding_spec = MODULES["sharded_tensor"], MODULES["sharding_spec"]

__path__: list[str] = []
__all__ = [
    "_shard_tensor",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
    "sharded_tensor",
    "sharding_spec",
]
