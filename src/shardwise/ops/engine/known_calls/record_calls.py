"""Operators in a trace: when each function of ShardedTensors ran, in which layouts, and its backward nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.comm.traced import is_tracing
from shardwise.tensor.dispatch import sharded_leaves
from shardwise.tensor.recorder import find_recorder, write_tensor
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.user_line import user_line


def record_call(
    call: Callable[[], Any], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Make a call of a torch function and note it, where the rank of its tensors is traced."""
    given: list[ShardedTensor] = list(sharded_leaves(args, kwargs))
    recorder = find_recorder(given[0].comm) if given else None
    if recorder is None or is_tracing():
        return call()
    line, begin = user_line(), time.monotonic_ns()
    result = call()
    made: list[ShardedTensor] = list(sharded_leaves((result,), {}))
    if not made:  # a question, such as the shape
        return result
    details = {"from": " | ".join(_texts(given)), "to": " | ".join(_texts(made)), "line": line, "pass": "forward"}
    recorder.add_operator(getattr(func, "__name__", str(func)), begin, details)
    recorder.watch_backward(_parts(made), _parts(given), line)
    return result


def _texts(tensors: Iterable[ShardedTensor]) -> list[str]:
    return [write_tensor(t.sharding, t.dtype) for t in tensors]


def _parts(tensors: Iterable[ShardedTensor]) -> list[Tensor]:
    return [part for t in tensors for part in t.local_parts]
