"""A move under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from shardwise.tensor.execute import Running

T = TypeVar("T")


class Handle(Generic[T]):
    """What `async_op=True` returns: `wait()` completes the move and gives its result, as often as asked."""

    def __init__(self, running: Running, finish: Callable[[Sequence[tuple[Tensor, ...]]], T]) -> None:
        self._running, self._finish = running, finish
        self._result: tuple[T] | None = None

    def wait(self) -> T:
        """The result; raises `CommError` if the exchange failed."""
        if self._result is None:
            self._result = (self._finish(self._running.wait()),)
        return self._result[0]
