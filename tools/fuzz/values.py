"""What do the inputs of a program hold, how are they put on the ranks, and are two results the same?

1. A tensor is filled from a generator seeded by the round and the input's name, so every rank makes the same one.
2. Most values are small whole numbers: sums and products of them are exact in any order, so ties stay ties.
3. A pending reduction gets addends that reduce to the values exactly; all but the first are drawn.
4. Results may differ as far as the order of sums changes them in the coarsest dtype of the program.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise import Comm, MeshSpec, Partial, Replicate, ShardedTensor, from_local, parse_spec, shard
from shardwise.comm.local import default_device
from tools.fuzz.program import Input, Round

Place = Callable[[Input, Tensor, Round], Tensor]


def fill(item: Input, seed: int) -> Tensor:
    """The whole tensor of an input, not on the tape."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {item.name}".encode()))
    dtype: torch.dtype = getattr(torch, item.dtype)
    kind, _, bound = item.fill.partition(":")
    if kind == "normal":
        return torch.randn(item.shape, generator=generator, dtype=dtype, device="cpu").to(default_device())
    low, high = {"index": (0, int(bound or 1)), "positive": (1, 5)}.get(kind, (-4, 5))
    if dtype == torch.bool:
        low, high = 0, 2
    shape = () if kind == "constant" else item.shape
    values = torch.randint(low, high, shape, generator=generator, device="cpu").to(dtype)
    if dtype.is_complex:
        values = values + 1j * torch.randint(low, high, shape, generator=generator, device="cpu")
    return values.to(default_device(), dtype).expand(item.shape).clone()


def make_inputs(inputs: tuple[Input, ...], round_: Round, place: Place) -> dict[str, Tensor]:
    """The tensors of a round by name; names that are aliases get one and the same tensor."""
    tape = round_.mode not in ("no_grad", "inference")
    made: dict[str, Tensor] = {}
    for item in inputs:
        tensor = place(item, fill(item, round_.seed), round_)
        made[item.name] = tensor.requires_grad_() if item.requires_grad and tape else tensor
    for one, other in round_.aliases:
        made[one] = made[other]
    return made


def whole(item: Input, values: Tensor, round_: Round) -> Tensor:
    """An input for the run on whole tensors."""
    return values


def on_ranks(comm: Comm) -> Place:
    """A function that lays an input out over the ranks."""

    def place(item: Input, values: Tensor, round_: Round) -> ShardedTensor:
        spec = parse_spec(item.spec)
        if isinstance(spec, MeshSpec) and any(isinstance(p, Partial) for p in spec.placements):
            return _pending(item, spec, values, round_.seed, comm)
        return shard(values, spec, None).detach()

    return place


def _pending(item: Input, spec: MeshSpec, values: Tensor, seed: int, comm: Comm) -> ShardedTensor:
    """A tensor with a pending reduction: each addend is laid out, and a rank keeps the parts of its own."""
    held = MeshSpec(spec.mesh, [Replicate() if isinstance(p, Partial) else p for p in spec.placements], spec.order)
    axes = [a for a, p in zip(spec.mesh.axes, spec.placements, strict=True) if isinstance(p, Partial)]
    op = next(p.op for p in spec.placements if isinstance(p, Partial))
    count = 1
    for axis in axes:
        count *= spec.mesh.axis_size(axis)
    parts = [shard(addend, held, None).local_tensors() for addend in addends(values, op, count, seed)]
    mine = 0
    if comm.rank in spec.mesh.ranks:
        at: Mapping[str, int] = spec.mesh.coordinates(comm.rank)
        for axis in axes:
            mine = mine * spec.mesh.axis_size(axis) + at[axis]
    return from_local([part.detach().clone() for part in parts[mine]], spec, item.shape)


def addends(values: Tensor, op: str, count: int, seed: int) -> list[Tensor]:
    """Tensors whose reduction is `values`, without rounding where the values are whole numbers.

    >>> torch.stack(addends(torch.tensor([3.0, -1.0]), "avg", 2, seed=0)).mean(0)
    tensor([ 3., -1.])
    """
    generator = torch.Generator().manual_seed(seed + 1)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, values.shape, generator=generator, device="cpu").to(values)

    if op in ("min", "max"):
        if values.dtype == torch.bool:
            others = [values | draw(0, 2) if op == "min" else values & draw(0, 2) for _ in range(count - 1)]
        else:
            sign = 1 if op == "min" else -1
            others = [values + sign * draw(0, 3) for _ in range(count - 1)]
        return [values, *others]
    if op == "product":
        others = [1 - 2 * draw(0, 2) for _ in range(count - 1)]
        first = values.clone()
        for other in others:
            first = first * other
        return [first.to(values.dtype), *others]
    others = [draw(-4, 5) for _ in range(count - 1)]
    total = values * count if op == "avg" else values
    return [total - sum(others) if others else total, *others]


EXACTLY = 1e-7
NEAR = {torch.float64: EXACTLY, torch.complex128: EXACTLY, torch.float32: 2e-3, torch.complex64: 2e-3}
LOW = 0.15


def tolerance(values: Iterable[Any], autocast: bool = False) -> float:
    """How far results may be apart, relative to the largest: as far as the coarsest of the floating dtypes asks for."""
    dtypes = {v.dtype for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())}
    return LOW if autocast else max((NEAR.get(dtype, LOW) for dtype in dtypes), default=EXACTLY)


def difference(found: Any, wanted: Any, near: float = EXACTLY) -> str | None:
    """What differs, in words, or None.

    >>> difference(torch.ones(2), torch.tensor([1.0, 2.0]))
    '1 of 2 elements, by at most 1'
    >>> difference(torch.ones(2), torch.ones(3))
    'shape (2,), expected (3,)'
    """
    if isinstance(wanted, tuple | list):
        if not isinstance(found, tuple | list) or len(found) != len(wanted):
            return f"{type(found).__name__}, expected {len(wanted)} values"
        return next(filter(None, (difference(f, w, near) for f, w in zip(found, wanted, strict=True))), None)
    if not isinstance(wanted, Tensor):
        return _other(found, wanted, near)
    if not isinstance(found, Tensor):
        return f"{type(found).__name__}, expected a tensor"
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"dtype {found.dtype}, expected {wanted.dtype}"
    if found.requires_grad != wanted.requires_grad:
        return f"requires_grad {found.requires_grad}, expected {wanted.requires_grad}"
    return _numbers(found.detach().resolve_conj().resolve_neg(), wanted.detach().resolve_conj().resolve_neg(), near)


def _other(found: Any, wanted: Any, near: float) -> str | None:
    if isinstance(wanted, float) and isinstance(found, float):
        one, other = (torch.tensor(v, dtype=torch.float32, device="cpu") for v in (found, wanted))
        return difference(one, other, near)
    return None if type(found) is type(wanted) and found == wanted else f"{found!r}, expected {wanted!r}"


def _numbers(found: Tensor, wanted: Tensor, near: float) -> str | None:
    if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
        bad = found != wanted
        return f"{int(bad.sum())} of {bad.numel()} elements" if bad.any() else None
    found, wanted = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (found, wanted))
    finite = wanted[wanted.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    bad = ~torch.isclose(found, wanted, rtol=0.0, atol=near * scale, equal_nan=True)
    if not bad.any():
        return None
    return f"{int(bad.sum())} of {bad.numel()} elements, by at most {float((found - wanted).abs()[bad].max()):.3g}"


def loss_of(values: Iterable[Any]) -> Tensor:
    """A weighted sum of every element that is on the tape; the weights are small whole numbers and differ."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for value in values:
        if isinstance(value, tuple | list):
            total = total + loss_of(value)
        elif isinstance(value, Tensor) and value.requires_grad:
            weights = (torch.arange(value.numel(), dtype=torch.float64, device=value.device) % 5 - 1).reshape(
                value.shape
            )
            total = total + ((value.real + 2 * value.imag if value.is_complex() else value) * weights).sum()
    return total
