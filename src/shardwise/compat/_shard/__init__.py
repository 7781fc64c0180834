"""The names of `torch.distributed._shard`, module by module."""

import shardwise.ops  # noqa: F401  # what sharded tensors can compute
from shardwise.compat._shard import metadata as metadata
from shardwise.compat._shard import op_registry_utils as op_registry_utils
from shardwise.compat._shard import sharded_tensor as sharded_tensor
from shardwise.compat._shard import sharder as sharder
from shardwise.compat._shard import sharding_plan as sharding_plan
from shardwise.compat._shard import sharding_spec as sharding_spec
from shardwise.compat._shard.api import _shard_tensor, load_with_process_group, shard_module, shard_parameter

__all__ = [
    "_shard_tensor",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
    "sharded_tensor",
    "sharding_spec",
]
