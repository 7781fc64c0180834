"""The fast path: a torch function whose requirements are known runs on the local tensors directly.

1. The first call of a function with certain layouts and arguments goes through torch, which breaks it down into
   operators. Each of them reports how it ran: on local tensors with its own arguments, or otherwise; which tensors were
   moved first; which it wrote to.
2. If one operator ran on local tensors, whatever was moved before, a shortcut is kept: the layouts of the outputs,
   which inputs are moved, and which replicated ones vary. A function that writes to its first argument and returns it
   is among them. Of several operators none may move or write, and the function must return the same local result.
3. Later calls cost one look-up, the moves, one local call, a comparison of shapes and one wrap.

What is remembered is keyed by all that the answer depends on: the function, the fingerprints of the tensors (layout,
dtype, device), which arguments are the same tensor, which are differentiated, every other argument, and torch's modes.
Functions that draw random numbers, rewrite arguments, move data in their middle, or whose results' shapes depend on
values have no shortcut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import (
    autocast_device_types,
    forward_ad,
    has_saved_tensors_hooks,
    is_any_autocast_enabled,
    is_forward_grad_enabled,
)
from shardwise.comm import Comm
from shardwise.comm.traced import is_tracing
from shardwise.geometry import Layout
from shardwise.ops.engine.explain import active_watchers, is_explaining_or_forbidding
from shardwise.ops.engine.known_calls.fingerprint import find_fingerprint
from shardwise.ops.engine.known_calls.record_calls import record_call
from shardwise.ops.engine.known_calls.recording import UNKNOWN, run_and_record
from shardwise.ops.engine.known_calls.shortcuts import Shortcut, run_shortcut, vary_arguments, wrap_checked
from shardwise.tensor import caches
from shardwise.tensor.dispatch import call_function, enter_function
from shardwise.tensor.dtensors import convert_dtensors
from shardwise.tensor.inplace import count_write, is_writable
from shardwise.tensor.recorder import recorders
from shardwise.tensor.sharded_tensor import ShardedTensor, derived_types

_MAX_SHORTCUTS = 16384
_shortcuts: dict[Any, Shortcut | None] = caches.clear_on_change({})
_KEY_TYPES = frozenset((int, float, bool, type(None), torch.dtype))
_JOINS: frozenset[Any] = frozenset((torch.cat, torch.concat, torch.concatenate, torch.stack))
_ONE_TENSOR_TWICE = "one tensor twice"
_is_grad_enabled, _is_inference_mode_enabled = torch.is_grad_enabled, torch.is_inference_mode_enabled


def call_fast_path(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Run a torch function on ShardedTensors: by its shortcut, else the long way, recorded.

    Written for few instructions: what most calls are, one or two tensors or a tensor and a number, has lines of its
    own, which make the key that `_take_apart` would make.
    """
    mode = _is_grad_enabled() or 2 + _is_inference_mode_enabled()  # not 1, which equals True
    count = 0 if kwargs else len(args)
    first = args[0] if count else None
    key: Any
    if type(first) is not ShardedTensor or count > 2 or (mark := first._fingerprint or find_fingerprint(first)) is None:
        key, local, named, first, grad = _take_apart(func, mode, args, kwargs or {})
    else:
        named = None
        held = first.local_parts[0]
        grad = held.requires_grad
        if count == 1:
            key, local = (func, mode, mark, grad), (held,)
        else:
            second = args[1]
            kind = type(second)
            if second is first:
                key, local = (func, mode, mark, grad, _ONE_TENSOR_TWICE), (held, held)
            elif kind is ShardedTensor and (other := second._fingerprint or find_fingerprint(second)) is not None:
                also = second.local_parts[0]
                grads = also.requires_grad
                key, local = (func, mode, mark, grad, other, grads), (held, also)
                grad = grad or grads
            elif kind in _KEY_TYPES:
                key, local = (func, mode, mark, grad, kind, second), (held, second)
            else:
                key, local, named, first, grad = _take_apart(func, mode, args, {})
    shortcut = _shortcuts.get(key)
    if shortcut is not None and shortcut.casts and is_any_autocast_enabled():
        shortcut = _shortcuts.get((key, _autocast_state()))
    if (
        shortcut is None
        or (made := shortcut.made) is None
        or active_watchers[0]
        or forward_ad._current_level >= 0
        or (grad and not is_forward_grad_enabled())
        or not (shortcut.plain or _is_allowed(shortcut, first))
    ):
        return enter_function(_call_with_key, func, types, args, kwargs or {}, key)
    comm = first.comm
    if shortcut.vary:
        local, named = vary_arguments(shortcut, args, kwargs or {})
    if (shape := shortcut.shape) is not None:
        result = shape(local[0], made.local_shapes[comm.rank] or ())
    else:
        result = func(*local, **named) if named else func(*local)
    if shortcut.writes:
        first.__dict__.pop("_varied", None)
        if mode == 3:
            count_write(first)
        return first
    if result.dtype is not made.dtype or result.shape != made.local_shapes[comm.rank]:
        return _wrap_unexpected(func, args, made.layout, result, comm)
    wrapped = made.make_wrapper()
    wrapped.sharding, wrapped.local_parts = made.layout, (result,)  # as `wrap` does, without a call
    wrapped.comm, wrapped._fingerprint = comm, made
    if made.strides is not None:
        wrapped._dense_strides = made.strides
    return wrapped


def _is_allowed(shortcut: Shortcut, first: ShardedTensor) -> bool:
    """Whether a function that compares, writes or varies may take its shortcut now."""
    return not (
        (shortcut.compared and has_saved_tensors_hooks())  # checkpointed code saves the same at both times
        or (shortcut.writes and not is_writable(first))
    )


def _wrap_unexpected(func: Any, args: Sequence[Any], layout: Layout, result: Tensor, comm: Comm) -> ShardedTensor:
    """A result whose shape is wrong, which raises, or whose dtype is another than before.

    The latter happens where the local tensor of an argument was given other data, and so another dtype, in place.
    """
    for value in args:
        if isinstance(value, ShardedTensor):
            value._fingerprint = None
    return wrap_checked(func, layout, result, comm)


def _take_apart(
    func: Callable[..., Any], mode: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Sequence[Any], dict[str, Any], Any, bool]:
    """A key of the function, torch's modes, the tensors and every other argument; the arguments with local tensors in
    place of ShardedTensors, of which the first; and whether one of them requires grad.

    The key is None where there is no shortcut.
    """
    key: list[Any] = [func, mode, *kwargs] if kwargs else [func, mode]
    tensors: list[ShardedTensor] = []
    local: list[Any] = []
    grad = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in _KEY_TYPES:
            key += (kind, value)
            local.append(value)
        elif kind is ShardedTensor or kind in derived_types:
            mark = value._fingerprint if kind is ShardedTensor else None
            if mark is None and (mark := find_fingerprint(value)) is None:
                return None, (), {}, None, False
            held = value.local_parts[0]
            key += (mark, taped := held.requires_grad)
            grad = grad or taped
            tensors.append(value)
            local.append(held)
        elif func in _JOINS and (kind is list or kind is tuple):
            marks = [v._fingerprint or find_fingerprint(v) if type(v) is ShardedTensor else None for v in value]
            if None in marks:
                return None, (), {}, None, False
            parts = [v.local_parts[0] for v in value]
            key += (kind, *marks, *(t.requires_grad for t in parts))
            grad = grad or any(t.requires_grad for t in parts)
            tensors += value
            local.append(kind(parts))
        elif (part := _argument_key(value)) is not None:
            key.append(part)
            local.append(value)
        else:
            return None, (), {}, None, False
    if len(tensors) > 1:
        ids = [*map(id, tensors)]
        if len({*ids}) < len(ids):
            key.append(tuple(map(ids.index, ids)))  # for each tensor the first place where the same one is passed
    first = tensors[0] if tensors else None
    if not kwargs:
        return tuple(key), local, kwargs, first, grad
    count = len(args)
    return tuple(key), local[:count], dict(zip(kwargs, local[count:], strict=True)), first, grad


def _autocast_state() -> tuple[Any, ...]:
    """On which device types autocast is on, and to which dtypes it casts."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in autocast_device_types if torch.is_autocast_enabled(d))


def _call_with_key(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any
) -> Any:
    if active_watchers[0] and recorders:
        return record_call(lambda: _call_by_key(func, types, args, kwargs, key), func, args, kwargs)
    return _call_by_key(func, types, args, kwargs, key)


def _call_by_key(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any
) -> Any:
    if key is None or (active_watchers[0] and is_explaining_or_forbidding()):
        return call_function(func, types, *convert_dtensors(args, kwargs))
    shortcut = _shortcuts.get(key, UNKNOWN)
    cast_key = key
    if (shortcut is UNKNOWN or shortcut is None or shortcut.casts) and is_any_autocast_enabled():
        cast_key = key, _autocast_state()
        shortcut = _shortcuts.get(cast_key, UNKNOWN)
    if shortcut is UNKNOWN and is_tracing():
        shortcut = None  # a trace has no values to compare
    if shortcut is None or (shortcut is not UNKNOWN and shortcut.compared and has_saved_tensors_hooks()):
        return call_function(func, types, args, kwargs)  # checkpointed code saves the same at both times
    if shortcut is UNKNOWN:
        if len(_shortcuts) > _MAX_SHORTCUTS:
            _shortcuts.clear()
        result, found = run_and_record(func, types, args, kwargs)
        if found is not UNKNOWN:
            _shortcuts[cast_key if found is None or found.casts else key] = found
        return result
    return run_shortcut(shortcut, func, args, kwargs)


def _argument_key(value: Any) -> Any:
    """What an argument that is not a tensor adds to a key; None where nothing may be remembered about it."""
    kind = type(value)
    if kind in _KEY_TYPES or kind is str or value is Ellipsis:
        return kind, value
    if kind is slice:
        bounds = _argument_key((value.start, value.stop, value.step))
        return None if bounds is None else (slice, bounds)
    if kind is not tuple and kind is not list and kind is not torch.Size:
        return None
    for number in value:
        if type(number) is not int:
            parts = [_argument_key(v) for v in value]
            return None if None in parts else (kind, *parts)
    return kind, *value
