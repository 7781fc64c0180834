"""The names of `torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops._common`."""

from shardwise.compat.local_ops import check_before as _sharded_op_common
from shardwise.compat.local_ops import check_chunk_spec as _chunk_sharding_spec_check
from shardwise.compat.local_ops import register_on_local_tensor as _register_sharded_op_on_local_tensor

__all__ = ["_chunk_sharding_spec_check", "_register_sharded_op_on_local_tensor", "_sharded_op_common"]
