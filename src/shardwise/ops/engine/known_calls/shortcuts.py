"""A shortcut: how a torch function runs on the local tensors directly, once its requirements are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwise.comm import Comm
from shardwise.geometry import Layout, LayoutError
from shardwise.ops.engine.gathers.gather_again import free_after_forward
from shardwise.ops.engine.known_calls.fingerprint import Fingerprint
from shardwise.ops.engine.known_calls.shaped import ShapeFunction
from shardwise.ops.engine.vary import move_input, vary_along
from shardwise.tensor.inplace import check_writable, count_write
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


@dataclass(frozen=True, slots=True)
class Shortcut:
    """How a function runs on local tensors: output layouts and varying axes of each tensor.

    `vary`: the axes along which each tensor varies, empty if none does; only of those that are differentiated, which is
    part of the key. `made`: the fingerprint of the only output, where nothing moves, so that the function can be called
    at once. `casts`: autocast, where it is on, may cast arguments of an operator. `shape`: makes a local result of the
    shape that the output's layout has here. `moves`: the layout in which a tensor is wanted, None where it has it.
    `writes`: the first argument is written to and returned. `compared`: of several operators; other tensors are saved
    for the backward pass than by these. `strides`: those of the outputs as whole tensors, empty if all are contiguous.
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
    strides: tuple[tuple[int, ...] | None, ...] = ()
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        plain = not (self.vary or self.shape or self.moves or self.writes or self.compared)
        object.__setattr__(self, "plain", plain)


def run_shortcut(shortcut: Shortcut, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function by its shortcut."""
    if shortcut.shape is not None:
        return _note_strides(shortcut, [_shape_local(shortcut.shape, shortcut.outputs[0], args[0])])[0]
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
        return _note_strides(shortcut, [wrap_checked(func, shortcut.outputs[0], result, comm)])[0]
    results = zip(shortcut.outputs, result, strict=True)
    return shortcut.several(_note_strides(shortcut, [wrap_checked(func, *pair, comm) for pair in results]))


def _note_strides(shortcut: Shortcut, outputs: list[ShardedTensor]) -> list[ShardedTensor]:
    for output, strides in zip(outputs, shortcut.strides, strict=False):
        output._dense_strides = strides
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
    for tensor, layout in zip(tensors, wanted, strict=True):
        if id(tensor) not in made:
            made[id(tensor)] = tensor if layout is None else move_input(tensor, layout, label)
    return [made[id(tensor)] for tensor in tensors]
