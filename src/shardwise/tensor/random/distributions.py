"""From raw numbers to values: what is drawn for an element, and what is made of it.

Values are computed in float32 (float64 for float64 tensors) on blocks of numbers, and then cast. An element's value
depends on the numbers of its block of 32 alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
