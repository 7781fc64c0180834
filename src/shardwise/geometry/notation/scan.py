"""How is a short text read from left to right, with errors that point at the character?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from shardwise.geometry.errors import LayoutError, NotationError

T = TypeVar("T")
MAX_INT64 = 2**63 - 1
LONGEST_SHOWN = 60


class Scanner:
    """A text and a position in it; blanks between tokens do not count.

    >>> scanner = Scanner("tp = 4")
    >>> scanner.word(), scanner.take("="), scanner.integer("a size")
    ('tp', True, 4)
    """

    def __init__(self, text: str) -> None:
        self.text = "".join(" " if c.isspace() else c for c in text)
        self.at = 0
        self._skip_blanks()

    def _skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1

    def _advance(self, count: int) -> None:
        self.at += count
        self._skip_blanks()

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        """Raise an error that points at a position, by default at the current one."""
        raise NotationError(message, self.text, self.at if at is None else at)

    @contextmanager
    def errors_at(self, at: int) -> Iterator[None]:
        """Let the errors of the geometry point at a position of the text."""
        try:
            yield
        except NotationError:
            raise
        except LayoutError as error:
            raise NotationError(str(error), self.text, at) from error

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def found(self) -> str:
        """What is at the position, in words for an error."""
        word = self.peek_word() or self.text[self.at : self.at + 1]
        more = "..." if len(word) > LONGEST_SHOWN else ""
        return f"found {word[:LONGEST_SHOWN] + more!r}" if word else "the text ends here"

    def peek_word(self) -> str:
        """The identifier at the position, or an empty text."""
        end = self.at
        if self.text[end : end + 1].isidentifier():
            end += 1
            while end < len(self.text) and f"_{self.text[end]}".isidentifier():  # each character once, however long
                end += 1
        return self.text[self.at : end]

    def peek(self, token: str) -> bool:
        """Whether this symbol or keyword comes next."""
        return self.peek_word() == token if token.isidentifier() else self.text.startswith(token, self.at)

    def take(self, token: str) -> bool:
        """Read this symbol or keyword if it comes next."""
        if not self.peek(token):
            return False
        self._advance(len(token))
        return True

    def expect(self, token: str, place: str) -> None:
        """Read this symbol or keyword, or fail."""
        if not self.take(token):
            self.fail(f"expected {token!r} {place}; {self.found()}")

    def word(self) -> str:
        """Read an identifier; an empty text if there is none."""
        word = self.peek_word()
        self._advance(len(word))
        return word

    def integer(self, what: str, signed: bool = False) -> int:
        """Read a whole number, or fail and say what it is for."""
        start = self.at
        end = start + 1 if signed and self.text.startswith("-", start) else start
        while end < len(self.text) and self.text[end] in "0123456789":
            end += 1
        digits = self.text[start:end]
        if not digits.removeprefix("-"):
            self.fail(f"expected {what}, an integer; {self.found()}")
        if len(digits) > 19 or abs(int(digits)) > MAX_INT64:
            self.fail(f"{what} does not fit in 64 bits; the largest number is {MAX_INT64}")
        self._advance(end - start)
        return int(digits)

    def items(self, read: Callable[[], T], close: str, place: str, separator: str = ",") -> list[T]:
        """Read what is between brackets: any number of items, then the closing bracket."""
        found: list[T] = []
        if self.take(close):
            return found
        found.append(read())
        while self.take(separator):
            found.append(read())
        if not self.take(close):
            self.fail(f"expected {separator!r} or {close!r} {place}; {self.found()}")
        return found

    def end(self, place: str) -> None:
        """Fail unless the whole text was read."""
        if self.at < len(self.text):
            self.fail(f"expected nothing more {place}; {self.found()}")
