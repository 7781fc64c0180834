"""Gradients requested by torch's own functions: `torch.autograd.backward` and `torch.autograd.grad`.

The local tensors are on the tape, so each ShardedTensor is replaced by those of this rank, and gradients are put
together again. Every rank makes the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.tensor.autograd_mixin import tape_tensors
from shardwise.tensor.dispatch import UnsupportedOpError, register_function
from shardwise.tensor.sharded_tensor import ShardedTensor

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
