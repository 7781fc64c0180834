"""Caches that hold what was derived from rules and users' ops are cleared whenever one of these changes."""

from __future__ import annotations

from typing import Any

_caches: list[dict[Any, Any]] = []


def cleared_on_change(cache: dict[Any, Any]) -> dict[Any, Any]:
    """Have a cache cleared on every change; returns it."""
    _caches.append(cache)
    return cache


def advance() -> None:
    """Say that something was registered or removed."""
    for cache in _caches:
        cache.clear()
