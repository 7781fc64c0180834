"""What every tensor can do, whatever its layout: copy, compare, convert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.inplace import check_writable
from shardwise.tensor.move import check_move, move_to, replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@register_function(Tensor.copy_)
def _copy_into(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> ShardedTensor:
    """Copy into a ShardedTensor, in place: from one of any layout, or from a plain tensor that every rank holds."""
    target, source = args[0], args[1]
    if not isinstance(target, ShardedTensor):
        raise UnsupportedOpError("a plain tensor cannot take the values of a ShardedTensor; use source.full()")
    if tuple(source.shape) != tuple(target.shape):
        source = _broadcast_source(source, tuple(target.shape))
    check_writable(target)
    held = _align_values(source, target)
    for local, values in zip(target.local_parts, held, strict=True):
        local.copy_(values)
    return target


def _broadcast_source(source: Tensor, shape: tuple[int, ...]) -> Tensor:
    own = tuple(source.shape)
    if len(own) > len(shape) or any(n not in (1, m) for n, m in zip(own[::-1], shape[::-1], strict=False)):
        raise ValueError(f"copy_ needs equal shapes, or one that broadcasts, got {shape} and {own}")
    return source.expand(shape)


def _align_values(source: Tensor, target: ShardedTensor) -> tuple[Tensor, ...]:
    """Another tensor's values in the layout of `target`."""
    if isinstance(source, ShardedTensor):
        check_move(source, target.sharding, "align")
        return move_to(source, target.sharding, "align")[0]
    comm = target.comm
    held = wrap(replicated_layout(tuple(source.shape), comm.ranks), (source,), comm)
    return move_to(held, target.sharding, "align")[0]


def _all_ranks_true(comm: Comm, verdict: bool, label: str) -> bool:
    return all(data == b"1" for data in comm.all_gather_bytes(b"1" if verdict else b"0", label=label))


def _compare(args: Args, kwargs: Kwargs, comm: Comm, compare: Any, label: str) -> bool:
    first, second = args[0], args[1]
    if not isinstance(first, ShardedTensor):
        first, second = second, first
    if tuple(first.shape) != tuple(second.shape):
        return False
    # What torch refuses for these dtypes it must refuse on every rank, also on one that holds nothing.
    compare(torch.zeros(1, dtype=first.dtype), torch.zeros(1, dtype=second.dtype), *args[2:], **kwargs)
    held = _align_values(second, first) if first.sharding.pending is None else None
    if held is None:
        raise UnsupportedOpError(f"{label} needs values, and a reduction is pending; redistribute first")
    same = all(compare(a, b, *args[2:], **kwargs) for a, b in zip(first.local_parts, held, strict=True))
    return _all_ranks_true(comm, same, label)


@register_function(torch.equal, Tensor.equal)
def _equal(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> bool:
    """Whether two tensors of any layouts hold equal values; the same answer on every rank."""
    return _compare(args, kwargs, comm, torch.equal, "equal")


@register_function(torch.allclose, Tensor.allclose)
def _allclose(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> bool:
    """Whether two tensors of any layouts hold close values; the same answer on every rank."""
    return _compare(args, kwargs, comm, torch.allclose, "allclose")


@register_function(torch.Tensor.contiguous)
def _contiguous(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    return wrap(
        tensor.sharding,
        tuple(t.contiguous() for t in tensor.local_parts),
        comm,
        dtype=tensor.dtype,
        anchor=tensor._anchor,
    )
