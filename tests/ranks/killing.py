"""A process that kills itself at a chosen point, for tests of what a kill leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any


def die_before(number: int, operations: Sequence[str]) -> None:
    """Let this process kill itself right before the `number`-th of these functions of os, counted from now."""
    left = [number]

    def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return plain(*args, **kwargs)

        return call

    for name in operations:
        setattr(os, name, wrapped(getattr(os, name)))
