"""Which strides would the whole tensor have? By them contiguous() and reshape() copy exactly where torch copies.

A local tensor cannot tell: some columns of the whole may be all that a rank has, and contiguous there. So a tensor that
would not be contiguous as a whole has a note (`_dense_strides`), the same on every rank; one without is read as
contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise._torch import no_dispatch_modes, storage_identity

Strides = tuple[int, ...]


def make_stand_in(shape: Sequence[int], strides: Strides | None, dtype: torch.dtype) -> Tensor:
    """A tensor without memory that has the shape and strides of a whole tensor; None stands for contiguous."""
    if strides is None:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device="meta")


def has_format(
    shape: Sequence[int], strides: Strides | None, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    """Whether a whole tensor with these strides is contiguous, in the sense of a memory format.

    >>> has_format((2, 3), None), has_format((2, 3), (1, 2)), has_format((2, 3), (9, 1))
    (True, False, False)
    """
    if strides is None and memory_format is torch.contiguous_format:
        return True
    with no_dispatch_modes():
        return make_stand_in(shape, strides, torch.uint8).is_contiguous(memory_format=memory_format)


def find_strides(made: Tensor) -> Strides | None:
    """The note for a whole tensor of which this is the stand-in."""
    return None if made.is_contiguous() else tuple(made.stride())


def copy_strides(shape: Sequence[int], strides: Strides | None, memory_format: torch.memory_format) -> Strides | None:
    """The note for a copy, in a memory format, of a whole tensor with these strides."""
    with no_dispatch_modes():
        return find_strides(make_stand_in(shape, strides, torch.uint8).clone(memory_format=memory_format))


def can_view(shape: Sequence[int], strides: Strides | None, size: Sequence[int]) -> bool:
    """Whether torch views a whole tensor with these strides in another shape, instead of copying it.

    >>> can_view((2, 3), (1, 2), (6,)), can_view((2, 3), (9, 1), (2, 1, 3))
    (False, True)
    """
    if strides is None:
        return True
    try:
        with no_dispatch_modes():
            make_stand_in(shape, strides, torch.uint8).view(tuple(size))
    except RuntimeError:
        return False
    return True


def copy_if_shared(local: Tensor, source: Tensor) -> Tensor:
    """A tensor that shares no memory with another."""
    shared = storage_identity(local.untyped_storage()) == storage_identity(source.untyped_storage())
    return local.clone() if shared else local
