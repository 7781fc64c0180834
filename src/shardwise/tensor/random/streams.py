"""Which numbers does the next random tensor get? Those of a `Stream`: a seed, and how many tensors were drawn before.

1. The seed is torch's own, as `torch.manual_seed` set it, or that of `shardwise.manual_seed`.
2. The count is kept for each seed, by the comm. Seeding again starts it again, also with the same seed. With each
   stream one number is drawn from the generator, so that its state says where in the count it is: a state that is set
   again (`torch.set_rng_state`, activation checkpointing) produces the same streams again.
   A `generator=` counts nothing: its seed is the first stream, and its state is the seed of every later one. (Torch
   hands it to operators as another Python object each time, so nothing can be kept for it either.)
3. Ranks may have been seeded differently, or not at all (torch then picks a seed for each process). So the first rank's
   seed and count apply to all: one small exchange, which also detects ranks that make different requests.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from shardwise._torch import is_in_backward
from shardwise.comm import Comm, agree
from shardwise.tensor.comms import GroupOrComm, resolve_comm

_WORDS = struct.Struct("<QQ")
_MASK = (1 << 64) - 1
_MOST_PLACES = 1 << 15
_COMPUTED_AGAIN = (
    "random numbers are drawn inside a backward pass, as activation checkpointing does when it computes again; ranks "
    "that are threads of one process share torch's generator, so they cannot draw the same numbers again; start one "
    "process for each rank"
)


@dataclass(frozen=True, slots=True)
class Stream:
    """Names the numbers of one tensor.

    >>> Stream(seed=-1, count=3)
    Stream(seed=18446744073709551615, count=3)
    """

    seed: int
    count: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", int(self.seed) & _MASK)


@dataclass(slots=True)
class _StreamCounts:
    """How many streams were taken for each seed, and the counts at the states of the generator that were met.

    `pinned` is our own seed, and torch's at the time it was set.
    """

    counts: dict[int, int] = field(default_factory=dict)
    places: dict[tuple[int, bytes], int] = field(default_factory=dict)
    pinned: tuple[int, int] | None = None


_stream_counts: WeakKeyDictionary[Comm, _StreamCounts] = WeakKeyDictionary()


def _stream_counts_of(comm: Comm) -> _StreamCounts:
    return _stream_counts.setdefault(comm, _StreamCounts())


def manual_seed(seed: int, process_group: GroupOrComm | None = None) -> None:
    """Seed the random numbers of sharded tensors; torch's generator for plain tensors stays as it is.

    It applies to the tensors of this comm until torch itself is seeded again.

    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor.creation import rand
    >>> manual_seed(7)
    >>> first = rand(ChunkSpec(0, ranks=1), 3)
    >>> manual_seed(7)
    >>> torch.equal(first.local_tensor(), rand(ChunkSpec(0, ranks=1), 3).local_tensor())
    True
    """
    comm = resolve_comm(process_group)
    book = _stream_counts_of(comm)
    torch_seed = torch.initial_seed()
    if _is_alone_in_process(comm) and _is_fresh(torch.default_generator):
        _advance_generator(torch.default_generator)
    book.pinned = (int(seed) & _MASK, torch_seed)
    book.counts[int(seed) & _MASK] = 0
    book.places = {place: count for place, count in book.places.items() if place[0] != int(seed) & _MASK}


def next_stream(
    comm: Comm,
    *,
    fields: Mapping[str, object],
    label: str,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    problem: str | None = None,
) -> Stream:
    """The stream of the next random tensor, the same on every rank; `fields` are what all ranks must ask alike.

    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     generator = torch.Generator().manual_seed(comm.rank)
    ...     streams = [next_stream(comm, fields={"shape": (4,)}, label="rand", generator=generator) for _ in range(2)]
    ...     return streams
    >>> streams, others = run_local(body, 2)
    >>> streams == others, streams[0], streams[0] == streams[1]
    (True, Stream(seed=0, count=0), False)
    """
    fields = {**fields, "seed": seed}
    if seed is not None:
        return _agree_on_stream(comm, Stream(seed), fields, label, problem)
    if problem is None and generator is None and not _is_alone_in_process(comm) and is_in_backward():
        problem = _COMPUTED_AGAIN
    own = _peek_stream(comm) if generator is None else _stream_at(generator)
    stream = _agree_on_stream(comm, own, fields, label, problem)
    _move_on(comm, generator, own.seed, stream.count)
    return stream


def take_stream_alone(comm: Comm, generator: torch.Generator | None, seed: int | None) -> Stream:
    """The stream that this rank would take next, without asking the others: what a trace goes by."""
    if seed is not None:
        return Stream(seed)
    if generator is None and not _is_alone_in_process(comm) and is_in_backward():
        raise RuntimeError(_COMPUTED_AGAIN)
    own = _peek_stream(comm) if generator is None else _stream_at(generator)
    _move_on(comm, generator, own.seed, own.count)
    return own


@contextmanager
def keep_streams(comm: Comm) -> Iterator[None]:
    """Forget at the end of a `with` block which streams were taken inside: a trace takes none."""
    book = _stream_counts_of(comm)
    before = dict(book.counts), dict(book.places), book.pinned
    state = torch.get_rng_state() if _is_alone_in_process(comm) else None
    try:
        yield
    finally:
        book.counts, book.places, book.pinned = before
        if state is not None:
            torch.set_rng_state(state)


def _move_on(comm: Comm, generator: torch.Generator | None, seed: int, count: int) -> None:
    """Make the next stream another one."""
    if generator is None:
        _count_stream(comm, seed, count)
    else:
        _advance_generator(generator)


def _count_stream(comm: Comm, seed: int, count: int) -> None:
    """Count a stream, note the states of the generator before and after it."""
    book = _stream_counts_of(comm)
    known = book.counts.get(seed, 0) if is_in_backward() else 0
    book.counts[seed] = max(known, count + 1)
    source = torch.default_generator
    if not _is_alone_in_process(comm):
        return
    if len(book.places) > _MOST_PLACES:
        book.places.clear()
    book.places[seed, _state_of(source)] = count
    _advance_generator(source)
    book.places[seed, _state_of(source)] = count + 1


def _agree_on_stream(comm: Comm, own: Stream, fields: Mapping[str, object], label: str, problem: str | None) -> Stream:
    """The first rank's stream, once all ranks are seen to ask for the same."""
    text = repr(sorted((name, repr(value)) for name, value in fields.items()))
    digest = hashlib.blake2b(b"" if problem else text.encode(), digest_size=16).digest()
    told = comm.all_gather_bytes(digest + _WORDS.pack(own.seed, own.count), label=label)
    if problem is not None or {message[:16] for message in told} != {digest}:
        agree(comm, fields, label=label, problem=problem)
    return Stream(*_WORDS.unpack(told[0][16:]))


def _stream_at(generator: torch.Generator) -> Stream:
    """The next stream of a generator: that of its seed, later that of its state."""
    if _is_fresh(generator):
        return Stream(generator.initial_seed())
    return Stream(int.from_bytes(_state_of(generator)[:8], "little"))


def _peek_stream(comm: Comm) -> Stream:
    """This rank's idea of the next stream."""
    book = _stream_counts_of(comm)
    source = torch.default_generator
    torch_seed = source.initial_seed()
    owned = _is_alone_in_process(comm)
    if owned and not is_in_backward() and _is_fresh(source):
        book.counts.pop(torch_seed & _MASK, None)
        book.pinned = None
        return Stream(torch_seed)
    if book.pinned is not None and book.pinned[1] != torch_seed:
        book.pinned = None
    seed = torch_seed & _MASK if book.pinned is None else book.pinned[0]
    count = book.places.get((seed, _state_of(source))) if owned else None
    return Stream(seed, book.counts.get(seed, 0) if count is None else count)


def _is_alone_in_process(comm: Comm) -> bool:
    """Whether torch's default generator belongs to this rank; ranks that are threads of one process share it."""
    return comm.process_group is not None or comm.world_size == 1


def _is_fresh(generator: torch.Generator) -> bool:
    """Whether a generator was seeded and nothing was drawn since."""
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(generator.get_state(), fresh.get_state())


def _state_of(generator: torch.Generator) -> bytes:
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=16).digest()


def _advance_generator(generator: torch.Generator) -> None:
    torch.empty(1, dtype=torch.float32, device=generator.device).uniform_(generator=generator)
