"""L3: ShardedTensor, what makes it, and what moves it."""

from shardwise.tensor import forward_mode as _forward_mode  # noqa: F401  # registers dual numbers
from shardwise.tensor import functions as _functions  # noqa: F401  # registers equal, copy_, torch.autograd.grad and others
from shardwise.tensor.autograd_function import register_autograd_function
from shardwise.tensor.dynamo import watch_for_dynamo
from shardwise.tensor.random import init as _init  # noqa: F401  # registers torch.nn.init
from shardwise.tensor.redistribute import from_local, redistribute_many, shard
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

watch_for_dynamo()

__all__ = ["ShardedTensor", "from_local", "redistribute_many", "register_autograd_function", "shard", "wrap"]
