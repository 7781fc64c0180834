"""Operators that others make up: computed by those, each by its own rule.

1. An operator that writes to its first argument, or to `out=`, is the one that does not, and a copy into the argument.
   So is one with a rule, where what it writes to would have to be moved: a pending sum, a dim that has to be whole. The
   copy moves the result into the layout of the argument, which keeps it.
2. A copy of a view is the view, copied.
3. What torch itself writes as other operators (its table of decompositions) is computed so.

Intermediate plain tensors are the same on every rank, and are read as replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, is_tensor

from shardwise._torch import aten, decomposition_table, pytree
from shardwise.comm import CommError
from shardwise.ops.engine.known_calls.recording import note_operator
from shardwise.ops.engine.mixed import MixedTensorsError, is_placeholder, plain_as_replicated
from shardwise.ops.engine.registry import Steps
from shardwise.ops.engine.schema import find_functional, written_slots
from shardwise.tensor.dispatch import UnsupportedOpError, call_operator, sharded_leaves
from shardwise.tensor.sharded_tensor import ShardedTensor

Fallback = Callable[..., Any]
_REFUSED = frozenset(["set_"])  # lets one tensor share the memory of another


@cache
def find_fallback(op: Any) -> Fallback | None:
    """How an operator without a rule is computed by others, or None."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return None
    if any(a.is_out for a in schema.arguments):
        return _make_out_variant(op)
    space, _, name = schema.name.partition("::")
    if space != "aten" or name in _REFUSED:
        return None
    overload = schema.overload_name or "default"
    if name.endswith("_") and written_slots(op):
        return _make_in_place(op, find_functional(op))
    if name.endswith("_copy"):
        return _make_view_copy(_find_overload(name[: -len("_copy")], overload)) or decomposition_table.get(op)
    way: Fallback | None = decomposition_table.get(op)
    return way


def _writes_what_it_returns(op: Any) -> bool:
    """Whether an operator writes its result to its first argument or to `out=`, and nothing else."""
    schema, written = op._schema, written_slots(op)
    return bool(written) and (any(a.is_out for a in schema.arguments) or schema.name.endswith("_"))


@cache
def find_writing_fallback(op: Any) -> Steps | None:
    """How an operator is computed if what it writes to would have to be moved: without writing, then by a copy."""
    way = find_fallback(op) if op is not aten.copy_.default and _writes_what_it_returns(op) else None
    if way is None:
        return None
    return Steps(lambda *args, **kwargs: fall_back(op, way, args, kwargs))


def fall_back(op: Any, way: Fallback, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator by others; what they cannot do is refused in the operator's name."""
    note_operator(plain=True)  # one more than those that follow: a shortcut is compared with them before it is used
    try:
        with plain_as_replicated():
            return way(*args, **kwargs)
    except (CommError, UnsupportedOpError, MixedTensorsError):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
        raise UnsupportedOpError(
            f"{op} is computed by other operators, and these do not fit its tensors ({error}); write a rule for these "
            f"layouts with @shardwise.register_sharding({op}), or compute on local_tensor()"
        ) from error


def finish_out(op: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """Write a result to `out=` where torch has not: some of its composite operators do not write to subclasses."""
    names = _out_names(op)
    targets = [kwargs[name] for name in names]
    found = list(result) if isinstance(result, list | tuple) else [result]
    if not names or all(t is f for t, f in zip(targets, found, strict=False)):
        return result
    with plain_as_replicated():
        written = _write_results(targets, found)
    return written[0] if len(names) == 1 else tuple(written)


@cache
def _out_names(op: Any) -> tuple[str, ...]:
    return tuple(a.name for a in op._schema.arguments if a.is_out)


def _find_overload(name: str, overload: str) -> Any:
    return getattr(getattr(torch.ops.aten, name, None), overload, None)


def _call_overload(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return call_operator(op, (ShardedTensor,), tuple(args), kwargs)


def _make_in_place(op: Any, functional: Any) -> Fallback | None:
    """Compute without writing, then copy into the first argument."""
    if functional is None:
        return None
    names = [a.name for a in op._schema.arguments]
    same = [a.name for a in functional._schema.arguments] == names

    def way(target: Any, *args: Any, **kwargs: Any) -> Any:
        given = (_copy_if_recorded(target), *args)
        if not same:  # polygamma takes the tensor second, and as a method first
            given, kwargs = (), dict(zip(names, given, strict=False)) | kwargs
        return _write_results(target, _call_overload(functional, given, kwargs))

    return way


def _copy_if_recorded(target: Any) -> Any:
    """A tensor that is computed from and then written to: what the backward pass needs of it must stay."""
    recorded = torch.is_grad_enabled() and isinstance(target, ShardedTensor) and target.requires_grad
    return _copy_view(target) if recorded else target


def _make_out_variant(op: Any) -> Fallback | None:
    """Compute without `out=`, then copy into what was passed."""
    names, functional = _out_names(op), _find_without_out(op)
    if functional is None:
        return None
    options = {a.name for a in functional._schema.arguments} - {a.name for a in op._schema.arguments}

    def way(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in names]
        tensors = [t for t in pytree.tree_leaves((args, kwargs, given)) if is_tensor(t)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise ValueError("no gradient passes through out=; leave it out, or compute under torch.no_grad()")
        if next(sharded_leaves(args, kwargs), None) is None:
            raise ValueError("only out= is a ShardedTensor; if every rank has the same values pass replicate(t)")
        if options:  # of a tensor that is made
            kwargs |= {"dtype": given[0].dtype, "device": given[0].device}
        found = _call_overload(functional, args, kwargs)
        written = _write_results(given if len(given) > 1 else given[0], found)
        return (tuple(written) if len(given) > 1 else written) if op._schema.returns else None

    return way


_CREATION = {"dtype", "layout", "device", "pin_memory"}


def _find_without_out(op: Any) -> Any:
    """The overload that takes the same arguments except `out=`, or None; it may have options of new tensors besides."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    names = {name for name, _ in wanted}
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        arguments = [a for a in other._schema.arguments if a.name in names or a.name not in _CREATION]
        if [(a.name, str(a.type)) for a in arguments] == wanted:
            return other
    return None


def _write_results(targets: Any, found: Any) -> Any:
    """Write one result, or several; nothing is written unless all fit."""
    several = isinstance(targets, list | tuple)
    pairs = list(zip(targets, found, strict=True)) if several else [(targets, found)]
    for target, value in pairs:
        _check_fit(target, value)
    written = [_write_result(target, value) for target, value in pairs]
    return written if several else written[0]


def _check_fit(target: Tensor, found: Tensor) -> None:
    if tuple(found.shape) != tuple(target.shape) and target.numel() not in (0, found.numel()):
        raise ValueError(f"a result of shape {tuple(found.shape)} does not fit in {tuple(target.shape)}")
    if not torch.can_cast(found.dtype, target.dtype):
        raise ValueError(f"a result of {found.dtype} cannot be written to {target.dtype}")


def _write_result(target: Tensor, found: ShardedTensor) -> Tensor:
    """Write a result in the layout of the target; one that has room for it takes its shape, as torch's `out=` does."""
    if is_placeholder(target):
        return target.resize_(tuple(found.shape)).copy_(found.full())
    if tuple(found.shape) != tuple(target.shape):
        _call_overload(aten.resize_.default, (target, tuple(found.shape)), {})
    _call_overload(aten.copy_.default, (target, found), {})
    return target


def _make_view_copy(view: Any) -> Fallback | None:
    """Take the view, then copy it."""
    if view is None:
        return None

    def way(*args: Any, **kwargs: Any) -> Any:
        seen = _call_overload(view, args, kwargs)
        return [_copy_view(v) for v in seen] if isinstance(seen, list | tuple) else _copy_view(seen)

    return way


def _copy_view(tensor: Tensor) -> Any:
    return _call_overload(aten.clone.default, (tensor,), {})
