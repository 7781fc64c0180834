"""L3: ShardedTensor, what makes it, and what moves it."""

from shardwise.tensor import autograd_functions as _gradients  # noqa: F401  # registers torch.autograd.grad and backward
from shardwise.tensor import basic_ops as _basic_ops  # noqa: F401  # registers what every tensor can do
from shardwise.tensor.random import init as _init  # noqa: F401  # registers torch.nn.init
from shardwise.tensor.redistribute import from_local, redistribute_many, shard
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

__all__ = ["ShardedTensor", "from_local", "redistribute_many", "shard", "wrap"]
