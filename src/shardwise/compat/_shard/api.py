"""The names of `torch.distributed._shard.api`."""

from shardwise.compat.creation import shard_tensor as _shard_tensor
from shardwise.compat.modules import reshard_output as _reshard_output
from shardwise.compat.modules import shard_module, shard_parameter
from shardwise.compat.sharded_tensor import TorchShardedTensor as ShardedTensor
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.compat.specs import PlacementShardingSpec as ShardingSpec
from shardwise.nn.model_plan import Sharder, ShardingPlan
from shardwise.nn.shard_module import collect_local_shard as _collect_local_shard
from shardwise.tensor.comms import get_current_process_group as _get_current_process_group
from shardwise.tensor.comms import load_with_process_group

__all__ = [
    "ChunkShardingSpec",
    "ShardedTensor",
    "Sharder",
    "ShardingPlan",
    "ShardingSpec",
    "_collect_local_shard",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
]
