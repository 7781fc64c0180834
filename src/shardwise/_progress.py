"""How far is work that takes a while? `progress=` of save, load, reshard and discovery; the bars of the commands.

1. By default (None) the first rank draws a bar on the error stream, if that is a terminal and the work takes longer
   than half a second: rich is imported then, and not before.
2. True draws the bar at once, or one line at the end where there is no terminal; False draws none.
3. A function is called on the rank that passed it, with what is done and the total: bytes, or layouts tried.

What a rank reports is its own share. An error that the function raises ends the work as any other error does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeAlias

Progress: TypeAlias = bool | Callable[[int, int], None] | None
QUIET_SECONDS = 0.5


class Meter:
    """Adds up what is done, from any thread, and shows it; `active` is False where nobody looks."""

    def __init__(self, total: int, show: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self._show = 0, total, show
        self._lock = threading.Lock()
        self.active = show is not None

    def expect(self, count: int) -> None:
        """There is more to do than was known."""
        self.total += count

    def advance(self, count: int) -> None:
        """So much more is done."""
        if self._show is not None:
            with self._lock:
                self.done += count
                self._show(self.done, self.total)


class _Bar:
    """A bar of rich on the error stream, from the first call after `delay` seconds on."""

    def __init__(self, title: str, unit: str, delay: float) -> None:
        self._title, self._unit, self._start = title, unit, monotonic() + delay
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            if monotonic() < self._start:
                return
            self._bar = self._open(total)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _open(self, total: int) -> Any:
        from rich import progress as rich  # a quarter of the start-up time of a command
        from rich.console import Console

        text, share, left = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TimeRemainingColumn()
        rates = (rich.DownloadColumn(), rich.TransferSpeedColumn())
        counts = rates if self._unit == "bytes" else (rich.MofNCompleteColumn(), rich.TextColumn(self._unit))
        console = Console(stderr=True)
        bar = rich.Progress(text, share, *counts, left, console=console, transient=console.is_terminal)
        bar.add_task(self._title, total=total)
        bar.start()
        return bar

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._bar is not None:
            self._bar.stop()


def check_progress(progress: object) -> None:
    """Raise a TypeError for what `progress=` does not take.

    >>> check_progress("yes")
    Traceback (most recent call last):
    ...
    TypeError: progress='yes': pass True, False, None or a function of (done, total)
    """
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress={progress!r:.60}: pass True, False, None or a function of (done, total)")


@contextmanager
def show_progress(
    progress: Progress, title: str, total: int = 0, *, first: bool = True, unit: str = "bytes"
) -> Iterator[Meter]:
    """Yield the meter of some work, of which `total` is known so far. `first`: this rank draws the bar, if any does.

    >>> seen = []
    >>> with show_progress(lambda done, total: seen.append((done, total)), "reading", 100) as meter:
    ...     meter.advance(60)
    ...     meter.advance(40)
    >>> seen
    [(60, 100), (100, 100)]
    """
    check_progress(progress)
    if callable(progress):
        yield Meter(total, progress)
    elif progress is False or not first or not (progress or _is_terminal()):
        yield Meter(total, None)
    else:
        bar = _Bar(title, unit, 0.0 if progress else QUIET_SECONDS)
        try:
            yield Meter(total, bar)
        finally:
            bar.close()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
