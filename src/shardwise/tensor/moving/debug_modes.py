"""Moves in log messages, and in torch's `CommDebugMode`: one that sends something is one `torch.ops.shardwise.move`.

The mode counts operators of torch.distributed that it meets; our transports call none. It is off the stack while it
runs an operator and the moves of that operator, so it is remembered where a function of ShardedTensors begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise._log import package_logger
from shardwise._torch import comm_debug_modes
from shardwise.geometry import Layout, shorten_layout
from shardwise.tensor.moving.parts import PlannedMove, watch_moves
from shardwise.tensor.user_line import user_line
from shardwise.transfer.report import format_bytes

_log = package_logger(__name__)


class _ModesAbove(threading.local):
    modes: tuple[Any, ...] = ()


_above = _ModesAbove()


@contextmanager
def remember_debug_modes() -> Iterator[None]:
    """Let moves inside a `with` block count in the modes that are on now."""
    before = _above.modes
    _above.modes = tuple(dict.fromkeys((*before, *comm_debug_modes())))
    try:
        yield
    finally:
        _above.modes = before


def _count_move(plan: PlannedMove, label: str, src: Layout, dst: Layout) -> None:
    for mode in _above.modes or comm_debug_modes():
        if plan.moved_bytes > 0:
            mode.comm_counts[torch.ops.shardwise.move] += 1


def _log_move(plan: PlannedMove, label: str, src: Layout, dst: Layout) -> None:
    if _log.isEnabledFor(logging.DEBUG) and plan.moved_bytes > 0:
        between, moved = (shorten_layout(src), shorten_layout(dst)), format_bytes(plan.moved_bytes)
        _log.debug("%s moves %s, %s -> %s, at %s", label, moved, *between, user_line())


watch_moves(_count_move)
watch_moves(_log_move)
