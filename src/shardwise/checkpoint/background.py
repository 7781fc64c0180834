"""Saving in the background: a thread writes what was copied, and the folder itself shows who is done.

The comm belongs to the program, so the threads of the ranks do not talk through it. Each leaves a record of its share
in the temporary folder; the first rank's thread waits for all of them, writes the index and commits; the others wait
until the folder is gone. `wait()` is collective: until all threads have ended, the ranks tell each other how far they
are, so that a failure on one, on a full disk say, stops the others at once and is raised on all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from shardwise.checkpoint.errors import CheckpointError, run_or_describe_error
from shardwise.checkpoint.index import Json
from shardwise.checkpoint.state import raise_problems
from shardwise.checkpoint.storage.base import SaveFolder
from shardwise.comm import Comm

_FIRST_ROUND_SECONDS, _LONGEST_ROUND_SECONDS = 0.02, 0.5
_LABEL = "save in the background"
_STOPPED = "stopped: another rank failed"
_running_saves: WeakKeyDictionary[Comm, Saving] = WeakKeyDictionary()
_running_saves_lock = threading.Lock()


class Saving:
    """A save running in the background; all ranks `wait()` for it.

    >>> import tempfile, torch, shardwise
    >>> path = f"{tempfile.mkdtemp()}/ckpt"
    >>> saving = shardwise.save({"w": torch.ones(4)}, path, async_op=True)
    >>> saving.wait()
    >>> saving.done()
    True
    """

    def __init__(
        self,
        comm: Comm,
        folder: SaveFolder,
        write: Callable[[Callable[[], None]], Json],
        finish: Callable[[Sequence[Json]], None],
    ) -> None:
        self._comm, self._folder, self._write, self._finish = comm, folder, write, finish
        self._problem: str | None = None
        self._stop = threading.Event()
        self._waited = False
        self._thread = threading.Thread(target=self._run, name="shardwise save")
        self._thread.start()

    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is in place on disk; raise on every rank if that failed on any. Collective."""
        if self._waited:
            return
        self._waited = True
        unregister_save(self._comm, self)
        seconds = _FIRST_ROUND_SECONDS
        while True:
            self._thread.join(seconds)
            ended = self.done()
            everyone = self._exchange([ended, self._problem if ended else None])
            problems = [problem for _, problem in everyone]
            if any(problem is not None for problem in problems):
                self._give_up()
                raise_problems(self._comm, [None if p == _STOPPED else p for p in problems])
            if all(done for done, _ in everyone):
                return
            seconds = min(2 * seconds, _LONGEST_ROUND_SECONDS)

    def _exchange(self, given: Json) -> list[Json]:
        return [json.loads(text) for text in self._comm.all_gather_bytes(json.dumps(given).encode(), label=_LABEL)]

    def _give_up(self) -> None:
        """Stop this rank's thread; when all have stopped, nothing writes to the folder any more and it is removed."""
        self._stop.set()
        self._thread.join()
        self._exchange(None)
        if self._comm.rank == self._comm.ranks[0]:
            self._folder.remove()
        self._folder.close()
        self._exchange(None)

    def _check(self) -> None:
        if self._stop.is_set():
            raise CheckpointError(_STOPPED)

    def _run(self) -> None:
        _, self._problem = run_or_describe_error(self._share)
        self._write, self._finish = _write_nothing, _finish_nothing  # the copies of the tensors are free

    def _share(self) -> None:
        record, problem = run_or_describe_error(lambda: self._write(self._check))
        try:
            self._folder.write_note(self._record_of(self._comm.rank), json.dumps([problem, record]).encode())
        except (OSError, CheckpointError):
            if problem is None:
                raise
        if problem is not None:
            raise CheckpointError(problem)
        if self._comm.rank == self._comm.ranks[0]:
            self._complete()
        else:
            self._wait_until(self._folder.is_gone, "rank 0 did not complete the save")
            self._folder.close()

    def _complete(self) -> None:
        names = {rank: self._record_of(rank) for rank in self._comm.ranks}
        self._wait_until(lambda: all(map(self._folder.has_note, names.values())), "not all ranks wrote their share")
        found = {rank: json.loads(self._folder.read_note(name)) for rank, name in names.items()}
        failed = [f"rank {rank}: {problem}" for rank, (problem, _) in found.items() if problem is not None]
        if failed:
            raise CheckpointError("; ".join(failed[:4]))
        for name in names.values():
            self._folder.remove_note(name)
        self._finish([record for _, record in found.values()])

    def _record_of(self, rank: int) -> str:
        return f"share{rank:05d}.json"

    def _wait_until(self, ready: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + self._comm.timeout
        while not ready():
            self._check()
            if time.monotonic() > deadline:
                raise CheckpointError(f"{self._folder.path}: {problem} within {self._comm.timeout} s")
            time.sleep(self._folder.poll_seconds)


def _write_nothing(check: Callable[[], None]) -> Json:
    return None


def _finish_nothing(records: Sequence[Json]) -> None:
    return None


def register_save(saving: Saving) -> Saving:
    """Let the next save or load on its comm wait for it."""
    with _running_saves_lock:
        _running_saves[saving._comm] = saving
    return saving


def unregister_save(comm: Comm, saving: Saving) -> None:
    """It has been waited for."""
    with _running_saves_lock:
        if _running_saves.get(comm) is saving:
            del _running_saves[comm]


def wait_for_running_save(comm: Comm) -> None:
    """Wait for the save that is running on this comm, if there is one; collective as that save was."""
    with _running_saves_lock:
        saving = _running_saves.get(comm)
    if saving is not None:
        saving.wait()
