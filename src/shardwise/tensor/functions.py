"""Torch functions that are answered as a whole, since they are more than one operator, or none.

1. `torch.equal`, `torch.allclose`, `copy_`, `contiguous`: what every tensor can do.
2. `torch.autograd.grad` and `torch.autograd.backward`: on the local tensors, which are on the tape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.tensor.autograd_mixin import tape_tensors
from shardwise.tensor.copied_views import followed_writes
from shardwise.tensor.dense_strides import has_format
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.inplace import check_leaf_without_data, check_writable, count_write, note_write_without_data
from shardwise.tensor.move import check_move, move_to, replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@register_function(Tensor.copy_)
def _copy_into(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    """Copy into a ShardedTensor, in place: from one of any layout, or from a plain tensor that every rank holds.

    A plain tensor takes the whole value of a ShardedTensor, which is gathered.
    Addends that have to be converted are left to the operator, which knows when to reduce first.
    """
    target, source = args[0], args[1]
    if not isinstance(target, ShardedTensor):
        return target.copy_(source.full())  # as `load_state_dict` of a plain model does, on every rank
    if tuple(source.shape) != tuple(target.shape):
        source = _broadcast_source(source, tuple(target.shape))
    with followed_writes():
        check_writable(target)
    if isinstance(source, ShardedTensor) and source.dtype != target.dtype and _is_pending(source, target):
        return NotImplemented
    held, anchor = _align_values(source, target)
    for local, values in zip(target.local_parts, held, strict=True):
        local.copy_(values)
    check_leaf_without_data(target)
    if not target.local_parts:
        note_write_without_data(target, anchor)
    count_write(target)
    if target._copied_from is not None:
        target._copied_from.write_back()
    return target


def _is_pending(*tensors: ShardedTensor) -> bool:
    return any(t.sharding.pending is not None for t in tensors)


def _broadcast_source(source: Tensor, shape: tuple[int, ...]) -> Tensor:
    own = tuple(source.shape)
    if len(own) > len(shape) or any(n not in (1, m) for n, m in zip(own[::-1], shape[::-1], strict=False)):
        raise ValueError(f"copy_ needs equal shapes, or one that broadcasts, got {shape} and {own}")
    return source.expand(shape)


def _align_values(source: Tensor, target: ShardedTensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Another tensor's values in the layout of `target`, and the anchor of a rank that has none of them."""
    if isinstance(source, ShardedTensor):
        check_move(source, target.sharding, "align")
        return move_to(source, target.sharding, "align")
    comm = target.comm
    held = wrap(replicated_layout(tuple(source.shape), comm.ranks), (source,), comm)
    return move_to(held, target.sharding, "align")


def _all_ranks_true(comm: Comm, verdict: bool, label: str) -> bool:
    return all(data == b"1" for data in comm.all_gather_bytes(b"1" if verdict else b"0", label=label))


def _compare(args: Args, kwargs: Kwargs, comm: Comm, compare: Any, label: str) -> bool:
    first, second = args[0], args[1]
    if not isinstance(first, ShardedTensor):
        first, second = second, first
    if tuple(first.shape) != tuple(second.shape):
        return False
    # What torch refuses for these dtypes it must refuse on every rank, also on one that holds nothing.
    compare(*(torch.zeros(1, dtype=t.dtype, device="cpu") for t in (first, second)), *args[2:], **kwargs)
    if first.sharding.pending is not None:
        dst = replicated_layout(tuple(first.shape), comm.ranks)
        check_move(first, dst, label)
        first = wrap(dst, move_to(first, dst, label)[0], comm)
    held, _ = _align_values(second, first)
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
    """The tensor itself where the whole would be contiguous, else a copy: as torch has it, so that writes to the result
    are seen in the tensor, or not, in every layout."""
    tensor, memory_format = _read_contiguous(*args, **kwargs)
    if not has_format(tuple(tensor.shape), tensor._dense_strides, memory_format):
        return tensor.clone(memory_format=memory_format)
    if all(t.is_contiguous(memory_format=memory_format) for t in tensor.local_parts):
        return tensor
    local = tuple(t.contiguous(memory_format=memory_format) for t in tensor.local_parts)
    return wrap(tensor.sharding, local, comm, dtype=tensor.dtype, anchor=tensor._anchor)


def _read_contiguous(
    tensor: ShardedTensor, *, memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[ShardedTensor, torch.memory_format]:
    return tensor, memory_format


Tensors = Tensor | Sequence[Tensor]


def _to_list(value: Tensors | None, count: int) -> list[Any]:
    """Tensors, or one of them, as a list; `count` times None where there are none."""
    if value is None:
        return [None] * count
    return [value] if isinstance(value, Tensor) else list(value)


def _tape_and_seeds(tensors: Sequence[Tensor], given: Tensors | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """The tensors on this rank's tape, and the gradient that each starts from."""
    seeds: list[Tensor | None] = []
    for tensor, seed in zip(tensors, _to_list(given, len(tensors)), strict=True):
        if isinstance(tensor, ShardedTensor):
            seeds += tensor._seed(seed)
        else:
            seeds.append(seed.full() if isinstance(seed, ShardedTensor) else seed)
    return [t for tensor in tensors for t in tape_tensors(tensor)], seeds


@register_function(torch.autograd.backward)
def _backward(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> None:
    backward(*args, **kwargs)


def backward(
    tensors: Tensors,
    grad_tensors: Tensors | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensors | None = None,
) -> None:
    """What `torch.autograd.backward` does, for plain tensors and ShardedTensors together."""
    roots, seeds = _tape_and_seeds(_to_list(tensors, 0), grad_tensors)
    leaves = None if inputs is None else [t for one in _to_list(inputs, 0) for t in tape_tensors(one)]
    torch.autograd.backward(roots, seeds, retain_graph, create_graph, inputs=leaves)


@register_function(torch.autograd.grad)
def _grad(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    return grad(*args, **kwargs)


def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Tensors | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """What `torch.autograd.grad` does; the gradient of a ShardedTensor is one, in the dual layout."""
    if is_grads_batched:
        raise UnsupportedOpError(
            "torch.autograd.grad with is_grads_batched=True is not supported for ShardedTensors; use a loop"
        )
    wanted = _to_list(inputs, 0)
    roots, seeds = _tape_and_seeds(_to_list(outputs, 0), grad_outputs)
    leaves = [t for one in wanted for t in tape_tensors(one)]
    found = iter(
        torch.autograd.grad(
            roots,
            leaves,
            seeds,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )
    )
    return tuple(_assemble_gradient(one, list(islice(found, len(tape_tensors(one))))) for one in wanted)


def _assemble_gradient(tensor: Tensor, grads: Sequence[Tensor | None]) -> Tensor | None:
    known = tuple(g for g in grads if g is not None)
    if len(known) < len(grads):
        return None
    if not isinstance(tensor, ShardedTensor):
        return known[0]
    return tensor._gradient(known)
