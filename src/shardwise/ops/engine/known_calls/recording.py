"""What happens below a torch function the first time, and which shortcut may be taken later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import autocast_keys_of, has_saved_tensors_hooks, storage_identity
from shardwise.geometry import Layout, MeshSpec, Replicate
from shardwise.ops.engine.known_calls.fingerprint import get_fingerprint
from shardwise.ops.engine.known_calls.shaped import find_shape_function
from shardwise.ops.engine.known_calls.shortcuts import Shortcut, list_tensors, run_shortcut
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.dispatch import call_function, override_for, sharded_leaves
from shardwise.tensor.moving.autograd import is_differentiated
from shardwise.tensor.sharded_tensor import ShardedTensor

UNKNOWN: Any = object()


@dataclass
class FunctionRecording:
    """What happened below a function: how many operators ran, whether one of them forbids a shortcut, in which layout
    an operator took each tensor, under which name, what was written to, and whether autocast would cast anything."""

    operators: int = 0
    plain: bool = True
    casts: bool = False
    wanted: list[tuple[ShardedTensor, Layout]] = field(default_factory=list)
    written: list[ShardedTensor] = field(default_factory=list)
    label: str = ""

    @property
    def moved(self) -> list[ShardedTensor]:
        """The tensors that an operator took in another layout than their own."""
        return [tensor for tensor, layout in self.wanted if tensor.sharding is not layout]

    def add(self, other: FunctionRecording) -> None:
        """What happened below a function that this one called."""
        self.operators += other.operators
        self.plain &= other.plain
        self.casts |= other.casts
        self.wanted += other.wanted
        self.written += other.written
        self.label = other.label


class _RecordingState(threading.local):
    recording: FunctionRecording | None = None


_recording_state = _RecordingState()


def is_function_recorded() -> bool:
    """Whether a function is being watched."""
    return _recording_state.recording is not None


def note_operator(
    plain: bool,
    wanted: Sequence[tuple[ShardedTensor, Layout]] = (),
    written: Sequence[ShardedTensor] = (),
    label: str = "",
) -> None:
    """Record that an operator ran: whether on local tensors with its own arguments, in which layouts it took its
    tensors (and under which name they were moved), and what it wrote to."""
    if _recording_state.recording is not None:
        _recording_state.recording.add(FunctionRecording(1, plain, False, list(wanted), list(written), label))


def note_entry(op: Any) -> None:
    """Record that an operator is entered: autocast, where it is on, may cast its arguments."""
    if _recording_state.recording is not None:
        _recording_state.recording.casts |= bool(autocast_keys_of(op))


def note_special() -> None:
    """Record that something other than a plain operator ran: no shortcut."""
    note_operator(plain=False)


def run_and_record(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Run a function the long way, and say by which shortcut it may run later.

    None: by none. UNKNOWN: another call has to show.
    """
    first = next(sharded_leaves(args, kwargs), None)
    if first is not None and override_for(func, first.sharding.spec) is not None:
        return call_function(func, types, args, kwargs), None  # what it does below is not what the function does
    before, _recording_state.recording = _recording_state.recording, FunctionRecording()
    try:
        result = call_function(func, types, args, kwargs)
        recording = _recording_state.recording
    finally:
        _recording_state.recording = before
    if before is not None:
        before.add(recording)
    return result, _find_shortcut(func, args, kwargs, result, recording)


def _find_shortcut(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, recording: FunctionRecording
) -> Any:
    several, outputs = _split_result(result)
    tensors = list_tensors(args, kwargs)
    shape = None if recording.moved else find_shape_function(func, args, kwargs, result, recording.operators)
    if shape is not None:
        shaped = get_fingerprint(result.sharding, result.dtype, result.device, result._dense_strides)
        strides = _strides_of(outputs)
        return Shortcut((result.sharding,), None, (), shaped, casts=recording.casts, shape=shape, strides=strides)
    if not recording.plain or recording.operators == 0 or not all(isinstance(o, ShardedTensor) for o in outputs):
        return None
    if recording.operators > 1:
        return _find_shortcut_of_several(func, args, kwargs, result, recording)
    fits = _gives_back_what_it_writes(args, result, tensors, recording)
    moves = _find_moves(tensors, recording) if fits else None
    if moves is None:
        return None
    wanted = [move or t.sharding for t, move in zip(tensors, moves, strict=True)]
    vary = _varying_axes(wanted, [o.sharding for o in outputs])
    if vary is None:
        return None
    if not recording.written:  # what is written to may require grad only now
        vary = tuple(axes if is_differentiated(t) else () for t, axes in zip(tensors, vary, strict=True))
    vary = vary if any(vary) else ()
    layouts, writes = tuple(o.sharding for o in outputs), bool(recording.written)
    moves = moves if any(move is not None for move in moves) else ()
    direct = several is None and not moves and not (vary and writes)
    made = get_fingerprint(result.sharding, result.dtype, result.device, result._dense_strides) if direct else None
    casts, label, strides = recording.casts, recording.label, _strides_of(outputs)
    return Shortcut(layouts, several, vary, made, casts, moves=moves, label=label, writes=writes, strides=strides)


def _split_result(result: Any) -> tuple[type | None, list[Any]]:
    """The type of several results, a list or a tuple, also one with names (`torch.return_types`), and all results."""
    kind = type(result)
    if kind in (list, tuple) or kind.__module__ == "torch.return_types":
        return kind, list(result)
    return None, [result]


def _strides_of(outputs: Sequence[ShardedTensor]) -> tuple[tuple[int, ...] | None, ...]:
    """The strides that each output would have as a whole; empty if all are contiguous."""
    found = tuple(o._dense_strides for o in outputs)
    return found if any(found) else ()


def _gives_back_what_it_writes(
    args: Sequence[Any], result: Any, tensors: Sequence[ShardedTensor], recording: FunctionRecording
) -> bool:
    """Whether a function writes to nothing and returns something new, or writes to and returns its first argument."""
    if not recording.written:
        return not any(o is t for o in _split_result(result)[1] for t in tensors)
    return bool(args) and result is args[0] and all(t is result for t in recording.written)


def _find_moves(tensors: Sequence[ShardedTensor], recording: FunctionRecording) -> tuple[Layout | None, ...] | None:
    """Where each tensor is moved before the function runs.

    None if one is wanted in two layouts, is not an argument, or would be moved in another order: all ranks
    must keep one order, whether they take the shortcut or not.
    """
    wanted: dict[int, Layout] = {}
    for tensor, layout in recording.wanted:
        if wanted.setdefault(id(tensor), layout) is not layout:
            return None
    moved = list(dict.fromkeys(id(t) for t in recording.moved))
    if moved != list(dict.fromkeys(id(t) for t in tensors if id(t) in moved)):
        return None
    return tuple(wanted[id(t)] if id(t) in moved else None for t in tensors)


def _find_shortcut_of_several(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, recording: FunctionRecording
) -> Any:
    """The shortcut of a function of several operators, none of which moved or wrote anything."""
    several, outputs = _split_result(result)
    tensors = list_tensors(args, kwargs)
    if recording.moved or recording.written or any(o is t for o in outputs for t in tensors):
        return None
    vary = _varying_axes([t.sharding for t in tensors], [o.sharding for o in outputs])
    if vary is None or any(vary) or not all(_is_even(t.sharding) for t in tensors):
        return None  # several operators reduce gradients in an order of their own, and all ranks must keep one order
    if any(t._dense_strides for t in tensors) and _shares_memory(tensors, outputs):
        return None  # whether it copies depends on the strides of the whole
    made = None if several else get_fingerprint(result.sharding, result.dtype, result.device, result._dense_strides)
    layouts, strides = tuple(o.sharding for o in outputs), _strides_of(outputs)
    shortcut = Shortcut(layouts, several, (), made, casts=recording.casts, compared=True, strides=strides)
    if has_saved_tensors_hooks():
        return UNKNOWN  # the comparison would be seen by the hooks
    verdict = _gives_the_same(shortcut, func, args, kwargs, outputs)
    return UNKNOWN if verdict is None else (shortcut if verdict else None)


def _shares_memory(tensors: Sequence[ShardedTensor], outputs: Sequence[ShardedTensor]) -> bool:
    held = [{storage_identity(p.untyped_storage()) for t in some for p in t.local_parts} for some in (tensors, outputs)]
    return not held[0].isdisjoint(held[1])


@cache_by_identity
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
    """Whether the function on the local tensors returns the local results that its operators returned.

    None: these values are inconclusive. A mean over a wrong count of zeros, or of nothing, is right by chance.
    """
    try:
        result = run_shortcut(shortcut, func, args, kwargs)
    except (RuntimeError, ValueError, IndexError):
        return False
    again = list(result) if shortcut.several is not None else [result]
    if len(again) != len(outputs):
        return False
    if any(a.requires_grad != o.requires_grad for a, o in zip(again, outputs, strict=True)):
        return False
    pairs = [(a.local_parts[0].detach(), o.local_parts[0].detach()) for a, o in zip(again, outputs, strict=True)]
    if not all(_same_result(a, o) for a, o in pairs):
        return False
    return True if all(bool(o.any()) for _, o in pairs) else None


def _same_result(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    close = torch.eq(one, other)
    both_missing = (one != one) & (other != other)
    return bool((close | both_missing).all())
