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
    if not sys.stderr.isatty() or not total:
        yield lambda count: None
        return
    from rich.console import Console  # a quarter of the start-up time, so only where there is a bar to show
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
