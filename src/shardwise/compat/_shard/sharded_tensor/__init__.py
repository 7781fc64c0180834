"""The names of `torch.distributed._shard.sharded_tensor`."""

from shardwise.compat._shard.sharded_tensor import logger as logger
from shardwise.compat._shard.sharded_tensor import reshard as reshard
from shardwise.compat._shard.sharded_tensor import shard as shard
from shardwise.compat._shard.sharded_tensor import utils as utils
from shardwise.compat._shard.sharded_tensor.api import (
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    TensorProperties,
)
from shardwise.compat._shard.sharded_tensor.metadata import ShardMetadata
from shardwise.compat.creation import empty, full, init_from_local_shards, ones, rand, randn, zeros
from shardwise.compat.custom_ops import custom_sharded_op_impl
from shardwise.compat.custom_ops import sharded_op_impl as _sharded_op_impl
from shardwise.compat.state_dict import pre_load_state_dict_hook, state_dict_hook

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_sharded_op_impl",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "state_dict_hook",
    "zeros",
]
