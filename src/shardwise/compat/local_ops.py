"""Operators that programs define by what they do to this rank's shards, or to its only local tensor.

The result has the layout of the first argument, unless the program's own function returns another one. What comes
before the operator: a check that may raise, and a test that may end the call with the argument as its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from shardwise.compat.custom_ops import (
    Op,
    check_op_arguments,
    custom_sharding_spec_op,
    function_name,
    sharded_op_impl,
)
from shardwise.compat.sharded_tensor import TorchShardedTensor
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.tensor.shards import Shard

Check: TypeAlias = Callable[..., Any]


def check_before(op: Op, early_stop_func: Check | None, extra_check: Check | None) -> Callable[[Op], Op]:
    """Decorate an implementation of an operator: its arguments are checked, then it may end early.

    >>> check_before(abs, None, None)(lambda types, args, kwargs, pg: args)(())
    Traceback (most recent call last):
    ...
    ValueError: No input for 'abs'! Pass at least one ShardedTensor
    """

    def decorate(implementation: Op) -> Op:
        @functools.wraps(implementation)
        def checked(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
            check_op_arguments(op, args, kwargs)
            kwargs = kwargs or {}
            if extra_check is not None:
                extra_check(*args, **kwargs)
            if early_stop_func is not None and early_stop_func(*args, **kwargs):
                return args[0]
            return implementation(types, args, kwargs, pg)

        return checked

    return decorate


def register_on_local_shards(
    op: Op,
    early_stop_func: Check | None = None,
    extra_check: Check | None = None,
    customized_func: Check | None = None,
) -> None:
    """Compute an operator on each local shard; `customized_func(args, kwargs, pg)` returns shards and metadata."""

    @sharded_op_impl(op)
    @check_before(op, early_stop_func, extra_check)
    def on_local_shards(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        tensor, rest = args[0], args[1:]
        if customized_func is not None:
            shards, metadata = customized_func(args, kwargs, pg)
        else:
            shards = [Shard(op(s.tensor, *rest, **kwargs), s.metadata) for s in tensor.local_shards()]
            metadata = tensor.metadata()
        return TorchShardedTensor._init_from_local_shards_and_global_metadata(
            shards, metadata, process_group=pg, init_rrefs=tensor._init_rrefs, sharding_spec=tensor.sharding_spec()
        )


def register_on_local_tensor(
    op: Op,
    early_stop_func: Check | None = None,
    extra_check: Check | None = None,
    customized_func: Check | None = None,
) -> None:
    """Compute an operator on the only local tensor of a tensor in chunks.

    `customized_func(args, kwargs, pg)` returns the local tensor, the spec and the size of the result.
    """

    @custom_sharding_spec_op(ChunkShardingSpec, op)
    @check_before(op, early_stop_func, extra_check)
    def on_local_tensor(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        tensor, rest = args[0], args[1:]
        if len(tensor.local_shards()) != 1:
            raise TypeError(
                f"torch function '{function_name(op)}' is only supported for single local tensor! This rank has "
                f"{len(tensor.local_shards())} shards of {tensor.sharding_spec()}"
            )
        spec, size = tensor.sharding_spec(), tensor.size()
        if customized_func is not None:
            local, spec, size = customized_func(args, kwargs, pg)
        else:
            local = op(tensor.local_tensor(), *rest, **kwargs)
        return TorchShardedTensor._init_from_local_tensor(
            local.contiguous(), spec, size, process_group=pg, init_rrefs=tensor._init_rrefs
        )


def check_chunk_spec(spec: object, op: Op) -> None:
    """Raise unless a spec is a ChunkShardingSpec."""
    if not isinstance(spec, ChunkShardingSpec):
        raise NotImplementedError(
            f"Only ChunkShardingSpec supported for '{function_name(op)}', got {type(spec).__name__}"
        )
