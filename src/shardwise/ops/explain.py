"""Who communicates, where, and how much? Recording what operations do, and forbidding that they communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shardwise.geometry import Layout, format_rule
from shardwise.tensor.recorder import WatchedMove, user_line, watch_moves
from shardwise.transfer.transfer import format_bytes


class HiddenCommunicationError(RuntimeError):
    """An operation would have communicated inside `no_communication()`.

    >>> import contextlib, shardwise
    >>> def body(comm):
    ...     x = shardwise.ones(shardwise.ChunkSpec(0, ranks=2), 4)
    ...     with shardwise.no_communication(), contextlib.suppress(HiddenCommunicationError):
    ...         return x.full()
    ...     return "refused"
    >>> shardwise.run_local(body, 2)
    ['refused', 'refused']
    """


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One operation or one move: its name, its input and output layouts, the bytes it moved, and the user's line.

    `bytes_between_hosts` is the part of the bytes that passes between hosts, where ranks are on several.
    An operation's inputs are shown as the chosen strategy needs them; the moves that put them there come before it.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    moved_bytes: int
    line: str
    bytes_between_hosts: int = 0


@dataclass
class Log:
    """What `explain()` recorded; prints as a table."""

    entries: list[LogEntry] = field(default_factory=list)

    @property
    def moved_bytes(self) -> int:
        return sum(entry.moved_bytes for entry in self.entries)

    @property
    def bytes_between_hosts(self) -> int:
        return sum(entry.bytes_between_hosts for entry in self.entries)

    def __str__(self) -> str:
        several = bool(self.bytes_between_hosts)
        rows = [("operation", "from", "to", "moved", *(["between hosts"] if several else []), "line")]
        for e in self.entries:
            bytes_shown = (e.moved_bytes, e.bytes_between_hosts) if several else (e.moved_bytes,)
            moved = [format_bytes(count) if count else "-" for count in bytes_shown]
            rows.append((e.name, " | ".join(e.inputs), " | ".join(e.outputs), *moved, e.line))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


SeeCall: TypeAlias = Callable[[Any, Sequence[Any], Any], None]
"""Takes the call of an operator, its tensors as ShardedTensors, and its results."""

_see_call: ContextVar[SeeCall | None] = ContextVar("shardwise_see_call", default=None)
_log: ContextVar[Log | None] = ContextVar("shardwise_explain", default=None)
_forbidden: ContextVar[bool] = ContextVar("shardwise_no_communication", default=False)
active_watchers = [0]


@contextmanager
def explain() -> Iterator[Log]:
    """Record every operation on ShardedTensors in a `with` block: layouts, what was chosen, bytes, the user's line.

    >>> import shardwise
    >>> def body(comm):
    ...     x = shardwise.ones(shardwise.ChunkSpec(0, ranks=2), 4, 2)
    ...     with explain() as log:
    ...         (x @ x.T).sum()
    ...     return [entry.name for entry in log.entries], log.moved_bytes
    >>> shardwise.run_local(body, 2)[0]
    (['aten.permute.default', 'aten.matmul.default', 'aten.matmul.default', 'aten.sum.default'], 32)
    """
    log = Log()
    token = _log.set(log)
    active_watchers[0] += 1
    try:
        yield log
    finally:
        active_watchers[0] -= 1
        _log.reset(token)


@contextmanager
def no_communication() -> Iterator[None]:
    """Turn any communication of operations in a `with` block into an error that names it.

    >>> import shardwise
    >>> def body(comm):
    ...     x = shardwise.ones(shardwise.ChunkSpec(0, ranks=2), 4)
    ...     with no_communication():
    ...         return (x * 2).relu().local_tensor().tolist()  # a redistribute here would raise
    >>> shardwise.run_local(body, 2)
    [[2.0, 2.0], [2.0, 2.0]]
    """
    token = _forbidden.set(True)
    active_watchers[0] += 1
    try:
        yield
    finally:
        active_watchers[0] -= 1
        _forbidden.reset(token)


@contextmanager
def watch_calls(see: SeeCall) -> Iterator[None]:
    """Show a function each operator that is computed by strategies in a `with` block; no shortcut is taken."""
    token = _see_call.set(see)
    active_watchers[0] += 1
    try:
        yield
    finally:
        active_watchers[0] -= 1
        _see_call.reset(token)


def show_call(call: Any, tensors: Sequence[Any], results: Any) -> None:
    """Show an operator to who watches."""
    see = _see_call.get()
    if see is not None:
        see(call, tensors, results)


def is_explaining_or_forbidding() -> bool:
    """Whether operations are recorded or watched, or communication is forbidden."""
    return active_watchers[0] > 0 and (_forbidden.get() or _log.get() is not None or _see_call.get() is not None)


def layout_brief(layout: Layout) -> str:
    """A layout for a table."""
    return format_rule(layout).removeprefix("on ").removeprefix("as ") if len(layout.table) < 65 else repr(layout.spec)


def check_may_communicate(name: str, src: Layout, dst: Layout) -> None:
    """Raise if communication is forbidden."""
    if _forbidden.get():
        raise HiddenCommunicationError(
            f"{name} at {user_line()} would move {layout_brief(src)} to {layout_brief(dst)}, and communication is "
            "forbidden here; "
            "redistribute before the block, or choose layouts that fit"
        )


def record_entry(entry: LogEntry) -> None:
    log = _log.get()
    if log is not None:
        log.entries.append(entry)


def _watch_move(move: WatchedMove) -> None:
    if is_explaining_or_forbidding() and move.moved_bytes > 0:
        check_may_communicate(move.label, move.src, move.dst)
        briefs = (layout_brief(move.src),), (layout_brief(move.dst),)
        passing = move.bytes_between_hosts or 0
        record_entry(LogEntry(move.label, *briefs, move.moved_bytes, user_line(), passing))


watch_moves(_watch_move)
