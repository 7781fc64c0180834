"""Which strategies does an operator have? Tried out on random inputs cut in parts.

1. Draw inputs of the sample's shapes; compute the whole result.
2. For each layout of the inputs on one axis (whole; dims of equal length cut alike; addends of a sum) compute
   part by part, for two and three parts, even and uneven.
3. See which recombination of each output (whole, concatenated, reduced) is the whole result, every time.
4. Some operators take only lengths that fill whole words of memory: parts that one refuses are tried in units of 8.

All this happens in host memory, where an index out of range is an error. On a GPU it would end the process's use of it;
operators that run nowhere else are tried with integers that are valid in every part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.ops.discovery.trial import (
    SOURCES,
    SampleSource,
    boundary_tensors,
    cut_in_parts,
    draw_sample,
    find_recombinations,
    part_sizes,
    run_call,
    written_tensors,
)
from shardwise.ops.engine.registry import Strategy
from shardwise.ops.engine.schema import OperatorCall, Slot

CUTS = ((2, True), (2, False), (3, True))
DEVICE_CUTS = ((2, True), (2, False), (3, False))  # of a length of 6 every part has 2 or more
TRIALS, TRIALS_OF_INTEGERS = 3, 10
MAX_LAYOUTS = 4096
UNIT = 8  # elements of 2 bytes in the 16 bytes at which kernels want rows to begin
InputPlacements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """The strategies that held in every trial, how the inputs were drawn, and what limits the answer."""

    strategies: tuple[Strategy, ...]
    source: SampleSource
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs, their whole results, and the seed of what else is drawn."""

    inputs: tuple[Tensor, ...]
    results: tuple[Any, ...]
    seed: int


class RandomNumbersError(ValueError):
    """An operator draws random numbers, so that its results cannot be compared."""


def find_strategies(call: OperatorCall) -> Findings:
    """All strategies of a call of an operator, whose tensors provide shapes, dtypes and valid integers."""
    if not call.tensors:
        raise ValueError(f"{call.op} got no tensor to shard; pass at least one among the sample arguments")
    source, trials = draw_trials(call)
    layouts = list(islice(_candidate_layouts(call), MAX_LAYOUTS + 1))
    notes = [f"more than {MAX_LAYOUTS} layouts of the inputs; the first {MAX_LAYOUTS} were tried"] * (
        len(layouts) > MAX_LAYOUTS
    )
    if not any(isinstance(r, Tensor) for r in trials[0].results):
        notes.append("the operator returns no tensor to compare; only replicated inputs are safe")
        layouts = []
    if not source.random_floats:
        notes.append("the operator runs on the sample's own values only; other values were not tried")
    found = [
        Strategy(
            _output_placements(call, (Replicate(),) * len(call.tensors), trials), (Replicate(),) * len(call.tensors)
        )
    ]
    for layout in layouts[:MAX_LAYOUTS]:
        outputs = _try_layout(call, layout, trials)
        if outputs is not None:
            found.append(Strategy(outputs, layout))
    return Findings(tuple(sorted(found, key=_preference)), source, tuple(notes))


def _preference(strategy: Strategy) -> tuple[bool, bool, int, list[int]]:
    """Replicated first, then sharded inputs, then pending ones; fewer whole inputs first, then by dim."""
    sharded = any(isinstance(p, Shard) for p in strategy.inputs)
    pending = any(isinstance(p, Partial) for p in strategy.inputs)
    whole = sum(isinstance(p, Replicate) for p in strategy.inputs)
    return pending, sharded, whole, [p.dim for p in strategy.inputs if isinstance(p, Shard)]


def make_runnable(call: OperatorCall) -> OperatorCall:
    """The call with its tensors in host memory; on their own device if the operator does not run there."""
    if all(t.device.type == "cpu" for t in call.tensors):
        return call
    host = replace(call, tensors=tuple(t.cpu() for t in call.tensors))
    try:
        draw_trials(host)
    except RandomNumbersError:
        raise
    except ValueError:
        return limit_integers(call)
    return host


def limit_integers(call: OperatorCall) -> OperatorCall:
    """The call with integers that are valid indices also where any dim is split: less than the shortest part."""
    kept = boundary_tensors(call)
    numbers = [i for i, t in enumerate(call.tensors) if i not in kept and _is_integer(t)]
    lengths = {n for i, t in enumerate(call.tensors) if i not in kept for n in t.shape if n > 1}
    limit = min((min(s) for n in lengths for c in DEVICE_CUTS if (s := part_sizes(n, *c))), default=1)
    if numbers and limit < 2:
        raise ValueError(
            f"{call.op} does not run in host memory and takes integers, which may be indices: they must be valid in "
            f"all parts of each dim, but a dim of length {min(lengths, default=0)} has parts of length 1; pass sample "
            "arguments of lengths 6 and more, or write a rule"
        )
    return replace(call, tensors=tuple(t % limit if i in numbers else t for i, t in enumerate(call.tensors)))


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def draw_trials(call: OperatorCall) -> tuple[SampleSource, list[Trial]]:
    """Inputs and whole results of several trials, drawn by the first method with which the operator runs."""
    problem: Exception | None = None
    for source in SOURCES:
        try:
            first = _run_trial(call, source, 0)
        except RandomNumbersError as error:
            if not source.random_integers or not _has_integers(call):
                raise
            problem = problem or error  # numbers that mean nothing together may make it read memory that was never set
            continue
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError) as error:
            problem = error if problem is None or (not source.double and source.random_integers) else problem
            continue
        whole = all(isinstance(r, Tensor) and (r.is_floating_point() or r.is_complex()) for r in first.results)
        count = (TRIALS if whole else TRIALS_OF_INTEGERS) if source.random_floats else 1
        try:
            return source, [first, *(_run_trial(call, source, n) for n in range(1, count))]
        except (RuntimeError, ValueError, IndexError) as error:
            problem = problem or error
    shapes = ", ".join(str(tuple(t.shape)) for t in call.tensors)
    raise ValueError(
        f"{call.op} does not run on tensors of shapes {shapes}: {problem}; pass sample arguments that it accepts"
    ) from problem


def _has_integers(call: OperatorCall) -> bool:
    return any(not (t.is_floating_point() or t.is_complex()) for t in call.tensors)


def _run_trial(call: OperatorCall, source: SampleSource, number: int) -> Trial:
    generator = torch.Generator().manual_seed(number)
    kept, as_given = boundary_tensors(call), replace(source, random_integers=False)
    inputs = tuple(
        draw_sample(t, as_given if i in kept else source, number, generator) for i, t in enumerate(call.tensors)
    )
    results, again = run_call(call, inputs), run_call(call, inputs)
    if not all(find_recombinations([b], a, None) for a, b in zip(results, again, strict=True)):
        raise RandomNumbersError(
            f"{call.op} returns different results for equal inputs: it draws random numbers, so no rule can be found"
        )
    return Trial(inputs, tuple(results), number)


def _candidate_layouts(call: OperatorCall) -> Iterator[InputPlacements]:
    """Layouts of the inputs: dims of one length split together, others whole or pending; tensors of a list alike."""
    groups = list(_length_groups(call))
    lengths = sorted({n for t in call.tensors for n in t.shape if n > 1})
    seen: set[InputPlacements] = {(Replicate(),) * len(call.tensors)}
    for length in [*lengths, 0]:
        for chosen in product(*(_placement_options([call.tensors[i] for i in g], length) for g in groups)):
            layout: list[Placement] = [Replicate()] * len(call.tensors)
            for group, placement in zip(groups, chosen, strict=True):
                for index in group:
                    layout[index] = placement
            if tuple(layout) not in seen:
                seen.add(tuple(layout))
                yield tuple(layout)


def _length_groups(call: OperatorCall) -> Iterator[list[int]]:
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, Slot):
            yield [value.index]
        elif isinstance(value, list | tuple) and (listed := [v.index for v in value if isinstance(v, Slot)]):
            yield listed


def _placement_options(tensors: Sequence[Tensor], length: int) -> Iterator[Placement]:
    yield Replicate()
    for dim in range(min(t.ndim for t in tensors)):
        if all(t.shape[dim] == length for t in tensors):
            yield Shard(dim)
    if all(t.is_floating_point() or t.is_complex() for t in tensors):
        yield Partial("sum")


def _try_layout(
    call: OperatorCall, layout: InputPlacements, trials: Sequence[Trial]
) -> tuple[Placement | None, ...] | None:
    """The outputs' placements if the layout reproduces the whole result in every trial, else None."""
    for unit in (1, UNIT):
        try:
            return _output_placements(call, layout, trials, unit)
        except ValueError:
            return None
        except (RuntimeError, IndexError, TypeError, NotImplementedError, AssertionError):
            continue  # the operator refuses such parts
    return None


def _output_placements(
    call: OperatorCall, layout: InputPlacements, trials: Sequence[Trial], unit: int = 1
) -> tuple[Placement | None, ...]:
    """Raises ValueError if some result is not made up by the parts' results."""
    ways: list[set[Placement | None]] | None = None
    length = next((t.shape[p.dim] for t, p in zip(call.tensors, layout, strict=True) if isinstance(p, Shard)), None)
    cuts = CUTS if call.tensors[0].device.type == "cpu" else DEVICE_CUTS
    for trial, (parts, uneven) in product(trials, cuts):
        sizes = (1,) * parts if length is None else part_sizes(length, parts, uneven, unit)
        if sizes is None:
            continue
        found = _find_output_placements(call, layout, trial, sizes, length is not None)
        ways = found if ways is None else [a & b for a, b in zip(ways, found, strict=True)]
        _check_output_placements(call, layout, ways)
    if ways is None:
        raise ValueError("the dim is too short to be cut in parts")
    results = len(ways) - len(written_tensors(call))
    return tuple(_best_placement(w) for w in ways[:results])


def _find_output_placements(
    call: OperatorCall, layout: InputPlacements, trial: Trial, sizes: Sequence[int], sharded: bool
) -> list[set[Placement | None]]:
    generator = torch.Generator().manual_seed(trial.seed)
    held = [cut_in_parts(t, p, sizes, generator) for t, p in zip(trial.inputs, layout, strict=True)]
    parts = [run_call(call, [h[r] for h in held if h is not None]) for r in range(len(sizes))]
    if any(len(p) != len(trial.results) for p in parts):
        raise ValueError("the parts return a different number of results")
    return [
        find_recombinations([p[k] for p in parts], whole, sizes if sharded else None)
        for k, whole in enumerate(trial.results)
    ]


def _check_output_placements(
    call: OperatorCall, layout: InputPlacements, ways: Sequence[set[Placement | None]]
) -> None:
    """Every result needs a placement; a tensor that was written to must keep its layout."""
    written = written_tensors(call)
    for way, index in zip(ways[len(ways) - len(written) :], written, strict=True):
        if layout[index] not in way:
            raise ValueError("a tensor that is written to would change its layout")
    if not all(ways):
        raise ValueError("the parts do not make up the whole result")


def _best_placement(ways: set[Placement | None]) -> Placement | None:
    """Whole before sharded before pending: what needs the least to be used on."""
    ranks = {Replicate: 0, Shard: 1, Partial: 2}
    order = {"sum": 0, "max": 1, "min": 2, "product": 3}
    placed = [w for w in ways if w is not None]
    return min(
        placed, key=lambda p: (ranks[type(p)], getattr(p, "dim", 0), order.get(getattr(p, "op", ""), 0)), default=None
    )


def line_up_placements(call: OperatorCall, placements: Sequence[Any]) -> list[Any]:
    """Placements of tensors lined up with the call's arguments: lists for lists, None for non-tensors."""

    def place(value: Any) -> Any:
        if isinstance(value, Slot):
            return placements[value.index]
        if isinstance(value, list | tuple) and any(isinstance(v, Slot) for v in value):
            return [place(v) for v in value]
        return None

    return [place(v) for v in (*call.args, *call.kwargs.values())]
