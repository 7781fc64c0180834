"""How do the holders of a table learn what each rank asks of them?

1. Every rank sends all others a head: whether it agrees with them, whether something is wrong, and how much it asks.
   A rank with few requests sends its lists along, so that one exchange is enough.
2. Only if some rank asks for more, its lists travel in a second exchange, each to the holders concerned.

What is wrong on one rank is raised on all of them, before anything else is sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardwise.comm import Comm, agree
from shardwise.embedding.routes import HolderRoutes, holder_routes, replica_asker
from shardwise.geometry import Layout
from shardwise.tensor.recorder import observed_exchange, recorded_wait, recorders

RequestLists: TypeAlias = tuple[npt.NDArray[Any], ...]

INLINE = 1 << 16  # bytes that a rank sends to all others, needed there or not, to save an exchange
INLINE_ALL = 1 << 20  # the same for all ranks together
_FIXED = 5  # digest, problem, inline, two notes
_WORD = 8


@dataclass(frozen=True, slots=True)
class LookupCall:
    """One collective lookup: the table, who takes part, and what must be the same on all ranks.

    With `everyone`, all replicas of the requested rows are notified, not only those that answer.
    """

    layout: Layout
    comm: Comm
    everyone: bool
    label: str
    fields: Mapping[str, object]

    def asker_for_requests(self, asker: int) -> int | None:
        """The rank to pass to `share` and `holder_routes` for the lists of an asking rank."""
        return None if self.everyone else replica_asker(self.layout, asker)

    def asker_for_answers(self, asker: int) -> int | None:
        """The rank to pass to `share` for what an asking rank gets."""
        return replica_asker(self.layout, asker)

    @property
    def routes(self) -> HolderRoutes:
        """Whom this rank asks."""
        return holder_routes(self.layout, self.asker_for_requests(self.comm.rank))

    @property
    def number(self) -> type[np.signedinteger[Any]]:
        """The shortest dtype for row numbers."""
        return np.int32 if self.layout.shape[0] < 1 << 31 else np.int64

    def digest(self) -> int:
        """A number that differs where ranks do not agree."""
        return zlib.crc32(repr((sorted(self.fields.items()), self.layout._layout_digest, self.everyone)).encode())


@dataclass(frozen=True, slots=True)
class ReceivedRequests:
    """What every rank noted for all others, and the lists that concern this rank, by asking rank."""

    notes: dict[int, tuple[int, int]]
    lists: dict[int, RequestLists]


def exchange_requests(
    call: LookupCall, groups: Sequence[RequestLists], notes: tuple[int, int] = (0, 0), problem: str | None = None
) -> ReceivedRequests:
    """Send all owners what this rank requests from each group of them; lists of the same kinds for each group."""
    comm, digest = call.comm, call.digest()
    parts = [part for lists in groups for part in lists]
    inline = sum(part.nbytes for part in parts) <= min(INLINE, INLINE_ALL // comm.world_size)
    head = [digest, int(problem is not None), int(inline), *notes, *map(len, parts)]
    body = [part.tobytes() for part in parts] if inline else []
    message = b"".join([np.array(head, np.int64).tobytes(), *body])
    with recorded_wait(comm, f"{call.label}: agree") if recorders else nullcontext():
        data = dict(zip(comm.ranks, comm.all_gather_bytes(message, label=call.label), strict=True))
    heads = {r: np.frombuffer(d, np.int64, _FIXED).tolist() for r, d in data.items()}
    if any(h[0] != digest or h[1] for h in heads.values()):
        given = {**call.fields, "everyone": call.everyone, "layout": call.layout._layout_digest.hex()}
        agree(comm, given, label=call.label, problem=problem)
    kinds = [part.dtype for part in groups[0]] if groups else []
    lists = {r: _read_request_lists(call, kinds, r, d, bool(heads[r][2])) for r, d in data.items()}
    long = {r for r, h in heads.items() if not h[2]}
    if long:
        _exchange_long_lists(call, groups, lists, long)
    return ReceivedRequests({r: (h[3], h[4]) for r, h in heads.items()}, lists)


def _read_request_lists(
    call: LookupCall, kinds: Sequence[np.dtype[Any]], asker: int, data: bytes, inline: bool
) -> RequestLists:
    """The lists of an asking rank that concern this one: read from its message, or empty ones to be filled."""
    asked = holder_routes(call.layout, call.asker_for_requests(asker))
    group = asked.group_of.get(call.comm.rank)
    if group is None:
        return tuple(np.zeros(0, kind) for kind in kinds)
    first, count = group * len(kinds), len(asked.row_ranges) * len(kinds)
    lengths = np.frombuffer(data, np.int64, count, _FIXED * _WORD).tolist()
    own = lengths[first : first + len(kinds)]
    if not inline:
        return tuple(np.empty(n, kind) for n, kind in zip(own, kinds, strict=True))
    at = (_FIXED + count) * _WORD + sum(n * kinds[i % len(kinds)].itemsize for i, n in enumerate(lengths[:first]))
    found = []
    for length, kind in zip(own, kinds, strict=True):
        found.append(np.frombuffer(data, kind, length, at))
        at += length * kind.itemsize
    return tuple(found)


def _exchange_long_lists(
    call: LookupCall, groups: Sequence[RequestLists], lists: Mapping[int, RequestLists], long: set[int]
) -> None:
    """Fill the lists of the ranks that did not send them along."""
    own = call.comm.rank
    holders = call.routes.group_of if own in long else {}
    sends = {holder: [torch.from_numpy(part) for part in groups[group]] for holder, group in holders.items()}
    receives = {r: [torch.from_numpy(part) for part in lists[r]] for r in long}
    label = f"{call.label}: row numbers"
    with observed_exchange(call.comm, label, sends, receives):
        call.comm.exchange(sends, receives, label=label).wait()
