"""What is remembered, and when it is forgotten.

Caches of what was derived from rules and users' ops are cleared whenever one of these changes.

Layouts that mean the same are equal even if they were described on different meshes. Where the description matters, an
answer is kept for the layout object, not for its meaning (`cache_by_identity`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from shardwise.geometry import Layout

_caches: list[dict[Any, Any]] = []


def clear_on_change(cache: dict[Any, Any]) -> dict[Any, Any]:
    """Have a cache cleared on every change; returns it."""
    _caches.append(cache)
    return cache


def invalidate_caches() -> None:
    """Say that something was registered or removed."""
    for cache in _caches:
        cache.clear()


T = TypeVar("T")
_MAX_CACHED_LAYOUTS = 8192


def cache_by_identity(function: Callable[[Layout], T]) -> Callable[[Layout], T]:
    """Keep the answers of a function of one layout, for each layout object."""
    answers: dict[int, tuple[Layout, T]] = {}

    @wraps(function)
    def answer(layout: Layout) -> T:
        known = answers.get(id(layout))
        if known is None:
            if len(answers) >= _MAX_CACHED_LAYOUTS:
                answers.clear()
            known = answers[id(layout)] = (layout, function(layout))
        return known[1]

    return answer
