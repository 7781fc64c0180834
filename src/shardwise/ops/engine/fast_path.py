"""The fast path: a torch function whose requirements are known runs on the local tensors directly.

1. The first call of a function with certain layouts and arguments goes through torch, which breaks it down into
   operators. Each of them reports how it ran: on local tensors with its own arguments, or otherwise; which tensors were
   moved first; which it wrote to.
2. If one operator ran on local tensors, whatever was moved before, a shortcut is kept: the layouts of the outputs,
   which inputs are moved, and which replicated ones vary. A function that writes to its first argument and returns it
   is among them. Of several operators none may move or write, and the function must return the same local result.
3. Later calls cost one look-up, the moves, one local call, a comparison of shapes and one wrap.

What is remembered is keyed by all that the answer depends on: the function, layouts, dtypes, devices, which arguments
are the same tensor, which are differentiated, every other argument, and torch's modes. Functions that draw random
numbers, rewrite arguments, move data in their middle, or whose results' shapes depend on values have no shortcut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise._torch import (
    autocast_device_types,
    has_saved_tensors_hooks,
    is_any_autocast_enabled,
    make_wrapper_subclass,
)
from shardwise.comm.traced import is_tracing
from shardwise.geometry import Layout, LayoutError, MeshSpec, Replicate
from shardwise.ops.engine.explain import active_watchers, is_explaining_or_forbidding
from shardwise.ops.engine.gather_again import free_after_forward
from shardwise.ops.engine.vary import move_input, vary_along
from shardwise.tensor import caches
from shardwise.tensor.caches import cache_by_identity
from shardwise.tensor.dispatch import call_function
from shardwise.tensor.dtensors import convert_dtensors
from shardwise.tensor.inplace import check_writable
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor, derived_types, wrap


@dataclass(frozen=True, slots=True)
class Shortcut:
    """How a function runs on local tensors: output layouts and varying axes of each tensor.

    `direct`: nothing moves, nothing varies, nothing is written to, and there is one output. `reshape`: the local tensor
    takes the shape from the output's layout. `moves`: the layout in which a tensor is wanted, None where it
    has it. `writes`: the first argument is written to and returned. The layouts of the inputs are kept alive, since
    keys hold their identities. `compared`: of several operators; other tensors are saved for the backward pass than by
    these. `shapes`: the local shape of the first output on ranks that have run the shortcut.
    """

    outputs: tuple[Layout, ...]
    several: type | None
    vary: tuple[tuple[int, ...], ...]
    direct: bool
    keep: tuple[Layout, ...]
    reshape: bool = False
    moves: tuple[Layout | None, ...] = ()
    label: str = ""
    writes: bool = False
    compared: bool = False
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)


def run_shortcut(shortcut: Shortcut, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function by its shortcut."""
    if shortcut.reshape:
        return _reshape_locals(shortcut.outputs[0], args[0])
    if shortcut.direct or (shortcut.compared and shortcut.several is None):
        return _run_direct(shortcut, func, args, kwargs)
    tensors = [value for value in args if isinstance(value, ShardedTensor)]
    if kwargs:
        tensors += [value for value in kwargs.values() if isinstance(value, ShardedTensor)]
    if shortcut.writes:
        check_writable(tensors[0])
    aligned = _align_all_inputs(tensors, shortcut.moves, shortcut.label) if shortcut.moves else tensors
    local = iter(_vary_locals(shortcut, aligned))
    local_args = [next(local) if isinstance(value, ShardedTensor) else value for value in args]
    if kwargs:
        kwargs = {n: next(local) if isinstance(value, ShardedTensor) else value for n, value in kwargs.items()}
    with free_after_forward(aligned):
        result = func(*local_args, **kwargs)
    if shortcut.writes:
        tensors[0].__dict__.pop("_varied", None)
        return tensors[0]
    comm = tensors[0].comm
    if shortcut.several is None:
        check_local_shape(func, shortcut.outputs[0], result, comm.rank)
        return wrap(shortcut.outputs[0], (result,), comm)
    for layout, value in zip(shortcut.outputs, result, strict=True):
        check_local_shape(func, layout, value, comm.rank)
    return shortcut.several([wrap(layout, (r,), comm) for layout, r in zip(shortcut.outputs, result, strict=True)])


def _run_direct(
    shortcut: Shortcut, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ShardedTensor:
    comm: Any = None
    local_args: list[Any] = []
    for value in args:
        if isinstance(value, ShardedTensor):
            comm = value.comm
            value = value.local_parts[0]
        local_args.append(value)
    local_kwargs = {}
    for name, value in kwargs.items():
        if isinstance(value, ShardedTensor):
            comm = value.comm
            value = value.local_parts[0]
        local_kwargs[name] = value
    result, layout = func(*local_args, **local_kwargs), shortcut.outputs[0]
    if result.shape != shortcut.shapes.get(comm.rank):
        shortcut.shapes[comm.rank] = check_local_shape(func, layout, result, comm.rank)
    return wrap(layout, (result,), comm)


def check_local_shape(func: Any, layout: Layout, result: Tensor, rank: int) -> tuple[int, ...]:
    """Raise unless a local result has the shape that its layout says; returns that shape."""
    shapes = layout.local_shapes(rank)
    if shapes != (tuple(result.shape),):
        raise LayoutError(
            f"{getattr(func, '__name__', func)} on the local tensors of rank {rank} returned {tuple(result.shape)}, "
            f"where {format_layout_text(layout)} has {shapes}; please report this program, with its layouts"
        )
    return shapes[0]


def _reshape_locals(layout: Layout, tensor: ShardedTensor) -> ShardedTensor:
    comm = tensor.comm
    return wrap(layout, (tensor.local_parts[0].reshape(layout.local_shapes(comm.rank)[0]),), comm)


def _vary_locals(shortcut: Shortcut, aligned: Sequence[ShardedTensor]) -> list[Tensor]:
    """The tensors as the function takes them. All moves come before all `vary`, as where no shortcut is taken: the tape
    of every rank must meet them in one order."""
    pairs = zip(aligned, shortcut.vary, strict=True)
    return [vary_along(t, t.sharding, axes) if axes else t.local_parts[0] for t, axes in pairs]


def _align_all_inputs(
    tensors: Sequence[ShardedTensor], wanted: Sequence[Layout | None], label: str
) -> list[ShardedTensor]:
    """The tensors in the layouts wanted; one that appears twice is wanted alike, see `_find_moves`, and moved once."""
    made: dict[int, ShardedTensor] = {}
    for tensor, layout in zip(tensors, wanted, strict=True):
        if id(tensor) not in made:
            made[id(tensor)] = tensor if layout is None else move_input(tensor, layout, label)
    return [made[id(tensor)] for tensor in tensors]


UNKNOWN: Any = object()
_RESHAPES: frozenset[Any] = frozenset(
    (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten)
)


@dataclass
class FunctionRecording:
    """What happened below a function: how many operators ran, whether one of them forbids a shortcut, in which layout
    an operator took each tensor, under which name, and what was written to."""

    operators: int = 0
    plain: bool = True
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
        _recording_state.recording.add(FunctionRecording(1, plain, list(wanted), list(written), label))


def note_special() -> None:
    """Record that something other than a plain operator ran: no shortcut."""
    note_operator(plain=False)


def run_and_record(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Run a function the long way, and say by which shortcut it may run later.

    None: by none. UNKNOWN: another call has to show.
    """
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
    outputs = list(result) if type(result) in (list, tuple) else [result]
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, ShardedTensor)]
    keep = tuple(t.sharding for t in tensors)
    if any(layout.depends_on_data for layout in keep):
        return UNKNOWN  # the next call has other layouts
    if func in _RESHAPES and recording.operators == 1 and _is_reshape(args, kwargs, result):
        return Shortcut((result.sharding,), None, ((),), False, keep, reshape=True)
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
    several = type(result) if type(result) in (list, tuple) else None
    layouts, writes = tuple(o.sharding for o in outputs), bool(recording.written)
    moves = moves if any(move is not None for move in moves) else ()
    direct = several is None and not any(vary) and not writes and not moves
    return Shortcut(layouts, several, vary, direct, keep, moves=moves, label=recording.label, writes=writes)


def _is_reshape(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether the first argument was given another shape and nothing else; `view` takes a dtype as well."""
    tensors = isinstance(result, ShardedTensor) and isinstance(args[0], ShardedTensor)
    return tensors and not kwargs and bool(result.dtype == args[0].dtype)


def _gives_back_what_it_writes(
    args: Sequence[Any], result: Any, tensors: Sequence[ShardedTensor], recording: FunctionRecording
) -> bool:
    """Whether a function writes to nothing and returns something new, or writes to and returns its first argument."""
    if not recording.written:
        outputs = result if type(result) in (list, tuple) else [result]
        return not any(o is t for o in outputs for t in tensors)
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
    outputs = list(result) if type(result) in (list, tuple) else [result]
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, ShardedTensor)]
    if recording.moved or recording.written or any(o is t for o in outputs for t in tensors):
        return None
    vary = _varying_axes([t.sharding for t in tensors], [o.sharding for o in outputs])
    if vary is None or any(vary) or not all(_is_even(t.sharding) for t in tensors):
        return None  # several operators reduce gradients in an order of their own, and all ranks must keep one order
    several = type(result) if type(result) in (list, tuple) else None
    keep, layouts = tuple(t.sharding for t in tensors), tuple(o.sharding for o in outputs)
    made = Shortcut(layouts, several, vary, False, keep, compared=True)
    if has_saved_tensors_hooks():
        return UNKNOWN  # the comparison would be seen by the hooks
    verdict = _gives_the_same(made, func, args, kwargs, outputs)
    return UNKNOWN if verdict is None else (made if verdict else None)


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


_MAX_SHORTCUTS = 16384
_shortcuts: dict[Any, Shortcut | None] = caches.clear_on_change({})
_KEY_TYPES = frozenset((int, float, bool, type(None), torch.dtype))
_is_grad_enabled, _is_inference_mode_enabled = torch.is_grad_enabled, torch.is_inference_mode_enabled


def call_fast_path(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a torch function on ShardedTensors: by its shortcut, else the long way, recorded.

    The first part is the fastest path, for positional tensors and numbers; it is written for few instructions.
    """
    if kwargs:
        return _call_with_key(func, types, args, kwargs, _shortcut_key(func, args, kwargs))
    key: Any = [func, _is_grad_enabled() or 2 + _is_inference_mode_enabled()]  # not 1, which equals True
    tensors: list[Any] = []
    local = []
    for value in args:
        kind = type(value)
        if kind is ShardedTensor or kind in derived_types:
            parts = value.local_parts
            if len(parts) != 1 or value._copied_from is not None:
                break
            held = parts[0]
            key += (id(value.sharding), held.dtype, held.requires_grad)
            tensors.append(value)
            local.append(held)
        elif kind in _KEY_TYPES:
            key += (kind, value)
            local.append(value)
        else:
            break
    else:
        count = len(tensors)
        if count > 1 and (tensors[0] is tensors[1] or (count > 2 and len({*map(id, tensors)}) < count)):
            key.append(_first_positions(tensors))
        if is_any_autocast_enabled():
            key.append(_autocast_state())
        key.append(held.device)  # of all: an operator takes tensors of one device, apart from numbers
        key, comm = tuple(key), tensors[0].comm
        shortcut = _shortcuts.get(key)
        if shortcut is not None and shortcut.direct and not active_watchers[0]:
            result, layout = func(*local), shortcut.outputs[0]
            if result.shape != shortcut.shapes.get(comm.rank):
                shortcut.shapes[comm.rank] = check_local_shape(func, layout, result, comm.rank)
            made = make_wrapper_subclass(ShardedTensor, layout.shape, dtype=result.dtype, device=result.device)
            made.sharding, made.local_parts, made.comm = layout, (result,), comm  # as `wrap` does, without a call
            return made
        return _call_with_key(func, types, args, kwargs, key)
    return _call_with_key(func, types, args, kwargs, _shortcut_key(func, args, kwargs))


def _autocast_state() -> tuple[Any, ...]:
    """On which device types autocast is on, and to which dtypes it casts."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in autocast_device_types if torch.is_autocast_enabled(d))


def _call_with_key(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any
) -> Any:
    if key is None or (active_watchers[0] and is_explaining_or_forbidding()):
        return call_function(func, types, *convert_dtensors(args, kwargs))
    shortcut = _shortcuts.get(key, None if is_tracing() else UNKNOWN)  # a trace has no values to compare
    if shortcut is None or (shortcut is not UNKNOWN and shortcut.compared and has_saved_tensors_hooks()):
        return call_function(func, types, args, kwargs)  # checkpointed code saves the same at both times
    if shortcut is UNKNOWN:
        if len(_shortcuts) > _MAX_SHORTCUTS:
            _shortcuts.clear()
        result, found = run_and_record(func, types, args, kwargs)
        if found is not UNKNOWN:
            _shortcuts[key] = found
        return result
    return run_shortcut(shortcut, func, args, kwargs)


def _first_positions(tensors: Sequence[ShardedTensor]) -> tuple[int, ...]:
    """For each tensor the first place where the same one is passed."""
    ids = [*map(id, tensors)]
    return tuple(map(ids.index, ids))


def _shortcut_key(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A key of the function, torch's modes, the tensors and every other argument; None where there is no shortcut."""
    parts: list[Any] = [func, _is_grad_enabled() or 2 + _is_inference_mode_enabled(), tuple(kwargs)]
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is ShardedTensor or kind in derived_types:
            if len(value.local_parts) != 1 or value._copied_from is not None:
                return None
            held = value.local_parts[0]
            tensors.append(value)
            parts.append((id(value.sharding), held.dtype, held.device, held.requires_grad))
        else:
            part = _argument_key(value)
            if part is None:
                return None
            parts.append(part)
    if len({*map(id, tensors)}) < len(tensors):
        parts.append(_first_positions(tensors))
    if is_any_autocast_enabled():
        parts.append(_autocast_state())
    return tuple(parts)


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
