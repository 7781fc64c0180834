"""The names of `torch.distributed._shard.api`."""

from shardwise.nn.shard_module import collect_local_shard as _collect_local_shard
from shardwise.nn.shard_module import reshard_output as _reshard_output
from shardwise.nn.shard_module import shard_module, shard_parameter
from shardwise.tensor.comms import get_current_process_group as _get_current_process_group
from shardwise.tensor.comms import load_with_process_group
from shardwise.tensor.spec_shard import shard_tensor as _shard_tensor

__all__ = [
    "_collect_local_shard",
    "_get_current_process_group",
    "_reshard_output",
    "_shard_tensor",
    "load_with_process_group",
    "shard_module",
    "shard_parameter",
]
