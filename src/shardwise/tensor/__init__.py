"""L3: ShardedTensor, what makes it, and what moves it."""

from shardwise.tensor import autograd_function as _forward_mode  # noqa: F401  # registers dual numbers
from shardwise.tensor import functions as _functions  # noqa: F401  # registers equal, copy_, torch.autograd.grad and others
from shardwise.tensor import random_init as _init  # noqa: F401  # registers torch.nn.init
from shardwise.tensor.autograd_function import register_autograd_function
from shardwise.tensor.creation import from_local, redistribute_many, shard
from shardwise.tensor.functions import watch_for_dynamo
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

watch_for_dynamo()

__all__ = ["ShardedTensor", "from_local", "redistribute_many", "register_autograd_function", "shard", "wrap"]
