"""The memory of a tensor on the host as NumPy sees it, also for element types that NumPy lacks.

Writing one rank's boxes: safetensors files, straight from the tensors' memory, with checksums on the way.

Boxes are sorted by the width of their elements, widest first, so that each begins at a multiple of it. Tensors that do
not form one run of host memory pass through a buffer of bounded size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.checkpoint.checksums import BLOCK_BYTES, BlockSums, checksum, split_into_blocks
from shardwise.checkpoint.files import SyncedFile, add_path_to_error
from shardwise.checkpoint.formats.safetensors_header import header_bytes, safetensors_code_and_shape
from shardwise.checkpoint.store import CARRIERS
from shardwise.geometry import DType

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


class FilePart(NamedTuple):
    """Something to store: the key in the file, the dtype, the sizes and their bytes, and the values."""

    key: str
    dtype: DType
    sizes: tuple[int, ...]
    nbytes: int
    values: Tensor


@dataclass(frozen=True, eq=False)
class WrittenFile:
    """A file that was written: its name, length and header, and for each piece the first byte and the checksums."""

    name: str
    bytes: int
    data_start: int
    header_sum: str
    places: list[tuple[int, str]]


def write_file(path: Path, pieces: Sequence[FilePart]) -> WrittenFile:
    """Write one file and make it last."""
    entries = {p.key: (*safetensors_code_and_shape(p.dtype, p.sizes), p.nbytes) for p in pieces}
    header = header_bytes(entries, len(pieces))
    places: list[tuple[int, str]] = []
    position = len(header)
    with Sink(path) as sink:
        sink.write(memoryview(header))
        for piece in pieces:
            places.append((position, _write_file_part(sink, piece)))
            position += piece.nbytes
    return WrittenFile(path.name, position, len(header), checksum(header), places)


def _write_file_part(sink: Sink, piece: FilePart) -> str:
    """Append the bytes of a piece, and return the checksums of its blocks; each is hashed right before it is copied."""
    data = flat_bytes(piece.values)
    if data is not None and 0 < len(data) <= BLOCK_BYTES:
        sink.write(data)
        return checksum(data)
    sums = BlockSums()
    for part in iterate_host_bytes(piece.values):
        sums.update(part)
        sink.write(part)
    return sums.text()


class Sink(SyncedFile):
    """A new file: small writes are collected, large ones go straight through; synced when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._small = bytearray()

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        if len(data) + len(self._small) <= BLOCK_BYTES // 4:
            self._small += data
            return
        self._flush()
        self._put(data)

    def _flush(self) -> None:
        data, self._small = self._small, bytearray()
        self._put(memoryview(data))

    def _put(self, data: memoryview) -> None:
        with add_path_to_error(self._path):
            while len(data):
                data = data[os.write(self._handle, data[: 1 << 30]) :]


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
