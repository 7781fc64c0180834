"""One trial of an operator: random inputs, cut in parts, and what the parts' results make together.

All in one process, without communication: part r of a trial is what rank r of one mesh axis would compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.geometry import Partial, Placement, Replicate, Shard
from shardwise.geometry.placements import chunk_sizes
from shardwise.ops.engine.schema import OperatorCall, Slot, written_slots

REDUCTIONS = ("sum", "max", "min", "product")
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
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
    value: Tensor, placement: Placement | None, sizes: Sequence[int], generator: torch.Generator
) -> list[Tensor] | None:
    """What each part holds of a tensor: slices, the whole, or addends that make it up; None if it has no such dim."""
    parts = len(sizes)
    if isinstance(placement, Shard):
        fits = value.shape[placement.dim] == sum(sizes)
        return list(torch.split_with_sizes(value, list(sizes), placement.dim)) if fits else None
    if isinstance(placement, Partial):
        return draw_addends(value, placement.op, parts, generator)
    return [value] * parts


def draw_addends(value: Tensor, op: str, parts: int, generator: torch.Generator) -> list[Tensor]:
    """Random tensors that reduce to a value.

    >>> made = draw_addends(torch.tensor([3.0, -1.0]), "max", 3, torch.Generator().manual_seed(0))
    >>> torch.stack(made).amax(0).tolist()
    [3.0, -1.0]
    """
    noise = [
        torch.rand(value.shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5 for _ in range(parts)
    ]
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
    scale = parts if op == "avg" else 1
    return [*rest, value * scale - sum(rest, torch.zeros_like(value))]


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


def find_recombinations(parts: Sequence[Any], whole: Any, sizes: Sequence[int] | None) -> set[Placement | None]:
    """The placements under which the parts' results are the whole one; {None} for equal values that are not tensors."""
    if not isinstance(whole, Tensor):
        return {None} if all(p == whole for p in parts) else set()
    if any(not isinstance(p, Tensor) or p.dtype != whole.dtype or p.ndim != whole.ndim for p in parts):
        return set()
    return {p for p in _possible_placements(whole) if is_close(_recombine(parts, p, sizes), whole)}


def _possible_placements(whole: Tensor) -> Iterator[Placement]:
    yield Replicate()
    yield from (Shard(d) for d in range(whole.ndim))
    plain = whole.dtype != torch.bool
    yield from (Partial(op) for op in REDUCTIONS if (plain or op in ("max", "min")))


def _recombine(parts: Sequence[Tensor], placement: Placement, sizes: Sequence[int] | None) -> Tensor | None:
    """The whole that parts make under a placement, or None if they do not fit it."""
    if isinstance(placement, Shard):
        fits = sizes is not None and [p.shape[placement.dim] for p in parts] == list(sizes)
        rest = {(*p.shape[: placement.dim], *p.shape[placement.dim + 1 :]) for p in parts}
        return torch.cat(list(parts), placement.dim) if fits and len(rest) == 1 else None
    if any(p.shape != parts[0].shape for p in parts):
        return None
    if isinstance(placement, Replicate):
        return parts[0] if all(is_close(p, parts[0]) for p in parts[1:]) else None
    return reduce_parts(parts, placement.op)


def reduce_parts(parts: Sequence[Tensor], op: str) -> Tensor | None:
    stacked = torch.stack(list(parts))
    if stacked.is_complex() and op in ("max", "min"):
        return None
    if op in ("sum", "avg"):
        return stacked.sum(0, dtype=stacked.dtype) / (len(parts) if op == "avg" else 1)
    if op == "product":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def is_close(one: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors agree up to rounding; not-a-number agrees with itself."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    limit = TOLERANCE.get(other.dtype, COARSE)
    return torch.allclose(one, other, rtol=limit, atol=limit, equal_nan=True)
