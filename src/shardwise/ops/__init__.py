"""L3: computing on ShardedTensors: rules, their choice, and the built-in ones."""

from shardwise.ops import attention_rules as _attention_rules  # noqa: F401  # registers rules
from shardwise.ops import batch_norm_rules as _batch_norm_rules  # noqa: F401  # registers rules
from shardwise.ops import batched_rules as _batched_rules  # noqa: F401  # registers rules
from shardwise.ops import conv_rules as _conv_rules  # noqa: F401  # registers rules
from shardwise.ops import copy_rules as _copy_rules  # noqa: F401  # registers rules
from shardwise.ops import embedding_rules as _embedding_rules  # noqa: F401  # registers rules
from shardwise.ops import extreme_rules as _extreme_rules  # noqa: F401  # registers rules
from shardwise.ops import factory_rules as _factory_rules  # noqa: F401  # registers rules
from shardwise.ops import foreach_rules as _foreach_rules  # noqa: F401  # registers rules
from shardwise.ops import index_rules as _index_rules  # noqa: F401  # registers rules
from shardwise.ops import join_rules as _join_rules  # noqa: F401  # registers rules
from shardwise.ops import linear_rules as _linear_rules  # noqa: F401  # registers rules
from shardwise.ops import list_norms as _list_norms  # noqa: F401  # registers a handler
from shardwise.ops import loss_rules as _loss_rules  # noqa: F401  # registers rules
from shardwise.ops import matmul_rules as _matmul_rules  # noqa: F401  # registers rules
from shardwise.ops import norm_rules as _norm_rules  # noqa: F401  # registers rules
from shardwise.ops import random_rules as _random_rules  # noqa: F401  # registers rules
from shardwise.ops import reduction_rules as _reduction_rules  # noqa: F401  # registers rules
from shardwise.ops import scan_rules as _scan_rules  # noqa: F401  # registers rules
from shardwise.ops import slice_rules as _slice_rules  # noqa: F401  # registers rules
from shardwise.ops import softmax_rules as _softmax_rules  # noqa: F401  # registers rules
from shardwise.ops import spread_rules as _spread_rules  # noqa: F401  # registers rules
from shardwise.ops import value_rules as _value_rules  # noqa: F401  # registers rules
from shardwise.ops import view_rules as _view_rules  # noqa: F401  # registers rules
from shardwise.ops.engine import call_op
from shardwise.ops.mixed import MixedTensorsError, plain_as_replicated, replicate
from shardwise.ops.recorded import note_special
from shardwise.ops.rules import Strategy, TensorMeta, register_sharding, remove_sharding, sharding_rule
from shardwise.ops.shortcuts import call_through
from shardwise.ops.watch import HiddenCommunicationError, explain, no_communication
from shardwise.tensor.dispatch import set_engine

set_engine(call_op, call_through, note_special)

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
