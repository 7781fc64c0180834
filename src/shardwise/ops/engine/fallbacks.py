"""Operators without a rule that others make up: computed by those, each by its own rule.

1. An operator that writes to its first argument, or to `out=`, is the one that does not, and a copy into the argument.
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

from shardwise._torch import decomposition_table, pytree
from shardwise.comm import CommError
from shardwise.ops.engine.fast_path import note_operator
from shardwise.ops.engine.mixed import MixedTensorsError, plain_as_replicated
from shardwise.ops.engine.schema import find_functional
from shardwise.tensor.dispatch import UnsupportedOpError, call_operator
from shardwise.tensor.sharded_tensor import ShardedTensor

Fallback = Callable[..., Any]
# They change the shape or the strides of the tensor they write to, or their decompositions ask for strides.
_REFUSED = frozenset(
    [f"{name}_" for name in ("resize", "resize_as", "set", "squeeze", "unsqueeze", "t", "transpose", "as_strided")]
    + ["swapaxes_", "swapdims_", "as_strided_copy", "as_strided_scatter"]
)


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
    if name.endswith("_") and not name.endswith("__"):
        return _make_in_place(find_functional(op))
    if name.endswith("_copy"):
        return _make_view_copy(_find_overload(name[: -len("_copy")], overload)) or decomposition_table.get(op)
    way: Fallback | None = decomposition_table.get(op)
    return way


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
            f"{op} has no rule, and the operators that make it up do not fit these tensors ({error}); write one with "
            f"@shardwise.register_sharding({op}), or compute on local_tensor()"
        ) from error


def _find_overload(name: str, overload: str) -> Any:
    return getattr(getattr(torch.ops.aten, name, None), overload, None)


def _call_overload(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return call_operator(op, (ShardedTensor,), tuple(args), kwargs)


def _make_in_place(functional: Any) -> Fallback | None:
    """Compute without writing, then copy into the first argument.

    What is differentiated computes from a copy: autograd may keep its values, which are overwritten here.
    """
    if functional is None:
        return None

    def way(target: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        kept = torch.is_grad_enabled() and target.requires_grad and target.sharding.pending is None
        values = _copy_view(target) if kept else target
        return _write_result(target, _call_overload(functional, (values, *args), kwargs))

    return way


def _make_out_variant(op: Any) -> Fallback | None:
    """Compute without `out=`, then copy into what was passed."""
    names = tuple(a.name for a in op._schema.arguments if a.is_out)
    functional = _find_without_out(op)
    if functional is None:
        return None

    def way(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in names]
        tensors = [t for t in pytree.tree_leaves((args, kwargs, given)) if is_tensor(t)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise ValueError("no gradient passes through out=; leave it out, or compute under torch.no_grad()")
        result = _call_overload(functional, args, kwargs)
        results = [result] if isinstance(result, Tensor) else list(result)
        for target, found in zip(given, results, strict=True):
            _check_fit(target, found)
        written = tuple(_write_result(target, found) for target, found in zip(given, results, strict=True))
        return written[0] if len(written) == 1 else written

    return way


def _find_without_out(op: Any) -> Any:
    """The overload that takes the same arguments except `out=`, or None."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for overload in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, overload)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
            return other
    return None


def _check_fit(target: Tensor, found: Tensor) -> None:
    if tuple(found.shape) != tuple(target.shape):
        raise ValueError(f"a result of shape {tuple(found.shape)} does not fit in {tuple(target.shape)}")
    if not torch.can_cast(found.dtype, target.dtype):
        raise ValueError(f"a result of {found.dtype} cannot be written to {target.dtype}")


def _write_result(target: ShardedTensor, found: Tensor) -> ShardedTensor:
    _check_fit(target, found)
    _call_overload(torch.ops.aten.copy_.default, (target, found), {})
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
    return _call_overload(torch.ops.aten.clone.default, (tensor,), {})
