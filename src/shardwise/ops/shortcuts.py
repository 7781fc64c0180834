"""The fast way: a function of which is known what it takes runs on the local tensors as it is.

1. The first call of a function with given layouts and arguments goes through torch, which breaks it down into
   operators. These are watched, see `recorded.py`.
2. If all of them ran on local tensors with unchanged arguments, and, where there were several, the function itself
   gives the same local result, then a shortcut is kept: the layouts of the outputs, which inputs are moved, and which
   replicated ones vary.
3. Later calls cost one look-up, the moves, one local call and one wrap.

Functions that draw random numbers, rewrite arguments, or move data in their middle have no shortcut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.ops.recorded import UNKNOWN, recorded
from shardwise.ops.short_way import Shortcut, run_short
from shardwise.ops.watch import is_watched, watchers
from shardwise.tensor import generation
from shardwise.tensor.dispatch import call_function
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_MOST = 16384


_shortcuts: dict[Any, Shortcut | None] = generation.cleared_on_change({})
_SIMPLE = frozenset((int, float, bool, type(None), torch.dtype))


def call_through(func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on ShardedTensors: by its shortcut, else the long way, watched.

    The first part is the fast way of fast ways, for positional tensors and numbers; it is written for few instructions.
    """
    key: Any = [func]
    local = []
    comm: Any = None
    if not kwargs:
        for value in args:
            kind = type(value)
            if kind is ShardedTensor:
                if len(value._locals) != 1:
                    break
                held = value._locals[0]
                key.append(id(value._layout))
                key.append(held.dtype)
                local.append(held)
                comm = value._comm
            elif kind in _SIMPLE:
                key.append(kind)
                key.append(value)
                local.append(value)
            else:
                break
        else:
            key = tuple(key)
            shortcut = _shortcuts.get(key)
            if shortcut is not None and not watchers[0]:
                if shortcut.direct:
                    return wrap(shortcut.outputs[0], (func(*local),), comm)
                return run_short(shortcut, func, args, kwargs)
            return _call_with_key(func, types, args, kwargs, key)
    return _call_with_key(func, types, args, kwargs, _key(func, args, kwargs))


def _call_with_key(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any
) -> Any:
    if key is None or (watchers[0] and is_watched()):
        return call_function(func, types, args, kwargs)
    shortcut = _shortcuts.get(key, UNKNOWN)
    if shortcut is None:
        return call_function(func, types, args, kwargs)
    if shortcut is UNKNOWN:
        if len(_shortcuts) > _MOST:
            _shortcuts.clear()
        result, found = recorded(func, types, args, kwargs)
        if found is not UNKNOWN:
            _shortcuts[key] = found
        return result
    return run_short(shortcut, func, args, kwargs)


def _key(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A key of the function, the layouts and every other argument; None where there is no shortcut."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is ShardedTensor:
            if len(value._locals) != 1:
                return None
            parts.append((id(value._layout), value._locals[0].dtype))
        elif kind in _SIMPLE or kind is str:
            parts.append((kind, value))
        elif kind is tuple or kind is torch.Size or kind is list:
            for number in value:
                if type(number) is not int:
                    return None
            parts.append((kind, *value))
        else:
            return None
    if kwargs:
        parts.append(tuple(kwargs))
    return tuple(parts)
