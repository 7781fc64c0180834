"""How long does it take, beside others? Contenders take turns, so that noise of the machine falls on all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Span = tuple[float, float]


def prepare_nothing() -> None:
    """The preparation of a contender that needs none."""


@dataclass(frozen=True)
class Contender:
    """Something to time: `run` gets what `prepare` returned; only `run` is timed, and what it returns is dropped."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = prepare_nothing


def run_interleaved(
    contenders: Sequence[Contender], repeats: int, before: Callable[[], object] = prepare_nothing
) -> dict[str, list[Span]]:
    """Start and end of every run: in each turn all contenders run once, each turn begins with the next of them.

    `before` is called between the preparation and the run; a barrier, where many ranks run together.

    >>> spans = run_interleaved([Contender("a", lambda _: 1), Contender("b", lambda _: 2)], 3)
    >>> [(name, len(found)) for name, found in spans.items()]
    [('a', 3), ('b', 3)]
    """
    spans: dict[str, list[Span]] = {c.name: [] for c in contenders}
    for turn in range(repeats):
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            spans[contender.name].append(_time_run(contender, before))
    return spans


def _time_run(contender: Contender, before: Callable[[], object]) -> Span:
    prepared = contender.prepare()
    before()
    start = time.perf_counter()
    result = contender.run(prepared)
    end = time.perf_counter()
    del result  # after the clock was read: giving memory back is not part of the run
    return start, end


def seconds(by_rank: Sequence[Sequence[Span]]) -> float:
    """The median, over runs, of the time from the first rank's start to the last rank's end.

    >>> seconds([[(0.0, 1.0), (5.0, 7.0)], [(0.5, 2.0), (5.0, 6.0)]])
    2.0
    """
    runs = zip(*by_rank, strict=True)
    return median(max(end for _, end in run) - min(start for start, _ in run) for run in runs)


def medians(contenders: Sequence[Contender], repeats: int) -> dict[str, float]:
    """Median seconds of each contender in this process."""
    return {name: seconds([spans]) for name, spans in run_interleaved(contenders, repeats).items()}
