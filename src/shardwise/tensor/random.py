"""Random numbers that do not depend on the layout: an element's value is a function of stream, shape and index alone.

1. All dims but the first are cut in tiles, by the global shape alone. A tile with the whole first dim is a *ribbon*.
2. Each ribbon is a sequence of its own: 128 bits mixed from (seed, count of the tensor, number of the ribbon) are the
   start of the generator PCG64-DXSM, which can jump to any position.
3. Along the ribbon the rows of the first dim follow each other in *units* of a fixed number of rows, so that a rank can
   enter a ribbon at any unit. It draws the units that meet its boxes and cuts out what it holds.
4. Numbers are drawn on the CPU, where they are the same for every device.

A box draws too much only where it cuts a tile or a unit: fewer than 128 elements at each end of a ribbon's rows, and in
each later dim fewer than a tile's edge at each end (64 or 128 for a matrix with many rows).

Which numbers does the next random tensor get? Those of a `Stream`: a seed, and how many tensors were drawn before.

1. The seed is torch's own, as `torch.manual_seed` set it, or that of `shardwise.manual_seed`.
2. The count is kept for each seed, by the comm. Seeding again starts it again, also with the same seed. With each
   stream one number is drawn from the generator, so that its state says where in the count it is: a state that is set
   again (`torch.set_rng_state`, activation checkpointing) produces the same streams again.
   A `generator=` counts nothing: its seed is the first stream, and its state is the seed of every later one. (Torch
   hands it to operators as another Python object each time, so nothing can be kept for it either.)
3. Ranks may have been seeded differently, or not at all (torch then picks a seed for each process). So the first rank's
   seed and count apply to all: one small exchange, which also detects ranks that make different requests.

Random numbers in traced programs: `shardwise::draw`, a function of a stream that each call passes.

1. A trace does not draw. It notes which streams the program would take, in order, and the graph gets their seeds and
   counts as an input: one row for each stream.
2. Before each call the streams are taken as they would be without a graph, so that the numbers are the same.
3. Code that is computed again in the backward pass takes the same streams again, and so the same rows.

From raw numbers to values: what is drawn for an element, and what is made of it.

Values are computed in float32 (float64 for float64 tensors) on blocks of numbers, and then cast. An element's value
depends on the numbers of its block of 32 alone.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise._cache import cached
from shardwise._text import public
from shardwise._torch import define_operator, is_in_backward, no_dispatch_modes
from shardwise.comm import Comm, agree
from shardwise.comm.current import GroupOrComm, resolve_comm
from shardwise.comm.stand_in import untraced_comm
from shardwise.geometry import Box, Layout, LayoutError

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


@public
def manual_seed(seed: int, process_group: GroupOrComm | None = None) -> None:
    """Seed the random numbers of sharded tensors, as torch.manual_seed does for plain ones.

    It counts for the tensors of this comm until you seed torch itself again, and leaves torch's generator alone.

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
    problem: str | Exception | None = None,
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


def _agree_on_stream(
    comm: Comm, own: Stream, fields: Mapping[str, object], label: str, problem: str | Exception | None
) -> Stream:
    """The first rank's stream, once all ranks are seen to ask for the same."""
    found = agree(comm, fields, label=label, problem=problem, payload=_WORDS.pack(own.seed, own.count))
    return Stream(*_WORDS.unpack(found[comm.ranks[0]]))


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


BLOCK = 32
HALF = BLOCK // 2
SCRATCH = 2


@dataclass(frozen=True, slots=True)
class RawNumbers:
    """A kind of raw numbers: how NumPy draws them, and how many one step of the generator yields."""

    dtype: npt.DTypeLike
    per_step: int
    lane: int
    fill: Callable[[np.random.Generator, npt.NDArray[Any]], None]


def _fill_bits(generator: np.random.Generator, out: npt.NDArray[Any]) -> None:
    out[:] = generator.integers(0, (1 << 64) - 1, len(out), np.uint64, endpoint=True).view(np.int64)


FLOAT32 = RawNumbers(np.float32, 2, 0, lambda generator, out: _discard(generator.random(out=out, dtype=np.float32)))
FLOAT64 = RawNumbers(np.float64, 1, 1, lambda generator, out: _discard(generator.random(out=out)))
BITS64 = RawNumbers(np.int64, 1, 2, _fill_bits)


def _discard(filled: object) -> None:
    """Drop what was filled in place."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is drawn for each element, and how values are computed from whole blocks of numbers.

    `compute` receives the numbers and twice as much memory again; it may overwrite both.
    """

    numbers: RawNumbers
    compute: Callable[[Tensor, Tensor], Tensor]


def uniform(low: float, high: float, dtype: torch.dtype) -> Distribution:
    """Real numbers from `low` up to, not including, `high`.

    >>> uniform(2, 3, torch.float32).compute(torch.tensor([0.0, 0.5]), torch.empty(2, 2))
    tensor([2.0000, 2.5000])
    """
    real = check_real(dtype, "uniform")
    if not low <= high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    if not math.isfinite(high - low) or high - low > torch.finfo(real).max:
        raise RuntimeError(f"uniform_ expects to-from <= {torch.finfo(real).max}, but found to={high} and from={low}")
    top = _largest_below(high, real) if low < high else high

    def compute(numbers: Tensor, scratch: Tensor) -> Tensor:
        if (low, high) == (0, 1) and real in (torch.float32, torch.float64):
            return numbers
        return numbers.mul_(high - low).add_(low).clamp_(max=top)

    return Distribution(_numbers_for(real), compute)


def normal(mean: float, std: float, dtype: torch.dtype) -> Distribution:
    """Normal numbers, two from two uniform ones by Box and Muller; complex numbers have `std` over both parts.

    >>> normal(3, 0, torch.float32).compute(torch.full((32,), 0.25), torch.empty(2, 32)).unique()
    tensor([3.])
    """
    real = check_real(dtype, "normal_")
    if not std >= 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    scale = std / math.sqrt(2) if dtype.is_complex else std
    half_step = 2.0**-54 if real == torch.float64 else 2.0**-25  # no number is 0

    def compute(numbers: Tensor, scratch: Tensor) -> Tensor:
        # The functions run on contiguous memory: on short runs they take three times as long.
        halves = scratch[0].view(2, -1, HALF)
        halves.copy_(numbers.view(-1, 2, HALF).transpose(0, 1))
        radius, angle = halves
        radius.add_(half_step).log_().mul_(-2 * scale * scale).sqrt_()
        angle.mul_(2 * math.pi)
        cosine = torch.cos(angle, out=numbers.view(2, -1, HALF)[0])
        pairs = scratch[1].view(-1, 2, HALF)
        torch.mul(radius, cosine, out=pairs[:, 0])
        torch.mul(radius, angle.sin_(), out=pairs[:, 1])
        return scratch[1].add_(mean) if mean != 0 else scratch[1]

    return Distribution(_numbers_for(real), compute)


def truncated_normal(mean: float, std: float, low: float, high: float, dtype: torch.dtype) -> Distribution:
    """Normal numbers between two bounds, by the inverse of the normal distribution's cumulative function.

    >>> numbers = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    >>> values = truncated_normal(0, 1, -2, 2, torch.float32).compute(numbers, torch.empty(2, 3, dtype=torch.float64))
    >>> [round(v, 4) for v in values.tolist()]
    [-2.0, 0.0, 2.0]
    """
    real = check_real(dtype, "trunc_normal_")
    if not low <= high or not std >= 0:
        raise ValueError(f"trunc_normal_ needs a <= b and std >= 0, got a={low}, b={high}, std={std}")
    mirrored = low + high > 2 * mean  # towards the lower tail, where small probabilities keep their digits
    a, b = ((mean - high, mean - low) if mirrored else (low - mean, high - mean)) if std > 0 else (0.0, 0.0)
    bounds = [0.5 * math.erfc(-x / (std * math.sqrt(2))) if std > 0 else 0.5 for x in (a, b)]
    inside = torch.tensor([low, high], dtype=real, device="cpu").tolist()

    def compute(numbers: Tensor, scratch: Tensor) -> Tensor:
        torch.special.ndtri(numbers.mul_(bounds[1] - bounds[0]).add_(bounds[0]), out=scratch[0])
        return scratch[0].mul_(-std if mirrored else std).add_(mean).clamp_(*inside)

    return Distribution(FLOAT64, compute)


def bernoulli(probability: float) -> Distribution:
    """Ones with a probability, else zeros.

    >>> bernoulli(0.3).compute(torch.tensor([0.1, 0.3, 0.9]), torch.empty(2, 3))
    tensor([ True, False, False])
    """
    if not 0 <= probability <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={probability}")
    return Distribution(FLOAT32, lambda numbers, scratch: numbers < probability)


def integers(low: int | None, high: int | None, dtype: torch.dtype) -> Distribution:
    """Whole numbers from `low` up to, not including, `high`; by default all that the dtype holds from 0 on.

    >>> integers(5, 8, torch.int64).compute(torch.tensor([0, 4, -1]), torch.empty(2, 3))
    tensor([5, 6, 6])
    """
    if dtype.is_complex or _is_fp8(dtype):
        raise NotImplementedError(f"random_ is not implemented for {dtype}; draw integers or real numbers")
    low = 0 if low is None else low
    high = _integer_end(dtype) if high is None else high
    if low >= high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but found from={low} >= to={high}")
    span = high - low
    if not 0 < span <= 1 << 63 or not -(1 << 63) <= low < high <= 1 << 63:
        raise RuntimeError(f"random_ draws from at most 2**63 numbers within int64, but found from={low} and to={high}")

    def compute(numbers: Tensor, scratch: Tensor) -> Tensor:
        numbers.bitwise_and_((1 << 63) - 1)
        return (numbers if span == 1 << 63 else numbers.remainder_(span)).add_(low)

    return Distribution(BITS64, compute)


def check_real(dtype: torch.dtype, what: str) -> torch.dtype:
    """The real dtype of a tensor's parts, or torch's error for dtypes that take no real numbers."""
    if not (dtype.is_floating_point or dtype.is_complex) or _is_fp8(dtype):
        raise NotImplementedError(f"{what!r} is not implemented for {dtype}; use a floating point dtype and convert")
    return dtype.to_real() if dtype.is_complex else dtype


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _numbers_for(real: torch.dtype) -> RawNumbers:
    return FLOAT64 if real == torch.float64 else FLOAT32


def _largest_below(value: float, dtype: torch.dtype) -> float:
    """The largest number of a dtype below a value."""
    nearest = torch.tensor(value, dtype=dtype, device="cpu")
    if nearest.item() < value:
        return float(nearest.item())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    step = -1 if nearest.item() > 0 else 1
    down = nearest.view(bits).add(step) if nearest.item() != 0 else torch.tensor(1, dtype=bits, device="cpu")
    return float(down.view(dtype).item()) * (-1 if nearest.item() == 0 else 1)


def _integer_end(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return 1 << (1 - round(math.log2(torch.finfo(dtype).eps)))
    return min(torch.iinfo(dtype).max + 1, 1 << 63)


ROW_ELEMENTS = 128  # of a ribbon, where the first dim is long: wide enough to copy well, narrow enough to cut
RIBBON_ELEMENTS = 1 << 14  # at least, where the tensor has them: a ribbon costs some microseconds to enter
BATCH_ELEMENTS = 1 << 17  # computed at a time: they stay in the cache
STAGED_ELEMENTS = 1 << 24  # drawn at a time for a tensor on another device
UNIT_ELEMENTS = 4 * BLOCK  # at most, unless a single row has more
INCREMENT = 0x5851F42D4C957F2D14057B7EF767814F  # of the generator's steps: any odd number


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the index space of a shape is cut: the edges of the tiles of all dims but the first.

    >>> Tiling.of((4096, 4096)).edges, Tiling.of((512, 512, 3, 3)).edges, Tiling.of((2, 10**6)).edges
    ((128,), (8, 3, 3), (8192,))
    """

    shape: tuple[int, ...]
    edges: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int]) -> Tiling:
        """The tiling of a shape; a 0-dim tensor is tiled as one row."""
        return _cached_tiling(tuple(shape) or (1,))

    def ribbons(self, box: Box) -> Iterator[Ribbon]:
        """The ribbons that a box meets, each with what it meets of their tile."""
        spans = list(zip(self.edges, box.offsets[1:], box.ends[1:], strict=True))
        counts = [-(-length // edge) for length, edge in zip(self.shape[1:], self.edges, strict=True)]
        for tile in itertools.product(*(range(low // edge, -(-high // edge)) for edge, low, high in spans)):
            number = 0
            for index, count in zip(tile, counts, strict=True):
                number = number * count + index
            starts = [index * edge for index, edge in zip(tile, self.edges, strict=True)]
            ends = [min(s + e, n) for s, e, n in zip(starts, self.edges, self.shape[1:], strict=True)]
            cut = [
                slice(max(low, s) - s, min(high, e) - s)
                for s, e, (_, low, high) in zip(starts, ends, spans, strict=True)
            ]
            into = [
                slice(max(s, low) - low, min(e, high) - low)
                for s, e, (_, low, high) in zip(starts, ends, spans, strict=True)
            ]
            yield Ribbon(number, tuple(e - s for s, e in zip(starts, ends, strict=True)), tuple(cut), tuple(into))


@cached()
def _cached_tiling(shape: tuple[int, ...]) -> Tiling:
    budget = max(ROW_ELEMENTS, RIBBON_ELEMENTS // max(shape[0], 1))
    edges = [1] * (len(shape) - 1)
    while True:
        growing = [d for d, edge in enumerate(edges) if edge < shape[1 + d]]
        dim = min(growing, key=lambda d: (edges[d] // 8 if d == len(edges) - 1 else edges[d], -d), default=None)
        if dim is None:
            break
        wider = min(2 * edges[dim], shape[1 + dim])
        if math.prod(edges) // edges[dim] * wider > budget:
            break
        edges[dim] = wider
    return Tiling(shape, tuple(edges))


@dataclass(frozen=True, slots=True)
class Ribbon:
    """One ribbon: its number, the sizes of its tile, what of the tile is wanted, and where in the box that goes."""

    number: int
    sizes: tuple[int, ...]
    cut: tuple[slice, ...]
    into: tuple[slice, ...]


@cached()
def unit_of(row: int) -> tuple[int, int]:
    """The rows of a unit and the numbers drawn for it, which are whole blocks, for rows of `row` elements.

    >>> unit_of(128), unit_of(1), unit_of(48)
    ((1, 128), (32, 32), (2, 96))
    """
    most = max(1, UNIT_ELEMENTS // row)
    rows = min(range(1, most + 1), key=lambda n: (-(-n * row // BLOCK) / (n * row), n))
    return rows, -(-rows * row // BLOCK) * BLOCK


class NumberSource:
    """Draws the raw numbers of one stream at any place."""

    def __init__(self, stream: Stream, numbers: RawNumbers) -> None:
        self._stream = stream
        self._numbers = numbers
        self._bits = np.random.PCG64DXSM(0)
        self._generator = np.random.Generator(self._bits)

    def draw(self, ribbon: int, position: int, out: npt.NDArray[Any]) -> None:
        """Fill `out` with the numbers of a ribbon from a position on, which is a multiple of the block."""
        words = struct.pack("<QQQQ", self._stream.seed, self._stream.count, self._numbers.lane, ribbon)
        start = int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "little")
        self._bits.state = {
            "bit_generator": "PCG64DXSM",
            "state": {"state": start, "inc": INCREMENT},
            "has_uint32": 0,
            "uinteger": 0,
        }
        if position:
            self._bits.advance(position // self._numbers.per_step)
        self._numbers.fill(self._generator, out)


@dataclass(frozen=True, slots=True)
class _RibbonRows:
    """Some rows of a ribbon: from where and how much is drawn, what of it is skipped, and where the rest goes."""

    ribbon: Ribbon
    position: int
    count: int
    unit: tuple[int, int]
    skip: int
    rows: slice


def fill_box(target: Tensor, shape: Sequence[int], box: Box, stream: Stream, values: Distribution) -> None:
    """Write the values of a box of a tensor of this shape into `target`, in place.

    >>> from shardwise.tensor.random import uniform
    >>> whole, part = torch.empty(4, 6), torch.empty(2, 3)
    >>> fill_box(whole, (4, 6), Box.whole((4, 6)), Stream(1), uniform(0, 1, torch.float32))
    >>> fill_box(part, (4, 6), Box((1, 2), (2, 3)), Stream(1), uniform(0, 1, torch.float32))
    >>> torch.equal(whole[1:3, 2:5], part)
    True
    """
    if box.numel == 0 or target.is_meta:
        return
    if target.is_complex():
        real = Box((*box.offsets, 0), (*box.sizes, 2))
        return fill_box(torch.view_as_real(target), (*shape, 2), real, stream, values)
    if box.ndim == 0:
        return fill_box(target.view(1), (1,), Box((0,), (1,)), stream, values)
    if not target.is_cpu:
        return _fill_staged(target, shape, box, stream, values)
    source = NumberSource(stream, values.numbers)
    buffers = BatchBuffers(values)
    for parts in _batch_rows(Tiling.of(shape), box):
        _fill_batch(target, parts, source, buffers)
    return None


class BatchBuffers:
    """Memory for the numbers and the intermediate results of a batch, used again by the next one."""

    def __init__(self, values: Distribution) -> None:
        self._values = values
        self._memory: npt.NDArray[Any] = np.empty((1 + SCRATCH, 0), values.numbers.dtype)

    def numbers(self, count: int) -> npt.NDArray[Any]:
        """Room for the raw numbers of a batch."""
        if self._memory.shape[1] < count:
            self._memory = np.empty((1 + SCRATCH, count), self._values.numbers.dtype)
        return self._memory[0, :count]

    def values(self, count: int) -> Tensor:
        """The values made from the numbers of a batch."""
        memory = torch.from_numpy(self._memory[:, :count])
        return self._values.compute(memory[0], memory[1:])


def _fill_batch(target: Tensor, parts: Sequence[_RibbonRows], source: NumberSource, buffers: BatchBuffers) -> None:
    ends = list(itertools.accumulate(part.count for part in parts))
    raw = buffers.numbers(ends[-1])
    for part, end in zip(parts, ends, strict=True):
        source.draw(part.ribbon.number, part.position, raw[end - part.count : end])
    computed = buffers.values(ends[-1])
    for part, end in zip(parts, ends, strict=True):
        _place_rows(target, part, computed[end - part.count : end])


def _fill_staged(target: Tensor, shape: Sequence[int], box: Box, stream: Stream, values: Distribution) -> None:
    """Draw on the CPU and copy, some rows at a time."""
    step = max(1, STAGED_ELEMENTS * box.sizes[0] // box.numel)
    for start in range(0, box.sizes[0], step):
        rows = min(step, box.sizes[0] - start)
        part = Box((box.offsets[0] + start, *box.offsets[1:]), (rows, *box.sizes[1:]))
        staged = torch.empty(part.sizes, dtype=target.dtype, device="cpu")
        fill_box(staged, shape, part, stream, values)
        target[start : start + rows].copy_(staged)


def _batch_rows(tiling: Tiling, box: Box) -> Iterator[list[_RibbonRows]]:
    """What is drawn and computed at a time."""
    batch: list[_RibbonRows] = []
    drawn = 0
    for part in _ribbon_rows(tiling, box):
        batch.append(part)
        drawn += part.count
        if drawn >= BATCH_ELEMENTS:
            yield batch
            batch, drawn = [], 0
    if batch:
        yield batch


def _ribbon_rows(tiling: Tiling, box: Box) -> Iterator[_RibbonRows]:
    """The rows of the ribbons that a box meets, in runs of at most a batch."""
    low, high = box.offsets[0], box.ends[0]
    for ribbon in tiling.ribbons(box):
        rows, width = unit = unit_of(math.prod(ribbon.sizes))
        step = max(1, BATCH_ELEMENTS // width)
        for first in range(low // rows, -(-high // rows), step):
            start, end = max(low, first * rows), min(high, (first + step) * rows)
            units = -(-end // rows) - first
            place = slice(start - low, end - low)
            yield _RibbonRows(ribbon, first * width, units * width, unit, start - first * rows, place)


def _place_rows(target: Tensor, part: _RibbonRows, drawn: Tensor) -> None:
    """Cut what is wanted out of the drawn units and copy it to its place."""
    rows, width = part.unit
    row = math.prod(part.ribbon.sizes)
    whole = drawn if rows * row == width else drawn.view(-1, width)[:, : rows * row]
    lines = whole.reshape(-1, *part.ribbon.sizes)
    count = part.rows.stop - part.rows.start
    target[(part.rows, *part.ribbon.into)].copy_(lines[(slice(part.skip, part.skip + count), *part.ribbon.cut)])


def fill_locals(layout: Layout, rank: int, locals_: Sequence[Tensor], stream: Stream, values: Distribution) -> None:
    """Write a rank's part of the values of a tensor into its local tensors, in place.

    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor.random import normal
    >>> def local(spec, rank):
    ...     layout = spec.layout((6, 4))
    ...     tensors = [torch.empty(s) for s in layout.local_shapes(rank)]
    ...     fill_locals(layout, rank, tensors, Stream(5), normal(0, 1, torch.float32))
    ...     return tensors[0]
    >>> whole = local(ChunkSpec(0, ranks=1), rank=0)
    >>> torch.equal(local(ChunkSpec(1, ranks=2), rank=1), whole[:, 2:])
    True
    """
    own = layout.table.take(layout.rows_of(rank))
    columns = (own.offsets.tolist(), own.sizes.tolist(), own.slots.tolist(), own.local_offsets.tolist())
    for offsets, sizes, slot, local_offsets in zip(*columns, strict=True):
        inside = tuple(slice(o, o + s) for o, s in zip(local_offsets, sizes, strict=True))
        fill_box(locals_[slot][inside], layout.shape, Box(tuple(offsets), tuple(sizes)), stream, values)


def check_not_pending(layout: Layout, what: str) -> None:
    """Raise unless every local tensor of a layout holds values."""
    if layout.pending is not None:
        raise LayoutError(
            f"{what} on a tensor with a pending {layout.pending}: its local tensors are addends, which have no random "
            "value of their own; use Shard or Replicate instead of Partial, or redistribute the tensor first"
        )


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
        StreamRequest(untraced_comm(request.comm), request.fields, request.label, request.generator, request.seed)
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
