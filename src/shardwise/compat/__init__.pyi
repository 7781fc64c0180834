# The public names, each listed once: type checkers read them here, and `_lazy.attach_stub` does at run time.

from shardwise.compat import _shard as _shard
from shardwise.compat.custom_ops import (
    custom_sharded_op_impl as custom_sharded_op_impl,
    custom_sharding_spec_op as custom_sharding_spec_op,
)
from shardwise.compat.dtensor import (
    dtensor_fallback as dtensor_fallback,
    register_torch_sharding as register_sharding,  # noqa: F401  # re-exported under torch's name
    to_dtensor as to_dtensor,
)
from shardwise.compat.from_shards import init_from_local_shards as init_from_local_shards
from shardwise.compat.installing import Installation as Installation, install as install, uninstall as uninstall
from shardwise.nn.plan import Sharder as Sharder, ShardingPlan as ShardingPlan, ShardingPlanner as ShardingPlanner
from shardwise.tensor.functions import from_dtensor as from_dtensor
