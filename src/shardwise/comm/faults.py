"""Who broke a collective: the ranks of a world leave notes in torch's store and read each other's.

1. A rank whose collective fails notes its label and whom it blames. A rank that waits long notes for whom.
   A rank that raises outside a collective notes that (`report_exception`). What ends every rank alike is printed by
   the first one (`speak_once`).
2. A rank whose collective fails then reads the notes of the ranks it blames, for a short grace. One that noted nothing
   has died, hangs, or never called; one that blames or awaits others passes the blame on to them.
3. Whose connection ended is not excused by waiting, only by having failed before. Whoever sees it end notes that for
   all: ranks of other hosts may see nothing but silence, and an old note that the rank waits.
4. The store is in some process that may hang or be dead as well (`note_store`); then only the first suspicion is known.

`PendingCalls`: one thread per process notes in the store for whom its ranks wait long. A rank that times out on another
learns from this that the other one waits as well, and for whom. Without it the time at which each began to wait would
decide who gets blamed. Calls that end soon cost two dictionary operations.

How do ranks read and write notes when the process that hosts torch's store hangs or has died?

1. Every call of the store is made by one thread of its own. Writers do not wait; readers wait for a limited time. A
   call that hangs makes later ones return at once, until it ends.
2. Before a call a connection to the host is tried: torch prints pages when a call meets a host that has died. Once it
   is gone, the log says so in one line, and the store is left alone.
"""

from __future__ import annotations

import itertools
import json
import queue
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from shardwise._text import package_logger
from shardwise._torch import Store, default_store, store_address
from shardwise.comm.agree import name_ranks
from shardwise.comm.protocol import CommError

_PATIENCE_SECONDS = 3.0
_HANGS_SECONDS = 2.0  # less than the patience: whoever was patient once does not wait for the same call again
_KNOCK_SECONDS = 1.0
_log = package_logger(__name__)
T = TypeVar("T")


class NoteStore:
    """A store of small texts that never holds a caller up for long.

    >>> from torch.distributed import HashStore
    >>> notes = NoteStore(HashStore())
    >>> notes.write("a", "1")
    >>> notes.read("a"), notes.read("b")
    ('1', None)
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._is_gone = False
        threading.Thread(target=self._work, name="shardwise-notes", daemon=True).start()

    def write(self, key: str, text: str, *, wait: bool = False) -> None:
        """Write a note, soon or, with `wait`, now; a store that cannot be reached keeps nothing."""
        written = self._submit(lambda: self.store.set(key, text))
        if wait:
            _result_of(written)

    def read(self, key: str) -> str | None:
        """Return a note; None if there is none, or no answer."""
        return _result_of(self._submit(lambda: self.store.get(key).decode() if self.store.check([key]) else None))

    def _submit(self, call: Callable[[], T]) -> Future[T] | None:
        """Hand a call to the thread; None if the store is gone, or hangs in an earlier call."""
        since = self._busy_since
        if self._is_gone or (since is not None and time.monotonic() - since > _HANGS_SECONDS):
            return None
        done: Future[T] = Future()

        def job() -> None:
            try:
                address = store_address(self.store)
                if address is not None:
                    socket.create_connection(address, _KNOCK_SECONDS).close()
                done.set_result(call())
            except (OSError, RuntimeError) as error:
                self._is_gone = True
                reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
                _log.warning("the store of the process group is gone (%s): failures are named by guess", reason)
                done.set_exception(error)

        self._jobs.put(job)
        return done

    def _work(self) -> None:
        while not self._is_gone:
            job = self._jobs.get()
            self._busy_since = time.monotonic()
            job()
            self._busy_since = None


def _result_of(answer: Future[T] | None) -> T | None:
    try:
        return None if answer is None else answer.result(_PATIENCE_SECONDS)
    except (FutureTimeoutError, OSError, RuntimeError):
        return None


_PREFIX = "shardwise/fault"


@dataclass(frozen=True)
class FaultNote:
    """One rank's account of a call that failed or waits long.

    `ended` if the blamed ranks' connections have ended, `exact` if the reason needs no search for the cause.
    """

    number: int
    call: str
    reason: str
    blames: tuple[int, ...] = ()
    ended: bool = False
    exact: bool = False


class TransportError(Exception):
    """A transport's failure, with the ranks it was seen on; an exact one needs no search for the cause."""

    def __init__(self, reason: str, suspects: Iterable[int], *, exact: bool = False, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.suspects, self.exact, self.timed_out = reason, tuple(suspects), exact, timed_out


def to_transport_error(error: BaseException, suspects: Iterable[int]) -> TransportError:
    """Turn what torch raised into an accident; only the text says that a wait was too long."""
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return TransportError(reason, suspects, timed_out="timed out" in reason.lower())


def report_exception(rank: int, error: BaseException) -> None:
    """Record for all ranks that this rank raised, so that the others can say so."""
    _write_note(f"{_PREFIX}/rank/{rank}", FaultNote(0, "", f"{type(error).__name__}: {error}"[:500]), wait=True)


_UNCAUGHT_SECONDS = 0.5  # for the first rank to note what ends it
_LATER_SECONDS = 1.0  # the first process that ends makes torchrun stop the others, which may not have printed yet
_hooks: list[Callable[..., object]] = []
_uncaught = itertools.count()  # a process that lives on (a notebook) prints more than one: each has a note of its own


def speak_once() -> None:
    """Let the first rank print for all what ends every rank of the world with the same error."""
    if not _hooks:
        _hooks.append(sys.excepthook)
        sys.excepthook = _print_uncaught


def _print_uncaught(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """Print an error that ends the process: in one line if all ranks agreed on it, or if it ends the first one too."""
    printed: tuple[int, int] | None = error.__dict__.get("_printed_by")
    number = next(_uncaught)
    if printed is None and dist.is_initialized() and issubclass(kind, Exception):
        rank, key = dist.get_rank(), f"{_PREFIX}/uncaught/{number}"
        mine = FaultNote(0, "", f"{kind.__name__}: {error}"[:4000])
        if rank == 0:
            _write_note(key, mine, wait=True)
        deadline, first = time.monotonic() + _UNCAUGHT_SECONDS, None
        while rank > 0 and first is None and time.monotonic() < deadline:
            first = _read_note(key)
            time.sleep(0.02)
        printed = (rank, 0) if first == mine else None
    if printed is None:
        _hooks[0](kind, error, at)
        return
    print(f"[rank{printed[0]}]: {kind.__name__}: the same error as on rank {printed[1]}", file=sys.stderr, flush=True)
    time.sleep(_LATER_SECONDS)


class FaultLog:
    """The notes of one comm: the `instance`-th that this process made for a group."""

    def __init__(self, group: str, instance: int, rank: int) -> None:
        self._key, self._rank = f"{_PREFIX}/{group}/{instance}", rank

    def note_wait(self, number: int, call: str, awaited: tuple[int, ...]) -> None:
        """Record for the others which ranks this rank waits for; an empty list withdraws it."""
        _write_note(f"{self._key}/waits/{self._rank}", FaultNote(number, call, "", awaited))

    def explain(self, accident: TransportError, *, number: int, label: str, call: str, grace: float) -> CommError:
        """Turn a transport's failure into an error that names the ranks at fault."""
        ended = not accident.timed_out and not accident.exact
        mine = FaultNote(number, call, accident.reason, accident.suspects, ended, accident.exact)
        _write_note(f"{self._key}/failed/{self._rank}", mine)
        for rank in accident.suspects if ended else ():
            _write_note(f"{self._key}/ended/{rank}", mine)
        if accident.exact:
            return CommError(accident.reason, accident.suspects)
        notes, raised = self._collect(mine, grace)
        if raised:
            texts = "; ".join(f"rank {r} raised {note.reason}" for r, note in sorted(raised.items()))
            return CommError(f"{label!r}: {texts}", tuple(sorted(raised)))
        exact = [note for _, note in sorted(notes.items()) if note.exact]
        if exact:
            return CommError(exact[0].reason, exact[0].blames)
        other = {r: note for r, note in notes.items() if note.number == number and note.call != call}
        if other:
            where = {self._rank: mine, **other}
            texts = "; ".join(f"rank {r} was in {note.call}" for r, note in sorted(where.items()))
            return CommError(f"{label!r}: the ranks made different calls: {texts}", tuple(sorted(other)))
        silent = tuple(sorted(set(_collect_blamed_ranks(mine, notes)) - set(notes) - {self._rank}))
        if silent:
            names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            text = f"{label!r}: {names} did not take part (ended, hung, or never called): {accident.reason}"
            return CommError(text, silent)
        waiting = "; ".join(f"rank {r} waits for {name_ranks(n.blames)} in {n.call}" for r, n in sorted(notes.items()))
        seen = f"{name_ranks(accident.suspects)}: {accident.reason}"
        return CommError(f"{label!r}: {seen}{f' ({waiting})' if waiting else ''}", accident.suspects)

    def _collect(self, mine: FaultNote, grace: float) -> tuple[dict[int, FaultNote], dict[int, FaultNote]]:
        """Read the notes of the blamed and of whom they blame, until all have written or the grace is over."""
        raised: dict[int, FaultNote] = {}
        deadline = time.monotonic() + grace
        while True:
            notes: dict[int, FaultNote] = {}
            while wanted := {r: ended for r, ended in _collect_blamed_ranks(mine, notes).items() if r not in notes}:
                found = {r: note for r, ended in wanted.items() if (note := self._note_of(r, ended)) is not None}
                notes |= found
                raised |= {r: note for r in wanted if (note := _read_note(f"{_PREFIX}/rank/{r}")) is not None}
                if not found:
                    break
            if not set(wanted) - set(raised) - {self._rank} or time.monotonic() > deadline:
                return notes, raised
            time.sleep(0.02)

    def _note_of(self, rank: int, ended: bool) -> FaultNote | None:
        note = _read_note(f"{self._key}/failed/{rank}")
        if note is None and not ended and _read_note(f"{self._key}/ended/{rank}") is None:
            note = _read_note(f"{self._key}/waits/{rank}")
            note = note if note is not None and note.blames else None
        return note


def _collect_blamed_ranks(mine: FaultNote, notes: dict[int, FaultNote]) -> dict[int, bool]:
    """Return all ranks that someone blames, and whether someone saw their connection end."""
    blamed: dict[int, bool] = {}
    for note in (mine, *notes.values()):
        for rank in note.blames:
            blamed[rank] = blamed.get(rank, False) or note.ended
    return blamed


_notes: NoteStore | None = None
_opening = threading.Lock()


def _open_notes() -> NoteStore | None:
    """The notes of the present world; None where there is none."""
    global _notes
    store = default_store() if dist.is_initialized() else None
    if store is None:
        return None
    with _opening:
        if _notes is None or _notes.store is not store:
            _notes = NoteStore(store)
        return _notes


def _write_note(key: str, note: FaultNote, *, wait: bool = False) -> None:
    notes = _open_notes()
    if notes is not None:
        notes.write(key, json.dumps(asdict(note)), wait=wait)


def _read_note(key: str) -> FaultNote | None:
    notes = _open_notes()
    text = notes.read(key) if notes is not None else None
    if text is None:
        return None
    entry = json.loads(text)
    return FaultNote(**{**entry, "blames": tuple(entry["blames"])})


_LONG = 0.5
_PERIOD = 0.2


class PendingCalls:
    """The calls of one comm that have begun and not ended; `awaited` lists the ranks now waited for."""

    def __init__(self, board: FaultLog, awaited: Callable[[], tuple[int, ...]]) -> None:
        self._board, self._awaited = board, awaited
        self._begun: dict[int, tuple[float, str]] = {}
        self._noted: set[int] = set()
        _watch_calls(self)

    def begin(self, number: int, call: str) -> None:
        """A call starts to wait."""
        self._begun[number] = (time.monotonic(), call)

    def end(self, number: int) -> None:
        """It waits no more; what was noted is taken back."""
        self._begun.pop(number, None)
        if number in self._noted:
            self._noted.discard(number)
            self._board.note_wait(number, "", ())

    def note_long_waits(self) -> None:
        """Write down the calls that have waited long, once each."""
        now = time.monotonic()
        for number, (since, call) in list(self._begun.items()):
            if now - since > _LONG and number not in self._noted and (ranks := self._awaited()):
                self._noted.add(number)
                self._board.note_wait(number, call, ranks)
                if number not in self._begun:  # it ended while the note was in transit
                    self._board.note_wait(number, "", ())


_watched_calls: weakref.WeakSet[PendingCalls] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _watch_calls(waits: PendingCalls) -> None:
    global _thread
    with _lock:
        _watched_calls.add(waits)
        if _thread is None:
            _thread = threading.Thread(target=_note_periodically, name="shardwise-waits", daemon=True)
            _thread.start()


def _note_periodically() -> None:
    while True:
        time.sleep(_PERIOD)
        with _lock:
            watched = list(_watched_calls)
        for waits in watched:
            waits.note_long_waits()
