"""The names of `torch.distributed._shard.common_op_utils`."""

from collections.abc import Callable
from typing import Any

import torch

from shardwise.tensor.custom_ops import Decorator, Op
from shardwise.tensor.custom_ops import check_op_arguments as _basic_validation


def _register_default_op(op: Op, decorator: Callable[[Op], Decorator]) -> None:
    @decorator(op)
    def tensor_default_op(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return op(*args, **(kwargs or {}))


__all__ = ["_basic_validation", "_register_default_op"]
