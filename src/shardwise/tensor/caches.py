"""What is remembered, and when it is forgotten.

Caches of what was derived from rules and users' ops are cleared whenever one of these changes.

Layouts that mean the same are equal even if they were described on different meshes. Where the description matters, an
answer is kept for the layout object, not for its meaning (`cache_by_identity`).

Layouts that depend on data are new in every step. What is known about one is kept with it and ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

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
F = TypeVar("F", bound=Callable[..., Any])
_MAX_CACHED_LAYOUTS = 8192


def cache_by_identity(function: Callable[[Layout], T]) -> Callable[[Layout], T]:
    """Keep the answers of a function of one layout, for each layout object."""
    answers: dict[int, tuple[Layout, T]] = {}

    @wraps(function)
    def answer(layout: Layout) -> T:
        known = answers.get(id(layout))
        if known is None:
            if layout.depends_on_data:
                own: dict[Any, T] = layout.__dict__.setdefault("_answers", {})
                if answer not in own:
                    own[answer] = function(layout)
                return own[answer]
            if len(answers) >= _MAX_CACHED_LAYOUTS:
                answers.clear()
            known = answers[id(layout)] = (layout, function(layout))
        return known[1]

    return answer


def cache_plans(function: F) -> F:
    """Keep the answers of a function whose first argument is a layout or a plan between two, unless they depend on
    data; the second argument may be the other layout."""
    cached = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def answer(first: Any, second: Any, *rest: Any) -> Any:
        src, dst = (first, second) if isinstance(first, Layout) else (first.src, first.dst)
        if src.depends_on_data or dst.depends_on_data:
            return function(first, second, *rest)
        return cached(first, second, *rest)

    answer.cache_info = cached.cache_info  # type: ignore[attr-defined]  # functions take attributes
    return cast(F, answer)
