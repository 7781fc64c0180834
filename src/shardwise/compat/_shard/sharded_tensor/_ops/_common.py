"""The names of `torch.distributed._shard.sharded_tensor._ops._common`."""

from shardwise.compat.local_ops import check_before as _sharded_op_common
from shardwise.compat.local_ops import register_on_local_shards as _register_sharded_op_on_local_shards

__all__ = ["_register_sharded_op_on_local_shards", "_sharded_op_common"]
