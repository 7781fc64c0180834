"""What is a region of a tensor, and who holds it? `Box` answers the first question, `Piece` adds the rank.

The errors of the pure layers. All of them are `ValueError`s: a request breaks a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index


class LayoutError(ValueError):
    """A layout, spec, mesh or placement that breaks a rule; the text names the numbers and the fix.

    >>> import shardwise
    >>> shardwise.ChunkSpec(2, ranks=4).layout((8, 6))
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: ChunkSpec(dim=2): a tensor of shape (8, 6) has a dim from -2 to 1
    """


class NotationError(LayoutError):
    """A layout written in short notation that does not parse; `position` is the offending character's index.

    >>> import shardwise
    >>> shardwise.parse_layout("f32[8] on tp=2: Q(0)")
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.NotationError: expected S(dim), R or P for axis 'tp' ...; found 'Q'
      f32[8] on tp=2: Q(0)
                      ^
    """

    def __init__(self, message: str, text: str, position: int) -> None:
        super().__init__(f"{message}\n  {text}\n  {' ' * position}^")
        self.message = message
        self.text = text
        self.position = position

    def __reduce__(self) -> tuple[type[NotationError], tuple[str, str, int]]:
        return type(self), (self.message, self.text, self.position)


def to_int_tuple(values: Iterable[object], what: str, *, single: bool = False) -> tuple[int, ...]:
    """Numbers as a tuple of ints; a number that is not whole is refused, never rounded. `single`: it is one number.

    >>> to_int_tuple((4, 2.5), "a shape")
    Traceback (most recent call last):
    ...
    shardwise.geometry.box.LayoutError: a shape must contain integers, got (4, 2.5)
    """
    given = None if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    if given is None:
        raise LayoutError(f"{what} must be a sequence of integers, got {values!r}")
    try:
        return tuple(index(value) for value in given)  # type: ignore[arg-type]  # raises for what is not a number
    except TypeError:
        rule, shown = ("must be an integer", repr(given[0])) if single else ("must contain integers", str(given))
        raise LayoutError(f"{what} {rule}, got {shown}") from None


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A half-open n-D region of a tensor's global index space.

    >>> box = Box((2, 0), (3, 4))
    >>> box.numel, str(box)
    (12, '[2:5, 0:4]')
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.offsets) is not tuple or type(self.sizes) is not tuple:
            object.__setattr__(self, "offsets", tuple(int(o) for o in self.offsets))
            object.__setattr__(self, "sizes", tuple(int(s) for s in self.sizes))
        if len(self.offsets) != len(self.sizes):
            raise LayoutError(
                f"a box needs as many sizes as offsets, got offsets {self.offsets} and sizes {self.sizes}"
            )
        if any(o < 0 for o in self.offsets) or any(s < 0 for s in self.sizes):
            raise LayoutError(f"a box has no negative numbers, got offsets {self.offsets} and sizes {self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor.

        >>> Box.whole((2, 3))
        Box(offsets=(0, 0), sizes=(2, 3))
        """
        return cls((0,) * len(shape), tuple(int(s) for s in shape))

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of a global array."""
        return tuple(slice(o, e) for o, e in zip(self.offsets, self.ends, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The region two boxes share, or None.

        >>> print(Box((0, 0), (3, 4)).intersect(Box((2, 1), (5, 5))))
        [2:3, 1:4]
        """
        if self.ndim != other.ndim:
            raise LayoutError(f"boxes of {self.ndim} and {other.ndim} dims do not intersect: {self} and {other}")
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        if any(s >= e for s, e in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(e - s for s, e in zip(starts, ends, strict=True)))

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box (an empty box is in every box)."""
        return other.numel == 0 or self.intersect(other) == other

    def shifted(self, by: Sequence[int]) -> Box:
        """The same box, moved by `by`."""
        return Box(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and the rank that holds it; the device is carried along and does not take part in comparisons.

    >>> print(Piece(Box((0, 0), (2, 4)), rank=1))
    [0:2, 0:4] on rank 1
    """

    box: Box
    rank: int
    device: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise LayoutError(f"a rank is 0 or more, got {self.rank} for the piece {self.box}")

    def __str__(self) -> str:
        return f"{self.box} on rank {self.rank}"
