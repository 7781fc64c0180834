"""A progress bar for work on many bytes: share, rate and time left, on the error stream where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` bytes is done; the function it gives is told of each part.

    >>> with byte_progress("reading", 100) as advance:
    ...     advance(60)
    """
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        show(done, total)

    with shown_progress(title, total) as show:
        yield advance


@contextmanager
def shown_progress(title: str, total: int | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show how much is done; the function it gives is told the bytes done and the bytes in all.

    >>> with shown_progress("writing") as show:
    ...     show(60, 100)
    """
    if not sys.stderr.isatty() or total == 0:
        yield lambda done, total: None
        return
    from rich.console import Console  # a quarter of the start-up time, so only where there is a bar to show
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, total: bar.update(task, completed=done, total=total)
