"""The names of `torch.distributed._shard.op_registry_utils`."""

import functools
from inspect import signature
from typing import Any

from shardwise.compat.custom_ops import Impl, Op, Table, check_op_arguments, function_name


def _register_op(op: Op, func: Impl, op_table: Table) -> None:
    if len(signature(func).parameters) != 4:
        raise TypeError(
            "Custom sharded op function expects signature: (types, args, kwargs, process_group), but received "
            f"signature: {signature(func)} for '{function_name(op)}'"
        )
    op_table[op] = func


def _decorator_func(wrapped_func: Impl, op: Op, op_table: Table) -> Impl:
    @functools.wraps(wrapped_func)
    def wrapper(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        check_op_arguments(op, args, kwargs)
        return wrapped_func(types, args, kwargs, process_group)

    _register_op(op, wrapper, op_table)
    return wrapper


__all__ = ["_decorator_func", "_register_op"]
