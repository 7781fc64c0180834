"""Who wants to know what a rank does, and when? Recorders, watchers, torch's profiler and its `CommDebugMode`, the log.

1. Recorders note operators and moves while `shardwise.trace` is on. Nothing is recorded otherwise: code on the way of a
   move asks whether there is a recorder at all. Recorders are found by rank, since ranks may be threads of one process,
   and a backward pass may run on threads of its own.
2. Watchers are called before each move and may forbid it (`watch_moves`). The log is one. In torch's `CommDebugMode` a
   move that sends something is one `torch.ops.shardwise.move`. The mode counts operators of torch.distributed that it
   meets; our transports call none. It is off the stack while it runs an operator and the moves of that operator, so it
   is remembered where a function of ShardedTensors begins.
3. `user_line` finds the line of the user's own code that asks for something.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from shardwise._cache import cache_by_identity
from shardwise._text import package_logger
from shardwise._torch import comm_debug_modes, is_profiling
from shardwise.comm import Comm
from shardwise.geometry import Layout, shorten_layout
from shardwise.geometry.notation import find_dtype
from shardwise.transfer.transfer import format_bytes

if TYPE_CHECKING:
    from shardwise.tensor.move import Move

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def user_line() -> str:
    """The innermost line of the user's own code on the stack, as `train.py:12`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_PACKAGE, "<")) or "/torch/" in name or _is_standard(name)):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


def _is_standard(name: str) -> bool:
    """Whether a file is part of Python, such as contextlib; installed packages may be in a folder below it."""
    return name.startswith(_STANDARD_LIBRARY) and "site-packages" not in name and "dist-packages" not in name


OPERATORS, FIRST_MOVES, WAITS = 0, 1, 1000  # tracks of a rank; there are as many of moves as run at once
Blocks: TypeAlias = Mapping[int, Sequence[Tensor]]


@dataclass(slots=True)
class RecordedSpan:
    """Something that a rank did, in nanoseconds of its clock; of a move also which one it is and whom it waits for."""

    name: str
    category: str
    begin: int
    end: int
    track: int
    details: dict[str, Any]
    move: str = ""
    sources: tuple[int, ...] = ()


@dataclass
class StepRecorder:
    """What one rank did since the recorder was started."""

    rank: int
    spans: list[RecordedSpan] = field(default_factory=list)
    line: str = ""  # of the forward pass, while the backward pass runs a node of it
    _counts: dict[tuple[int, ...], int] = field(default_factory=dict)
    _busy: set[int] = field(default_factory=set)
    _nodes: set[Any] = field(default_factory=set)

    def add_operator(self, name: str, begin: int, details: dict[str, Any]) -> None:
        """Note an operator that ran until now."""
        self.spans.append(RecordedSpan(name, "operator", begin, time.monotonic_ns(), OPERATORS, details))

    def begin_move(self, comm: Comm, moves: Sequence[Move], label: str, line: str = "") -> Callable[[], None]:
        """Note that moves begin, which share their exchanges; returns what notes their end."""
        plans = [move.transfer for move in moves]
        texts = [[write_tensor(layout, move.dtype) for layout in (move.src, move.dst)] for move in moves]
        details = {
            "from": " | ".join(src for src, _ in texts),
            "to": " | ".join(dst for _, dst in texts),
            "bytes": sum(plan.received_bytes.get(self.rank, 0) for plan in plans),
            "sent_bytes": sum(plan.sent_bytes.get(self.rank, 0) for plan in plans),
            "moved_bytes": sum(plan.moved_bytes for plan in plans),
            "line": line or self._find_line(),
        }
        return self._begin(comm, label, details, {s for plan in plans for s, d in plan.bytes_by_edge if d == self.rank})

    def begin_exchange(self, comm: Comm, label: str, sends: Blocks, receives: Blocks) -> Callable[[], None]:
        """Note that an exchange begins whose bytes follow from values, as the rows of a lookup do."""
        sources = {rank: sum(t.nbytes for t in part) for rank, part in receives.items() if rank != self.rank}
        received, sent = sum(sources.values()), sum(t.nbytes for r, p in sends.items() if r != self.rank for t in p)
        details = {"bytes": received, "sent_bytes": sent, "line": self._find_line()}
        return self._begin(comm, label, details, {rank for rank, nbytes in sources.items() if nbytes})

    def _find_line(self) -> str:
        return self.line or user_line()

    def _begin(self, comm: Comm, label: str, details: dict[str, Any], sources: Iterable[int]) -> Callable[[], None]:
        number = self._counts.get(comm.ranks, 0)
        self._counts[comm.ranks] = number + 1
        track = next(t for t in range(FIRST_MOVES, len(self._busy) + 2) if t not in self._busy)
        self._busy.add(track)
        move, waits_for = f"{hash(comm.ranks)}#{number}", tuple(sorted(sources))
        begin = time.monotonic_ns()

        def finish() -> None:
            self._busy.discard(track)
            if not details["bytes"] and not details["sent_bytes"]:
                return  # nothing leaves or reaches this rank
            self.spans.append(RecordedSpan(label, "move", begin, time.monotonic_ns(), track, details, move, waits_for))

        return finish

    def add_wait(self, name: str, begin: int) -> None:
        """Note that this rank waited for the others until now."""
        self.spans.append(RecordedSpan(name, "wait", begin, time.monotonic_ns(), WAITS, {"line": user_line()}))

    def watch_backward(self, results: Sequence[Tensor], inputs: Sequence[Tensor], line: str) -> None:
        """Note when the backward pass runs the nodes that lie between these tensors, with the line of the forward."""
        known = {t.grad_fn for t in inputs if t.grad_fn is not None}
        waiting = [t.grad_fn for t in results if t.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in known or node in self._nodes or "AccumulateGrad" in node.name():
                continue
            self._nodes.add(node)
            self._watch_node(node, line)
            waiting += [following for following, _ in node.next_functions if following is not None]

    def _watch_node(self, node: Any, line: str) -> None:
        begun: list[int] = []
        is_move = "Move" in node.name() or "Moved" in node.name()

        def before(_grads: Any) -> None:
            begun.append(time.monotonic_ns())
            self.line = line

        def after(_inputs: Any, _outputs: Any) -> None:
            self.line = ""
            if begun and not is_move:
                self.add_operator(node_name, begun.pop(), {"line": line, "pass": "backward"})

        node_name = node.name()
        node.register_prehook(before)
        node.register_hook(after)


recorders: dict[int, StepRecorder] = {}


def find_recorder(comm: Comm) -> StepRecorder | None:
    """The recorder of a rank, if it is being traced."""
    return recorders.get(comm.rank) if recorders else None


@contextmanager
def observed_exchange(comm: Comm, label: str, sends: Blocks, receives: Blocks) -> Iterator[None]:
    """Note an exchange that is not a move between layouts: in traces as a move, and as a range of torch's profiler."""
    recorder = find_recorder(comm)
    finish = None if recorder is None else recorder.begin_exchange(comm, label, sends, receives)
    with profiled_move(label):
        yield
    if finish is not None:
        finish()


@contextmanager
def recorded_wait(comm: Comm, label: str) -> Iterator[None]:
    """Note the time of a small exchange with all ranks, or until a move in the background has ended, as waiting."""
    recorder, begin = find_recorder(comm), time.monotonic_ns()
    yield
    if recorder is not None:
        recorder.add_wait(label, begin)


_shorten_layout = cache_by_identity(shorten_layout)


def write_tensor(layout: Layout, dtype: torch.dtype) -> str:
    """A tensor's dtype, shape and layout in the notation, cut off where it is long."""
    return f"{find_dtype(str(dtype)).name}{_shorten_layout(layout)}"


def profiled_move(label: str, src: Layout | None = None, dst: Layout | None = None) -> AbstractContextManager[Any]:
    """A range of torch's profiler for a move, named by what it does, where a profiler runs."""
    if not is_profiling():
        return nullcontext()
    text = "" if src is None or dst is None else f": {_shorten_layout(src)} -> {_shorten_layout(dst)}"
    return torch.profiler.record_function(f"shardwise.move {label}{text}")


class WatchedMove(Protocol):
    """What a watcher sees of a move."""

    @property
    def src(self) -> Layout: ...
    @property
    def dst(self) -> Layout: ...
    @property
    def label(self) -> str: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def bytes_between_hosts(self) -> int | None: ...


_move_watchers: list[Callable[[WatchedMove], None]] = []


def watch_moves(watcher: Callable[[WatchedMove], None]) -> None:
    """Have a function called before each move; it may raise to forbid it."""
    _move_watchers.append(watcher)


def notify_watchers(move: WatchedMove) -> None:
    """Say that a move is about to be made."""
    for watcher in _move_watchers:
        watcher(move)


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


def _count_move(move: WatchedMove) -> None:
    for mode in _above.modes or comm_debug_modes():
        if move.moved_bytes > 0:
            mode.comm_counts[torch.ops.shardwise.move] += 1


_log = package_logger(__name__)


def _log_move(move: WatchedMove) -> None:
    if _log.isEnabledFor(logging.DEBUG) and move.moved_bytes > 0:
        between, moved = (shorten_layout(move.src), shorten_layout(move.dst)), format_bytes(move.moved_bytes)
        _log.debug("%s moves %s, %s -> %s, at %s", move.label, moved, *between, user_line())


watch_moves(_count_move)
watch_moves(_log_move)
