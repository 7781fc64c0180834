"""A process that kills itself at a chosen point, for tests of what a kill leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any


def die_before(number: int, operations: Sequence[str], others: Sequence[tuple[Any, str]] = ()) -> None:
    """Let this process kill itself right before the `number`-th of these functions of os, or others, from now on."""
    left = [number]

    def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return plain(*args, **kwargs)

        return call

    for module, name in [*((os, name) for name in operations), *others]:
        setattr(module, name, wrapped(getattr(module, name)))
