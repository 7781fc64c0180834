"""How are plain tensors read by modules whose parameters are sharded? As this rank's own batch.

Every rank brings a batch of its own and gets the result for it, computed with the whole parameter. This holds inside
modules whose parameters `shard_parameter` or `shard_module` sharded, and inside `with plain_as_local_batch():`.
Elsewhere a plain tensor beside a sharded one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from shardwise._torch import DisableTorchFunctionSubclass
from shardwise.comm import Comm
from shardwise.tensor.dispatch import Implementation, find_handler
from shardwise.tensor.sharded_tensor import ShardedTensor

# Who asked for it: modules whose forward runs, None for a block.
_readers: ContextVar[tuple[nn.Module | None, ...]] = ContextVar("shardwise_local_batch", default=())


@contextmanager
def plain_as_local_batch() -> Iterator[None]:
    """Read plain inputs of embedding, embedding_bag and linear beside sharded parameters as this rank's own batch.

    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor import shard
    >>> table = shard(torch.arange(6.0).reshape(3, 2), ChunkSpec(0, ranks=1))
    >>> with plain_as_local_batch():
    ...     torch.nn.functional.embedding(torch.tensor([2, 0]), table)
    tensor([[4., 5.],
            [0., 1.]])
    """
    token = _readers.set((*_readers.get(), None))
    try:
        yield
    finally:
        _readers.reset(token)


def reads_local_batches() -> bool:
    """Whether plain inputs are this rank's own batch here."""
    return bool(_readers.get())


def is_local_batch(inputs: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """Whether a call has plain inputs that are this rank's own batch, beside a sharded parameter."""
    sharded = any(isinstance(p, ShardedTensor) for p in parameters)
    return sharded and reads_local_batches() and not any(isinstance(i, ShardedTensor) for i in inputs)


def read_local_batches(module: nn.Module) -> None:
    """Make a module read plain inputs as this rank's own batch, from the beginning of its forward to the end."""
    if _enter not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, _args: Any) -> None:
    _readers.set((*_readers.get(), module))


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    readers = _readers.get()
    if readers and readers[-1] is module:  # not so if an earlier hook raised before `_enter` ran
        _readers.set(readers[:-1])


def otherwise(function: Callable[..., Any]) -> Implementation:
    """What a torch function does on ShardedTensors apart from local batches: its handler so far, else its operators."""
    known = find_handler(function)

    def operators(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return known or operators


def as_matrix(batch: Tensor) -> Tensor:
    """A batch as rows: all dims but the last one merged.

    >>> as_matrix(torch.zeros(2, 3, 4)).shape
    torch.Size([6, 4])
    """
    return batch.reshape(-1, batch.shape[-1])
