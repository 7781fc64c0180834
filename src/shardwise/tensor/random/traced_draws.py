"""Random numbers in traced programs: `shardwise::draw`, a function of a stream that each call passes.

1. A trace does not draw. It notes which streams the program would take, in order, and the graph gets their seeds and
   counts as an input: one row for each stream.
2. Before each call the streams are taken as they would be without a graph, so that the numbers are the same.
3. Code that is computed again in the backward pass takes the same streams again, and so the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise._torch import no_dispatch_modes
from shardwise._torch_graphs import define_operator
from shardwise.comm import Comm
from shardwise.comm.traced import real_comm
from shardwise.geometry import Layout
from shardwise.tensor.random.distributions import Distribution
from shardwise.tensor.random.fill import fill_locals
from shardwise.tensor.random.streams import Stream, next_stream, take_stream_alone

_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """How a program asks for a stream."""

    comm: Comm
    fields: Mapping[str, object]
    label: str
    generator: torch.Generator | None
    seed: int | None


@dataclass
class DrawTrace:
    """The streams that a traced program takes, in order, and the tensor that will have them as rows."""

    rows: Tensor | None = None
    requests: list[StreamRequest] = field(default_factory=list)
    known: dict[tuple[Stream, int], int] = field(default_factory=dict)

    def row_of(self, request: StreamRequest) -> int:
        """The row that will have the stream of a request; a stream that is taken again keeps its row."""
        with no_dispatch_modes():
            stream = take_stream_alone(request.comm, request.generator, request.seed)
        key = stream, 0 if request.seed is None else len(self.requests) + 1
        if key not in self.known:
            self.known[key] = len(self.requests)
            self.requests.append(request)
        return self.known[key]


_active: ContextVar[DrawTrace | None] = ContextVar("shardwise_draws", default=None)


@contextmanager
def trace_draws(rows: Tensor) -> Iterator[DrawTrace]:
    """Let draws be noted inside a `with` block; `rows` stands for the streams."""
    token = _active.set(trace := DrawTrace(rows))
    try:
        yield trace
    finally:
        _active.reset(token)


def take_streams(requests: Sequence[StreamRequest]) -> Tensor:
    """The streams of a call, one row for each: seed and count as signed words."""
    found = [next_stream(r.comm, fields=r.fields, label=r.label, generator=r.generator, seed=r.seed) for r in requests]
    rows = [[_signed(s.seed), _signed(s.count)] for s in found]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 2)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


@dataclass(frozen=True, slots=True)
class DrawRecord:
    """What `shardwise::draw` makes for a number: this rank's part of a random tensor."""

    layout: Layout
    rank: int
    values: Distribution
    dtype: torch.dtype


_records: dict[int, DrawRecord] = {}


def draw_in_trace(layout: Layout, locals_: Sequence[Tensor], values: Distribution, request: StreamRequest) -> bool:
    """Write random values into local tensors by `shardwise::draw`; False where nothing is traced."""
    trace = _active.get()
    if trace is None or trace.rows is None:
        return False
    row = trace.row_of(
        StreamRequest(real_comm(request.comm), request.fields, request.label, request.generator, request.seed)
    )
    record = DrawRecord(layout, request.comm.rank, values, locals_[0].dtype if locals_ else torch.float32)
    text = f"{layout!r} {layout._layout_digest.hex()} {record.dtype} on {record.rank}, {len(_records)}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    _records[number] = record
    drawn = torch.ops.shardwise.draw(trace.rows, list(locals_), row, number)
    for local, value in zip(locals_, drawn, strict=True):
        local.copy_(value)
    return True


def _draw(rows: Tensor, like: list[Tensor], row: int, draw: int) -> list[Tensor]:
    record = _records[draw]
    seed, count = rows[row].tolist()
    made = [torch.empty_like(t) for t in like]
    fill_locals(record.layout, record.rank, made, Stream(seed, count % _WORD), record.values)
    return made


define_operator(
    "draw(Tensor rows, Tensor[] like, int row, int draw) -> Tensor[]",
    _draw,
    lambda rows, like, row, draw: [torch.empty_like(t) for t in like],
)
