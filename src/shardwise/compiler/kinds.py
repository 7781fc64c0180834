"""Which calls may run the same graphs? Those of one kind: layouts, dtypes, strides, modes, attributes of modules.

A call is compared with a kind in three steps, cheapest first: a key of the arguments and torch's modes, which finds
candidates; what modules and optimizers have besides values; the local tensors, in C++. Where no kind fits, the facts of
the call are compared with those of a kind, to say what is different.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from shardwise._nests import flatten_nest
from shardwise._torch import TensorGuards, autocast_device_types, is_any_autocast_enabled
from shardwise.compiler.reachable import SIMPLE
from shardwise.compiler.state import ProgramState
from shardwise.compiler.watch import AttributeWatch
from shardwise.geometry import Layout
from shardwise.ops.engine.mixed import takes_any_mesh
from shardwise.tensor.move import describe_tensor
from shardwise.tensor.sharded_tensor import ShardedTensor

LEAVES = (Tensor, *SIMPLE)


def mode_key() -> tuple[Any, ...]:
    """Torch's modes that a graph depends on."""
    casts = _autocast_modes() if is_any_autocast_enabled() else ()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), casts


def _autocast_modes() -> tuple[Any, ...]:
    return tuple((d, torch.get_autocast_dtype(d)) for d in autocast_device_types if torch.is_autocast_enabled(d))


def split_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of the arguments and how they are nested; None for plain positional arguments."""
    if not kwargs and all(isinstance(a, LEAVES) for a in args):
        return list(args), None
    return flatten_nest((args, kwargs))


def describe_unfit(leaves: Sequence[Any]) -> str | None:
    """What cannot be compared from call to call, or None: an argument that is neither a tensor nor a plain value."""
    for number, leaf in enumerate(leaves):
        kind: Any = type(leaf)
        if isinstance(leaf, (*LEAVES, type, FunctionType)) or (kind.__hash__ and kind.__eq__ is not object.__eq__):
            continue
        return f"argument {number} is a {kind.__name__}; pass tensors, numbers and strings, or lists, dicts of them"
    return None


def argument_key(leaves: Sequence[Any], structure: Any) -> tuple[Any, ...]:
    """What finds the kinds that a call may be of."""
    key: list[Any] = [structure]
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            key += (type(leaf), id(leaf.sharding), takes_any_mesh(leaf))
        elif isinstance(leaf, Tensor):
            key.append(Tensor)
        else:
            key += (type(leaf), leaf)
    return tuple(key)


def describe_argument(value: Any) -> str:
    """An argument in the words of `explain()`."""
    if isinstance(value, ShardedTensor):
        found = describe_tensor(value.dtype, value.sharding)
    elif isinstance(value, Tensor):
        found = f"{value.dtype}{list(value.shape)}, strides {value.stride()}"
    else:
        return repr(value)
    return found + (", requires grad" if value.requires_grad else "")


def describe_call(
    leaves: Sequence[Any], state: ProgramState, names: dict[str, str], gradients: Sequence[bool]
) -> dict[str, str]:
    """The facts about a call that decide its kind, by name."""
    grad, inference, dtype, casts = mode_key()
    facts = {f"argument {i}": describe_argument(leaf) for i, leaf in enumerate(leaves)}
    facts |= {"grad mode": str(grad), "inference mode": str(inference), "default dtype": str(dtype)}
    facts["autocast"] = ", ".join(f"{device} to {to}" for device, to in casts) or "off"
    facts["gradients at the start"] = f"{sum(gradients)} of {len(gradients)}"
    for i, module in enumerate(state.modules):
        name = f"{type(module).__name__} (module {i})"
        facts |= {f"{k} of {name}": repr(v) for k, v in module.__dict__.items() if isinstance(v, SIMPLE)}
    for optimizer in state.optimizers:
        for i, group in enumerate(optimizer.param_groups):
            found = {k: repr(v) for k, v in group.items() if isinstance(v, SIMPLE)}
            facts |= {f"{k} of group {i} of {type(optimizer).__name__}": v for k, v in found.items()}
    facts |= {f"state tensor {i}": describe_argument(t) for i, t in enumerate(state.sharded)}
    facts |= {f"plain state tensor {i}": describe_argument(s.tensor) for i, s in enumerate(state.plain)}
    return facts | names


def explain_difference(now: dict[str, str], before: dict[str, str]) -> str:
    """What is different about a call.

    >>> explain_difference({"grad mode": "False"}, {"grad mode": "True"})
    'grad mode is False, was True'
    """
    names = [name for name in (*now, *before) if now.get(name) != before.get(name)]
    found = [f"{n} is {now.get(n, 'missing')}, was {before.get(n, 'missing')}" for n in dict.fromkeys(names)]
    if not found:
        return "an attribute or a hook of a module, a name that the function uses, or the strides of a tensor changed"
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


class KindGuard:
    """What must be as it was when a kind was traced."""

    def __init__(self, state: ProgramState, flat: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        self.watch = AttributeWatch(state)
        self.always = False  # whether calls with other values are of this kind as well: it has no graph and gets none
        self._state = state
        self._shardings = [t.sharding for t in state.sharded]
        self._layouts = tuple(layouts)  # keys have their identities: they stay alive
        self._count = len(flat)
        self._repeats = _find_repeats(flat)
        distinct = _leave_out(flat, self._repeats)
        self._tensors = TensorGuards(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None) if flat else None

    def holds(self, flat: Sequence[Tensor]) -> bool:
        """Whether a call on these local tensors is of this kind."""
        if self.always:
            return True
        if len(flat) != self._count or not all(map(is_, (t.sharding for t in self._state.sharded), self._shardings)):
            return False
        if not self.watch.is_unchanged():
            return False
        if self._tensors is None:
            return True
        if not self._repeats:
            return bool(self._tensors.check(*flat))  # which notices tensors that are there twice
        return _find_repeats(flat) == self._repeats and bool(self._tensors.check(*_leave_out(flat, self._repeats)))


def _find_repeats(flat: Sequence[Tensor]) -> dict[int, int]:
    """The places of tensors that are there a second time, as where the same batch is passed as ids and as labels."""
    if len(set(map(id, flat))) == len(flat):
        return {}
    first: dict[int, int] = {}
    return {i: first[id(t)] for i, t in enumerate(flat) if first.setdefault(id(t), i) != i}


def _leave_out(flat: Sequence[Tensor], places: dict[int, int]) -> list[Tensor]:
    return [t for i, t in enumerate(flat) if i not in places]
