"""A count that grows whenever what answers a function changes, so that what was derived from it can be dropped."""

from __future__ import annotations

_count = [0]


def current() -> int:
    """The count now."""
    return _count[0]


def advance() -> None:
    """Say that something was registered or removed."""
    _count[0] += 1
