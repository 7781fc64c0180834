"""The fast way: a function that is known to need no communication runs on the local tensors as it is.

1. The first call of a function with given layouts and arguments goes through torch, which breaks it down into
   operators. These are watched.
2. If all of them ran on local tensors with unchanged arguments, and, where there were several, the function itself
   gives the same local result, then a shortcut is kept: the layouts of the outputs, and which replicated inputs vary.
3. Later calls cost one look-up, one local call and one wrap.

Functions that draw random numbers, move data, rewrite arguments or write to tensors have no shortcut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.geometry import Layout, MeshSpec, Replicate
from shardwise.ops.vary import varied
from shardwise.ops.watch import is_watched, watchers
from shardwise.tensor import generation
from shardwise.tensor.dispatch import call_function
from shardwise.tensor.per_layout import per_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

_MOST = 16384


@dataclass(frozen=True, slots=True)
class Shortcut:
    """What a call gives without asking anyone: output layouts and varying axes of each tensor.

    `direct`: nothing varies and there is one output. `reshape`: the local tensor takes the shape that the output's
    layout gives it. The layouts of the inputs are kept alive, since keys hold their identities.
    """

    outputs: tuple[Layout, ...]
    several: type | None
    vary: tuple[tuple[int, ...], ...]
    direct: bool
    keep: tuple[Layout, ...]
    reshape: bool = False


@dataclass
class Recording:
    """What happened below a function: how many operators ran, and whether one of them forbids a shortcut."""

    operators: int = 0
    plain: bool = True


class _State(threading.local):
    recording: Recording | None = None


_state = _State()
_shortcuts: dict[Any, Shortcut | None] = generation.cleared_on_change({})
_SIMPLE = frozenset((int, float, bool, type(None), torch.dtype))
_RESHAPES: frozenset[Any] = frozenset(
    (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten)
)


def note_operator(plain: bool) -> None:
    """Tell the recording that an operator ran, and whether it ran on local tensors with its own arguments."""
    if _state.recording is not None:
        _state.recording.operators += 1
        _state.recording.plain &= plain


def note_special() -> None:
    """Tell the recording that something other than a plain operator ran: no shortcut."""
    note_operator(plain=False)


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
                key.append(id(value._layout))
                local.append(value._locals[0])
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
                return _short(shortcut, func, args, kwargs)
            return _call_with_key(func, types, args, kwargs, key)
    return _call_with_key(func, types, args, kwargs, _key(func, args, kwargs))


def _call_with_key(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any
) -> Any:
    if key is None or (watchers[0] and is_watched()):
        return call_function(func, types, args, kwargs)
    shortcut = _shortcuts.get(key, _UNKNOWN)
    if shortcut is None:
        return call_function(func, types, args, kwargs)
    if shortcut is _UNKNOWN:
        if len(_shortcuts) > _MOST:
            _shortcuts.clear()
        return _recorded(func, types, args, kwargs, key)
    return _short(shortcut, func, args, kwargs)


_UNKNOWN: Any = object()


def _key(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A key of the function, the layouts and every other argument; None where there is no shortcut."""
    parts: list[Any] = [func]
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is ShardedTensor:
            if len(value._locals) != 1:
                return None
            parts.append(id(value._layout))
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


def _short(shortcut: Shortcut, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if shortcut.reshape:
        return _reshaped(shortcut.outputs[0], args[0])
    if shortcut.direct:
        return _direct(shortcut.outputs[0], func, args, kwargs)
    tensors = [value for value in args if type(value) is ShardedTensor]
    axes = iter(shortcut.vary)
    local_args = [_local(value, next(axes)) if type(value) is ShardedTensor else value for value in args]
    if kwargs:
        kwargs, named = _local_kwargs(shortcut, kwargs, len(tensors))
        tensors += named
    result = func(*local_args, **kwargs)
    comm = tensors[0]._comm
    if shortcut.several is None:
        return wrap(shortcut.outputs[0], (result,), comm)
    return shortcut.several([wrap(layout, (r,), comm) for layout, r in zip(shortcut.outputs, result, strict=True)])


def _direct(layout: Layout, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    comm: Any = None
    local_args: list[Any] = []
    for value in args:
        if type(value) is ShardedTensor:
            comm = value._comm
            value = value._locals[0]
        local_args.append(value)
    if not kwargs:
        return wrap(layout, (func(*local_args),), comm)
    local_kwargs = {}
    for name, value in kwargs.items():
        if type(value) is ShardedTensor:
            comm = value._comm
            value = value._locals[0]
        local_kwargs[name] = value
    return wrap(layout, (func(*local_args, **local_kwargs),), comm)


def _reshaped(layout: Layout, tensor: ShardedTensor) -> ShardedTensor:
    comm = tensor._comm
    return wrap(layout, (tensor._locals[0].reshape(layout.local_shapes(comm.rank)[0]),), comm)


def _local(tensor: ShardedTensor, axes: tuple[int, ...]) -> Tensor:
    return varied(tensor, tensor._layout, axes) if axes else tensor._locals[0]


def _local_kwargs(shortcut: Shortcut, kwargs: dict[str, Any], first: int) -> tuple[dict[str, Any], list[ShardedTensor]]:
    """Named arguments with local tensors, and the ShardedTensors among them, numbered from `first` on."""
    names = [name for name, value in kwargs.items() if type(value) is ShardedTensor]
    local = {name: _local(kwargs[name], shortcut.vary[first + i]) for i, name in enumerate(names)}
    return {**kwargs, **local}, [kwargs[name] for name in names]


def _recorded(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any
) -> Any:
    before, _state.recording = _state.recording, Recording()
    try:
        result = call_function(func, types, args, kwargs)
        recording = _state.recording
    finally:
        _state.recording = before
    if before is not None:
        before.operators += recording.operators
        before.plain &= recording.plain
    found = _shortcut(func, args, kwargs, result, recording)
    if found is not _UNKNOWN:
        _shortcuts[key] = found
    return result


def _shortcut(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, recording: Recording
) -> Shortcut | None:
    """The shortcut of a call that was watched, None if it may have none, _UNKNOWN if another call has to tell."""
    outputs = list(result) if type(result) in (list, tuple) else [result]
    tensors = [v for v in (*args, *kwargs.values()) if type(v) is ShardedTensor]
    if func in _RESHAPES and recording.operators == 1 and type(result) is type(args[0]) is ShardedTensor and not kwargs:
        return Shortcut((result._layout,), None, ((),), False, (args[0]._layout,), reshape=True)
    if not recording.plain or recording.operators == 0 or not all(type(o) is ShardedTensor for o in outputs):
        return None
    if any(o is t for o in outputs for t in tensors):
        return None
    vary = _varying_axes([t._layout for t in tensors], [o._layout for o in outputs])
    if vary is None or (recording.operators > 1 and any(vary)):
        return None  # several operators reduce gradients in an order of their own, and all ranks must keep one order
    several = type(result) if type(result) in (list, tuple) else None
    layouts = tuple(o._layout for o in outputs)
    direct = several is None and not any(vary)
    made = Shortcut(layouts, several, vary, direct, tuple(t._layout for t in tensors))
    if recording.operators > 1 and not all(_is_even(t._layout) for t in tensors):
        return None
    verdict = recording.operators <= 1 or _gives_the_same(made, func, args, kwargs, outputs)
    return _UNKNOWN if verdict is None else (made if verdict else None)


@per_layout
def _is_even(layout: Layout) -> bool:
    """Whether all ranks hold the same shape, so that what one of them finds out about a function holds for all."""
    return len({layout.local_shapes(rank) for rank in layout.ranks}) <= 1


def _varying_axes(inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[tuple[int, ...], ...] | None:
    """The axes along which each input varies; None if some outputs of a varying axis are replicated."""
    specs = [layout.spec for layout in (*inputs, *outputs)]
    if not all(isinstance(s, MeshSpec) and s.mesh == specs[0].mesh for s in specs):  # type: ignore[attr-defined]
        return None
    placements = [s.placements for s in specs if isinstance(s, MeshSpec)]
    vary: list[list[int]] = [[] for _ in inputs]
    for axis in range(len(placements[0])):
        replicated = [isinstance(p[axis], Replicate) for p in placements]
        if all(replicated) or specs[0].mesh.shape[axis] == 1:  # type: ignore[attr-defined]  # a MeshSpec
            continue
        if any(replicated[len(inputs) :]):
            return None
        for index in range(len(inputs)):
            if replicated[index]:
                vary[index].append(axis)
    return tuple(tuple(v) for v in vary)


def _gives_the_same(
    shortcut: Shortcut,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[ShardedTensor],
) -> bool | None:
    """Whether the function on the local tensors gives the local results that its operators gave.

    None: these values do not tell. A mean over a wrong count of zeros, or of nothing, is right by chance.
    """
    try:
        result = _short(shortcut, func, args, kwargs)
    except (RuntimeError, ValueError, IndexError):
        return False
    again = list(result) if shortcut.several is not None else [result]
    if len(again) != len(outputs):
        return False
    if any(a.requires_grad != o.requires_grad for a, o in zip(again, outputs, strict=True)):
        return False
    pairs = [(a._locals[0].detach(), o._locals[0].detach()) for a, o in zip(again, outputs, strict=True)]
    if not all(_same(a, o) for a, o in pairs):
        return False
    return True if all(bool(o.any()) for _, o in pairs) else None


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    close = torch.eq(one, other)
    both_missing = (one != one) & (other != other)
    return bool((close | both_missing).all())
