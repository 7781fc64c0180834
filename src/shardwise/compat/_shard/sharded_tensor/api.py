"""The names of `torch.distributed._shard.sharded_tensor.api`."""

import torch

from shardwise.compat._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.compat._shard.sharded_tensor.shard import Shard
from shardwise.compat.metadata import check_gather_output as _validate_output_tensor_for_gather
from shardwise.compat.metadata import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.compat.metadata import check_tiles as check_tensor
from shardwise.compat.metadata import flatten_size as _flatten_tensor_size
from shardwise.compat.metadata import global_metadata as build_global_metadata
from shardwise.compat.metadata import metadata_from_local_shards as build_metadata_from_local_shards
from shardwise.compat.metadata import rank_and_device as _parse_and_validate_remote_device
from shardwise.compat.rrefs import _sharded_tensor_map
from shardwise.compat.rrefs import register_remote_shards as _register_remote_shards
from shardwise.compat.sharded_tensor import TorchShardedTensor as ShardedTensor
from shardwise.compat.sharded_tensor import TorchShardedTensorBase as ShardedTensorBase


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


__all__ = [
    "Shard",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_create_tensor_from_params",
    "_flatten_tensor_size",
    "_parse_and_validate_remote_device",
    "_register_remote_shards",
    "_sharded_tensor_map",
    "_validate_output_tensor_for_gather",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "check_tensor",
    "validate_non_overlapping_shards_metadata",
]
