"""Do all ranks pass the same arguments? One small exchange of digests; full strings only when they differ.

1. The fields are written as one canonical text and hashed; the 16-byte digests are gathered.
2. Equal digests: done. The number of fields does not matter, so ranks may even pass different ones.
3. Otherwise the strings are gathered, and every rank raises the same error: which field, and who has which value.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import NoneType
from typing import Any, NoReturn, TypeVar

import torch

from shardwise._log import package_logger
from shardwise.comm.protocol import Comm, DisagreementError, OfferingComm, OfferPlanner
from shardwise.comm.rank_text import fold_texts, fold_values, name_ranks

_log = package_logger(__name__)
_ABSENT = "nothing"
_PROBLEM = "problem"
_LONGEST = 200
T = TypeVar("T")


def agree(
    comm: Comm, fields: Mapping[str, object], *, label: str, what: str = "arguments", problem: str | None = None
) -> None:
    """Raise `DisagreementError` on every rank unless all ranks of the comm pass equal fields and have no problem.

    Values are compared by their text, so pass values whose `repr` is the same on every rank. `problem` is what this
    rank alone found wrong with its arguments: it is raised on all ranks, with the number of the rank.

    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     agree(comm, {"shape": (4, 2), "src": comm.rank // 2}, label="shard")
    >>> try:
    ...     run_local(body, 3)
    ... except DisagreementError as error:
    ...     print(error)
    'shard': the ranks pass different arguments: src is 0 on ranks 0, 1 and 1 on rank 2; pass the same on every rank
    """
    text = _write_fields(fields, problem)
    digests = comm.all_gather_bytes(_digest(text), label=label)
    if len(set(digests)) > 1 or problem is not None:
        _raise_difference(comm, text, label, what)
    _log_agreement(comm, label)


def write_request(fields: Mapping[str, object]) -> tuple[bytes, bytes]:
    """What ranks compare of fields: the text, and its digest."""
    text = _write_fields(fields, None)
    return text, _digest(text)


def agree_and_run(
    comm: OfferingComm, request: tuple[bytes, bytes], offer: T, plan: OfferPlanner[T], nbytes: int, *, label: str
) -> bool:
    """The same as `agree` for a written request, on a comm that does what the ranks offer once all of them agree.

    Returns whether it is done: not if a rank made no offer.
    """
    digests, done = comm.agree_and_run(request[1], offer, plan, nbytes, label=label)
    if not done and len(set(digests)) > 1:
        _raise_difference(comm, request[0], label, "arguments")
    _log_agreement(comm, label)
    return done


def _log_agreement(comm: Comm, label: str) -> None:
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s agreed on %r", name_ranks(comm.ranks), label)


def start_agreeing(comm: Comm, fields: Mapping[str, object], *, label: str) -> Callable[[], None]:
    """The same in two halves, where the comm can: between them the next call may be started, but not completed.

    Returns the second half, which raises as `agree` does. The call in between is then withdrawn on every rank.

    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     finish = start_agreeing(comm, {"shape": (4, 2)}, label="shard")
    ...     return finish()  # raises if another rank passed another shape
    >>> run_local(body, 2)
    [None, None]
    """
    start = getattr(comm, "start_agreeing", None)
    text = _write_fields(fields, None)
    wait = None if start is None else start(_digest(text), label=label)
    if wait is None:
        agree(comm, fields, label=label)
        return lambda: None

    def finish() -> None:
        if len(set(wait())) > 1:
            _raise_difference(comm, text, label, "arguments")
        _log_agreement(comm, label)

    return finish


def _write_fields(fields: Mapping[str, object], problem: str | None) -> bytes:
    """The fields as text; programs that go round in steps ask for the same again and again."""
    if problem is None and all(type(value) in _PLAIN for value in fields.values()):
        return _write_plain(tuple((name, type(value), value) for name, value in fields.items()))
    return _write_texts(fields, problem)


_PLAIN = (str, torch.dtype, NoneType, int, bool)  # values that are equal and of one type have the same text


@lru_cache(maxsize=1024)
def _write_plain(fields: tuple[tuple[str, type, object], ...]) -> bytes:
    return _write_texts({name: value for name, _, value in fields}, None)


def _write_texts(fields: Mapping[str, object], problem: str | None) -> bytes:
    texts = {name: _field_text(value) for name, value in fields.items()}
    if problem is not None:
        texts[_PROBLEM] = problem
    return json.dumps(texts, sort_keys=True).encode()


@lru_cache(maxsize=1024)
def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _raise_difference(comm: Comm, text: bytes, label: str, what: str) -> NoReturn:
    """Gather the texts and say who has which; when this returns, no rank reads memory for a call that was withdrawn."""
    withdraw = getattr(comm, "withdraw_next_call", None)
    if withdraw is not None:
        withdraw()
    everyone = [json.loads(data) for data in comm.all_gather_bytes(text, label=label)]
    by_rank = dict(zip(comm.ranks, everyone, strict=True))
    problems = {rank: given[_PROBLEM] for rank, given in by_rank.items() if _PROBLEM in given}
    if problems:
        raise DisagreementError(f"{label!r}: {fold_texts(problems)}")
    names = list(dict.fromkeys(name for fields in everyone for name in fields))
    parts = [part for name in names if (part := _describe_difference(name, by_rank))]
    raise DisagreementError(
        f"{label!r}: the ranks pass different {what}: {'; '.join(parts)}; pass the same on every rank"
    )


def _field_text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_field_text(k)}: {_field_text(v)}" for k, v in sorted(value.items(), key=str)) + "}"
    return repr(value)


def _describe_difference(name: str, by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    """Return who has which value of one field, or nothing if all have the same."""
    values = {rank: fields.get(name, _ABSENT) for rank, fields in by_rank.items()}
    if len(set(values.values())) == 1:
        return ""
    return f"{name} is {fold_values({rank: _shorten(text) for rank, text in values.items()})}"


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
