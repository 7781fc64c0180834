"""The names of `torch.distributed._shard.sharded_tensor.utils`."""

from shardwise.compat.metadata import check_gather_output as _validate_output_tensor_for_gather
from shardwise.compat.metadata import flatten_size as _flatten_tensor_size
from shardwise.compat.metadata import global_metadata as build_global_metadata
from shardwise.compat.metadata import metadata_from_local_shards as build_metadata_from_local_shards
from shardwise.compat.metadata import rank_and_device as _parse_and_validate_remote_device

__all__ = [
    "_flatten_tensor_size",
    "_parse_and_validate_remote_device",
    "_validate_output_tensor_for_gather",
    "build_global_metadata",
    "build_metadata_from_local_shards",
]
