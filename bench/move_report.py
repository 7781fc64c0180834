"""The tables of section "move": times and ratios, bytes and memory, and what was aimed at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.move_peers import DTENSOR, FRESH, NATIVE, READY, SHARDED
from bench.report import Cell, Figures

OURS, SOCKETS, LIMITED = "ours", "ours, sockets", "ours, limited"
MB = 1e6
MIB = 1 << 20
LARGE = 16 * MIB


@dataclass(frozen=True)
class Measured:
    """Median seconds, bytes on the wire, and the most any rank's memory grew beyond its result."""

    seconds: float
    wire: int | None
    extra: int | None


@dataclass(frozen=True)
class MoveOutcome:
    """One case at one size: what our plan moves, the lower bound, the tensor's size, the limit, and all ways."""

    case: str
    moved: int
    lower_bound: int
    size: int
    limit: int
    ways: Mapping[str, Measured]

    def ms(self, way: str) -> float | None:
        """Median milliseconds of a way."""
        return self.ways[way].seconds * 1e3 if way in self.ways else None

    def ratio(self, way: str, other: str) -> float | None:
        """How many times longer than the other."""
        return self.ways[way].seconds / self.ways[other].seconds if way in self.ways and other in self.ways else None

    def wire(self, way: str) -> float | None:
        """Bytes on the wire as a multiple of the lower bound."""
        found = self.ways[way].wire if way in self.ways else None
        return None if found is None or not self.lower_bound else found / self.lower_bound

    def extra(self, way: str) -> float | None:
        """MB beyond source and destination."""
        found = self.ways[way].extra if way in self.ways else None
        return None if found is None else found / MB


def tables(outcomes: Sequence[MoveOutcome]) -> list[Figures]:
    """All tables, one of times for each size."""
    sizes = list(dict.fromkeys(outcome.size for outcome in outcomes))
    times = [_times([o for o in outcomes if o.size == size], size) for size in sizes]
    return [*times, _bytes(outcomes), _memory(outcomes), _targets(outcomes)]


def line(outcome: MoveOutcome) -> str:
    """A case in one line, to show while the others are still running."""
    times = ", ".join(f"{way} {found.seconds * 1e3:.3g}" for way, found in outcome.ways.items())
    return f"{outcome.case}, {_amount(outcome.size)}, ms: {times}"


def _times(outcomes: Sequence[MoveOutcome], size: int) -> Figures:
    ways = (OURS, SOCKETS, FRESH, READY, DTENSOR, SHARDED)
    pairs = ((OURS, FRESH), (SOCKETS, FRESH), (DTENSOR, OURS), (SHARDED, OURS))
    rows: list[list[Cell]] = []
    for o in outcomes:
        rows.append([o.case, *(o.ms(way) for way in ways), *(o.ratio(*pair) for pair in pairs)])
    columns = ["case", *ways, "ours / raw fresh", "sockets / raw fresh", "DTensor / ours", "ShardedTensor / ours"]
    notes = ["raw: the collective that moves the lower bound of bytes, without packing or placing them."]
    native = next((o for o in outcomes if NATIVE in o.ways), None)
    if native is not None:
        notes.append(f"{NATIVE} (fresh buffers) for {native.case}: {native.ms(NATIVE):.3g} ms.")
    return Figures(f"{_amount(size)}, 4 gloo ranks: medians in ms, interleaved", columns, rows, notes)


def _bytes(outcomes: Sequence[MoveOutcome]) -> Figures:
    largest = max(o.size for o in outcomes)
    ways = (SOCKETS, FRESH, NATIVE, DTENSOR, SHARDED)
    rows: list[list[Cell]] = []
    for o in outcomes:
        if o.size == largest:
            rows.append([o.case, o.lower_bound / MB, o.moved / o.lower_bound, *(o.wire(way) for way in ways)])
    columns = ["case", "lower bound, MB", "our plan / bound", *(f"{way} / bound" for way in ways)]
    notes = ["All but the plan's are counted on the loopback interface, the least of some runs."]
    return Figures(f"Bytes on the wire, {_amount(largest)}", columns, rows, notes)


def _memory(outcomes: Sequence[MoveOutcome]) -> Figures:
    largest = max(o.size for o in outcomes)
    ways = (OURS, SOCKETS, LIMITED, FRESH, DTENSOR, SHARDED)
    rows: list[list[Cell]] = []
    for o in outcomes:
        if o.size == largest:
            rows.append([o.case, *(o.extra(way) for way in ways), o.ratio(LIMITED, OURS)])
    limit = max(o.limit for o in outcomes)
    notes = [
        f"'limited' has max_buffer_bytes = {limit / MB:.3g} MB.",
        "The kernel's peak of resident memory during one call, less that before it and less the result; worst rank.",
    ]
    title = f"Memory beyond source and destination, MB, {_amount(largest)}"
    return Figures(title, ["case", *ways, "time limited / ours"], rows, notes)


def _targets(outcomes: Sequence[MoveOutcome]) -> Figures:
    large = [o for o in outcomes if o.size >= LARGE] or list(outcomes)
    rows = [
        _worst("ours / raw collective into fresh buffers, 16 MB up", [(o, o.ratio(OURS, FRESH)) for o in large], 1.1),
        _worst("the same over sockets", [(o, o.ratio(SOCKETS, FRESH)) for o in large], 1.1),
        _worst("ours / DTensor", [(o, o.ratio(OURS, DTENSOR)) for o in outcomes], 1.0),
        _worst("ours / torch's ShardedTensor", [(o, o.ratio(OURS, SHARDED)) for o in outcomes], 1.0),
        _worst("bytes of our plan / lower bound", [(o, o.moved / o.lower_bound) for o in outcomes], 1.0),
        _worst(
            "Partial -> Shard(0): our bytes / gloo's reduce_scatter",
            [(o, _reduce_scatter_ratio(o)) for o in large],
            0.55,
        ),
        _worst("extra memory / buffer limit", [(o, _buffer_limit_ratio(o)) for o in large], 1.0),
    ]
    return Figures("Targets", ["figure", "worst", "where", "aim", "met"], rows)


def _reduce_scatter_ratio(outcome: MoveOutcome) -> float | None:
    native = outcome.ways[NATIVE].wire if NATIVE in outcome.ways else None
    return outcome.moved / native if native else None


def _buffer_limit_ratio(outcome: MoveOutcome) -> float | None:
    extra = outcome.ways[LIMITED].extra if LIMITED in outcome.ways else None
    return None if extra is None else extra / outcome.limit


def _worst(figure: str, found: Sequence[tuple[MoveOutcome, float | None]], aim: float) -> list[Cell]:
    known = [(value, outcome) for outcome, value in found if value is not None]
    if not known:
        return [figure, None, None, aim, None]
    value, outcome = max(known, key=lambda pair: pair[0])
    return [figure, value, f"{outcome.case}, {_amount(outcome.size)}", aim, "yes" if value <= aim else "no"]


def _amount(size: int) -> str:
    return f"{size / MIB:.3g} MiB"
