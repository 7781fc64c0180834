"""The memory of a tensor on the host as NumPy sees it, also for element types that NumPy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.checkpoint.store import CARRIERS

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.complex128, torch.complex64}
_INTS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8}
_OF_NUMPY = _FLOATS | _INTS | {torch.bool}


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements of a tensor lie on the host as they are."""
    return tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """The memory of a plain tensor: unsigned numbers of its elements' width.

    >>> as_array(torch.ones(2, 2, dtype=torch.bfloat16)).tolist()
    [[16256, 16256], [16256, 16256]]
    """
    itemsize = tensor.dtype.itemsize
    if tensor.dtype not in _OF_NUMPY:
        tensor = tensor.view(_CARRIERS[itemsize])
    array: npt.NDArray[Any] = tensor.numpy()
    return array.view(CARRIERS[itemsize])


def flat_bytes(tensor: Tensor) -> memoryview | None:
    """The bytes of a tensor, if they lie on the host in one run.

    >>> flat_bytes(torch.ones(2, dtype=torch.int16)).tolist(), flat_bytes(torch.ones(2, 2)[:, 0])
    ([1, 0, 1, 0], None)
    """
    if not is_plain(tensor) or not tensor.is_contiguous():
        return None
    return as_array(tensor).reshape(-1).view(np.uint8).data
