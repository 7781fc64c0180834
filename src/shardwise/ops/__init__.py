"""L3: computing on ShardedTensors: rules, their choice, and the built-in ones."""

from shardwise.ops.engine.dispatcher import call_op
from shardwise.ops.engine.explain import HiddenCommunicationError, explain, no_communication
from shardwise.ops.engine.known_calls.fast_path import call_fast_path
from shardwise.ops.engine.mixed import MixedTensorsError, plain_as_replicated, replicate
from shardwise.ops.engine.registry import Steps, Strategy, TensorMeta
from shardwise.ops.engine.rules import register_sharding, remove_sharding, sharding_rule
from shardwise.ops.rules import (  # noqa: F401  # each registers its rules
    attention,
    batch_norm,
    cat,
    conv,
    embedding,
    factory,
    foreach,
    grouped,
    index,
    linalg_fft,
    loss,
    matmul,
    minmax,
    norm,
    recurrent,
    reduction,
    sampling,
    scan,
    slice,
    strided,
    torch_distributions,
    variance,
    view,
)
from shardwise.tensor.dispatch import set_engine

set_engine(function=call_fast_path, operator=call_op)

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
