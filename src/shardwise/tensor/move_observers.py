"""Whoever wants to know of every move before it is made."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.transfer import Transfer

_move_watchers: list[Callable[[Transfer, str], None]] = []


def watch_moves(watcher: Callable[[Transfer, str], None]) -> None:
    """Have `watcher(plan, label)` called before each move; it may raise to forbid it."""
    _move_watchers.append(watcher)


def notify_watchers(plan: Transfer, label: str) -> None:
    """Say that a move is about to be made."""
    for watcher in _move_watchers:
        watcher(plan, label)
