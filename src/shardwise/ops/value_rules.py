"""The value of a tensor of one element: a Python number, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Comm
from shardwise.ops.settle import placed
from shardwise.tensor.dispatch import handler
from shardwise.tensor.moves import everywhere
from shardwise.tensor.sharded_tensor import ShardedTensor

aten = torch.ops.aten


@handler(aten._local_scalar_dense.default)
def _item(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """What `item()`, `float()` and `bool()` ask for; pending sums are added up, and every rank gets the value."""
    tensor: ShardedTensor = args[0].detach()
    return placed(tensor, everywhere(tuple(tensor.shape), comm.ranks), "item")._locals[0].item()
