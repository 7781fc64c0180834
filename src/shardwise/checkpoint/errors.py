"""What can be wrong with a checkpoint, and how an error is passed on: to the other ranks, with the name of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that is broken, or lacks what was requested; the message names the file and the tensor.

    >>> issubclass(CheckpointError, ValueError)
    True
    """


def require(condition: object, problem: str) -> None:
    """Raise a ValueError unless something holds of what was read; unlike `assert`, always.

    >>> require(1 > 2, "no order")
    Traceback (most recent call last):
    ...
    ValueError: no order
    """
    if not condition:
        raise ValueError(problem)


def run_or_describe_error(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of some work, or what went wrong, to report to the other ranks."""
    try:
        return work(), None
    except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
        plain = isinstance(error, ValueError)
        return None, str(error) if plain else f"{type(error).__name__}: {error}"


@contextmanager
def add_path_to_error(path: Path) -> Iterator[None]:
    """Add the name of the file to an error of the system that has none.

    >>> import errno, os
    >>> with add_path_to_error(Path("ckpt/a.safetensors")):
    ...     raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    Traceback (most recent call last):
    ...
    OSError: [Errno 28] No space left on device: 'ckpt/a.safetensors'
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
