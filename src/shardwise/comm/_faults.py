"""Who broke a collective: the ranks of a world leave notes in torch's store and read each other's.

1. A rank whose collective fails writes a note under (group, operation number, rank): its label and whom it blames.
   A rank that raises outside a collective (`report_exception`) writes one under its rank.
2. It then waits a short grace for the notes of the ranks it blames. One that wrote nothing has died, hangs, or never
   called; one that itself blames others passes the blame on to them.
3. The store lives in some rank's process and may be dead as well; then only the first suspicion is known.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ._torch_compat import default_store
from .errors import CommError

_PREFIX = "shardwise/fault"


@dataclass(frozen=True)
class Note:
    """One rank's account of a failure."""

    label: str
    reason: str
    blames: tuple[int, ...]


class Accident(Exception):
    """A transport's failure, with the ranks it was seen on; an exact one needs no search for the cause."""

    def __init__(self, reason: str, suspects: Iterable[int], *, exact: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.suspects, self.exact = reason, tuple(suspects), exact


def report_exception(rank: int, error: BaseException) -> None:
    """Tell the world that this rank raised, so that the others can say so."""
    _write(f"{_PREFIX}/rank/{rank}", Note("", f"{type(error).__name__}: {error}"[:500], ()))


def explain(accident: Accident, *, rank: int, group: str, number: int, label: str, grace: float) -> CommError:
    """Turn a transport's failure into an error that names the ranks at fault."""
    if accident.exact:
        return CommError(accident.reason, accident.suspects)
    key = f"{_PREFIX}/{group}/{number}"
    _write(f"{key}/{rank}", Note(label, accident.reason, accident.suspects))
    notes, raised = _collect(accident.suspects, key, grace)
    if raised:
        texts = "; ".join(f"rank {r} raised {note.reason}" for r, note in sorted(raised.items()))
        return CommError(f"{label!r}: {texts}", tuple(sorted(raised)))
    other = {r: note for r, note in notes.items() if note.label != label}
    if other:
        texts = "; ".join(f"rank {r} was in {note.label!r}" for r, note in sorted(other.items()))
        return CommError(f"{label!r}: the ranks made different calls: {texts}", tuple(sorted(other)))
    silent = _silent(accident.suspects, notes, rank)
    if silent:
        names = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        text = f"{label!r}: {names} did not take part (ended, hung, or never called): {accident.reason}"
        return CommError(text, silent)
    return CommError(f"{label!r}: {accident.reason}", accident.suspects)


def _silent(suspects: Iterable[int], notes: dict[int, Note], rank: int) -> tuple[int, ...]:
    blamed = set(suspects) | {r for note in notes.values() for r in note.blames}
    return tuple(sorted(blamed - set(notes) - {rank}))


def _collect(suspects: Iterable[int], key: str, grace: float) -> tuple[dict[int, Note], dict[int, Note]]:
    """Read the notes of the suspects and of whom they blame, until all have written or the grace is over."""
    notes: dict[int, Note] = {}
    raised: dict[int, Note] = {}
    deadline = time.monotonic() + grace
    while True:
        wanted = (set(suspects) | {r for note in notes.values() for r in note.blames}) - set(notes)
        for r in sorted(wanted):
            note = _read(f"{_PREFIX}/rank/{r}")
            if note is not None:
                raised[r] = note
            note = _read(f"{key}/{r}")
            if note is not None:
                notes[r] = note
        if not wanted - set(notes) - set(raised) or time.monotonic() > deadline:
            return notes, raised
        time.sleep(0.02)


def _store() -> Store | None:
    return default_store() if dist.is_initialized() else None


def _write(key: str, note: Note) -> None:
    store = _store()
    if store is None:
        return
    try:
        store.set(key, json.dumps(asdict(note)))
    except RuntimeError:
        return  # the store's host is gone; the error we are about to raise still tells what this rank saw


def _read(key: str) -> Note | None:
    store = _store()
    try:
        if store is None or not store.check([key]):
            return None
        entry = json.loads(store.get(key))
    except RuntimeError:
        return None
    return Note(entry["label"], entry["reason"], tuple(entry["blames"]))
