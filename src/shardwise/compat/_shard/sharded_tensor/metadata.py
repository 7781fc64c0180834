"""The names of `torch.distributed._shard.sharded_tensor.metadata`."""

from shardwise.tensor.shards import MEM_FORMAT_ENCODING, ShardedTensorMetadata, ShardMetadata, TensorProperties

__all__ = ["MEM_FORMAT_ENCODING", "ShardMetadata", "ShardedTensorMetadata", "TensorProperties"]
