"""The names of `torch.distributed._shard.common_op_utils`."""

from collections.abc import Callable
from typing import Any

from shardwise._torch import DisableTorchFunctionSubclass
from shardwise.compat.custom_ops import Decorator, Op, check_op_arguments


def _basic_validation(op: Op, args: Any = (), kwargs: Any = None) -> None:
    check_op_arguments(op, args, kwargs)


def _register_default_op(op: Op, decorator: Callable[[Op], Decorator]) -> None:
    @decorator(op)
    def tensor_default_op(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            return op(*args, **(kwargs or {}))


__all__ = ["_basic_validation", "_register_default_op"]
