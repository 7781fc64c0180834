"""The names of `torch.distributed._shard.sharded_tensor.api`."""

import torch

from shardwise.compat._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.compat._shard.sharded_tensor.shard import Shard
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
    "_register_remote_shards",
    "_sharded_tensor_map",
]
