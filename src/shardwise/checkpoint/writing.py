"""Writing the files of one rank from the memory of its tensors, also for element types that NumPy lacks.

Tensors that do not form one run of host memory pass through a buffer of bounded size.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.checkpoint.checksums import BLOCK_BYTES, BlockSums, checksum, split_into_blocks
from shardwise.checkpoint.files import PositionedFile
from shardwise.checkpoint.formats.base import FilePlan, ItemSums, PlannedFile
from shardwise.checkpoint.store import CARRIERS

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.complex128, torch.complex64}
_INTS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8}
_OF_NUMPY = _FLOATS | _INTS | {torch.bool}


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are in host memory as they are."""
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
    """The bytes of a tensor, if they are contiguous in host memory.

    >>> flat_bytes(torch.ones(2, dtype=torch.int16)).tolist(), flat_bytes(torch.ones(2, 2)[:, 0])
    ([1, 0, 1, 0], None)
    """
    if not is_plain(tensor) or not tensor.is_contiguous():
        return None
    return as_array(tensor).reshape(-1).view(np.uint8).data


STAGING_BYTES = 32 << 20


class FileWriter:
    """Writes the items of a planned file in order, straight from the tensors' memory, with checksums on the way.

    `check` is called before each block, and may raise to stop.
    """

    def __init__(self, folder: Path, plan: FilePlan, file: PlannedFile, check: Callable[[], None]) -> None:
        self._plan, self._file, self._check = plan, file, check
        self._output = PositionedFile(folder / file.name, create=True)
        self._sums: list[ItemSums] = []

    def add(self, values: Tensor) -> None:
        """Write the next item; each block is hashed right before it is copied."""
        position = self._file.items[len(self._sums)].begin
        data = flat_bytes(values)
        if data is not None and 0 < len(data) <= BLOCK_BYTES:  # most of a thousand small tensors
            self._check()
            self._output.write(position, data, lasting=True)
            self._sums.append((checksum(data), zlib.crc32(data) if self._plan.crc else 0))
            return
        sums, crc = BlockSums(), 0
        for part in iterate_host_bytes(values):
            self._check()
            sums.update(part)
            crc = zlib.crc32(part, crc) if self._plan.crc else 0
            self._output.write(position, part, lasting=True)
            position += len(part)
        self._sums.append((sums.text(), crc))

    def finish(self) -> list[ItemSums]:
        """Write what surrounds the items, and make all of it last."""
        for position, data in self._plan.finish_file(self._file, self._sums):
            self._output.write(position, data, lasting=True)
        self._output.close()
        return self._sums

    def abandon(self) -> None:
        """Close the file as it is."""
        self._output.close(sync=False)


def iterate_host_bytes(values: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, in parts of at most a block where they are ready in memory."""
    if values.numel() == 0:
        return
    data = flat_bytes(values)
    if data is not None:
        yield from split_into_blocks(data)
        return
    for part in _split_for_staging(values):
        yield from iterate_host_bytes(part.resolve_conj().resolve_neg().to("cpu").contiguous())


def _split_for_staging(values: Tensor) -> Iterator[Tensor]:
    """A tensor in row-major parts of at most the staging size."""
    if values.nbytes <= STAGING_BYTES:
        yield values
        return
    dim = next(d for d, size in enumerate(values.shape) if size > 1)
    half = values.shape[dim] // 2
    yield from _split_for_staging(values.narrow(dim, 0, half))
    yield from _split_for_staging(values.narrow(dim, half, values.shape[dim] - half))
