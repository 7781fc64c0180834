"""How threads of one process complete a collective together.

1. Each rank posts its call (`Hub.post`) under the next sequence number and goes on.
2. The last rank to post compares all calls. If they differ, the meeting has failed and every rank is told which two
   calls were made; else they become jobs: independent copies or reductions.
3. `Hub.finish`, called by whoever waits, takes jobs that nobody has taken until none is left, then waits for the
   others. A rank that posted and went on is therefore never waited for.
4. A rank that raises or returns early is recorded in the room that all hubs of the world share; waiting ranks wake.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import CommError
from .telling import fold_texts, name_ranks

Job = Callable[[], None]


@dataclass(frozen=True)
class Call:
    """What one rank asks for; calls of one meeting must agree in all but the payload."""

    kind: str
    label: str
    detail: str
    payload: Any

    def __str__(self) -> str:
        return f"{self.kind} {self.label!r}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class Room:
    """What all ranks of one world share: the lock, who failed, who has returned."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    failure: tuple[int, BaseException] | None = None
    left: set[int] = field(default_factory=set)

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure and wake everybody."""
        with self.changed:
            self.failure = self.failure or (rank, error)
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Record that a rank will call nothing more."""
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()


@dataclass
class Meeting:
    """One collective: the calls so far, then its jobs."""

    calls: dict[int, Call] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    complete: bool = False
    running: int = 0
    error: CommError | None = None


class Hub:
    """The meetings of one group of ranks of a world of threads."""

    def __init__(self, ranks: tuple[int, ...], room: Room) -> None:
        self.ranks, self.room = ranks, room
        self._posted = dict.fromkeys(ranks, 0)
        self._open: dict[int, Meeting] = {}
        self._children: dict[tuple[int, ...], Hub] = {}

    def child(self, ranks: tuple[int, ...]) -> Hub:
        """Return the hub of a subset, the same one for all its members."""
        with self.room.changed:
            return self._children.setdefault(ranks, Hub(ranks, self.room))

    def post(self, rank: int, call: Call, plan: Callable[[Mapping[int, Any]], list[Job]]) -> Meeting:
        """Add one rank's call to its next meeting; the last one turns the calls into jobs."""
        with self.room.changed:
            number = self._posted[rank]
            self._posted[rank] += 1
            meeting = self._open.setdefault(number, Meeting())
            meeting.calls[rank] = call
            if len(meeting.calls) == len(self.ranks):
                del self._open[number]
                self._close(meeting, plan)
            return meeting

    def _close(self, meeting: Meeting, plan: Callable[[Mapping[int, Any]], list[Job]]) -> None:
        meeting.error = _difference(meeting.calls)
        if meeting.error is None:
            try:
                meeting.jobs = plan({rank: meeting.calls[rank].payload for rank in self.ranks})
            except CommError as error:
                meeting.error = error
        meeting.complete = True
        self.room.changed.notify_all()

    def finish(self, rank: int, meeting: Meeting, timeout: float) -> None:
        """Return when the meeting's jobs are done, doing those that nobody does; raise if it cannot be completed."""
        deadline = time.monotonic() + timeout
        with self.room.changed:
            while not meeting.complete:
                self._check(rank, meeting)
                if not self.room.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise _absence(meeting.calls[rank], self._absent(meeting), f"within {timeout:g} s")
        self._work_off(meeting)
        with self.room.changed:
            while meeting.running and meeting.error is None:
                if not self.room.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise CommError(f"{meeting.calls[rank]}: copying took longer than {timeout:g} s")
            if meeting.error is not None:
                raise CommError(str(meeting.error), meeting.error.ranks) from meeting.error.__cause__

    def _work_off(self, meeting: Meeting) -> None:
        while True:
            with self.room.changed:
                if not meeting.jobs or meeting.error is not None:
                    return
                job = meeting.jobs.pop()
                meeting.running += 1
            error = _attempt(job, meeting)
            with self.room.changed:
                meeting.running -= 1
                if error is not None:
                    meeting.error = error
                self.room.changed.notify_all()

    def _check(self, rank: int, meeting: Meeting) -> None:
        call = meeting.calls[rank]
        if self.room.failure is not None:
            who, error = self.room.failure
            if isinstance(error, CommError):
                raise CommError(str(error), error.ranks) from error
            raise CommError(f"{call}: rank {who} raised {type(error).__name__}: {error}", (who,)) from error
        gone = [r for r in self.ranks if r in self.room.left and r not in meeting.calls]
        if gone:
            raise _absence(call, gone, "before it returned")

    def _absent(self, meeting: Meeting) -> list[int]:
        return [r for r in self.ranks if r not in meeting.calls]


def _absence(call: Call, absent: list[int], until: str) -> CommError:
    return CommError(f"{call}: {name_ranks(absent)} did not take part {until}", tuple(absent))


def _attempt(job: Job, meeting: Meeting) -> CommError | None:
    try:
        job()
    except Exception as cause:
        error = CommError(f"{next(iter(meeting.calls.values()))}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error
    return None


def _difference(calls: Mapping[int, Call]) -> CommError | None:
    texts = {rank: str(calls[rank]) for rank in sorted(calls)}
    if len(set(texts.values())) == 1:
        return None
    who = fold_texts(texts)
    return CommError(f"the ranks made different calls ({who}); every rank must make the same calls in the same order")
