"""L3: computing on ShardedTensors: rules, their choice, and the built-in ones."""

from shardwise.ops.engine.dispatcher import call_op
from shardwise.ops.engine.explain import HiddenCommunicationError, explain, no_communication
from shardwise.ops.engine.fast_path import call_fast_path, note_special
from shardwise.ops.engine.mixed import MixedTensorsError, plain_as_replicated, replicate
from shardwise.ops.engine.rules import Strategy, TensorMeta, register_sharding, remove_sharding, sharding_rule
from shardwise.ops.rules import attention as _attention_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import batch_norm as _batch_norm_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import cat as _join_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import conv as _conv_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import embedding as _embedding_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import factory as _copy_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import factory as _factory_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import factory as _random_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import factory as _value_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import foreach as _foreach_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import foreach as _list_norms  # noqa: F401  # registers a handler
from shardwise.ops.rules import index as _index_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import linalg_fft as _batched_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import loss as _loss_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import matmul as _linear_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import matmul as _matmul_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import minmax as _extreme_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import norm as _norm_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import reduction as _reduction_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import scan as _scan_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import scan as _softmax_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import slice as _slice_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import variance as _spread_rules  # noqa: F401  # registers rules
from shardwise.ops.rules import view as _view_rules  # noqa: F401  # registers rules
from shardwise.tensor.dispatch import set_engine

set_engine(call_op, call_fast_path, note_special)

__all__ = [
    "HiddenCommunicationError",
    "MixedTensorsError",
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
