"""The errors of the pure layers. All of them are `ValueError`s: a request breaks a rule."""

from collections.abc import Iterable
from operator import index


class LayoutError(ValueError):
    """A layout, spec, mesh or placement that breaks a rule; the text names the numbers and the fix.

    >>> import shardwise
    >>> shardwise.ChunkSpec(2, ranks=4).layout((8, 6))
    Traceback (most recent call last):
    ...
    shardwise.geometry.errors.LayoutError: ChunkSpec(dim=2): a tensor of shape (8, 6) has a dim from -2 to 1
    """


class NotationError(LayoutError):
    """A layout written in short notation that does not parse; `position` is the offending character's index.

    >>> import shardwise
    >>> shardwise.parse_layout("f32[8] on tp=2: Q(0)")
    Traceback (most recent call last):
    ...
    shardwise.geometry.errors.NotationError: expected S(dim), R or P for axis 'tp' ...; found 'Q'
      f32[8] on tp=2: Q(0)
                      ^
    """

    def __init__(self, message: str, text: str, position: int) -> None:
        super().__init__(f"{message}\n  {text}\n  {' ' * position}^")
        self.text = text
        self.position = position


def to_int_tuple(values: Iterable[object], what: str) -> tuple[int, ...]:
    """Numbers as a tuple of ints; a number that is not whole is refused, never rounded.

    >>> to_int_tuple((4, 2.5), "a shape")
    Traceback (most recent call last):
    ...
    shardwise.geometry.errors.LayoutError: a shape must contain integers, got (4, 2.5)
    """
    try:
        given = tuple(values)
    except TypeError:
        raise LayoutError(f"{what} must be a sequence of integers, got {values!r}") from None
    try:
        return tuple(index(value) for value in given)  # type: ignore[arg-type]  # raises for what is not a number
    except TypeError:
        raise LayoutError(f"{what} must contain integers, got {given}") from None
