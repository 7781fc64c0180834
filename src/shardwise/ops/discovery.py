"""Which strategies does an operator have? Tried out on inputs cut in parts, on one process, without communication.

1. Draw inputs of the sample's shapes; compute the whole result.
2. For each layout of the inputs on one axis (whole; dims of equal length cut alike; addends of a sum) compute
   part by part, for two and three parts, even and uneven: part r is what rank r of one mesh axis would compute.
3. See which recombination of each output (whole, concatenated, reduced) is the whole result, every time.
4. What is left is tried on edge values as well (`EDGE_VALUES`): other scales, zeros, ties, sorted and repeated rows,
   single large, infinite and undefined values, other values in one part than in the next, rows that are in both, equal
   tensors, integers at their limits, parts of length 0. Random normal numbers alone would accept a clip at 10 as
   linear. What the operator refuses of these is named in the notes of the result; what no trial tells is `UNDECIDED`.
5. Some operators take only lengths that fill whole words of memory: parts that one refuses are tried in units of 8.

All this happens in host memory, where an index out of range is an error. On a GPU it would end the process's use of it;
operators that run nowhere else are tried with integers that are valid in every part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor

from shardwise._progress import Progress, show_progress
from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.geometry.placements import chunk_sizes
from shardwise.ops.rule import OperatorCall, Slot, Strategy, written_slots

InputPlacements = tuple[Placement, ...]
INF, NAN = float("inf"), float("nan")
REDUCTIONS = ("sum", "max", "min", "product")
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
FINE = {torch.float64: 2e-13, torch.complex128: 2e-13}  # of the inputs: how sums of them that cancel out are rounded
COARSE = 3e-2


@dataclass(frozen=True, slots=True)
class SampleSource:
    """How inputs are drawn: floats and integers at random or as in the sample, in double precision or as they are."""

    random_floats: bool = True
    random_integers: bool = True
    double: bool = True


SOURCES = (
    SampleSource(),
    SampleSource(double=False),
    SampleSource(random_integers=False),
    SampleSource(random_integers=False, double=False),
    SampleSource(random_floats=False, random_integers=False),
    SampleSource(random_floats=False, random_integers=False, double=False),
)


BOUNDARY_NAMES = ("off", "cu_", "boundaries", "pivots")  # parts of names; LAPACK does not check pivots


def is_boundary_name(name: str) -> bool:
    """Whether an argument of this name has the ends of groups of rows, or pivots: they mean nothing in another order.

    >>> is_boundary_name("offs"), is_boundary_name("LU_pivots"), is_boundary_name("index")
    (True, True, False)
    """
    return any(part in name for part in BOUNDARY_NAMES)


def boundary_tensors(call: OperatorCall) -> set[int]:
    """The numbers of the tensors that are boundaries."""
    names = [a.name for a in call.op._schema.arguments]  # type: ignore[attr-defined]  # operators have one
    by_name = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    return {v.index for name, v in by_name if isinstance(v, Slot) and is_boundary_name(name)}


def draw_sample(template: Tensor, source: SampleSource, trial: int, generator: torch.Generator) -> Tensor:
    """A tensor of a sample's shape: signed, positive, sparse or dense by turns; integers are some of the sample's."""
    dtype = widen_dtype(template.dtype) if source.double else template.dtype
    number = template.is_floating_point() or template.is_complex()
    if not (source.random_floats if number else source.random_integers):
        return template.detach().to(dtype).clone()
    if number:
        values = torch.randn(template.shape, dtype=torch.float64, generator=generator, device="cpu")
        return (values if trial % 2 == 0 else values.abs() + 0.1).to(template.device, dtype)
    if template.dtype == torch.bool:
        density = (0.5, 0.1, 0.9, 0.02, 0.98)[trial % 5]
        return (torch.rand(template.shape, generator=generator, dtype=torch.float32, device="cpu") < density).to(
            template.device
        )
    if template.numel() == 0:
        return template.clone()
    chosen = torch.randint(template.numel(), (template.numel(),), generator=generator, device="cpu")
    return template.detach().reshape(-1)[chosen.to(template.device)].reshape(template.shape)


def _spike(shape: Sequence[int], height: float, generator: torch.Generator) -> Tensor:
    """Normal numbers, one of which is replaced."""
    values = torch.randn(tuple(shape), dtype=torch.float64, generator=generator, device="cpu")
    if values.numel():
        values.view(-1)[torch.randint(values.numel(), (1,), generator=generator, device="cpu")] = height
    return values


def _pick(shape: Sequence[int], among: Sequence[float], generator: torch.Generator) -> Tensor:
    """Each element one of a few values."""
    chosen = torch.randint(len(among), tuple(shape), generator=generator, device="cpu")
    return torch.tensor(list(among), dtype=torch.float64, device="cpu")[chosen]


def _ramp(shape: Sequence[int]) -> Tensor:
    """All elements in ascending order, halves of integers around 0."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, dtype=torch.float64, device="cpu") - count // 2) / 2).reshape(tuple(shape))


def _step(shape: Sequence[int], dim: int) -> Tensor:
    """0 in the first of two parts of a dim, -1000 in the other."""
    if not shape:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    later = torch.arange(shape[dim], device="cpu") >= _boundary(shape[dim])
    along = [-1 if d == dim % len(shape) else 1 for d in range(len(shape))]
    return torch.where(later, -1000.0, 0.0).to(torch.float64).reshape(along).expand(tuple(shape)).clone()


def _boundary(length: int) -> int:
    """Where the first of two uneven parts ends."""
    return max(1, length // 3)


def _join(first: Tensor, rest: Tensor, dim: int) -> Tensor:
    """One tensor's values in the first of two parts of a dim, another's in the other."""
    if not first.ndim:
        return rest
    at, length = _boundary(first.shape[dim]), first.shape[dim]
    return torch.cat([first.narrow(dim, 0, min(at, length)), rest.narrow(dim, min(at, length), length - at)], dim)


def _repeat_at_boundary(values: Tensor, dim: int) -> Tensor:
    """The first row of the second part is the last row of the first one."""
    if values.ndim and values.shape[dim] > 1:
        at = _boundary(values.shape[dim])
        values.select(dim, at).copy_(values.select(dim, at - 1))
    return values


def _scaled(scale: float) -> Callable[[Sequence[int], torch.Generator], Tensor]:
    return lambda shape, generator: (
        scale * torch.randn(tuple(shape), dtype=torch.float64, generator=generator, device="cpu")
    )


def _joined_edges(where: str, dim: int) -> dict[str, Callable[[Sequence[int], torch.Generator], Tensor]]:
    """What is true of one part and not of the other, or of none of them and yet of the whole."""
    normal, size = _scaled(1.0), _scaled(3.0)
    return {
        f"tiny values in the first part of the {where} dim": lambda s, g: _join(
            1e-12 * normal(s, g), normal(s, g), dim
        ),
        f"zeros in the first part of the {where} dim": lambda s, g: _join(0 * normal(s, g), normal(s, g), dim),
        f"large values in the first part of the {where} dim": lambda s, g: _join(1e9 * normal(s, g), normal(s, g), dim),
        f"values that descend in the first part of the {where} dim": lambda s, g: _join(-_ramp(s), _ramp(s), dim),
        f"negative values in the first part of the {where} dim": lambda s, g: _join(
            -size(s, g).abs() - 0.1, size(s, g).abs() + 0.1, dim
        ),
        f"a row that is in both parts of the {where} dim": lambda s, g: _repeat_at_boundary(normal(s, g), dim),
    }


EDGE_SCALES = (1e-12, 1e-7, 1e-3, 30.0, 1e3, 1e5)
EDGE_VALUES: dict[str, Callable[[Sequence[int], torch.Generator], Tensor]] = {
    **{f"values of about {scale:g}": _scaled(scale) for scale in EDGE_SCALES},
    f"values of about {1e12:g}": _scaled(1e12),
    "negative values": lambda s, g: -_scaled(3.0)(s, g).abs() - 0.1,
    "zeros": lambda s, g: torch.zeros(tuple(s), dtype=torch.float64, device="cpu"),
    "equal values": lambda s, g: torch.full(tuple(s), 2.0, dtype=torch.float64, device="cpu"),
    "few different values": lambda s, g: _pick(s, (-2.0, -1.0, 0.0, 1.0, 2.0), g),
    "ascending values": lambda s, g: _ramp(s),
    "descending values": lambda s, g: -_ramp(s),
    "values that ascend in each part of the first dim": lambda s, g: _ramp(s) + _step(s, 0),
    "values that ascend in each part of the last dim": lambda s, g: _ramp(s) + _step(s, -1),
    "equal values in each part of the first dim": lambda s, g: _step(s, 0),
    "equal values in each part of the last dim": lambda s, g: _step(s, -1),
    **_joined_edges("first", 0),
    **_joined_edges("last", -1),
    **{f"zeros and ones, {times}": lambda s, g: _pick(s, (0.0, 1.0), g) for times in ("once", "twice", "again")},
    "equal tensors": _scaled(1.0),
    "tensors that differ in one element": _scaled(1.0),
    "repeated rows": lambda s, g: _pick((*s[1:],), (-3.0, -0.5, 0.0, 0.5, 7.0), g).expand(tuple(s)).clone(),
    "one large value": lambda s, g: _spike(s, 1e6, g),
    "one value of 1 among tiny ones": lambda s, g: torch.where((x := _spike(s, 1e6, g)) == 1e6, 1.0, 1e-5 * x),
    "one large negative value": lambda s, g: _spike(s, -1e6, g),
    "a small sum of large values": lambda s, g: _pick(s, (1e5, -1e5, 0.5), g),
    "zeros of both signs": lambda s, g: _pick(s, (0.0, -0.0, 1.0), g),
    "an infinity": lambda s, g: _spike(s, INF, g),
    "a negative infinity": lambda s, g: _spike(s, -INF, g),
    "a nan": lambda s, g: _spike(s, NAN, g),
    "several infinities and nans": lambda s, g: _pick(s, (INF, -INF, NAN, 0.0, 1.0, -1.0, 2.0, 3.0), g),
}
OWN_DTYPE = f"values of about {1e5:g}"  # drawn once more in the dtype of the sample
FINITE_EDGES = tuple(f"values of about {scale:g}" for scale in (*EDGE_SCALES, 1e12))  # what gradients are compared on
INFINITE_EDGES = ("an infinity", "a negative infinity", "a nan", "several infinities and nans")
EQUAL_TENSORS = ("equal tensors", "tensors that differ in one element")
INTEGER_LIMITS = ("integers at the limits of their dtype", "one largest integer", "one smallest integer")
UNBOUNDED_EDGES = (f"values of about {1e12:g}", *INFINITE_EDGES, *INTEGER_LIMITS)
HUGE_EDGES = tuple(name for name in EDGE_VALUES if name.startswith("large values"))
INTEGER_EDGES = (
    "integers up to 1000",
    "one large integer",
    "one negative integer",
    "negative integers in the first part of the first dim",
    "negative integers in the first part of the last dim",
    *INTEGER_LIMITS,
)
SMALL_CAUSES = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError, OverflowError)


def draw_edge(template: Tensor, name: str, source: SampleSource, generator: torch.Generator) -> Tensor:
    """A tensor of edge values; booleans are mostly alike, integers some of the sample's unless the name says other."""
    if template.is_floating_point() or template.is_complex():
        dtype = widen_dtype(template.dtype) if source.double else template.dtype
        if name in INTEGER_EDGES:
            return draw_sample(template, source, 0, generator)
        values = EDGE_VALUES[name](template.shape, generator)
        if dtype.is_complex:
            values = torch.complex(values, EDGE_VALUES[name](template.shape, generator))
        return values.to(template.device, dtype)
    if template.dtype == torch.bool:
        choices: dict[str, tuple[float, ...]] = {
            "zeros": (0.0,),
            "equal values": (1.0,),
            "ascending values": (0.0, 1.0),
        }
        if name.startswith("one large"):  # a single one that differs
            base = torch.full(tuple(template.shape), float("negative" in name), dtype=torch.float64, device="cpu")
            spot = torch.randint(max(1, base.numel()), (1,), generator=generator, device="cpu")
            return (
                (base.view(-1).index_fill(0, spot, 1.0 - float("negative" in name)) if base.numel() else base)
                .reshape(template.shape)
                .to(template.device, torch.bool)
            )
        return _pick(template.shape, choices.get(name, (0.0, 1.0)), generator).to(template.device, torch.bool)
    if name in INTEGER_EDGES:
        return _draw_integers(template, name, generator)
    drawn = draw_sample(template, source, 0, generator)
    if name in ("zeros", "equal values") and drawn.numel():
        return torch.full_like(drawn, int(drawn.reshape(-1)[0]))
    if name.startswith(("ascending", "descending")):
        return drawn.reshape(-1).sort(descending=name.startswith("desc")).values.reshape(template.shape)
    return drawn


def _draw_integers(template: Tensor, name: str, generator: torch.Generator) -> Tensor:
    """Integers that are not indices: small ones, ones that stand out, and the limits of the dtype."""
    shape, limits = tuple(template.shape), torch.iinfo(template.dtype)
    low, high = max(limits.min, -1000), min(limits.max, 1000)
    alone = {
        "one large integer": high,
        "one negative integer": max(limits.min, -3),
        "one largest integer": limits.max,
        "one smallest integer": limits.min,
    }
    if name == INTEGER_LIMITS[0]:
        known = torch.tensor([limits.min, limits.max, 0, 1, max(limits.min, -1)], dtype=template.dtype, device="cpu")
        return known[torch.randint(5, shape, generator=generator, device="cpu")].to(template.device)
    if name in alone:
        others = torch.full(shape, 0 if alone[name] > 0 else 1, dtype=template.dtype, device="cpu")
        return torch.where(_spike(shape, 1e6, generator) == 1e6, alone[name], others).to(template)
    drawn = torch.randint(low, high + 1, shape, generator=generator, device="cpu")
    if name.startswith("negative"):
        drawn = _join(low - drawn.abs() % 7, drawn.abs() + 1, 0 if "first dim" in name else -1).clamp(limits.min)
    return drawn.to(template)


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def part_sizes(length: int, parts: int, uneven: bool, unit: int = 1) -> tuple[int, ...] | None:
    """Lengths of the parts of a dim, all at least 1 and multiples of a unit; None if it is too short.

    >>> part_sizes(8, 3, uneven=True), part_sizes(8, 3, uneven=False), part_sizes(2, 3, uneven=False)
    ((1, 5, 2), (3, 3, 2), None)
    >>> part_sizes(32, 2, uneven=True, unit=8)
    (8, 24)
    """
    if unit > 1:
        units = part_sizes(length // unit, parts, uneven) if length % unit == 0 else None
        return None if units is None else tuple(n * unit for n in units)
    if not uneven:
        found = tuple(chunk_sizes(length, parts))
    elif parts == 2:
        found = (max(1, length // 3), length - max(1, length // 3))
    else:
        last = max(1, length // 4)
        found = (*[1] * (parts - 2), length - last - (parts - 2), last)
    return found if min(found) > 0 else None


def cut_in_parts(
    value: Tensor, placement: Placement | None, sizes: Sequence[int], generator: torch.Generator, trial: Trial
) -> list[Tensor] | None:
    """What each part holds of a tensor: slices, the whole, or addends that make it up; None if it has no such dim."""
    parts = len(sizes)
    if isinstance(placement, Shard):
        fits = value.shape[placement.dim] == sum(sizes)
        return list(torch.split_with_sizes(value, list(sizes), placement.dim)) if fits else None
    if isinstance(placement, Partial):
        return draw_addends(value, placement.op, parts, generator, trial.addends, trial.spread)
    return [value] * parts


def draw_addends(
    value: Tensor, op: str, parts: int, generator: torch.Generator, scale: float = 1.0, spread: bool = False
) -> list[Tensor]:
    """Random tensors of some scale that reduce to a value; `spread`: each of them is infinite where it is.

    >>> made = draw_addends(torch.tensor([3.0, -1.0]), "max", 3, torch.Generator().manual_seed(0))
    >>> torch.stack(made).amax(0).tolist()
    [3.0, -1.0]
    """
    noise = [
        torch.rand(value.shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5 for _ in range(parts)
    ]
    noise = [n * scale for n in noise] if op in ("sum", "avg") else noise
    if not (value.is_floating_point() or value.is_complex()):
        noise = [(n * 4).round() for n in noise]
    other = [n.to(value.device, value.dtype) for n in noise]
    if op in ("max", "min"):
        sign = 1 if op == "max" else -1
        owner = torch.randint(parts, value.shape, generator=generator, device="cpu").to(value.device)
        return [torch.where(owner == r, value, value - sign * n) for r, n in enumerate(other)]
    rest = other[:-1]
    if op == "product":
        return [*rest, value / torch.stack(rest).prod(0)] if rest else [value]
    times = parts if op == "avg" else 1
    if rest and spread and value.is_floating_point():  # infinities of both signs make a nan, of one sign an infinity
        rest = [torch.where(value.isnan(), INF, torch.where(value.isinf(), value, n)) for n in rest]
        held = value * times - sum(rest, torch.zeros_like(value))
        return [*rest, torch.where(value.isnan(), -INF, torch.where(value.isinf(), value, held))]
    return [*rest, value * times - sum(rest, torch.zeros_like(value))]


def run_call(call: OperatorCall, values: Sequence[Tensor]) -> list[Any]:
    """The results of a call as a list, and after them the tensors that it wrote to; inputs are left as they are."""
    written, out = written_tensors(call), written_tensors(call, only_out=True)
    own = [v.new_empty(0) if i in out else v.clone() if i in written else v for i, v in enumerate(values)]
    args, kwargs = call.fill_slots(own)
    result = call.op(*args, **kwargs)
    flat = list(result) if isinstance(result, list | tuple) else [] if result is None else [result]
    return flat + [own[i] for i in written]


def written_tensors(call: OperatorCall, only_out: bool = False) -> list[int]:
    """The numbers of the tensors that a call writes to, in order; `only_out`: those whose values it does not read."""
    names = written_slots(call.op)
    if not names:
        return []
    listed = call.op._schema.arguments  # type: ignore[attr-defined]  # operators have one
    by_name = dict(zip([a.name for a in listed], call.args, strict=False)) | dict(call.kwargs)
    values = [by_name.get(a.name) for a in listed if a.name in names and (a.is_out or not only_out)]
    return sorted(s.index for v in values for s in (v if isinstance(v, list | tuple) else [v]) if isinstance(s, Slot))


def find_recombinations(
    parts: Sequence[Any], whole: Any, sizes: Sequence[int] | None, scale: float | None = None
) -> set[Placement | None]:
    """The placements under which the parts' results are the whole one; {None} for equal values that are not tensors."""
    if not isinstance(whole, Tensor):
        return {None} if all(p == whole for p in parts) else set()
    if any(not isinstance(p, Tensor) or p.dtype != whole.dtype or p.ndim != whole.ndim for p in parts):
        return set()
    if scale is not None and (whole.is_floating_point() or whole.is_complex()):
        scale = max(scale, *(largest_size(p) for p in parts))  # sums of large parts that cancel out
    return {p for p in _possible_placements(whole) if is_close(_recombine(parts, p, sizes, scale), whole, scale)}


def largest_size(values: Tensor) -> float:
    """The largest finite magnitude, 0 if there is none."""
    size = torch.nan_to_num(values.detach().abs(), 0.0, 0.0, 0.0)
    return float(size.max()) if size.numel() else 0.0


def _possible_placements(whole: Tensor) -> Iterator[Placement]:
    yield Replicate()
    yield from (Shard(d) for d in range(whole.ndim))
    plain = whole.dtype != torch.bool
    yield from (Partial(op) for op in REDUCTIONS if (plain or op in ("max", "min")))


def _recombine(
    parts: Sequence[Tensor], placement: Placement, sizes: Sequence[int] | None, scale: float | None
) -> Tensor | None:
    """The whole that parts make under a placement, or None if they do not fit it."""
    if isinstance(placement, Shard):
        fits = sizes is not None and [p.shape[placement.dim] for p in parts] == list(sizes)
        rest = {(*p.shape[: placement.dim], *p.shape[placement.dim + 1 :]) for p in parts}
        return torch.cat(list(parts), placement.dim) if fits and len(rest) == 1 else None
    if any(p.shape != parts[0].shape for p in parts):
        return None
    if isinstance(placement, Replicate):
        return parts[0] if all(is_close(p, parts[0], scale) for p in parts[1:]) else None
    return reduce_parts(parts, placement.op)


def reduce_parts(parts: Sequence[Tensor], op: str) -> Tensor | None:
    stacked = torch.stack(list(parts))
    if stacked.is_complex() and op in ("max", "min"):
        return None
    if op == "avg":
        return stacked.sum(0, dtype=stacked.dtype) / len(parts)
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "product":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def is_close(one: Tensor | None, other: Tensor, scale: float | None = None) -> bool:
    """Whether two tensors agree up to rounding; not-a-number agrees with itself.

    `scale` is the largest finite input, where that is not about 1: sums of such numbers round in its proportion.

    >>> is_close(torch.tensor([0.1]), torch.tensor([0.0])), is_close(torch.tensor([0.1]), torch.tensor([0.0]), 1e5)
    (False, True)
    """
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    limit = TOLERANCE.get(other.dtype, COARSE)
    slack = limit
    if scale is not None:
        slack = max(
            limit * largest_size(other), FINE.get(other.dtype, limit) * scale, 64 * torch.finfo(other.dtype).eps
        )
    return torch.allclose(one, other, rtol=limit, atol=slack, equal_nan=True)


CUTS = ((2, True), (2, False), (3, True))
DEVICE_CUTS = ((2, True), (2, False), (3, False))  # of a length of 6 every part has 2 or more
TRIALS, TRIALS_OF_INTEGERS = 3, 10
MAX_LAYOUTS = 4096
UNIT = 8  # elements of 2 bytes in the 16 bytes at which kernels want rows to begin


# What trials cannot tell: said by what discovery and checks report.
UNDECIDED = "what differs by less than 1e-9 of the largest value, and values or lengths of other kinds than were tried"


@dataclass(frozen=True, slots=True)
class Findings:
    """The strategies that held in every trial, how the inputs were drawn, and what limits the answer."""

    strategies: tuple[Strategy, ...]
    source: SampleSource
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs, their whole results, and the seed of what else is drawn; of edge values also their name and scale."""

    inputs: tuple[Tensor, ...]
    results: tuple[Any, ...]
    seed: int
    name: str = ""
    scale: float | None = None
    addends: float = 1.0  # how large the addends of pending inputs are
    spread: bool = False  # and whether each of them is infinite where their sum is
    infinite: int | None = None  # the only tensor that has values that are not finite
    rounds: bool = False  # in few digits: results that are not floats may differ by a tie

    def fits(self, layout: InputPlacements, uneven: bool) -> bool:
        """Whether the values tell anything about a layout.

        Edge values are cut unevenly only. A whole factor that is infinite makes nan of addends of both signs, in every
        linear operator: such values are tried where they are pending themselves.
        """
        pending = [i for i, p in enumerate(layout) if isinstance(p, Partial)]
        if self.infinite is not None and pending and self.infinite not in pending:
            return False
        return self.scale is None or uneven

    def recombinations(self, number: int, parts: Sequence[Any], sizes: Sequence[int] | None) -> set[Placement | None]:
        """The placements under which parts of a result make up the whole one."""
        whole = self.results[number]
        if self.rounds and isinstance(whole, Tensor) and not (whole.is_floating_point() or whole.is_complex()):
            return set(_possible_placements(whole))
        return find_recombinations(parts, whole, sizes, self.scale)


class RandomNumbersError(ValueError):
    """An operator draws random numbers, so that its results cannot be compared."""


def find_strategies(call: OperatorCall, progress: Progress = False) -> Findings:
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
    replicated: InputPlacements = (Replicate(),) * len(call.tensors)
    found = [Strategy(_output_placements(call, replicated, trials), replicated)]
    edges, refused = draw_edge_trials(call, source) if layouts else ([], [])
    tried = layouts[:MAX_LAYOUTS]
    with show_progress(progress, f"trying {call.op}", len(tried), unit="layouts") as meter:
        for layout in tried:
            outputs = _try_layout(call, layout, [*trials, *edges])
            if outputs is not None:
                found.append(Strategy(outputs, layout))
            meter.advance(1)
    if refused and len(found) > 1:
        notes.append(f"the operator refuses, so that these were not tried: {', '.join(refused)}")
    empty = {_try_empty_part(call, s, [*trials, *edges]) for s in found if any(isinstance(p, Shard) for p in s.inputs)}
    notes += [note for note in (REFUSES_EMPTY, DIFFERS_ON_EMPTY) if note in empty]
    return Findings(tuple(sorted(found, key=_preference)), source, tuple(notes))


REFUSES_EMPTY = "the operator refuses parts of length 0: give every rank a part of the dims that are split"
DIFFERS_ON_EMPTY = "a part of length 0 changes the result: give every rank a part of the dims that are split"


def _try_empty_part(call: OperatorCall, strategy: Strategy, trials: Sequence[Trial]) -> str | None:
    """What to note of a strategy where one part has nothing of the dim that is split."""
    layout = tuple(p or Replicate() for p in strategy.inputs)
    length = next(t.shape[p.dim] for t, p in zip(call.tensors, layout, strict=True) if isinstance(p, Shard))
    for trial in trials:
        if not trial.fits(layout, uneven=True):
            continue
        try:
            ways = _find_output_placements(call, layout, trial, (0, length), True)
        except SMALL_CAUSES:
            return REFUSES_EMPTY
        if any(p not in way for p, way in zip(strategy.outputs, ways, strict=False)):
            return DIFFERS_ON_EMPTY
    return None


def draw_edge_trials(call: OperatorCall, source: SampleSource) -> tuple[list[Trial], list[str]]:
    """Trials on edge values, and the names of those that the operator refuses."""
    trials: list[Trial] = []
    refused: list[str] = []
    if not source.random_floats:  # it takes the sample's own values only, so at most other scales of them
        for scale in (1e-3, 1e3):
            scaled = replace(call, tensors=tuple(t * scale if t.is_floating_point() else t for t in call.tensors))
            trials += _edge_trial(scaled, source, "the sample's own values", 1) or []
        return trials, [*EDGE_VALUES]
    floats = [i for i, t in enumerate(call.tensors) if t.is_floating_point() or t.is_complex()]
    iterates = "linalg" in str(call.op)  # LAPACK does not look: some of its iterations never end on a nan
    # beside floats, integers are mostly indices, and not every kernel looks whether they are in range
    limit = 0.005  # seconds; an operator that counts up to a value would not come to an end with large ones
    for seed, name in enumerate([*EDGE_VALUES, *(() if floats else INTEGER_EDGES)], 100):
        counts = limit < 0
        if (
            (counts and name in HUGE_EDGES)
            or ((counts or iterates) and name in UNBOUNDED_EDGES)
            or (
                # indices, or counts: results of their size would not fit in memory
                name in INTEGER_LIMITS and (INTEGER_EDGES[0] in refused or _sizes_follow_values(trials))
            )
        ):
            refused.append(name)
            continue
        began = perf_counter()
        for infinite in floats if name in INFINITE_EDGES else [None]:
            made = _edge_trial(call, source, name, seed, infinite)
            refused += [name] * (made is None and name not in refused)
            trials += made or []
        if name not in UNBOUNDED_EDGES and perf_counter() - began > limit:
            compared = [trial for trial in trials if trial.name in (name, FINITE_EDGES[0])]
            if len(compared) == 2 and _takes_longer(call, compared[0], compared[1], limit):
                limit = -1.0
    if limit < 0:
        trials = [replace(t, addends=min(t.addends, max(1.0, t.scale or 1.0))) for t in trials]
    if source.double and floats:
        own = _edge_trial(call, replace(source, double=False), OWN_DTYPE, 99)
        trials += [replace(t, rounds=True) for t in own or []]
    return trials, refused


def _takes_longer(call: OperatorCall, small: Trial, large: Trial, limit: float) -> bool:
    """Whether an operator's work follows from its values: ten times as much in each of several runs.

    Seconds of this thread are compared, not of the clock: what else the machine does decides nothing.
    """
    usual = max(limit / 4, 10 * min(_seconds(call, small) for _ in range(3)))
    return all(_seconds(call, large) > usual for _ in range(5))


def _seconds(call: OperatorCall, trial: Trial) -> float:
    began = thread_time()
    run_call(call, trial.inputs)
    return thread_time() - began


def _sizes_follow_values(trials: Sequence[Trial]) -> bool:
    shapes = [[r.shape for r in t.results if isinstance(r, Tensor)] for t in trials]
    return any(s != shapes[0] for s in shapes)


def _edge_trial(
    call: OperatorCall, source: SampleSource, name: str, seed: int, infinite: int | None = None
) -> list[Trial] | None:
    """One trial, none if its finite values overflow, or None if the operator refuses them."""
    generator = torch.Generator().manual_seed(seed)
    kept = boundary_tensors(call)
    given = name == "the sample's own values"
    drawn = tuple(
        t.detach().to(widen_dtype(t.dtype) if source.double else t.dtype).clone()
        if given or i in kept
        else draw_sample(t, source, seed, generator)
        if infinite not in (None, i)
        else draw_edge(t, name, source, generator)
        for i, t in enumerate(call.tensors)
    )
    inputs = _make_equal(drawn, name) if name in EQUAL_TENSORS else drawn
    if inputs is None:
        return []
    try:
        results, again = run_call(call, inputs), run_call(call, inputs)
    except SMALL_CAUSES:
        return None
    if not all(find_recombinations([b], a, None) for a, b in zip(results, again, strict=True)):
        return None
    if "linalg" in str(call.op) and not _is_stable(call, inputs, results):
        return []
    finite = [t[t.isfinite()].abs() for t in inputs if t.is_floating_point() or t.is_complex()]
    scale = max((float(t.max()) for t in finite if t.numel()), default=1.0)
    known = all(bool(r.isfinite().all()) for r in results if isinstance(r, Tensor))
    if not known and (name in FINITE_EDGES or given):
        return []
    addends = (scale, 1.0, 1e6 * max(1.0, scale))[seed % 3] if source.double else 1.0
    spread = name in ("an infinity", "several infinities and nans")
    rounds = "linalg" in str(call.op)  # ranks of matrices
    return [Trial(inputs, tuple(results), seed, name, scale, addends, spread, infinite, rounds)]


def _is_stable(call: OperatorCall, inputs: Sequence[Tensor], results: Sequence[Any]) -> bool:
    """Whether values nearby give results nearby: what LAPACK returns for singular matrices depends on rounding."""
    nearby = [
        t + 1e-12 * _scaled(max(largest_size(t), 1.0))(t.shape, torch.Generator().manual_seed(n)).to(t)
        if t.is_floating_point() or t.is_complex()
        else t
        for n, t in enumerate(inputs)
    ]
    try:
        return all(find_recombinations([b], a, None) for a, b in zip(results, run_call(call, nearby), strict=True))
    except SMALL_CAUSES:
        return False


def _make_equal(tensors: Sequence[Tensor], name: str) -> tuple[Tensor, ...] | None:
    """Tensors of one shape and dtype made equal, or all but the last element of the last one; None if none are."""
    made = list(tensors)
    pairs = [
        (i, j)
        for i, t in enumerate(tensors)
        for j in range(i)
        if (t.shape, t.dtype) == (tensors[j].shape, tensors[j].dtype) and t.numel()
    ]
    for i, j in pairs:
        made[i] = made[j].clone()
    if pairs and name == EQUAL_TENSORS[1]:
        last = made[pairs[-1][0]].view(-1)
        last[-1] = ~last[-1] if last.dtype == torch.bool else last[-1] + 1
    return tuple(made) if pairs else None


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
        if not trial.fits(layout, uneven):
            continue
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
    held = [cut_in_parts(t, p, sizes, generator, trial) for t, p in zip(trial.inputs, layout, strict=True)]
    parts = [run_call(call, [h[r] for h in held if h is not None]) for r in range(len(sizes))]
    if any(len(p) != len(trial.results) for p in parts):
        raise ValueError("the parts return a different number of results")
    found = [
        trial.recombinations(k, [p[k] for p in parts], sizes if sharded else None) for k in range(len(trial.results))
    ]
    if any(isinstance(p, Partial) for p in layout):  # what is linear adds up; nothing else follows from addends
        exact = [isinstance(r, Tensor) and not (r.is_floating_point() or r.is_complex()) for r in trial.results]
        found = [
            {p for p in f if not isinstance(p, Partial) or (p.op == "sum" and not e)}
            for f, e in zip(found, exact, strict=True)
        ]
    return found


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
