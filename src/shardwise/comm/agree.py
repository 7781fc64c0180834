"""Do all ranks pass the same arguments, and what does each of them say? All small questions to all ranks are here.

`agree` compares; it takes one small exchange of digests, and full strings only when they differ:

1. The fields are written as one canonical text and hashed; the 16-byte digests are gathered.
2. Equal digests: done. The number of fields does not matter, so ranks may even pass different ones.
3. Otherwise the strings are gathered, and every rank raises the same error: which field, and who has which value.

A request that every rank finds wrong, for the same reason, is not a disagreement: each rank raises its own error.

`gather_values` and `any_rank` return what the ranks say, so that all of them draw the same conclusion from it.

How are many ranks described in a short message? Runs are folded, equal parts appear once, long lists are cut.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, NoReturn, TypeVar

import torch

from shardwise._text import package_logger
from shardwise.comm.protocol import Comm, DisagreementError, OfferPlanner, Request
from shardwise.geometry import LayoutError, NotationError

_MOST_RUNS = 8
_MOST_TEXTS = 6
_SHORTEST_RUN = 3


def name_ranks(ranks: Iterable[int]) -> str:
    """Name some ranks, in words that stay short in a large world.

    >>> name_ranks([3]), name_ranks([0, 1]), name_ranks([0, 1, 2, 3, 8])
    ('rank 3', 'ranks 0, 1', 'ranks 0-3, 8')
    >>> name_ranks(range(0, 4096, 2))
    'ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (2048 in all)'
    """
    listed = list(ranks)
    parts = [part for run in _fold_runs(listed) for part in _run_texts(run)]
    shown = ", ".join(parts[:_MOST_RUNS]) + (f", ... ({len(listed)} in all)" if len(parts) > _MOST_RUNS else "")
    return f"rank{'s' * (len(listed) != 1)} {shown or 'none'}"


def _fold_runs(ranks: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def _run_texts(run: list[int]) -> list[str]:
    return [f"{run[0]}-{run[-1]}"] if len(run) >= _SHORTEST_RUN else [str(rank) for rank in run]


def ranks_by_text(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have each string, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        found.setdefault(text, []).append(rank)
    return found


def fold_texts(by_rank: Mapping[int, str]) -> str:
    """Report what each rank says, equal strings once.

    >>> fold_texts({0: "no tensor", 1: "no tensor", 2: "no tensor", 3: "shape (2,) for (3,)"})
    'ranks 0-2: no tensor; rank 3: shape (2,) for (3,)'
    """
    found = ranks_by_text(by_rank)
    shown = [f"{name_ranks(ranks)}: {text}" for text, ranks in list(found.items())[:_MOST_TEXTS]]
    left = [rank for ranks in list(found.values())[_MOST_TEXTS:] for rank in ranks]
    return "; ".join([*shown, *([f"and others on {name_ranks(sorted(left))}"] if left else [])])


def fold_values(by_rank: Mapping[int, str]) -> str:
    """Tell which value each rank has, equal ones once.

    >>> fold_values({0: "4", 1: "4", 2: "5"})
    '4 on ranks 0, 1 and 5 on rank 2'
    """
    found = ranks_by_text(by_rank)
    shown = [f"{text} on {name_ranks(ranks)}" for text, ranks in list(found.items())[:_MOST_TEXTS]]
    left = [rank for ranks in list(found.values())[_MOST_TEXTS:] for rank in ranks]
    return " and ".join([*shown, *([f"others on {name_ranks(sorted(left))}"] if left else [])])


_log = package_logger(__name__)
_ABSENT = "nothing"
_PROBLEM = "problem"
_LONGEST = 200
_DIGEST_BYTES = 16
T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def make_request(fields: Mapping[str, object], problem: str | Exception | None = None) -> Request:
    """The request of some fields, of which a problem is one; programs make the same request in every step.

    >>> make_request({"shape": (4, 2)}).text
    b'{"shape": "(4, 2)"}'
    """
    if problem is None and all(type(value) in _PLAIN for value in fields.values()):
        return _write_plain(tuple((name, type(value), value) for name, value in fields.items()))
    return _write_request(fields, None if problem is None else str(problem))


def agree(
    comm: Comm,
    fields: Mapping[str, object],
    *,
    label: str,
    what: str = "arguments",
    problem: str | Exception | None = None,
    payload: bytes = b"",
) -> dict[int, bytes]:
    """Raise `DisagreementError` on every rank unless all ranks of the comm pass equal fields and have no problem.

    Values are compared by their text, so pass values whose `repr` is the same on every rank. `problem` is what this
    rank found wrong with its arguments. If all ranks found the same it is raised as it is, a text as a ValueError;
    else all ranks raise a DisagreementError with the numbers of the ranks. `payload` travels along and is not compared;
    returns that of each rank.

    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     agree(comm, {"shape": (4, 2), "src": comm.rank // 2}, label="shard")
    >>> try:
    ...     run_local(body, 3)
    ... except DisagreementError as error:
    ...     print(error)
    'shard': the ranks pass different arguments: src is 0 on ranks 0, 1 and 1 on rank 2; pass the same on every rank
    """
    request = make_request(fields, problem)
    found = comm.all_gather_bytes(request.digest + payload, label=label)
    if problem is not None:
        _raise_difference(comm, request.text, label, what, problem)
    check_digests(comm, request, [data[:_DIGEST_BYTES] for data in found], label=label, what=what)
    return {rank: data[_DIGEST_BYTES:] for rank, data in zip(comm.ranks, found, strict=True)}


def agree_on_request(comm: Comm, request: Request, *, label: str) -> None:
    """The same as `agree`, for a request that is made already.

    >>> from shardwise.comm import run_local
    >>> request = make_request({"shape": (4, 2)})
    >>> run_local(lambda comm: agree_on_request(comm, request, label="shard"), 2)
    [None, None]
    """
    check_digests(comm, request, comm.all_gather_bytes(request.digest, label=label), label=label)


def check_digests(
    comm: Comm, request: Request, digests: Sequence[bytes], *, label: str, what: str = "arguments"
) -> None:
    """Raise on every rank unless the digests of all ranks are that of the request; for transports that gather them.

    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     request = make_request({"shape": (4, 2)})
    ...     check_digests(comm, request, comm.all_gather_bytes(request.digest, label="shard"), label="shard")
    >>> run_local(body, 2)
    [None, None]
    """
    if digests.count(request.digest) != len(digests):
        _raise_difference(comm, request.text, label, what)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s agreed on %r", name_ranks(comm.ranks), label)


def gather_values(comm: Comm, value: Any, *, label: str) -> dict[int, Any]:
    """What each rank passes, as JSON.

    >>> from shardwise.comm import run_local
    >>> run_local(lambda comm: gather_values(comm, [comm.rank, None], label="values"), 2)[1]
    {0: [0, None], 1: [1, None]}
    """
    data = json.dumps(value, separators=(",", ":")).encode()
    return {rank: json.loads(each) for rank, each in gather_raw(comm, data, label=label).items()}


def gather_raw(comm: Comm, data: bytes, *, label: str) -> dict[int, bytes]:
    """The bytes that each rank passes, for what is not JSON or too long to be read by everyone.

    >>> from shardwise.comm import run_local
    >>> run_local(lambda comm: gather_raw(comm, bytes([comm.rank]), label="parts"), 2)[0]
    {0: b'\\x00', 1: b'\\x01'}
    """
    return dict(zip(comm.ranks, comm.all_gather_bytes(data, label=label), strict=True))


def any_rank(comm: Comm, flag: bool, *, label: str) -> bool:
    """Whether some rank says yes.

    >>> from shardwise.comm import run_local
    >>> run_local(lambda comm: any_rank(comm, comm.rank == 1, label="empty"), 2)
    [True, True]
    """
    return b"1" in comm.all_gather_bytes(b"1" if flag else b"0", label=label)


def agree_and_run(comm: Comm, request: Request, offer: T, plan: OfferPlanner[T], nbytes: int, *, label: str) -> bool:
    """The same as `agree` for a written request, on a comm that does what the ranks offer once all of them agree.

    Returns whether it is done: not if a rank made no offer.
    """
    digests, done = comm.agree_and_run(request.digest, offer, plan, nbytes, label=label)
    check_digests(comm, request, digests, label=label)
    return done


_PLAIN = (str, torch.dtype, NoneType, int, bool)  # values that are equal and of one type have the same text


@lru_cache(maxsize=1024)
def _write_plain(fields: tuple[tuple[str, type, object], ...]) -> Request:
    return _write_request({name: value for name, _, value in fields}, None)


def _write_request(fields: Mapping[str, object], problem: str | None) -> Request:
    texts = {name: _field_text(value) for name, value in fields.items()}
    if problem is not None:
        texts[_PROBLEM] = problem
    text = json.dumps(texts, sort_keys=True).encode()
    return Request(text, hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest())


def raise_problems(problems: Mapping[int, str], label: str, comm: Comm, own: str | Exception | None = None) -> NoReturn:
    """Raise what some of the ranks found wrong with a call: the error itself where all of them found the same.

    >>> from shardwise.comm import LocalComm
    >>> raise_problems({0: "no dim 3"}, "shard", LocalComm.alone(), TypeError("no dim 3"))
    Traceback (most recent call last):
    ...
    TypeError: 'shard': no dim 3
    """
    if set(problems) == set(comm.ranks) and len(set(problems.values())) == 1:
        error = own if isinstance(own, Exception) else ValueError(next(iter(problems.values())))
        raise print_once(label_error(error, label), comm) from None
    raise print_once(DisagreementError(f"{label!r}: {fold_texts(problems)}"), comm)


def print_once(error: E, comm: Comm) -> E:
    """Let the first rank of a comm speak for all: where nobody catches it, the others print one line in its place."""
    if comm.process_group is not None and comm.rank != comm.ranks[0]:
        error.__dict__["_printed_by"] = comm.rank, comm.ranks[0]  # `faults.speak_once` prints
    return error


def label_error(error: Exception, label: str) -> Exception:
    """The same error, with the name of the call in its message where that is ours to write; without its traceback."""
    if str(error).startswith(label.partition(",")[0]):
        return error.with_traceback(None)
    if isinstance(error, NotationError):
        return NotationError(f"{label!r}: {error.message}", error.text, error.position)
    if type(error) in (LayoutError, TypeError, ValueError):
        return type(error)(f"{label!r}: {error}")
    return error.with_traceback(None)


def _raise_difference(
    comm: Comm, text: bytes, label: str, what: str, problem: str | Exception | None = None
) -> NoReturn:
    """Gather the texts and say who has which; when this returns, no rank reads memory for a call that was withdrawn."""
    comm.withdraw_next_call()
    everyone = [json.loads(data) for data in comm.all_gather_bytes(text, label=label)]
    by_rank = dict(zip(comm.ranks, everyone, strict=True))
    problems = {rank: given[_PROBLEM] for rank, given in by_rank.items() if _PROBLEM in given}
    if problems:
        raise_problems(problems, label, comm, problem)
    names = list(dict.fromkeys(name for fields in everyone for name in fields))
    parts = [part for name in names if (part := _describe_difference(name, by_rank))]
    text_of_all = f"{label!r}: the ranks pass different {what}: {'; '.join(parts)}; pass the same on every rank"
    raise print_once(DisagreementError(text_of_all), comm)


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
