"""How are plain tensors read by modules whose parameters are sharded? As this rank's own batch.

Every rank passes its own batch and gets the result for it, computed with the whole parameter. This applies inside
modules whose parameters `shard_parameter` or `shard_module` sharded, and inside `with plain_as_local_batch():`.
Elsewhere mixing a plain tensor with a sharded one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from shardwise._torch import count_running_calls
from shardwise.comm import Comm
from shardwise.tensor.dispatch import Implementation, find_function, run_function
from shardwise.tensor.sharded_tensor import ShardedTensor

# Who requested it: modules whose forward runs, None for a block.
_local_batch_scopes: ContextVar[tuple[nn.Module | None, ...]] = ContextVar("shardwise_local_batch", default=())


@contextmanager
def plain_as_local_batch() -> Iterator[None]:
    """Read plain inputs of embedding, embedding_bag and linear with sharded parameters as this rank's own batch.

    >>> import torch
    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor import shard
    >>> table = shard(torch.arange(6.0).reshape(3, 2), ChunkSpec(0, ranks=1))
    >>> with plain_as_local_batch():
    ...     torch.nn.functional.embedding(torch.tensor([2, 0]), table)
    tensor([[4., 5.],
            [0., 1.]])
    """
    token = _local_batch_scopes.set((*_local_batch_scopes.get(), None))
    try:
        yield
    finally:
        _local_batch_scopes.reset(token)


def is_local_batch_mode() -> bool:
    """Whether plain inputs are this rank's own batch here."""
    return bool(_local_batch_scopes.get())


def is_local_batch(inputs: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """Whether a call has plain inputs that are this rank's own batch, next to a sharded parameter."""
    sharded = any(isinstance(p, ShardedTensor) for p in parameters)
    return sharded and is_local_batch_mode() and not any(isinstance(i, ShardedTensor) for i in inputs)


def register_local_batch_hooks(module: nn.Module) -> None:
    """Make a module read plain inputs as this rank's own batch, from the beginning of its forward to the end."""
    if _enter_local_batch not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter_local_batch)
        module.register_forward_hook(_leave_local_batch, always_call=True)


def _enter_local_batch(module: nn.Module, _args: Any) -> None:
    readers = _local_batch_scopes.get()
    while readers and readers[-1] is not None and count_running_calls(readers[-1]) <= (readers[-1] is module):
        readers = readers[:-1]  # its call was interrupted, as by Ctrl-C
    _local_batch_scopes.set((*readers, module))


def _leave_local_batch(module: nn.Module, _args: Any, _output: Any) -> None:
    readers = _local_batch_scopes.get()
    if readers and readers[-1] is module:  # not so if an earlier hook raised before `_enter_local_batch` ran
        _local_batch_scopes.set(readers[:-1])


def default_implementation(function: Callable[..., Any]) -> Implementation:
    """What a torch function does on ShardedTensors apart from local batches: its handler so far, else its operators."""
    known = find_function(function)

    def operators(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        return run_function(function, args, kwargs)

    return known or operators


def as_matrix(batch: Tensor) -> Tensor:
    """A batch as rows: all dims but the last one merged.

    >>> import torch
    >>> as_matrix(torch.zeros(2, 3, 4)).shape
    torch.Size([6, 4])
    """
    return batch.reshape(-1, batch.shape[-1])
