"""The names of `torch.distributed._shard.sharding_spec._internals`."""

from shardwise.compat.metadata import check_no_overlap as validate_non_overlapping_shards_metadata
from shardwise.compat.metadata import check_tiles as check_tensor
from shardwise.compat.metadata import pair_overlaps as _check_shard_metadata_pair_overlap
from shardwise.compat.specs import get_chunk_sharding_params, get_chunked_dim_size, get_split_size
from shardwise.tensor.shards import ShardMetadata

__all__ = [
    "ShardMetadata",
    "_check_shard_metadata_pair_overlap",
    "check_tensor",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_split_size",
    "validate_non_overlapping_shards_metadata",
]
