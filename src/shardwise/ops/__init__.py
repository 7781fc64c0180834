"""L3: computing on ShardedTensors: rules, their choice, and the built-in ones."""

from shardwise.ops.dispatch_cache import call_fast_path
from shardwise.ops.engine import call_operator
from shardwise.ops.explain import HiddenCommunicationError, explain, no_communication
from shardwise.ops.implicit_replication import MixedTensorsError, plain_as_replicated, replicate
from shardwise.ops.registration import register_sharding, remove_sharding, sharding_rule
from shardwise.ops.rule import Steps, Strategy, TensorMeta
from shardwise.ops.rules import (  # noqa: F401  # each registers its rules
    attention,
    embedding,
    experts,
    foreach,
    index,
    layers,
    loss,
    matmul,
    pointwise,
    random,
    recurrent,
    reduction,
    view,
)
from shardwise.tensor.dispatch import bind_dispatch
from shardwise.tensor.sharded_tensor import ShardedTensor

bind_dispatch(ShardedTensor, function=call_fast_path, operator=call_operator)

__all__ = [
    "HiddenCommunicationError",
    "MixedTensorsError",
    "Steps",
    "Strategy",
    "TensorMeta",
    "explain",
    "no_communication",
    "plain_as_replicated",
    "register_sharding",
    "remove_sharding",
    "replicate",
    "sharding_rule",
]
