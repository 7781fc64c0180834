"""Are two results the same, as far as the order of sums may change them?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

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
