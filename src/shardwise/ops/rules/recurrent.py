"""Recurrent layers and cells. Torch writes them as other operators; the state that it starts from is made of zeros.

These zeros are plain tensors, the same on every rank, so they are read as replicated. A plain state of other values is
refused, as plain tensors are anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import pytree
from shardwise.comm import Comm
from shardwise.ops.engine.mixed import plain_as_replicated
from shardwise.tensor.dispatch import register_function, run_function
from shardwise.tensor.sharded_tensor import ShardedTensor

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def _register_recurrent(function: Callable[..., Any]) -> None:
    @register_function(function)
    def run(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        plain = [t for t in given if not isinstance(t, ShardedTensor)]
        if any(bool(t.any()) for t in plain):
            return NotImplemented
        with plain_as_replicated():
            return run_function(function, args, kwargs)


for _name in RECURRENT:
    _register_recurrent(getattr(torch, _name))
