"""Which code handles a torch function that receives a ShardedTensor?

1. A user's own: `custom_sharded_op_impl`, then `custom_sharding_spec_op` of the tensor's spec.
2. The table below, keyed by function object. An operator that returns NotImplemented leaves the call to
   the operator's rule.
3. Otherwise torch breaks the function down into operators, and these are looked up in the same table.
4. What is in none of them is an error that names the function; nothing is gathered silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardwise._torch import DisableTorchFunctionSubclass, is_forward_grad_enabled, present_ops, pytree
from shardwise.comm import Comm
from shardwise.geometry import Layout
from shardwise.tensor.overrides import override_for

Implementation: TypeAlias = Callable[[Sequence[type], tuple[Any, ...], dict[str, Any], Comm], Any]
F = TypeVar("F", bound=Implementation)

Operator: TypeAlias = Callable[[Any, Sequence[type], tuple[Any, ...], dict[str, Any]], Any]
Function: TypeAlias = Callable[[Callable[..., Any], Sequence[type], tuple[Any, ...], dict[str, Any]], Any]

_NO_DATA = "data is not allocated"
_TABLE: dict[Callable[..., Any], Implementation] = {}
_ENGINE: list[Operator] = []
_FUNCTION: list[Function] = []
_NOTES: list[Callable[[], None]] = []


def set_engine(operator: Operator, function: Function, note: Callable[[], None]) -> None:
    """Set what computes operators that are not in the table, what is asked first for functions, and what is told when
    an operator of the table runs."""
    _ENGINE[:] = [operator]
    _FUNCTION[:] = [function]
    _NOTES[:] = [note]


class UnsupportedOpError(RuntimeError):
    """A function or operator that has no implementation for these layouts."""


def register_handler(*functions: Callable[..., Any]) -> Callable[[F], F]:
    """Register an implementation `impl(types, args, kwargs, comm)` for torch functions or operators."""

    def register(implementation: F) -> F:
        for function in present_ops(functions):
            _TABLE[function] = implementation
        return implementation

    return register


def find_handler(function: Callable[..., Any]) -> Implementation | None:
    """The implementation that is registered for a torch function or operator, or None."""
    return _TABLE.get(function)


def sharded_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The ShardedTensors among arguments, in order."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if isinstance(getattr(value, "sharding", None), Layout):
                yield value
        elif isinstance(value, list | tuple | dict):
            yield from (v for v in pytree.tree_iter(value) if isinstance(getattr(v, "sharding", None), Layout))


def enter_function(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answer a torch function, by the engine's shortcuts where there is an engine."""
    if not is_forward_grad_enabled():
        _refuse_without_tape(func, args, kwargs)
    answer = _FUNCTION[0] if _FUNCTION else call_function
    return answer(func, types, args, kwargs)


def _refuse_without_tape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise inside the forward of a `torch.autograd.Function`, where gradients of ShardedTensors would be lost.

    Torch records such a Function for wrappers that are on its tape; ours are not. Apart from inference mode, only there
    is forward-mode differentiation turned off.
    """
    if torch.is_inference_mode_enabled() or not any(t.requires_grad for t in sharded_leaves(args, kwargs)):
        return
    raise UnsupportedOpError(
        f"{getattr(func, '__name__', func)} of a ShardedTensor that requires grad, inside the forward of a "
        "torch.autograd.Function: its gradient would be lost. Apply the Function to x.local_tensor() and wrap the "
        "result with shardwise.from_local, or make it a torch.library operator; for activation checkpointing use "
        "use_reentrant=False"
    )


def call_function(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answer a torch function."""
    first = next(sharded_leaves(args, kwargs), None)
    if first is not None:
        group = first.comm.process_group or first.comm
        own = override_for(func, first.sharding.spec)
        if own is not None:
            return own(types, args, kwargs, group)
        known = _TABLE.get(func) if "out" not in kwargs else None  # writing to an existing tensor is an operator's task
        answer = NotImplemented if known is None else known(types, args, kwargs, first.comm)
        if answer is not NotImplemented:
            return answer
    try:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    except RuntimeError as error:
        if _NO_DATA not in str(error):
            raise
        raise UnsupportedOpError(
            f"{getattr(func, '__name__', func)} reads the values of a ShardedTensor before it computes, and no rank "
            "has them all; pass tensor.full() for arguments that are indices or sizes"
        ) from error


def call_operator(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answer an operator that a torch function was broken down into."""
    known = _TABLE.get(func)
    leaves = list(sharded_leaves(args, kwargs))
    if known is not None and leaves:
        answer = known(types, args, kwargs, leaves[0].comm)
        if answer is not NotImplemented:
            for note in _NOTES:
                note()
            return answer
    if _ENGINE and leaves:
        return _ENGINE[0](func, types, args, kwargs)
    layouts = ", ".join(repr(leaf.sharding.spec) for leaf in leaves)
    raise UnsupportedOpError(
        f"torch function '{func}' is not supported for ShardedTensor with {layouts}; compute on local_tensor(), or "
        "register an implementation with shardwise.custom_sharded_op_impl(function)"
    )
