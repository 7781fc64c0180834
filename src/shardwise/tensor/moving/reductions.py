"""The arithmetic of pending reductions on local tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.geometry import Reduction

LOW_PRECISION_BYTES = 2
_LARGEST_WHOLE = 2**63 - 1024  # the largest float64 that is an int64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms are combined: float32 for floats of 2 bytes and less.

    >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.int64)
    (torch.float32, torch.int64)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize <= LOW_PRECISION_BYTES else dtype


def reduction_identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing when it is combined.

    >>> kinds = ("sum", torch.float32), ("max", torch.int8), ("min", torch.float64)
    >>> tuple(reduction_identity(*kind) for kind in kinds)
    (0, -128, inf)
    """
    if op in ("sum", "product"):
        return int(op == "product")
    sign = 1 if op == "min" else -1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return sign * (float("inf") if not _is_finite_only(dtype) else torch.finfo(dtype).max)
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min


def _is_finite_only(dtype: torch.dtype) -> bool:
    """Whether a dtype has no infinity."""
    return dtype.itemsize == 1 and dtype != torch.float8_e5m2


def combine_term(op: str, target: Tensor, part: Tensor) -> None:
    """Combine a term into the target, in place."""
    if part.dtype != target.dtype and part.dtype.itemsize < LOW_PRECISION_BYTES:
        part = part.to(target.dtype)  # torch promotes the others itself, on a GPU without a pass of its own
    if op == "sum":
        target.add_(part)
    elif op == "product":
        target.mul_(part)
    else:
        (torch.minimum if op == "min" else torch.maximum)(target, part, out=target)


def rescale(target: Tensor, scale: tuple[int, int]) -> None:
    """Multiply by a fraction, in place and with one rounding; `check_reducible` has refused what it cannot do."""
    if scale == (1, 1):
        return
    wide = target.to(accumulation_dtype(target.dtype))
    if scale[0] != 1:
        wide.mul_(scale[0])
    if scale[1] != 1:
        wide.div_(scale[1])
    if wide is not target:
        target.copy_(wide)


def check_reducible(op: str, divisor: int, dtype: torch.dtype) -> None:
    """Raise unless this kind of reduction is possible on this dtype."""
    if dtype == torch.bool and op in ("sum", "product"):
        raise ValueError(
            f"a pending {op} of bool values is not defined; use Partial('max') for any, Partial('min') for all"
        )
    if dtype.is_complex and op in ("min", "max"):
        raise ValueError(f"a pending {op} of complex values ({dtype}) is not defined; use Partial('sum')")
    if divisor != 1 and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"a pending average of {dtype} values does not stay in {dtype}; convert to a floating dtype first"
        )


def _keeps_order(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether of two values the smaller one is converted to the smaller one, or both to one."""
    if new.is_floating_point or old == torch.bool:
        return True
    if new == torch.bool:
        return False
    if old.is_floating_point:
        return torch.iinfo(new).min < 0
    return torch.iinfo(new).min <= torch.iinfo(old).min and torch.iinfo(new).max >= torch.iinfo(old).max


def check_conversion(pending: Reduction | None, old: torch.dtype, new: torch.dtype) -> None:
    """Raise if converting addends is not converting the value: rounding to whole numbers, losing a part or the order.

    >>> check_conversion(Reduction("max"), torch.float32, torch.int64)
    >>> check_conversion(None, torch.float32, torch.int64)
    """
    if pending is None or old == new:
        return
    if pending.op in ("min", "max"):
        same = new.is_complex or _keeps_order(old, new)  # complex numbers have no order: the reduction itself raises
    else:
        fractions = (old.is_floating_point or old.is_complex) and not (new.is_floating_point or new.is_complex)
        same = not fractions and new != torch.bool
    if same:
        return
    raise ValueError(
        f"addends of a pending {pending} converted from {old} to {new} do not yield the converted value; "
        "redistribute to Shard or Replicate first"
    )


def limit_addend(addend: Tensor, pending: Reduction | None, new: torch.dtype) -> Tensor:
    """An addend of a pending minimum or maximum that can be converted: where nothing is reduced it is infinite.

    As a whole number it becomes the largest or smallest one, to which infinity is not converted.

    >>> limit_addend(torch.tensor(float("inf")), Reduction("min"), torch.int8)
    tensor(127., dtype=torch.float64)
    """
    if pending is None or pending.op not in ("min", "max") or not addend.is_floating_point():
        return addend
    if new.is_floating_point or new.is_complex or new == torch.bool:
        return addend
    limits = torch.iinfo(new)
    return addend.double().clamp(limits.min, min(limits.max, _LARGEST_WHOLE))
