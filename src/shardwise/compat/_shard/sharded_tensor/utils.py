"""The names of `torch.distributed._shard.sharded_tensor.utils`."""

from shardwise.compat.metadata import check_gather_output as _validate_output_tensor_for_gather
from shardwise.compat.metadata import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.compat.metadata import check_tiles as check_tensor
from shardwise.compat.metadata import flatten_size as _flatten_tensor_size
from shardwise.compat.metadata import global_metadata as build_global_metadata
from shardwise.compat.metadata import metadata_from_local_shards as build_metadata_from_local_shards
from shardwise.compat.metadata import rank_and_device as _parse_and_validate_remote_device
from shardwise.compat.metadata import stack_along_dim as recalc_global_sharded_tensor_metadata
from shardwise.tensor.shards import Shard, ShardedTensorMetadata, TensorProperties

__all__ = [
    "Shard",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_flatten_tensor_size",
    "_parse_and_validate_remote_device",
    "_validate_output_tensor_for_gather",
    "build_global_metadata",
    "build_metadata_from_local_shards",
    "check_tensor",
    "recalc_global_sharded_tensor_metadata",
    "validate_non_overlapping_shards_metadata",
]
