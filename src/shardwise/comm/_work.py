"""Started operations: already complete, or completed by a function that runs once."""

from __future__ import annotations

from collections.abc import Callable


class Done:
    """Work that has nothing left to do."""

    def wait(self) -> None:
        """Return at once."""


class Pending:
    """Work completed by calling `finish` once; a failure is raised again at every later `wait`.

    >>> work = Pending(lambda: print("moved"))
    >>> work.wait()
    moved
    >>> work.wait()
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Run the completion if it has not run; raise what it raised."""
        if self._error is not None:
            raise self._error
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        except BaseException as error:
            self._error = error
            raise
