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

What a shortcut depends on of a tensor, as one object: layout, dtype, device, strides, pinned axes, and whether it is
summed.

A key of a few objects that are compared by identity is made and found faster than one of all that they stand for. A
tensor keeps its fingerprint from its first use on, and a result gets that of its shortcut. Whatever replaces the layout
or the local tensors of a tensor drops it (`ShardedTensor._forget`).

Functions that run on a local tensor with the shape that the layout of their result has on this rank.

Their own arguments are sizes of the whole. Whether the result is a view or a copy depends on the strides of the whole,
which are part of the fingerprint, and never on those of the local tensor.

A shortcut: how a torch function runs on the local tensors directly, once its requirements are known.

What happens below a torch function the first time, and which shortcut may be taken later.

Operators in a trace: when each function of ShardedTensors ran, in which layouts, and its backward nodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._cache import Cache, cache_by_identity
from shardwise._torch import (
    OpOverloadPacket,
    autocast_device_types,
    autocast_keys_of,
    forward_ad,
    has_saved_tensors_hooks,
    is_any_autocast_enabled,
    is_forward_grad_enabled,
    make_wrapper_subclass,
    no_dispatch_modes,
    storage_identity,
    track_views,
)
from shardwise.comm import Comm
from shardwise.comm.stand_in import is_tracing
from shardwise.geometry import Layout, LayoutError, MeshSpec, Replicate
from shardwise.ops.explain import active_watchers, is_explaining_or_forbidding
from shardwise.ops.rule import find_rule, is_pointwise
from shardwise.ops.unshard import free_after_forward, has_kept_sum, is_summed, move_input, vary_along
from shardwise.tensor.autograd_mixin import can_view, copy_if_shared
from shardwise.tensor.dispatch import call_function, enter_function, override_for, sharded_leaves
from shardwise.tensor.functions import convert_dtensors
from shardwise.tensor.move import format_layout_text, is_differentiated
from shardwise.tensor.recorder import find_recorder, recorders, user_line, write_tensor
from shardwise.tensor.sharded_tensor import ShardedTensor, derived_types, wrap
from shardwise.tensor.writes import check_writable, count_write, is_writable


class _LocalShapes(dict[int, tuple[int, ...] | None]):
    """The shape of each rank's only local tensor, as far as it was asked for; None where a rank has not exactly one."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def __missing__(self, rank: int) -> tuple[int, ...] | None:
        shapes = self._layout.local_shapes(rank)
        found = self[rank] = shapes[0] if len(shapes) == 1 else None
        return found


Marks: TypeAlias = tuple[tuple[int, ...] | None, frozenset[str]]
"""The strides of the whole of a tensor, None if it is contiguous, and the axes along which it is pinned."""
_NO_MARKS: Marks = (None, frozenset())


class Fingerprint:
    """A layout, a dtype, a device, marks if there are any; `make_wrapper` makes the outside of such a tensor."""

    __slots__ = ("dtype", "layout", "local_shapes", "make_wrapper", "marks")

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device, marks: Marks) -> None:
        self.layout, self.dtype, self.marks = layout, dtype, None if marks == _NO_MARKS else marks
        self.local_shapes = _LocalShapes(layout)
        self.make_wrapper: Callable[[], ShardedTensor] = partial(
            make_wrapper_subclass, ShardedTensor, layout.shape, dtype=dtype, device=device
        )


_fingerprints: Cache[tuple[int, torch.dtype, torch.device, Marks, bool], Fingerprint] = Cache(16384)


def get_fingerprint(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    marks: Marks,
    summed: bool = False,
) -> Fingerprint:
    """The fingerprint of such tensors, the same object each time: it keeps the layout, and so its identity, alive."""
    key = (id(layout), dtype, device, marks, summed)
    found = _fingerprints.get(key)
    return _fingerprints.put(key, Fingerprint(layout, dtype, device, marks)) if found is None else found


def _marks_of(tensor: ShardedTensor) -> Marks:
    return tensor._dense_strides, tensor._pinned_axes


def find_fingerprint(tensor: ShardedTensor) -> Fingerprint | None:
    """The fingerprint of a tensor; None where it has no shortcuts: other than one local tensor, a copy of what torch
    returns as a view, or a layout that depends on data."""
    parts = tensor.local_parts
    if len(parts) != 1 or tensor._copied_from is not None or tensor.sharding.depends_on_data:
        return None
    found = get_fingerprint(tensor.sharding, parts[0].dtype, parts[0].device, _marks_of(tensor), is_summed(tensor))
    # Whether a kept sum counts depends on modes; the local tensors of subclasses may be replaced by assigning a shard.
    if type(tensor) is ShardedTensor and not has_kept_sum(tensor):
        tensor._fingerprint = found
    return found


ShapeFunction = Callable[[Tensor, Sequence[int]], Tensor]
_RESHAPES: frozenset[Any] = frozenset(
    (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten)
)
_EXPANDS: frozenset[Any] = frozenset((Tensor.expand, Tensor.broadcast_to, torch.broadcast_to))


def find_shape_function(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any, operators: int
) -> ShapeFunction | None:
    """What a function that nothing was moved for does to the local tensor, given so many operators; None for others."""
    known = func in _RESHAPES or func in _EXPANDS or func is Tensor.contiguous
    if not known or kwargs or not isinstance(result, ShardedTensor) or not isinstance(args[0], ShardedTensor):
        return None
    tensor = args[0]
    if func is Tensor.contiguous:  # computed without an operator; the tensor itself where it is contiguous
        copied = operators == 0 and len(args) == 1 and tensor._dense_strides is not None
        return _copy_contiguous if copied else None
    if operators != 1 or result.dtype != tensor.dtype:  # `view` takes a dtype as well
        return None
    viewed = func in _EXPANDS or can_view(tensor.sharding.shape, tensor._dense_strides, result.sharding.shape)
    found: ShapeFunction = Tensor.expand if func in _EXPANDS else Tensor.reshape if viewed else _reshape_to_copy
    some_have_nothing = 0 in tensor.sharding.elements_per_rank().values()
    return partial(_track_view, found) if viewed and some_have_nothing else found


def _track_view(shape_function: ShapeFunction, local: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of a part that may have no elements: written to, it has second gradients there as well."""
    with track_views(True):
        return shape_function(local, shape)


def _reshape_to_copy(local: Tensor, shape: Sequence[int]) -> Tensor:
    return copy_if_shared(local.reshape(shape), local)


def _copy_contiguous(local: Tensor, shape: Sequence[int]) -> Tensor:
    return local.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Shortcut:
    """How a function runs on local tensors: output layouts and varying axes of each tensor.

    `vary`: the axes along which each tensor varies, empty if none does; only of those that are differentiated, which is
    part of the key. `made`: the fingerprint of the only output, where nothing moves, so that the function can be called
    at once. `casts`: autocast, where it is on, may cast arguments of an operator. `shape`: makes a local result of the
    shape that the output's layout has here. `moves`: the layout in which a tensor is wanted, None where it has it.
    `writes`: the first argument is written to and returned. `compared`: of several operators; other tensors are saved
    for the backward pass than by these. `marks`: those of the outputs, empty if none has any.
    `plain`: none of these, so that the function is called with the local tensors.
    """

    outputs: tuple[Layout, ...]
    several: type | None
    vary: tuple[tuple[int, ...], ...] = ()
    made: Fingerprint | None = None
    casts: bool = True
    shape: ShapeFunction | None = None
    moves: tuple[Layout | None, ...] = ()
    label: str = ""
    writes: bool = False
    compared: bool = False
    marks: tuple[Marks, ...] = ()
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        plain = not (self.vary or self.shape or self.moves or self.writes or self.compared)
        object.__setattr__(self, "plain", plain)


def run_shortcut(shortcut: Shortcut, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function by its shortcut."""
    if shortcut.shape is not None:
        return _note_marks(shortcut, [_shape_local(shortcut.shape, shortcut.outputs[0], args[0])])[0]
    tensors = list_tensors(args, kwargs)
    if shortcut.writes:
        check_writable(tensors[0])
    aligned = _align_all_inputs(tensors, shortcut.moves, shortcut.label) if shortcut.moves else tensors
    local_args, kwargs = _fill_in_locals(_vary_locals(shortcut, aligned), args, kwargs)
    with free_after_forward(aligned):
        result = func(*local_args, **kwargs)
    if shortcut.writes:
        tensors[0].__dict__.pop("_varied", None)
        count_write(tensors[0])
        return tensors[0]
    comm = tensors[0].comm
    if shortcut.several is None:
        return _note_marks(shortcut, [wrap_checked(func, shortcut.outputs[0], result, comm)])[0]
    results = zip(shortcut.outputs, result, strict=True)
    return shortcut.several(_note_marks(shortcut, [wrap_checked(func, *pair, comm) for pair in results]))


def _note_marks(shortcut: Shortcut, outputs: list[ShardedTensor]) -> list[ShardedTensor]:
    for output, marks in zip(outputs, shortcut.marks, strict=False):
        output._dense_strides, output._pinned_axes = marks
    return outputs


def vary_arguments(
    shortcut: Shortcut, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with local tensors in place of ShardedTensors, those that vary passed through `vary`."""
    return _fill_in_locals(_vary_locals(shortcut, list_tensors(args, kwargs)), args, kwargs)


def list_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[ShardedTensor]:
    """The ShardedTensors among arguments, and in those that are lists, in order."""
    found: list[ShardedTensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, ShardedTensor):
            found.append(value)
        elif type(value) is list or type(value) is tuple:
            found += [v for v in value if isinstance(v, ShardedTensor)]
    return found


def _fill_in_locals(
    values: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    local = iter(values)
    local_args = [_fill_in(value, local) for value in args]
    return local_args, {name: _fill_in(value, local) for name, value in kwargs.items()} if kwargs else kwargs


def _fill_in(value: Any, local: Iterator[Tensor]) -> Any:
    if isinstance(value, ShardedTensor):
        return next(local)
    if type(value) is list or type(value) is tuple:
        return type(value)(next(local) if isinstance(v, ShardedTensor) else v for v in value)
    return value


def wrap_checked(func: Any, layout: Layout, result: Tensor, comm: Comm) -> ShardedTensor:
    """A local result as a ShardedTensor; raises unless it has the shape that its layout says."""
    shapes = layout.local_shapes(comm.rank)
    if shapes != (tuple(result.shape),):
        raise LayoutError(
            f"{getattr(func, '__name__', func)} on the local tensors of rank {comm.rank} returned "
            f"{tuple(result.shape)}, where {format_layout_text(layout)} has {shapes}; please report this program, with "
            "its layouts"
        )
    return wrap(layout, (result,), comm)


def _shape_local(shape: ShapeFunction, layout: Layout, tensor: ShardedTensor) -> ShardedTensor:
    comm = tensor.comm
    return wrap(layout, (shape(tensor.local_parts[0], layout.local_shapes(comm.rank)[0]),), comm)


def _vary_locals(shortcut: Shortcut, aligned: Sequence[ShardedTensor]) -> list[Tensor]:
    """The tensors as the function takes them. All moves come before all `vary`, as where no shortcut is taken: the tape
    of every rank must meet them in one order."""
    if not shortcut.vary:
        return [t.local_parts[0] for t in aligned]
    pairs = zip(aligned, shortcut.vary, strict=True)
    return [vary_along(t, t.sharding, axes) if axes else t.local_parts[0] for t, axes in pairs]


def _align_all_inputs(
    tensors: Sequence[ShardedTensor], wanted: Sequence[Layout | None], label: str
) -> list[ShardedTensor]:
    """The tensors in the layouts wanted; one that appears twice is wanted alike, see `_find_moves`, and moved once."""
    made: dict[int, ShardedTensor] = {}
    pinned = any(t._pinned_axes for t in tensors)
    for tensor, layout in zip(tensors, wanted, strict=True):
        if id(tensor) not in made:
            beside = pinned and not tensor._pinned_axes
            made[id(tensor)] = tensor if layout is None else move_input(tensor, layout, label, beside_pinned=beside)
    return [made[id(tensor)] for tensor in tensors]


UNKNOWN: Any = object()


@dataclass
class FunctionRecording:
    """What happened below a function: how many operators ran, whether one of them forbids a shortcut, in which layout
    an operator took each tensor, under which name, what was written to, which numbers the operators were given, and
    whether autocast would cast anything."""

    operators: int = 0
    plain: bool = True
    casts: bool = False
    wanted: list[tuple[ShardedTensor, Layout]] = field(default_factory=list)
    written: list[ShardedTensor] = field(default_factory=list)
    label: str = ""
    numbers: list[int] = field(default_factory=list)

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
        self.numbers += other.numbers
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
    arguments: Iterable[Any] = (),
) -> None:
    """Record that an operator ran: whether on local tensors with its own arguments, in which layouts it took its
    tensors (and under which name they were moved), what it wrote to, and what it was given."""
    if _recording_state.recording is not None:
        numbers = list_numbers(arguments)
        _recording_state.recording.add(FunctionRecording(1, plain, False, list(wanted), list(written), label, numbers))


def list_numbers(values: Iterable[Any]) -> list[int]:
    """The whole numbers among arguments, and in those that are lists."""
    found: list[int] = []
    for value in values:
        if type(value) is int:
            found.append(value)
        elif isinstance(value, list | tuple):
            found += list_numbers(value)
    return found


class _OperatorNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """The whole numbers that operators are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += list_numbers((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


def _finds_numbers_in_shapes(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], recording: FunctionRecording
) -> bool:
    """Whether a function would give its operator other numbers for the local tensors than for the whole ones.

    `torch.cross` without a dim takes the first of size 3, and of local tensors that may be another one. Numbers that
    the caller passed are the same for both; others are seen by a call of tensors without memory.
    """
    if set(recording.numbers) <= set(list_numbers((*args, *kwargs.values()))):
        return False
    layouts = [layout for _, layout in recording.wanted]
    of_tensor = {id(tensor): layout for tensor, layout in recording.wanted}

    def without_memory(value: Any, rank: int) -> Any:
        if isinstance(value, ShardedTensor):
            shape = of_tensor.get(id(value), value.sharding).local_shapes(rank)[0]
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return type(value)(without_memory(v, rank) for v in value) if type(value) in (list, tuple) else value

    ranks = {tuple(layout.local_shapes(rank) for layout in layouts): rank for rank in layouts[0].ranks}
    for rank in ranks.values():  # one of each kind: what is remembered is the same on all ranks
        stand_ins = [without_memory(value, rank) for value in args]
        seen = _OperatorNumbers()
        try:
            with torch.no_grad(), no_dispatch_modes(), seen:
                func(*stand_ins, **{name: without_memory(value, rank) for name, value in kwargs.items()})
        except Exception:  # whatever it is: the long way raises it, or does not
            return True
        if seen.found != recording.numbers:
            return True
    return False


def note_entry(op: Any) -> None:
    """Record that an operator is entered: autocast, where it is on, may cast its arguments."""
    if _recording_state.recording is not None:
        _recording_state.recording.casts |= bool(autocast_keys_of(op)) or op is torch.ops.aten.einsum.default


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
        shaped = get_fingerprint(result.sharding, result.dtype, result.device, _marks_of(result))
        marks = _marks_of_all(outputs)
        return Shortcut((result.sharding,), None, (), shaped, casts=recording.casts, shape=shape, marks=marks)
    if not recording.plain or recording.operators == 0 or not all(isinstance(o, ShardedTensor) for o in outputs):
        return None
    if recording.operators > 1:
        return _find_shortcut_of_several(func, args, kwargs, result, recording)
    if _finds_numbers_in_shapes(func, args, kwargs, recording):
        return None
    fits = _gives_back_what_it_writes(args, result, tensors, recording)
    moves = _find_moves(tensors, recording) if fits else None
    if moves is None:
        return None
    wanted = [move or t.sharding for t, move in zip(tensors, moves, strict=True)]
    layouts = tuple([o.sharding for o in outputs])
    vary = _varying_axes(wanted, layouts)
    if vary is None:
        return None
    if not recording.written:  # what is written to may require grad only now
        vary = tuple([axes if is_differentiated(t) else () for t, axes in zip(tensors, vary, strict=True)])
    vary = vary if any(vary) else ()
    moves = moves if any(move is not None for move in moves) else ()
    writes = bool(recording.written)
    direct = several is None and not moves and not (vary and writes)
    made = get_fingerprint(result.sharding, result.dtype, result.device, _marks_of(result)) if direct else None
    casts, label, marks = recording.casts, recording.label, _marks_of_all(outputs)
    return Shortcut(layouts, several, vary, made, casts, moves=moves, label=label, writes=writes, marks=marks)


def _split_result(result: Any) -> tuple[type | None, list[Any]]:
    """The type of several results, a list or a tuple, also one with names (`torch.return_types`), and all results."""
    kind = type(result)
    if kind in (list, tuple) or kind.__module__ == "torch.return_types":
        return kind, list(result)
    return None, [result]


def _marks_of_all(outputs: Sequence[ShardedTensor]) -> tuple[Marks, ...]:
    """The marks of each output; empty if none has any."""
    found = tuple(map(_marks_of, outputs))
    return found if any(marks != _NO_MARKS for marks in found) else ()


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
    made = None if several else get_fingerprint(result.sharding, result.dtype, result.device, _marks_of(result))
    layouts, marks = tuple(o.sharding for o in outputs), _marks_of_all(outputs)
    shortcut = Shortcut(layouts, several, (), made, casts=recording.casts, compared=True, marks=marks)
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


def record_call(
    call: Callable[[], Any], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Make a call of a torch function and note it, where the rank of its tensors is traced."""
    given: list[ShardedTensor] = list(sharded_leaves(args, kwargs))
    recorder = find_recorder(given[0].comm) if given else None
    if recorder is None or is_tracing():
        return call()
    line, begin = user_line(), time.monotonic_ns()
    result = call()
    made: list[ShardedTensor] = list(sharded_leaves((result,), {}))
    if not made:  # a question, such as the shape
        return result
    details = {"from": " | ".join(_texts(given)), "to": " | ".join(_texts(made)), "line": line, "pass": "forward"}
    recorder.add_operator(getattr(func, "__name__", str(func)), begin, details)
    recorder.watch_backward(_parts(made), _parts(given), line)
    return result


def _texts(tensors: Iterable[ShardedTensor]) -> list[str]:
    return [write_tensor(t.sharding, t.dtype) for t in tensors]


def _parts(tensors: Iterable[ShardedTensor]) -> list[Tensor]:
    return [part for t in tensors for part in t.local_parts]


_shortcuts: Cache[Any, Shortcut | None] = Cache(16384, on_change=True)
_of_any_number: Cache[Any, bool] = Cache(on_change=True)  # functions that have shortcuts for any number
_ANY_NUMBER = object()
_KEY_TYPES = frozenset((int, float, bool, type(None), torch.dtype))
_JOINS: frozenset[Any] = frozenset((torch.cat, torch.concat, torch.concatenate, torch.stack))
_ONE_TENSOR_TWICE = "one tensor twice"
_is_grad_enabled, _is_inference_mode_enabled = torch.is_grad_enabled, torch.is_inference_mode_enabled


def call_fast_path(
    cls: type | None,
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a torch function on ShardedTensors, by its shortcut, else the long way, recorded: `__torch_function__`.

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
    shortcut = _shortcuts.get(key) or (_find_for_any_number(key) if func in _of_any_number else None)
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
    if made.marks is not None:
        wrapped._dense_strides, wrapped._pinned_axes = made.marks
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
    if shortcut is UNKNOWN and func in _of_any_number:
        shortcut = _shortcuts.get(_without_numbers(key), UNKNOWN)
    cast_key = key
    if (shortcut is UNKNOWN or shortcut is None or shortcut.casts) and is_any_autocast_enabled():
        cast_key = key, _autocast_state()
        shortcut = _shortcuts.get(cast_key, UNKNOWN)
    if shortcut is UNKNOWN and is_tracing():
        shortcut = None  # a trace has no values to compare
    if shortcut is None or (shortcut is not UNKNOWN and shortcut.compared and has_saved_tensors_hooks()):
        return call_function(func, types, args, kwargs)  # checkpointed code saves the same at both times
    if shortcut is UNKNOWN:
        result, found = run_and_record(func, types, args, kwargs)
        if found is not UNKNOWN:
            _shortcuts.put(cast_key if found is None or found.casts else key, found)
        is_general = float in key and found is not UNKNOWN and found and not (found.casts or found.compared)
        if is_general and "out" not in kwargs and (general := _without_numbers(key)) != key and _takes_any_number(func):
            _of_any_number.put(func, True)  # as an optimizer calls, whose numbers change with each step
            _shortcuts.put(general, found)
        return result
    return run_shortcut(shortcut, func, args, kwargs)


def _takes_any_number(func: Callable[..., Any]) -> bool:
    """Whether the layout of a function's result is the same for all numbers but 0 and those that are not finite.

    So it is for pointwise functions of torch whose operators have no rule of their own, which might read numbers.
    """
    known = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(known, OpOverloadPacket) or not isinstance(func, BuiltinFunctionType | MethodDescriptorType):
        return False
    overloads = [getattr(known, name) for name in known.overloads() if not name.endswith("out")]
    on_tensors = [op for op in overloads if op._schema.arguments and str(op._schema.arguments[0].type) == "Tensor"]
    return all(is_pointwise(op) and find_rule(op) is None for op in on_tensors)


def _find_for_any_number(key: Any) -> Shortcut | None:
    """The shortcut of a call with other numbers, where there is none, and no note that there is none, with these."""
    return None if key is None or key in _shortcuts else _shortcuts.get(_without_numbers(key))


def _without_numbers(key: Any) -> Any:
    """The key of a call with any other numbers in place of the finite ones, unless they are 0."""
    parts = key or ()
    return tuple(
        [
            _ANY_NUMBER if type(part) is float and parts[i - 1] is float and part and isfinite(part) else part
            for i, part in enumerate(parts)
        ]
    )


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
