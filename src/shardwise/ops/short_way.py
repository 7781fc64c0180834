"""How is a function with a shortcut run? On the local tensors: inputs that lie otherwise are moved, varying ones
passed through `vary`, the function is called as it is, and its results are wrapped in the layouts that are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.geometry import Layout
from shardwise.ops.vary import varied
from shardwise.tensor.inplace import check_writable
from shardwise.tensor.moves import moved
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


@dataclass(frozen=True, slots=True)
class Shortcut:
    """What a call gives without asking anyone: output layouts and varying axes of each tensor.

    `direct`: nothing moves, nothing varies, nothing is written to, and there is one output. `reshape`: the local tensor
    takes the shape that the output's layout gives it. `moves`: the layout in which a tensor is wanted, None where it
    has it. `writes`: the first argument is written to and given back. The layouts of the inputs are kept alive, since
    keys hold their identities.
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


def run_short(shortcut: Shortcut, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function by its shortcut."""
    if shortcut.reshape:
        return _reshaped(shortcut.outputs[0], args[0])
    if shortcut.direct:
        return _direct(shortcut.outputs[0], func, args, kwargs)
    tensors = [value for value in args if type(value) is ShardedTensor]
    if kwargs:
        tensors += [value for value in kwargs.values() if type(value) is ShardedTensor]
    if shortcut.writes:
        check_writable(tensors[0])
    local = iter(_local_tensors(shortcut, tensors))
    local_args = [next(local) if type(value) is ShardedTensor else value for value in args]
    if kwargs:
        kwargs = {n: next(local) if type(value) is ShardedTensor else value for n, value in kwargs.items()}
    result = func(*local_args, **kwargs)
    if shortcut.writes:
        tensors[0].__dict__.pop("_varied", None)
        return tensors[0]
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


def _local_tensors(shortcut: Shortcut, tensors: Sequence[ShardedTensor]) -> list[Tensor]:
    """The tensors as the function takes them. All moves come before all `vary`, as where no shortcut is taken: the tape
    of every rank must meet them in one order."""
    aligned = _aligned(tensors, shortcut.moves, shortcut.label) if shortcut.moves else tensors
    pairs = zip(aligned, shortcut.vary, strict=True)
    return [varied(t, t._layout, axes) if axes else t._locals[0] for t, axes in pairs]


def _aligned(tensors: Sequence[ShardedTensor], wanted: Sequence[Layout | None], label: str) -> list[ShardedTensor]:
    made: dict[int, ShardedTensor] = {}
    for tensor, layout in zip(tensors, wanted, strict=True):
        if id(tensor) not in made:
            made[id(tensor)] = tensor if layout is None else _moved(tensor, layout, label)
    return [made[id(tensor)] for tensor in tensors]


def _moved(tensor: ShardedTensor, layout: Layout, label: str) -> ShardedTensor:
    locals_, anchor = moved(tensor, layout, label)
    return wrap(layout, locals_, tensor._comm, dtype=tensor.dtype, anchor=anchor)
